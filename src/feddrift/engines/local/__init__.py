"""Engines whose clients run in this process, and the plain reference implementation of local training."""

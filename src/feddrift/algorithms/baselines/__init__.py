"""Baselines: the methods that the FedDrift paper compares with, local and fine-tuned models, and the oracle."""

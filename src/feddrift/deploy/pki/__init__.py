"""Certificates of a deployment, the keys of its clients, and the signature of its application."""

"""Monitoring of a deployment: its status, alerts and audit log, metrics for Prometheus, status page and log files."""

"""Watch a deployment: its status, alerts and audit log, metrics for Prometheus, the status page, and log files."""

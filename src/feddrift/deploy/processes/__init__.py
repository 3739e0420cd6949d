"""The operating-system processes of a deployment: start, supervise, log and stop them."""

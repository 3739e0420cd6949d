"""Methods that were published after the FedDrift paper, written for this package."""

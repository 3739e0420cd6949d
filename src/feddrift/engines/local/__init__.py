"""Base of the engines whose clients are in this process, and the reference implementation in plain loops."""

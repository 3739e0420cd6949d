"""Base of the engines whose clients run in this process, and the reference implementation in plain loops."""

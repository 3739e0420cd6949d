"""A federation on real machines: the files an operator needs, what is wrong with them, and the processes."""

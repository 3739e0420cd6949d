"""The version, in a module of its own that imports nothing else."""

__version__ = "0.3.0"

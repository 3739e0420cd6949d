"""The version, alone, so that whoever records it imports nothing else."""

__version__ = "0.3.0"

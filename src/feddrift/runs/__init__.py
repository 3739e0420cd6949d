"""Runs on disk: their configuration, records and checkpoints, updates, exports, and sweeps over grids."""

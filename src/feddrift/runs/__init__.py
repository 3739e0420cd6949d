"""Runs on disk: configured, recorded, stopped and gone on with, swept over grids."""

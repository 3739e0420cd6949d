"""Conversion of tables with named columns to streams, with NumPy only; `streams/table.py` reads files."""

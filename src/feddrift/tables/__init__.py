"""Tables: from named columns to what every client receives over time. NumPy only; `streams/table.py` reads files."""

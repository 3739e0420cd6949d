"""What records say: numbers, tables, pictures and a page."""

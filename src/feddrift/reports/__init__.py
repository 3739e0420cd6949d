"""Reports of records: numbers, tables, pictures, a page, and the transfer to experiment trackers."""

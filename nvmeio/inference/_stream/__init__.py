"""A stream while it is open: what modules show, what is in memory, and who uses it."""

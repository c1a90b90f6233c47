"""A stream while it is open: what is in memory, and who uses it."""

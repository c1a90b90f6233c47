"""One step: what is read, computed and written."""

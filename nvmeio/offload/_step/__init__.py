"""One step of an optimizer: what is read, computed (`arithmetic`) and written."""

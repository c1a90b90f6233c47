"""Files below a transfer: descriptors, direct I/O, mounts, the page cache."""

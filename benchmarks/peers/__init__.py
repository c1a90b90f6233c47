"""One file per peer. Those that run in a worker process are classes with a `close()`."""

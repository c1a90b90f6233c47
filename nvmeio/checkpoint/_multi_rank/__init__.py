"""Several ranks that save or load one checkpoint."""

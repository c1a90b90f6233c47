"""Several ranks that stream one model."""

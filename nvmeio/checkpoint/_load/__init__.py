"""Loading: what is asked for, the bytes, the objects."""

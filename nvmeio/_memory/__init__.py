"""Memory: mappings, whose addresses they are, tensors over them, devices."""

"""The parameters of a swapped module, and the windows that they come through."""

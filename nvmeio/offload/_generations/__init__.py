"""Generations of state: the complete one, and the current state in it."""

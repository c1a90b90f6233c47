"""Generations of state: which is complete, and what is current in it."""

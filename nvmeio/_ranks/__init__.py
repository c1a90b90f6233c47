"""Ranks: who is there, what they tell each other, bytes from one to the others."""

"""A swapped optimizer: its parameters, their pieces, its state, and what a step computes."""

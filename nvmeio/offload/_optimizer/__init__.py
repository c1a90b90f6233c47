"""A swapped optimizer: its parameters, their pieces, its state, and its steps."""

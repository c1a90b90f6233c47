"""A swapped optimizer around its steps: its parameters, their pieces, its state; see `_step`."""

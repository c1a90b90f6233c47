"""Gradients on the drive: where they lie, and what stays in memory of them."""

"""The saves of a `Checkpointer`: one after another, their files, and the way back."""

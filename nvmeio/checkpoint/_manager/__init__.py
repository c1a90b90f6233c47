"""The saves of a `Checkpointer`: one after another, and their files."""

"""The directory of a `Checkpointer`: its files and their names, and which of them stay."""

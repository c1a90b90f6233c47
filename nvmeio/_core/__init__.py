"""The life of an operation: what it moves, who is told, how it ends."""

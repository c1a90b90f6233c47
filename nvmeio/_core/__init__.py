"""The life of an operation: its bytes, its waiters, its end."""

"""A configuration in DeepSpeed's words: its keys, what it names, and what is refused of it."""

"""A configuration in DeepSpeed's words: its keys, its objects, and refused settings."""

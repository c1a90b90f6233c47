"""Swap directories and the spans of their files."""

"""Swap directories, the spans of their files, and what moves between these and memory."""

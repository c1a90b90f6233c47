"""Swap directories: their manifests, the spans of their files, and transfers to and from memory."""

"""Saving at once: torch archives and safetensors files."""

"""Checkpoints: torch and safetensors files at the speed of the drive."""

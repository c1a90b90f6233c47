"""Packed models: format, checksums, drives, quantisation."""

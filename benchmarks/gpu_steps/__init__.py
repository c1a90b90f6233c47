"""Steps of gpu_check.py, by part: alive (A), correctness (B), cufile (C), speed (D)."""

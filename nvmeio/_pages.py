"""Arithmetic with pages, and with whatever else bytes are aligned to."""

from __future__ import annotations

import mmap

PAGE_BYTES = mmap.PAGESIZE
TENSOR_ALIGNMENT = 64  # of torch's own CPU tensors, in bytes


def round_up(value: int, multiple: int) -> int:
    """The next multiple from a value on."""
    return -(-value // multiple) * multiple


def round_down(value: int, multiple: int) -> int:
    """The last multiple up to a value."""
    return value // multiple * multiple

"""Where records of one length lie in a file, and how many it holds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from nvmeio import _checks


class RecordLayout(NamedTuple):
    """Where records lie."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    file_offset: int
    stride: int

    def end(self, count: int) -> int:
        """The size of a file that holds so many."""
        return self.file_offset + ((count - 1) * self.stride + self.nbytes if count else 0)

    def held(self, size: int) -> int:
        """How many a file of this size holds."""
        return max(0, (size - self.file_offset - self.nbytes) // self.stride + 1)


def record_layout(
    dtype: torch.dtype, shape: int | Sequence[int], file_offset: int, stride_bytes: int | None
) -> RecordLayout:
    """The layout that the arguments describe; TypeError or ValueError if they describe none."""
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype, not {dtype!r:.80}")
    if str(dtype).startswith(("torch.q", "torch.bits")):
        raise TypeError(f"records are not of {dtype}: read them as torch.uint8, and view() them")
    sizes = tuple(shape) if isinstance(shape, Sequence) else (shape,)
    sizes = tuple(_checks.integer("a size in shape", each, 1) for each in sizes)
    nbytes = math.prod(sizes) * dtype.itemsize
    stride = nbytes
    if stride_bytes is not None:
        stride = _checks.integer("stride_bytes", stride_bytes, 1)
    return RecordLayout(
        dtype, sizes, nbytes, _checks.integer("file_offset", file_offset, 0), stride
    )


def record_count(path: str, layout: RecordLayout, size: int, count: int | None) -> int:
    """How many records there are, if the file agrees."""
    held = layout.held(size)
    if count is not None:
        if _checks.integer("count", count, 0) > held:
            raise ValueError(f"{path} has {size} bytes, which hold {held} records, not {count}")
        return count
    if size < layout.file_offset:
        raise ValueError(f"{path} has {size} bytes, and ends before byte {layout.file_offset}")
    over = size - layout.end(held)
    padding = layout.stride - layout.nbytes if held else 0
    if over not in (0, padding):
        raise ValueError(
            f"{path} has {size} bytes: {held} records of {layout.nbytes} bytes from byte "
            f"{layout.file_offset} on, and {over} bytes more. Check dtype, shape, file_offset and "
            f"stride_bytes; count={held} leaves the rest out"
        )
    return held

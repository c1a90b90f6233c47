"""Tensors over spans of files; nothing is read before somebody looks at an element."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence

import torch

from nvmeio import files
from nvmeio._io.drives import FileSpan
from nvmeio._memory import system
from nvmeio._pages import PAGE_BYTES, round_down

_MAP_FIXED = 0x10
_FAILED = ctypes.c_void_p(-1).value


def file_tensor(
    parts: Sequence[FileSpan],
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...] = (),
) -> torch.Tensor:
    """One tensor over parts of files, end to end, in order.

    Its pages are those of the page cache, read when they are looked at and given up when memory is
    short. A change of the tensor stays in memory; a change of the file shows in the tensor.
    `strides` are without gaps, () for row-major order.

    Cost: no memory where all parts but the last are whole pages on page boundaries; else a copy.

    Source: man 2 mmap, MAP_PRIVATE and MAP_FIXED.
    """
    total = sum(each.nbytes for each in parts)
    if not total:
        return torch.empty(shape, dtype=dtype)
    if not _maps(parts):
        return _shaped(_copied(parts, dtype), shape, strides)
    lead = parts[0].file_offset % PAGE_BYTES
    room = mmap.mmap(-1, lead + total)
    at = ctypes.addressof(ctypes.c_char.from_buffer(room))
    for each in parts:
        start = round_down(each.file_offset, PAGE_BYTES)
        nbytes = each.nbytes + each.file_offset - start
        with files.in_use(each.file) as opened:
            found = system.libc.mmap(
                at,
                nbytes,
                mmap.PROT_READ | mmap.PROT_WRITE,
                mmap.MAP_PRIVATE | _MAP_FIXED,
                opened.any_fd(),
                start,
            )
            if found in (None, _FAILED):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        at += nbytes
    # The object owns the addresses, and with them what was mapped over them since.
    flat = torch.frombuffer(room, dtype=dtype, count=total // dtype.itemsize, offset=lead)
    return _shaped(flat, shape, strides)


def _shaped(flat: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    return flat.as_strided(shape, strides) if strides else flat.view(shape)


def _maps(parts: Sequence[FileSpan]) -> bool:
    inner = all(each.nbytes % PAGE_BYTES == 0 for each in parts[:-1])
    return len(parts) == 1 or (inner and all(each.file_offset % PAGE_BYTES == 0 for each in parts))


def _copied(parts: Sequence[FileSpan], dtype: torch.dtype) -> torch.Tensor:
    data = bytearray(sum(each.nbytes for each in parts))
    at = 0
    for each in parts:
        if not each.nbytes:
            continue
        start = round_down(each.file_offset, PAGE_BYTES)
        lead = each.file_offset - start
        # Not read(2), which takes no such offsets where the descriptor is for direct I/O.
        nbytes, access = lead + each.nbytes, mmap.ACCESS_READ
        with (
            files.in_use(each.file) as opened,
            mmap.mmap(opened.any_fd(), nbytes, access=access, offset=start) as mapped,
        ):
            data[at : at + each.nbytes] = mapped[lead:nbytes]
        at += each.nbytes
    return torch.frombuffer(data, dtype=dtype)

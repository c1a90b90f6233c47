"""Memory that is write-protected, for the tests of it."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import torch

from nvmeio._memory.copy_on_write import WriteProtection, whole_pages
from nvmeio._memory.mappings import Mapping
from nvmeio._pages import PAGE_BYTES, round_up

MIB = 1 << 20

_MADV_DONTNEED = 4
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def numbers(nbytes: int, seed: int = 0) -> torch.Tensor:
    """Bytes in torch's own memory."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (nbytes,), dtype=torch.uint8, generator=generator)


def protect(
    *tensors: torch.Tensor, arena: int = 64 * MIB, directory: str | Path = "/tmp"
) -> WriteProtection:
    made = WriteProtection([(t.data_ptr(), t.nbytes) for t in tensors], str(directory))
    assert made.taken == [True] * len(tensors)
    assert made.protect(Mapping(arena) if arena else None)
    return made


def read(protection: WriteProtection, tensor: torch.Tensor, piece: int = 3 * MIB) -> torch.Tensor:
    """All bytes of a range, in order."""
    copy = torch.empty_like(tensor)
    for offset in range(0, tensor.nbytes, piece):
        nbytes = min(piece, tensor.nbytes - offset)
        protection.read(tensor.data_ptr() + offset, nbytes, copy.data_ptr() + offset, None)
    return copy


def advise(tensor: torch.Tensor, advice: int) -> bool:
    """About the whole pages of a tensor's memory; whether the kernel takes it."""
    first = round_up(tensor.data_ptr(), PAGE_BYTES)
    return int(_libc.madvise(first, whole_pages(tensor.data_ptr(), tensor.nbytes), advice)) == 0


def give_away(tensor: torch.Tensor) -> None:
    """Have the kernel take a tensor's pages: it reads as zeros."""
    assert advise(tensor, _MADV_DONTNEED)


def page_tables_tell() -> bool:
    """Whether the kernel can be asked for written pages (PAGEMAP_SCAN); Linux 6.7."""
    release = os.uname().release.split(".")
    return (int(release[0]), int(release[1])) >= (6, 7)

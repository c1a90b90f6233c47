"""What the kernel's page cache holds already: asked with cachestat(2), and copied from there.

nvmeio reads direct and leaves the cache alone. But a file that was just written or downloaded may
be in it, and then a processor brings some of the bytes while the drive brings others.
"""

from __future__ import annotations

import ctypes
import os

import torch

from nvmeio._files.plan import PAGE_BYTES
from nvmeio._shim import memory_at

_CACHESTAT = 451  # the number of the system call on every architecture; Linux 6.5


class _Range(ctypes.Structure):
    _fields_ = [("off", ctypes.c_uint64), ("len", ctypes.c_uint64)]


class _Counts(ctypes.Structure):
    """`struct cachestat` of linux/mman.h, in pages."""

    _fields_ = [
        ("cached", ctypes.c_uint64),
        ("dirty", ctypes.c_uint64),
        ("writeback", ctypes.c_uint64),
        ("evicted", ctypes.c_uint64),
        ("recently_evicted", ctypes.c_uint64),
    ]


def is_cached(fd: int, start: int, nbytes: int) -> bool:
    """Whether the page cache holds all of a span of a file.

    False as well where it cannot be told: before Linux 6.5, on a file system that does not say, or
    where a sandbox forbids the call.

    Cost: microseconds; nothing is read.
    """
    if nbytes <= 0:
        return False
    span, counts = _Range(start, nbytes), _Counts()
    if _syscall(_CACHESTAT, fd, ctypes.byref(span), ctypes.byref(counts), 0) != 0:
        return False
    pages = (start + nbytes - 1) // PAGE_BYTES - start // PAGE_BYTES + 1
    return bool(counts.cached >= pages)


def copy_cached(fd: int, start: int, memory: torch.Tensor) -> bool:
    """Fill memory from a span of a file through the page cache.

    Args:
        fd: A descriptor without O_DIRECT.
        start: First byte in the file.
        memory: Contiguous CPU tensor of any dtype; all of its bytes are filled.

    Returns:
        Whether it is filled; False after an error or at the end of the file, whatever was copied.

    Cost: blocks for a copy in memory, without the GIL; for reads where pages have gone meanwhile.
    """
    room = memory_at(memory.data_ptr(), memory.nbytes)
    at = 0
    while at < memory.nbytes:
        try:
            got = os.preadv(fd, [room[at:]], start + at)
        except OSError:
            return False
        if not got:
            return False
        at += got
    return True


_syscall = ctypes.CDLL(None, use_errno=True).syscall
_syscall.restype = ctypes.c_long

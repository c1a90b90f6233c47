"""The memory of a device that is not there: what tensors show, and what kernels work on.

The addresses that tensors show are not those of their bytes. Nothing of ours may go there, and
whatever does harms nobody: it finds zeros, and what it leaves is never looked at. The kernel knows
which of these pages were touched, and a test that has touched one fails with the tensor's name.
"""

from __future__ import annotations

import ctypes
import functools
import mmap

import torch

from nvmeio._bindings import memory_at

NBYTES = 256 << 20  # addresses; memory only as far as it is used
_SHARED_NO_ROOM_ASIDE = 0x21 | 0x4000  # MAP_SHARED | MAP_ANONYMOUS, MAP_NORESERVE
_PRIVATE_NO_ROOM_ASIDE = 0x22 | 0x4000
_DONTNEED = 4
_NOHUGEPAGE = 15
_MAY_MOVE = 1


class Addresses:
    """One range of them for tensors, and another one for the bytes."""

    def __init__(self) -> None:
        self.shown = _map(_PRIVATE_NO_ROOM_ASIDE)
        self._inside = _map(_SHARED_NO_ROOM_ASIDE)
        # A page is touched alone: which tensor it was is to be said.
        _libc.madvise(ctypes.c_void_p(self.shown), ctypes.c_size_t(NBYTES), _NOHUGEPAGE)
        self.inside = torch.frombuffer(memory_at(self._inside, NBYTES), dtype=torch.uint8)

    def touched(self) -> list[int]:
        """Where pages begin that the CPU has read or written at the addresses of tensors."""
        seen = (ctypes.c_ubyte * (NBYTES // mmap.PAGESIZE))()
        size = ctypes.c_size_t(NBYTES)
        assert _libc.mincore(ctypes.c_void_p(self.shown), size, seen) == 0, "mincore"
        if not any(bytes(seen)):
            return []
        return [page * mmap.PAGESIZE for page, state in enumerate(seen) if state & 1]

    def forget(self, used: int) -> None:
        """What was touched, and what was stored in the first bytes."""
        _libc.madvise(ctypes.c_void_p(self.shown), ctypes.c_size_t(NBYTES), _DONTNEED)
        self.inside[:used] = 0xFF


def _map(flags: int) -> int:
    address: int | None = _libc.mmap(None, ctypes.c_size_t(NBYTES), 3, flags, -1, ctypes.c_long(0))
    assert address not in (None, -1), "no addresses"
    return address


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p


@functools.cache
def addresses() -> Addresses:
    """Those of this process: a tensor may outlive its test."""
    return Addresses()


def bare(host: torch.Tensor) -> torch.Tensor:
    """The same bytes, which a copy that is under way does not keep."""
    assert host.is_contiguous()
    flat = torch.frombuffer(memory_at(host.data_ptr(), host.nbytes), dtype=host.dtype)
    return flat.view(host.shape)

"""CRC-32 of memory, as zip files carry it.

ISA-L (the `isal` package) computes 27 GB/s on one core here, zlib 4, and lets go of the GIL, so
that the sum is made beside the transfer of the same bytes and costs it nothing. If bytes are copied
in any case, the same loop sums them (`copy`), at the 10 GB/s of the copy.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from isal import isal_zlib

from nvmeio._bindings import lib, memory_at

CAN_COPY = bool(lib.nv_can_copy_crc32())  # what x86-64 has had since 2010, and others have not


# The CRC-32 of bytes, going on from a second argument. It is the C function itself: there may be
# thousands of tensors, and each is a call.
of_bytes: Callable[..., int] = isal_zlib.crc32


def of_memory(address: int, nbytes: int, crc: int = 0) -> int:
    """The CRC-32 of memory, going on from `crc`; the caller keeps it alive."""
    return of_bytes(memory_at(address, nbytes), crc) if nbytes else crc


def of_tensor(tensor: torch.Tensor, crc: int = 0) -> int:
    """The CRC-32 of a contiguous CPU tensor's bytes, going on from `crc`."""
    return of_memory(tensor.data_ptr(), tensor.nbytes, crc)


def copy(to: int, address: int, nbytes: int, crc: int = 0) -> int:
    """Copy memory, and give the CRC-32 of what was copied, going on from `crc`; no GIL held.

    The caller keeps both alive; they do not overlap. The sum costs nothing beside the copying.
    """
    if CAN_COPY:
        found: int = lib.nv_copy_crc32(to, address, nbytes, crc)
        return found
    ctypes.memmove(to, address, nbytes)
    return of_memory(to, nbytes, crc)


def combine(first: int, second: int, second_nbytes: int) -> int:
    """The CRC-32 of two pieces joined, from that of each and the length of the second."""
    return isal_zlib.crc32_combine(first, second, second_nbytes)

"""Memory that is write-protected, for the tests of it."""

from __future__ import annotations

from pathlib import Path

import torch

from nvmeio._memory.copy_on_write import WriteProtection
from nvmeio._memory.mappings import Mapping

MIB = 1 << 20


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

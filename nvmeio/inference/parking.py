"""Parameters in a mapped file: memory that the kernel can write to the drive when it needs room.

Where a model is loaded before it is spilled, its parameters have to lie somewhere meanwhile. Pages
of a file that is mapped for all to see are not the process's own: they can go to the drive and
come back. The file has no name; its blocks are free again when the last tensor on it goes.

Sources: man 2 mmap (MAP_SHARED), man 2 madvise (MADV_DONTNEED), man 2 msync.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Sequence

import torch

from nvmeio._files.plan import TENSOR_ALIGNMENT, round_up
from nvmeio._storage.durable import reserve


def park(parameters: Sequence[torch.Tensor], directory: str | os.PathLike[str]) -> mmap.mmap | None:
    """Move parameters' data into a file.

    Args:
        parameters: Each gets other data, of the same values, shape and strides, in host memory.
        directory: Where the file goes.

    Returns:
        The mapping, for `put_out`; the tensors keep it alive. None where there are no bytes.

    Raises:
        TransferError: The disk has no room for them; they are as they were.
        OSError: The file cannot be made.
    """
    places, end = [], 0
    for parameter in parameters:
        places.append(end)
        end += round_up(_extent(parameter), TENSOR_ALIGNMENT)
    if not end:
        return None
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        # Room that is not there would be a SIGBUS later, when the pages are written out.
        reserve(file.fileno(), end, os.fspath(directory))
        mapping = mmap.mmap(file.fileno(), end)
    memory = torch.frombuffer(mapping, dtype=torch.uint8)
    for parameter, start in zip(parameters, places, strict=True):
        room = memory[start : start + _extent(parameter)].view(parameter.dtype)
        data = room.as_strided(parameter.shape, parameter.stride())
        data.copy_(parameter.data)
        parameter.data = data
    return mapping


def put_out(mapping: mmap.mmap) -> None:
    """Write its pages to the drive and let go of them; they come back when they are touched.

    Others may write to the tensors meanwhile.

    Raises:
        OSError: The drive failed; the bytes are lost.
    """
    mapping.flush()
    mapping.madvise(mmap.MADV_DONTNEED)


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from its first element to behind its last."""
    if not tensor.numel():
        return 0
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return (sum((size - 1) * stride for size, stride in pairs) + 1) * tensor.itemsize

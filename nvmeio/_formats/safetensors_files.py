"""safetensors files, opened: their headers and shards, and tensors on memory that was read."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from nvmeio._formats import safetensors_header as headers
from nvmeio._formats import safetensors_shards as shards
from nvmeio._formats.safetensors_header import Header, TensorEntry
from nvmeio.files import File
from nvmeio.handle import AioHandle

# What is read of a file at once, in the hope that its header is no larger.
_PREFIX_BYTES = 64 << 10


def shards_of(path: Path) -> list[tuple[Path, list[str] | None]]:
    """The files of a whole or an index, each with the tensors that count; None: all of them."""
    if not shards.is_index(path):
        return [(path, None)]
    return [(shard, names) for shard, names in shards.read_index(path).items()]


def header_of(file: File, handle: AioHandle) -> Header:
    """The header of an open file.

    Raises:
        IntegrityError: It is malformed, or does not match the size of the file.
        TransferError: It cannot be read.
    """
    size = file.size()
    prefix = bytes_at(handle, file, 0, min(size, _PREFIX_BYTES))
    length = headers.header_bytes(prefix, size, file.path)
    end = headers.LENGTH_BYTES + length
    if end > len(prefix):
        prefix += bytes_at(handle, file, len(prefix), end - len(prefix))
    return headers.parse(prefix[headers.LENGTH_BYTES : end], size, file.path)


def bytes_at(handle: AioHandle, file: File, offset: int, nbytes: int) -> bytes:
    """A few bytes of a file."""
    room = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    handle.sync_pread(room, file, offset)
    return bytes(room.numpy())


def tensor_on(memory: torch.Tensor, entry: TensorEntry) -> torch.Tensor:
    """A tensor of the entry's dtype and shape, on the memory that was read for it."""
    dtype, shape = entry.for_torch()
    if math.prod(shape) == 0:
        return torch.empty(0, dtype=dtype, device=memory.device).reshape(shape)
    if memory.device.type == "cpu" and memory.data_ptr() % dtype.itemsize:
        memory = memory.clone()
    tensor = torch.empty(0, dtype=dtype, device=memory.device)
    return tensor.set_(memory.untyped_storage(), 0, shape, _strides(shape))


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides))[-len(shape) :] if shape else ()

"""A wanted part of a stored tensor as reads: straight into its target, or through chunks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from nvmeio.integrations._dcp.parsing import extent

# What is read through chunks is read so many bytes at a time.
CHUNK_BYTES = 32 << 20
CHUNKS = 4

# Rows from here on are read one by one rather than with what lies between them.
ROW_BYTES = 128 << 10


class SlicePart(NamedTuple):
    """One read.

    Attributes:
        source: What is read, on the meta device: its offset and strides are those in the storage.
        target: What it fills, of the same shape.
        direct: The target is memory of exactly the bytes that are read.
    """

    source: torch.Tensor
    target: torch.Tensor
    direct: bool


def parts(source: torch.Tensor, target: torch.Tensor) -> Iterator[SlicePart]:
    """Cut a wanted part into reads.

    Args:
        source: The wanted part of a stored tensor, on the meta device.
        target: Of the same shape, any dtype, device and strides.

    Yields:
        Reads that together fill the target. One that is not direct spans `CHUNK_BYTES` at most,
        unless not even one element of its largest stride is that small.
    """
    if not source.numel():
        return
    if source.is_contiguous() and _is_memory(target, source.dtype):
        yield SlicePart(source, target, True)
        return
    span = extent(source) * source.element_size()
    sparse = 4 * source.nbytes < 3 * span
    dim = _widest(source)
    if dim is None or (span <= CHUNK_BYTES and not (sparse and _has_rows(source, dim))):
        yield SlicePart(source, target, False)
        return
    step = 1
    if not (sparse and _has_rows(source, dim)):
        step = max(1, CHUNK_BYTES // (source.stride(dim) * source.element_size()) - 1)
    if step >= source.shape[dim]:  # strides that overlap: no cut makes it smaller
        yield SlicePart(source, target, False)
        return
    for start in range(0, source.shape[dim], step):
        length = min(step, source.shape[dim] - start)
        yield from parts(source.narrow(dim, start, length), target.narrow(dim, start, length))


def _is_memory(target: torch.Tensor, dtype: torch.dtype) -> bool:
    return (
        type(target) is torch.Tensor
        and target.is_cpu
        and target.dtype == dtype
        and target.layout is torch.strided
        and target.is_contiguous()
        and not target.is_quantized
        and not target.is_conj()
        and not target.is_neg()
    )


def _widest(source: torch.Tensor) -> int | None:
    """The dimension whose elements lie farthest apart; None if there is but one element."""
    dims = [dim for dim, size in enumerate(source.shape) if size > 1 and source.stride(dim)]
    return max(dims, key=source.stride, default=None)


def _has_rows(source: torch.Tensor, dim: int) -> bool:
    """Whether what lies at one index of a dimension is worth a read of its own."""
    return source.nbytes // source.shape[dim] >= ROW_BYTES

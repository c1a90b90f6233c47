"""How a model's tensors come from a checkpoint's: recipes. No I/O here.

Most tensors are one tensor of the checkpoint, under the same or another name. Some are put together
from several (the fused experts of transformers 5 from one matrix an expert), which is a matter of
where the bytes are read to. Some are stored in another dtype or quantised, and are converted when
their layer is used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from nvmeio._formats.safetensors_set import SafetensorsSet, StoredTensor
from nvmeio.errors import IntegrityError
from nvmeio.inference._packed.quant import Quantised
from nvmeio.inference._plan.cut_sums import CutSums


class FileExtent(NamedTuple):
    """Bytes [offset, offset + nbytes) of a file, which go to byte `at` of a part."""

    file: int
    offset: int
    nbytes: int
    at: int


class WeightPart(NamedTuple):
    """What is read for a weight, as one contiguous tensor.

    Attributes:
        dtype: torch's, as stored.
        shape: In elements.
        extents: Where its bytes are, ascending in `at`, without a hole.
        sums: CRC-32s of its bytes, in shares of equal length; none where they are not known. Only
            of a part of one extent.
        cut: Of rows of another part: the checksum of that one, and which of its tiles this is.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    extents: tuple[FileExtent, ...]
    sums: tuple[int, ...] = ()
    cut: tuple[CutSums, int] | None = None

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class Weight(NamedTuple):
    """One tensor of the model.

    Attributes:
        name: The model's name for it (of tied ones, the first).
        dtype: As the model wants it.
        shape: As the model wants it.
        parts: What is read: the tensor itself, or what `quantised` makes it of.
        quantised: How it is stored, if it is.
        sources: Names in the checkpoint.
        order: The dimensions of what is read, in the model's order; None where that is theirs.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[WeightPart, ...]
    quantised: Quantised | None
    sources: tuple[str, ...]
    order: tuple[int, ...] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that are read."""
        return sum(part.nbytes for part in self.parts)

    @property
    def converted_bytes(self) -> int:
        """Bytes that a conversion needs; 0 where what is read is what is used."""
        if self.quantised is None and self.parts[0].dtype == self.dtype:
            return 0
        return math.prod(self.shape) * self.dtype.itemsize


def part_of(stored: StoredTensor) -> WeightPart:
    """A whole tensor of the checkpoint."""
    dtype, shape = stored.entry.for_torch()
    extent = FileExtent(stored.file, stored.entry.start, stored.entry.nbytes, 0)
    return WeightPart(dtype, shape, (extent,) if extent.nbytes else ())


def stacked(
    lists: Sequence[Sequence[StoredTensor]], name: str, checkpoint: SafetensorsSet
) -> WeightPart:
    """`torch.cat([torch.stack(tensors) for tensors in lists], dim=1)`, as a place for each extent.

    Args:
        lists: One list of tensors, or several of the same length (gate and up projections): the
            i-th of each lie one behind the other in the i-th row of the result.
        name: The model's tensor, for messages.
        checkpoint: Where they are stored.

    Raises:
        IntegrityError: Lengths, dtypes or shapes do not fit each other.
    """
    counts = {len(tensors) for tensors in lists}
    first = part_of(lists[0][0])
    rows = 0
    for tensors in lists:
        shapes = {part_of(stored).shape for stored in tensors}
        dtypes = {part_of(stored).dtype for stored in tensors}
        tails = {shape[1:] for shape in shapes}
        if len(shapes) > 1 or dtypes != {first.dtype} or tails != {first.shape[1:]}:
            raise _mismatch(name, checkpoint, lists, "of one dtype and shape", (dtypes, shapes))
        rows += next(iter(shapes))[0]
    if len(counts) > 1:
        raise _mismatch(name, checkpoint, lists, "of each kind the same number", counts)
    extents: list[FileExtent] = []
    at = 0
    for number in range(len(lists[0])):
        for tensors in lists:
            entry = tensors[number].entry
            extents.append(FileExtent(tensors[number].file, entry.start, entry.nbytes, at))
            at += entry.nbytes
    shape = (len(lists[0]), rows, *first.shape[1:])
    return WeightPart(first.dtype, shape, tuple(extents))


def concatenated(
    tensors: Sequence[StoredTensor], name: str, checkpoint: SafetensorsSet
) -> WeightPart:
    """`torch.cat(tensors, dim=0)`, as a place for each extent.

    Raises:
        IntegrityError: Dtypes or shapes do not fit each other.
    """
    parts = [part_of(stored) for stored in tensors]
    tails = {(part.dtype, part.shape[1:]) for part in parts}
    if len(tails) > 1:
        raise _mismatch(name, checkpoint, [tensors], "of one dtype and width", tails)
    extents, at = [], 0
    for stored in tensors:
        extents.append(FileExtent(stored.file, stored.entry.start, stored.entry.nbytes, at))
        at += stored.entry.nbytes
    shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
    return WeightPart(parts[0].dtype, shape, tuple(extents))


def _mismatch(
    name: str,
    checkpoint: SafetensorsSet,
    lists: Sequence[Sequence[StoredTensor]],
    expected: object,
    found: object,
) -> IntegrityError:
    stored = lists[0][0]
    return IntegrityError(
        f"{name!r} cannot be put together from {stored.name!r} and others in "
        f"{checkpoint.files[stored.file].path}: they are not {expected} (found {found})",
        expected=expected,
        found=found,
    )

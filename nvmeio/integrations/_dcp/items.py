"""One item of a distributed checkpoint as the layout of its bytes.

A tensor's item is what `torch.save` writes for it: a small zip archive around the tensor's bytes.
torch itself writes the skeleton, once for each shape and dtype; the bytes stay where they are until
they are written. A bytes item is its bytes.

In the file, an item begins where its large record comes to lie on a page boundary. What is left
between two items belongs to none: items are found by offset and length.
"""

from __future__ import annotations

import io
import math
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from nvmeio._files.plan import PAGE_BYTES, round_up
from nvmeio._formats.torch_layout import (
    FileLayout,
    KnownBytes,
    StorageRecord,
    layout_of,
    plan_layout,
)
from nvmeio._formats.torch_skeleton import Sink, skeleton_of
from nvmeio._memory import tensors
from nvmeio.errors import BackendUnavailableError

# Records from here on are put on a page boundary, which costs half a page on average.
_ALIGN_FROM_BYTES = 64 << 10

# What torch aligns storages to within an archive; items keep that in the file.
_ITEM_ALIGNMENT = 64


class Placed(NamedTuple):
    """An item in a file.

    Attributes:
        offset: Its first byte in the file.
        pieces: With offsets in the file, like `records`.
        records: The memory that belongs there.
        nbytes: Its length.
    """

    offset: int
    pieces: list[KnownBytes]
    records: list[StorageRecord]
    nbytes: int


class Skeletons:
    """Layouts of items, from skeletons that are made once for each shape and dtype."""

    def __init__(self) -> None:
        self._known: dict[tuple[torch.dtype, torch.Size], FileLayout] = {}

    def layout(self, data: torch.Tensor | io.BytesIO) -> FileLayout:
        """The layout of one item, from its own first byte on.

        Args:
            data: What the planner resolved: a tensor on any device, or bytes.

        Returns:
            The layout. It holds the data, without a copy; of a tensor that is not contiguous it
            takes one when it is written.

        Cost: 0.5 ms for a new shape, 10 us for a known one.
        """
        if isinstance(data, io.BytesIO):
            return _bytes_layout(data)
        tensor = data.detach()
        if not _is_plain(tensor):
            return _other_layout(tensor)
        try:
            skeleton = self._skeleton(tensor.dtype, tensor.shape)
        except BackendUnavailableError:
            return _saved_layout(tensor)
        if not skeleton.records:
            return skeleton
        contiguous = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
        record = skeleton.records[0]._replace(
            data=tensors.cast_to_byte_tensor(tensor) if contiguous else _Copied(tensor).part
        )
        return skeleton._replace(records=[record])

    def _skeleton(self, dtype: torch.dtype, shape: torch.Size) -> FileLayout:
        key = (dtype, shape)
        if key not in self._known:
            skip_data = getattr(torch.serialization, "skip_data", None)
            if skip_data is None:
                raise BackendUnavailableError("torch.serialization.skip_data is missing")
            # Never touched, so it takes address space and no memory.
            hollow = torch.empty(shape, dtype=dtype, device="cpu")
            sink = Sink()
            with skip_data():  # a plain tensor: no code of others is run meanwhile
                torch.save(hollow, sink)  # type: ignore[arg-type]
            self._known[key] = layout_of(skeleton_of(sink), {"0": hollow.untyped_storage()})
            if hollow.nbytes != sum(record.nbytes for record in self._known[key].records):
                raise BackendUnavailableError(f"a {dtype} tensor is not saved as its bytes")
        return self._known[key]


def place(layout: FileLayout, name: str, position: int) -> Placed:
    """Where an item comes to lie in a file.

    Args:
        layout: The item's own.
        name: For error messages.
        position: The first free byte of the file.
    """
    large = [record for record in layout.records if record.nbytes >= _ALIGN_FROM_BYTES]
    if large:
        at = large[0].offset
        offset = round_up(position + at, PAGE_BYTES) - at
    else:
        offset = round_up(position, _ITEM_ALIGNMENT)
    pieces = [KnownBytes(piece.offset + offset, piece.data) for piece in layout.pieces]
    records = [
        StorageRecord(
            name,
            record.offset + offset,
            record.nbytes,
            record.data,
            tuple(at + offset for at in record.crc_at),
        )
        for record in layout.records
    ]
    return Placed(offset, pieces, records, layout.nbytes)


class _Copied:
    """A tensor whose contiguous copy exists only while it is being written."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._copy: torch.Tensor | None = None

    def part(self, offset: int, nbytes: int) -> torch.Tensor:
        """Bytes [offset, offset + nbytes) of the copy; asked for in order, once."""
        if self._copy is None:
            dense = self._tensor.resolve_conj().resolve_neg().contiguous()
            self._copy = tensors.cast_to_byte_tensor(dense)
        part = self._copy[offset : offset + nbytes]
        if offset + nbytes == self._copy.numel():
            self._copy = None  # the parts in flight hold it
        return part


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_meta
        and tensor.nbytes == math.prod(tensor.shape) * tensor.dtype.itemsize
    )


def _bytes_layout(data: io.BytesIO) -> FileLayout:
    view = data.getbuffer()
    if not len(view):
        return FileLayout(0, [], [])
    memory = torch.frombuffer(view, dtype=torch.uint8)
    return FileLayout(len(view), [], [StorageRecord("bytes", 0, len(view), memory, ())])


def _other_layout(tensor: torch.Tensor) -> FileLayout:
    """Of a subclass, quantised, sparse, …: whatever torch makes of it."""
    tensor = tensor.cpu()
    if (
        tensor.layout is torch.strided
        and not torch.utils._python_dispatch.is_traceable_wrapper_subclass(tensor)
        and tensor.untyped_storage().nbytes() != tensor.nbytes
    ):
        tensor = tensor.clone()  # a view: only what it shows belongs to the item
    try:
        return plan_layout(tensor)
    except BackendUnavailableError:
        return _saved_layout(tensor)


def _saved_layout(tensor: torch.Tensor) -> FileLayout:
    """What this torch saves, in memory: where its skeletons are not known."""
    buffer = io.BytesIO()
    torch.save(own_storage(tensor.cpu()), buffer)
    return _bytes_layout(buffer)


def own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """A copy where the storage has more than the tensor shows, for all of it would be saved."""
    if tensor.layout is not torch.strided or is_traceable_wrapper_subclass(tensor):
        return tensor
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()

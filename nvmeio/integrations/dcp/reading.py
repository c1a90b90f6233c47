"""A load's reads: many small pieces in a few reads, the large ones in place.

Items come in rounds. In each, small items are read as a whole, and of large ones the pages with
the headers before and behind the data, all with few large reads (`_io.spans`). Then the data of the
large items is read, straight into the tensors where that can be, and those reads are in flight
while the next round begins.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import math
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from nvmeio import files
from nvmeio._io.inflight import InFlight, Stagings, in_groups
from nvmeio._io.spans import Span
from nvmeio._io.spans import read as read_spans
from nvmeio._memory.tensors import extent
from nvmeio._pages import round_up
from nvmeio._torch_private import narrow_tensor
from nvmeio.errors import IntegrityError
from nvmeio.files import File, read_buffered
from nvmeio.handle import AioHandle
from nvmeio.integrations.dcp.metadata import Parser, StoredItem

# Up to here an item is read as a whole: one read less than for its headers and its data.
WHOLE_BYTES = 1 << 20

# The headers before and behind a larger item's data lie in so many bytes at either end. If they do
# not, they are read one by one.
EDGE_BYTES = 4096

# The size of a read through chunks.
CHUNK_BYTES = 32 << 20
CHUNKS = 4

# Rows from here on are read one by one rather than with the bytes between them.
ROW_BYTES = 128 << 10

# The bytes that a round reads as a whole.
ROUND_BYTES = 256 << 20

# Files that are open at the same time.
MOST_FILES = 64


class Item(NamedTuple):
    """An item, and the parts requested of it."""

    file: File
    offset: int
    nbytes: int
    transforms: Sequence[str]
    requests: list[ReadItem]

    @property
    def name(self) -> str:
        """File and item, for messages."""
        return f"{self.file.path}: item {self.requests[0].storage_index.fqn!r}"

    @property
    def label(self) -> str:
        """The item, for messages that name the file."""
        return f"item {self.requests[0].storage_index.fqn!r}"

    @property
    def whole(self) -> bool:
        """Whether it is read as a whole in any case."""
        return (
            self.nbytes <= WHOLE_BYTES
            or bool(self.transforms)
            or self.requests[0].type == LoadItemType.BYTE_IO
        )


def read_items(
    handle: AioHandle,
    folder: Path,
    wanted: Sequence[tuple[ReadItem, Any]],
    planner: LoadPlanner,
    extension_registry: Any,
    flight: InFlight,
) -> None:
    """Read the requested parts into the planner's tensors; blocks.

    Args:
        handle: Moves the bytes.
        folder: The directory of the checkpoint.
        wanted: Requests, each with torch's `_StorageInfo` of the item that it is for.
        planner: Takes objects, and gives the tensors to fill.
        extension_registry: For items that torch's writer has sent through a stream transform.
        flight: The operations in flight, for somebody else to cancel.

    Raises:
        TransferError: A file cannot be opened or read.
        IntegrityError: An item is not what the metadata says.
        ValueError: The planner's tensor has another size than the request.

    After an error: nothing is in flight.
    """
    by_path: dict[str, list[tuple[ReadItem, Any]]] = {}
    for request, info in wanted:
        by_path.setdefault(info.relative_path, []).append((request, info))
    paths = sorted(by_path)
    for start in range(0, len(paths), MOST_FILES):
        with contextlib.ExitStack() as opened:
            items: list[Item] = []
            for path in paths[start : start + MOST_FILES]:
                file = opened.enter_context(files.open(os.path.join(folder, path)))
                items += _items(file, by_path[path])
            with flight:
                reader = _Reader(handle, planner, extension_registry, flight)
                for these in in_groups(items, _nbytes_at_once, ROUND_BYTES, math.inf):
                    reader.read(these)


def _items(file: File, wanted: Sequence[tuple[ReadItem, Any]]) -> list[Item]:
    """The items of one file, in its order; known to lie in it and not to overlap."""
    found: dict[tuple[int, int], Item] = {}
    for request, info in wanted:
        key = (info.offset, info.length)
        if key not in found:
            transforms = getattr(info, "transform_descriptors", None) or ()
            found[key] = Item(file, info.offset, info.length, transforms, [])
        found[key].requests.append(request)
    size, position = file.size(), 0
    before = ""
    for (offset, nbytes), item in sorted(found.items()):
        if offset < 0 or nbytes < 0 or offset + nbytes > size:
            raise IntegrityError(
                f"{item.name} lies at bytes [{offset}, {offset + nbytes}), and the file has {size}",
                expected=offset + nbytes,
                found=size,
            )
        if offset < position:
            raise IntegrityError(
                f"{item.name} begins at byte {offset}, before the end of {before} at {position}",
                expected=position,
                found=offset,
            )
        position, before = offset + nbytes, item.label
    return [found[key] for key in sorted(found)]


def _nbytes_at_once(item: Item) -> int:
    return item.nbytes if item.whole else 2 * EDGE_BYTES


class _PendingRead:
    """The rest of one request."""

    def __init__(self, planner: LoadPlanner, request: ReadItem, target: torch.Tensor) -> None:
        self._planner = planner
        self._request = request
        self._target = target
        self._left = 1

    def begin(self) -> None:
        self._left += 1

    def end(self) -> None:
        self._left -= 1
        if not self._left:
            self._planner.commit_tensor(self._request, self._target)


class _Reader:
    def __init__(
        self, handle: AioHandle, planner: LoadPlanner, extension_registry: Any, flight: InFlight
    ) -> None:
        self._handle = handle
        self._planner = planner
        self._extension_registry = extension_registry
        self._parser = Parser()
        self._flight = flight
        self._stagings: dict[torch.device, Stagings] = {}

    def read(self, items: Sequence[Item]) -> None:
        """Read one round of items; large ones are only begun."""
        spans: list[Span] = []
        for item in items:
            file, start, end = item.file, item.offset, item.offset + item.nbytes
            if item.whole:
                spans.append(Span(file, start, item.nbytes, item.label))
            else:
                spans.append(Span(file, start, EDGE_BYTES, f"the head of {item.label}"))
                spans.append(Span(file, end - EDGE_BYTES, EDGE_BYTES, f"the end of {item.label}"))
        found = iter(read_spans(self._handle, spans))
        for item in items:
            if item.whole:
                self._take_whole(item, next(found))
            else:
                self._begin(item, next(found), next(found))

    # Items read as a whole

    def _take_whole(self, item: Item, raw: torch.Tensor) -> None:
        if item.requests[0].type == LoadItemType.BYTE_IO or item.transforms:
            self._take_stream(item, io.BytesIO(_as_bytes(raw)))
            return

        def read(offset: int, nbytes: int) -> bytes:
            return ctypes.string_at(raw.data_ptr() + offset, nbytes)

        stored = self._parser.stored(read, item.nbytes, item.name)
        if stored is None:
            self._take_stream(item, io.BytesIO(_as_bytes(raw)))
            return
        memory = _laid_over(raw, stored)
        for request in item.requests:
            self._fill(request, _narrowed(memory, request, item), item)

    def _take_stream(self, item: Item, stream: Any) -> None:
        """Take an item as torch's own reader does."""
        loaded: torch.Tensor | None = None
        for request in item.requests:
            if item.transforms and loaded is None:
                transform = filesystem._StorageReaderTransforms(self._extension_registry)
                raw = transform.transform_load_stream(request, item.transforms, stream)
                stream = io.BytesIO(raw.read(-1))
            stream.seek(0)
            if request.type == LoadItemType.BYTE_IO:
                self._planner.load_bytes(request, io.BytesIO(stream.getvalue()))
                continue
            if loaded is None:
                loaded = torch.load(stream, map_location="cpu", weights_only=True)
            if not isinstance(loaded, torch.Tensor):
                raise IntegrityError(
                    f"{item.name} is not a tensor but {type(loaded).__name__}",
                    expected="a tensor",
                    found=type(loaded).__name__,
                )
            self._fill(request, _narrowed(loaded, request, item), item)

    def _fill(self, request: ReadItem, source: torch.Tensor, item: Item) -> None:
        target = self._target(request, source, item)
        target.copy_(source)
        self._planner.commit_tensor(request, target)

    def _target(self, request: ReadItem, source: torch.Tensor, item: Item) -> torch.Tensor:
        target = self._planner.resolve_tensor(request).detach()
        if target.size() != source.size():
            raise ValueError(
                f"{item.name}: the planner gave a tensor of {tuple(target.shape)} to fill with "
                f"{tuple(source.shape)}"
            )
        return target

    # Large items

    def _begin(self, item: Item, head: torch.Tensor, tail: torch.Tensor) -> None:
        first, last = _as_bytes(head), _as_bytes(tail)
        tail_at = item.nbytes - EDGE_BYTES

        def read(offset: int, nbytes: int) -> bytes:
            if offset + nbytes <= EDGE_BYTES:
                return first[offset : offset + nbytes]
            if offset >= tail_at:
                return last[offset - tail_at : offset - tail_at + nbytes]
            return read_buffered(item.file, item.offset + offset, nbytes)

        stored = self._parser.stored(read, item.nbytes, item.name)
        if stored is None:
            span = Span(item.file, item.offset, item.nbytes, item.label)
            self._take_stream(item, io.BytesIO(_as_bytes(read_spans(self._handle, [span])[0])))
            return
        at = item.offset + stored.offset
        for asked in item.requests:
            source = _narrowed(stored.tensor, asked, item)
            target = self._target(asked, source, item)
            pending = _PendingRead(self._planner, asked, target)
            for part in parts(source, target):
                pending.begin()
                if part.direct:
                    self._read_direct(item, at, part, pending)
                else:
                    self._read_staged(item, at, part, pending)
            pending.end()

    def _read_direct(self, item: Item, at: int, part: SlicePart, pending: _PendingRead) -> None:
        start = at + int(part.source.storage_offset()) * part.source.element_size()
        self._start(item, part.target, start, pending.end)

    def _read_staged(self, item: Item, at: int, part: SlicePart, pending: _PendingRead) -> None:
        itemsize = part.source.element_size()
        start = at + int(part.source.storage_offset()) * itemsize
        end = start + extent(part.source) * itemsize
        # From page to page, so that the staging memory is read into without a bounce.
        low = start // EDGE_BYTES * EDGE_BYTES
        high = min(round_up(end, EDGE_BYTES), item.file.size())
        stagings = self._stagings_for(high - low, part.target.device)
        memory = stagings.take(self._flight)

        def finish() -> None:
            part.target.copy_(_view(memory[start - low : end - low], part.source))
            stagings.give_back(memory)
            pending.end()

        self._start(item, memory[: high - low], low, finish)

    def _stagings_for(self, nbytes: int, device: torch.device) -> Stagings:
        size = CHUNK_BYTES + 2 * EDGE_BYTES
        if nbytes > size:  # one element of its largest stride is that large
            return Stagings(nbytes, 1, torch.device("cpu"))
        if device not in self._stagings:
            self._stagings[device] = Stagings(size, CHUNKS, device)
        return self._stagings[device]

    def _start(
        self, item: Item, memory: torch.Tensor, offset: int, done: Callable[[], None]
    ) -> None:
        begin = partial(self._handle.async_pread, memory, item.file, offset)
        self._flight.start(begin, memory.nbytes, done, lambda _: f"read for {item.label}")


def _narrowed(tensor: torch.Tensor, request: ReadItem, item: Item) -> torch.Tensor:
    """The part of an item's tensor that a request wants."""
    try:
        narrow: torch.Tensor = narrow_tensor(tensor, request.storage_offsets, request.lengths)
    except (RuntimeError, IndexError) as wrong:
        raise _too_small(tensor, request, item) from wrong
    if narrow.shape != torch.Size(request.lengths):
        raise _too_small(tensor, request, item)
    return narrow


def _too_small(tensor: torch.Tensor, request: ReadItem, item: Item) -> IntegrityError:
    return IntegrityError(
        f"{item.name} is a tensor of {tuple(tensor.shape)}, and the metadata says that there are "
        f"{tuple(request.lengths)} from {tuple(request.storage_offsets)} on",
        expected=tuple(request.lengths),
        found=tuple(tensor.shape),
    )


def _laid_over(raw: torch.Tensor, stored: StoredItem) -> torch.Tensor:
    """An item's tensor over the item's bytes."""
    itemsize = stored.tensor.element_size()
    start = stored.offset + int(stored.tensor.storage_offset()) * itemsize
    return _view(raw[start : start + extent(stored.tensor) * itemsize], stored.tensor)


def _view(raw: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Bytes as a tensor of another's shape, strides and dtype; copied if they lie askew."""
    itemsize = like.element_size()
    if int(raw.storage_offset()) % itemsize or raw.data_ptr() % itemsize:
        raw = raw.clone()
    start = int(raw.storage_offset()) // itemsize
    empty = torch.empty(0, dtype=like.dtype, device="cpu")
    return empty.set_(raw.untyped_storage(), start, like.shape, like.stride())


def _as_bytes(raw: torch.Tensor) -> bytes:
    return ctypes.string_at(raw.data_ptr(), raw.nbytes) if raw.nbytes else b""


class SlicePart(NamedTuple):
    """One read.

    Attributes:
        source: The tensor to read, on the meta device: its offset and strides are those in the
            storage.
        target: The tensor that it fills, of the same shape.
        direct: The target is memory of exactly the bytes that are read.
    """

    source: torch.Tensor
    target: torch.Tensor
    direct: bool


def parts(source: torch.Tensor, target: torch.Tensor) -> Iterator[SlicePart]:
    """Cut a wanted part into reads.

    Args:
        source: The wanted part of a stored tensor, on the meta device.
        target: A tensor of the same shape, any dtype, device and strides.

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
    """Whether the bytes at one index of a dimension are worth a read of their own."""
    return source.nbytes // source.shape[dim] >= ROW_BYTES

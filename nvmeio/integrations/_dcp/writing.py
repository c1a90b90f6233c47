"""The items of one file, written: placed one after another, group after group, then committed."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from nvmeio._files.plan import PAGE_BYTES, round_up
from nvmeio._formats.torch_layout import FileLayout, KnownBytes, StorageRecord
from nvmeio._formats.torch_writing import write_part
from nvmeio._io.inflight import InFlight
from nvmeio._storage.replace import Replacement
from nvmeio.handle import AioHandle
from nvmeio.integrations._dcp.items import Skeletons, place

# Items are resolved, then written, so many bytes at a time: a planner may make each tensor anew (in
# another dtype, say), and all of them at once could be too much memory. The queue runs empty
# between two groups, which takes about 2 ms of 300.
GROUP_BYTES = 1 << 30

Resolve = Callable[[], torch.Tensor | io.BytesIO]


class ItemSpan(NamedTuple):
    """Where an item lies in its file, in bytes."""

    offset: int
    nbytes: int


def write_file(
    get_handle: Callable[[], AioHandle],
    path: str,
    items: Sequence[tuple[str, Resolve]],
    *,
    checksum: bool,
    written: Callable[[], None],
    flight: InFlight,
    durable: bool = True,
) -> list[ItemSpan]:
    """Write a file of items and put it in its place; blocks.

    Args:
        get_handle: What moves the bytes.
        path: The file; one that is there is replaced.
        items: Name and data of each, in the order of the file.
        checksum: Compute the CRC-32 of every record.
        written: Called when the handle is not needed any more.
        flight: What is in flight, for somebody else to cancel.
        durable: As for `Replacement.commit`.

    Returns:
        Where each item lies.

    Raises:
        TransferError: It cannot be written; `path` is as it was.
        Cancelled: `flight` was cancelled; likewise.
    """
    writer = _FileWriter(get_handle, checksum, flight)
    with Replacement(path) as replacement:
        for name, resolve in items:
            writer.add(replacement, name, resolve())
        writer.flush(replacement)
        written()
        replacement.truncate(writer.end)
        replacement.commit(durable)
    return writer.spans


class _FileWriter:
    def __init__(
        self,
        get_handle: Callable[[], AioHandle],
        checksum: bool,
        flight: InFlight,
    ) -> None:
        self._get_handle = get_handle
        self._flight = flight
        self._checksum = checksum
        self._skeletons = Skeletons()
        self._start = 0  # of the group, in whole pages
        self._pieces: list[KnownBytes] = []
        self._records: list[StorageRecord] = []
        self._group_bytes = 0
        self._position = 0  # the first free byte
        self.spans: list[ItemSpan] = []

    def add(self, replacement: Replacement, name: str, data: torch.Tensor | io.BytesIO) -> None:
        layout = self._skeletons.layout(data)
        placed = place(layout, name, self._position)
        self._pieces += placed.pieces
        self._records += placed.records
        self._group_bytes += placed.nbytes
        self._position = placed.offset + placed.nbytes
        self.spans.append(ItemSpan(placed.offset, placed.nbytes))
        if self._group_bytes >= GROUP_BYTES:
            self.flush(replacement)

    def flush(self, replacement: Replacement) -> None:
        if not self._group_bytes:
            return
        end = round_up(self._position, PAGE_BYTES)
        replacement.reserve(end)
        write_part(
            self._get_handle(),
            replacement.file,
            FileLayout(end, self._pieces, self._records),
            self._start,
            end,
            checksum=self._checksum,
            flight=self._flight,
        )
        self._pieces, self._records, self._group_bytes = [], [], 0
        self._start = self._position = end

    @property
    def end(self) -> int:
        """Where the last item ends: the size of the file."""
        return sum(self.spans[-1]) if self.spans else 0

"""A layout into a file: large direct writes, with their CRC-32 computed on the way.

The file is cut at page boundaries into two kinds of stretches:

- the *body* of a large record, written from its own memory, chunk by chunk;
- everything between two bodies (headers, small records, the last bytes of large ones), gathered
  in a few staging chunks. So are large records whose memory a handle would copy in any case
  (`is_gathered`): one loop copies them and makes their CRC, so memory is read once, not twice, and
  the chunks are all that it takes.

So every write is direct, begins and ends on a page boundary, and no byte is written twice. Bytes
are handled in the order of the file, in one thread: a chunk's write is started, then its CRC is
computed while the drive works, and by the time the stretch with a record's CRC is gathered, the CRC
is known. The kernel is never waited for until enough is in flight.

A file may be written in parts, by several processes: `write_part` writes [start, end) and returns
the CRCs of the records' pieces in it; `finish` joins those of all parts and writes the few pages
whose CRCs no part knew alone.
"""

from __future__ import annotations

import ctypes
import struct
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from nvmeio._formats.torch_archives.torch_layout import (
    FileLayout,
    KnownBytes,
    ReadOnce,
    StorageRecord,
    resized,
)
from nvmeio._io.inflight import InFlight, Stagings
from nvmeio._memory import holds, mappings
from nvmeio._pages import PAGE_BYTES, round_down, round_up
from nvmeio._storage import crc32
from nvmeio.errors import ClosedError
from nvmeio.files import File
from nvmeio.handle import AioHandle
from nvmeio.operation import Operation

# The least size of a record's body: below this one copy is cheaper than one more operation.
BODY_BYTES = 1 << 20

# One operation writes this much of a body. Its CRC takes half a millisecond.
CHUNK_BYTES = 16 << 20

# The ring in which stretches between bodies are gathered, and chunks of other devices' memory. With
# six, a save in the background over an old file takes 0.80 to 0.92 of the time that it takes with
# four, since one is filled and one has just been written while the others are in flight. More gain
# nothing.
STAGING_BYTES = 8 << 20
STAGINGS = 6
DEVICE_STAGING_BYTES = 16 << 20
DEVICE_STAGINGS = 4


class Crc(NamedTuple):
    """The CRC-32 of a piece of the record with this index in `FileLayout.records`."""

    record: int
    offset: int
    nbytes: int
    crc: int


def is_gathered(data: torch.Tensor) -> bool:
    """Whether large storages go through staging, because a handle would bounce their memory.

    Not if neither torch nor nvmeio allocated it, for that may end early: handles know how to copy
    it.
    """
    storage = data.untyped_storage()
    return (
        data.is_cpu
        and storage.resizable()
        and not mappings.on_huge_pages(data.data_ptr(), data.nbytes)
    )


def padded_nbytes(layout: FileLayout) -> int:
    """The size up to which the file is written, in whole pages; `finish` cuts it to its size."""
    return round_up(layout.nbytes, PAGE_BYTES)


def write_part(
    handle: AioHandle,
    file: File,
    layout: FileLayout,
    start: int = 0,
    end: int | None = None,
    *,
    checksum: bool = True,
    flight: InFlight | None = None,
    shift: int = 0,
    another: Callable[[], AioHandle] | None = None,
    kept: dict[int, Stagings] | None = None,
) -> list[Crc]:
    """Write [start, end) of a file, in whole pages; `end` None is `padded_nbytes`. Blocks.

    Args:
        handle: Moves the bytes.
        file: A file open for writing; may be larger than the layout, with any bytes in it.
        layout: The layout to write. Its storages must not change meanwhile.
        start: A multiple of 4096.
        end: Likewise.
        checksum: Compute the CRCs; without, 0 stands in their place.
        flight: The operations in flight, for somebody else to cancel; none after this returns.
        shift: Added to offsets of the layout, a multiple of 4096: the file has only this part then.
        another: Gives the handle that goes on if somebody closes this one.
        kept: Staging that an earlier call left here, and this one leaves for the next, by the size
            of its chunks. To make it anew takes 5 to 15 ms, 0.1 s on a busy machine.

    Returns the CRC of each piece of a record in the part, in the order of the file; none without
    `checksum`. CRCs of records that lie wholly in the part are in their places already. Raises
    IntegrityError if somebody gave a storage's memory back, Cancelled after `flight.cancel`. After
    an error nothing is in flight, and the part's contents are unknown.

    Cost: 48 MiB of memory, 64 MiB page-locked for storages on other devices, and the handle's own
    bounce memory for what is foreign. No copy of large CPU storages in memory on huge pages.
    """
    end = padded_nbytes(layout) if end is None else end
    if start % PAGE_BYTES or end % PAGE_BYTES or not 0 <= start <= end:
        raise ValueError(f"[{start}, {end}) is not a part of whole pages of {PAGE_BYTES} bytes")
    flight = InFlight() if flight is None else flight
    with flight:
        writer = _Writer(handle, file, layout, flight, checksum, shift, another)
        kept = {} if kept is None else kept
        if stagings := kept.pop(STAGING_BYTES, None):  # after an error its chunks are not there
            writer.stagings[STAGING_BYTES] = stagings
        crcs = writer.write(start, end)
        kept |= {size: each for size, each in writer.stagings.items() if size == STAGING_BYTES}
        return crcs


def finish(
    handle: AioHandle,
    file: File,
    layout: FileLayout,
    parts: Sequence[tuple[int, int]],
    crcs: Sequence[Crc],
    own: tuple[int, int] | None = None,
    shift: int = 0,
) -> None:
    """After all parts are written: put the CRCs into the pages that no part could complete.

    A storage's bytes are needed again if they share a page with a CRC. `parts` are the [start, end)
    of all parts, which make up the whole file; `crcs` what `write_part` returned for all of them,
    in any order. If each part has a file of its own, `own` is this one's, and `shift` as for
    `write_part`. Raises ValueError if parts or CRCs do not make up the whole.
    """
    joined = join_crcs(layout, crcs)
    if not joined:
        return
    with InFlight() as flight:
        writer = _Writer(handle, file, layout.with_crcs(joined), flight, False, shift)
        for page in unfinished_pages(layout, parts, own):
            writer.write_gathered(page, page + PAGE_BYTES)


def join_crcs(layout: FileLayout, crcs: Sequence[Crc]) -> list[int]:
    """The CRC of every record from all of its pieces, else ValueError; [] if there are none."""
    if not crcs:
        return []
    joined = [0] * len(layout.records)
    done = [0] * len(layout.records)
    for piece in sorted(crcs):
        if piece.offset != done[piece.record]:
            break
        joined[piece.record] = crc32.combine(joined[piece.record], piece.crc, piece.nbytes)
        done[piece.record] += piece.nbytes
    for record, nbytes in zip(layout.records, done, strict=True):
        if nbytes != record.nbytes:
            raise ValueError(f"{record.name}: the CRC of the bytes from {nbytes} on is missing")
    return joined


def unfinished_pages(
    layout: FileLayout, parts: Sequence[tuple[int, int]], own: tuple[int, int] | None = None
) -> list[int]:
    """Offsets of the pages with a CRC that the part which wrote them did not know.

    `own` is the part that is looked at, None for all. Raises ValueError if `parts` are not the
    whole.
    """
    ordered = sorted(parts)
    position = 0
    for start, end in ordered:
        if start != position:
            raise ValueError(f"the parts leave out byte {position}")
        position = end
    if position != padded_nbytes(layout):
        raise ValueError(f"the parts end at {position}, not at {padded_nbytes(layout)}")
    starts = [start for start, _ in ordered]
    pages: set[int] = set()
    for record in layout.records:
        for at in record.crc_at:
            for byte in (at, at + 3):
                start, end = ordered[bisect_right(starts, byte) - 1]
                if not (start <= record.offset and record.end <= end):
                    pages.add(round_down(byte, PAGE_BYTES))
    low, high = own or (0, position)
    return sorted(page for page in pages if low <= page < high)


@dataclass(eq=False)
class _Writer:
    handle: AioHandle
    file: File
    layout: FileLayout
    flight: InFlight
    checksum: bool
    shift: int
    another: Callable[[], AioHandle] | None = None

    def __post_init__(self) -> None:
        layout = self.layout
        contents = layout.contents()
        self._contents = [content for _, _, content in contents]
        self._starts = [start for start, _, _ in contents]
        self._ends = [end for _, end, _ in contents]
        self._places = layout.crc_places()
        self._crcs: dict[int, Crc] = {}  # by record: of the piece from this part's start on
        self.stagings: dict[int, Stagings] = {}  # by size
        # Parts of records that somebody wrote to while the drive read them.
        self._changed: deque[tuple[StorageRecord, ReadOnce, int, int]] = deque()

    def write(self, start: int, end: int) -> list[Crc]:
        position = start
        first = bisect_right(self._starts, start) - 1
        for number in range(max(first, 0), len(self._contents)):
            content = self._contents[number]
            if isinstance(content, KnownBytes):
                continue
            index, record = content
            if record.offset >= end:
                break
            low = round_up(max(record.offset, start), PAGE_BYTES)
            high = round_down(min(record.end, end), PAGE_BYTES)
            if high - low < BODY_BYTES or self._is_gathered(record):
                continue
            self.write_gathered(position, low)
            self._write_body(index, record, low, high)
            position = high
        self.write_gathered(position, end)
        self.flight.drain()
        while self._changed:
            self._write_changed()
            self.flight.drain()
        return [self._crcs[index] for index in sorted(self._crcs)]

    @staticmethod
    def _is_gathered(record: StorageRecord) -> bool:
        data = record.data
        if isinstance(data, torch.Tensor):
            return is_gathered(data)
        return not callable(data) and data.in_place is None

    # Bodies

    def _write_body(self, index: int, record: StorageRecord, low: int, high: int) -> None:
        for start in range(low, high, CHUNK_BYTES):
            nbytes = min(CHUNK_BYTES, high - start)
            if not (isinstance(record.data, torch.Tensor) or callable(record.data)):
                self._write_in_place(index, record, record.data, start, nbytes)
                continue
            data = _part_of(record, start - record.offset, nbytes)
            staging = None
            if not data.is_cpu:
                staging = self._staging(DEVICE_STAGING_BYTES, DEVICE_STAGINGS, data.device)
                data = staging[:nbytes].copy_(data)
            with _held(record, data):
                self._start(data, start, staging)
                self._sum(index, record, start, data)

    def _write_in_place(
        self, index: int, record: StorageRecord, data: ReadOnce, start: int, nbytes: int
    ) -> None:
        """Write bytes from where they lie; once more, from aside, what changed meanwhile."""
        assert data.in_place is not None
        offset = start - record.offset

        def settle() -> None:
            self._changed += ((record, data, *part) for part in data.settle(offset, nbytes))

        self._start(data.in_place[offset : offset + nbytes], start, done=settle)
        if self.checksum:
            self._extend(index, offset, nbytes, partial(data.sum, offset, nbytes))
        self._write_changed()

    def _write_changed(self) -> None:
        while self._changed:
            record, data, offset, nbytes = self._changed.popleft()
            for at in range(offset, offset + nbytes, STAGING_BYTES):
                size = min(STAGING_BYTES, offset + nbytes - at)
                staging = self._staging(STAGING_BYTES, STAGINGS, torch.device("cpu"))
                data.read(at, size, staging.data_ptr(), None)
                self._start(staging[:size], record.offset + at, staging)

    def _sum(
        self, index: int, record: StorageRecord, start: int, data: torch.Tensor, to: int = 0
    ) -> None:
        """Extend a record's CRC by its next bytes, and copy them to `to`, unless that is 0."""
        address, nbytes = data.data_ptr(), data.nbytes
        if not self.checksum:
            if to:
                ctypes.memmove(to, address, nbytes)
            return
        crc_of = partial(crc32.copy, to) if to else crc32.of_memory
        self._extend(index, start - record.offset, nbytes, partial(crc_of, address, nbytes))

    def _extend(self, index: int, offset: int, nbytes: int, crc_of: Callable[[int], int]) -> None:
        """Extend a record's CRC: `crc_of` makes it from that of the bytes before."""
        before = self._crcs.get(index) or Crc(index, offset, 0, 0)
        self._crcs[index] = before._replace(nbytes=before.nbytes + nbytes, crc=crc_of(before.crc))

    # The bytes between them

    def write_gathered(self, start: int, end: int) -> None:
        for position in range(start, end, STAGING_BYTES):
            nbytes = min(STAGING_BYTES, end - position)
            staging = self._staging(STAGING_BYTES, STAGINGS, torch.device("cpu"))
            self._gather(staging.data_ptr(), position, nbytes)
            self._start(staging[:nbytes], position, staging)

    def _gather(self, address: int, start: int, nbytes: int) -> None:
        """Copy what belongs in [start, start + nbytes) to memory."""
        end, reached = start + nbytes, start
        first = max(bisect_right(self._starts, start) - 1, 0)
        for number in range(first, len(self._contents)):
            low, high = self._starts[number], self._ends[number]
            if low >= end:
                break
            low, high = max(low, start), min(high, end)
            if low >= high:
                continue
            content = self._contents[number]
            if low > reached:
                ctypes.memset(address + reached - start, 0, low - reached)
            if isinstance(content, KnownBytes):
                part = content.data[low - content.offset : high - content.offset]
                ctypes.memmove(address + low - start, part, high - low)
            else:
                self._copy(*content, low, high, address + low - start)
            reached = high
        ctypes.memset(address + reached - start, 0, end - reached)
        for at, index in self._places_in(start, end):
            low, high = max(at, start), min(at + 4, end)
            value = struct.pack("<I", self._crc_of(index))[low - at : high - at]
            ctypes.memmove(address + low - start, value, high - low)

    def _copy(self, index: int, record: StorageRecord, low: int, high: int, to: int) -> None:
        """Copy the bytes of a record in [low, high) of the file, and extend its CRC."""
        if not (isinstance(record.data, torch.Tensor) or callable(record.data)):
            self._read(index, record, record.data, low, high, to)
            return
        data = _part_of(record, low - record.offset, high - low).cpu()
        if high - low < BODY_BYTES:
            _check_there(record, data)
            self._sum(index, record, low, data, to)
            return
        with _held(record, data):
            self._sum(index, record, low, data, to)

    def _read(
        self, index: int, record: StorageRecord, data: ReadOnce, low: int, high: int, to: int
    ) -> None:
        offset = low - record.offset
        if not self.checksum:
            data.read(offset, high - low, to, None)
            return
        self._extend(index, offset, high - low, partial(data.read, offset, high - low, to))

    def _places_in(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        first = bisect_right(self._places, (start - 4, len(self.layout.records)))
        for number in range(first, len(self._places)):
            if self._places[number][0] >= end:
                return
            yield self._places[number]

    def _crc_of(self, index: int) -> int:
        """The CRC of a whole record, or 0 if this part does not know it."""
        piece = self._crcs.get(index)
        whole = piece is not None and piece.nbytes == self.layout.records[index].nbytes
        return piece.crc if piece is not None and whole else 0

    # Operations in flight

    def _start(
        self,
        data: torch.Tensor,
        offset: int,
        staging: torch.Tensor | None = None,
        done: Callable[[], None] | None = None,
    ) -> None:
        def begin() -> Operation:
            while True:
                try:
                    return self.handle.async_pwrite(data, self.file, offset + self.shift)
                except ClosedError:  # it has finished what was in flight
                    if self.another is None:
                        raise
                    self.handle = self.another()

        if staging is not None:
            done = partial(self.stagings[staging.nbytes].give_back, staging)
        self.flight.start(begin, data.nbytes, done)

    def _staging(self, nbytes: int, number: int, device: torch.device) -> torch.Tensor:
        if nbytes not in self.stagings:
            self.stagings[nbytes] = Stagings(nbytes, number, device)
        return self.stagings[nbytes].take(self.flight)


@contextmanager
def _held(record: StorageRecord, data: torch.Tensor) -> Iterator[None]:
    """Hold memory while it is read: `resize_` would give it back.

    Less than `BODY_BYTES` is read in no time; it is only checked.
    """
    held = holds.hold(data.untyped_storage())
    try:
        _check_there(record, data)
        yield
    finally:
        holds.end(held)


def _check_there(record: StorageRecord, data: torch.Tensor) -> None:
    there = data.untyped_storage().nbytes()
    if data.storage_offset() * data.itemsize + data.nbytes > there:
        raise resized(record.name, data.nbytes, there)


def _part_of(record: StorageRecord, offset: int, nbytes: int) -> torch.Tensor:
    if isinstance(record.data, torch.Tensor):
        if nbytes == record.nbytes:
            return record.data
        try:
            return record.data[offset : offset + nbytes]
        except RuntimeError:  # torch's, of a storage that has become too small
            found = record.data.untyped_storage().nbytes()
            raise resized(record.name, record.nbytes, found) from None
    assert callable(record.data)  # what is read once is copied by `_read`
    return record.data(offset, nbytes)

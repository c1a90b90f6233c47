"""Many spans of files into memory, as few large direct reads: the machinery of every load.

The caller names spans (file, offset, length); back comes one byte tensor for each, whose storage
has exactly the span's bytes, so that tensors of any dtype are laid over it without a copy.

The layout: file pages are read into memory pages, so a span lies at the same offset within its
memory page as within its file page and direct I/O needs no bounce.

- A large span gets a mapping of its own, which goes when its last tensor goes.
- Small spans share arenas of limited size, in the order of the file. Neighbours are read in one
  go, and what lies between them (headers, padding) is read along.

The memory is not touched beforehand but beside the reads, which begin at once: by the kernel, as it
pins the pages for the drive, and from the other end by `Prefault`. Touched first, 2 GiB loaded at
2.6 GB/s; piece by piece ahead of the reads at 3.1; beside them at 3.2 (into memory that was there
already, 3.3). On a virtual machine whose host had taken its free pages back, 1.1 without and 1.4
with `Prefault`.

For another device the same reads go through a ring of page-locked chunks, each copied on as it
arrives, so that host memory stays bounded whatever the size.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from nvmeio import files
from nvmeio._io.inflight import InFlight, Stagings, in_groups
from nvmeio._io.long_call import LongCall
from nvmeio._memory import devices, system
from nvmeio._memory.devices import Mark
from nvmeio._memory.mappings import Mapping, Prefault
from nvmeio._pages import PAGE_BYTES, round_down, round_up
from nvmeio.errors import ShortTransferError
from nvmeio.files import File
from nvmeio.handle import AioHandle

# A span from here on has a mapping of its own.
OWN_BYTES = 8 << 20

# The largest arena of smaller spans: the most that one small tensor can keep alive. An arena
# is rounded up to whole huge pages: 1.5 GiB in tensors of 3 MiB took 1.6 GiB in arenas of 16 MiB,
# and loaded at 2.1 GB/s instead of 2.8, where new memory is expensive.
ARENA_BYTES = 32 << 20

# Bytes between two small spans that are read along rather than cut the run in two. A request costs
# about 30 us of Python and of the kernel, in which a drive moves 100 KiB.
HOLE_BYTES = 64 << 10

# The bytes of one operation, unless a single read is larger. A failure is known when its operation
# has ended: more at once would be read in vain. 10,000 reads of 4 KiB, 128 KiB apart, took 0.7 of
# the CPU time and 0.75 of the time that they took one by one; larger ones take what they took.
GROUP_BYTES = 64 << 20

# The ring for other devices: 4 chunks keep both the drive and the copies busy.
CHUNK_BYTES = 32 << 20
CHUNKS = 4


class Span(NamedTuple):
    """A part of an open or named file, of any alignment; `name` is for messages."""

    file: str | os.PathLike[str] | File
    offset: int
    nbytes: int
    name: str = ""


class Run(NamedTuple):
    """One read: [start, end) of a file, from a page boundary on, to `at` in its region."""

    file: int
    start: int
    end: int
    at: int


class Region(NamedTuple):
    """One mapping, the reads that fill it, and the spans in it: (index, offset), ascending."""

    nbytes: int
    runs: list[Run]
    places: list[tuple[int, int]]


def plan_reads(spans: Sequence[Span], keys: Sequence[int], sizes: Sequence[int]) -> list[Region]:
    """The place of each span in memory, and the reads that bring it there.

    `keys` are, for each span, the index of its file in `sizes`, which are in bytes. Regions are
    whole pages. A read begins on a page boundary in file and memory, and ends on one or where the
    file ends. Spans of no bytes are in none. Raises ValueError if two spans of one file overlap.
    """
    offsets = [span.offset for span in spans]
    order = [index for index, span in enumerate(spans) if span.nbytes]
    order.sort(key=offsets.__getitem__)
    if len(sizes) > 1:
        order.sort(key=keys.__getitem__)  # stable
    regions: list[Region] = []
    arena = _Arena()
    before: int | None = None
    for index in order:
        key, span = keys[index], spans[index]
        if before is not None and keys[before] == key:
            previous = spans[before]
            if previous.offset + previous.nbytes > span.offset:
                raise ValueError(
                    f"{named(previous)} [{previous.offset}, {previous.offset + previous.nbytes}) "
                    f"and {named(span)} [{span.offset}, {span.offset + span.nbytes}) overlap"
                )
        before = index
        if span.nbytes >= OWN_BYTES:
            start = round_down(span.offset, PAGE_BYTES)
            end = span.offset + span.nbytes
            runs = [Run(key, start, read_to(end, sizes[key]), 0)]
            regions.append(
                Region(round_up(end, PAGE_BYTES) - start, runs, [(index, span.offset - start)])
            )
        elif not arena.add(index, span, key, sizes[key]):
            regions.append(arena.region())
            arena = _Arena()
            arena.add(index, span, key, sizes[key])
    if arena.places:
        regions.append(arena.region())
    return regions


class _Arena:
    """Small spans gathered until they are enough for a region."""

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self.places: list[tuple[int, int]] = []
        self._nbytes = 0

    def add(self, index: int, span: Span, key: int, size: int) -> bool:
        """Take in a span that lies behind all others of its file; False if it is too much."""
        start = span.offset & -PAGE_BYTES  # as `round_down` and `round_up`, without a call
        end = span.offset + span.nbytes + PAGE_BYTES - 1 & -PAGE_BYTES
        last = self.runs[-1] if self.runs else None
        joins = last is not None and last.file == key and start - last.end <= HOLE_BYTES
        if last is not None and joins:
            _, first, reached, at = last
        else:
            first, reached, at = start, start, self._nbytes
        grown = at + end - first
        if last is not None and grown > ARENA_BYTES:
            return False
        if not joins:
            self.runs.append(Run(key, first, max(reached, min(end, size)), at))
        elif reached < end and reached < size:
            self.runs[-1] = Run(key, first, end if end < size else size, at)
        self.places.append((index, at + span.offset - first))
        if grown > self._nbytes:
            self._nbytes = grown
        return True

    def region(self) -> Region:
        return Region(self._nbytes, self.runs, self.places)


def read_to(end: int, size: int) -> int:
    """Read up to a page boundary, which is no more work for the drive and spares a bounce."""
    return min(round_up(end, PAGE_BYTES), size)


def named(span: Span) -> str:
    return span.name or f"the span at byte {span.offset}"


def inside(run: Run, region: Region, spans: Sequence[Span]) -> list[tuple[int, int]]:
    """The spans that have bytes in a run, as (index, offset in the region)."""
    first, last = run.at, run.at + run.end - run.start
    begin = max(bisect_right(region.places, first, key=itemgetter(1)) - 1, 0)
    end = bisect_left(region.places, last, key=itemgetter(1))
    return [
        (index, at) for index, at in region.places[begin:end] if at + spans[index].nbytes > first
    ]


def read_scattered(
    handle: AioHandle, file: File, places: Sequence[tuple[int, int]], flight: InFlight, what: str
) -> list[bytes]:
    """The bytes at each (offset, nbytes), within whole pages of the file, in any order; blocks.

    `flight` is for somebody else to cancel; nothing is in flight after this returns. `what` they
    are is for errors. Raises TransferError, MemoryError if there is none for the pages, Cancelled.
    """
    pages: set[int] = set()
    for offset, nbytes in places:
        first, last = offset // PAGE_BYTES, (offset + nbytes - 1) // PAGE_BYTES
        pages.add(first)
        if last > first:
            pages.update(range(first + 1, last + 1))
    ordered = sorted(pages)
    rows = {page: row for row, page in enumerate(ordered)}
    mapping = Mapping(len(ordered) * PAGE_BYTES)
    base = mapping.address - mapping.base
    out = mapping.tensor(0, (len(ordered), PAGE_BYTES), torch.uint8)
    begin = partial(handle.async_gather, out, file, file_offsets=torch.tensor(ordered) * PAGE_BYTES)
    with flight:
        flight.start(begin, out.nbytes, None, lambda _: f"read for {what}")
    found: list[bytes] = []
    for offset, nbytes in places:
        page, within = divmod(offset, PAGE_BYTES)
        at = base + rows[page] * PAGE_BYTES + within
        found.append(mapping[at : at + nbytes])
    return found


def read(
    handle: AioHandle, spans: Sequence[Span], device: str | torch.device = "cpu"
) -> list[torch.Tensor]:
    """Read spans of files; blocks, in any thread, with an event loop or without.

    Args:
        handle: Moves the bytes.
        spans: The spans to read, in any order; spans of one file must not overlap.
        device: "cpu": memory of nvmeio, on huge pages. "meta": nothing is read. Any other: copied
            there chunk by chunk, through 128 MiB of host memory (page-locked for CUDA).

    Returns:
        For each span, in the order given, a contiguous 1-D uint8 tensor of `nbytes` elements. Its
        storage is of exactly that size (`tensor.untyped_storage()`), and on the CPU its address
        equals `offset` modulo the page size. Small spans share an arena of at most 32 MiB that
        lives as long as any of them; a span of 8 MiB or more shares with none.

    Raises ShortTransferError if a span ends beyond its file, known before anything is allocated, or
    the file was cut while it was read; TransferError, which names file and span; MemoryError before
    anything is allocated; ValueError if a span is negative or overlaps another. After an error or
    cancellation nothing is in flight, and nothing is kept.

    Cost: no copy for the CPU but of the last, partial block of a file. One system call a file to
    open it, about 30 us of Python a read.
    """
    return Load().run(handle, spans, torch.device(device))


class Load:
    """One `read` for `call`, which may cancel it before the spans are known."""

    def __init__(self, call: LongCall | None = None) -> None:
        self._spans: Sequence[Span] = ()
        self._device = torch.device("cpu")
        self._files: list[File] = []
        self._call = call
        self._flight = InFlight(finished=None if call is None else call.finished)
        if call is not None:
            call.then(self.cancel)

    def cancel(self) -> None:
        """Stop soon; `run` raises once nothing is in flight. From any thread."""
        self._flight.cancel()

    def run(
        self, handle: AioHandle, spans: Sequence[Span], device: torch.device
    ) -> list[torch.Tensor]:
        """Do it, once; see `read`. Raises Cancelled after `cancel`."""
        for span in spans:
            if span.offset < 0 or span.nbytes < 0:
                raise ValueError(f"{named(span)} has a negative offset or length: {span}")
        self._handle, self._spans, self._device = handle, spans, device
        if self._device.type == "meta":
            return [self._new(span.nbytes) for span in self._spans]
        with contextlib.ExitStack() as opened:
            keys = self._open(opened)
            regions = plan_reads(self._spans, keys, [file.size() for file in self._files])
            if self._call is not None:
                self._call.expect(sum(r.end - r.start for region in regions for r in region.runs))
            with self._flight:
                if self._on_host:
                    return self._to_host(regions)
                with devices.on(self._device):
                    return self._through(regions)

    def scattered(
        self, handle: AioHandle, file: File, places: Sequence[tuple[int, int]], what: str
    ) -> list[bytes]:
        """A few bytes at each of many places of a file; see `read_scattered`."""
        return read_scattered(handle, file, places, self._flight, what) if places else []

    @property
    def _on_host(self) -> bool:
        return self._device.type == "cpu"

    def _new(self, nbytes: int) -> torch.Tensor:
        return devices.empty(nbytes, self._device)

    def _open(self, opened: contextlib.ExitStack) -> list[int]:
        """Open each file once; for each span the index of its file."""
        known: dict[Any, int] = {}
        keys: list[int] = []
        sizes: list[int] = []
        for span in self._spans:
            given = span.file
            name: Any = given if isinstance(given, File) else os.fspath(given)
            if name not in known:
                known[name] = len(self._files)
                if not isinstance(given, File):
                    given = opened.enter_context(files.open(given))
                self._files.append(given)
                sizes.append(given.size())
            keys.append(known[name])
            size = sizes[keys[-1]]
            if span.offset + span.nbytes > size:
                raise ShortTransferError(
                    errno.ENODATA,
                    operation="pread",
                    path=self._files[keys[-1]].path,
                    file_offset=span.offset,
                    nbytes=span.nbytes,
                    transferred=0,
                    detail=f"the file ends at byte {size}, before the end of {named(span)}",
                )
        return keys

    # To host memory

    def _to_host(self, regions: list[Region]) -> list[torch.Tensor]:
        # Reserved one by one and never touched here, they would all seem to fit.
        system.check_available(
            sum([span.nbytes for span in self._spans]), sum(region.nbytes for region in regions)
        )
        mappings = [Mapping(region.nbytes) for region in regions]
        with Prefault(mappings) as prefault:
            reads = _reads(regions, mappings)
            for group in in_groups(reads, lambda read: read.memory.nbytes, GROUP_BYTES, math.inf):
                self._start(group)
            found = in_mappings(self._spans, regions, mappings)
            while self._flight:
                self._flight.finish_first()
                prefault.check()
        return found

    # Through a ring of chunks to another device

    def _through(self, regions: list[Region]) -> list[torch.Tensor]:
        found = [self._new(span.nbytes) for span in self._spans]
        copies = ChunkCopies(self._device, self._spans, found)
        stagings = Stagings(CHUNK_BYTES, CHUNKS, self._device)

        def pass_on(chunk: torch.Tensor, run: Run, region: Region) -> None:
            copies.begin(chunk, run, region)
            stagings.give_back(chunk)

        try:
            for run, region in _pieces(regions):
                chunk = stagings.take(self._flight)
                copies.wait_for(chunk)
                read = _Read(chunk[: run.end - run.start], run, region)
                self._start([read], partial(pass_on, chunk, run, region))
            self._flight.drain()
        finally:
            copies.finish()
        return found

    # In flight

    def _start(self, reads: Sequence[_Read], done: Callable[[], None] | None = None) -> None:
        memories = [read.memory for read in reads]
        begin = partial(
            self._handle.async_pread_batch,
            memories,
            [self._files[read.run.file] for read in reads],
            [read.run.start for read in reads],
        )
        nbytes = sum(memory.nbytes for memory in memories)
        self._flight.start(begin, nbytes, done, lambda item: self._label(reads[item]))

    def _label(self, read: _Read) -> str:
        found = inside(read.run, read.region, self._spans)
        names = [named(self._spans[index]) for index, _ in found]
        wanted = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        return f"read for {wanted}"


class _Read(NamedTuple):
    """A read into memory."""

    memory: torch.Tensor
    run: Run
    region: Region


def _reads(regions: Sequence[Region], mappings: Sequence[Mapping]) -> Iterator[_Read]:
    for region, mapping in zip(regions, mappings, strict=True):
        for run in region.runs:
            memory = mapping.tensor(run.at, (run.end - run.start,), torch.uint8)
            yield _Read(memory, run, region)


def in_mappings(
    spans: Sequence[Span], regions: Sequence[Region], mappings: Sequence[Mapping]
) -> list[torch.Tensor]:
    """The spans, each where it lies in the mapping of its region."""
    found: dict[int, torch.Tensor] = {}
    for region, mapping in zip(regions, mappings, strict=True):
        for index, at in region.places:
            found[index] = mapping.tensor(at, (spans[index].nbytes,), torch.uint8)
    return [
        found[index] if span.nbytes else torch.empty(0, dtype=torch.uint8, device="cpu")
        for index, span in enumerate(spans)
    ]


def _pieces(regions: list[Region]) -> Iterator[tuple[Run, Region]]:
    """The reads of all regions, cut to the size of a chunk."""
    for region in regions:
        for run in region.runs:
            for start in range(run.start, run.end, CHUNK_BYTES):
                end = min(start + CHUNK_BYTES, run.end)
                yield run._replace(start=start, end=end, at=run.at + start - run.start), region


class ChunkCopies:
    """Copies what was read of spans to `targets` on a device, on a stream of its own."""

    def __init__(
        self, device: torch.device, spans: Sequence[Span], targets: Sequence[torch.Tensor]
    ) -> None:
        self._spans, self._targets = spans, targets
        self._copies = devices.Beside(device, "load")
        self._marks: dict[int, Mark] = {}
        if device.type == "cuda":
            # The targets' memory may still be read by work that was queued before it was freed.
            self._copies.follow()

    def begin(self, chunk: torch.Tensor, run: Run, region: Region) -> None:
        """Start to copy what a run brought; `chunk` must stay as it is until `wait_for`."""
        first, last = run.at, run.at + run.end - run.start
        for index, at in inside(run, region, self._spans):
            start, end = max(at, first), min(at + self._spans[index].nbytes, last)
            target = self._targets[index][start - at : end - at]
            self._copies.copy(target, chunk[start - first : end - first])
        self._marks[chunk.data_ptr()] = self._copies.mark()

    def wait_for(self, chunk: torch.Tensor) -> None:
        """Wait until the chunk may be overwritten."""
        mark = self._marks.pop(chunk.data_ptr(), None)
        if mark is not None:
            mark.wait()

    def finish(self) -> None:
        """Wait for all copies: their targets may be used on any stream, the chunks freed."""
        self._copies.mark().wait()

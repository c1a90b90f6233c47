"""Which spans of files lie where in memory, and the reads that bring them there. No I/O here.

File pages are read into memory pages, so a span lies at the same offset within its memory page as
within its file page and direct I/O needs no bounce.

- A large span gets a mapping of its own, which goes when its last tensor goes.
- Small spans share arenas of limited size, in the order of the file. Neighbours are read in one
  go, and what lies between them (headers, padding) is read along.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

from nvmeio._files.plan import PAGE_BYTES, round_down, round_up
from nvmeio.files import File

# A span from here on has a mapping of its own.
OWN_BYTES = 8 << 20

# What an arena of smaller spans grows to: the most that one small tensor can keep alive. An arena
# is rounded up to whole huge pages: 1.5 GiB in tensors of 3 MiB took 1.6 GiB in arenas of 16 MiB,
# and loaded at 2.1 GB/s instead of 2.8, where new memory is expensive.
ARENA_BYTES = 32 << 20

# Bytes between two small spans that are read along rather than cut the run in two. A request costs
# about 30 us of Python and of the kernel, in which a drive moves 100 KiB.
HOLE_BYTES = 64 << 10


class Span(NamedTuple):
    """A part of a file.

    Attributes:
        file: A path, or a `nvmeio.File` open for reading (which stays open).
        offset: First byte, >= 0; any alignment.
        nbytes: Length in bytes, >= 0.
        name: What it is to the user, for error messages.
    """

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


def plan(spans: Sequence[Span], keys: Sequence[int], sizes: Sequence[int]) -> list[Region]:
    """Where each span lies in memory, and the reads that bring it there.

    Args:
        spans: The spans; `file` is not looked at.
        keys: For each span, the index of its file.
        sizes: For each file, its size in bytes.

    Returns:
        Regions of whole pages. A read begins on a page boundary in file and memory, and ends on
        one or where the file ends. Spans of no bytes are in none.

    Raises:
        ValueError: Two spans of one file overlap.
    """
    offsets = [span.offset for span in spans]
    order = sorted(
        (index for index, span in enumerate(spans) if span.nbytes), key=offsets.__getitem__
    )
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
                Region(round_up(end, PAGE_BYTES) - start, runs, [(index, span.offset - start)]),
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
        start = round_down(span.offset, PAGE_BYTES)
        end = round_up(span.offset + span.nbytes, PAGE_BYTES)
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
            self.runs[-1] = Run(key, first, min(end, size), at)
        self.places.append((index, at + span.offset - first))
        self._nbytes = max(self._nbytes, grown)
        return True

    def region(self) -> Region:
        return Region(self._nbytes, self.runs, self.places)


def read_to(end: int, size: int) -> int:
    """Up to a page boundary, which is no more work for the drive and spares a bounce."""
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

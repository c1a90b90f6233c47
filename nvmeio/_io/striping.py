"""Bytes over several drives: which of them lie where.

What counts as one file lies in a file on each drive. It is a row of *bands*, spans that are moved
as one: a section of a subgroup, a unit of a model. Each band is dealt to all drives, as RAID 0
deals a stripe, but in proportion to their speed. So a transfer of a band keeps all drives busy, and
they are done together. With one drive it is that drive's file.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from nvmeio._files.plan import PAGE_BYTES, round_up
from nvmeio.files import File

# A reader that has 160 MiB under way at a time, in order, has several of these: longer bands are
# several stripes, lest it should read from one drive after the other.
MOST_STRIPE_BYTES = 32 << 20
# Below this a drive's requests become too short for its full speed: shorter bands lie on one drive.
LEAST_CHUNK_BYTES = 128 << 10


class Chunk(NamedTuple):
    """A run of bytes that lies on one drive.

    Attributes:
        drive: Which.
        file_offset: Where it begins in that drive's file.
        start: Where it begins in what was asked for.
        nbytes: Its length.
    """

    drive: int
    file_offset: int
    start: int
    nbytes: int


class Striping:
    """How bytes are dealt to drives. Pure arithmetic.

    Args:
        weights: Of each drive; positive integers.
        bands: Their lengths, in order; whole pages where there are several drives. What lies where
            does not depend on bands that follow.

    Attributes:
        lengths: Of each drive's file.
    """

    def __init__(self, weights: Sequence[int], bands: Iterable[int]) -> None:
        self._weights = tuple(weights)
        self._starts = [0]  # of each stripe, and behind the last
        self._chunks: list[tuple[int, ...]] = []  # of each stripe: its bytes on each drive
        self._offsets: list[tuple[int, ...]] = []  # of each stripe: where they begin there
        self.lengths = [0] * len(self._weights)
        for band in bands:
            self._add(band)

    def _add(self, band: int) -> None:
        count = max(1, -(-band // MOST_STRIPE_BYTES)) if len(self._weights) > 1 else 1
        each = round_up(-(-band // count), PAGE_BYTES)
        for at in range(0, band, max(1, each)):
            nbytes = min(each, band - at)
            dealt = self._dealt(nbytes)
            self._starts.append(self._starts[-1] + nbytes)
            self._chunks.append(dealt)
            self._offsets.append(tuple(self.lengths))
            self.lengths = [sum(two) for two in zip(self.lengths, dealt, strict=True)]

    def _dealt(self, nbytes: int) -> tuple[int, ...]:
        drives, total = len(self._weights), sum(self._weights)
        if nbytes < drives * LEAST_CHUNK_BYTES or drives == 1:
            after = sum(self.lengths) + nbytes
            short = [
                weight * after - total * have
                for weight, have in zip(self._weights, self.lengths, strict=True)
            ]
            taker = short.index(max(short))
            return tuple(nbytes * (drive == taker) for drive in range(drives))
        pages, sum_up_to, ends = nbytes // PAGE_BYTES, 0, [0]
        for weight in self._weights:
            sum_up_to += weight
            ends.append(pages * sum_up_to // total * PAGE_BYTES)
        ends[-1] = nbytes
        return tuple(end - start for start, end in itertools.pairwise(ends))

    def spans(self, offset: int, nbytes: int) -> list[Chunk]:
        """Where bytes `offset` to `offset + nbytes` lie, in order."""
        if len(self._weights) == 1:
            return [Chunk(0, offset, 0, nbytes)]
        found: list[Chunk] = []
        end, start = offset + nbytes, 0
        for stripe in range(bisect.bisect_right(self._starts, offset) - 1, len(self._chunks)):
            at = self._starts[stripe]
            if at >= end:
                break
            for drive, chunk in enumerate(self._chunks[stripe]):
                first, last = max(offset, at), min(end, at + chunk)
                if first < last:
                    place = self._offsets[stripe][drive] + first - at
                    found.append(Chunk(drive, place, start, last - first))
                    start += last - first
                at += chunk
        return found


class FileSpan(NamedTuple):
    """A run of bytes in an open file; `start` is where it begins in what was asked for."""

    file: File
    file_offset: int
    start: int
    nbytes: int


class StripedFile:
    """One file on each drive that count as one.

    Args:
        files: Open, one for each drive; closed with it.
        striping: How bytes are dealt to them.
    """

    def __init__(self, files: Sequence[File], striping: Striping) -> None:
        self.files = tuple(files)
        self._striping = striping

    def spans(self, offset: int, nbytes: int) -> list[FileSpan]:
        """Where bytes lie, in order."""
        return [
            FileSpan(self.files[drive], *rest)
            for drive, *rest in self._striping.spans(offset, nbytes)
        ]

    def describe(self, offset: int, nbytes: int, most: int = 4) -> str:
        """Where bytes lie, for messages: paths and bytes."""
        spans = self.spans(offset, nbytes)
        told = [
            f"{each.file.path} bytes [{each.file_offset}, {each.file_offset + each.nbytes})"
            for each in spans[:most]
        ]
        return ", ".join(told) + (f" and {len(spans) - most} more" if len(spans) > most else "")

    def close(self) -> None:
        """Close all of them; idempotent."""
        for file in self.files:
            file.close()

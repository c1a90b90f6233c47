"""The checksums of a packed model, compared as its bytes arrive.

`pack` writes a CRC-32 of each tensor into the index of its file, of the experts of a layer one for
each expert. The chunks of a unit arrive in any order (what the page cache holds comes past the
queue), so each chunk is summed by itself, and a tensor's sums are joined when the last one is
there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from nvmeio._residency.reader import WantedBytes
from nvmeio._storage import crc32
from nvmeio.errors import IntegrityError
from nvmeio.files import File
from nvmeio.inference._plan.slot_layout import CutSums, ExpertRegion, Weight


class ExpectedBytes(NamedTuple):
    """The bytes that a slot should hold after a read.

    Attributes:
        name: The tensor's, in the file.
        files: Indexes of the files that they lie in.
        offset: Their place there.
        at: Their place in the slot.
        sum: Their CRC-32.
        cut: For a tile, whose `sum` is that of the whole: the tiles' checksums, and which it is.
    """

    name: str
    files: tuple[int, ...]
    offset: int
    at: int
    nbytes: int
    sum: int
    cut: tuple[CutSums, int] | None = None


def expected_of(
    weights: Sequence[Weight],
    starts: Sequence[int],
    spans: Callable[[int, int, int], Sequence[tuple[int, int, int]]],
) -> tuple[ExpectedBytes, ...]:
    """The checksums of a unit, in the order of its slot.

    For each part, `starts` has the slot's byte at which it begins. `spans` is as in
    `SafetensorsSet`.
    """

    def files(file: int, offset: int, nbytes: int) -> tuple[int, ...]:
        return tuple(dict.fromkeys(each for each, _, _ in spans(file, offset, offset + nbytes)))

    found: list[ExpectedBytes] = []
    named = [(weight.sources, n, part) for weight in weights for n, part in enumerate(weight.parts)]
    regions: set[ExpertRegion] = set()
    for (sources, number, part), start in zip(named, starts, strict=True):
        if not part.extents:
            continue
        region = part.region
        if region is not None:
            if region not in regions:
                regions.add(region)
                for expert, value in enumerate(region.sums):
                    one = range(expert, expert + 1)
                    read = region.read_of(one, start - part.start_in_region)
                    among_files = files(read.file, read.start, read.nbytes)
                    place = (among_files, read.start, read.at)
                    found.append(ExpectedBytes(region.name, *place, read.nbytes, value))
            continue
        extent, count = part.extents[0], len(part.sums)
        if part.cut is not None:
            among_files = files(extent.file, extent.offset, part.nbytes)
            place = (among_files, extent.offset, start)
            whole = part.nbytes, part.cut[0].whole
            found.append(ExpectedBytes(sources[number], *place, *whole, part.cut))
        for share, value in enumerate(part.sums):
            nbytes = part.nbytes // count
            at = share * nbytes
            place = (files(extent.file, extent.offset + at, nbytes), extent.offset + at, start + at)
            found.append(ExpectedBytes(sources[number], *place, nbytes, value))
    return tuple(sorted(found, key=lambda each: each.at))


class Arriving:
    """The checksums of a slot that is being filled; used by the reader's thread.

    `expected` are the bytes of this fill, in the order of the slot.
    """

    def __init__(self, expected: Sequence[ExpectedBytes], files: Sequence[File]) -> None:
        self._expected = expected
        self._files = files
        self._found: list[list[tuple[int, int, int]]] = [[] for _ in expected]

    def arrived(self, chunk: WantedBytes) -> None:
        """Sum arrived bytes, while they are in the CPU's caches."""
        first, last = chunk.at, chunk.at + chunk.memory.nbytes
        address = chunk.memory.data_ptr()
        for each, found in zip(self._expected, self._found, strict=True):
            start, end = max(each.at, first), min(each.at + each.nbytes, last)
            if start < end:
                found.append(
                    (start, end - start, crc32.of_memory(address + start - first, end - start))
                )

    def finished(self) -> None:
        """Raise IntegrityError if bytes differ from the packed ones."""
        for each, found in zip(self._expected, self._found, strict=True):
            total = 0
            for _, nbytes, value in sorted(found):
                total = crc32.combine(total, value, nbytes)
            _compare(each, total, self._files)


def verify(host: torch.Tensor, expected: Sequence[ExpectedBytes], files: Sequence[File]) -> None:
    """Raise IntegrityError if bytes in a slot differ from the packed ones."""
    for each in expected:
        _compare(each, crc32.of_memory(host.data_ptr() + each.at, each.nbytes), files)


def _compare(each: ExpectedBytes, found: int, files: Sequence[File]) -> None:
    right = found == each.sum if each.cut is None else each.cut[0].agrees(each.cut[1], found)
    if not right:
        others = "" if each.cut is None else ", or other rows of it"
        where = " or ".join(files[file].path for file in each.files)
        raise IntegrityError(
            f"{where}: bytes [{each.offset}, {each.offset + each.nbytes}) of "
            f"{each.name!r} differ from what was packed there{others}: look at `dmesg` and "
            "`smartctl -a`, and pack the model again (checksum=False takes them as they are)",
            expected=f"CRC-32 {each.sum:08x}" + ("" if each.cut is None else " of the whole"),
            found=f"{found:08x}",
        )

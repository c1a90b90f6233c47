"""Several drives at once: how fast each is, a handle for each, and which bytes lie where.

One logical file lies in a file on each drive. It is a row of *bands*, spans that are moved
as one: a section of a subgroup, a unit of a model. Each band is dealt to all drives, as RAID 0
deals a stripe, but in proportion to their speed. So a transfer of a band keeps all drives busy, and
they are done together. With one drive it is that drive's file. A `ScratchFile` is room for what
nobody needs after this process.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import itertools
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from nvmeio import files, tuned
from nvmeio._io.handles import new_handle
from nvmeio._memory.leases import FreeBlocks
from nvmeio._pages import PAGE_BYTES, round_up
from nvmeio._storage import durable
from nvmeio._storage.untrusted import open_nameless
from nvmeio._threads.closing import do_all, on_error
from nvmeio.errors import TransferError
from nvmeio.files import File
from nvmeio.handle import AioHandle
from nvmeio.operation import Operation

# A reader that has 160 MiB under way at a time, in order, has several of these: longer bands are
# several stripes, lest it should read from one drive after the other.
MOST_STRIPE_BYTES = 32 << 20
# Below this a drive's requests become too short for its full speed: shorter bands lie on one drive.
LEAST_CHUNK_BYTES = 128 << 10

# For each scratch file over several drives: its bytes are dealt to all of them.
_BAND_BYTES = 2 << 20
# It grows by a quarter, and by no less: allocating takes a lock of the file system's.
_LEAST_GROWTH_BYTES = 64 << 20


class Chunk(NamedTuple):
    """Bytes on one drive: where they begin in its file, and in what was asked for."""

    drive: int
    file_offset: int
    start: int
    nbytes: int


class Striping:
    """The division of bytes over drives. Pure arithmetic.

    `weights` are positive integers, one a drive. `bands` are lengths, whole pages if there are
    several drives; what lies where does not depend on bands that follow. `lengths` are those of the
    files.
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
        """The places of bytes `offset` to `offset + nbytes`, in order."""
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
    """A run of bytes in an open file, and where it begins in memory or in what was asked for."""

    file: File
    file_offset: int
    start: int
    nbytes: int

    def part(self, memory: torch.Tensor) -> torch.Tensor:
        """Its bytes of the memory that it is a part of."""
        return memory[self.start : self.start + self.nbytes]


class StripedFile:
    """One file on each drive that count as one; closes them."""

    def __init__(self, files: Sequence[File], striping: Striping) -> None:
        self.files = tuple(files)
        self.striping = striping

    def spans(self, offset: int, nbytes: int, start: int = 0) -> list[FileSpan]:
        """The places of bytes `offset` to `offset + nbytes`, for memory from byte `start` on."""
        return [
            FileSpan(self.files[drive], place, start + at, length)
            for drive, place, at, length in self.striping.spans(offset, nbytes)
        ]

    def describe(self, offset: int, nbytes: int, most: int = 4) -> str:
        spans = self.spans(offset, nbytes)
        told = [
            f"{each.file.path} bytes [{each.file_offset}, {each.file_offset + each.nbytes})"
            for each in spans[:most]
        ]
        return ", ".join(told) + (f" and {len(spans) - most} more" if len(spans) > most else "")

    def close(self) -> None:
        for file in self.files:
            file.close()


def weights_of(
    directories: Sequence[str | os.PathLike[str]], reads: float = 1.0, writes: float = 0.0
) -> list[int]:
    """How much of the bytes each of some directories should get.

    In proportion to the rates that `nvmeio tune --save` measured, for so many bytes read and so
    many written, if it has them for all; else equal. Directories on one file system share its rate.
    """
    equal = [1] * len(directories)
    if len(directories) < 2:
        return equal
    found: list[float] = []
    try:
        keys = [tuned.file_system_key(each) for each in directories]
        settings = [tuned.find(each) for each in directories]
    except (ValueError, OSError):  # `new_handle` warns of it
        return equal
    sharing = Counter(keys)
    for key, setting in zip(keys, settings, strict=True):
        seconds = 0.0
        for share, rate in (
            (reads, setting and setting.read_gb_per_s),
            (writes, setting and setting.write_gb_per_s),
        ):
            if share and not (isinstance(rate, (int, float)) and rate > 0):
                return equal
            seconds += share / rate if share and rate else 0.0
        found.append(1 / seconds / sharing[key])
    return [max(1, round(1000 * rate / sum(found))) for rate in found]


class DriveHandles:
    """The handles that files on some drives are moved by; `first` is that of the first directory.

    The caller's handle is for all of them and stays open; None makes one for each device.
    """

    def __init__(self, handle: AioHandle | None, directories: Sequence[str]) -> None:
        self._own: list[AioHandle] = []
        self._by_device: dict[int, AioHandle] = {}
        if handle is None:
            with on_error(self.close):
                for directory in directories:
                    device = os.stat(directory).st_dev
                    if device not in self._by_device:
                        self._own.append(new_handle(directory))
                        self._by_device[device] = self._own[-1]
        self.first = self._own[0] if handle is None else handle

    def of(self, file: File) -> AioHandle:
        """The handle of the drive that a file lies on; the first one's for a file elsewhere."""
        if len(self._by_device) < 2:
            return self.first
        with files.in_use(file) as opened:
            return self._by_device.get(opened.inode[0], self.first)

    @property
    def mover(self) -> AioHandle | DriveHandles:
        """The mover with the fewest calls: the handle if there is just one, else these."""
        return self.first if len(self._by_device) < 2 else self

    def async_pread(self, memory: torch.Tensor, file: File, file_offset: int = 0) -> Operation:
        return self.of(file).async_pread(memory, file, file_offset)

    def async_pwrite(self, memory: torch.Tensor, file: File, file_offset: int = 0) -> Operation:
        return self.of(file).async_pwrite(memory, file, file_offset)

    def sync_fsync(self, file: File, data_only: bool = False) -> None:
        self.of(file).sync_fsync(file, data_only=data_only)

    def close(self) -> None:
        """Close the handles that it made; idempotent."""
        do_all(handle.close for handle in self._own)


class ScratchFile:
    """Room that is taken and given back, in directories on several drives.

    For one thread, or several in turn. `band_bytes`, on each of several drives, are what is moved
    as one. It grows by `growth_bytes` at least, if the drives have so much.
    """

    def __init__(
        self,
        directories: Sequence[str],
        band_bytes: int | None = None,
        growth_bytes: int | None = None,
    ) -> None:
        self._weights = weights_of(directories, reads=1.0, writes=1.0)
        band = _BAND_BYTES if band_bytes is None else band_bytes
        self._band = band * len(directories) if len(directories) > 1 else PAGE_BYTES
        self._growth_bytes = _LEAST_GROWTH_BYTES if growth_bytes is None else growth_bytes
        self.files: list[File] = []
        self._free = FreeBlocks(0)
        self.nbytes = 0  # of all files
        with on_error(self.close):
            for each in directories:
                self.files.append(open_nameless(each))
        self._striped = StripedFile(self.files, Striping(self._weights, []))

    def take(self, nbytes: int) -> int:
        """Take room, in whole pages; TransferError (ENOSPC) if a drive is full."""
        wanted = round_up(nbytes, PAGE_BYTES)
        place = self._free.take(wanted)
        if place is None:
            self._grow(wanted)
            place = self._free.take(wanted)
            assert place is not None
        return place

    def give_back(self, place: int, nbytes: int) -> None:
        """Give room back that nothing reads or writes any more."""
        self._free.put(place, round_up(nbytes, PAGE_BYTES))

    def spans(self, place: int, nbytes: int) -> list[FileSpan]:
        """The parts of files that are there, in order."""
        return self._striped.spans(place, nbytes)

    def describe(self, place: int, nbytes: int) -> str:
        return self._striped.describe(place, nbytes)

    @property
    def used_bytes(self) -> int:
        return self.nbytes - self._free.nbytes

    def _grow(self, wanted: int) -> None:
        generous = max(wanted, self._growth_bytes, self.nbytes // 4)
        try:
            self._extend(round_up(generous, self._band))
        except TransferError as full:
            if full.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            self._extend(round_up(wanted, self._band))

    def _extend(self, more: int) -> None:
        # On one drive a band may have any length; on several, no byte changes its place.
        bands = [self.nbytes + more]
        if len(self.files) > 1:
            bands = [self._band] * ((self.nbytes + more) // self._band)
        striping = Striping(self._weights, bands)
        try:
            for file, length in zip(self.files, striping.lengths, strict=True):
                with files.in_use(file, True) as opened:
                    durable.reserve(opened.any_fd(), length, file.path)
        except BaseException:  # the other drives keep no room that this one has not
            for file, length in zip(self.files, self._striped.striping.lengths, strict=True):
                with contextlib.suppress(OSError), files.in_use(file, True) as opened:
                    os.ftruncate(opened.any_fd(), length)
            raise
        self._striped = StripedFile(self.files, striping)
        self._free.put(self.nbytes, more)
        self.nbytes += more

    def close(self) -> None:
        """Close the files, which are gone then; idempotent."""
        for file in self.files:
            file.close()

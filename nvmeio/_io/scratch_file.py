"""Room on drives for bytes that nobody needs after this process: a file without a name on each.

It goes when it is closed, and with the process, however that ends. Room that is given back is taken
again before the files grow, so work that repeats itself allocates nothing after its first round.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence

from nvmeio._files.plan import PAGE_BYTES, round_up
from nvmeio._io.drives import weights_of
from nvmeio._io.striping import FileSpan, StripedFile, Striping
from nvmeio._memory.free_blocks import FreeBlocks
from nvmeio._storage import durable
from nvmeio._storage.private import open_nameless
from nvmeio.errors import TransferError
from nvmeio.files import File

# Of a file over several drives, for each of them: what is put there is dealt to all.
_BAND_BYTES = 2 << 20
# It grows by a quarter, and by no less: allocating takes a lock of the file system's.
_LEAST_GROWTH_BYTES = 64 << 20


class ScratchFile:
    """Room that is taken and given back. One thread, or several in turn.

    Args:
        directories: One on each of the drives; they exist.

    Raises:
        OSError: A file cannot be made there.
    """

    def __init__(self, directories: Sequence[str]) -> None:
        self._weights = weights_of(directories, reads=1.0, writes=1.0)
        self._files: list[File] = []
        self._lengths = [0] * len(directories)
        self._striped: StripedFile | None = None
        self._free = FreeBlocks(0)
        self.nbytes = 0  # of all files
        try:
            for each in directories:
                self._files.append(open_nameless(each))
        except BaseException:
            self.close()
            raise

    def take(self, nbytes: int) -> int:
        """Where there is room, which is whole pages.

        Raises:
            TransferError: There is none left on a drive (ENOSPC).
        """
        wanted = round_up(nbytes, PAGE_BYTES)
        place = self._free.take(wanted)
        if place is None:
            self._grow(wanted)
            place = self._free.take(wanted)
            assert place is not None
        return place

    def give_back(self, place: int, nbytes: int) -> None:
        """Nothing reads or writes there any more."""
        self._free.put(place, round_up(nbytes, PAGE_BYTES))

    def spans(self, place: int, nbytes: int) -> list[FileSpan]:
        """The parts of files that are there, in order."""
        assert self._striped is not None
        return self._striped.spans(place, nbytes)

    def describe(self, place: int, nbytes: int) -> str:
        """The same for messages."""
        assert self._striped is not None
        return self._striped.describe(place, nbytes)

    @property
    def used_bytes(self) -> int:
        """What is taken."""
        return self.nbytes - self._free.nbytes

    def _grow(self, wanted: int) -> None:
        band = _BAND_BYTES * len(self._files) if len(self._files) > 1 else PAGE_BYTES
        generous = max(wanted, _LEAST_GROWTH_BYTES, self.nbytes // 4)
        try:
            self._extend(round_up(generous, band), band)
        except TransferError as full:
            if full.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            self._extend(round_up(wanted, band), band)

    def _extend(self, more: int, band: int) -> None:
        # Of one drive a band may be of any length; of several, what lies where does not change.
        bands = [self.nbytes + more]
        if len(self._files) > 1:
            bands = [band] * ((self.nbytes + more) // band)
        striping = Striping(self._weights, bands)
        try:
            for file, length in zip(self._files, striping.lengths, strict=True):
                with _descriptor(file) as fd:
                    durable.reserve(fd, length, file.path)
        except BaseException:  # the other drives keep no room that this one has not
            for file, length in zip(self._files, self._lengths, strict=True):
                with contextlib.suppress(OSError), _descriptor(file) as fd:
                    os.ftruncate(fd, length)
            raise
        self._lengths = striping.lengths
        self._striped = StripedFile(self._files, striping)
        self._free.put(self.nbytes, more)
        self.nbytes += more

    def close(self) -> None:
        """Close the files, which are gone then; idempotent."""
        for file in self._files:
            file.close()


@contextlib.contextmanager
def _descriptor(file: File) -> Iterator[int]:
    opened = file.acquire(True)
    try:
        yield opened.any_fd()
    finally:
        opened.release()

"""nvmeio's gathers and scatters, in a worker process; and where their rows lie."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

import torch
from _measure import Sample, timed

import nvmeio
from peers._loops import lag_during

CHECKED_ROWS = 64

# Places: (bytes of the file, bytes of a row, how many rows) -> file offsets


def anywhere(nbytes: int, row_bytes: int, count: int) -> torch.Tensor:
    """At random, none twice where the file has as many."""
    places = nbytes // row_bytes
    generator = torch.Generator().manual_seed(row_bytes)
    if places < 4 * count:
        return (
            torch.randperm(places, generator=generator).repeat(-(-count // places))[:count]
            * row_bytes
        )
    found = torch.randint(places, (count + count // 2,), generator=generator).unique()
    return found[torch.randperm(len(found), generator=generator)[:count]] * row_bytes


def zipf(nbytes: int, row_bytes: int, count: int) -> torch.Tensor:
    """Zipf(1.0) over a table of a 16th as many rows, popular ones anywhere in it."""
    generator = torch.Generator().manual_seed(row_bytes)
    table = max(1, min(count // 16, nbytes // row_bytes))
    weights = 1 / torch.arange(1, table + 1, dtype=torch.float64)
    ranks = torch.multinomial(weights, count, replacement=True, generator=generator)
    return torch.randperm(table, generator=generator)[ranks] * row_bytes


def every_second(nbytes: int, row_bytes: int, count: int) -> torch.Tensor:
    """In the order of the file, one wanted and one not."""
    return torch.arange(min(count, nbytes // row_bytes // 2)) * (2 * row_bytes)


PLACES: dict[str, Callable[[int, int, int], torch.Tensor]] = {
    "anywhere": anywhere,
    "zipf": zipf,
    "every second": every_second,
}


class Gathers:
    """A handle, and rows in memory of its own, each touched before anything is timed."""

    def __init__(self) -> None:
        self._handle: nvmeio.AioHandle | None = None
        self._rows = torch.empty(0)
        self._offsets = torch.empty(0, dtype=torch.int64)

    def prepare(
        self, path: str, nbytes: int, places: str, row_bytes: int, count: int, depth: int
    ) -> int:
        """Choose rows of a file, and see that they are gathered right; how many there are."""
        self.release()
        self._offsets = PLACES[places](nbytes, row_bytes, count)
        self._rows = nvmeio.empty_aligned(len(self._offsets), row_bytes, dtype=torch.uint8)
        self._rows.fill_(0)
        self._handle = nvmeio.AioHandle(queue_depth=depth)
        self.gather(path)
        self._compare(path)
        return len(self._offsets)

    def gather(self, path: str, calls: int = 1) -> Sample:
        """All rows.

        Args:
            path: The file.
            calls: One by one, each for a part of the rows, into the memory of the first part.
        """
        handle = self._opened()
        with nvmeio.open(path, "r") as file, timed(self._rows.nbytes, len(self._rows)) as sample:
            if calls == 1:
                handle.sync_gather(self._rows, file, file_offsets=self._offsets)
            else:
                for offsets in self._offsets.chunk(calls):
                    handle.sync_gather(self._rows[: len(offsets)], file, file_offsets=offsets)
        return self._counted(sample)

    def scatter(self, path: str) -> Sample:
        """All rows, as they were gathered: the file stays what it was."""
        handle = self._opened()
        with nvmeio.open(path, "r+") as file, timed(self._rows.nbytes, len(self._rows)) as sample:
            handle.sync_scatter(self._rows, file, file_offsets=self._offsets)
        return self._counted(sample)

    def lag(self, path: str) -> Sample:
        """How late the loop's timers are while all rows are gathered."""

        async def gather() -> None:
            with nvmeio.open(path, "r") as file:
                await self._opened().async_gather(self._rows, file, file_offsets=self._offsets)

        return asyncio.run(lag_during(gather(), self._rows.nbytes, len(self._rows)))

    def idle_lag(self, seconds: float) -> Sample:
        """The same clock on a loop with nothing to do: what this machine adds by itself."""
        return asyncio.run(lag_during(asyncio.sleep(seconds), 0, 0))

    def release(self) -> None:
        if self._handle is not None:
            self._handle.close()
        self._handle = None
        self._rows = torch.empty(0)

    def close(self) -> None:
        self.release()

    def _opened(self) -> nvmeio.AioHandle:
        if self._handle is None:
            raise RuntimeError("prepare() comes first")
        return self._handle

    def _counted(self, sample: Sample) -> Sample:
        """What of the file was passed over, and in how many reads: for rows near each other."""
        span = int(self._offsets.max() - self._offsets.min()) + self._rows.shape[1]
        sample.extra = {"span_bytes": float(span)}
        return sample

    def _compare(self, path: str) -> None:
        """Fast and wrong does not count."""
        file = os.open(path, os.O_RDONLY)
        try:
            step = max(1, len(self._rows) // CHECKED_ROWS)
            for row in range(0, len(self._rows), step):
                offset = int(self._offsets[row])
                if self._rows[row].numpy().tobytes() != os.pread(file, self._rows.shape[1], offset):
                    raise RuntimeError(f"wrong bytes in row {row}, from {offset} of {path}")
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)

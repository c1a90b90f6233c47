"""What one measurement is: a sample, how it is timed, and how contenders take turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from nvmeio.cli.measure.disk import cpu_seconds
from nvmeio.cli.measure.worker import order

GIB = 1 << 30


@dataclass
class Sample:
    """One timed piece of work.

    Attributes:
        seconds: Wall time of the work alone, without set-up.
        nbytes: Bytes asked for.
        operations: Operations asked for; 0 where the row counts bytes only.
        cpu_seconds: User and system time of the whole process while it worked.
        extra: Row-specific figures (lag percentiles in ms).
        disk_read: Bytes that the device read meanwhile, by anybody; None where unknown.
        disk_written: Bytes that the device wrote meanwhile, by anybody.
    """

    seconds: float = 0.0
    nbytes: int = 0
    operations: int = 0
    cpu_seconds: float = 0.0
    extra: dict[str, float] = field(default_factory=dict)
    disk_read: int | None = None
    disk_written: int | None = None

    @property
    def gb_per_s(self) -> float:
        return self.nbytes / self.seconds / 1e9

    @property
    def iops(self) -> float:
        return self.operations / self.seconds

    @property
    def cpu_per_gib(self) -> float:
        return self.cpu_seconds / (self.nbytes / GIB)

    @property
    def disk_share(self) -> float | None:
        """Bytes that the device moved, either way, per byte asked for."""
        if self.disk_read is None or self.disk_written is None or not self.nbytes:
            return None
        return max(self.disk_read, self.disk_written) / self.nbytes


@dataclass(frozen=True)
class Contender:
    """One side of a comparison.

    Attributes:
        name: Key of its samples.
        run: Does the work once and returns what it took.
        before: Puts things back to the start, outside the timing.
    """

    name: str
    run: Callable[[], Sample]
    before: Callable[[], None] | None = None


@contextmanager
def timed(nbytes: int = 0, operations: int = 0) -> Iterator[Sample]:
    """Fill a `Sample` with the wall and CPU time of the block, all threads included."""
    sample = Sample(nbytes=nbytes, operations=operations)
    cpu = cpu_seconds()
    start = time.perf_counter()
    yield sample
    sample.seconds = time.perf_counter() - start
    sample.cpu_seconds = cpu_seconds() - cpu


def turns(contenders: Sequence[Contender], repeats: int) -> Iterator[tuple[int, Contender]]:
    """Each repeat runs everybody once, each time starting with somebody else."""
    for repeat in range(repeats):
        for contender in order(contenders, repeat, repeats):
            yield repeat, contender


def median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def percentile(values: Sequence[float], percent: float) -> float:
    """Nearest rank: an observed value, never an average of two."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]

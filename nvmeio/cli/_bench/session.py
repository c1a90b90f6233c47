"""Who runs when: engines take turns within each loop.

So whatever else the machine does hits all of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from nvmeio.cli._bench.engines import RAW, REFERENCE, FioPool
from nvmeio.cli._bench.task import LocalPool, Pool, ProcessPool
from nvmeio.cli._bench.workload import REFERENCE_BYTES_MOST, Lap, Op, Timing, Workload
from nvmeio.cli._exits import Failed
from nvmeio.cli._terminal import GB
from nvmeio.cli.measure.disk import DiskBytes, Disks
from nvmeio.cli.measure.worker import order
from nvmeio.errors import BackendUnavailableError, NvmeioError


@dataclass(frozen=True)
class Loop:
    """One loop of one engine, all tasks together.

    Attributes:
        task_s: How long each task's transfer took.
        end_to_end_s: From the first task's start to the last task's end.
        nbytes: What all tasks moved.
        cpu_s: User and system time of all processes.
        disk: What the drives moved meanwhile, for anybody; None where there are none to ask.
        cached: The largest part of a file that lay in the page cache before a read.
    """

    task_s: list[float]
    end_to_end_s: float
    nbytes: int
    cpu_s: float
    disk: DiskBytes | None
    cached: float | None

    @property
    def slowest_task_s(self) -> float:
        """The task latency of the loop."""
        return max(self.task_s)

    @property
    def gb_per_s(self) -> float:
        """End to end."""
        return self.nbytes / self.end_to_end_s / GB


@dataclass
class Series:
    """All loops of one engine and direction."""

    engine: str
    op: Op
    warmup: list[Loop] = field(default_factory=list)
    loops: list[Loop] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """What all tasks move in a loop."""
        return self.loops[0].nbytes

    @property
    def end_to_end_s(self) -> float:
        """Median of the loops."""
        return statistics.median(loop.end_to_end_s for loop in self.loops)

    @property
    def task_s(self) -> float:
        """Median of the loops, of the slowest task in each."""
        return statistics.median(loop.slowest_task_s for loop in self.loops)

    @property
    def gb_per_s(self) -> float:
        """End to end, from the median latency."""
        return self.nbytes / self.end_to_end_s / GB

    @property
    def task_gb_per_s(self) -> float:
        """From the median task latency."""
        return self.nbytes / self.task_s / GB

    @property
    def range_gb_per_s(self) -> tuple[float, float]:
        """The slowest and the fastest loop."""
        rates = [loop.gb_per_s for loop in self.loops]
        return min(rates), max(rates)

    @property
    def spread(self) -> float:
        """Half the distance between them, as a part of the median: 0.05 stands for ± 5 %."""
        low, high = self.range_gb_per_s
        return (high - low) / 2 / self.gb_per_s

    @property
    def cpu_s_per_gb(self) -> float:
        """User and system time per 10**9 bytes, median."""
        return statistics.median(loop.cpu_s / (loop.nbytes / GB) for loop in self.loops)

    @property
    def disk_per_byte(self) -> float | None:
        """Bytes that the drives moved in this direction per byte asked for, median."""
        moved = [
            (loop.disk.read if self.op == "read" else loop.disk.written) / loop.nbytes
            for loop in self.loops
            if loop.disk is not None
        ]
        return statistics.median(moved) if moved else None

    @property
    def cached(self) -> float | None:
        """How much of the files lay in the page cache before a read, median."""
        parts = [loop.cached for loop in self.loops if loop.cached is not None]
        return statistics.median(parts) if parts else None


class Session:
    """Measures engines beside each other.

    Args:
        workload: With the scratch directories as its places.
        engines: Their names, in the order of the user.
        ops: Directions, one after the other.
        reference: Measure the plain loop beside them.
        include_warmup: Count the warm-up loops too.
        strict: The first engine that is missing or fails ends everything.

    Attributes:
        series: One for each engine and direction that were measured, or are being.
        missing: Engines that cannot be had here, and why.
        failed: Engines that began and did not do the work, and why.
        buffered: Engines whose transfers go through the page cache, once `run` has set them up.
        fio_memory: What fio's buffers lie on, "" where it takes no part.
    """

    def __init__(
        self,
        workload: Workload,
        engines: Sequence[str],
        ops: Sequence[Op],
        *,
        reference: bool = True,
        include_warmup: bool = False,
        strict: bool = False,
    ) -> None:
        self._workload = workload
        self._engines = [*engines, REFERENCE] if reference else list(engines)
        self._ops = ops
        self._include_warmup = include_warmup
        self._strict = strict or len(engines) == 1
        self.series: list[Series] = []
        self.missing: dict[str, BackendUnavailableError] = {}
        self.failed: dict[str, Exception] = {}
        self._on_step: Callable[[str], None] = lambda what: None
        self._pools: dict[str, Pool] = {}
        self._of: dict[str, Pool] = {}
        self._disks = Disks({place.directory for place in workload.places})
        self.fio_memory = ""
        self.buffered: list[str] = []

    @property
    def steps(self) -> int:
        """How often `run` tells what comes next."""
        turns = len(self._ops) * self._workload.total_loops * len(self._engines)
        return 1 + len(self._engines) + turns

    def run(self, on_step: Callable[[str], None] = lambda what: None) -> None:
        """Everything; the reference's series last in each direction.

        Args:
            on_step: Told what comes next, before each of the `steps`.

        Raises:
            Failed, BackendUnavailableError, Refused: What stood in the way.
        """
        self._on_step = on_step
        try:
            self._set_up()
            for op in self._ops:
                self._measure(op)
        finally:
            for pool in self._pools.values():
                pool.close()

    def _set_up(self) -> None:
        self._on_step("buffers")
        main = self._pools["main"] = (
            LocalPool(self._workload)
            if len(self._workload.places) == 1
            else ProcessPool(self._workload)
        )
        for engine in self._engines:
            self._on_step(f"{engine}: setting up")
            try:
                self._of[engine] = self._open(engine, main)
            except BackendUnavailableError as missing:
                if self._strict:
                    raise
                self.missing[engine] = missing
        self._end_if_nobody_is_left(self.missing)

    def _open(self, engine: str, main: Pool) -> Pool:
        pool = main
        if engine == "deepspeed":
            pool = self._pools[engine] = ProcessPool(self._workload)
        elif engine == "fio":
            pool = self._pools[engine] = fio = FioPool(self._workload)
            self.fio_memory = fio.memory
        if pool.open(engine):
            self.buffered.append(engine)
        return pool

    def _measure(self, op: Op) -> None:
        for suffix in suffixes(list(self._of)):
            self._pools["main"].make_files(suffix, op)
        series = {engine: Series(engine, op) for engine in self._of}
        self.series += series.values()
        for loop in range(self._workload.total_loops):
            warming = loop < self._workload.warmup_loops
            kind = "warm-up" if warming else op
            for engine in order(list(self._of), loop, self._workload.total_loops):
                self._on_step(f"{engine} {kind}")
                try:
                    done = self._lap(Lap(engine, op, loop, self._nbytes(engine)))
                except (Failed, NvmeioError, OSError) as failed:
                    self._leave_out(series[engine], failed)
                    continue
                if warming:
                    series[engine].warmup.append(done)
                if not warming or self._include_warmup:
                    series[engine].loops.append(done)

    def _leave_out(self, series: Series, failed: Exception) -> None:
        """An engine that failed: figures of fewer loops than the others' are not the same."""
        if self._strict or series.engine == REFERENCE:
            raise failed
        self.failed[series.engine] = failed
        self.series.remove(series)
        del self._of[series.engine]
        self._end_if_nobody_is_left(self.failed)

    def _end_if_nobody_is_left(self, why: Mapping[str, Exception]) -> None:
        if not set(self._of) - {REFERENCE}:
            raise next(iter(why.values()))

    def _nbytes(self, engine: str) -> int:
        nbytes = self._workload.nbytes
        return min(nbytes, REFERENCE_BYTES_MOST) if engine == REFERENCE else nbytes

    def _lap(self, lap: Lap) -> Loop:
        before = self._disks.look()
        timings = self._of[lap.engine].run(lap)
        after = self._disks.look()
        return _loop(timings, lap.nbytes, after.since(before) if before and after else None)


def _loop(timings: Sequence[Timing], nbytes: int, disk: DiskBytes | None) -> Loop:
    return Loop(
        task_s=[timing.seconds for timing in timings],
        end_to_end_s=max(t.end_s for t in timings) - min(t.start_s for t in timings),
        nbytes=nbytes * len(timings),
        cpu_s=sum(timing.cpu_s for timing in timings),
        disk=disk,
        cached=max((t.cached for t in timings if t.cached is not None), default=None),
    )


def suffixes(engines: Sequence[str]) -> list[str]:
    """Of the files that these engines need."""
    found = {"ref" if e == REFERENCE else "bin" if e in RAW else "pt" for e in engines}
    return sorted(found)

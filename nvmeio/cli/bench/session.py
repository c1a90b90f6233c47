"""One run: it is made sure that all fits, then engines take turns within each loop.

So whatever else the machine does hits all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import typer
from rich.console import Console

import nvmeio
from nvmeio import engines
from nvmeio.cli._terminal import Failed, steps
from nvmeio.cli.bench.engines import RAW, REFERENCE, FioPool
from nvmeio.cli.bench.report import BenchResult, Loop, Series
from nvmeio.cli.bench.task import LocalPool, ProcessPool
from nvmeio.cli.bench.workload import REFERENCE_BYTES_MOST, Lap, Timing, Workload, disk_needs
from nvmeio.cli.measure import Op
from nvmeio.cli.measure.disk import DiskBytes, Disks, check_memory, check_space, scratch
from nvmeio.cli.measure.worker import order
from nvmeio.engines.base import Options
from nvmeio.errors import BackendUnavailableError, NvmeioError

Pool = LocalPool | ProcessPool | FioPool


class Session:
    """Measures engines beside each other, in directories of its own, which it removes.

    Args:
        workload: With the user's own directories.
        engines: Their names, in the order of the user.
        ops: Directions, one after the other.
        reference: Measure the plain loop beside them.
        include_warmup: Count the warm-up loops too.
        strict: The first engine that is missing or fails ends everything.

    Raises:
        typer.BadParameter: An option is out of range.
        BackendUnavailableError: No engine works with them.
    """

    def __init__(
        self,
        workload: Workload,
        engines: Sequence[str],
        ops: Sequence[Op],
        *,
        reference: bool,
        include_warmup: bool,
        strict: bool,
    ) -> None:
        self._asked = self._workload = workload
        self._engines = [*engines, REFERENCE] if reference else list(engines)
        self._ops = ops
        self._include_warmup = include_warmup
        self._strict = strict or len(engines) == 1
        self._resolved = _resolve(workload.options)
        self._series: list[Series] = []
        self._missing: dict[str, BackendUnavailableError] = {}
        self._failed: dict[str, Exception] = {}
        self._on_step: Callable[[str], None] = lambda what: None
        self._pools: dict[str, Pool] = {}
        self._of: dict[str, Pool] = {}
        self._disks = Disks({place.directory for place in workload.places})
        self._fio_memory = ""
        self._buffered: list[str] = []

    def run(self, errors: Console) -> None:
        """Everything; the reference's series last in each direction.

        Args:
            errors: The stream for progress.

        Raises:
            Refused: It does not fit on the drive or in memory.
            Failed, BackendUnavailableError, NvmeioError, OSError: The error that prevented it.
        """
        asked = self._asked
        needs = disk_needs(asked, self._ops, _suffixes(self._engines))
        check_space(needs)
        check_memory(_memory_needed(asked, self._engines), needs)
        turns = len(self._ops) * asked.total_loops * len(self._engines)
        with scratch((place.directory for place in asked.places), "bench") as made:
            places = [replace(place, directory=made[place.directory]) for place in asked.places]
            self._workload = replace(asked, places=tuple(places))
            with steps(errors, 1 + len(self._engines) + turns) as self._on_step:
                try:
                    self._set_up()
                    for op in self._ops:
                        self._measure(op)
                finally:
                    for pool in self._pools.values():
                        pool.close()

    def result(self) -> BenchResult | None:
        """The measurements, if there are any: all of them, or those up to an interrupt."""
        series = [s for s in self._series if s.loops]
        if all(s.engine == REFERENCE for s in series):
            return None
        return BenchResult(
            self._asked,
            series,
            [op for op in self._ops if any(s.op == op for s in series)],
            self._resolved,
            self._buffered,
            self._fio_memory,
            self._missing,
            self._failed,
        )

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
                self._missing[engine] = missing
        self._end_if_nobody_is_left(self._missing)

    def _open(self, engine: str, main: Pool) -> Pool:
        pool = main
        if engine == "deepspeed":
            pool = self._pools[engine] = ProcessPool(self._workload)
        elif engine == "fio":
            pool = self._pools[engine] = fio = FioPool(self._workload)
            self._fio_memory = fio.memory
        if pool.open(engine):
            self._buffered.append(engine)
        return pool

    def _measure(self, op: Op) -> None:
        for suffix in _suffixes(self._of):
            self._pools["main"].make_files(suffix, op)
        series = {engine: Series(engine, op) for engine in self._of}
        self._series += series.values()
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
        """Leave a failed engine out: figures of fewer loops than the others' do not compare."""
        if self._strict or series.engine == REFERENCE:
            raise failed
        self._failed[series.engine] = failed
        self._series.remove(series)
        del self._of[series.engine]
        self._end_if_nobody_is_left(self._failed)

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


def _suffixes(engines: Iterable[str]) -> list[str]:
    """The suffixes of the files that these engines need."""
    return sorted({"ref" if e == REFERENCE else "bin" if e in RAW else "pt" for e in engines})


def _resolve(options: Options) -> tuple[str, str]:
    """The engine that "auto" stands for with these options, and why it does."""
    try:
        with nvmeio.AioHandle(*options) as handle:
            name = handle.engine
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    return name, next(how for engine, _, how in engines.describe() if engine == name)


def _memory_needed(workload: Workload, names: Sequence[str]) -> int:
    tensors = 1  # that of the task, which most engines share
    tensors += "deepspeed" in names  # page-locked by DeepSpeed itself, beside the other task's
    tensors += "deepspeed" in names
    tensors += workload.validate or bool({"torch_save", "torch_fast"} & set(names))
    return tensors * workload.nbytes * len(workload.places)

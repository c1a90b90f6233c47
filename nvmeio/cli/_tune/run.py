"""One run of `nvmeio tune`: files, a search over them, and what is known whenever it ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

import nvmeio
from nvmeio.cli import _progress
from nvmeio.cli._quantities import GB, binary_size
from nvmeio.cli._tune.final import Op
from nvmeio.cli._tune.result import Latencies, Log, TuneResult
from nvmeio.cli._tune.rig import Rig
from nvmeio.cli._tune.search import Search, Unusable
from nvmeio.cli._tune.space import DEFAULT, Grid, in_words
from nvmeio.cli.measure.scratch import check_memory, check_space, scratch
from nvmeio.engines.base import Options
from nvmeio.errors import BackendUnavailableError, NvmeioError

_LATENCY_PART = 0.08  # of the budget, for the page's latency distributions,
_LATENCY_MOST_S = 6.0  # but never more than this


@dataclass(frozen=True)
class TunePlan:
    """What was asked for: `io_size` is bytes of a full transfer, in each directory."""

    directories: Sequence[Path]
    ops: Sequence[Op]
    io_size: int
    loops: int
    budget_s: float
    grid: Grid
    engine: str
    gpu: bool
    gds: bool
    flush: bool
    latencies: bool


class TuneRun:
    """Measures as planned.

    Args:
        plan: What was asked for.
        errors: Where progress goes, and every measurement if `verbose`.
        log: Takes every measurement.
    """

    def __init__(self, plan: TunePlan, errors: Console, log: Log | None, *, verbose: bool) -> None:
        self._plan = plan
        self._errors = errors
        self._log = log
        self._verbose = verbose
        self._started = time.monotonic()
        self._complete = False
        self._latencies: list[Latencies] = []
        self._trouble = ""
        self._tell: Callable[[float, str], None] = lambda passed, what: None
        needs: dict[Path, int] = {}
        for directory in plan.directories:
            needs[directory] = needs.get(directory, 0) + plan.io_size
        self._nbytes = plan.io_size * len(plan.directories)
        check_space(needs)
        check_memory(self._nbytes, needs)
        with nvmeio.AioHandle(engine=plan.engine) as handle:
            self._engine = handle.engine
        self._rig: Rig | None = None
        self._search = Search(
            plan.grid, plan.ops, self._nbytes, self._measure, time.monotonic, self._show
        )

    def measure(self) -> None:
        """Everything, within the budget.

        Raises:
            BackendUnavailableError: The default setting cannot be used here.
            NvmeioError: A transfer failed.
        """
        plan = self._plan
        latency_s = min(plan.budget_s * _LATENCY_PART, _LATENCY_MOST_S) if plan.latencies else 0.0
        with (
            scratch(plan.directories, "tune") as made,
            _progress.budget(self._errors, plan.budget_s) as self._tell,
        ):
            rig = self._rig = Rig(
                [made[directory] for directory in plan.directories],
                self._nbytes,
                engine=self._engine,
                loops=plan.loops,
                gpu=plan.gpu,
                gds=plan.gds,
                flush=plan.flush,
            )
            self._show("writing files")
            rig.prepare()
            try:
                outcome = self._search.run(self._started + plan.budget_s - latency_s)
            except Unusable as unusable:
                raise BackendUnavailableError(
                    f"the default setting cannot be used: {unusable}"
                ) from None
            self._complete = True
            if latency_s:
                self._show("latencies")
                self._look_at_blocks(rig, outcome.winner, latency_s)

    def result(self) -> TuneResult | None:
        """What is known by now; None where it was interrupted before anything was measured."""
        outcome = self._search.outcome(self._complete)
        told = self._complete or any(s.stage != "probe" for s in outcome.samples)
        if self._rig is None or not told:
            return None
        return TuneResult(
            outcome,
            self._plan.ops,
            self._plan.directories,
            self._engine,
            self._rig.direct,
            self._plan.io_size,
            self._plan.budget_s,
            time.monotonic() - self._started,
            self._plan.grid,
            list(self._latencies),
            self._trouble,
        )

    def _show(self, what: str) -> None:
        self._tell(time.monotonic() - self._started, what)

    def _measure(self, setting: Options, op: Op, nbytes: int) -> float:
        assert self._rig is not None
        seconds = self._rig.measure(setting, op, nbytes)
        if self._log:
            self._log.add(setting, op, nbytes, seconds)
        if self._verbose:
            rate = nbytes / seconds / GB
            line = f"{op:5} {in_words(setting):55} {binary_size(nbytes):>8} {rate:6.2f} GB/s"
            self._errors.print(line, markup=False, highlight=False, soft_wrap=True)
        return seconds

    def _look_at_blocks(self, rig: Rig, winner: Options, seconds: float) -> None:
        asked = list(dict.fromkeys((winner, DEFAULT)))
        each = seconds / (len(asked) * len(self._plan.ops))
        try:
            for op in self._plan.ops:
                for setting in asked:
                    found = rig.latencies(setting, op, each)
                    self._latencies.append(Latencies(setting, op, found))
        except (NvmeioError, OSError) as failed:
            self._trouble = f"latencies were not measured: {failed}"

"""From what was asked on the command line to a `Workload`, and from there to a `BenchResult`.

What makes no sense is a `typer.BadParameter` (exit status 2) before anything is touched.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import typer
from rich.console import Console

import nvmeio
from nvmeio import tuned
from nvmeio.cli import _terminal
from nvmeio.cli._bench import engines
from nvmeio.cli._bench.report import BenchResult
from nvmeio.cli._bench.session import Session, suffixes
from nvmeio.cli._bench.workload import Op, Workload, WorkPlace, disk_needs
from nvmeio.cli.measure.scratch import check_directory, check_memory, check_space, scratch
from nvmeio.engines import select
from nvmeio.engines.base import Options


def parse_places(plain: Sequence[str], mapped: Sequence[str], processes: int) -> list[WorkPlace]:
    """One place for each task.

    Args:
        plain: DIR or DIR:DEVICE; a directory whose name ends so is taken as it is.
        mapped: DIR:DEVICE.
        processes: Tasks per directory.

    Raises:
        typer.BadParameter: No directory, one that cannot be written in, a device that is no number.
    """
    missing = [entry for entry in mapped if ":" not in entry]
    if missing:
        raise typer.BadParameter(
            f"{missing[0]} names no device: write {missing[0]}:0",
            param_hint="--folder-to-device-mapping",
        )
    entries = [*plain, *mapped]
    if not entries:
        raise typer.BadParameter("name a directory on the drive to measure", param_hint="DIR")
    places: list[WorkPlace] = []
    for entry in entries:
        folder, colon, device = entry.rpartition(":")
        if not colon or os.path.isdir(entry):
            folder, device = entry, ""
        elif not device.isdecimal():
            raise typer.BadParameter(
                f"{device!r} in {entry} is no device: write DIR:0", param_hint="DIR"
            )
        directory = Path(folder)
        check_directory(directory)
        for _ in range(processes):
            places.append(WorkPlace(directory, int(device) if device else len(places)))
    return places


def engine_names(engine: str | None, compare: str | None) -> list[str]:
    """The engines to measure, by nvmeio's names.

    Raises:
        typer.BadParameter: There is no such engine, or one is named twice.
    """
    if engine is not None and compare is not None:
        raise typer.BadParameter("names all engines: leave --engine away", param_hint="--compare")
    hint = "--engine" if compare is None else "--compare"
    names = []
    for asked in (compare or engine or "auto").split(","):
        name = asked.strip().replace("-", "_")
        name = engines.ALIASES.get(name, name)
        if name not in engines.NAMES:
            raise typer.BadParameter(
                f"no engine is called {asked.strip()!r}; there are {', '.join(engines.NAMES)}",
                param_hint=hint,
            )
        if name in names:
            raise typer.BadParameter(f"{name} is named twice", param_hint=hint)
        names.append(name)
    return names


def base_options(use_tuned: bool, directory: Path) -> Options:
    """The defaults, or what is stored for a directory.

    Raises:
        typer.BadParameter: Nothing is stored, or the file of settings is damaged.
    """
    if not use_tuned:
        return Options()
    try:
        found = tuned.find(directory)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--tuned") from error
    if found is None:
        raise typer.BadParameter(
            f"nothing is stored for {directory}: run `nvmeio tune --save {directory}` first",
            param_hint="--tuned",
        )
    return found.aio


def resolve(options: Options) -> tuple[str, str]:
    """The engine that "auto" stands for with these options, and why it does.

    Raises:
        typer.BadParameter: An option is out of range.
        BackendUnavailableError: No engine works with them.
    """
    try:
        with nvmeio.AioHandle(*options) as handle:
            name = handle.engine
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    return name, next(how for engine, _, how in select.describe() if engine == name)


class Measurement:
    """One run: checks that it fits, measures in directories of its own, and removes them.

    Args:
        workload: With the user's own directories.
        names: The engines.
        ops: Directions.
        errors: Where progress goes.
        reference: Measure the plain loop beside them.
        include_warmup: Count the warm-up loops too.
        strict: An engine that is missing or fails ends everything.
    """

    def __init__(
        self,
        workload: Workload,
        names: Sequence[str],
        ops: Sequence[Op],
        errors: Console,
        *,
        reference: bool,
        include_warmup: bool,
        strict: bool,
    ) -> None:
        self._workload = workload
        self._names = names
        self._ops = ops
        self._errors = errors
        self._reference = reference
        self._include_warmup = include_warmup
        self._strict = strict
        self._resolved = resolve(workload.options)
        self._session: Session | None = None

    def run(self) -> None:
        """Everything.

        Raises:
            Refused: It does not fit on the drive or in memory.
            Failed, BackendUnavailableError, NvmeioError, OSError: What stood in the way.
        """
        workload = self._workload
        measured = [*self._names, engines.REFERENCE] if self._reference else list(self._names)
        needs = disk_needs(workload, self._ops, suffixes(measured))
        check_space(needs)
        check_memory(_memory_needed(workload, self._names), needs)
        with scratch((place.directory for place in workload.places), "bench") as made:
            there = replace(
                workload,
                places=tuple(
                    replace(place, directory=made[place.directory]) for place in workload.places
                ),
            )
            session = self._session = Session(
                there,
                self._names,
                self._ops,
                reference=self._reference,
                include_warmup=self._include_warmup,
                strict=self._strict,
            )
            with _terminal.steps(self._errors, session.steps) as step:
                session.run(step)

    def result(self) -> BenchResult | None:
        """What was measured, if anything was: all of it, or up to an interrupt."""
        session = self._session
        if session is None:
            return None
        series = [s for s in session.series if s.loops]
        if all(s.engine == engines.REFERENCE for s in series):
            return None
        return BenchResult(
            self._workload,
            series,
            [op for op in self._ops if any(s.op == op for s in series)],
            self._resolved,
            session.buffered,
            session.fio_memory,
            session.missing,
            session.failed,
        )


def _memory_needed(workload: Workload, names: Sequence[str]) -> int:
    tensors = 1  # that of the task, which most engines share
    tensors += "deepspeed" in names  # page-locked by DeepSpeed itself, beside the other task's
    tensors += "deepspeed" in names
    tensors += workload.validate or bool({"torch_save", "torch_fast"} & set(names))
    return tensors * workload.nbytes * len(workload.places)

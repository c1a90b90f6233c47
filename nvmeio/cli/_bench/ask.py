"""From what was asked on the command line to a `Workload`, and from there to a `Result`.

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
from nvmeio.cli import _progress
from nvmeio.cli._bench import engines
from nvmeio.cli._bench.report import Result
from nvmeio.cli._bench.session import Session, suffixes
from nvmeio.cli._bench.workload import Op, Place, Workload, disk_needs
from nvmeio.cli._scratch import check_directory, check_memory, check_space, scratch
from nvmeio.engines import select
from nvmeio.engines.base import Options


def parse_places(plain: Sequence[str], mapped: Sequence[str], processes: int) -> list[Place]:
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
    places: list[Place] = []
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
            places.append(Place(directory, int(device) if device else len(places)))
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


def measure(
    workload: Workload,
    names: Sequence[str],
    ops: Sequence[Op],
    errors: Console,
    *,
    reference: bool,
    include_warmup: bool,
) -> Result:
    """Checks that it fits, measures in directories of its own, and removes them.

    Raises:
        Refused: It does not fit on the drive or in memory.
        Failed, BackendUnavailableError, NvmeioError, OSError: What stood in the way.
    """
    resolved = resolve(workload.options)
    measured = [*names, engines.REFERENCE] if reference else list(names)
    needs = disk_needs(workload, ops, suffixes(measured))
    check_space(needs)
    check_memory(_memory_needed(workload, names), needs)
    with scratch((place.directory for place in workload.places), "bench") as made:
        there = replace(
            workload,
            places=tuple(
                replace(place, directory=made[place.directory]) for place in workload.places
            ),
        )
        session = Session(there, names, ops, reference=reference, include_warmup=include_warmup)
        with _progress.steps(errors, session.steps) as step:
            series = session.run(step)
    return Result(workload, series, ops, resolved, session.buffered, session.fio_memory)


def _memory_needed(workload: Workload, names: Sequence[str]) -> int:
    tensors = 1  # that of the task, which most engines share
    tensors += "deepspeed" in names  # page-locked by DeepSpeed itself, beside the other task's
    tensors += "deepspeed" in names
    tensors += workload.validate or bool({"torch_save", "torch_fast"} & set(names))
    return tensors * workload.nbytes * len(workload.places)

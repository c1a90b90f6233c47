"""`nvmeio bench`: how fast tensors go to and from files here, engine by engine (ds_io's place).

This module turns the command line into a `Workload` and shows what `_bench` made of it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

import nvmeio
from nvmeio import tuned
from nvmeio.cli import _terminal
from nvmeio.cli._bench import engines, report
from nvmeio.cli._bench.report import BenchResult
from nvmeio.cli._bench.session import Session, suffixes
from nvmeio.cli._bench.workload import MemoryKind, Op, Workload, WorkPlace, disk_needs
from nvmeio.cli._exits import FAILED, complain, exit_statuses
from nvmeio.cli._terminal import size_option
from nvmeio.cli.measure import machine
from nvmeio.cli.measure.scratch import check_directory, check_memory, check_space, scratch
from nvmeio.engines import select
from nvmeio.engines.base import Options

_WHERE = "Where"
_WHAT = "What is moved"
_HOW = "How the handle works"
_WHEN = "How often, and under which conditions"
_SHOWN = "What is shown"

MEMORY_KINDS: dict[str, MemoryKind] = {
    "aligned": "aligned",
    "pinned": "pinned",
    "ordinary": "ordinary",
}


def command(
    directories: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="DIR[:DEVICE]...",
            help="A directory on the drive, and the GPU that goes with it (with --gpu). One task "
            "works in each, all at the same time.",
            show_default=False,
        ),
    ] = None,
    folder: Annotated[
        list[str] | None,
        typer.Option("--folder", "--dir", metavar="DIR", help="The same.", rich_help_panel=_WHERE),
    ] = None,
    mapping: Annotated[
        list[str] | None,
        typer.Option(
            "--folder-to-device-mapping",
            metavar="DIR:DEVICE",
            help="The same, with the device.",
            rich_help_panel=_WHERE,
        ),
    ] = None,
    processes: Annotated[
        int,
        typer.Option(
            "--multi-process",
            "--processes",
            metavar="N",
            min=1,
            help="Tasks per directory, each a process with a file of its own; they begin every "
            "loop together.",
            rich_help_panel=_WHERE,
        ),
    ] = 1,
    io_size: Annotated[
        int,
        typer.Option(
            parser=size_option,
            metavar="SIZE",
            help="Bytes per task and loop, with K, M or G.",
            show_default="1G",
            rich_help_panel=_WHAT,
        ),
    ] = 1 << 30,
    read: Annotated[
        bool, typer.Option("--read", help="Reads only.", rich_help_panel=_WHAT)
    ] = False,
    write: Annotated[
        bool, typer.Option("--write", help="Writes only.", rich_help_panel=_WHAT)
    ] = False,
    memory: Annotated[
        str,
        typer.Option(
            metavar="KIND",
            help="aligned: on huge pages, not page-locked; pinned: page-locked; "
            "ordinary: torch.empty.",
            rich_help_panel=_WHAT,
        ),
    ] = "aligned",
    accelerator_memory: Annotated[
        bool,
        typer.Option(
            "--use-accelerator-pin-memory",
            help="Memory that torch has page-locked for the GPU.",
            rich_help_panel=_WHAT,
        ),
    ] = False,
    gpu: Annotated[
        bool,
        typer.Option(
            "--gpu", help="The tensors lie on a GPU, the copy is timed.", rich_help_panel=_WHAT
        ),
    ] = False,
    gds: Annotated[
        bool,
        typer.Option(
            "--gds", "--use-gds", help="--gpu, through GPUDirect Storage.", rich_help_panel=_WHAT
        ),
    ] = False,
    slow_bounce: Annotated[
        bool,
        typer.Option(
            "--slow-bounce-buffer",
            help="With --gpu: hand the CUDA tensor to the engine, keep no page-locked one ready.",
            rich_help_panel=_WHAT,
        ),
    ] = False,
    engine: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="auto, libaio, threads: nvmeio's own; aio_basic: a new handle for each transfer; "
            "python: system calls through the page cache; torch_save; torch_fast: torch.save "
            "through nvmeio; deepspeed and fio where they are installed.",
            show_default="auto",
            rich_help_panel=_HOW,
        ),
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help="Measure these engines in turns; ratios are to the first. Those that are not "
            "there are named, and the others measured.",
            rich_help_panel=_HOW,
        ),
    ] = None,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict",
            help="With --compare: measure nothing where an engine is not there, and end where one "
            "fails.",
            rich_help_panel=_HOW,
        ),
    ] = False,
    block_size: Annotated[
        int | None,
        typer.Option(
            parser=size_option,
            metavar="SIZE",
            help="Bytes per kernel request.",
            show_default="1M",
            rich_help_panel=_HOW,
        ),
    ] = None,
    queue_depth: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Blocks in the kernel at most (ds_io: 32).",
            show_default="128",
            rich_help_panel=_HOW,
        ),
    ] = None,
    single_submit: Annotated[
        bool | None,
        typer.Option("--single-submit", help="One block a system call.", rich_help_panel=_HOW),
    ] = None,
    sequential_requests: Annotated[
        bool | None,
        typer.Option(
            "--sequential-requests",
            help="Refill the queue only when it has run empty; also --no-overlap-events.",
            rich_help_panel=_HOW,
        ),
    ] = None,
    io_parallel: Annotated[
        int | None,
        typer.Option(
            "--io-parallel",
            metavar="N",
            help="Lanes that share each transfer; also --intra-op-parallelism.",
            show_default="1",
            rich_help_panel=_HOW,
        ),
    ] = None,
    use_tuned: Annotated[
        bool,
        typer.Option(
            "--tuned",
            help="What `nvmeio tune --save` stored for DIR, for all of these that are not given.",
            rich_help_panel=_HOW,
        ),
    ] = False,
    fast_io_size: Annotated[
        int,
        typer.Option(
            parser=size_option,
            metavar="SIZE",
            help="Buffer of the torch_fast engine.",
            show_default="64M",
            rich_help_panel=_HOW,
        ),
    ] = 64 << 20,
    torch_legacy_save: Annotated[
        bool,
        typer.Option(
            "--torch-legacy-save",
            help="torch's format from before its zip files, for the torch engines.",
            rich_help_panel=_HOW,
        ),
    ] = False,
    loops: Annotated[
        int,
        typer.Option(metavar="N", min=1, help="Measured repetitions.", rich_help_panel=_WHEN),
    ] = 3,
    warmup_loops: Annotated[
        int,
        typer.Option(metavar="N", min=0, help="Repetitions before them.", rich_help_panel=_WHEN),
    ] = 1,
    include_warmup: Annotated[
        bool,
        typer.Option("--include-warmup-time", help="Count those too.", rich_help_panel=_WHEN),
    ] = False,
    new_files: Annotated[
        bool,
        typer.Option(
            "--new-files",
            help="A file of its own for each loop; writes then go to new files. Also "
            "--different-file-each-iteration.",
            rich_help_panel=_WHEN,
        ),
    ] = False,
    validate: Annotated[
        bool,
        typer.Option(
            "--validate",
            help="Compare all bytes after each loop, not timed.",
            rich_help_panel=_WHEN,
        ),
    ] = False,
    fsync: Annotated[
        bool,
        typer.Option("--fsync", help="A write is over once it is durable.", rich_help_panel=_WHEN),
    ] = False,
    drop_caches: Annotated[
        bool,
        typer.Option(
            "--drop-caches",
            help="Take the file out of the page cache before each read (no root needed).",
            rich_help_panel=_WHEN,
        ),
    ] = False,
    no_reference: Annotated[
        bool,
        typer.Option(
            "--no-reference",
            help="Leave out the plain direct loop beside, which is what the drive gave to anybody "
            "just then.",
            rich_help_panel=_WHEN,
        ),
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="One JSON object on stdout.", rich_help_panel=_SHOWN),
    ] = False,
) -> None:
    """How fast tensors go to and from files here, engine by engine.

    Writes files of its own in a hidden directory in DIR and removes them. All flags of ds_io work,
    with - or _ in them. Reads and writes are both measured unless one is named.

    Example: [bold]nvmeio bench /mnt/nvme0 --compare libaio,python,fio --io-size 4G[/]

    Exit status: 0 measured, 1 a transfer or an engine failed, 2 it makes no sense or does not fit,
    3 an engine or device is not there, 130 interrupted: what was measured is told all the same.
    """
    places = parse_places([*(directories or []), *(folder or [])], mapping or [], processes)
    names = engine_names(engine, compare)
    kind = MEMORY_KINDS.get(memory)
    if kind is None:
        raise typer.BadParameter(f"one of {', '.join(MEMORY_KINDS)}", param_hint="--memory")
    if slow_bounce or gds:
        _check_slow_bounce(gpu or gds, names, "--gds" if gds else "--slow-bounce-buffer")
    given: dict[str, Any] = {
        "block_size": block_size,
        "queue_depth": queue_depth,
        "single_submit": single_submit,
        "overlap_events": None if sequential_requests is None else not sequential_requests,
        "intra_op_parallelism": io_parallel,
    }
    base = base_options(use_tuned, places[0].directory)
    workload = Workload(
        places=tuple(places),
        nbytes=io_size,
        loops=loops,
        warmup_loops=warmup_loops,
        options=base._replace(**{k: v for k, v in given.items() if v is not None}),
        memory="accelerator" if accelerator_memory else kind,
        gpu=gpu or gds,
        ready_bounce=not (slow_bounce or gds),
        gds=gds,
        fsync=fsync,
        drop_caches=drop_caches,
        validate=validate,
        new_files=new_files,
        legacy_save=torch_legacy_save,
        staging_bytes=fast_io_size,
    )
    ops: list[Op] = []
    if read or not write:
        ops.append("read")
    if write or not read:
        ops.append("write")
    errors = Console(stderr=True, emoji=False)
    with exit_statuses(errors):
        devices = tuple(place.device for place in places)
        asked = "--gds" if gds else "--gpu" if gpu else "--use-accelerator-pin-memory"
        machine.require_devices(gpu or gds or accelerator_memory, gds, devices, asked)
        measurement = Measurement(
            workload,
            names,
            ops,
            errors,
            reference=not no_reference,
            include_warmup=include_warmup,
            strict=strict,
        )
        try:
            measurement.run()
        finally:  # whatever ended it: what was measured is told
            result = measurement.result()
            if result is not None:
                _tell(result, errors, as_json)
        if result is not None and result.failed:
            raise typer.Exit(FAILED)


def _tell(result: report.BenchResult, errors: Console, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(report.as_json(result), indent=2))
    else:
        report.render(result, Console(emoji=False))
    for line in result.not_measured():
        complain(errors, line, "yellow" if line.startswith("not") else "red")


def _check_slow_bounce(gpu: bool, names: list[str], hint: str) -> None:
    if not gpu:
        raise typer.BadParameter("means something with --gpu only", param_hint=hint)
    for name in ("python", "fio"):
        if name in names:
            raise typer.BadParameter(f"{name} cannot move CUDA tensors", param_hint=hint)


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

"""`nvmeio bench`: how fast tensors go to and from files here, engine by engine (ds_io's place).

This module turns the command line into a `Workload` and shows its result. Modules that need torch
are imported on use: `--help` comes at once.

Reading order: `workload` (what is to be done), `engines` (who can do it), `task` (one process's
part, here or in processes of their own), `session` (who runs when), `report`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from nvmeio.cli._terminal import FAILED, OptionGroup, exit_statuses, say

if TYPE_CHECKING:
    from nvmeio.cli.bench.report import BenchResult
    from nvmeio.cli.bench.workload import MemoryKind, WorkPlace
    from nvmeio.cli.measure import Op
    from nvmeio.engines.base import Options

MEMORY_KINDS: tuple[MemoryKind, ...] = ("aligned", "pinned", "ordinary")

_where = OptionGroup("Where")
_what = OptionGroup("What is moved")
_how = OptionGroup("How the handle works")
_when = OptionGroup("How often, and under which conditions")
_shown = OptionGroup("What is shown")


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
        list[str] | None, _where.value("The same as DIR.", "DIR", "--folder", "--dir")
    ] = None,
    mapping: Annotated[
        list[str] | None,
        _where.value("The same as DIR:DEVICE.", "DIR:DEVICE", "--folder-to-device-mapping"),
    ] = None,
    processes: Annotated[
        int,
        _where.value(
            "Tasks per directory, each a process with a file of its own; they begin every loop "
            "together.",
            "N",
            "--multi-process",
            "--processes",
            min=1,
        ),
    ] = 1,
    io_size: Annotated[int, _what.size("Bytes per task and loop, with K, M or G.", "1G")] = 1 << 30,
    read: Annotated[bool, _what.flag("Reads only.", "--read")] = False,
    write: Annotated[bool, _what.flag("Writes only.", "--write")] = False,
    memory: Annotated[
        str,
        _what.value(
            "aligned: on huge pages, not page-locked; pinned: page-locked; ordinary: torch.empty.",
            "KIND",
        ),
    ] = "aligned",
    accelerator_memory: Annotated[
        bool,
        _what.flag(
            "Memory that torch has page-locked for the GPU.", "--use-accelerator-pin-memory"
        ),
    ] = False,
    gpu: Annotated[
        bool, _what.flag("The tensors lie on a GPU, the copy is timed.", "--gpu")
    ] = False,
    gds: Annotated[
        bool, _what.flag("--gpu, through GPUDirect Storage.", "--gds", "--use-gds")
    ] = False,
    slow_bounce: Annotated[
        bool,
        _what.flag(
            "With --gpu: hand the CUDA tensor to the engine, keep no page-locked one ready.",
            "--slow-bounce-buffer",
        ),
    ] = False,
    engine: Annotated[
        str | None,
        _how.value(
            "auto, libaio, threads: nvmeio's own; aio_basic: a new handle for each transfer; "
            "python: system calls through the page cache; torch_save; torch_fast: torch.save "
            "through nvmeio; deepspeed and fio where they are installed.",
            "NAME",
            show_default="auto",
        ),
    ] = None,
    compare: Annotated[
        str | None,
        _how.value(
            "Measure these engines in turns; ratios are to the first. Those that are not there are "
            "named, and the others measured.",
            "NAME,...",
        ),
    ] = None,
    strict: Annotated[
        bool,
        _how.flag(
            "With --compare: measure nothing if an engine is missing, and end if one fails.",
            "--strict",
        ),
    ] = False,
    block_size: Annotated[int | None, _how.size("Bytes per kernel request.", "1M")] = None,
    queue_depth: Annotated[
        int | None, _how.value("Blocks in the kernel at most (ds_io: 32).", "N", show_default="128")
    ] = None,
    single_submit: Annotated[
        bool | None, _how.flag("One block a system call.", "--single-submit")
    ] = None,
    sequential_requests: Annotated[
        bool | None,
        _how.flag(
            "Refill the queue only when it has run empty; also --no-overlap-events.",
            "--sequential-requests",
        ),
    ] = None,
    io_parallel: Annotated[
        int | None,
        _how.value(
            "Lanes that share each transfer; also --intra-op-parallelism.", "N", show_default="1"
        ),
    ] = None,
    use_tuned: Annotated[
        bool,
        _how.flag(
            "What `nvmeio tune --save` stored for DIR, for all of these that are not given.",
            "--tuned",
        ),
    ] = False,
    fast_io_size: Annotated[int, _how.size("Buffer of the torch_fast engine.", "64M")] = 64 << 20,
    torch_legacy_save: Annotated[
        bool,
        _how.flag(
            "torch's format from before its zip files, for the torch engines.",
            "--torch-legacy-save",
        ),
    ] = False,
    loops: Annotated[int, _when.value("Measured repetitions.", "N", min=1)] = 3,
    warmup_loops: Annotated[int, _when.value("Repetitions before them.", "N", min=0)] = 1,
    include_warmup: Annotated[
        bool, _when.flag("Count those too.", "--include-warmup-time")
    ] = False,
    new_files: Annotated[
        bool,
        _when.flag(
            "A file of its own for each loop; writes then go to new files. Also "
            "--different-file-each-iteration.",
            "--new-files",
        ),
    ] = False,
    validate: Annotated[
        bool, _when.flag("Compare all bytes after each loop, not timed.", "--validate")
    ] = False,
    cached: Annotated[
        bool,
        _when.flag(
            "Leave files in the page cache and do not wait until writes are durable. Without it "
            "reads are cold and writes end with fsync, for every engine.",
            "--cached",
        ),
    ] = False,
    fsync: Annotated[
        bool, _when.flag("With --cached: a write is over once it is durable.", "--fsync")
    ] = False,
    drop_caches: Annotated[
        bool, _when.flag("With --cached: make reads cold (no root needed).", "--drop-caches")
    ] = False,
    no_reference: Annotated[
        bool,
        _when.flag(
            "Leave out the plain direct loop, which shows what the drive could do at that time.",
            "--no-reference",
        ),
    ] = False,
    as_json: Annotated[bool, _shown.flag("One JSON object on stdout.", "--json")] = False,
) -> None:
    """Measures how fast tensors go to and from files here, engine by engine.

    Writes files of its own in a hidden directory in DIR and removes them. All flags of ds_io work,
    with - or _ in them. Reads and writes are both measured unless one is named.

    Example: [bold]nvmeio bench /mnt/nvme0 --compare libaio,python,fio --io-size 4G[/]

    Exit status: 0 measured, 1 a transfer or an engine failed, 2 the options contradict each
    other or the data does not fit, 3 an engine or device is missing, 130 interrupted: what was
    measured by then is printed.
    """
    from nvmeio.cli.bench.session import Session
    from nvmeio.cli.bench.workload import Workload
    from nvmeio.cli.measure import machine

    places = parse_places([*(directories or []), *(folder or [])], mapping or [], processes)
    names = engine_names(engine, compare)
    kind = next((kind for kind in MEMORY_KINDS if kind == memory), None)
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
        fsync=fsync or not cached,
        drop_caches=drop_caches or not cached,
        validate=validate,
        new_files=new_files,
        legacy_save=torch_legacy_save,
        staging_bytes=fast_io_size,
    )
    ops: list[Op] = ["read"] if read or not write else []
    ops += ["write"] if write or not read else []
    errors = Console(stderr=True, emoji=False)
    with exit_statuses(errors):
        devices = tuple(place.device for place in places)
        asked = "--gds" if gds else "--gpu" if gpu else "--use-accelerator-pin-memory"
        machine.require_devices(gpu or gds or accelerator_memory, gds, devices, asked)
        session = Session(
            workload,
            names,
            ops,
            reference=not no_reference,
            include_warmup=include_warmup,
            strict=strict,
        )
        try:
            session.run(errors)
        finally:  # whatever ended it: report the measurements
            result = session.result()
            if result is not None:
                _tell(result, errors, as_json)
        if result is not None and result.failed:
            raise typer.Exit(FAILED)


def _tell(result: BenchResult, errors: Console, as_json: bool) -> None:
    from nvmeio.cli.bench import report

    if as_json:
        typer.echo(json.dumps(report.as_json(result), indent=2))
    else:
        report.render(result, Console(emoji=False))
    for line in result.not_measured():
        say(errors, line, "yellow" if line.startswith("not") else "red")


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
        typer.BadParameter: No directory, one that cannot be written in, a device that is not a
            number.
    """
    from nvmeio.cli.bench.workload import WorkPlace
    from nvmeio.cli.measure.disk import check_directory

    missing = [entry for entry in mapped if ":" not in entry]
    if missing:
        raise typer.BadParameter(
            f"{missing[0]} lacks a device: write {missing[0]}:0",
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
                f"{device!r} in {entry} is not a device: write DIR:0", param_hint="DIR"
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
    from nvmeio.cli.bench import engines

    if engine is not None and compare is not None:
        raise typer.BadParameter("names all engines: leave out --engine", param_hint="--compare")
    hint = "--engine" if compare is None else "--compare"
    names = []
    for asked in (compare or engine or "auto").split(","):
        name = asked.strip().replace("-", "_")
        name = engines.ALIASES.get(name, name)
        if name not in engines.NAMES:
            raise typer.BadParameter(
                f"no engine is called {asked.strip()!r}; take one of {', '.join(engines.NAMES)}",
                param_hint=hint,
            )
        if name in names:
            raise typer.BadParameter(f"{name} is named twice", param_hint=hint)
        names.append(name)
    return names


def base_options(use_tuned: bool, directory: Path) -> Options:
    """The defaults, or the settings stored for a directory.

    Raises:
        typer.BadParameter: Nothing is stored, or the file of settings is damaged.
    """
    from nvmeio import tuned
    from nvmeio.engines.base import Options

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

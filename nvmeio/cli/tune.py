"""`nvmeio tune`: the fastest setting for a drive, found within a budget (ds_nvme_tune's place).

This module turns the command line into a search; `_tune` has the search itself.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import nvmeio
from nvmeio import tuned
from nvmeio.cli import _accelerator, _progress
from nvmeio.cli._exits import exit_statuses
from nvmeio.cli._scratch import check_directory, check_memory, check_space, scratch
from nvmeio.cli._tune import page, result
from nvmeio.cli._tune.result import Latencies, Log, Result
from nvmeio.cli._tune.rig import Rig, check_flush
from nvmeio.cli._tune.search import Op, Search, Unusable
from nvmeio.cli._tune.space import DEFAULT, Grid, default_grid, in_words, load_grid, settings
from nvmeio.cli._units import GB, binary_size, duration_option, size_option
from nvmeio.engines.base import Options
from nvmeio.errors import BackendUnavailableError

_LATENCY_PART = 0.08  # of the budget, for the page's latency distributions,
_LATENCY_MOST_S = 6.0  # but never more than this


def command(
    directories: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="DIR...",
            help="A directory on the drive. Several are used at once, as one array of drives.",
            show_default=False,
        ),
    ] = None,
    nvme_dir: Annotated[
        list[Path] | None, typer.Option("--nvme-dir", metavar="DIR", help="The same.")
    ] = None,
    budget: Annotated[
        float,
        typer.Option(
            parser=duration_option,
            metavar="TIME",
            help="How long it may take: 60s, 5m.",
            show_default="60s",
        ),
    ] = 60.0,
    sweep_config: Annotated[
        Path | None,
        typer.Option(
            metavar="JSON",
            help='Values to try, such as {"block_size": ["1M", "8M"], "queue_depth": [32, 128]}; '
            "ds_nvme_tune's files work.",
        ),
    ] = None,
    no_read: Annotated[bool, typer.Option("--no-read", help="Writes alone count.")] = False,
    no_write: Annotated[bool, typer.Option("--no-write", help="Reads alone count.")] = False,
    io_size: Annotated[
        int,
        typer.Option(
            parser=size_option,
            metavar="SIZE",
            help="Bytes of a full transfer, in each directory, with K, M or G.",
            show_default="400M",
        ),
    ] = 400 << 20,
    loops: Annotated[
        int,
        typer.Option(metavar="N", min=1, help="Transfers in a measurement; their median counts."),
    ] = 1,
    engine: Annotated[str, typer.Option(metavar="NAME", help="auto, libaio or threads.")] = "auto",
    gpu: Annotated[bool, typer.Option("--gpu", help="The tensors lie on GPUs.")] = False,
    gds: Annotated[bool, typer.Option("--gds", help="--gpu, through GPUDirect Storage.")] = False,
    flush_page_cache: Annotated[
        bool,
        typer.Option(
            "--flush-page-cache",
            help="Drop the page cache before each read (root only). Direct reads do not need it, "
            "and others only their file dropped, which is done anyway.",
        ),
    ] = False,
    save: Annotated[
        bool,
        typer.Option(
            "--save", help="Store the setting for DIR's file system: AioHandle.tuned(DIR) takes it."
        ),
    ] = False,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a page with what was measured, as charts."),
    ] = None,
    log_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Write every measurement there (measurements.jsonl, result.json)."
        ),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Show every measurement on stderr.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="All that was found on stdout, not the setting alone.")
    ] = False,
) -> None:
    """The fastest setting for a drive, found within a budget.

    Block size, queue depth, submission, overlap and lanes: successive halving instead of the full
    grid, and the default setting wherever no other one stands out from the noise. Stdout is JSON
    that AioHandle(**cfg["aio"]) and a DeepSpeed configuration take as it is. All flags of
    ds_nvme_tune work, with - or _ in them.

    Example: [bold]nvmeio tune /mnt/nvme0 --budget 60s --save --html tune.html[/]

    Exit status: 0 found, 1 a transfer failed, 2 it makes no sense or does not fit, 3 an engine or
    device is not there, 130 interrupted.
    """
    chosen = [*(directories or []), *(nvme_dir or [])]
    if not chosen:
        raise typer.BadParameter("name a directory on the drive to tune for", param_hint="DIR")
    for directory in chosen:
        check_directory(directory)
    ops: list[Op] = [] if no_read else ["read"]
    ops += [] if no_write else ["write"]
    if not ops:
        raise typer.BadParameter("leaves nothing to measure", param_hint="--no-read --no-write")
    if engine not in ("auto", "libaio", "threads"):
        raise typer.BadParameter("one of auto, libaio, threads", param_hint="--engine")
    if html is not None and not html.absolute().parent.is_dir():
        raise typer.BadParameter(f"{html.parent} is not a directory", param_hint="--html")
    try:
        grid = load_grid(sweep_config) if sweep_config else default_grid()
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--sweep-config") from error
    errors = Console(stderr=True)
    with exit_statuses(errors):
        _accelerator.require(gpu or gds, gds, tuple(range(len(chosen))))
        if flush_page_cache:
            check_flush()
        log = Log(log_dir) if log_dir else None
        found = None
        try:
            found = _tune(
                chosen,
                _Plan(ops, io_size, loops, budget, grid, engine, gpu or gds, gds, flush_page_cache),
                errors,
                log,
                with_latencies=html is not None,
                verbose=verbose,
            )
        finally:
            if log:
                log.close(found)
        result.render(found, errors)
        if html:
            html.write_text(page.render(found))
            errors.print(f"Page: {html}", markup=False, highlight=False, soft_wrap=True)
        if save:
            for directory in chosen:
                file = tuned.save(directory, found.tuned(directory))
            errors.print(f"Stored in {file}", markup=False, highlight=False, soft_wrap=True)
    shown = result.as_json(found) if as_json else found.block()
    typer.echo(json.dumps(shown, indent=3))


@dataclass(frozen=True)
class _Plan:
    """What was asked for."""

    ops: list[Op]
    io_size: int
    loops: int
    budget_s: float
    grid: Grid
    engine: str
    gpu: bool
    gds: bool
    flush: bool


def _tune(
    directories: Sequence[Path],
    plan: _Plan,
    errors: Console,
    log: Log | None,
    *,
    with_latencies: bool,
    verbose: bool,
) -> Result:
    start = time.monotonic()
    needs: dict[Path, int] = {}
    for directory in directories:
        needs[directory] = needs.get(directory, 0) + plan.io_size
    check_space(needs)
    check_memory(plan.io_size * len(directories), needs)
    with nvmeio.AioHandle(engine=plan.engine) as handle:
        engine = handle.engine
    latency_s = min(plan.budget_s * _LATENCY_PART, _LATENCY_MOST_S) if with_latencies else 0.0
    with (
        scratch(directories, "tune") as made,
        _progress.budget(errors, plan.budget_s) as progress,
    ):
        rig = Rig(
            [made[directory] for directory in directories],
            plan.io_size * len(directories),
            engine=engine,
            loops=plan.loops,
            gpu=plan.gpu,
            gds=plan.gds,
            flush=plan.flush,
        )

        def tell(what: str) -> None:
            progress(time.monotonic() - start, what)

        def measure(setting: Options, op: Op, nbytes: int) -> float:
            seconds = rig.measure(setting, op, nbytes)
            if log:
                log.add(setting, op, nbytes, seconds)
            if verbose:
                rate = nbytes / seconds / GB
                line = f"{op:5} {in_words(setting):55} {binary_size(nbytes):>8} {rate:6.2f} GB/s"
                errors.print(line, markup=False, highlight=False, soft_wrap=True)
            return seconds

        tell("writing files")
        rig.prepare()
        search = Search(
            settings(plan.grid),
            plan.ops,
            plan.io_size * len(directories),
            measure,
            time.monotonic,
            tell,
        )
        try:
            outcome = search.run(start + plan.budget_s - latency_s)
        except Unusable as unusable:
            raise BackendUnavailableError(
                f"the default setting cannot be used: {unusable}"
            ) from None
        latencies = []
        if latency_s:
            tell("latencies")
            latencies = _latencies(rig, outcome.winner, plan.ops, latency_s)
    return Result(
        outcome,
        plan.ops,
        directories,
        engine,
        rig.direct,
        plan.io_size,
        plan.budget_s,
        time.monotonic() - start,
        plan.grid,
        latencies,
    )


def _latencies(rig: Rig, winner: Options, ops: Sequence[Op], seconds: float) -> list[Latencies]:
    asked = list(dict.fromkeys((winner, DEFAULT)))
    each = seconds / (len(asked) * len(ops))
    return [
        Latencies(setting, op, rig.latencies(setting, op, each)) for op in ops for setting in asked
    ]

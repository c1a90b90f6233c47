"""`nvmeio tune`: the fastest setting for a drive, found within a budget (ds_nvme_tune's place).

This module turns the command line into a search. Modules that need torch are imported on use:
`--help` comes at once.

Reading order: `space` (which settings there are), `search` (which of them are looked at, and who
wins, without any I/O), `rig` (measuring one, and a whole run), `result`, `page` (the HTML).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from nvmeio.cli._terminal import Failed, OptionGroup, exit_statuses, say

if TYPE_CHECKING:
    from nvmeio.cli.measure import Op
    from nvmeio.cli.tune.result import TuneResult

_option = OptionGroup()


def command(
    directories: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="DIR...",
            help="A directory on the drive. Several are used at once, as one array of drives.",
            show_default=False,
        ),
    ] = None,
    nvme_dir: Annotated[list[Path] | None, _option.value("As DIR.", "DIR", "--nvme-dir")] = None,
    budget: Annotated[float, _option.duration("Time that it may take: 60s, 5m.", "60s")] = 60.0,
    sweep_config: Annotated[
        Path | None,
        _option.value(
            'Values to try, such as {"block_size": ["1M", "8M"], "queue_depth": [32, 128]}; '
            "ds_nvme_tune's files work.",
            "JSON",
        ),
    ] = None,
    no_read: Annotated[bool, _option.flag("Tune for writes alone.", "--no-read")] = False,
    no_write: Annotated[bool, _option.flag("Tune for reads alone.", "--no-write")] = False,
    io_size: Annotated[
        int, _option.size("Bytes of a full transfer, in each directory, with K, M or G.", "400M")
    ] = 400 << 20,
    loops: Annotated[
        int, _option.value("Transfers in a measurement; their median counts.", "N", min=1)
    ] = 1,
    engine: Annotated[str, _option.value("auto, libaio or threads.", "NAME")] = "auto",
    gpu: Annotated[bool, _option.flag("The tensors lie on GPUs.", "--gpu")] = False,
    gds: Annotated[bool, _option.flag("--gpu, through GPUDirect Storage.", "--gds")] = False,
    flush_page_cache: Annotated[
        bool,
        _option.flag(
            "Drop the page cache before each read (root only). Direct reads do not need it, and "
            "others only their file dropped, which is done anyway.",
            "--flush-page-cache",
        ),
    ] = False,
    save: Annotated[
        bool,
        _option.flag(
            "Store the setting for DIR's file system: AioHandle.tuned(DIR) takes it.", "--save"
        ),
    ] = False,
    html: Annotated[
        Path | None, _option.value("Write a page with what was measured, as charts.", "FILE")
    ] = None,
    log_dir: Annotated[
        Path | None,
        _option.value("Write every measurement there (measurements.jsonl, result.json).", "DIR"),
    ] = None,
    verbose: Annotated[
        bool, _option.flag("Show every measurement on stderr.", "--verbose")
    ] = False,
    as_json: Annotated[
        bool, _option.flag("Print all results on stdout, not the setting alone.", "--json")
    ] = False,
) -> None:
    """Finds the fastest setting for a drive within a budget of time.

    It tries block size, queue depth, submission, overlap and lanes, as optuna proposes. The default
    setting stays if no other one is faster by more than the noise. Stdout is JSON for
    AioHandle(**cfg["aio"]) and for a DeepSpeed configuration. All flags of ds_nvme_tune work, with
    - or _ in them. Needs optuna and plotly: nvmeio's extra "tune".

    Example: [bold]nvmeio tune /mnt/nvme0 --budget 60s --save --html tune.html[/]

    Exit status: 0 found, 1 a transfer failed, 2 the options contradict each
    other or the data does not fit, 3 an engine, library or device is missing, 130 interrupted: what
    was measured by then is printed.
    """
    from nvmeio import engines
    from nvmeio.cli.measure import machine
    from nvmeio.cli.measure.disk import check_directory
    from nvmeio.cli.tune import rig
    from nvmeio.cli.tune.result import Log, TunePlan
    from nvmeio.cli.tune.space import default_grid, load_grid

    chosen = [*(directories or []), *(nvme_dir or [])]
    if not chosen:
        raise typer.BadParameter("name a directory on the drive to tune for", param_hint="DIR")
    for directory in chosen:
        check_directory(directory)
    ops: list[Op] = [] if no_read else ["read"]
    ops += [] if no_write else ["write"]
    if not ops:
        raise typer.BadParameter("leaves nothing to measure", param_hint="--no-read --no-write")
    if engine not in engines.NAMES:
        raise typer.BadParameter(f"one of {', '.join(engines.NAMES)}", param_hint="--engine")
    if html is not None and not html.absolute().parent.is_dir():
        raise typer.BadParameter(f"{html.parent} is not a directory", param_hint="--html")
    try:
        grid = load_grid(sweep_config) if sweep_config else default_grid()
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--sweep-config") from error
    errors = Console(stderr=True, emoji=False)
    with exit_statuses(errors):
        rig.require_libraries()
        machine.require_devices(gpu or gds, gds, tuple(range(len(chosen))))
        if flush_page_cache:
            rig.check_flush()
        plan = TunePlan(
            chosen,
            ops,
            grid,
            io_size,
            budget,
            engine,
            loops,
            gpu=gpu or gds,
            gds=gds,
            flush=flush_page_cache,
            latencies=html is not None,
        )
        log = Log(log_dir) if log_dir else None
        run = rig.TuneRun(plan, errors, log, verbose=verbose)
        try:
            run.measure()
        finally:  # whatever ended it: report the measurements
            found = run.result()
            if log:
                log.close(found)
            if found is not None:
                _tell(found, errors, save=save, html=html, as_json=as_json)


def _tell(
    found: TuneResult, errors: Console, *, save: bool, html: Path | None, as_json: bool
) -> None:
    """Report on stderr and stdout, store it, and write the page last: it fails most easily."""
    from nvmeio import tuned
    from nvmeio.cli.tune import page, result
    from nvmeio.cli.tune.space import DEFAULT

    result.render(found, errors)
    shown = result.as_json(found) if as_json else found.block()
    typer.echo(json.dumps(shown, indent=3))
    refused = ""
    # A search that was cut short says nothing of the default, and has nothing to store then.
    if save and (found.outcome.complete or found.outcome.winner != DEFAULT):
        try:
            for directory in found.plan.directories:
                file = tuned.save(directory, found.tuned(directory))
            say(errors, f"Stored in {file}")
        except ValueError as error:
            refused = f"not stored: {error}; remove that file, and run it again"
    if html:
        html.write_text(page.render(found))
        say(errors, f"Page: {html}")
    if refused:
        raise Failed(refused)

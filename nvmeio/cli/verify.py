"""`nvmeio verify`: is a checkpoint whole, to the last byte."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from nvmeio.checkpoint._kinds import NoCheckpointError, kind_of
from nvmeio.checkpoint.verifying import Problem, Verdict, verify
from nvmeio.cli._exits import FAILED, OK, USAGE, exit_statuses
from nvmeio.cli._units import binary_size, printable
from nvmeio.errors import TransferError


def command(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="PATH...",
            help="Checkpoints of nvmeio.save or torch.save, safetensors files, or directories of "
            "them.",
            show_default=False,
        ),
    ],
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object on stdout, for programs.")
    ] = False,
) -> None:
    """Checks the CRC-32 of every record of checkpoints, and that their archives are in order.

    Every byte is read, past the page cache, in 64 MiB of memory. Of safetensors files, which have
    no checksums, the structure is checked.

    Example: [bold]nvmeio verify checkpoints/latest.pt[/]

    Exit status: 0 all are whole, 1 one is damaged or cannot be read, 2 a PATH is missing or no
    checkpoint, 130 interrupted.
    """
    errors = Console(stderr=True)
    with exit_statuses(errors):
        found, status = _verify_all(paths, errors)
    if as_json:
        typer.echo(json.dumps({"files": [_as_json(verdict) for verdict in found]}, indent=2))
    else:
        for verdict in found:
            _show(verdict)
    raise typer.Exit(status)


def _verify_all(paths: list[Path], errors: Console) -> tuple[list[Verdict], int]:
    found: list[Verdict] = []
    status = OK
    files: list[Path] = []
    for path in paths:
        inside = list(_files_in(path))
        if not inside:
            _complain(errors, f"{path}: there is no checkpoint in it")
            status = USAGE
        files += inside
    with _bar(errors, files) as advance:
        for path in files:
            try:
                found.append(verify(path, progress=advance))
            except NoCheckpointError as none:
                _complain(errors, str(none))
                status = USAGE
            except FileNotFoundError as missing:
                _complain(errors, str(missing.strerror))
                status = USAGE
            except TransferError as failed:
                size = path.stat().st_size if path.exists() else 0
                unreadable = [Problem("", f"cannot be read: {failed}")]
                found.append(Verdict(str(path), "torch", size, 0, 0, unreadable))
    if any(verdict.problems for verdict in found):
        status = FAILED
    return found, status


def _files_in(path: Path) -> Iterator[Path]:
    """The path itself, or the checkpoints in the directory that it is, and in those below it.

    A link that leads to another file of the directory, as `latest` does, is not looked at twice.
    """
    if not path.is_dir():
        yield path
        return
    for inside in sorted(path.iterdir()):
        if inside.name.startswith("."):
            continue
        if inside.is_symlink() and path.resolve() in inside.resolve().parents:
            continue
        if inside.is_dir():
            yield from _files_in(inside)
        elif inside.is_file():
            with contextlib.suppress(NoCheckpointError, TransferError):
                kind_of(inside)
                yield inside


@contextmanager
def _bar(console: Console, files: list[Path]) -> Iterator[Callable[[int], None]]:
    """A bar over the bytes of all files; yields what to call with those that were read."""
    if not console.is_terminal:
        yield lambda nbytes: None
        return
    total = sum(path.stat().st_size for path in files if path.is_file())
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(compact=True),
        console=console,
        transient=True,
        refresh_per_second=4,
    ) as progress:
        bar = progress.add_task("verifying", total=total)
        yield lambda nbytes: progress.advance(bar, nbytes)


def _complain(errors: Console, message: str) -> None:
    errors.print(message, style="red", markup=False, highlight=False, soft_wrap=True)


def _show(verdict: Verdict) -> None:
    if verdict.problems:
        typer.echo(f"{verdict.path}: DAMAGED")
        for problem in verdict.problems:
            typer.echo(printable(f"  {problem.record or 'archive'}: {problem.what}"))
        return
    what = "tensors" if verdict.kind == "safetensors" else "records"
    line = f"{verdict.path}: whole, {verdict.records} {what}, {binary_size(verdict.nbytes)}"
    if verdict.kind == "safetensors":
        line += " (structure only: the format has no checksums)"
    elif verdict.unchecked:
        line += f" ({verdict.unchecked} of them were written without a checksum)"
    typer.echo(line)


def _as_json(verdict: Verdict) -> dict[str, Any]:
    return {
        **verdict._asdict(),
        "whole": not verdict.problems,
        "problems": [problem._asdict() for problem in verdict.problems],
    }

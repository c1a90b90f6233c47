"""`nvmeio verify`: is a checkpoint whole, to the last byte."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from nvmeio._formats.sniff import NoCheckpointError
from nvmeio.checkpoint.verifying import Problem, Verdict, verify
from nvmeio.cli._terminal import (
    FAILED,
    USAGE,
    JsonOption,
    binary_size,
    say,
    counted,
    exit_statuses,
    printable,
)
from nvmeio.cli.inspect import PathsArgument, checkpoints_in_all, in_words
from nvmeio.errors import TransferError
from nvmeio.progress import rich_bar


def check(
    paths: PathsArgument,
    as_json: JsonOption = False,
) -> None:
    """Checks the CRC-32 of every record of checkpoints, and that their archives are in order.

    Every byte is read, past the page cache, in 64 MiB of memory. Of safetensors files, which have
    no checksums, the structure is checked; of those that nvmeio pack wrote, every byte. Of ranks
    with a drive each, the part that is here.

    Example: [bold]nvmeio verify checkpoints/latest.pt[/]

    Exit status: 0 all are whole, 1 one is damaged or cannot be read, 2 a PATH is missing or no
    checkpoint, 130 interrupted.
    """
    errors = Console(stderr=True, emoji=False)
    with exit_statuses(errors):
        found, status = _verify_all(paths, errors)
    if as_json:
        typer.echo(json.dumps({"files": [_verdict_as_json(verdict) for verdict in found]}, indent=2))
    else:
        for verdict in found:
            _show(verdict)
    raise typer.Exit(status)


def _verify_all(paths: list[Path], errors: Console) -> tuple[list[Verdict], int]:
    found: list[Verdict] = []
    files, status = checkpoints_in_all(paths, errors)
    with _bar(errors, files) as advance:
        for path in files:
            try:
                found.append(verify(path, progress=advance))
            except (NoCheckpointError, FileNotFoundError) as none:
                say(errors, in_words(none), "red")
                status = USAGE
            except TransferError as failed:
                size = path.stat().st_size if path.exists() else 0
                unreadable = [Problem("", f"cannot be read: {failed}")]
                found.append(Verdict(str(path), "torch", size, 0, 0, unreadable))
    if any(verdict.problems for verdict in found):
        status = FAILED
    return found, status


@contextmanager
def _bar(console: Console, files: list[Path]) -> Iterator[Callable[[int], None]]:
    """A bar over the bytes of all files; yields what to call with those that were read."""
    if not console.is_terminal:
        yield lambda nbytes: None
        return
    total, done = sum(path.stat().st_size for path in files if path.is_file()), 0
    with rich_bar(console, transient=True) as bar:

        def advance(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            bar("verifying", done, total)

        yield advance


def _show(verdict: Verdict) -> None:
    if verdict.problems:
        typer.echo(f"{verdict.path}: DAMAGED")
        for problem in verdict.problems:
            what = problem.what.removeprefix(f"{verdict.path}: ")
            typer.echo(printable(f"  {problem.record or 'archive'}: {what}"))
        return
    if verdict.kind == "part":
        line = f"{verdict.path}: whole, {verdict.what}, {binary_size(verdict.nbytes)}"
        typer.echo(line + (" (written without a checksum)" if verdict.unchecked else ""))
        return
    what = f"{verdict.what}, " if verdict.what else ""
    what += counted(verdict.records, "tensor" if verdict.kind == "safetensors" else "record")
    line = f"{verdict.path}: whole, {what}, {binary_size(verdict.nbytes)}"
    if verdict.kind == "safetensors" and verdict.unchecked:
        line += " (structure only: the format has no checksums)"
    elif verdict.unchecked:
        line += f" ({verdict.unchecked} of them written without a checksum)"
    typer.echo(line)


def _verdict_as_json(verdict: Verdict) -> dict[str, Any]:
    return {
        **verdict._asdict(),
        "whole": not verdict.problems,
        "problems": [problem._asdict() for problem in verdict.problems],
    }

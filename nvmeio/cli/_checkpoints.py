"""The checkpoints that a path stands for: the file itself, or those in a directory."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from nvmeio._formats.sniff import NoCheckpointError, kind_of
from nvmeio.cli._exits import OK, USAGE, complain
from nvmeio.errors import TransferError

PathsArgument = Annotated[
    list[Path],
    typer.Argument(
        metavar="PATH...",
        help="Checkpoints of nvmeio.save or torch.save, safetensors files, or directories of them.",
        show_default=False,
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="One JSON object on stdout, for programs.")
]

# A file of such a name that is no checkpoint, an empty one for instance, is one that was lost.
_PROMISE = frozenset({".pt", ".pth", ".ckpt", ".safetensors"})


def checkpoints_in_all(paths: Iterable[Path], errors: Console) -> tuple[list[Path], int]:
    """The checkpoints that several paths stand for, and the exit status so far.

    A path that stands for none is told on `errors`, and makes the status that of wrong usage.
    """
    found: list[Path] = []
    status = OK
    for path in paths:
        inside = list(checkpoints_in(path))
        if not inside:
            complain(errors, f"{path}: there is no checkpoint in it")
            status = USAGE
        found += inside
    return found, status


def in_words(error: Exception) -> str:
    """What went wrong with a path, for people: an OSError's number is no part of it."""
    strerror = error.strerror if isinstance(error, OSError) else None
    return strerror or str(error)


def checkpoints_in(path: Path) -> Iterator[Path]:
    """The path itself, or the checkpoints in the directory that it is, and in those below it.

    What cannot be read is among them, for the caller to say so. A link that leads to something else
    below the directory, as `latest` does, is not followed, so that nothing is looked at twice.
    """
    if path.is_dir():
        top = os.path.realpath(path)
        yield from _below(path, top, {top})
    else:
        yield path


def _below(directory: Path, top: str, seen: set[str]) -> Iterator[Path]:
    for inside in sorted(directory.iterdir()):
        if inside.name.startswith("."):
            continue
        if inside.is_symlink() and os.path.realpath(inside).startswith(os.path.join(top, "")):
            continue
        if inside.is_dir():
            where = os.path.realpath(inside)
            if where not in seen:  # a link to a directory above this one leads round in circles
                seen.add(where)
                yield from _below(inside, top, seen)
        elif inside.is_file() and _may_be_one(inside):
            yield inside


def _may_be_one(path: Path) -> bool:
    try:
        kind_of(path)
    except NoCheckpointError:
        return path.suffix in _PROMISE
    except FileNotFoundError:
        return False  # removed since the directory was read
    except TransferError:
        return True
    return True

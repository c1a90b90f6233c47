"""`nvmeio inspect` (the content of a checkpoint) and `nvmeio verify` (is it whole)."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from nvmeio import files
from nvmeio._formats.packed_index import ExpertsFacts
from nvmeio._formats.safetensors.shards import INDEX_SUFFIX
from nvmeio._formats.sniff import (
    DCP_DATA,
    DCP_METADATA,
    NoCheckpointError,
    dcp_metadata_names,
    is_dcp_directory,
    is_dcp_file,
    kind_of,
)
from nvmeio._pages import PAGE_BYTES
from nvmeio.checkpoint import describing, verifying
from nvmeio.checkpoint.describing import Description, alignment_of
from nvmeio.checkpoint.verifying import Problem, Verdict
from nvmeio.cli._terminal import (
    FAILED,
    OK,
    USAGE,
    Column,
    Row,
    binary_size,
    counted,
    exit_statuses,
    fitted,
    printable,
    say,
    stdout,
    verifying_bar,
)
from nvmeio.errors import IntegrityError, TransferError

# A file of such a name that is not a checkpoint, an empty one for instance, is one that was lost.
_PROMISE = frozenset({".pt", ".pth", ".ckpt", ".safetensors"})


# Finding them


def checkpoints_in_all(paths: Iterable[Path], errors: Console) -> tuple[list[Path], int]:
    """The checkpoints that several paths stand for, and the exit status so far.

    A path without a checkpoint is reported on `errors`, and sets the status of wrong usage.
    """
    found: list[Path] = []
    status = OK
    for path in paths:
        inside = list(checkpoints_in(path))
        if not inside:
            say(errors, f"{path}: it holds no checkpoint", "red")
            status = USAGE
        found += inside
    return found, status


def in_words(error: Exception) -> str:
    """An error of a path for people, without an OSError's number."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def checkpoints_in(path: Path) -> Iterator[Path]:
    """The path itself, or the checkpoints in the directory that it is, and in those below it.

    A DCP checkpoint is one, and stands here as its metadata file.

    Unreadable paths are among them, for the caller to report. A link that leads to something else
    below the directory, as `latest` does, is not followed, so that nothing is looked at twice.
    """
    if path.is_dir():
        top = os.path.realpath(path)
        yield from _below(path, top, {top})
    else:
        yield path


def _below(directory: Path, top: str, seen: set[str]) -> Iterator[Path]:
    contents = sorted(directory.iterdir())
    is_dcp = is_dcp_directory(directory)
    if is_dcp:
        names = dcp_metadata_names(path.name for path in contents)
        yield from (directory / name for name in names or [DCP_METADATA])
    for inside in contents:
        if inside.name.startswith(".") or (is_dcp and is_dcp_file(inside)):
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
    if path.name.endswith(INDEX_SUFFIX):
        return True
    try:
        with files.open(path) as file:
            kind_of(file)
    except NoCheckpointError:
        return path.suffix in _PROMISE
    except FileNotFoundError:
        return False  # removed since the directory was read
    except TransferError:
        return True
    return True


def _is_of_dcp(path: Path) -> bool:
    return is_dcp_file(path) and is_dcp_directory(path.parent)


def _describe(path: Path) -> Description:
    if not _is_of_dcp(path):
        return describing.describe(path)
    from nvmeio.integrations.dcp import describing as dcp  # 1 s, and not for other checkpoints

    return dcp.describe(path)


def _verify(path: Path, progress: Callable[[int], None]) -> Verdict:
    if not _is_of_dcp(path):
        return verifying.verify(path, progress=progress)
    from nvmeio.integrations.dcp import checking

    return checking.verify(path, progress=progress)


# inspect


def inspect(paths: list[Path], records: bool, as_json: bool) -> None:
    """Show the content of checkpoints, and end with the status."""
    errors = Console(stderr=True, emoji=False)
    with exit_statuses(errors):
        found, status = _describe_all(paths, errors)
    if as_json:
        told = [_description_as_json(description) for description in found]
        if len(paths) > 1 or paths[0].is_dir():
            typer.echo(json.dumps({"files": told}, indent=2))
        elif told:
            typer.echo(json.dumps(told[0], indent=2))
        raise typer.Exit(status)
    console = stdout()
    for number, description in enumerate(found):
        if number:
            console.print()
        if description.kind == "part":
            line = f"{description.path}: {description.what}, {binary_size(description.nbytes)}"
            say(console, line)
            continue
        table = _table_of_records if records else _table_of_tensors
        console.print(table(description, console.width))
        console.print()
        say(console, _summary(description))
    raise typer.Exit(status)


def _describe_all(paths: list[Path], errors: Console) -> tuple[list[Description], int]:
    found: list[Description] = []
    files, status = checkpoints_in_all(paths, errors)
    for file in files:
        if file.name.endswith(INDEX_SUFFIX) and file not in paths:
            continue  # its files are shown
        try:
            found.append(_describe(file))
        except (NoCheckpointError, FileNotFoundError) as none:
            say(errors, in_words(none), "red")
            status = status or USAGE
        except IntegrityError as damaged:
            what = in_words(damaged).removeprefix(f"{file}: ")
            say(errors, f"{file}: DAMAGED\n  archive: {what}", "red")
            status = FAILED
        except TransferError as failed:
            say(errors, in_words(failed), "red")
            status = FAILED
    return found, status


_TENSOR = (
    Column("dtype", 2, right=False),
    Column("shape", 1, right=False),
    Column("size", 3),
    Column("offset", 4),
    Column("aligned to", 5),
    Column("record", 6, right=False),
)
_RECORD = (Column("bytes", 1), Column("offset", 3), Column("aligned to", 4), Column("CRC-32", 2))


def _table_of_tensors(description: Description, width: int) -> Table:
    rows = [
        Row(
            printable(tensor.name or "(the object itself)"),
            {
                "dtype": printable(tensor.dtype),
                "shape": "x".join(map(str, tensor.shape)) or "scalar",
                "size": binary_size(tensor.nbytes),
                "offset": str(tensor.offset),
                "aligned to": binary_size(alignment_of(tensor.offset)),
                "record": printable(tensor.record),
            },
        )
        for tensor in description.tensors
    ]
    return fitted("tensor", _TENSOR, rows, width)


def _table_of_records(description: Description, width: int) -> Table:
    rows = [
        Row(
            printable(record.name),
            {
                "bytes": str(record.nbytes),
                "offset": str(record.offset),
                "aligned to": binary_size(alignment_of(record.offset)),
                "CRC-32": "none" if record.crc32 is None else f"{record.crc32:08x}",
            },
        )
        for record in description.records
    ]
    return fitted("record", _RECORD, rows, width)


def _summary(description: Description) -> str:
    # Views begin anywhere in their record: what counts is where the records begin.
    begins = {record.name: record.offset for record in description.records}
    storages = {
        t.record if t.record in begins else (t.record, t.name): begins.get(t.record, t.offset)
        for t in description.tensors
    }
    lines = [
        f"{description.path}: {description.kind}, {binary_size(description.nbytes)}, "
        f"{counted(len(description.tensors), 'tensor')} in {counted(len(storages), 'storage')}"
    ]
    if description.what:
        rest = "" if description.kind == "dcp" else "; the rest of the file is holes"
        lines.append(description.what + rest)
    lines += _experts_in_words(description.experts)
    if storages:
        least = min(map(alignment_of, storages.values()))
        lines.append(f"every storage begins at a multiple of {binary_size(least)}")
    if description.kind != "dcp" and any(r.crc32 is None for r in description.records):
        lines.append("written without checksums")
    if description.forbidden:
        names = printable(", ".join(description.forbidden))
        lines.append(f"weights_only=True refuses it, for it refers to or calls: {names}")
    return "\n".join(lines)


def _experts_in_words(experts: list[ExpertsFacts]) -> list[str]:
    """One line for each kind of layer: how many experts, and how they lie."""
    kinds = Counter((each.number, each.nbytes) for each in experts)
    return [
        f"{counted(layers, 'layer')} of {number} experts: {binary_size(nbytes)} each, side by side "
        f"in pages of {binary_size(PAGE_BYTES)}, one read and one checksum an expert"
        for (number, nbytes), layers in kinds.items()
    ]


def _description_as_json(description: Description) -> dict[str, Any]:
    return {
        **description._asdict(),
        "experts": [each._asdict() for each in description.experts],
        "records": [
            {**record._asdict(), "alignment": alignment_of(record.offset)}
            for record in description.records
        ],
        "tensors": [
            {**tensor._asdict(), "alignment": alignment_of(tensor.offset)}
            for tensor in description.tensors
        ],
    }


# verify


def check(paths: list[Path], as_json: bool) -> None:
    """Show which checkpoints are whole, and end with the status."""
    errors = Console(stderr=True, emoji=False)
    with exit_statuses(errors):
        found, status = _verify_all(paths, errors)
    if as_json:
        typer.echo(
            json.dumps({"files": [_verdict_as_json(verdict) for verdict in found]}, indent=2)
        )
    else:
        for verdict in found:
            _show(verdict)
    raise typer.Exit(status)


def _verify_all(paths: list[Path], errors: Console) -> tuple[list[Verdict], int]:
    found: list[Verdict] = []
    files, status = checkpoints_in_all(paths, errors)
    with verifying_bar(errors, lambda: sum(map(_nbytes, files))) as advance:
        for path in files:
            try:
                found.append(_verify(path, advance))
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


_RECORDS = {"safetensors": "tensor", "dcp": "item"}


def _nbytes(path: Path) -> int:
    """The bytes to read to verify a checkpoint."""
    if _is_of_dcp(path) and not path.name.endswith(DCP_DATA):
        return sum(file.stat().st_size for file in path.parent.glob(f"*{DCP_DATA}"))
    return path.stat().st_size if path.is_file() else 0


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
    what += counted(verdict.records, _RECORDS.get(verdict.kind, "record"))
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

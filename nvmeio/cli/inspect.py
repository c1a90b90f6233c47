"""`nvmeio inspect`: what is in a checkpoint, and where it lies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from nvmeio._formats.sniff import NoCheckpointError
from nvmeio.checkpoint.describing import Description, alignment_of, describe
from nvmeio.cli._checkpoints import JsonOption, PathsArgument, checkpoints_in_all, in_words
from nvmeio.cli._exits import FAILED, USAGE, complain, exit_statuses
from nvmeio.cli._terminal import Column, Row, binary_size, counted, fitted, printable
from nvmeio.errors import IntegrityError, TransferError


def command(
    paths: PathsArgument,
    records: Annotated[
        bool, typer.Option("--records", help="The archive's records, not the tensors.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """What is in checkpoints: tensors, dtypes, shapes, where each lies and how it is aligned.

    No tensor is read, and nothing of the pickle is run: safe for files of any source.

    Example: [bold]nvmeio inspect checkpoints/latest.pt[/]

    Exit status: 0 shown, 1 one is damaged or cannot be read, 2 a PATH is missing or no checkpoint,
    130 interrupted.
    """
    errors = Console(stderr=True, emoji=False)
    with exit_statuses(errors):
        found, status = _describe_all(paths, errors)
    if as_json:
        told = [_as_json(description) for description in found]
        if len(paths) > 1 or paths[0].is_dir():
            typer.echo(json.dumps({"files": told}, indent=2))
        elif told:
            typer.echo(json.dumps(told[0], indent=2))
        raise typer.Exit(status)
    console = Console(emoji=False)
    if not console.is_terminal:
        console.width = 1000  # in a pipe each line keeps to itself, for grep
    for number, description in enumerate(found):
        if number:
            console.print()
        if description.kind == "part":
            line = f"{description.path}: {description.what}, {binary_size(description.nbytes)}"
            console.print(line, markup=False, highlight=False, soft_wrap=True)
            continue
        table = _table_of_records if records else _table_of_tensors
        console.print(table(description, console.width))
        console.print()
        console.print(_summary(description), markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(status)


def _describe_all(paths: list[Path], errors: Console) -> tuple[list[Description], int]:
    found: list[Description] = []
    files, status = checkpoints_in_all(paths, errors)
    for file in files:
        try:
            found.append(describe(file))
        except (NoCheckpointError, FileNotFoundError) as none:
            complain(errors, in_words(none))
            status = status or USAGE
        except IntegrityError as damaged:
            what = in_words(damaged).removeprefix(f"{file}: ")
            complain(errors, f"{file}: DAMAGED\n  archive: {what}")
            status = FAILED
        except TransferError as failed:
            complain(errors, in_words(failed))
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
_RECORD = (
    Column("bytes", 1),
    Column("offset", 3),
    Column("aligned to", 4),
    Column("CRC-32", 2),
)


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
                "aligned to": binary_size(record.alignment),
                "CRC-32": "none" if record.crc32 is None else f"{record.crc32:08x}",
            },
        )
        for record in description.records
    ]
    return fitted("record", _RECORD, rows, width)


def _summary(description: Description) -> str:
    # Views begin anywhere in their record: what counts is where the records begin.
    begins = {record.name: record.offset for record in description.records}
    storages = {t.record or t.name: begins.get(t.record, t.offset) for t in description.tensors}
    lines = [
        f"{description.path}: {description.kind}, {binary_size(description.nbytes)}, "
        f"{counted(len(description.tensors), 'tensor')} in {counted(len(storages), 'storage')}"
    ]
    if description.what:
        lines.append(f"{description.what}; the rest of the file is holes")
    if storages:
        least = min(map(alignment_of, storages.values()))
        lines.append(f"every storage begins at a multiple of {binary_size(least)}")
    if any(record.crc32 is None for record in description.records):
        lines.append("written without checksums")
    if description.forbidden:
        names = printable(", ".join(description.forbidden))
        lines.append(f"weights_only=True refuses it, for it refers to or calls: {names}")
    return "\n".join(lines)


def _as_json(description: Description) -> dict[str, Any]:
    return {
        **description._asdict(),
        "records": [
            {**record._asdict(), "alignment": record.alignment} for record in description.records
        ],
        "tensors": [
            {**tensor._asdict(), "alignment": alignment_of(tensor.offset)}
            for tensor in description.tensors
        ],
    }

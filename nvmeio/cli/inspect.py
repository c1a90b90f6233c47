"""`nvmeio inspect`: what is in a checkpoint, and where it lies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nvmeio._formats.sniff import NoCheckpointError
from nvmeio.checkpoint.describing import Description, alignment_of, describe
from nvmeio.cli._checkpoints import checkpoints_in
from nvmeio.cli._exits import FAILED, OK, USAGE, complain, exit_statuses
from nvmeio.cli._units import binary_size, counted, printable
from nvmeio.errors import IntegrityError, TransferError


def command(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH",
            help="A checkpoint of nvmeio.save or torch.save, a safetensors file, or a directory of "
            "them.",
            show_default=False,
        ),
    ],
    records: Annotated[
        bool, typer.Option("--records", help="The archive's records, not the tensors.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object on stdout, for programs.")
    ] = False,
) -> None:
    """What is in a checkpoint: tensors, dtypes, shapes, where each lies and how it is aligned.

    No tensor is read, and nothing of the pickle is run: safe for files of any source.

    Example: [bold]nvmeio inspect checkpoints/latest.pt[/]

    Exit status: 0 shown, 1 a file is damaged or cannot be read, 2 PATH is missing or no checkpoint.
    """
    errors = Console(stderr=True)
    with exit_statuses(errors):
        found, status = _describe_all(path, errors)
    if as_json:
        told = [_as_json(description) for description in found]
        if path.is_dir():
            typer.echo(json.dumps({"files": told}, indent=2))
        elif told:
            typer.echo(json.dumps(told[0], indent=2))
        raise typer.Exit(status)
    console = Console()
    if not console.is_terminal:
        console.width = 1000  # in a pipe each line keeps to itself, for grep
    for number, description in enumerate(found):
        if number:
            console.print()
        console.print(_table_of_records(description) if records else _table_of_tensors(description))
        console.print(_summary(description), markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(status)


def _describe_all(path: Path, errors: Console) -> tuple[list[Description], int]:
    found: list[Description] = []
    status = OK
    files = list(checkpoints_in(path))
    if not files:
        complain(errors, f"{path}: there is no checkpoint in it")
        status = USAGE
    for file in files:
        try:
            found.append(describe(file))
        except (NoCheckpointError, FileNotFoundError) as none:
            complain(errors, str(none))
            status = status or USAGE
        except (IntegrityError, TransferError) as failed:
            complain(errors, str(failed))
            status = FAILED
    return found, status


def _table_of_tensors(description: Description) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("tensor", overflow="fold")
    for title in ("dtype", "shape"):
        table.add_column(title)
    for title in ("size", "offset", "aligned to"):
        table.add_column(title, justify="right")
    table.add_column("record")
    for tensor in description.tensors:
        table.add_row(
            _as_is(tensor.name or "(the object itself)"),
            _as_is(tensor.dtype),
            "x".join(map(str, tensor.shape)) or "scalar",
            binary_size(tensor.nbytes),
            str(tensor.offset),
            binary_size(alignment_of(tensor.offset)),
            _as_is(tensor.record),
        )
    return table


def _table_of_records(description: Description) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("record", overflow="fold")
    for title in ("bytes", "offset", "aligned to", "CRC-32"):
        table.add_column(title, justify="right")
    for record in description.records:
        table.add_row(
            _as_is(record.name),
            str(record.nbytes),
            str(record.offset),
            binary_size(record.alignment),
            "none" if record.crc32 is None else f"{record.crc32:08x}",
        )
    return table


def _as_is(name: str) -> Text:
    """A name of the file's, in which brackets are no markup."""
    return Text(printable(name))


def _summary(description: Description) -> str:
    # Views begin anywhere in their record: what counts is where the records begin.
    begins = {record.name: record.offset for record in description.records}
    storages = {t.record or t.name: begins.get(t.record, t.offset) for t in description.tensors}
    lines = [
        f"{description.path}: {description.kind}, {binary_size(description.nbytes)}, "
        f"{counted(len(description.tensors), 'tensor')} in {counted(len(storages), 'storage')}"
    ]
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

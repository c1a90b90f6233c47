"""`nvmeio pack`: a model in streaming order, in another dtype or quantised."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from nvmeio import _checks
from nvmeio.cli._terminal import (
    USAGE,
    OptionGroup,
    Refused,
    binary_size,
    exit_statuses,
    say,
    stdout,
)
from nvmeio.progress import rich_bar

_option = OptionGroup()
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def dtype_of(name: str | None) -> torch.dtype | None:
    """A dtype from its name, short ones such as "bf16" included."""
    if name is None:
        return None
    try:
        found = _checks.dtype("dtype", name)
    except ValueError:
        found = None
    if found not in _DTYPES:
        raise typer.BadParameter(
            f"{name!r} is none of float32, bfloat16, float16", param_hint="--dtype"
        )
    return found


def pack(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            help="A directory that transformers' save_pretrained wrote, or a name on the hub.",
            show_default=False,
        ),
    ],
    out: Annotated[
        list[Path],
        typer.Argument(
            metavar="OUT...",
            help="The directory to make; must not exist. Several, one on each drive, get a part "
            "of every layer each.",
            show_default=False,
        ),
    ],
    dtype: Annotated[
        str | None,
        _option.value("float32, bfloat16 or float16; by default the model's.", "DTYPE"),
    ] = None,
    quant_bits: Annotated[
        int | None, _option.value("4 or 8: quantise the matrices of layers and head.", "BITS")
    ] = None,
    quant_group_size: Annotated[
        int, _option.value("Elements that share a scale and a minimum.", "N")
    ] = 64,
    ranks: Annotated[
        int,
        _option.value(
            "For N processes that stream it together: OUT/rank-0 and so on, a part in each.",
            "N",
            min=1,
        ),
    ] = 1,
) -> None:
    """Writes a model in the order in which it is streamed, each layer as one aligned record.

    `nvmeio.stream_model` and `nvmeio generate` read OUT with one large read a layer; in fewer bytes
    a pass takes less time. OUT appears when it is complete. Of several OUT all are named when the
    model is used; they are read at once.

    Example: [bold]nvmeio pack Llama-3-70B /mnt/nvme/llama-70b-4bit --quant-bits 4[/]

    Exit status: 0 written, 1 a file is damaged or the disk failed, 2 what was asked for makes no
    sense, 3 transformers is not installed.
    """
    errors = Console(stderr=True, emoji=False)
    wanted = dtype_of(dtype)
    with exit_statuses(errors):
        from nvmeio.inference import packing

        with rich_bar(errors, transient=True) as bar, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the packages that transformers imports
            try:
                report = packing.pack(
                    str(model),
                    out,
                    dtype=wanted,
                    quant_bits=quant_bits,
                    quant_group_size=quant_group_size,
                    ranks=ranks,
                    progress=bar if errors.is_terminal else None,
                )
            except (FileNotFoundError, FileExistsError) as wrong:
                say(errors, str(wrong), "red")
                raise typer.Exit(USAGE) from wrong
            except (ValueError, TypeError) as wrong:
                raise Refused(str(wrong)) from wrong
    names = ", ".join(map(str, out))
    text = (
        f"{names}: {binary_size(report.bytes_written)} in {report.records} records, of "
        f"{binary_size(report.bytes_read)} that were read"
    )
    if report.quantised:
        text += (
            f"; {report.quantised} weights quantised, no element is further than "
            f"{report.largest_error:.3g} from what it was"
        )
    say(stdout(), text)

"""The `nvmeio` command. Results go to stdout, everything else to stderr.

`main` is the console script. A module of this package serves one subcommand; `checkpoints` serves
verify and inspect, `models` pack and generate, `caches` those below `cache`. Nothing here imports
torch before a command works: `--version` and all of `--help` come at once.
"""

from __future__ import annotations

import os
import sys
from inspect import cleandoc
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any

import typer

import nvmeio
from nvmeio.cli import bench, caches, models, tune
from nvmeio.cli._terminal import JsonOption, status_of_interrupt, stdout


class _App(typer.Typer):
    """Reports an interrupt as one, even where typer or its libraries turned it into an error."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        except Exception as failed:
            status = status_of_interrupt(failed)
            if status is None:
                raise
            if not kwargs.get("standalone_mode", True):
                return status
            raise SystemExit(status) from failed


app = _App(
    help="Tensors to and from files at the speed of the drive.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Runs the command line of this process."""
    # A locale that has no check marks must not cost the user the report.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
    app(prog_name="nvmeio")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"nvmeio {nvmeio.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    pass


@app.command("report")
def show_report(
    directories: Annotated[
        list[Path] | None,
        typer.Option(
            "--dir",
            metavar="DIR",
            help="A directory to look at, by default the current one; may be given several times. "
            "A small file is made in it and removed.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Shows what of direct I/O works here, and the command that fixes what does not.

    Example: [bold]nvmeio report --dir /mnt/nvme0 --dir /scratch[/]

    Exit status: 0 direct I/O works, 1 not in some DIR, 2 a DIR cannot be written in.
    """
    from nvmeio.cli import report

    try:
        result = report.run(directories or [Path.cwd()])
    except OSError as error:
        raise typer.BadParameter(str(error), param_hint="--dir") from error
    if as_json:
        typer.echo(report.to_json(result))
    else:
        report.render(result, stdout())
    raise typer.Exit(result.exit_status)


PathsArgument = Annotated[
    list[Path],
    typer.Argument(
        metavar="PATH...",
        help="Checkpoints of nvmeio.save, torch.save or DCP, safetensors, or directories of them.",
        show_default=False,
    ),
]


@app.command("inspect")
def show_contents(
    paths: PathsArgument,
    records: Annotated[
        bool, typer.Option("--records", help="The archive's records, not the tensors.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Shows the content of checkpoints: tensors with dtype, shape, place in the file and alignment.

    No tensor is read, and nothing of the pickle is run: safe for files of any source.

    Example: [bold]nvmeio inspect checkpoints/latest.pt[/]

    Exit status: 0 shown, 1 one is damaged or cannot be read, 2 a PATH is missing or no checkpoint,
    130 interrupted.
    """
    from nvmeio.cli import checkpoints

    checkpoints.inspect(paths, records, as_json)


@app.command("verify")
def check_contents(paths: PathsArgument, as_json: JsonOption = False) -> None:
    """Checks the CRC-32 of every record of checkpoints, and that their archives are in order.

    It reads every byte, past the page cache, in 64 MiB of memory. safetensors files have no
    checksums: their structure is checked, and every byte if nvmeio pack wrote them. If ranks saved
    to drives of their own, the parts that are here are checked. A DCP directory is one checkpoint:
    each item is compared with its .metadata too.

    Example: [bold]nvmeio verify checkpoints/latest.pt[/]

    Exit status: 0 all are whole, 1 one is damaged or cannot be read, 2 a PATH is missing or no
    checkpoint, 130 interrupted.
    """
    from nvmeio.cli import checkpoints

    checkpoints.check(paths, as_json)


@app.command(
    "deepspeed",
    # The command's own options are the command's, with or without a -- before it.
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True},
)
def run_on_nvmeio(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="COMMAND", help="The command and its arguments.", show_default=False
        ),
    ],
) -> None:
    """Runs a command in which DeepSpeed does its disk I/O on nvmeio, in every process below it.

    Nothing in the command changes: DeepSpeed's own op is replaced as soon as DeepSpeed is
    imported, in children of any kind too (the launcher's ranks, spawn, forkserver, fork). Only
    a Python that ignores PYTHONPATH (-E, -I) is not reached.

    Example: [bold]nvmeio deepspeed -- python train.py --deepspeed_config zero3.json[/]

    Exit status: that of COMMAND; 126 if it cannot be run, 127 if there is none of that name, 2 if
    no COMMAND was given.
    """
    from nvmeio.compat.deepspeed import installing

    sys.stdout.flush()
    sys.stderr.flush()
    try:  # in this very process: signals and the exit status are the command's
        os.execvpe(command[0], command, installing.environment(os.environ))
    except OSError as error:
        typer.echo(f"nvmeio deepspeed: {command[0]}: {error.strerror}", err=True)
        raise typer.Exit(127 if isinstance(error, FileNotFoundError) else 126) from error


# Other names of options, which would not fit beside them in a terminal of 80 columns.
_ALIASES = {
    "no-overlap-events": "sequential-requests",
    "intra-op-parallelism": "io-parallel",
    "different-file-each-iteration": "new-files",
}


def _normal(token: str) -> str:
    """DeepSpeed's tools spell flags with underscores: both spellings mean the same option."""
    name = token.replace("_", "-")
    return _ALIASES.get(name, name)


_UNDERSCORES = {"token_normalize_func": _normal}

app.command("bench", context_settings=_UNDERSCORES)(bench.command)
app.command("tune", context_settings=_UNDERSCORES)(tune.command)
app.command("pack", context_settings=_UNDERSCORES)(models.pack)
app.command("generate", context_settings=_UNDERSCORES)(models.generate)
app.add_typer(caches.app, name="cache")

# rich keeps the line breaks of a paragraph, where a narrow terminal makes its own.
for _registered in (*app.registered_commands, *caches.app.registered_commands):
    _paragraphs = cleandoc(_registered.callback.__doc__ or "").split("\n\n")
    _registered.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in _paragraphs)

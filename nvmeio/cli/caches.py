"""`nvmeio cache`: the block stores of KV caches, looked at and looked after."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from nvmeio.cli._terminal import (
    FAILED,
    OK,
    USAGE,
    JsonOption,
    OptionGroup,
    Refused,
    binary_size,
    counted,
    exit_statuses,
    printable,
    say,
    verifying_bar,
)

if TYPE_CHECKING:
    from nvmeio._kv_blocks.upkeep import StoreFacts, StoreVerdict

app = typer.Typer(
    help="Looks after the KV caches that a server keeps in a directory.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

_LEFT = "the stores are undamaged, and the command may be run again"
_options = OptionGroup()

DirectoryArgument = Annotated[
    Path,
    typer.Argument(
        metavar="DIR", help="The directory that the server was given.", show_default=False
    ),
]
NameOption = Annotated[
    str | None,
    typer.Option(
        "--name", metavar="NAME", help="One store of several; stats shows what they are called."
    ),
]


@app.command("verify")
def verify(
    directory: DirectoryArgument, name: NameOption = None, as_json: JsonOption = False
) -> None:
    """Reads every block and compares its checksum; changes nothing.

    It reads past the page cache, in 64 MiB of memory. The server may run: blocks that make room for
    others meanwhile are counted.

    Example: [bold]nvmeio cache verify /mnt/nvme/kv[/]

    Exit status: 0 all are whole, 1 one is damaged or cannot be read, 2 DIR has no store, 130
    interrupted.
    """
    errors = Console(stderr=True, emoji=False)
    verdicts = []
    with exit_statuses(errors, "nothing was changed"):
        from nvmeio._kv_blocks import upkeep

        stores = _stores(directory, name)
        with verifying_bar(errors, lambda: sum(map(upkeep.nbytes_of, stores))) as advance:
            verdicts += [upkeep.verify(store, advance) for store in stores]
    if as_json:
        typer.echo(json.dumps({"stores": list(map(_verdict_as_json, verdicts))}, indent=2))
    else:
        for verdict in verdicts:
            _show_verdict(verdict)
    raise typer.Exit(FAILED if any(verdict.problems for verdict in verdicts) else OK)


@app.command("stats")
def stats(
    directory: DirectoryArgument, name: NameOption = None, as_json: JsonOption = False
) -> None:
    """Shows how many blocks there are, their bytes and kinds, and who has the store open.

    No block is read, and the server may run. Processes of other users are seen by root alone, those
    of other containers by none.

    Example: [bold]nvmeio cache stats /mnt/nvme/kv --json[/]

    Exit status: 0 shown, 1 a store is damaged or cannot be read, 2 DIR has no store.
    """
    with exit_statuses(Console(stderr=True, emoji=False), "nothing was changed"):
        from nvmeio._kv_blocks import upkeep

        facts = [upkeep.examine(store) for store in _stores(directory, name)]
    if as_json:
        typer.echo(json.dumps({"stores": list(map(_facts_as_json, facts))}, indent=2))
    else:
        typer.echo("\n\n".join(map(_facts_in_words, facts)))


@app.command("resize")
def resize(
    directory: DirectoryArgument,
    capacity: Annotated[int, _options.size("The bytes that the blocks of the store may take.")],
    name: NameOption = None,
    as_json: JsonOption = False,
) -> None:
    """Makes a store larger or smaller where it lies.

    A smaller one keeps the blocks that were stored last. Refused while a process has the store
    open. Give the server the same capacity_bytes when it starts again: it resizes the store to what
    it is given, and drops what lies behind the new end.

    Example: [bold]nvmeio cache resize /mnt/nvme/kv --capacity 200G[/]

    Exit status: 0 done, 1 a store is damaged or the drive failed, 2 DIR has no store or several, or
    a process has it open, 130 interrupted.
    """
    with exit_statuses(Console(stderr=True, emoji=False), _LEFT), _in_use_refused():
        from nvmeio._kv_blocks import upkeep

        stores = _stores(directory, name)
        if len(stores) > 1:
            names = ", ".join(store.stem for store in stores)
            raise Refused(f"{directory} has {len(stores)} stores: name one with --name: {names}")
        try:
            done = upkeep.resize(stores[0], capacity)
        except ValueError as too_small:
            raise Refused(str(too_small)) from too_small
    if as_json:
        typer.echo(json.dumps(done._asdict(), indent=2))
        return
    before, now = binary_size(done.capacity_before), binary_size(done.capacity_bytes)
    typer.echo(
        f"{printable(done.path)}: {now} instead of {before}, {counted(done.kept, 'block')} kept "
        f"({done.moved} of them moved), {done.dropped} dropped"
    )


@app.command("purge")
def purge(
    directory: DirectoryArgument, name: NameOption = None, as_json: JsonOption = False
) -> None:
    """Empties the stores of a directory, and gives their room back.

    They keep their capacity. Refused while a process has one of them open; those before it in order
    of their names are empty then.

    Example: [bold]nvmeio cache purge /mnt/nvme/kv[/]

    Exit status: 0 done, 1 a store is damaged or the drive failed, 2 DIR has no store, or a process
    has one open, 130 interrupted.
    """
    purged: dict[str, int] = {}
    with exit_statuses(Console(stderr=True, emoji=False), _LEFT), _in_use_refused():
        from nvmeio._kv_blocks import upkeep

        stores = _stores(directory, name)
        for store in stores:
            purged[str(store)] = upkeep.purge(store)
    if as_json:
        stores_purged = [{"path": path, "blocks": blocks} for path, blocks in purged.items()]
        typer.echo(json.dumps({"stores": stores_purged}, indent=2))
        return
    for path, blocks in purged.items():
        typer.echo(f"{printable(path)}: {counted(blocks, 'block')} gone")


# Their steps


def _stores(directory: Path, name: str | None) -> Sequence[Path]:
    from nvmeio._kv_blocks import upkeep

    try:
        stores = upkeep.stores_in(directory)
    except FileNotFoundError as none:
        say(Console(stderr=True, emoji=False), str(none), "red")
        raise typer.Exit(USAGE) from none
    chosen = [store for store in stores if name in (None, store.stem)]
    if not chosen:
        names = ", ".join(store.stem for store in stores)
        raise Refused(f"{directory} has no store {name!r}: take one of {names}")
    return chosen


@contextmanager
def _in_use_refused() -> Iterator[None]:
    try:
        yield
    except OSError as failed:
        if failed.errno == errno.EBUSY:
            raise Refused(str(failed)) from failed
        raise


def _show_verdict(verdict: StoreVerdict) -> None:
    path = printable(verdict.path)
    meanwhile = f"; {verdict.changed} made room for others meanwhile" if verdict.changed else ""
    amount = f"{counted(verdict.blocks, 'block')}, {binary_size(verdict.nbytes)}{meanwhile}"
    if not verdict.problems:
        typer.echo(f"{path}: whole, {amount}")
        return
    typer.echo(f"{path}: DAMAGED, {len(verdict.problems)} of {amount}")
    for problem in verdict.problems:
        typer.echo(f"  slot {problem.slot} {problem.digest[:16]}: {printable(problem.what)}")


def _verdict_as_json(verdict: StoreVerdict) -> dict[str, Any]:
    problems = [problem._asdict() for problem in verdict.problems]
    return {
        "path": verdict.path,
        "whole": not problems,
        "blocks": verdict.blocks,
        "bytes": verdict.nbytes,
        "changed_meanwhile": verdict.changed,
        "problems": problems,
    }


def _facts_in_words(facts: StoreFacts) -> str:
    capacity, taken = binary_size(facts.capacity_bytes), binary_size(facts.file_bytes)
    kinds = ", ".join(f"{blocks} of kind {kind:#x}" for kind, blocks in facts.kinds.items())
    lines = [
        printable(facts.path),
        f"  blocks      {facts.blocks}, {binary_size(facts.nbytes)}",
        f"  kinds       {kinds or 'none'}",
        f"  capacity    {capacity} in slots of {binary_size(facts.block_bytes)}; the file has "
        f"{taken}",
        f"  generation  {facts.generation}, of {facts.tag[:16]}",
        f"  open        {printable('; '.join(map(str, facts.users)) or 'no process has it open')}",
    ]
    if facts.damaged:
        lines.append(f"  damaged     {counted(facts.damaged, 'record')} of the table")
    return "\n".join(lines)


def _facts_as_json(facts: StoreFacts) -> dict[str, Any]:
    shown = {**facts._asdict(), "users": [user._asdict() for user in facts.users]}
    shown["bytes"] = shown.pop("nbytes")
    return shown

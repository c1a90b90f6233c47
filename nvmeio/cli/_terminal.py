"""Terminals: sizes, times and counts as people write them, tables that fit, bars, and the end.

Sizes are binary (1K = 1024), rates in 10**9 bytes. Tables leave columns out where there is little
room, and show the others whole. Progress is on stderr, where somebody looks at it. docs/cli.md
lists the exit statuses, and which failure ends in which.
"""

from __future__ import annotations

import itertools
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Annotated, Any, NamedTuple, TypeVar

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from nvmeio._checks import parse_size as parse_size
from nvmeio.errors import BackendUnavailableError, NvmeioError
from nvmeio.errors import binary_size as binary_size
from nvmeio.errors import counted as counted

OK = 0
FAILED = 1  # the work was begun and did not succeed: an I/O error, other bytes than expected
USAGE = 2  # the request makes no sense, or does not fit here
UNAVAILABLE = 3  # not installed, or missing: an engine, a GPU, a right
INTERRUPTED = 128 + signal.SIGINT

GB = 1e9
Number = TypeVar("Number", int, float)

_SECONDS = {"ms": 1e-3, "s": 1.0, "": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|min|h)?", re.IGNORECASE)


def printable(text: str) -> str:
    """A text that does nothing to the terminal: control characters as their escapes.

    Names come out of files, and files from anywhere.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def parse_duration(text: str) -> float:
    """Seconds from "60s", "90", "2m" or "1h"; ValueError if it is none, or not positive."""
    found = _DURATION.fullmatch(text.strip())
    if not found:
        raise ValueError(f"{text!r} is not a time: write seconds, or a number with s, m or h")
    seconds = float(found[1]) * _SECONDS[(found[2] or "").lower()]
    if seconds <= 0:
        raise ValueError(f"{text!r} is not a positive duration: write 10 or 2m")
    return seconds


class OptionGroup:
    """Makes the options of a command that its help shows together, below a title if it has one."""

    def __init__(self, title: str | None = None) -> None:
        self._title = title

    def value(self, help: str, metavar: str | None = None, *names: str, **more: Any) -> Any:
        """An option with a value; its name is the parameter's unless there are others."""
        more |= {"metavar": metavar, "rich_help_panel": self._title}
        return typer.Option(*names, help=help, **more)

    def flag(self, help: str, *names: str) -> Any:
        """An option without a value."""
        return typer.Option(*names, help=help, rich_help_panel=self._title)

    def size(self, help: str, default: str | bool = True) -> Any:
        """A number of bytes, as `parse_size` reads it."""
        return self.value(help, "SIZE", parser=_parser(parse_size), show_default=default)

    def duration(self, help: str, default: str) -> Any:
        """Seconds, as `parse_duration` reads them."""
        return self.value(help, "TIME", parser=_parser(parse_duration), show_default=default)


def _parser(parse: Callable[[str], Number]) -> Callable[[str | Number], Number]:
    def parsed(value: str | Number) -> Number:
        if not isinstance(value, str):
            return value  # a default comes as the number that it is
        try:
            return parse(value)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error

    return parsed


JsonOption = Annotated[
    bool, typer.Option("--json", help="One JSON object on stdout, for programs.")
]


_LEAST_NAME = 16  # what the first column keeps, which may be folded
_BETWEEN = 2


class Column(NamedTuple):
    """A column after the first one.

    The highest `rank` goes first where there is little room; `right` puts figures at the right.
    """

    heading: str
    rank: int
    right: bool = True


class Row(NamedTuple):
    """A row: its name, its cells by heading, its style."""

    name: str
    cells: dict[str, str]
    style: str | None = None


def fitted(name: str, columns: Sequence[Column], rows: Sequence[Row], width: int) -> Table:
    """A table no wider than `width`, as far as that can be had without cutting a cell.

    `name` heads the first column, which stays, and is folded if it must be. Columns that no row has
    a cell for are left out. Cells are text, in which brackets are not markup.
    """
    widths = {
        column: max(len(column.heading), *(len(row.cells[column.heading]) for row in rows))
        for column in columns
        if any(column.heading in row.cells for row in rows)
    }
    shown = list(widths)
    longest = max((len(row.name) for row in rows), default=0)
    least = max(len(name), min(longest, _LEAST_NAME))
    while shown and least + sum(_BETWEEN + widths[column] for column in shown) > width:
        shown.remove(max(shown, key=lambda column: column.rank))
    table = Table(box=None, pad_edge=False, padding=(0, _BETWEEN, 0, 0))
    table.add_column(name, overflow="fold")
    for column in shown:
        table.add_column(column.heading, justify="right" if column.right else "left", no_wrap=True)
    for row in rows:
        cells = [Text(row.cells[column.heading]) for column in shown]
        table.add_row(Text(row.name), *cells, style=row.style)
    return table


def stdout() -> Console:
    """For results: as wide as the terminal; in a pipe no line is broken, for grep."""
    console = Console(emoji=False)
    if not console.is_terminal:
        console.width = 1000
    return console


@contextmanager
def trimmed(console: Console, width_in_a_pipe: int = 0) -> Iterator[None]:
    """Print without the blanks at the ends of lines with which tables pad their cells."""
    if width_in_a_pipe and not console.is_terminal:
        console.width = width_in_a_pipe
    with console.capture() as shown:
        yield
    console.file.write("".join(f"{line.rstrip()}\n" for line in shown.get().splitlines()))


def say(console: Console, text: str, style: str = "") -> None:
    """A text in which brackets are not markup, and which the terminal alone breaks."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def progress_bar(
    console: Console, *columns: ProgressColumn, **task: Any
) -> Iterator[Callable[..., object]]:
    """A bar while the body runs, where somebody looks at it.

    `columns` are beside description and bar, `task` is for rich's `Progress.add_task`. Yields a
    function that takes what changed, as `Progress.update`.
    """
    if not console.is_terminal:
        yield lambda **changed: None
        return
    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        *columns,
        console=console,
        transient=True,
        refresh_per_second=4,  # each takes the GIL for a millisecond during the measurement
    ) as progress:
        yield partial(progress.update, progress.add_task(**task))


@contextmanager
def verifying_bar(console: Console, total: Callable[[], int]) -> Iterator[Callable[[int], None]]:
    """A bar over bytes that are verified; yields a function to call with those that were read.

    `total` is asked on a terminal only; elsewhere nothing is shown.
    """
    if not console.is_terminal:
        yield lambda nbytes: None
        return
    from nvmeio.progress import rich_bar

    nbytes, done = total(), 0
    with rich_bar(console, transient=True) as bar:

        def advance(more: int) -> None:
            nonlocal done
            done += more
            bar("verifying", done, nbytes)

        yield advance


@contextmanager
def steps(console: Console, total: int) -> Iterator[Callable[[str], None]]:
    """A bar over equal steps; yields a function to call before each, with its description."""
    columns = TaskProgressColumn(), TimeRemainingColumn(compact=True)
    with progress_bar(console, *columns, description="starting", total=total) as update:
        begun = itertools.count()

        def step(what: str) -> None:
            update(completed=next(begun), description=what.ljust(24))

        yield step


@contextmanager
def budget(console: Console, seconds: float) -> Iterator[Callable[[float, str], None]]:
    """A bar over a span of time.

    Yields a function to call with the seconds that have passed and what is being done.
    """
    left = TextColumn("{task.fields[left]}")
    with progress_bar(console, left, description="starting", total=seconds, left="") as update:

        def tell(passed: float, what: str) -> None:
            passed = min(passed, seconds)
            left = f"{seconds - passed:.0f} s left"
            update(completed=passed, description=what.ljust(40), left=left)

        yield tell


class Refused(Exception):
    """The request does not fit here: too little space or memory."""


class Failed(Exception):
    """The work was begun and did not succeed."""


class _Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP: cleaned up after as Ctrl-C is."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


@contextmanager
def exit_statuses(errors: Console, left: str = "no files are left") -> Iterator[None]:
    """Turn failures of the body into one message on `errors` and an exit status.

    `left` is what an interrupt leaves behind.

    SIGTERM and SIGHUP are taken as Ctrl-C meanwhile, so that whatever the body made is removed.
    """
    before = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGHUP)}
    try:
        for signum in before:
            signal.signal(signum, _terminate)
        yield
    except Refused as refused:
        say(errors, f"refused: {refused}", "red")
        raise typer.Exit(USAGE) from refused
    except BackendUnavailableError as missing:
        say(errors, f"not available: {missing}", "red")
        raise typer.Exit(UNAVAILABLE) from missing
    except (Failed, NvmeioError, OSError, MemoryError) as failed:
        say(errors, f"failed: {failed}", "red")
        raise typer.Exit(FAILED) from failed
    except BaseException as failed:
        status = status_of_interrupt(failed)
        if status is None:
            raise
        how = "interrupted" if status == INTERRUPTED else "terminated"
        say(errors, f"{how}; {left}", "yellow")
        raise typer.Exit(status) from failed
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def status_of_interrupt(failed: BaseException) -> int | None:
    """The exit status of the interrupt that caused an error; None if none did.

    Before Python 3.12 one that comes in a ``__set_name__``, while a class is being made, is raised
    as RuntimeError: pydantic has such classes, and typer imports it when a command is called.
    """
    error: BaseException | None = failed
    while error is not None:
        if isinstance(error, _Terminated):
            return 128 + error.signum
        if isinstance(error, KeyboardInterrupt):
            return INTERRUPTED
        error = error.__cause__
    return None


def _terminate(signum: int, frame: FrameType | None) -> None:
    raise _Terminated(signum)

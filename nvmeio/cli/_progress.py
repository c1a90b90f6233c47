"""A progress bar on stderr, where somebody looks at it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

# Each refresh takes the GIL for a millisecond or so beside what is being measured.
_REFRESHES_PER_SECOND = 4


@contextmanager
def steps(console: Console, total: int) -> Iterator[Callable[[str], None]]:
    """A bar over equal steps.

    Yields:
        What to call before each step, with what it is.
    """
    if not console.is_terminal:
        yield lambda what: None
        return
    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(compact=True),
        console=console,
        transient=True,
        refresh_per_second=_REFRESHES_PER_SECOND,
    ) as progress:
        bar = progress.add_task("starting", total=total)
        begun = 0

        def step(what: str) -> None:
            nonlocal begun
            progress.update(bar, completed=begun, description=what.ljust(24))
            begun += 1

        yield step


@contextmanager
def budget(console: Console, seconds: float) -> Iterator[Callable[[float, str], None]]:
    """A bar over a span of time.

    Yields:
        What to call with the seconds that have passed and what is being done.
    """
    if not console.is_terminal:
        yield lambda passed, what: None
        return
    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[left]}"),
        console=console,
        transient=True,
        refresh_per_second=_REFRESHES_PER_SECOND,
    ) as progress:
        bar = progress.add_task("starting", total=seconds, left="")

        def tell(passed: float, what: str) -> None:
            left = max(0.0, seconds - passed)
            progress.update(
                bar,
                completed=min(passed, seconds),
                description=what.ljust(40),
                left=Text(f"{left:.0f} s left"),
            )

        yield tell

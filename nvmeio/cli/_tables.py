"""Tables that fit the terminal: with little room fewer columns, and those whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rich.table import Table
from rich.text import Text

_LEAST_NAME = 16  # what the first column keeps, which may be folded
_BETWEEN = 2


class Column(NamedTuple):
    """A column after the first one.

    Attributes:
        heading: Its name.
        rank: The highest goes first where there is little room.
        right: Figures stand at the right.
    """

    heading: str
    rank: int
    right: bool = True


class Row(NamedTuple):
    """What names it, its cells by heading, and how it is shown."""

    name: str
    cells: dict[str, str]
    style: str | None = None


def fitted(name: str, columns: Sequence[Column], rows: Sequence[Row], width: int) -> Table:
    """A table no wider than `width`, as far as that can be had without cutting a cell.

    Args:
        name: Heading of the first column, which stays, and is folded if it must be.
        columns: The others; those that no row has a cell for are left out.
        rows: Their cells are text, in which brackets are no markup.
        width: Of the terminal.
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

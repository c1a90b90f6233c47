"""The result for people, and for programs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from _lines import Line, Target
from _measure import median
from _session import Skipped
from rich.console import Console
from rich.table import Table
from rich.text import Text

MET = {True: Text("yes", "green"), False: Text("no", "bold red"), None: Text("-", "dim")}


def show(
    console: Console,
    lines: Sequence[Line],
    skipped: Iterable[Skipped],
    facts: Mapping[str, Mapping[str, str]],
    conditions: Sequence[str],
) -> None:
    for title, values in facts.items():
        text = ", ".join(f"{key} {value}" for key, value in values.items())
        console.print(f"[bold]{title}[/] {text}", highlight=False)
    for condition in conditions:
        console.print(condition, highlight=False, markup=False)
    console.print(_table(lines))
    for skip in skipped:
        remedy = f" - install: {skip.install}" if skip.install else ""
        console.print(f"skipped {skip.name}: {skip.reason}{remedy}", style="yellow", markup=False)
    promised = [line for line in lines if line.target is not None]
    measured = [line for line in promised if line.met is not None]
    met = sum(1 for line in measured if line.met)
    console.print(f"{met} of {len(measured)} measured targets met, {len(promised)} promised")


def as_json(
    lines: Sequence[Line],
    skipped: Iterable[Skipped],
    facts: Mapping[str, Mapping[str, str]],
    conditions: Sequence[str],
    options: Mapping[str, Any],
) -> dict[str, Any]:
    return {
        **facts,
        "options": dict(options),
        "conditions": list(conditions),
        "lines": [line.as_json() for line in lines],
        "skipped": [vars(skip) for skip in skipped],
    }


def _table(lines: Sequence[Line]) -> Table:
    table = Table(caption="medians; ratio = nvmeio / peer; disk = bytes the device moved per byte")
    for header in ("work", "peer"):
        table.add_column(header, overflow="fold")
    for header in ("nvmeio", "peer", "ratio", "target", "met", "disk, both"):
        table.add_column(header, justify="right", no_wrap=True)
    row = work = ""
    for line in lines:
        if row and line.row != row:
            table.add_section()
        table.add_row(
            "" if line.work == work else line.work,
            f"{line.peer}\n[dim]{line.note}[/]" if line.note else line.peer,
            _number(median(line.nvmeio), line.unit),
            _number(median(line.theirs), line.unit),
            _number(line.ratio),
            _target(line.target, line.unit),
            MET[line.met],
            f"{_number(line.nvmeio_disk)} {_number(line.theirs_disk)}",
        )
        row, work = line.row, line.work
    return table


def _target(target: Target | None, unit: str) -> str:
    if target is None:
        return "-"
    sign = "≥" if target.sense == "at least" else "≤"
    return f"{sign} {target.limit:g} {'×' if target.of == 'ratio' else unit}"


def _number(value: float | None, unit: str = "") -> str:
    if value is None:
        return "-"
    digits = 1 if abs(value) >= 100 else 3 if abs(value) < 0.1 else 2
    return f"{value:.{digits}f} {unit}".strip()

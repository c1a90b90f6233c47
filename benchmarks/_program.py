"""A benchmark's command line and its one run: options, checks, rows, table, JSON."""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from _figure_tables import current_commit
from _lines import Line
from _machine import machine, versions
from _session import Session, Skipped
from _table import as_json, show
from rich.console import Console

from nvmeio.cli.measure import parse_size
from nvmeio.cli.measure.disk import scratch
from nvmeio.files import probe_direct

SPARE_BYTES = 1 << 29
PIPED_WIDTH = 132


@dataclass(frozen=True)
class Row:
    """A part of the table, by the key that `--only` takes.

    Attributes:
        title: What is measured.
        measure: Measures this row, and others that come from the same runs; their lines.
        bytes_needed: What its files take at most, of (size, quick).
    """

    title: str
    measure: Callable[[Session], list[Line]]
    bytes_needed: Callable[[int, bool], int]


@dataclass(frozen=True)
class Program:
    """A benchmark.

    Attributes:
        description: For `--help`.
        rows: Its rows, in the table's order.
        conditions: What a reader of the figures must know.
        size: Bytes of the large object, as promised.
        quick_size: The same with `--quick`.
        repeats: Per contender, as promised.
    """

    description: str
    rows: Mapping[str, Row]
    conditions: Sequence[str]
    size: int = 1 << 30
    quick_size: int = 1 << 28
    repeats: int = 5
    quick_repeats: int = 3

    def run(self, arguments: Sequence[str]) -> int:
        """Do as the command line says; the exit status."""
        options = self._parse(arguments)
        progress = Console(stderr=True)
        signal.signal(signal.SIGTERM, _interrupt)
        # A shell has what it starts in the background ignore it, and `figures.py` sends it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        size = options.size or (self.quick_size if options.quick else self.size)
        repeats = options.repeats or (self.quick_repeats if options.quick else self.repeats)
        self._check_space(options.dir, options.only, size, options.quick)
        interrupted = False
        lines: list[Line] = []
        facts: dict[str, dict[str, str]] = {}
        skipped: dict[str, Skipped] = {}
        if not probe_direct(options.dir).supported:
            sys.exit(f"{options.dir} does not take O_DIRECT; name a directory on a drive: --dir")
        conditions = [
            *self.conditions,
            f"{size} bytes, {repeats} interleaved repeats, {options.dir}",
        ]
        if options.quick or repeats < self.repeats or size != self.size:
            conditions.append("Not the promised size and repeats: the verdicts are only a hint.")
        chosen = {"size": size, "repeats": repeats, "only": options.only, "quick": options.quick}

        def report() -> str:
            wanted = [line for line in lines if line.row in options.only]
            return _one_line_each(as_json(wanted, skipped.values(), facts, conditions, chosen))

        def keep() -> None:
            """After each row: an interrupted one may take long to end."""
            if options.json and options.json != "-":
                Path(options.json).write_text(report())

        try:
            with scratch([options.dir], "compare") as made:
                facts = {
                    "measured": {"commit": current_commit(), "date": date.today().isoformat()},
                    "machine": machine(options.dir),
                    "versions": versions(),
                }
                session = Session(made[options.dir], size, repeats, options.quick, progress)
                skipped = session.skipped
                with contextlib.closing(session):
                    self._measure(session, options.only, lines, keep)
        except KeyboardInterrupt:
            interrupted = True
        if interrupted:
            progress.print("interrupted; files removed", style="yellow")
            if not lines:
                return 130
        lines = [line for line in lines if line.row in options.only]
        # With JSON on stdout the table moves aside.
        show(
            progress if options.json == "-" else _results(),
            lines,
            skipped.values(),
            facts,
            conditions,
        )
        keep()
        if options.json == "-":
            sys.stdout.write(report())
        if interrupted:
            return 130
        return int(any(peer.failed for peer in skipped.values()))

    def _measure(
        self, session: Session, only: list[str], lines: list[Line], keep: Callable[[], None]
    ) -> None:
        """Each measuring function once, however many of its rows are wanted."""
        done: list[Any] = []
        for key in only:
            row = self.rows[key]
            if row.measure in done:
                continue
            done.append(row.measure)
            session.console.rule(row.title, style="dim")
            lines += row.measure(session)
            lines.sort(key=lambda line: list(self.rows).index(line.row))
            keep()

    def _check_space(self, directory: Path, only: list[str], size: int, quick: bool) -> None:
        needed = max(self.rows[key].bytes_needed(size, quick) for key in only) + SPARE_BYTES
        free = shutil.disk_usage(directory).free
        if free < needed:
            gib = 1 << 30
            sys.exit(
                f"{directory} has {free / gib:.1f} GiB free, {needed / gib:.1f} GiB are needed: "
                "name another --dir, a smaller --size, or fewer rows with --only"
            )

    def _parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        parser = argparse.ArgumentParser(
            description=self.description, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        size, quick = _short(self.size), _short(self.quick_size)
        parser.add_argument("--dir", type=_directory, default=Path.cwd(), help="where the files go")
        parser.add_argument("--size", type=_bytes, help=f"in bytes ({size}; {quick} with --quick)")
        parser.add_argument(
            "--repeats",
            type=int,
            help=f"per contender ({self.repeats}; {self.quick_repeats} with --quick)",
        )
        parser.add_argument(
            "--only", type=self._rows, default=list(self.rows), help=", ".join(self.rows)
        )
        parser.add_argument(
            "--json",
            metavar="FILE",
            nargs="?",
            const="-",
            help="also write JSON there, or to stdout",
        )
        parser.add_argument("--quick", action="store_true", help="smaller: does it work")
        return parser.parse_args(arguments)

    def _rows(self, text: str) -> list[str]:
        asked = [part.strip() for part in text.split(",") if part.strip()]
        unknown = sorted(set(asked) - set(self.rows))
        if unknown or not asked:
            raise argparse.ArgumentTypeError(
                f"rows are {', '.join(self.rows)}, not {', '.join(unknown)}"
            )
        return [key for key in self.rows if key in asked]


def _one_line_each(report: Mapping[str, Any]) -> str:
    """JSON with a line for each fact and each line of the table: small, and readable in a diff."""
    parts = []
    for key, value in report.items():
        if isinstance(value, list) and value:
            shown = (
                "[\n  " + ",\n  ".join(json.dumps(v, ensure_ascii=False) for v in value) + "\n ]"
            )
        else:
            shown = json.dumps(value, ensure_ascii=False)
        parts.append(f" {json.dumps(key)}: {shown}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _results() -> Console:
    """Stdout, wide enough for the table where nobody says how wide it is."""
    console = Console()
    return console if console.is_terminal else Console(width=PIPED_WIDTH)


def _short(nbytes: int) -> str:
    """A size as `_bytes` reads it."""
    return f"{nbytes >> 30}G" if nbytes % (1 << 30) == 0 else f"{nbytes >> 20}M"


def _bytes(text: str) -> int:
    try:
        value = parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if value % (1 << 24):
        raise argparse.ArgumentTypeError("a positive multiple of 16M is needed")
    return value


def _directory(text: str) -> Path:
    path = Path(text).absolute()  # peers run in directories of their own
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"no such directory: {text}")
    return path


def _interrupt(signum: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt

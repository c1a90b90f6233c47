"""nvmeio against its peers, as one table: what was promised, what was measured here.

    python benchmarks/compare_peers.py --dir /mnt/nvme --json result.json
    python benchmarks/compare_peers.py --only sequential,random --repeats 7
    python benchmarks/compare_peers.py --quick

Peers run in processes of their own and take turns within one run, starting with another one each
time; figures are medians. A peer that is missing is skipped by name, with the command that
installs it. Reads and writes are O_DIRECT except caio's, whose file is dropped from the page
cache before each run; nothing else is dropped, and nobody calls fsync within the timing. As root,
the run reserves some huge pages for fio and gives them back.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

try:
    from rich.console import Console
except ImportError:
    sys.exit("compare_peers needs rich: pip install rich")

from _files import supports_direct
from _lines import Line
from _machine import machine, versions
from _session import Session
from _table import as_json, show
from rows import ROWS

QUICK_SIZE = 1 << 28
QUICK_REPEATS = 3
SPARE_BYTES = 1 << 29
PIPED_WIDTH = 132
SUFFIXES = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
CONDITIONS = (
    "O_DIRECT reads and writes: the page cache has no part in them, nothing is dropped beforehand "
    "(caio reads through the page cache, cold), and what the host or the drive caches is warm.",
    "No fsync within any timing; overwrites hit blocks written before; every file was written "
    "whole by this program first, and all contenders use the same one.",
)


def main() -> int:
    options = _parse(sys.argv[1:])
    progress = Console(stderr=True)
    signal.signal(signal.SIGTERM, _interrupt)
    size = options.size or (QUICK_SIZE if options.quick else 1 << 30)
    repeats = options.repeats or (QUICK_REPEATS if options.quick else 5)
    _check_space(options.dir, options.only, size, options.quick)
    directory = Path(tempfile.mkdtemp(prefix="nvmeio-compare-", dir=options.dir))
    session = Session(directory, size, repeats, options.quick, progress)
    interrupted = False
    lines: list[Line] = []
    facts: dict[str, dict[str, str]] = {}
    try:
        if not supports_direct(directory):
            sys.exit(f"{options.dir} does not take O_DIRECT; name a directory on a drive: --dir")
        facts = {
            "machine": machine(directory, session.disk.name),
            "versions": versions(),
        }
        _measure(session, options.only, lines)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        try:
            session.close()
        finally:
            shutil.rmtree(directory, ignore_errors=True)
    if interrupted:
        progress.print("interrupted; files removed", style="yellow")
        if not lines:
            return 130
    lines = [line for line in lines if line.row in options.only]
    conditions = [*CONDITIONS, f"{size} bytes, {repeats} interleaved repeats, {options.dir}"]
    if options.quick or repeats < 5 or size != 1 << 30:
        conditions.append("Not the promised size and repeats: the verdicts are only a hint.")
    # With JSON on stdout the table moves aside.
    show(
        progress if options.json == "-" else _results(),
        lines,
        session.skipped.values(),
        facts,
        conditions,
    )
    if options.json:
        chosen = {"size": size, "repeats": repeats, "only": options.only, "quick": options.quick}
        report = as_json(lines, session.skipped.values(), facts, conditions, chosen)
        text = json.dumps(report, indent=1, ensure_ascii=False) + "\n"
        if options.json == "-":
            sys.stdout.write(text)
        else:
            Path(options.json).write_text(text)
    return 130 if interrupted else 0


def _results() -> Console:
    """Stdout, wide enough for the table where nobody says how wide it is."""
    console = Console()
    return console if console.is_terminal else Console(width=PIPED_WIDTH)


def _measure(session: Session, only: list[str], lines: list[Line]) -> None:
    """Each measuring function once, in the table's order, however many of its rows are wanted."""
    done: list[Any] = []
    for key in only:
        measure = ROWS[key].measure
        if measure in done:
            continue
        done.append(measure)
        session.console.rule(ROWS[key].title, style="dim")
        lines += measure(session)
    lines.sort(key=lambda line: list(ROWS).index(line.row))


def _check_space(directory: Path, only: list[str], size: int, quick: bool) -> None:
    needed = max(ROWS[key].bytes_needed(size, quick) for key in only) + SPARE_BYTES
    free = shutil.disk_usage(directory).free
    if free < needed:
        gib = 1 << 30
        sys.exit(
            f"{directory} has {free / gib:.1f} GiB free, {needed / gib:.1f} GiB are needed: "
            "name another --dir, a smaller --size, or fewer rows with --only"
        )


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", type=_directory, default=Path("."), help="where the files go")
    parser.add_argument("--size", type=_bytes, help="of the large file (1G; 256M with --quick)")
    parser.add_argument("--repeats", type=int, help="per contender (5; 3 with --quick)")
    parser.add_argument("--only", type=_rows, default=list(ROWS), help=", ".join(ROWS))
    parser.add_argument(
        "--json", metavar="FILE", nargs="?", const="-", help="also write JSON there, or to stdout"
    )
    parser.add_argument("--quick", action="store_true", help="smaller and fewer: is it working")
    return parser.parse_args(arguments)


def _bytes(text: str) -> int:
    number = text.upper().removesuffix("IB").removesuffix("B")
    factor = SUFFIXES.get(number[-1:], 1)
    try:
        value = int(number[:-1] if factor > 1 else number) * factor
    except ValueError:
        raise argparse.ArgumentTypeError(f"not a size: {text!r}") from None
    if value <= 0 or value % (1 << 24):
        raise argparse.ArgumentTypeError("a positive multiple of 16M is needed")
    return value


def _rows(text: str) -> list[str]:
    asked = [part.strip() for part in text.split(",") if part.strip()]
    unknown = sorted(set(asked) - set(ROWS))
    if unknown or not asked:
        raise argparse.ArgumentTypeError(f"rows are {', '.join(ROWS)}, not {', '.join(unknown)}")
    return [key for key in ROWS if key in asked]


def _directory(text: str) -> Path:
    path = Path(text)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"no such directory: {text}")
    return path


def _interrupt(signum: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())

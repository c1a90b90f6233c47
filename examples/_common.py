"""What the examples share: a scratch folder that is always removed, the loop, a few figures."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import math
import shutil
import signal
import sys
import tempfile
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

import nvmeio

console = Console(highlight=False)


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """A parser with the example's docstring as its help, and --dir."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--dir", type=Path, default=Path.cwd(), help="a folder on the drive to use (default: here)"
    )
    return parser


def nbytes(text: str) -> int:
    """64K, 512M, 2G (powers of 1024) or a plain number, as bytes."""
    factor = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}.get(text[-1:].upper(), 0)
    try:
        return int(float(text[:-1]) * factor) if factor else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size such as 64K, 512M or 2G"
        ) from None


def require(package: str) -> None:
    """End the example, with what to do, where a package that it needs is not installed."""
    if importlib.util.find_spec(package) is None:
        raise SystemExit(f"this example needs {package}: pip install {package}")


@contextmanager
def scratch(parent: Path, needed_bytes: int, keep: bool = False) -> Iterator[Path]:
    """A new folder in `parent`, removed at the end: also after an error, Ctrl-C or SIGTERM."""
    if not parent.is_dir():
        raise SystemExit(f"{parent} is not a folder: name one with --dir")
    free_bytes = shutil.disk_usage(parent).free
    if free_bytes < needed_bytes:
        raise SystemExit(
            f"{parent} has {free_bytes / 1e9:.1f} GB free and this needs {needed_bytes / 1e9:.1f}: "
            "name another folder with --dir, or ask for less (see --help)"
        )
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as it is in a shell's background
        # As Ctrl-C, for which asyncio cancels the main task: no coroutine ends before it began.
        signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    else:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if keep:
            yield Path(tempfile.mkdtemp(prefix="nvmeio-demo-", dir=parent))
            return
        with tempfile.TemporaryDirectory(prefix="nvmeio-demo-", dir=parent) as folder:
            yield Path(folder)
    except KeyboardInterrupt:
        left = f"the files are in {parent}" if keep else "the files are removed"
        print(f"Interrupted; {left}.", file=sys.stderr)
        raise SystemExit(130) from None


def run(main: Coroutine[Any, Any, Any]) -> Any:
    """`asyncio.run`, on uvloop where that is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)


def say(label: str, text: str) -> None:
    """A line with a label, wrapped to the terminal."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold cyan", width=12)
    grid.add_column()
    grid.add_row(label, Text(text))
    console.print(grid)


def verify(holds: bool, what: str) -> None:
    """Unlike `assert`, checked under `python -O` too."""
    if not holds:
        raise SystemExit(f"NOT VERIFIED: {what}")


def verified(text: str) -> None:
    """The last line of each example."""
    console.print()
    say("[green]Verified[/]", text)


def direct_alignment(folder: Path) -> int:
    """The unit of direct I/O in a folder, in bytes; 0 where there is none."""
    probe = folder / "probe"
    with nvmeio.open(probe, "w") as file:
        alignment = file.alignment
    probe.unlink()
    return alignment


def ways(stats: nvmeio.Counters) -> str:
    """Which way the bytes went: between drive and tensor, through bounce blocks, the page cache."""
    parts = {
        "direct": stats.direct_bytes,
        "bounced": stats.bounced_bytes,
        "buffered": stats.buffered_bytes,
    }
    total = sum(parts.values()) or 1
    return ", ".join(f"{_percent(n / total)} {way}" for way, n in parts.items() if n)


def busy_s(spans: Sequence[tuple[float, float]]) -> float:
    """Seconds that at least one of the (from, to) spans covers."""
    covered_s, until = 0.0, -math.inf
    for start, stop in sorted(spans):
        covered_s += max(0.0, stop - max(start, until))
        until = max(until, stop)
    return covered_s


def _percent(share: float) -> str:
    if share < 0.0001:
        return "< 0.01 %"
    if 0.9999 < share < 1:
        return "> 99.99 %"
    return f"{100 * share:.4g} %"

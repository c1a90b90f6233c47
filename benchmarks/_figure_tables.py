"""Tables of README and docs, made of what benchmarks/measured/*.json says, between their markers.

A page has ``<!-- figures: NAME -->`` and ``<!-- /figures -->``; what stands between them is written
here. One direction everywhere: a ratio says how many times as fast nvmeio was as the peer, or as
sparing with time or memory. More is better.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MEASURED = ROOT / "benchmarks" / "measured"

LESS_IS_BETTER = {"s", "ms", "us", "s/GiB", "MiB", "GB", "bytes", "GB of memory"}
NOT_MEASURED = "not measured"

Report = Mapping[str, Any]
Reports = Mapping[str, Report]

_BLOCK = re.compile(r"(<!-- figures: ([a-z-]+) -->\n).*?(<!-- /figures -->)", re.DOTALL)


@dataclass(frozen=True)
class Pick:
    """A line of a table that takes its lines from several benchmarks.

    Attributes:
        what: What was done, in the table's words.
        report: The benchmark's JSON, by its name.
        row: The row's key there.
        work: How the line's work begins.
        peer: A regular expression that finds the peer; the fastest of several that fit is taken.
        beside: The peer in the table's words.
    """

    what: str
    report: str
    row: str
    work: str
    peer: str
    beside: str


# The table on README's first screen: what, report and row, work, peer, the peer in other words.
_HEADLINE = """
save 2 GB, durable | checkpoint save | save | ^torch.save | torch.save and fsync
load 2 GB, cold | checkpoint load | nvmeio.load, cold | ^torch.load$ | torch.load
tokens of a Llama, 1/8 of it in memory | inference accelerate | tokens/s, 1 | cold | accelerate
AdamW steps, bf16, state on the drive | offload deepspeed | AdamW | DeepSpeed | DeepSpeed ZeRO-3
read a `torch.empty` tensor | transfers unpinned | read | DeepSpeed | DeepSpeed `aio_handle`
overwrite a file from one | transfers unpinned | overwrite | DeepSpeed | DeepSpeed `aio_handle`
"""


def _picks(text: str) -> list[Pick]:
    lines = [[cell.strip() for cell in line.split("|")] for line in text.strip().splitlines()]
    return [Pick(what, *row.split(), *others) for what, row, *others in lines]


def read_reports(folder: Path = MEASURED) -> dict[str, Report]:
    """What was measured, by the names of the files."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def ratio(line: Mapping[str, Any]) -> float | None:
    """How many times as fast as the peer, or as sparing; None where one of both has no figure."""
    if not line["ratio"] or not line["peer_figure"]["samples"]:
        return None
    value = float(line["ratio"])
    return 1 / value if line["unit"] in LESS_IS_BETTER else value


def written_into(text: str, reports: Reports) -> str:
    """A page with its tables made anew.

    Raises:
        ValueError: A marker names no table, or has no end.
    """
    if text.count("<!-- figures:") != len(_BLOCK.findall(text)):
        raise ValueError("a figures marker is misspelt or has no <!-- /figures -->")
    return _BLOCK.sub(lambda m: f"{m[1]}\n{table(m[2], reports)}\n\n{m[3]}", text)


def pages(root: Path = ROOT) -> list[Path]:
    """The pages that have markers."""
    found = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    return [page for page in found if "<!-- figures:" in page.read_text()]


def table(name: str, reports: Reports) -> str:
    """The table of that name: of one benchmark, of some rows of it (``NAME-ROW``), or a choice.

    Raises:
        ValueError: There is none.
    """
    if name == "headline":
        return _chosen(_picks(_HEADLINE), reports)
    if name == "demo":
        return _demo(reports.get(name))
    report, _, row = name.partition("-")
    if report not in COMMANDS:
        raise ValueError(f"no figures are called {name!r}")
    if report not in reports:
        return f"*Not measured yet: `make figures FIGURES={report}`.*"
    lines = [each for each in reports[report]["lines"] if row in ("", each["row"])]
    rows = [_row(line["work"], line["peer"], line) for line in lines]
    return _markdown(_without_repeats(rows)) + "\n\n" + origin(reports[report], report)


# What makes each; in the order in which `make figures` runs them.
COMMANDS = ("transfers", "small", "checkpoint", "inference", "offload")


def origin(report: Report, name: str) -> str:
    """Where, when and with what a table was measured, and who was not there."""
    machine, measured = report["machine"], report.get("measured", {})
    date, commit = measured.get("date", "a day not written down"), measured.get("commit", "unknown")
    where = f"{machine['cpu']}, {machine['cores']} cores, {machine['memory']}"
    drive = f"{machine['file system']}, {machine['device'].split(' ', 1)[0]}"
    repeats = report["options"]["repeats"]
    texts = [
        f"Measured on {date} at commit {commit}: {where}, {drive}; medians of {repeats} by turns, "
        f"other programs took {machine['busy before the run'].split(' ', 1)[0]} of the cores. "
        f"Again: `make figures FIGURES={name}`."
    ]
    texts += [f"{skip['name']}: {skip['reason']}." for skip in report["skipped"]]
    return "*" + " ".join(text.replace("*", "").replace("\n", " ") for text in texts) + "*"


def _chosen(picks: Iterable[Pick], reports: Reports) -> str:
    rows, used = [], {}
    for pick in picks:
        report = reports.get(pick.report)
        line = None if report is None else _best(pick, report["lines"])
        if line is None or report is None:
            rows.append((pick.what, pick.beside, NOT_MEASURED, "", ""))
        else:
            used[pick.report] = report
            rows.append(_row(pick.what, pick.beside, line))
    days = sorted({report.get("measured", {}).get("date", "earlier") for report in used.values()})
    machine = next(iter(used.values()))["machine"] if used else None
    where = f"on {machine['cpu']}, {machine['cores']} cores, one drive; " if machine else ""
    note = f"*Measured {where}{' and '.join(days)}; more is better.*" if used else ""
    return _markdown(rows) + (f"\n\n{note}" if note else "")


def _best(pick: Pick, lines: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The line whose peer did best: a claim is made beside nobody slower."""
    fits = [
        line
        for line in lines
        if line["row"] == pick.row
        and line["work"].startswith(pick.work)
        and re.search(pick.peer, line["peer"])
        and line["nvmeio"]["samples"]
    ]
    return min(fits, key=lambda line: ratio(line) or float("inf"), default=None)


def _row(what: str, beside: str, line: Mapping[str, Any]) -> tuple[str, str, str, str, str]:
    ours, theirs = line["nvmeio"]["median"], line["peer_figure"]["median"]
    times = ratio(line)
    return (
        what,
        beside,
        NOT_MEASURED if ours is None else f"{_number(ours)} {line['unit']}",
        NOT_MEASURED if theirs is None else _number(theirs),
        "" if times is None else _number(times),
    )


def _number(value: float) -> str:
    """Three digits that count."""
    size = abs(value)
    if size >= 1e4:
        return f"{value:.3g}" if size >= 1e9 else f"{value:,.0f}"
    return f"{value:.0f}" if size >= 100 else f"{value:.3g}"


def _without_repeats(rows: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """A work that stands in the row above is not said again."""
    before = ["", *(row[0] for row in rows)]
    return [
        ("" if row[0] == above else row[0], *row[1:])
        for above, row in zip(before, rows, strict=False)
    ]


def _markdown(rows: Iterable[Sequence[str]]) -> str:
    head = ("", "beside", "nvmeio", "there", "times as fast")
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in lines
    )


def _demo(report: Report | None) -> str:
    if report is None:
        return "*Not measured yet: `make figures FIGURES=demo`.*"
    measured = report["measured"]
    text = "\n".join(("    " + line).rstrip() for line in report["output"])
    return f"{text}\n\n*Measured on {measured['date']} at commit {measured['commit']}.*"


# Which rows are older than what they measure


def stale(
    name: str, report: Report, code: Mapping[str, Sequence[str]], root: Path = ROOT
) -> list[str]:
    """A sentence for the rows of a report whose code has changed since; none if all are of today's.

    Args:
        name: Of the report.
        report: What was measured.
        code: The files and folders that each row measures, by its key; "" for all others.
        root: The repository.
    """
    commit = report.get("measured", {}).get("commit")
    if commit is None:
        return [f"{name}: does not say of which commit it is"]
    if commit.endswith("+"):
        return [f"{name}: was measured with changes that were not committed ({commit})"]
    keys = list(dict.fromkeys(line["row"] for line in report.get("lines", ()))) or [""]
    changed: dict[str, list[str]] = {}
    for key in keys:
        paths = code.get(key, code.get("", ()))
        newest = _git(root, "log", "-1", "--format=%h %s", f"{commit}..HEAD", "--", *paths)
        if newest is None:
            return [f"{name}: its commit {commit} is not in this clone's history"]
        if newest:
            changed.setdefault(newest, []).append(key)
    return [
        f"{name} ({', '.join(rows) or 'all'}): older than {newest}"
        for newest, rows in changed.items()
    ]


def current_commit(root: Path = ROOT) -> str:
    """The commit that is checked out, with a + where the code differs from it; or "unknown"."""
    commit = _git(root, "rev-parse", "--short=10", "HEAD")
    if not commit:
        return "unknown"
    differs = _git(
        root, "status", "--porcelain", "--untracked-files=no", "--", "nvmeio", "native_shim"
    )
    return commit + ("+" if differs else "")


def _git(root: Path, *arguments: str) -> str | None:
    """What git prints; None where it fails, or is not there."""
    try:
        run = subprocess.run(
            ["git", *arguments], cwd=root, capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return run.stdout.strip() if run.returncode == 0 else None

"""Draws what a benchmark measured: for each line of its JSON, how fast nvmeio was beside the peer.

    make bench-small BENCH_ARGS="--json benchmarks/measured/small.json"
    make plots

draws each file of benchmarks/measured into docs/images/measured-NAME.svg. It needs matplotlib and
the JSON, and nothing of nvmeio.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib
from _figure_tables import LESS_IS_BETTER, MEASURED, ROOT

matplotlib.use("svg")
import matplotlib.pyplot as plt

IMAGES = ROOT / "docs" / "images"


AHEAD, BEHIND, LEVEL = "#0b6bcb", "#b4540a", "#57606a"
LABEL_INCHES, PLOT_INCHES, LINE_INCHES = 3.0, 5.0, 0.23
RANGE = 0.3, 8.0  # what is beyond gets an arrow at the edge; its number says how far
TICKS = 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 8


def advantage(line: dict[str, Any]) -> tuple[float, list[float]] | None:
    """How many times as fast nvmeio was, or as sparing: the medians' ratio, and that of each turn.

    None where one of both has no figures, or is 0: that is nowhere on a logarithmic axis.
    """
    ours, theirs = line["nvmeio"]["samples"], line["peer_figure"]["samples"]
    if not ours or not theirs or not line["ratio"]:
        return None
    less = line["unit"] in LESS_IS_BETTER
    turns = [b / a if less else a / b for a, b in zip(ours, theirs, strict=False) if a and b]
    return (1 / line["ratio"] if less else line["ratio"]), turns


def label(line: dict[str, Any]) -> str:
    """Beside whom; of times also that they are."""
    return f"{line['peer']} ({line['unit']})" if line["unit"] in LESS_IS_BETTER else line["peer"]


def in_order(lines: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The comparisons of each work, works as they first come."""
    works: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        if advantage(line):
            works.setdefault(line["work"], []).append(line)
    return works


def draw(report: dict[str, Any], path: Path) -> None:
    """One figure: a heading for each work, and below it a line of dots for each peer."""
    works = in_order(report["lines"])
    places = len(works) + sum(len(lines) for lines in works.values())
    height = LINE_INCHES * places
    margin = 0.7  # for the axis and what stands below it
    figure = plt.figure(figsize=(LABEL_INCHES + PLOT_INCHES + 0.5, height + margin + 0.1))
    width = figure.get_figwidth()
    whole = figure.get_figheight()
    axes = figure.add_axes(
        (LABEL_INCHES / width, margin / whole, PLOT_INCHES / width, height / whole)
    )
    axes.set_xscale("log")
    axes.set_xlim(*RANGE)
    axes.set_ylim(places - 0.5, -0.5)
    axes.axvline(1, color="#24292f", linewidth=1)
    place = 0
    for work, lines in works.items():
        left = -LABEL_INCHES / PLOT_INCHES
        text = {"xycoords": ("axes fraction", "data"), "va": "center"}
        axes.annotate(
            work, (left, place), fontweight="bold", bbox={"color": "white", "pad": 1}, **text
        )
        for line in lines:
            place += 1
            _dots(axes, place, *(advantage(line) or (1.0, [])))
            axes.annotate(label(line), (-0.02, place), ha="right", **text)
        place += 1
    axes.set_xticks(TICKS, [f"{at:g}" for at in TICKS])
    axes.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
    axes.set_yticks([])
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.set_xlabel("times as fast as the peer, or in as little time; right of 1 nvmeio is ahead")
    machine = report["machine"]
    where = [machine["cpu"], f"{machine['cores']} cores", machine["memory"], machine["file system"]]
    repeats = f"{report['options']['repeats']} repeats in turns: a dot each, a bar for the medians"
    figure.text(0.005, 0.006, f"{', '.join(where)}; {repeats}", color=LEVEL, fontsize=7.5)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Nothing of the day or of the order of a set gets in: the same JSON is the same file.
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _dots(axes: Any, place: int, middle: float, turns: list[float]) -> None:
    colour = AHEAD if middle >= 1.05 else BEHIND if middle <= 0.95 else LEVEL
    low, high = RANGE
    inside = [at for at in turns if low < at < high]
    axes.plot(inside, [place] * len(inside), "o", color=colour, alpha=0.35, markersize=4.5)
    if middle >= high:
        axes.plot([high], [place], ">", color=colour, clip_on=False)
    else:
        axes.plot([middle], [place], "|", color=colour, markersize=12, markeredgewidth=2.5)
    axes.annotate(
        f"{middle:.2f}" if middle < 10 else f"{middle:.0f}",
        (1.02, place),
        xycoords=("axes fraction", "data"),
        va="center",
        color=colour,
        fontweight="bold",
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("report", nargs="*", type=Path, help="JSON; what docs show if none")
    parser.add_argument("--into", type=Path, default=IMAGES, help="a directory for the images")
    options = parser.parse_args()
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "nvmeio", "font.size": 9})
    drawn = sorted(IMAGES.glob("measured-*.svg"))  # those that pages of docs show
    shown = [MEASURED / f"{path.stem.removeprefix('measured-')}.json" for path in drawn]
    for report in options.report or shown:
        path = options.into / f"measured-{report.stem}.svg"
        draw(json.loads(report.read_text()), path)
        print(path)


if __name__ == "__main__":
    main()

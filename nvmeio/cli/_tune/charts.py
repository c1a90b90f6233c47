"""Charts as inline SVG: heat maps, lines, strips of dots, histograms.

Colours are classes of the page's style sheet (`_style.py`), so one drawing serves light and dark.
Steps of a ramp run from 0 (little) to 8 (much), of lines from 0 to 5; `op` chooses the ramp.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import NamedTuple

STEPS = 9
LINE_STEPS = 6


class Cell(NamedTuple):
    """One field of a heat map."""

    value: float
    hint: str
    chosen: bool = False
    default: bool = False


class Line(NamedTuple):
    """A line of a chart: its points by x; `chosen` if the chosen setting lies on it."""

    label: str
    step: int
    points: list[tuple[float, float]]
    chosen: bool = False


class Strip(NamedTuple):
    """A row of dots."""

    label: str
    values: list[float]
    middle: float
    spread: float
    chosen: bool


class Curve(NamedTuple):
    """A histogram's values, in seconds, and its class."""

    label: str
    css: str
    values: list[float]


def step_of(value: float, low: float, high: float) -> int:
    """Where on the ramp a value lies."""
    part = (value - low) / (high - low) if high > low else 1.0
    return max(0, min(STEPS - 1, int(part * STEPS)))


def heat_map(
    op: str,
    rows: Sequence[tuple[int, str]],
    columns: Sequence[tuple[int, str]],
    cell: Callable[[int, int], Cell | None],
    bounds: tuple[float, float],
    axes: tuple[str, str],
) -> str:
    """Fields for every pair of a row's and a column's value; the first row lies at the bottom."""
    left, bottom, width, height = 62.0, 38.0, 52.0, 30.0
    total = left + width * len(columns) + 2, height * len(rows) + bottom + 2
    drawn = []
    for y, (row, name) in enumerate(reversed(rows)):
        top = y * height + 1
        drawn.append(_text(left - 8, top + height / 2 + 4, name, "tick end"))
        for x, (column, _) in enumerate(columns):
            drawn.append(_field(op, cell(row, column), left + x * width, top, bounds))
    under = height * len(rows)
    for x, (_, name) in enumerate(columns):
        drawn.append(_text(left + (x + 0.5) * width, under + 18, name, "tick middle"))
    drawn.append(_text(left + width * len(columns) / 2, under + 35, axes[1], "axis middle"))
    return _svg(*total, drawn, f"{op} throughput by {axes[0]} and {axes[1]}")


def _field(op: str, cell: Cell | None, x: float, y: float, bounds: tuple[float, float]) -> str:
    if cell is None:
        return (
            f'<g data-tip="not measured"><rect class="void" x="{x + 1}" y="{y + 1}" width="50" '
            f'height="28" rx="3"/></g>'
        )
    step = step_of(cell.value, *bounds)
    # A chosen field is smaller, to leave a gap between it and its frame on every colour.
    inset = 4 if cell.chosen else 1
    drawn = [
        f'<rect class="{op}{step}" x="{x + inset}" y="{y + inset}" width="{52 - 2 * inset}" '
        f'height="{30 - 2 * inset}" rx="3"/>',
        f'<text class="value middle on{step}" x="{x + 26}" y="{y + 19}">{cell.value:.2f}</text>',
    ]
    if cell.chosen:
        frame = f'x="{x + 1}" y="{y + 1}" width="50" height="28" rx="5"'
        drawn.append(f'<rect class="frame" {frame}/>')
    if cell.default:
        drawn.append(f'<circle class="on{step}" cx="{x + 43}" cy="{y + 9}" r="2.5"/>')
    hint = escape(cell.hint, quote=True)
    return f'<g class="cell" data-tip="{hint}">{"".join(drawn)}</g>'


def lines(op: str, curves: Sequence[Line], ticks: Sequence[tuple[int, str]], axis: str) -> str:
    """Throughput over a doubling scale; labels at the right ends, moved apart where they meet."""
    width, height, left, right, top, bottom = 460.0, 280.0, 36.0, 84.0, 12.0, 40.0
    xs = [math.log2(value) for value, _ in ticks]
    rates = [rate for curve in curves for _, rate in curve.points]
    # Not from nought: what matters is which line is on top, and they lie close together there.
    scale = nice_ticks(0.92 * min(rates), 1.02 * max(rates))
    names = dict(ticks)

    def at(x: float, y: float) -> tuple[float, float]:
        across = (math.log2(x) - min(xs)) / ((max(xs) - min(xs)) or 1.0)
        up = (y - scale[0]) / (scale[-1] - scale[0])
        return left + across * (width - left - right), top + (1 - up) * (height - top - bottom)

    drawn = _levels(scale, lambda value: at(ticks[0][0], value)[1], left, width - right, "{:g}")
    for value, name in ticks:
        drawn.append(_text(at(value, scale[0])[0], height - bottom + 18, name, "tick middle"))
    drawn.append(_text((left + width - right) / 2, height - 4, axis, "axis middle"))
    ends = []
    for curve in sorted(curves, key=lambda curve: curve.chosen):
        points = [at(x, y) for x, y in curve.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        css = f"{op}line{curve.step}" + (" chosen" if curve.chosen else "")
        drawn.append(f'<polyline class="line {css}" points="{path}"/>')
        for (x, y), (level, rate) in zip(points, curve.points, strict=True):
            hint = escape(f"{curve.label}, {axis} {names[int(level)]}: {rate:.2f} GB/s", quote=True)
            drawn.append(
                f'<g data-tip="{hint}"><circle class="hit" cx="{x:.1f}" cy="{y:.1f}" r="9"/>'
                f'<circle class="dot {op}dot{curve.step}" cx="{x:.1f}" cy="{y:.1f}" r="3"/></g>'
            )
        ends.append((*points[-1], curve))
    for x, y, moved, curve in _apart(ends, 14, top + 4, height - bottom):
        start = width - right + 20
        drawn.append(
            f'<path class="leader {op}line{curve.step}" d="M{x + 5:.1f},{y:.1f} '
            f'L{start - 5},{moved:.1f}"/>'
        )
        css = "label chosen" if curve.chosen else "label"
        drawn.append(_text(start, moved + 4, curve.label, css))
    return _svg(width, height, drawn, f"{op} throughput against {axis}")


def _levels(
    scale: Sequence[float], at: Callable[[float], float], left: float, right: float, form: str
) -> list[str]:
    """Horizontal lines with their numbers."""
    drawn = []
    for value in scale:
        y = at(value)
        line = f'x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"'
        drawn.append(f'<line class="grid" {line}/>')
        drawn.append(_text(left - 8, y + 4, form.format(value), "tick end"))
    return drawn


def _apart(
    ends: Sequence[tuple[float, float, Line]], gap: float, top: float, bottom: float
) -> list[tuple[float, float, float, Line]]:
    """Labels moved no further than it takes that none covers another: x, y, the label's y, line.

    Least squares under the condition that neighbours are `gap` apart, which is isotonic regression
    of the places less what the gaps before them take up.
    """
    order = sorted(ends, key=lambda end: end[1])
    pools: list[list[float]] = []  # mean, size
    for index, (_, y, _) in enumerate(order):
        pools.append([y - index * gap, 1])
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (one, size), (other, more) = pools[-2:]
            pools[-2:] = [[(one * size + other * more) / (size + more), size + more]]
    means = [mean for mean, size in pools for _ in range(int(size))]
    places = [mean + index * gap for index, mean in enumerate(means)]
    shift = max(0.0, top - places[0]) - max(0.0, places[-1] - bottom)
    return [(x, y, at + shift, line) for (x, y, line), at in zip(order, places, strict=True)]


def strips(rows: Sequence[Strip]) -> str:
    """For each row its dots around nought, the median, and how far below it the truth may lie."""
    left, width, line, top, bottom = 300, 860, 34, 10, 40
    height = top + line * len(rows) + bottom
    values = [value for row in rows for value in row.values] or [0.0]
    reach = max(0.02, *(abs(value) for value in values))
    low, high = min(-0.02, *values), max(0.02, *values)
    pad = 0.06 * (high - low)
    low, high = low - pad, high + pad

    def at(value: float) -> float:
        return left + (value - low) / (high - low) * (width - left - 20)

    drawn = []
    for tick in nice_ticks(low, high, 6):
        if not low <= tick <= high:
            continue
        x = at(tick)
        css = "zero" if abs(tick) < 1e-9 else "grid"
        drawn.append(
            f'<line class="{css}" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{height - bottom}"/>'
        )
        drawn.append(
            _text(
                x,
                height - bottom + 18,
                "default" if css == "zero" else f"{tick:+.0%}",
                "tick middle",
            )
        )
    drawn.append(
        _text(at((low + high) / 2), height - 4, "throughput relative to the default", "axis middle")
    )
    digits = 1 if reach < 0.2 else 0
    for index, row in enumerate(rows):
        y = top + line * (index + 0.5)
        css = "strip chosen" if row.chosen else "strip"
        drawn.append(_text(left - 16, y + 4, row.label, f"{css} end"))
        dots = "".join(
            f'<circle class="round{" chosen" if row.chosen else ""}" cx="{at(value):.1f}" '
            f'cy="{y + (number % 3 - 1) * 5:.1f}" r="3.5"/>'
            for number, value in enumerate(row.values)
        )
        span = ""
        if row.values:
            start, end = at(row.middle - row.spread), at(row.middle)
            span = (
                f'<line class="span" x1="{start:.1f}" x2="{end:.1f}" y1="{y}" y2="{y}"/>'
                f'<line class="median" x1="{end:.1f}" x2="{end:.1f}" y1="{y - 11}" y2="{y + 11}"/>'
            )
        hint = (
            f"{row.label}: {row.middle:+.{digits}%} in the median of {len(row.values)} rounds, "
            f"spread {row.spread:.{digits}%}"
        )
        drawn.append(f'<g data-tip="{escape(hint, quote=True)}">{dots}{span}</g>')
    return _svg(width, height, drawn, "The final, round by round")


def histogram(op: str, curves: Sequence[Curve]) -> str:
    """Shares of blocks by latency on a logarithmic scale."""
    width, height, left, right, top, bottom = 460, 220, 44, 28, 12, 40
    everything = sorted(value for curve in curves for value in curve.values)
    low, high = everything[0], everything[-1]
    # The slowest block of thousands would squeeze all others together.
    high = max(everything[int(len(everything) * 0.999)] * 1.15, low * 1.5)
    bins = 44
    step = math.log(high / low) / bins or 1.0
    shares: list[list[float]] = []
    for curve in curves:
        counts = [0] * bins
        for value in curve.values:
            counts[max(0, min(bins - 1, int(math.log(value / low) / step)))] += 1
        shares.append([count / len(curve.values) for count in counts])
    scale = nice_ticks(0.0, max(map(max, shares)), 4)

    def at(seconds: float, share: float) -> tuple[float, float]:
        across = math.log(seconds / low) / math.log(high / low)
        x = left + across * (width - left - right)
        return x, top + (1 - share / scale[-1]) * (height - top - bottom)

    drawn = _levels(scale, lambda share: at(low, share)[1], left, width - right, "{:.0%}")
    for seconds in _log_ticks(low, high):
        x = at(seconds, 0)[0]
        drawn.append(_text(x, height - bottom + 18, duration(seconds), "tick middle"))
    drawn.append(_text((left + width - right) / 2, height - 4, "time of a block", "axis middle"))
    for curve, share in zip(curves, shares, strict=True):
        points = [at(low, 0)]
        for index, part in enumerate(share):
            points.append(at(low * math.exp(step * index), part))
            points.append(at(low * math.exp(step * (index + 1)), part))
        points.append(at(high, 0))
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        middle = statistics.median(curve.values)
        x = at(middle, 0)[0]
        hint = escape(f"{curve.label}: half of the blocks within {duration(middle)}", quote=True)
        drawn.append(
            f'<g data-tip="{hint}"><polygon class="{curve.css}" points="{path}"/>'
            f'<line class="{curve.css} middle-mark" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" '
            f'y2="{height - bottom}"/></g>'
        )
    return _svg(width, height, drawn, f"{op} latency distribution")


# Parts


def nice_ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from at or below `low` to at or above `high`."""
    raw = (high - low) / about or 1.0
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(n * step, 12) for n in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    found = [
        m * 10.0**power
        for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        for m in (1, 2, 5)
        if low <= m * 10.0**power <= high
    ]
    return found if len(found) > 1 else [low, math.sqrt(low * high), high]


def duration(seconds: float) -> str:
    """A latency for people."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size or unit == "µs":
            number = seconds / size
            return (
                f"{number:.0f} {unit}"
                if number >= 9.95 or number % 1 < 0.005
                else f"{number:.1f} {unit}"
            )
    raise AssertionError


def _text(x: float, y: float, content: str, css: str) -> str:
    return f'<text class="{css}" x="{x:.1f}" y="{y:.1f}">{escape(content)}</text>'


def _svg(width: float, height: float, elements: Iterable[str], title: str) -> str:
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" style="max-width:{width:g}px" role="img" '
        f'aria-label="{escape(title, quote=True)}">{"".join(elements)}</svg>'
    )

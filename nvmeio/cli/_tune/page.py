"""One self-contained page: what was measured, as charts. No script is needed to read it.

`render` fills `_PAGE`; `_style.STYLE` has the colours, for light and dark.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from nvmeio.cli import _facts
from nvmeio.cli._tune import charts
from nvmeio.cli._tune._style import SCRIPT, STYLE
from nvmeio.cli._tune.charts import Cell, Curve, Line, Strip
from nvmeio.cli._tune.result import Result, medians
from nvmeio.cli._tune.search import Op
from nvmeio.cli._tune.space import DEFAULT, Levels, in_words
from nvmeio.cli._units import binary_size
from nvmeio.engines.base import Options

Rates = dict[Options, dict[Op, float]]

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>nvmeio tune: {title}</title>
<style>{style}</style>
</head>
<body>
<main>
{sections}
</main>
<div id="tip" hidden></div>
<script>{script}</script>
</body>
</html>
"""


def render(result: Result) -> str:
    """The page."""
    rates = medians(result.outcome.samples)
    sections = [
        _head(result),
        _setting(result),
        _final(result),
        _heat_maps(result, rates),
        _throughput(result, rates),
        _flags(result, rates),
        _latency(result),
        _everything(result, rates),
        _foot(result),
    ]
    title = ", ".join(map(str, result.directories))
    return _PAGE.format(
        title=escape(title), style=STYLE, script=SCRIPT, sections="\n".join(filter(None, sections))
    )


def _section(title: str, lead: str, body: str) -> str:
    head = f"<h2>{escape(title)}</h2><p class=lead>{escape(lead)}</p>"
    return f"<section id={_slug(title)}>{head}{body}</section>"


def _slug(title: str) -> str:
    return "-".join(title.lower().replace(",", "").split())


# Sections


def _head(result: Result) -> str:
    figures = []
    for op in result.ops:
        rate, default = result.rate(result.winner, op), result.rate(result.default, op)
        if rate is None:
            continue
        beside = ""
        if default is not None and result.outcome.winner != DEFAULT:
            beside = f"<small>default {default:.2f}</small>"
        figures.append(
            f'<div class="figure {op}"><span>{op}</span><b>{rate:.2f}</b> GB/s{beside}</div>'
        )
    where = ", ".join(str(path) for path in result.directories)
    when = result.when.strftime("%Y-%m-%d %H:%M")
    verdict = result.outcome.verdict
    return (
        f"<header><p class=eyebrow>nvmeio tune · {escape(where)} · {when}</p>"
        f"<h1>{escape(in_words(result.outcome.winner))}</h1>"
        f"<p class=verdict>{escape(verdict[0].upper() + verdict[1:])}.</p>"
        f"<div class=figures>{''.join(figures)}</div></header>"
    )


def _setting(result: Result) -> str:
    winner = result.outcome.winner
    rows = []
    for name, value in winner._asdict().items():
        default = getattr(DEFAULT, name)
        changed = " class=changed" if value != default else ""
        rows.append(
            f"<tr{changed}><th>{name}</th><td>{_value(name, value)}</td>"
            f"<td class=quiet>{_value(name, default)}</td></tr>"
        )
    block = escape(json.dumps(result.block(), indent=2))
    return _section(
        "The setting",
        'AioHandle(**config["aio"]) takes it, and so does the "aio" block of a DeepSpeed '
        "configuration.",
        "<div class=pair><table class=setting><tr><td></td><td>chosen</td>"
        f"<td class=quiet>default</td></tr>{''.join(rows)}</table><pre>{block}</pre></div>",
    )


def _value(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return binary_size(value) if name == "block_size" else str(value)


def _final(result: Result) -> str:
    rounds = len(result.default.ratios)
    if not rounds or len(result.outcome.finalists) < 2:
        return ""
    rows = [
        Strip(
            in_words(f.setting),
            [ratio - 1 for ratio in f.ratios],
            f.ahead,
            f.spread,
            f.setting == result.outcome.winner,
        )
        for f in result.outcome.finalists
        if f.setting != DEFAULT
    ]
    return _section(
        "The final",
        f"Each dot is one of {rounds} rounds, relative to the default in the same round. The bar "
        "reaches from the median down to where the truth may lie: a setting wins when its bar "
        "stays right of the default.",
        f"<div class='card wide'>{charts.strips(rows)}</div>",
    )


def _heat_maps(result: Result, rates: Rates) -> str:
    levels = Levels.of(result.grid)
    maps = []
    for op in result.ops:
        bounds = _bounds(rates, op)
        row = []
        for lanes in levels.lanes:
            drawn = charts.heat_map(
                op,
                [(b, binary_size(b)) for b in levels.block_sizes],
                [(d, str(d)) for d in levels.queue_depths],
                _cell(result, rates, op, lanes),
                bounds,
                ("block size", "queue depth"),
            )
            name = f"{lanes} {'lane' if lanes == 1 else 'lanes'}"
            row.append(f"<figure class=card><figcaption>{op}, {name}</figcaption>{drawn}</figure>")
        maps.append(f"<div class=maps>{''.join(row)}</div>{_ramp(op, bounds)}")
    return _section(
        "Block size and queue depth",
        "GB/s, each field the best of single submit and overlap. The frame marks the chosen "
        "setting, the dot the default; empty fields were not measured. All are single looks except "
        "those that came far, so take neighbours together.",
        "".join(maps),
    )


def _cell(result: Result, rates: Rates, op: Op, lanes: int) -> Callable[[int, int], Cell | None]:
    def cell(block_size: int, queue_depth: int) -> Cell | None:
        here = {
            setting: by_op[op]
            for setting, by_op in rates.items()
            if (setting.block_size, setting.queue_depth, setting.intra_op_parallelism)
            == (block_size, queue_depth, lanes)
            and op in by_op
        }
        if not here:
            return None
        best = max(here, key=lambda setting: here[setting])
        hint = f"{in_words(best)}: {here[best]:.2f} GB/s"
        others = len(here) - 1
        if others:
            hint += f" (best of {others + 1}, from {min(here.values()):.2f})"
        return Cell(here[best], hint, result.outcome.winner in here, DEFAULT in here)

    return cell


def _bounds(rates: Rates, op: Op) -> tuple[float, float]:
    """Of the ramp: the lowest tenth has one colour, or a few bad settings would take most of it."""
    values = sorted(by_op[op] for by_op in rates.values() if op in by_op)
    return values[len(values) // 10], values[-1]


def _ramp(op: Op, bounds: tuple[float, float]) -> str:
    fields = "".join(f'<i class="{op}{step}"></i>' for step in range(charts.STEPS))
    return f"<p class=ramp>{bounds[0]:.2f} {fields} {bounds[1]:.2f} GB/s</p>"


def _throughput(result: Result, rates: Rates) -> str:
    levels, winner = Levels.of(result.grid), result.outcome.winner
    blocks = [(b, binary_size(b)) for b in levels.block_sizes]
    depths = [(d, str(d)) for d in levels.queue_depths]
    cards = []
    for op in result.ops:
        best: dict[tuple[int, int], float] = {}
        for setting, by_op in rates.items():
            key = (setting.block_size, setting.queue_depth)
            if op in by_op:
                best[key] = max(best.get(key, 0.0), by_op[op])
        if len(depths) > 1:
            curves = _curves(blocks, depths, best, winner.block_size)
            drawn = charts.lines(op, curves, depths, "queue depth")
            cards.append(_card(f"{op} GB/s against queue depth, by block size", drawn))
        if len(blocks) > 1:
            turned = {(depth, block): rate for (block, depth), rate in best.items()}
            curves = _curves(depths, blocks, turned, winner.queue_depth)
            drawn = charts.lines(op, curves, blocks, "block size")
            cards.append(_card(f"{op} GB/s against block size, by queue depth", drawn))
    if not cards:
        return ""
    return _section(
        "Throughput",
        "The best of lanes, single submit and overlap at each point; the thick line is the chosen "
        "setting's. The scale does not begin at zero.",
        f"<div class=cards>{''.join(cards)}</div>",
    )


def _curves(
    of: Sequence[tuple[int, str]],
    over: Sequence[tuple[int, str]],
    rates: dict[tuple[int, int], float],
    chosen: int,
) -> list[Line]:
    """A line for each of one parameter's values over the other's."""
    curves = []
    for index, (value, name) in enumerate(of):
        step = round(index * (charts.LINE_STEPS - 1) / max(1, len(of) - 1))
        points = [(float(x), rates[value, x]) for x, _ in over if (value, x) in rates]
        if points:
            curves.append(Line(name, step, points, value == chosen))
    return curves


def _card(title: str, drawn: str) -> str:
    return f"<figure class=card><figcaption>{escape(title)}</figcaption>{drawn}</figure>"


def _flags(result: Result, rates: Rates) -> str:
    """What the parameters do that no chart above has for an axis."""
    asked: list[tuple[str, str, Any]] = [
        ("single submit", "single_submit", True),
        ("no overlap", "overlap_events", False),
    ]
    lanes = [n for n in Levels.of(result.grid).lanes if n != DEFAULT.intra_op_parallelism]
    asked += [(f"{n} lanes", "intra_op_parallelism", n) for n in lanes]
    rows = []
    for words, name, value in asked:
        cells, pairs = [], 0
        for op in result.ops:
            ratios = _ratios(rates, op, name, value)
            pairs = max(pairs, len(ratios))
            cells.append(
                f"<td>{statistics.median(ratios) - 1:+.1%}</td>" if ratios else "<td></td>"
            )
        if pairs:
            rows.append(f"<tr><th>{words}</th>{''.join(cells)}<td class=quiet>{pairs}</td></tr>")
    if not rows:
        return ""
    heads = "".join(f"<td>{op}</td>" for op in result.ops)
    return _section(
        "Submission, overlap, lanes",
        "The median over all pairs of settings that differ in nothing else.",
        f"<table class=setting><tr><td></td>{heads}<td class=quiet>pairs</td></tr>"
        f"{''.join(rows)}</table>",
    )


def _ratios(rates: Rates, op: Op, name: str, value: Any) -> list[float]:
    """Throughput with a value relative to that with the default's, all else equal."""
    found = []
    for setting, by_op in rates.items():
        twin = setting._replace(**{name: getattr(DEFAULT, name)})
        if getattr(setting, name) == value and op in by_op and op in rates.get(twin, {}):
            found.append(by_op[op] / rates[twin][op])
    return found


def _latency(result: Result) -> str:
    cards = []
    for op in result.ops:
        found = [lat for lat in result.latencies if lat.op == op and len(lat.seconds) > 1]
        if not found:
            continue
        curves = [
            Curve(
                in_words(lat.setting),
                f"area {op}" if lat.setting == result.outcome.winner else "area other",
                lat.seconds,
            )
            for lat in found
        ]
        curves.reverse()  # the chosen one on top
        rows = "".join(
            f"<tr><th><i class='{curve.css}'></i>{escape(curve.label)}</th>"
            + "".join(f"<td>{charts.duration(t)}</td>" for t in _percentiles(curve.values))
            + f"<td class=quiet>{len(curve.values)}</td></tr>"
            for curve in reversed(curves)
        )
        table = (
            "<table class=latency><tr><td></td><td>p50</td><td>p90</td><td>p99</td><td>p99.9</td>"
            f"<td>slowest</td><td class=quiet>blocks</td></tr>{rows}</table>"
        )
        drawn = charts.histogram(op, curves)
        cards.append(_card(f"{op}: shares of blocks by latency", drawn + table))
    if not cards:
        return ""
    return _section(
        "Latency",
        "Of single blocks with the queue kept full, from the call to the awaiting task's being "
        "resumed. Deeper queues and larger blocks move more and wait longer.",
        f"<div class=cards>{''.join(cards)}</div>",
    )


def _percentiles(values: Sequence[float]) -> list[float]:
    """Observed values, by nearest rank."""
    ordered = sorted(values)
    last = len(ordered) - 1
    ranks = [min(last, math.ceil(len(ordered) * p) - 1) for p in (0.5, 0.9, 0.99, 0.999)]
    return [ordered[rank] for rank in [*ranks, last]]


def _everything(result: Result, rates: Rates) -> str:
    counts: dict[Options, int] = {}
    for sample in result.outcome.samples:
        if sample.stage != "probe":
            counts[sample.setting] = counts.get(sample.setting, 0) + 1
    order = sorted(rates, key=lambda s: -math.prod(rates[s].values()))
    rows = "".join(
        f"<tr><th>{escape(in_words(setting))}</th>"
        + "".join(
            f"<td>{rates[setting][op]:.2f}</td>" if op in rates[setting] else "<td></td>"
            for op in result.ops
        )
        + f"<td class=quiet>{counts[setting]}</td></tr>"
        for setting in order
    )
    heads = "".join(f"<td>{op} GB/s</td>" for op in result.ops)
    return (
        f"<section><details><summary>All {len(order)} settings that were measured</summary>"
        f"<table class=all><tr><td></td>{heads}<td class=quiet>measurements</td></tr>{rows}</table>"
        "</details></section>"
    )


def _foot(result: Result) -> str:
    software = _facts.software()
    lines = [
        *result.conditions(),
        f"nvmeio {software.nvmeio}, kernel {software.kernel}, python {software.python}, torch "
        f"{software.torch}",
    ]
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<footer><h2>Conditions</h2><ul>{items}</ul></footer>"

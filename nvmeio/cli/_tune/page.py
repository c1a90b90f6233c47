"""One self-contained page: what was measured, as charts, and in tables.

plotly and its script are in the page, which makes it about 5 MB; it loads nothing from anywhere.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple

from nvmeio.cli._terminal import counted
from nvmeio.cli._tune.result import TuneResult, medians
from nvmeio.cli._tune.search import Op
from nvmeio.cli._tune.space import DEFAULT, in_words, levels, value_in_words
from nvmeio.cli.measure import machine
from nvmeio.engines.base import Options

if TYPE_CHECKING:
    from plotly.graph_objects import Figure
if TYPE_CHECKING:
    import optuna
    from plotly.graph_objects import Figure

Rates = dict[Options, dict[Op, float]]

STYLE = """
:root{--page:#f7f7f5;--card:#fff;--ink:#1d1d1f;--quiet:#5f5f66;--rule:#dededa}
@media (prefers-color-scheme:dark){:root{--page:#121214;--card:#1b1b1e;--ink:#ececf0;
--quiet:#a8a8b0;--rule:#38383e}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:16px/1.5 system-ui,sans-serif;
font-variant-numeric:tabular-nums}
main{max-width:1080px;margin:0 auto;padding:32px 16px 64px}
h1{margin:0;font-size:28px;line-height:1.25}h2{margin:44px 0 4px;font-size:20px}
p{max-width:75ch}.quiet,figcaption,.lead,footer{color:var(--quiet)}
.quiet,figcaption,footer,table{font-size:14px}.where{overflow-wrap:anywhere}
.figures{display:flex;flex-wrap:wrap;gap:8px 48px;font-size:17px}.figures b{font-size:40px}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,330px),1fr));gap:16px}
.card{background:var(--card);border:1px solid var(--rule);border-radius:10px;padding:12px;margin:0;
min-width:0;overflow-x:auto}
pre{margin:0;font-size:13px}
table{border-collapse:collapse;width:100%}td,th{padding:5px 10px 5px 0;text-align:right}
th:first-child{text-align:left;font-weight:400}thead{color:var(--quiet)}
tbody tr{border-top:1px solid var(--rule)}.chosen{font-weight:650}
summary{cursor:pointer;padding:6px 0}footer li{overflow-wrap:anywhere}
.xtitle,.ytitle,.xtick text,.ytick text,.legendtext,.bartext-outside{fill:var(--ink)!important}
"""

# At the end of the page: only then is it known how wide each card is.
SCRIPT = """
for (const plot of document.querySelectorAll('.plot')) {
  const {data, layout} = JSON.parse(plot.nextElementSibling.textContent);
  Plotly.newPlot(plot, data, layout, {responsive: true, displayModeBar: false});
}
"""


def render(result: TuneResult) -> str:
    """The page."""
    from plotly.offline import get_plotlyjs

    rates = medians(result.outcome.samples)
    sections = [
        _head(result),
        _setting(result),
        _final(result),
        _heat_maps(result, rates),
        _parameters(result, rates),
        _search(result),
        _latency(result),
        _everything(result, rates),
        _foot(result),
    ]
    title = escape(", ".join(map(str, result.directories)))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>nvmeio tune: {title}</title>\n<style>{STYLE}</style>\n"
        f"<script>{get_plotlyjs()}</script>\n</head>\n<body>\n<main>\n"
        + "\n".join(filter(None, sections))
        + f"\n</main>\n<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )


def _section(title: str, lead: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2><p class=lead>{escape(lead)}</p>{body}</section>"


def _card(caption: str, figure: Figure) -> str:
    name = escape(caption, quote=True)
    drawn = figure.to_json().replace("<", "\\u003c")  # no end of the script in a directory's name
    return (
        f"<figure class=card><figcaption>{name}</figcaption>"
        f'<div class=plot role="img" aria-label="{name}; the figures are in this page\'s tables" '
        f'style="height:{figure.layout.height}px"></div>'
        f'<script type="application/json">{drawn}</script></figure>'
    )


def _cards(cards: Iterable[str]) -> str:
    return f"<div class=cards>{''.join(cards)}</div>"


def _table(heads: Sequence[str], rows: Iterable[tuple[Sequence[str], bool]]) -> str:
    """A table; each row with whether it is the chosen one. The first cell names the row."""
    head = "".join(f"<th scope=col>{escape(cell)}</th>" for cell in heads)
    body = "".join(
        f"<tr{' class=chosen' if chosen else ''}><th scope=row>{escape(cells[0])}</th>"
        + "".join(f"<td>{escape(cell)}</td>" for cell in cells[1:])
        + "</tr>"
        for cells, chosen in rows
    )
    return (
        f"<div class=card><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


# Sections


def _head(result: TuneResult) -> str:
    figures = []
    for op in result.ops:
        rate, default = result.rate(result.winner, op), result.rate(result.default, op)
        if rate is not None:
            beside = (
                f"default {default:.2f}" if default and result.outcome.winner != DEFAULT else ""
            )
            figures.append(
                f"<div>{op} <b>{rate:.2f}</b> GB/s <span class=quiet>{beside}</span></div>"
            )
    where = escape(", ".join(str(path) for path in result.directories))
    verdict = result.outcome.verdict
    return (
        f"<header><p class='quiet where'>nvmeio tune · {where} · "
        f"{result.when.strftime('%Y-%m-%d %H:%M')}</p>"
        f"<h1>{escape(in_words(result.outcome.winner))}</h1>"
        f"<p class=lead>{escape(verdict[0].upper() + verdict[1:])}.</p>"
        f"<div class=figures>{''.join(figures)}</div></header>"
    )


def _setting(result: TuneResult) -> str:
    rows = []
    for name, value in result.outcome.winner._asdict().items():
        default = getattr(DEFAULT, name)
        cells = (name, value_in_words(name, value), value_in_words(name, default))
        rows.append((cells, value != default))
    block = escape(json.dumps(result.block(), indent=2))
    return _section(
        "The setting",
        'AioHandle(**config["aio"]) takes it, and so does the "aio" block of a DeepSpeed '
        "configuration.",
        _cards(
            [_table(("", "chosen", "default"), rows), f"<div class=card><pre>{block}</pre></div>"]
        ),
    )


def _final(result: TuneResult) -> str:
    rounds = len(result.default.ratios)
    others = [f for f in result.outcome.finalists if f.setting != DEFAULT]
    if not rounds or not others:
        return ""
    strips = [
        Strip(
            in_words(f.setting),
            [ratio - 1 for ratio in f.ratios],
            f.ahead,
            f.spread,
            f.setting == result.outcome.winner,
        )
        for f in others
    ]
    rows = [
        ((strip.label, f"{strip.middle:+.1%}", finalist.spread_told), strip.chosen)
        for strip, finalist in zip(strips, others, strict=True)
    ]
    return _section(
        "The final",
        f"Each dot is one of {counted(rounds, 'round')}, relative to the default in the same one. "
        "The bar reaches from the median down to where the truth may lie: a setting wins when its "
        "bar stays right of the default.",
        _card("Finalists, relative to the default", strip_chart(strips))
        + _table(("setting", "ahead", "spread"), rows),
    )


def _heat_maps(result: TuneResult, rates: Rates) -> str:
    axes = levels(result.grid)
    blocks, depths = axes["block_size"], axes["queue_depth"]
    cards = []
    for op in result.ops:
        values = sorted(of[op] for of in rates.values() if op in of)
        if not values:
            continue
        # The lowest tenth has one colour, or a few bad settings would take most of the scale.
        bounds = values[len(values) // 10], values[-1]
        for lanes in axes["intra_op_parallelism"]:
            figure = heat_map(
                op,
                [value_in_words("block_size", b) for b in blocks],
                [str(d) for d in depths],
                _cell(result, rates, op, lanes),
                bounds,
            )
            cards.append(_card(f"{op} GB/s, {counted(lanes, 'lane')}", figure))
    if not cards:
        return ""
    return _section(
        "Block size and queue depth",
        "Each field is the best of single submit and overlap. The solid frame marks the chosen "
        "setting, the dotted one the default; empty fields were not measured. All are single "
        "looks except those that came far, so take neighbours together.",
        _cards(cards),
    )


def _cell(
    result: TuneResult, rates: Rates, op: Op, lanes: int
) -> Callable[[int, int], Cell | None]:
    axes = levels(result.grid)

    def cell(row: int, column: int) -> Cell | None:
        place = (axes["block_size"][row], axes["queue_depth"][column], lanes)
        here = {
            setting: of[op]
            for setting, of in rates.items()
            if (setting.block_size, setting.queue_depth, setting.intra_op_parallelism) == place
            and op in of
        }
        if not here:
            return None
        best = max(here, key=lambda setting: here[setting])
        hint = f"{in_words(best)}: {here[best]:.2f} GB/s"
        return Cell(here[best], hint, result.outcome.winner in here, DEFAULT in here)

    return cell


def _parameters(result: TuneResult, rates: Rates) -> str:
    cards = []
    for name, values in levels(result.grid).items():
        groups: dict[str, dict[Op, list[float]]] = {}
        for value in values:
            at = [of for setting, of in rates.items() if getattr(setting, name) == value]
            if at:
                groups[value_in_words(name, value)] = {
                    op: [of[op] for of in at if op in of] for op in result.ops
                }
        if len(groups) > 1:
            title = name.replace("_", " ")
            cards.append(_card(f"GB/s by {title}", spreads(title, groups)))
    if not cards:
        return ""
    lead = "All rates by the value of one parameter, the others being whatever they were."
    return _section("One parameter at a time", lead, _cards(cards))


def _search(result: TuneResult) -> str:
    study = result.outcome.study
    # optuna needs a few looks that differ to tell what made them differ.
    if study is None or len({trial.value for trial in study.trials if trial.values}) < 4:
        return ""
    cards = [_card("Every look, and the best so far", history(study))]
    if any(len(set(values)) > 1 for values in result.grid.values()):
        cards.append(_card("Which parameters matter", importances(study)))
    lead = "What optuna proposed, and what it takes for the reason of the differences."
    return _section("The search", lead, _cards(cards))


def _latency(result: TuneResult) -> str:
    body = ""
    for op in result.ops:
        found = [lat for lat in result.latencies if lat.op == op and len(lat.seconds) > 1]
        if not found:
            continue
        winner = result.outcome.winner
        curves = [
            (in_words(lat.setting), COLOURS[op] if lat.setting == winner else GREY, lat.seconds)
            for lat in found
        ]
        rows = [
            (
                (
                    in_words(lat.setting),
                    *(f"{t * 1e3:.3g}" for t in _percentiles(lat.seconds)),
                    str(len(lat.seconds)),
                ),
                lat.setting == winner,
            )
            for lat in found
        ]
        heads = (f"{op}, ms", "p50", "p90", "p99", "p99.9", "slowest", "blocks")
        body += _card(f"{op}: the share of blocks by latency", latencies(curves))
        body += _table(heads, rows)
    return body and _section(
        "Latency",
        "Of single blocks with the queue kept full, from the call to the awaiting task's being "
        "resumed. Deeper queues and larger blocks move more and wait longer.",
        body,
    )


def _percentiles(values: Sequence[float]) -> list[float]:
    """Observed values, by nearest rank."""
    ordered = sorted(values)
    last = len(ordered) - 1
    ranks = [min(last, math.ceil(len(ordered) * p) - 1) for p in (0.5, 0.9, 0.99, 0.999)]
    return [ordered[rank] for rank in [*ranks, last]]


def _everything(result: TuneResult, rates: Rates) -> str:
    counts = Counter(s.setting for s in result.outcome.samples if s.stage != "probe")
    order = sorted(rates, key=lambda s: -math.prod(rates[s].values()))
    rows = [
        (
            (
                in_words(setting),
                *(
                    f"{rates[setting][op]:.2f}" if op in rates[setting] else "-"
                    for op in result.ops
                ),
                str(counts[setting]),
            ),
            setting == result.outcome.winner,
        )
        for setting in order
    ]
    heads = ("setting", *(f"{op} GB/s" for op in result.ops), "measurements")
    title = f"{counted(len(order), 'setting')} measured"
    return (
        f"<section><h2>Everything</h2><details><summary>{title}</summary>"
        f"{_table(heads, rows)}</details></section>"
    )


def _foot(result: TuneResult) -> str:
    software = machine.software()
    lines = [
        *result.conditions(),
        f"nvmeio {software.nvmeio}, kernel {software.kernel}, python {software.python}, torch "
        f"{software.torch}",
    ]
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<footer><h2>Conditions</h2><ul>{items}</ul></footer>"


COLOURS: dict[Op, str] = {"read": "#2a6cbc", "write": "#b85f14"}
GREY = "#8b8b92"
SCALES: dict[Op, str] = {"read": "Blues", "write": "Oranges"}
_POINTS = 400  # of a curve: more cannot be told apart, and would make the page large


class Cell(NamedTuple):
    """One field of a heat map."""

    value: float
    hint: str
    chosen: bool = False
    default: bool = False


class Strip(NamedTuple):
    """A row of dots: rounds relative to the default, their median, and how far below it may lie."""

    label: str
    values: list[float]
    middle: float
    spread: float
    chosen: bool


def heat_map(
    op: Op,
    rows: Sequence[str],
    columns: Sequence[str],
    cell: Callable[[int, int], Cell | None],
    bounds: tuple[float, float],
) -> Figure:
    """Fields for every pair of a row's and a column's index; frames for the chosen and default."""
    import plotly.graph_objects as go

    cells = [[cell(y, x) for x in range(len(columns))] for y in range(len(rows))]
    figure = go.Figure(
        go.Heatmap(
            z=[[c and c.value for c in line] for line in cells],
            text=[[c.hint if c else "not measured" for c in line] for line in cells],
            x=columns,
            y=rows,
            zmin=bounds[0],
            zmax=bounds[1],
            colorscale=SCALES[op],
            texttemplate="%{z:.2f}",
            hovertemplate="%{text}<extra></extra>",
            hoverongaps=False,
            xgap=2,
            ygap=2,
            showscale=False,
        )
    )
    for y, line in enumerate(cells):
        for x, field in enumerate(line):
            if field and (field.chosen or field.default):
                figure.add_shape(
                    type="rect",
                    x0=x - 0.46,
                    x1=x + 0.46,
                    y0=y - 0.44,
                    y1=y + 0.44,
                    line={"color": "#111", "width": 3 if field.chosen else 1.5}
                    | ({} if field.chosen else {"dash": "dot"}),
                )
    return _dressed(figure, 60 + 38 * len(rows), x="queue depth", y="block size", category=True)


def strip_chart(rows: Sequence[Strip]) -> Figure:
    """For each row its dots around nought, the median, and a bar down to where the truth may be."""
    import plotly.graph_objects as go

    figure = go.Figure()
    labels = ["<br>".join(row.label.split(", ")) for row in rows]  # narrow, for phones
    for label, row in zip(labels, rows, strict=True):
        colour = COLOURS["read"] if row.chosen else GREY
        dots = {"color": colour, "opacity": 0.5, "size": 8}
        figure.add_scatter(
            x=row.values,
            y=[label] * len(row.values),
            mode="markers",
            marker=dots,
            hovertemplate="%{x:+.1%}<extra></extra>",
        )
        figure.add_scatter(
            x=[row.middle],
            y=[label],
            mode="markers",
            marker={"symbol": "line-ns-open", "size": 18, "color": colour},
            error_x={
                "type": "data",
                "symmetric": False,
                "array": [0],
                "arrayminus": [row.spread],
                "color": colour,
                "thickness": 3,
            },
            hovertemplate=f"median %{{x:+.1%}}, spread {row.spread:.1%}<extra></extra>",
        )
    figure.add_vline(x=0, line={"color": GREY, "dash": "dash"})
    figure.update_yaxes(autorange="reversed")
    figure.update_xaxes(tickformat="+.0%", nticks=5, tickangle=0)
    lines = sum(label.count("<br>") + 2 for label in labels)
    return _dressed(figure, 60 + 18 * lines, x="ahead")


def spreads(name: str, groups: Mapping[str, Mapping[Op, Sequence[float]]]) -> Figure:
    """Boxes of all rates by the level of one parameter."""
    import plotly.graph_objects as go

    figure = go.Figure()
    for op, colour in COLOURS.items():
        pairs = [(label, rate) for label, of in groups.items() for rate in of.get(op, ())]
        if pairs:
            labels, rates = zip(*pairs, strict=True)
            figure.add_box(x=labels, y=rates, name=op, marker={"color": colour, "size": 4})
    figure.update_layout(boxmode="group", showlegend=True)
    figure.update_xaxes(categoryorder="array", categoryarray=list(groups))
    return _dressed(figure, 280, x=name, y="GB/s", category=True)


def importances(study: optuna.Study) -> Figure:
    """Which parameters matter for coming near the best (optuna's PED-ANOVA)."""
    import optuna

    figure = optuna.visualization.plot_param_importances(
        study, evaluator=optuna.importance.PedAnovaImportanceEvaluator()
    )
    figure.update_traces(
        marker_color=COLOURS["read"], texttemplate="%{x:.0%}", textposition="auto", textangle=0
    )
    figure.update_layout(title=None)
    return _dressed(figure, 260, x="importance", y="")


def history(study: optuna.Study) -> Figure:
    """Every look of the exploration, and the best so far."""
    import optuna

    figure = optuna.visualization.plot_optimization_history(
        study, target_name="log rate, relative to the default"
    )
    figure.data[0].update(name="a look", marker_color=COLOURS["read"])
    figure.data[1].update(name="best so far", line_color=COLOURS["write"])
    figure.update_layout(title=None, showlegend=True)
    return _dressed(figure, 280, x="look", y="log rate / default")


def latencies(curves: Sequence[tuple[str, str, Sequence[float]]]) -> Figure:
    """The share of blocks that took no longer: a label, a colour and seconds for each curve."""
    import plotly.graph_objects as go

    figure = go.Figure()
    for label, colour, seconds in curves:
        ordered = sorted(seconds)
        ranks = sorted({round(i * (len(ordered) - 1) / _POINTS) for i in range(_POINTS + 1)})
        figure.add_scatter(
            x=[ordered[rank] * 1e3 for rank in ranks],
            y=[(rank + 1) / len(ordered) for rank in ranks],
            mode="lines",
            name=label,
            line={"color": colour, "width": 2.5},
            hovertemplate="%{y:.1%} within %{x:.3g} ms<extra></extra>",
        )
    figure.update_layout(showlegend=True)
    figure.update_xaxes(type="log")
    figure.update_yaxes(tickformat=".0%", rangemode="tozero")
    return _dressed(figure, 300, x="ms, logarithmic", y="blocks within")


def _dressed(figure: Figure, height: int, x: str, y: str = "", *, category: bool = False) -> Figure:
    """What all charts share: no paper of their own, labels never clipped, no traps for a finger."""
    clear = "rgba(0,0,0,0)"
    axis: dict[str, Any] = {
        "automargin": True,
        "fixedrange": True,
        "ticks": "outside",
        "ticklen": 6,  # where two axes meet, their first labels would touch
        "tickcolor": clear,
        "gridcolor": "rgba(128,128,128,.25)",
        "zeroline": False,
    }
    figure.update_layout(
        template="none",
        height=height,
        margin={"l": 8, "r": 12, "t": 8, "b": 8},
        paper_bgcolor=clear,
        plot_bgcolor=clear,
        dragmode=False,
        font={"family": "system-ui, sans-serif", "size": 13},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
    )
    if figure.layout.showlegend is None:
        figure.update_layout(showlegend=False)
    figure.update_xaxes(title={"text": x, "standoff": 8}, **axis)
    figure.update_yaxes(title={"text": y, "standoff": 8}, **axis)
    if category:
        figure.update_xaxes(type="category")
    return figure

"""One self-contained page: the measurements as charts and in tables.

`page.html` is the page; here are the rows of its tables and its charts. plotly and its script are
in the page, which makes it about 5 MB; it loads nothing from anywhere.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvmeio.cli._terminal import counted
from nvmeio.cli.measure import Op, machine
from nvmeio.cli.tune.result import Latencies, TuneResult, medians
from nvmeio.cli.tune.search import Finalist
from nvmeio.cli.tune.space import DEFAULT, in_words, levels, value_in_words
from nvmeio.engines.base import Options

if TYPE_CHECKING:
    import optuna
    from plotly.graph_objects import Figure

    Chart = tuple[str, Figure]

Rates = dict[Options, dict[Op, float]]
# The cells of a table's row, and whether it is the chosen one.
TableRow = tuple[Sequence[str], bool]

COLOURS: dict[Op, str] = {"read": "#2a6cbc", "write": "#b85f14"}
GREY = "#8b8b92"
SCALES: dict[Op, str] = {"read": "Blues", "write": "Oranges"}
_PERCENTILES = (0.5, 0.9, 0.99, 0.999, 1.0)  # of the table of latencies
_POINTS = 400  # of a curve: more cannot be told apart, and would make the page large


def render(result: TuneResult) -> str:
    """The page."""
    import jinja2
    from plotly.offline import get_plotlyjs

    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"in_words": in_words, "counted": counted}
    template = environment.from_string(Path(__file__).with_name("page.html").read_text("utf-8"))
    rates = medians(result.outcome.samples)
    finalists = [f for f in result.outcome.finalists if f.setting != DEFAULT]
    return template.render(
        result=result,
        plan=result.plan,
        outcome=result.outcome,
        where=", ".join(map(str, result.plan.directories)),
        plotly=get_plotlyjs(),
        setting=_setting(result.outcome.winner),
        block=json.dumps(result.block(), indent=2),
        rounds=len(result.default.ratios),
        finalists=finalists,
        strip_chart=strip_chart,
        final_rows=[
            ((in_words(f.setting), f"{f.ahead:+.1%}", f.spread_told), f is result.winner)
            for f in finalists
        ],
        heat_maps=list(_heat_maps(result, rates)),
        spreads=list(_spreads(result, rates)),
        exploration=list(_exploration(result)),
        latencies=list(_latencies(result)),
        rate_heads=["setting", *(f"{op} GB/s" for op in result.plan.ops), "measurements"],
        everything=_everything(result, rates),
        conditions=[*result.conditions(), ", ".join(map(" ".join, machine.versions().items()))],
    )


# Tables


def _setting(winner: Options) -> list[TableRow]:
    return [
        ((name, value_in_words(name, value), value_in_words(name, default)), value != default)
        for (name, value), default in zip(winner._asdict().items(), DEFAULT, strict=True)
    ]


def _everything(result: TuneResult, rates: Rates) -> list[TableRow]:
    counts = Counter(s.setting for s in result.outcome.samples if s.stage != "probe")
    rows: list[TableRow] = []
    for setting in sorted(rates, key=lambda s: -math.prod(rates[s].values())):
        of = rates[setting]
        figures = (f"{of[op]:.2f}" if op in of else "-" for op in result.plan.ops)
        cells = in_words(setting), *figures, str(counts[setting])
        rows.append((cells, setting == result.outcome.winner))
    return rows


# Charts


def _heat_maps(result: TuneResult, rates: Rates) -> Iterator[Chart]:
    for op in result.plan.ops:
        values = sorted(of[op] for of in rates.values() if op in of)
        if not values:
            continue
        # The lowest tenth has one colour, or a few bad settings would take most of the scale.
        bounds = values[len(values) // 10], values[-1]
        for lanes in levels(result.plan.grid)["intra_op_parallelism"]:
            of_lanes = {
                setting: of[op]
                for setting, of in rates.items()
                if setting.intra_op_parallelism == lanes and op in of
            }
            yield f"{op} GB/s, {counted(lanes, 'lane')}", _heat_map(result, op, of_lanes, bounds)


def _heat_map(
    result: TuneResult, op: Op, rates: dict[Options, float], bounds: tuple[float, float]
) -> Figure:
    """The best rate for every block size and queue depth; frames for the chosen and default."""
    import plotly.graph_objects as go

    axes = levels(result.plan.grid)
    blocks, depths = axes["block_size"], axes["queue_depth"]
    figure = go.Figure()
    best: list[list[Options | None]] = []
    for y, block in enumerate(blocks):
        best.append([])
        for x, depth in enumerate(depths):
            here = [s for s in rates if (s.block_size, s.queue_depth) == (block, depth)]
            best[y].append(max(here, key=lambda setting: rates[setting], default=None))
            if result.outcome.winner in here:
                line: dict[str, Any] = {"color": "#111", "width": 3}
            elif DEFAULT in here:
                line = {"color": "#111", "width": 1.5, "dash": "dot"}
            else:
                continue
            frame = {"x0": x - 0.46, "x1": x + 0.46, "y0": y - 0.44, "y1": y + 0.44}
            figure.add_shape(type="rect", line=line, **frame)
    figure.add_heatmap(
        z=[[s and rates[s] for s in line] for line in best],
        text=[
            [f"{in_words(s)}: {rates[s]:.2f} GB/s" if s else "not measured" for s in line]
            for line in best
        ],
        x=[str(depth) for depth in depths],
        y=[value_in_words("block_size", block) for block in blocks],
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
    return _dressed(figure, 60 + 38 * len(blocks), x="queue depth", y="block size", category=True)


def strip_chart(finalists: Sequence[Finalist], winner: Options) -> Figure:
    """For each its rounds around nought, the median, and a bar down to where the truth may be."""
    import plotly.graph_objects as go

    figure = go.Figure()
    lines = 0
    for finalist in finalists:
        words = in_words(finalist.setting).split(", ")
        label = "<br>".join(words)  # narrow, for phones
        lines += len(words) + 1
        colour = COLOURS["read"] if finalist.setting == winner else GREY
        figure.add_scatter(
            x=[ratio - 1 for ratio in finalist.ratios],
            y=[label] * len(finalist.ratios),
            mode="markers",
            marker={"color": colour, "opacity": 0.5, "size": 8},
            hovertemplate="%{x:+.1%}<extra></extra>",
        )
        bar = {"type": "data", "symmetric": False, "array": [0], "arrayminus": [finalist.spread]}
        figure.add_scatter(
            x=[finalist.ahead],
            y=[label],
            mode="markers",
            marker={"symbol": "line-ns-open", "size": 18, "color": colour},
            error_x=bar | {"color": colour, "thickness": 3},
            hovertemplate=f"median %{{x:+.1%}}, spread {finalist.spread:.1%}<extra></extra>",
        )
    figure.add_vline(x=0, line={"color": GREY, "dash": "dash"})
    figure.update_yaxes(autorange="reversed")
    figure.update_xaxes(tickformat="+.0%", nticks=5, tickangle=0)
    return _dressed(figure, 60 + 18 * lines, x="ahead")


def _spreads(result: TuneResult, rates: Rates) -> Iterator[Chart]:
    """Box plots of all rates by the level of one parameter."""
    import plotly.graph_objects as go

    for name, values in levels(result.plan.grid).items():
        measured = {getattr(setting, name) for setting in rates}
        labels = [value_in_words(name, value) for value in values if value in measured]
        if len(labels) < 2:
            continue
        figure = go.Figure()
        for op in result.plan.ops:
            of_op = [(getattr(s, name), of[op]) for s, of in rates.items() if op in of]
            of_op.sort(key=lambda pair: values.index(pair[0]))
            if of_op:
                figure.add_box(
                    x=[value_in_words(name, value) for value, _ in of_op],
                    y=[rate for _, rate in of_op],
                    name=op,
                    marker={"color": COLOURS[op], "size": 4},
                )
        figure.update_layout(boxmode="group", showlegend=True)
        figure.update_xaxes(categoryorder="array", categoryarray=labels)
        title = name.replace("_", " ")
        yield f"GB/s by {title}", _dressed(figure, 280, x=title, y="GB/s", category=True)


def _exploration(result: TuneResult) -> Iterator[Chart]:
    study = result.outcome.study
    # optuna needs a few looks that differ to tell what made them differ.
    if study is None or len({trial.value for trial in study.trials if trial.values}) < 4:
        return
    yield "Every look, and the best so far", _history(study)
    if any(len(set(values)) > 1 for values in result.plan.grid.values()):
        yield "Which parameters matter", _importances(study)


def _importances(study: optuna.Study) -> Figure:
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


def _history(study: optuna.Study) -> Figure:
    """Every look of the exploration, and the best so far."""
    import optuna

    figure = optuna.visualization.plot_optimization_history(
        study, target_name="log rate, relative to the default"
    )
    figure.data[0].update(name="a look", marker_color=COLOURS["read"])
    figure.data[1].update(name="best so far", line_color=COLOURS["write"])
    figure.update_layout(title=None, showlegend=True)
    return _dressed(figure, 280, x="look", y="log rate / default")


def _latencies(result: TuneResult) -> Iterator[tuple[Op, Figure, list[TableRow]]]:
    import numpy

    for op in result.plan.ops:
        found = [lat for lat in result.latencies if lat.op == op and len(lat.seconds) > 1]
        if not found:
            continue
        rows: list[TableRow] = []
        for lat in found:
            observed = numpy.quantile(lat.seconds, _PERCENTILES, method="inverted_cdf")
            milliseconds = (f"{seconds * 1e3:.3g}" for seconds in observed)
            cells = in_words(lat.setting), *milliseconds, str(len(lat.seconds))
            rows.append((cells, lat.setting == result.outcome.winner))
        yield op, _latency_chart(found, result.outcome.winner), rows


def _latency_chart(measured: Sequence[Latencies], winner: Options) -> Figure:
    """For each latency, the share of blocks that took no longer."""
    import plotly.graph_objects as go

    figure = go.Figure()
    for lat in measured:
        ordered = sorted(lat.seconds)
        ranks = sorted({round(i * (len(ordered) - 1) / _POINTS) for i in range(_POINTS + 1)})
        colour = COLOURS[lat.op] if lat.setting == winner else GREY
        figure.add_scatter(
            x=[ordered[rank] * 1e3 for rank in ranks],
            y=[(rank + 1) / len(ordered) for rank in ranks],
            mode="lines",
            name=in_words(lat.setting),
            line={"color": colour, "width": 2.5},
            hovertemplate="%{y:.1%} within %{x:.3g} ms<extra></extra>",
        )
    figure.update_layout(showlegend=True)
    figure.update_xaxes(type="log")
    figure.update_yaxes(tickformat=".0%", rangemode="tozero")
    return _dressed(figure, 300, x="ms, logarithmic", y="blocks within")


def _dressed(figure: Figure, height: int, x: str, y: str = "", *, category: bool = False) -> Figure:
    """Apply the common style: no own paper, labels never clipped, no traps for a finger."""
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

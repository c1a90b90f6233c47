"""The charts of the page, as plotly figures. Reads are blue and writes orange everywhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from nvmeio.cli._tune.final import Op

if TYPE_CHECKING:
    import optuna
    from plotly.graph_objects import Figure

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


def strips(rows: Sequence[Strip]) -> Figure:
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

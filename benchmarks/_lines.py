"""A line of the table: two series of figures, their medians' ratio, and what was promised."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from _measure import Sample, median

Figure = Callable[[Sample], float]
Series = Sequence[Sample]


@dataclass(frozen=True)
class Target:
    """A promise about the ratio nvmeio / peer, or about nvmeio's own figure (`value`)."""

    sense: Literal["at least", "at most"]
    limit: float
    of: Literal["ratio", "value"] = "ratio"

    def met_by(self, ratio: float | None, value: float | None) -> bool | None:
        figure = ratio if self.of == "ratio" else value
        if figure is None:
            return None
        return figure >= self.limit if self.sense == "at least" else figure <= self.limit


def at_least(limit: float) -> Target:
    return Target("at least", limit)


def at_most(limit: float, of: Literal["ratio", "value"] = "ratio") -> Target:
    return Target("at most", limit, of)


@dataclass
class Line:
    """One comparison.

    Attributes:
        row: Key of the row in the promise, for `--only`.
        work: What was done.
        peer: Whom nvmeio is compared with.
        unit: Of both figures.
        nvmeio: One figure per repeat; empty when it could not run.
        theirs: The peer's figures; empty when it was skipped.
        target: What was promised, or None for a line that only informs.
        note: What else a reader should know.
        nvmeio_disk: Bytes that the device moved per byte asked for, in the median.
        theirs_disk: The same for the peer.
    """

    row: str
    work: str
    peer: str
    unit: str
    nvmeio: list[float]
    theirs: list[float]
    target: Target | None = None
    note: str = ""
    nvmeio_disk: float | None = field(default=None, repr=False)
    theirs_disk: float | None = field(default=None, repr=False)

    @property
    def ratio(self) -> float | None:
        ours, theirs = median(self.nvmeio), median(self.theirs)
        return ours / theirs if ours is not None and theirs else None

    @property
    def met(self) -> bool | None:
        if self.target is None:
            return None
        return self.target.met_by(self.ratio, median(self.nvmeio))

    def as_json(self) -> dict[str, Any]:
        return {
            "row": self.row,
            "work": self.work,
            "peer": self.peer,
            "unit": self.unit,
            "nvmeio": _series_json(self.nvmeio),
            "peer_figure": _series_json(self.theirs),
            "ratio": _six_digits(self.ratio),
            "target": vars(self.target) if self.target else None,
            "met": self.met,
            "note": self.note,
            "disk_bytes_per_byte": {
                "nvmeio": _six_digits(self.nvmeio_disk),
                "peer": _six_digits(self.theirs_disk),
            },
        }


def _series_json(figures: Sequence[float]) -> dict[str, Any]:
    samples = [_six_digits(figure) for figure in figures]
    return {"median": _six_digits(median(figures)), "samples": samples}


def _six_digits(figure: float | None) -> float | None:
    return None if figure is None else float(f"{figure:.6g}")


def compare(
    row: str,
    work: str,
    peer: str,
    unit: str,
    figure: Figure,
    ours: Series,
    theirs: Series,
    target: Target | None = None,
    note: str = "",
) -> Line:
    """A line out of two series of samples."""
    return Line(
        row,
        work,
        peer,
        unit,
        [figure(sample) for sample in ours],
        [figure(sample) for sample in theirs],
        target,
        note,
        _disk_share(ours),
        _disk_share(theirs),
    )


def best(
    samples: Mapping[str, Series], names: Iterable[str], figure: Figure, otherwise: str
) -> tuple[str, Series]:
    """The name and samples with the highest median among those that ran."""
    ran = [(name, samples[name]) for name in names if samples.get(name)]
    if not ran:
        return otherwise, []
    return max(ran, key=lambda item: median([figure(sample) for sample in item[1]]) or 0.0)


def gb_per_s(sample: Sample) -> float:
    return sample.gb_per_s


def kiops(sample: Sample) -> float:
    return sample.iops / 1e3


def cpu_per_gib(sample: Sample) -> float:
    return sample.cpu_per_gib


def p99_ms(sample: Sample) -> float:
    return sample.extra["p99_ms"]


def _disk_share(series: Series) -> float | None:
    return median([share for s in series if (share := s.disk_share) is not None])

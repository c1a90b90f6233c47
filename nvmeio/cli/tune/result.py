"""The result of a search, for people, for programs and for the next handle."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich.console import Console

import nvmeio
from nvmeio.cli._terminal import Column, Row, binary_size, counted, fitted, trimmed
from nvmeio.cli.measure import UNIT, Op, machine
from nvmeio.cli.tune.search import Finalist, Sample, SearchOutcome
from nvmeio.cli.tune.space import DEFAULT, Grid, in_words
from nvmeio.engines.base import Options
from nvmeio.tuned import Tuned


@dataclass(frozen=True)
class Latencies:
    """Single blocks of one setting, in seconds each."""

    setting: Options
    op: Op
    seconds: list[float]


@dataclass(frozen=True)
class TunePlan:
    """The requested search: `io_size` is bytes of a full transfer, in each directory."""

    directories: Sequence[Path]
    ops: Sequence[Op]
    grid: Grid
    io_size: int
    budget_s: float
    engine: str = "auto"
    loops: int = 1
    gpu: bool = False
    gds: bool = False
    flush: bool = False
    latencies: bool = False


@dataclass(frozen=True)
class TuneResult:
    """A search and its circumstances.

    Attributes:
        plan: The requested search.
        outcome: The findings.
        engine: The engine that was used.
        direct: Whether transfers bypassed the page cache.
        seconds: The time that it took.
        latencies: The latencies of the winner and the default, if they were measured.
        trouble: A failure outside the search, or "".
    """

    plan: TunePlan
    outcome: SearchOutcome
    engine: str
    direct: bool
    seconds: float
    latencies: Sequence[Latencies] = ()
    trouble: str = ""
    when: datetime = field(default_factory=lambda: datetime.now(timezone.utc).astimezone())

    @property
    def winner(self) -> Finalist:
        """The final's record of the setting to use."""
        return self.outcome.of(self.outcome.winner)

    @property
    def default(self) -> Finalist:
        """The final's record of the default."""
        return self.outcome.of(DEFAULT)

    def rate(self, finalist: Finalist, op: Op) -> float | None:
        """GB/s in the final, or before it if there was no final."""
        if finalist.rates.get(op):
            return statistics.median(finalist.rates[op])
        looks = [s for s in self.outcome.samples if (s.setting, s.op) == (finalist.setting, op)]
        most = max((s.nbytes for s in looks), default=0)
        rates = [s.gb_per_s for s in looks if s.nbytes == most]
        return statistics.median(rates) if rates else None

    def block(self) -> dict[str, Any]:
        """The block for `AioHandle(**block["aio"])` and for a DeepSpeed configuration."""
        return {"aio": self.outcome.winner._asdict()}

    def tuned(self, directory: Path) -> Tuned:
        """The record to store for a directory's file system."""
        rates = {
            f"{kind}{op}_gb_per_s": round(rate, 3)
            for kind, finalist in (("", self.winner), ("default_", self.default))
            for op in self.plan.ops
            if (rate := self.rate(finalist, op)) is not None
        }
        return Tuned(
            aio=self.outcome.winner,
            directory=str(directory.resolve()),
            tuned_at=self.when.isoformat(timespec="seconds"),
            nvmeio=nvmeio.__version__,
            **rates,
        )

    def conditions(self) -> list[str]:
        """The conditions that a reader needs to compare the figures with others."""
        plan, outcome, many = self.plan, self.outcome, len(self.plan.directories)
        where = ", ".join(map(str, plan.directories))
        lines = [
            f"{where}: {binary_size(plan.io_size)} a transfer"
            + (f" in each of {counted(many, 'directory')} at once" if many > 1 else "")
            + f", engine {self.engine}; {UNIT}",
            f"{outcome.looked_at} of {outcome.total} settings measured in {self.seconds:.0f} s of "
            f"{plan.budget_s:.0f} s",
            "direct I/O: reads are cold as far as the page cache goes"
            if self.direct
            else "no direct I/O here: everything goes through the page cache",
        ]
        if "write" in plan.ops:
            lines.append("writes go over blocks that were written before, without fsync")
        if outcome.unusable:
            reasons = "; ".join(sorted(set(outcome.unusable.values())))
            lines.append(f"{counted(len(outcome.unusable), 'setting')} cannot be used: {reasons}")
        if self.trouble:
            lines.append(self.trouble)
        return lines


# For people


def render(result: TuneResult, console: Console) -> None:
    """The final as a table, and what follows from it."""
    rows, ops = [], result.plan.ops
    for finalist in result.outcome.finalists:
        is_default = finalist.setting == DEFAULT
        name = in_words(finalist.setting) + (" (default)" if is_default else "")
        compared = not is_default and finalist.ratios
        cells = _rates(result, finalist, "{} GB/s") | {
            "ahead": f"{finalist.ahead:+.1%}" if compared else "",
            "spread": finalist.spread_told if compared else "",
        }
        rows.append(Row(name, cells, "bold green" if finalist is result.winner else None))
    columns = [Column(f"{op} GB/s", 1) for op in ops] + [Column("ahead", 2), Column("spread", 3)]
    with trimmed(console, 160):
        console.print(fitted("setting", columns, rows, console.width))
        console.print()
        console.print(f"Chosen: {result.outcome.verdict}", markup=False, highlight=False)
        for line in result.conditions():
            console.print(line, style="dim", markup=False, highlight=False)
        best = (f"{op} = {rate}" for op, rate in _rates(result, result.winner, "{}").items())
        line = f"Best performance (GB/s): {', '.join(best)}"
        console.print(line, markup=False, highlight=False)


def _rates(result: TuneResult, finalist: Finalist, heading: str) -> dict[str, str]:
    rates = {heading.format(op): result.rate(finalist, op) for op in result.plan.ops}
    return {name: "-" if rate is None else f"{rate:.2f}" for name, rate in rates.items()}


# For programs


def as_json(result: TuneResult) -> dict[str, Any]:
    """The block first, so that the whole loads wherever the block does."""
    winner, outcome, plan = result.winner, result.outcome, result.plan
    return {
        **result.block(),
        "unit": UNIT,
        "verdict": outcome.verdict,
        "best": {
            **{f"{op}_gb_per_s": result.rate(winner, op) for op in plan.ops},
            **{f"default_{op}_gb_per_s": result.rate(result.default, op) for op in plan.ops},
            "ahead": winner.ahead,
            "spread": winner.spread if winner.ratios else None,
            "rounds": len(winner.ratios),
        },
        "search": {
            "directories": [str(path) for path in plan.directories],
            "engine": result.engine,
            "direct": result.direct,
            "io_size": plan.io_size,
            "budget_s": plan.budget_s,
            "seconds": result.seconds,
            "looked_at": outcome.looked_at,
            "total": outcome.total,
            "measurements": len(outcome.samples),
            "grid": plan.grid,
        },
        "machine": machine.versions(),
        "when": result.when.isoformat(timespec="seconds"),
        "conditions": result.conditions(),
        "finalists": [
            {
                "aio": finalist.setting._asdict(),
                "ahead": finalist.ahead,
                "spread": finalist.spread if finalist.ratios else None,
                **{f"{op}_gb_per_s": list(finalist.rates[op]) for op in plan.ops},
            }
            for finalist in outcome.finalists
        ],
        "settings": [
            {"aio": setting._asdict(), **{f"{op}_gb_per_s": rate for op, rate in rates.items()}}
            for setting, rates in medians(outcome.samples).items()
        ],
    }


def medians(samples: Sequence[Sample]) -> dict[Options, dict[Op, float]]:
    """GB/s of every setting that was measured, of all its samples but the probes."""
    rates: dict[Options, dict[Op, list[float]]] = defaultdict(lambda: defaultdict(list))
    for sample in samples:
        if sample.stage != "probe":
            rates[sample.setting][sample.op].append(sample.gb_per_s)
    return {
        setting: {op: statistics.median(values) for op, values in by_op.items()}
        for setting, by_op in rates.items()
    }


class Log:
    """`--log-dir`: every measurement as a line of JSON as it is made, and the result at the end."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._lines = (directory / "measurements.jsonl").open("w")

    def add(self, setting: Options, op: Op, nbytes: int, seconds: float) -> None:
        """One measurement."""
        line = {
            "op": op,
            **setting._asdict(),
            "nbytes": nbytes,
            "seconds": seconds,
            "gb_per_s": nbytes / seconds / 1e9,
        }
        self._lines.write(json.dumps(line) + "\n")
        self._lines.flush()

    def close(self, result: TuneResult | None) -> None:
        """The result, if there is one."""
        self._lines.close()
        if result is not None:
            text = json.dumps(as_json(result), indent=2) + "\n"
            (self._directory / "result.json").write_text(text)

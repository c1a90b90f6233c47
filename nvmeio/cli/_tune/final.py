"""The last comparison: a handful of settings and the default, in rounds, and who wins.

What keeps noise from choosing:

- Each round compares with the default's rate in the same round.
- Nothing counts here that was measured before: whoever came this far by luck has used it up.
- A finalist wins only when it is ahead of the default by more than the spread of its rounds.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from nvmeio.cli._tune.space import DEFAULT, distance
from nvmeio.engines.base import Options

Op = Literal["read", "write"]

LEAST_ROUNDS = 5  # fewer are won by luck too often: three in one case of eight
# A difference that is not worth a setting, however certain it is.
LEAST_AHEAD = 0.01


@dataclass
class Finalist:
    """A setting in the final.

    Attributes:
        setting: Which.
        ratios: For each round, its rate relative to the default's in the same round: the geometric
            mean over the directions.
        rates: Its GB/s in each direction, round by round.
    """

    setting: Options
    ratios: list[float] = field(default_factory=list)
    rates: dict[Op, list[float]] = field(default_factory=lambda: defaultdict(list))

    @property
    def ahead(self) -> float:
        """By how much it is faster than the default: 0.05 stands for 5 %."""
        return statistics.median(self.ratios) - 1 if self.ratios else 0.0

    @property
    def spread_told(self) -> str:
        """`spread` for people: one round has none."""
        return f"{self.spread:.1%}" if len(self.ratios) > 1 else "-"

    @property
    def spread(self) -> float:
        """How far below `ahead` the truth may lie, with 97 % certainty from six rounds on.

        The distance from the median to the lower end of its interval by order statistics (the sign
        test turned round), so a few hiccups do not widen it. With fewer rounds: to the lowest.
        """
        if not self.ratios:
            return math.inf
        ordered, rounds = sorted(self.ratios), len(self.ratios)
        cut = 0
        while _at_most(cut + 1, rounds) <= 0.025:
            cut += 1
        return statistics.median(ordered) - ordered[cut]

    def gb_per_s(self, op: Op) -> float | None:
        """Median of the rounds; None where the direction was not measured."""
        return statistics.median(self.rates[op]) if self.rates.get(op) else None


def _at_most(successes: int, tries: int) -> float:
    """The chance of at most so many heads in as many throws of a coin."""
    ways = sum(math.comb(tries, k) for k in range(min(successes, tries) + 1))
    return float(ways / 2**tries)


Round = dict[Options, dict[Op, float]]


def finalists(settings: Sequence[Options], rounds: Sequence[Round]) -> list[Finalist]:
    """The default first, then the settings, the fastest first.

    Args:
        settings: All but the default.
        rounds: GB/s of all of them and of the default, for each round.
    """
    found = {setting: Finalist(setting) for setting in (DEFAULT, *settings)}
    for rates in rounds:
        for setting, finalist in found.items():
            logs = []
            for op, rate in rates[setting].items():
                finalist.rates[op].append(rate)
                logs.append(math.log(rate / rates[DEFAULT][op]))
            finalist.ratios.append(math.exp(statistics.fmean(logs)))
    default = found.pop(DEFAULT)
    return [default, *sorted(found.values(), key=lambda f: -f.ahead)]


def decide(ranked: Sequence[Finalist]) -> tuple[Options, str]:
    """The setting to use, and why, in a sentence.

    Args:
        ranked: What `finalists` returns.
    """
    default, others = ranked[0], ranked[1:]
    rounds = len(default.ratios)
    proven = [f for f in others if rounds >= LEAST_ROUNDS and f.ahead > max(f.spread, LEAST_AHEAD)]
    if proven:
        best = proven[0]
        near = best.ahead - min(best.spread, LEAST_AHEAD)
        # Among equals, the one that differs least from the default and takes fewest threads.
        chosen = min(
            (f for f in proven if f.ahead >= near),
            key=lambda f: (distance(f.setting), f.setting.intra_op_parallelism, -f.ahead),
        )
        return chosen.setting, (
            f"{chosen.ahead:.1%} faster than the default setting in {rounds} rounds, with a "
            f"spread of {chosen.spread:.1%}"
        )
    if not others and rounds >= LEAST_ROUNDS:
        return DEFAULT, "the default setting: there is no other"
    if rounds < LEAST_ROUNDS:
        return DEFAULT, "the default setting: there was too little time for a final, see --budget"
    best = others[0]
    return DEFAULT, (
        f"the default setting: the best other one is ahead by {best.ahead:.1%}, which does "
        f"not stand out from the spread of {best.spread:.1%} in {rounds} rounds"
    )

"""Who survives: successive halving under a budget. No I/O here: measuring is handed in.

Screening looks at every setting once, with a short transfer; those that may be among the best go on
to a longer one, fewer to a longer one still, until a handful is left. These finalists and the
default then run against each other in rounds of full transfers. What keeps noise from choosing:

- Rates are only compared with the default's, measured again every few settings: a machine that
  gets slower for a while makes both slower.
- Before the final, settings are judged by what their neighbours were measured at too (`model`).
- The final counts nothing that was measured before it: whoever got there by luck has used it up.
- A finalist wins only when it is ahead of the default by more than the spread of its rounds.
"""

from __future__ import annotations

import math
import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from nvmeio.cli._tune.model import Observation, opinions
from nvmeio.cli._tune.space import DEFAULT, distance
from nvmeio.cli._units import GB
from nvmeio.engines.base import Options

Op = Literal["read", "write"]

FINALISTS = 4
LEAST_ROUNDS = 5  # fewer are won by luck too often: three in one case of eight
ENOUGH_ROUNDS = 7
MOST_ROUNDS = 20
REFERENCE_EVERY = 10
LEAST_BYTES = 64 << 20  # eight blocks of 8 MiB: less would not tell depths apart
PROBE_BYTES = 16 << 20
# A difference that is not worth a setting, however certain it is.
LEAST_AHEAD = 0.01


@dataclass(frozen=True)
class Stage:
    """A stage before the final.

    Attributes:
        name: For people.
        keep: How many settings take part at most; None for all.
        share: What part of `io_size` is moved.
        until: The part of the time after which it has to be over.
    """

    name: str
    keep: int | None
    share: float
    until: float


STAGES = (
    Stage("screening", None, 0.25, 0.42),
    Stage("second look", 60, 0.5, 0.58),
    Stage("third look", 16, 1.0, 0.68),
)


class Unusable(Exception):
    """A setting that cannot be measured here, such as one that needs too many AIO events."""


class Measure(Protocol):
    """Moves `nbytes` once with a setting; how many seconds that took."""

    def __call__(self, setting: Options, op: Op, nbytes: int) -> float:
        """May raise `Unusable`."""


@dataclass(frozen=True)
class Sample:
    """One measurement.

    Attributes:
        stage: The name of the stage, "final", or "probe" for what only set the pace.
        relative: Rate relative to the default's at that time; None for the default itself.
    """

    setting: Options
    op: Op
    nbytes: int
    seconds: float
    stage: str
    relative: float | None = None

    @property
    def gb_per_s(self) -> float:
        """The rate."""
        return self.nbytes / self.seconds / GB


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


@dataclass(frozen=True)
class Outcome:
    """What a search found.

    Attributes:
        winner: The setting to use: the default unless another one proved better.
        verdict: Why, in a sentence.
        finalists: The default first, then by throughput.
        samples: Everything that was measured.
        looked_at: How many settings were measured at least once.
        total: How many there are.
        unusable: Settings that cannot be used here, and why.
    """

    winner: Options
    verdict: str
    finalists: list[Finalist]
    samples: list[Sample]
    looked_at: int
    total: int
    unusable: dict[Options, str]

    def of(self, setting: Options) -> Finalist:
        """What the final says of a setting."""
        return next(f for f in self.finalists if f.setting == setting)


class Search:
    """One search.

    Args:
        settings: The default first, then in an order of which every beginning is a fair sample.
        ops: Directions that count, all the same.
        io_size: Bytes of a full transfer.
        measure: Measures; takes its time from the same clock.
        clock: Seconds.
        on_progress: Told what is being done, before each measurement.
        seed: Of the order in which settings take turns.
    """

    def __init__(
        self,
        settings: Sequence[Options],
        ops: Sequence[Op],
        io_size: int,
        measure: Measure,
        clock: Callable[[], float],
        on_progress: Callable[[str], None] = lambda what: None,
        seed: int = 0,
    ) -> None:
        self._settings = list(settings)
        self._ops = list(ops)
        self._io_size = io_size
        self._measure = measure
        self._clock = clock
        self._on_progress = on_progress
        self._random = random.Random(seed)
        self._samples: list[Sample] = []
        self._observations: list[Observation] = []
        self._unusable: dict[Options, str] = {}
        self._seconds_per_byte = 0.0

    def run(self, deadline: float) -> Outcome:
        """Searches until the clock says `deadline`, or until more time would tell nothing more.

        Raises:
            Unusable: The default cannot be used.
        """
        start = self._clock()
        self._set_the_pace()
        candidates = self._settings[1:]
        for stage in STAGES:
            until = start + (deadline - start) * stage.until
            self._visit(self._best(candidates, stage.keep), stage, until)
        return self._decide(self._final(self._best(candidates, FINALISTS), deadline))

    # --- stages -------------------------------------------------------------------------------

    def _set_the_pace(self) -> None:
        """How long things take here; the first pass only warms up."""
        nbytes = min(self._io_size, PROBE_BYTES)
        for _ in range(2):
            taken = [self._sample(DEFAULT, op, nbytes, "probe").seconds for op in self._ops]
        self._seconds_per_byte = sum(taken) / nbytes

    def _visit(self, settings: Sequence[Options], stage: Stage, until: float) -> None:
        """Measures settings in the order given, the default every few of them."""
        least = min(self._io_size, LEAST_BYTES)
        wanted = int(self._io_size * stage.share)
        # Rather a shorter look at everybody than none at some of them.
        visits = len(settings) * (1 + 1 / REFERENCE_EVERY)
        fitting = (until - self._clock()) / max(visits * self._pair_s(1), 1e-12)
        nbytes = max(least, min(wanted, int(fitting) >> 20 << 20))
        recent: dict[Op, list[float]] = {op: [] for op in self._ops}
        for number, setting in enumerate(settings):
            if self._clock() + self._pair_s(nbytes) > until:
                return
            self._on_progress(f"{stage.name} {number + 1}/{len(settings)}")
            if number % REFERENCE_EVERY == 0:
                for op in self._ops:
                    sample = self._sample(DEFAULT, op, nbytes, stage.name)
                    recent[op] = [*recent[op][-2:], sample.gb_per_s]
            try:
                logs = []
                for op in self._ops:
                    reference = statistics.median(recent[op])
                    sample = self._sample(setting, op, nbytes, stage.name, reference)
                    logs.append(math.log(sample.gb_per_s / reference))
            except Unusable as unusable:
                self._unusable[setting] = str(unusable)
                continue
            weight = nbytes / least
            self._observations.append(Observation(setting, statistics.fmean(logs), weight))

    def _best(self, settings: Sequence[Options], keep: int | None) -> list[Options]:
        """Those that may be the fastest, by what is known and how well."""
        usable = [setting for setting in settings if setting not in self._unusable]
        if keep is None:
            return usable
        known = opinions(self._observations, usable)
        self._on_progress("weighing")
        usable.sort(key=lambda setting: -(known[setting].mean + 0.5 * known[setting].deviation))
        return usable[:keep]

    def _final(self, survivors: Sequence[Options], deadline: float) -> list[Finalist]:
        """Rounds in which each finalist runs once and the default at both ends."""
        finalists = [Finalist(setting) for setting in survivors]
        default = Finalist(DEFAULT)
        per_byte = (len(finalists) + 2) * self._pair_s(1)
        # Rather more rounds than longer ones: they are what tells luck from merit.
        fitting = (deadline - self._clock()) / (ENOUGH_ROUNDS * per_byte)
        nbytes = max(min(self._io_size, LEAST_BYTES), min(self._io_size, int(fitting) >> 20 << 20))
        longest = nbytes * per_byte
        for number in range(MOST_ROUNDS):
            begun = self._clock()
            if begun + longest > deadline:
                break
            self._on_progress(f"final, round {number + 1}")
            if not self._round(default, finalists, nbytes, deadline):
                break
            longest = max(longest, self._clock() - begun)
        order = sorted(finalists, key=lambda f: -f.ahead)
        return [default, *order]

    def _round(
        self, default: Finalist, finalists: Sequence[Finalist], nbytes: int, deadline: float
    ) -> bool:
        """One round; False if time ran out in it, and then it does not count."""
        order = [default, *self._random.sample(finalists, len(finalists)), default]
        rates: dict[Options, dict[Op, list[float]]] = {}
        for finalist in order:
            of = rates.setdefault(finalist.setting, {op: [] for op in self._ops})
            for op in self._ops:
                if self._clock() > deadline:
                    return False
                of[op].append(self._sample(finalist.setting, op, nbytes, "final").gb_per_s)
        for finalist in (default, *finalists):
            mine, theirs = rates[finalist.setting], rates[DEFAULT]
            logs = []
            for op in self._ops:
                rate, reference = (statistics.geometric_mean(of[op]) for of in (mine, theirs))
                finalist.rates[op].append(rate)
                logs.append(math.log(rate / reference))
            finalist.ratios.append(math.exp(statistics.fmean(logs)))
        return True

    # --- steps --------------------------------------------------------------------------------

    def _sample(
        self, setting: Options, op: Op, nbytes: int, stage: str, reference: float | None = None
    ) -> Sample:
        seconds = self._measure(setting, op, nbytes)
        relative = None if reference is None else nbytes / seconds / GB / reference
        sample = Sample(setting, op, nbytes, seconds, stage, relative)
        self._samples.append(sample)
        return sample

    def _pair_s(self, nbytes: int) -> float:
        """How long one setting takes, in all directions: from what has been measured lately."""
        recent = self._samples[-8 * len(self._ops) :]
        moved = sum(sample.nbytes for sample in recent)
        if moved:
            per_byte = sum(sample.seconds for sample in recent) * len(self._ops) / moved
            self._seconds_per_byte = per_byte
        return nbytes * self._seconds_per_byte

    def _decide(self, finalists: list[Finalist]) -> Outcome:
        default, others = finalists[0], finalists[1:]
        rounds = len(default.ratios)
        proven = [
            f for f in others if rounds >= LEAST_ROUNDS and f.ahead > max(f.spread, LEAST_AHEAD)
        ]
        winner, verdict = DEFAULT, ""
        if proven:
            best = proven[0]
            near = best.ahead - min(best.spread, LEAST_AHEAD)
            # Among equals, the one that differs least from the default and takes fewest threads.
            chosen = min(
                (f for f in proven if f.ahead >= near),
                key=lambda f: (distance(f.setting), f.setting.intra_op_parallelism, -f.ahead),
            )
            winner = chosen.setting
            verdict = (
                f"{chosen.ahead:.1%} faster than the default setting in {rounds} rounds, with a "
                f"spread of {chosen.spread:.1%}"
            )
        elif rounds < LEAST_ROUNDS:
            verdict = "the default setting: there was too little time for a final, see --budget"
        elif others:
            best = others[0]
            verdict = (
                f"the default setting: the best other one is ahead by {best.ahead:.1%}, which does "
                f"not stand out from the spread of {best.spread:.1%} in {rounds} rounds"
            )
        else:
            verdict = "the default setting: there is no other"
        return Outcome(
            winner,
            verdict,
            finalists,
            self._samples,
            len({o.setting for o in self._observations}) + 1,
            len(self._settings),
            self._unusable,
        )

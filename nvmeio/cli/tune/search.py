"""Which settings to look at, under a budget, and which to use. Measuring is handed in.

optuna's TPE sampler says which setting to look at next, with a short transfer each; the best of
these are looked at again with longer ones, and a handful goes into the final. Rates are only
compared with the default's, measured again every few settings: a machine that gets slower for a
while makes both slower. `decide` chooses among the finalists, the default unless one stands out.
"""

from __future__ import annotations

import math
import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nvmeio.cli._terminal import GB
from nvmeio.cli.measure import Op
from nvmeio.cli.tune.space import DEFAULT, Grid, distance, settings
from nvmeio.engines.base import Options

if TYPE_CHECKING:
    import optuna

Round = dict[Options, dict[Op, float]]  # GB/s of the finalists and of the default

EXPLORE_UNTIL = 0.45  # of the time
STARTUP = 30  # settings that are looked at before the sampler has an opinion
MOST_TRIALS = 1000
FINALISTS = 4
ENOUGH_ROUNDS = 7
MOST_ROUNDS = 20
LEAST_ROUNDS = 5  # fewer are won by luck too often: three in one case of eight
# A difference that is not worth a setting, however certain it is.
LEAST_AHEAD = 0.01
REFERENCE_EVERY = 10
LEAST_BYTES = 64 << 20  # eight blocks of 8 MiB: less would not tell depths apart
PROBE_BYTES = 16 << 20
# A single look counts for less: a setting is taken for as fast as the default until shown.
DOUBT = 0.5


@dataclass(frozen=True)
class SearchStage:
    """A stage between exploring and the final.

    Attributes:
        name: For people.
        keep: How many settings take part at most.
        share: The part of `io_size` that is moved.
        until: The part of the time after which it has to be over.
    """

    name: str
    keep: int
    share: float
    until: float


STAGES = (SearchStage("second look", 40, 0.5, 0.58), SearchStage("third look", 16, 1.0, 0.68))


class UnusableSetting(Exception):
    """A setting that cannot be measured here, such as one that needs too many AIO events."""


@dataclass(frozen=True)
class Sample:
    """One measurement; `stage` is "probe" for what only set the pace."""

    setting: Options
    op: Op
    nbytes: int
    seconds: float
    stage: str

    @property
    def gb_per_s(self) -> float:
        """The rate."""
        return self.nbytes / self.seconds / GB


@dataclass(frozen=True)
class SearchOutcome:
    """The findings of a search.

    Attributes:
        winner: The setting to use: the default unless another one proved better.
        verdict: Why, in a sentence.
        finalists: The default first, then by throughput.
        samples: Everything that was measured.
        looks: The logarithms of each setting's rates relative to the default's.
        total: How many settings there are.
        unusable: Settings that cannot be used here, and why.
        study: optuna's record of the exploration; None where it had not begun.
        complete: Whether the search came to its end.
    """

    winner: Options
    verdict: str
    finalists: list[Finalist]
    samples: list[Sample]
    looks: dict[Options, list[float]]
    total: int
    unusable: dict[Options, str]
    study: optuna.Study | None
    complete: bool

    @property
    def looked_at(self) -> int:
        """How many settings were measured at least once."""
        return len(self.looks) + 1

    def of(self, setting: Options) -> Finalist:
        """The result of the final for a setting."""
        return next(f for f in self.finalists if f.setting == setting)


class Search:
    """One search.

    Args:
        grid: The values of each parameter.
        ops: Directions that count, with equal weight.
        io_size: Bytes of a full transfer.
        measure: Moves so many bytes once with a setting; the seconds that took, by the same clock.
            May raise `UnusableSetting`.
        clock: Seconds.
        on_progress: Called with a description before each measurement.
        seed: The seed of all random choices.
    """

    def __init__(
        self,
        grid: Grid,
        ops: Sequence[Op],
        io_size: int,
        measure: Callable[[Options, Op, int], float],
        clock: Callable[[], float],
        on_progress: Callable[[str], None] = lambda what: None,
        seed: int = 0,
    ) -> None:
        self._grid = grid
        self._settings = settings(grid)
        # Otherwise it is only the reference for the others, and not a requested setting.
        self._default_counts = all(value in grid[name] for name, value in DEFAULT._asdict().items())
        self._ops = list(ops)
        self._io_size = io_size
        self._least = min(io_size, LEAST_BYTES)
        self._measure = measure
        self._clock = clock
        self._on_progress = on_progress
        self._random = random.Random(seed)
        self._seed = seed
        self._study: optuna.Study | None = None
        self._samples: list[Sample] = []
        self._looks: dict[Options, list[tuple[float, float]]] = defaultdict(list)
        self._unusable: dict[Options, str] = {}
        self._references: dict[Op, list[float]] = {op: [] for op in ops}
        self._visits = 0
        self._in_final: list[Options] = []
        self._rounds: list[Round] = []
        self._seconds_per_byte = 0.0

    def run(self, deadline: float) -> SearchOutcome:
        """Searches until the clock says `deadline`, or until more time would tell nothing more.

        Raises:
            UnusableSetting: The default cannot be used.
        """
        start = self._clock()
        self._set_the_pace()
        if len(self._settings) > 1:
            self._explore(start + (deadline - start) * EXPLORE_UNTIL)
        for stage in STAGES:
            self._look_again(stage, start + (deadline - start) * stage.until)
        self._in_final = self._best(FINALISTS)
        self._final(deadline)
        return self.outcome(complete=True)

    def outcome(self, complete: bool = False) -> SearchOutcome:
        """The findings so far."""
        chosen = self._in_final
        if not self._default_counts and not chosen:
            chosen = self._best(1) or self._settings[1:2]
        ranked = finalists(chosen, self._rounds)
        winner, verdict = decide(ranked, self._default_counts)
        if not complete and len(self._rounds) < LEAST_ROUNDS:
            winner = DEFAULT
        if not complete and winner == DEFAULT:
            verdict = "the default setting: interrupted before the search came to its end"
        return SearchOutcome(
            winner,
            verdict,
            ranked,
            self._samples,
            {setting: [value for value, _ in of] for setting, of in self._looks.items() if of},
            len(self._settings),
            self._unusable,
            self._study,
            complete,
        )

    # --- stages -------------------------------------------------------------------------------

    def _set_the_pace(self) -> None:
        """Measure how long things take here; the first pass only warms up."""
        nbytes = min(self._io_size, PROBE_BYTES)
        for _ in range(2):
            taken = [self._sample(DEFAULT, op, nbytes, "probe").seconds for op in self._ops]
        self._seconds_per_byte = sum(taken) / nbytes

    def _explore(self, until: float) -> None:
        """Looks at what optuna proposes, a sample of the grid first, each setting shortly."""
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        sampler = optuna.samplers.TPESampler(seed=self._seed, n_startup_trials=STARTUP)
        self._study = study = optuna.create_study(direction="maximize", sampler=sampler)
        levels = {name: sorted(values) for name, values in self._grid.items()}
        # Levels by their rank, so that TPE knows which are neighbours.
        space: dict[str, optuna.distributions.BaseDistribution] = {
            name: optuna.distributions.IntDistribution(0, len(values) - 1)
            for name, values in levels.items()
        }
        for setting in self._settings[1 : 1 + STARTUP]:
            ranks = {name: levels[name].index(value) for name, value in setting._asdict().items()}
            study.enqueue_trial(ranks)
        nbytes = self._fitting(len(self._settings), 0.25, until)
        for number in range(min(MOST_TRIALS, 4 * len(self._settings))):
            if self._clock() + self._pair_s(nbytes) > until:
                return
            trial = study.ask(space)
            setting = Options(**{name: of[trial.params[name]] for name, of in levels.items()})
            self._on_progress(f"exploring, look {number + 1}")
            value = 0.0 if setting == DEFAULT else self._look(setting, nbytes, "exploring")
            if value is None:
                study.tell(trial, state=optuna.trial.TrialState.PRUNED)  # worse than all others
            else:
                study.tell(trial, value)

    def _look_again(self, stage: SearchStage, until: float) -> None:
        nbytes = self._fitting(stage.keep, stage.share, until)
        chosen = self._best(stage.keep)
        for number, setting in enumerate(chosen):
            if self._clock() + self._pair_s(nbytes) > until:
                return
            self._on_progress(f"{stage.name} {number + 1}/{len(chosen)}")
            self._look(setting, nbytes, stage.name)

    def _final(self, deadline: float) -> None:
        """Rounds in which each finalist runs once and the default at both ends."""
        per_byte = (len(self._in_final) + 2) * self._pair_s(1)
        # Rather more rounds than longer ones: they are what tells luck from merit.
        fitting = (deadline - self._clock()) / (ENOUGH_ROUNDS * per_byte)
        nbytes = max(self._least, min(self._io_size, int(fitting) >> 20 << 20))
        longest = nbytes * per_byte
        for number in range(MOST_ROUNDS):
            begun = self._clock()
            if begun + longest > deadline:
                return
            self._on_progress(f"final, round {number + 1}")
            rates = self._round(nbytes, deadline)
            if rates is None:
                return
            self._rounds.append(rates)
            longest = max(longest, self._clock() - begun)

    def _round(self, nbytes: int, deadline: float) -> Round | None:
        """One round; None if time ran out in it, and then it does not count."""
        others = self._random.sample(self._in_final, len(self._in_final))
        rates: dict[Options, dict[Op, list[float]]] = {}
        for setting in (DEFAULT, *others, DEFAULT):
            of = rates.setdefault(setting, {op: [] for op in self._ops})
            for op in self._ops:
                if self._clock() > deadline:
                    return None
                of[op].append(self._sample(setting, op, nbytes, "final").gb_per_s)
        return {
            setting: {op: statistics.geometric_mean(found) for op, found in of.items()}
            for setting, of in rates.items()
        }

    # --- steps --------------------------------------------------------------------------------

    def _look(self, setting: Options, nbytes: int, stage: str) -> float | None:
        """The logarithm of a setting's rate relative to the default's; None if it is unusable."""
        if setting in self._unusable:
            return None
        if self._visits % REFERENCE_EVERY == 0:
            for op, recent in self._references.items():
                recent.append(self._sample(DEFAULT, op, nbytes, stage).gb_per_s)
                del recent[:-3]
        self._visits += 1
        logs = []
        try:
            for op, recent in self._references.items():
                sample = self._sample(setting, op, nbytes, stage)
                logs.append(math.log(sample.gb_per_s / statistics.median(recent)))
        except UnusableSetting as unusable:
            self._unusable[setting] = str(unusable)
            return None
        value = statistics.fmean(logs)
        self._looks[setting].append((value, nbytes / self._least))
        return value

    def _best(self, keep: int) -> list[Options]:
        """The settings that were fastest so far; longer looks count for more."""

        def merit(setting: Options) -> float:
            looks = self._looks[setting]
            weights = sum(weight for _, weight in looks) + DOUBT
            return sum(value * weight for value, weight in looks) / weights

        return sorted(self._looks, key=merit, reverse=True)[:keep]

    def _sample(self, setting: Options, op: Op, nbytes: int, stage: str) -> Sample:
        sample = Sample(setting, op, nbytes, self._measure(setting, op, nbytes), stage)
        self._samples.append(sample)
        return sample

    def _fitting(self, visits: int, share: float, until: float) -> int:
        """Bytes of a look: rather a shorter look at everybody than none at some of them."""
        all_visits = visits * (1 + 1 / REFERENCE_EVERY)
        fitting = (until - self._clock()) / max(all_visits * self._pair_s(1), 1e-12)
        return max(self._least, min(int(self._io_size * share), int(fitting) >> 20 << 20))

    def _pair_s(self, nbytes: int) -> float:
        """The time for one setting in all directions, from the latest measurements."""
        recent = self._samples[-8 * len(self._ops) :]
        moved = sum(sample.nbytes for sample in recent)
        if moved:
            per_byte = sum(sample.seconds for sample in recent) * len(self._ops) / moved
            self._seconds_per_byte = per_byte
        return nbytes * self._seconds_per_byte


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
        """`spread` for people: one round lacks it."""
        return f"{self.spread:.1%}" if len(self.ratios) > 1 else "-"

    @property
    def spread(self) -> float:
        """The uncertainty of `ahead` downwards, with 97 % certainty from six rounds on.

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


def _at_most(successes: int, tries: int) -> float:
    """The chance of at most so many heads in as many throws of a coin."""
    return float(sum(math.comb(tries, k) for k in range(min(successes, tries) + 1)) / 2**tries)


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


def decide(ranked: Sequence[Finalist], default_counts: bool = True) -> tuple[Options, str]:
    """The setting to use, and why, in a sentence.

    Args:
        ranked: The result of `finalists`.
        default_counts: Whether the default is one of the settings to choose from.
    """
    default, others = ranked[0], ranked[1:]
    rounds = len(default.ratios)
    if not default_counts:
        return _fastest(others, rounds)
    proven = [f for f in others if rounds >= LEAST_ROUNDS and f.ahead > max(f.spread, LEAST_AHEAD)]
    if proven:
        best = proven[0]
        near = best.ahead - min(best.spread, LEAST_AHEAD)
        chosen = _simplest([f for f in proven if f.ahead >= near])
        return chosen.setting, (
            f"{chosen.ahead:.1%} faster than the default setting in {rounds} rounds, with a "
            f"spread of {chosen.spread:.1%}"
        )
    if not others and rounds >= LEAST_ROUNDS:
        return DEFAULT, "the default setting: there was no other candidate"
    if rounds < LEAST_ROUNDS:
        return DEFAULT, "the default setting: there was too little time for a final, see --budget"
    best = others[0]
    return DEFAULT, (
        f"the default setting: the best other one is ahead by {best.ahead:.1%}, which does "
        f"not stand out from the spread of {best.spread:.1%} in {rounds} rounds"
    )


def _fastest(others: Sequence[Finalist], rounds: int) -> tuple[Options, str]:
    """The setting to use of those that were asked for, without the default."""
    if rounds < LEAST_ROUNDS:
        return others[0].setting, (
            "the fastest of the settings that were asked for, by short looks: there was too little "
            "time for a final, see --budget"
        )
    chosen = _simplest([f for f in others if f.ahead >= others[0].ahead - LEAST_AHEAD])
    relation = "faster" if chosen.ahead >= 0 else "slower"
    return chosen.setting, (
        f"the fastest of the settings that were asked for, {abs(chosen.ahead):.1%} {relation} in "
        f"{rounds} rounds than the default setting, which was not"
    )


def _simplest(equals: Sequence[Finalist]) -> Finalist:
    """The one that differs least from the default and takes fewest threads."""
    return min(
        equals, key=lambda f: (distance(f.setting), f.setting.intra_op_parallelism, -f.ahead)
    )

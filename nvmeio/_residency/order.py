"""The order in which units are used: what comes next, and what may go. No I/O here.

Three policies, since three things are known. Inference goes round: after the last unit comes the
first again, a unit that was used is not needed until then, and what follows it is learned (experts,
decoders that follow themselves). Training goes there and back: backward uses the units of forward
in reverse, so what was used last is needed first, and stays for as long as there is room.
Fine-tuning does both by turns, with evaluation in between and regions that are computed again
within backward: what came next is remembered by what had come before, and of what is in memory that
goes first which is needed last (Belady's rule, on what is expected).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

Unit = TypeVar("Unit")
_Used = tuple[Unit, "Phase"]


class Order(Protocol[Unit]):
    """The order of use, as a window asks about it.

    `stays` says whether a unit keeps its memory after its use, until there is need of it.
    """

    stays: bool

    def note(self, unit: Unit, backward: bool) -> None:
        """Note that a unit is used now."""

    def upcoming(self) -> Iterator[Unit]:
        """The units that are expected, the next first; finite."""

    def may_go(self, units: Iterable[Unit], expected: Unit | None) -> Sequence[Unit]:
        """Which of the units that nobody holds may go to make room, the first to go first.

        Room is made for `expected`; None if it is needed now.
        """

    def forget(self) -> None:
        """Note that the pass is over: what is used next does not follow from it."""


class Cyclic(Generic[Unit]):
    """Round and round, as given at first; after a unit comes what followed it the last time."""

    stays = False

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = list(units)
        self._place = {unit: number for number, unit in enumerate(self._units)}
        self._after: dict[Unit, Unit] = {}
        self._last: Unit | None = None

    def note(self, unit: Unit, backward: bool = False) -> None:
        if self._last is not None and self._last is not unit:
            self._after[self._last] = unit
        self._last = unit

    def upcoming(self) -> Iterator[Unit]:
        """The unit that followed the last one, and so on, until a unit comes twice."""
        unit, after = self._last, self._after
        seen = {unit}
        while unit is not None:
            unit = after[unit] if unit in after else self._given_after(unit)
            if unit in seen:
                return
            seen.add(unit)
            yield unit

    def may_go(self, units: Iterable[Unit], expected: Unit | None) -> Sequence[Unit]:
        """Let nothing go: used units went at once, and expected ones are kept for their turn."""
        return ()

    def forget(self) -> None:
        self._last = None

    def _given_after(self, unit: Unit) -> Unit:
        return self._units[(self._place[unit] + 1) % len(self._units)]


class ThereAndBack(Generic[Unit]):
    """The order of the first pass, and back.

    Args:
        tells: Whether a unit has a single place in the order. One that comes at several (tied
            weights) does not tell where the pass is.
        layer_of: For an expert of a mixture, what all experts of its layer have in common; None for
            other units. Tokens need only some of them. Forward expects them where the last pass has
            used all of a layer, and backward those that forward has used.
        layers: How many experts each layer has.
    """

    stays = True

    def __init__(
        self,
        tells: Callable[[Unit], bool],
        layer_of: Callable[[Unit], Hashable | None] = lambda unit: None,
        layers: Mapping[Hashable, int] | None = None,
    ) -> None:
        self._tells = tells
        self._layer_of = layer_of
        self._layers = layers or {}
        self._order: list[Unit] = []
        self._at: dict[Unit, int] = {}
        self._here = 0
        self._step = 1
        self._used: dict[Hashable, list[Unit]] = {}  # experts, by their layer, in this pass
        self._behind: dict[int, dict[Hashable, list[Unit]]] = {}  # all experts, by place
        self._dense: set[Hashable] = set()  # layers of which the last pass has used all experts

    def note(self, unit: Unit, backward: bool = False) -> None:
        returned, self._step = self._step, -1 if backward else 1
        layer = self._layer_of(unit)
        if layer is not None:
            self._note_expert(unit, layer, backward)
            return
        if unit not in self._at:
            self._at[unit] = len(self._order)
            self._order.append(unit)
        if self._tells(unit):
            if not backward and (returned < 0 or self._at[unit] < self._here):
                self._begin_pass()
            self._here = self._at[unit]

    def _note_expert(self, unit: Unit, layer: Hashable, backward: bool) -> None:
        if unit not in self._at:
            self._at[unit] = self._here
            self._behind.setdefault(self._here, {}).setdefault(layer, []).append(unit)
        used = self._used.setdefault(layer, [])
        if not backward and unit not in used:
            used.append(unit)

    def _begin_pass(self) -> None:
        for layer, used in self._used.items():
            if len(used) == self._layers.get(layer):
                self._dense.add(layer)
            else:
                self._dense.discard(layer)
        self._used.clear()

    def upcoming(self) -> Iterator[Unit]:
        at = self._here
        if self._step > 0:
            yield from self._experts_behind(at)
        at += self._step
        while 0 <= at < len(self._order):
            if self._step < 0:
                yield from self._experts_behind(at)
            yield self._order[at]
            if self._step > 0:
                yield from self._experts_behind(at)
            at += self._step

    def _experts_behind(self, at: int) -> Iterator[Unit]:
        """The experts that are expected between a unit and the one after it."""
        for layer, experts in self._behind.get(at, {}).items():
            if self._step < 0:
                yield from reversed(self._used.get(layer, ()))
            elif layer in self._dense:
                yield from experts

    def may_go(self, units: Iterable[Unit], expected: Unit | None) -> Sequence[Unit]:
        """Units behind, the farthest first; for a unit needed now, then those far ahead."""
        far = {unit: self._step * (self._at.get(unit, -1) - self._here) for unit in units}
        behind = sorted((u for u in far if far[u] < 0), key=lambda u: far[u])
        if expected is not None:
            return behind
        return behind + sorted((u for u in far if far[u] >= 0), key=lambda u: -far[u])

    def forget(self) -> None:
        """Do nothing: every pass begins at the front."""


class Limited(Generic[Unit]):
    """Another order that looks less far ahead: `limit` cuts short what it expects."""

    def __init__(
        self, order: Order[Unit], limit: Callable[[Iterator[Unit]], Iterator[Unit]]
    ) -> None:
        self.stays = order.stays
        self.note, self.may_go, self.forget = order.note, order.may_go, order.forget
        self._order = order
        self._limit = limit

    def upcoming(self) -> Iterator[Unit]:
        return self._limit(self._order.upcoming())


class Phase(enum.Enum):
    """The phase of training that a unit is used in."""

    PLAIN = enum.auto()  # forward without autograd
    FORWARD = enum.auto()
    BACKWARD = enum.auto()


class Remembered(Generic[Unit]):
    """After two uses comes what followed them the last time; what is needed last goes first.

    A use is a unit and its phase, so that evaluation does not undo what training taught. Before
    anything was seen: forward as given, backward in reverse, and round again. `may_go` says which
    units may go at all. `recording` is whether autograd is on where the next use is noted.
    """

    stays = True

    def __init__(self, units: Sequence[Unit], may_go: Callable[[Unit], bool]) -> None:
        self._units = list(units)
        self._place = {unit: number for number, unit in enumerate(self._units)}
        self._may_go = may_go
        self._after: dict[tuple[_Used[Unit] | None, _Used[Unit]], _Used[Unit]] = {}
        self._last: tuple[_Used[Unit] | None, _Used[Unit] | None] = (None, None)
        self._coming: dict[Unit, int] | None = None  # the first time that each comes
        self.recording = False

    def note(self, unit: Unit, backward: bool = False) -> None:
        forward = Phase.FORWARD if self.recording else Phase.PLAIN
        used = (unit, Phase.BACKWARD if backward else forward)
        before, last = self._last
        if used == last:
            return
        if last is not None:
            self._after[before, last] = self._after[None, last] = used
        self._last = (last, used)
        self._coming = None

    def upcoming(self) -> Iterator[Unit]:
        """The units that are expected to follow, each once."""
        return iter(self._next_uses())

    def may_go(self, units: Iterable[Unit], expected: Unit | None) -> Sequence[Unit]:
        """Units that are needed last go first; for an expected unit, only those needed after it."""
        coming = self._next_uses()
        never = len(coming)
        mine = [(coming.get(unit, never), unit) for unit in units if self._may_go(unit)]
        least = -1 if expected is None else coming.get(expected, never)
        later = [pair for pair in mine if pair[0] > least]
        return [unit for _, unit in sorted(later, key=lambda pair: -pair[0])]

    def forget(self) -> None:
        self._last = (None, None)
        self._coming = None

    def _next_uses(self) -> dict[Unit, int]:
        if self._coming is None:
            before, last = self._last
            self._coming = {} if last is None else {last[0]: 0}  # backward uses it several times
            seen: set[object] = set()
            while last is not None and (before, last) not in seen:
                seen.add((before, last))
                if len(self._coming) == len(self._units):
                    break
                before, last = last, self._following(before, last)
                self._coming.setdefault(last[0], len(self._coming))
        return self._coming

    def _following(self, before: _Used[Unit] | None, last: _Used[Unit]) -> _Used[Unit]:
        known = self._after.get((before, last)) or self._after.get((None, last))
        if known is not None:
            return known
        unit, phase = last
        at, end = self._place[unit], len(self._units) - 1
        if phase is Phase.BACKWARD:
            return (self._units[at - 1], phase) if at else (unit, Phase.FORWARD)
        if at < end:
            return (self._units[at + 1], phase)
        return (unit, Phase.BACKWARD) if phase is Phase.FORWARD else (self._units[0], phase)

"""The order in which units are used: what comes next, and what may go. No I/O here.

Two policies, since two things are known. Inference goes round: after the last unit comes the first
again, a unit that was used is not needed until then, and what follows it is learned (experts,
decoders that follow themselves). Training goes there and back: backward uses the units of forward
in reverse, so what was used last is needed first, and stays for as long as there is room.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

Unit = TypeVar("Unit")


class Order(Protocol[Unit]):
    """What a window asks.

    Attributes:
        stays: Whether a unit keeps its memory after its use, until there is need of it.
    """

    stays: bool

    def note(self, unit: Unit, backward: bool) -> None:
        """A unit is used now."""

    def upcoming(self) -> Iterator[Unit]:
        """What is expected, the next first; ends."""

    def may_go(self, units: Iterable[Unit], needed: bool) -> Sequence[Unit]:
        """Of these, those that may go to make room, the first first.

        Args:
            units: That nobody holds.
            needed: For one that is needed now; else for one that is expected.
        """

    def forget(self) -> None:
        """The pass that was under way is over: what is used next does not follow from it."""


class Cyclic(Generic[Unit]):
    """Round and round; what followed a unit the last time follows it again.

    Args:
        units: In the order that is guessed before anything was seen.
    """

    stays = False

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = list(units)
        self._place = {unit: number for number, unit in enumerate(self._units)}
        self._after: dict[Unit, Unit] = {}
        self._last: Unit | None = None

    def note(self, unit: Unit, backward: bool = False) -> None:
        """A unit is used now."""
        if self._last is not None and self._last is not unit:
            self._after[self._last] = unit
        self._last = unit

    def upcoming(self) -> Iterator[Unit]:
        """What followed, until that closes a circle."""
        unit = self._last
        seen = {unit}
        while unit is not None:
            unit = self._following(unit)
            if unit in seen:
                return
            seen.add(unit)
            yield unit

    def may_go(self, units: Iterable[Unit], needed: bool) -> Sequence[Unit]:
        """Nothing: what was used went at once, and what is expected is kept for its turn."""
        return ()

    def forget(self) -> None:
        """Nothing follows from the unit that was used last."""
        self._last = None

    def _following(self, unit: Unit) -> Unit:
        known = self._after.get(unit)
        if known is not None:
            return known
        return self._units[(self._place[unit] + 1) % len(self._units)]


class ThereAndBack(Generic[Unit]):
    """In the order of the first pass, and back.

    Args:
        tells: Whether a unit has one place in it. One that comes at several (tied weights) tells
            nothing.
    """

    stays = True

    def __init__(self, tells: Callable[[Unit], bool]) -> None:
        self._tells = tells
        self._order: list[Unit] = []
        self._at: dict[Unit, int] = {}
        self._here = 0
        self._step = 1

    def note(self, unit: Unit, backward: bool = False) -> None:
        """A unit is used now."""
        if unit not in self._at:
            self._at[unit] = len(self._order)
            self._order.append(unit)
        self._step = -1 if backward else 1
        if self._tells(unit):
            self._here = self._at[unit]

    def upcoming(self) -> Iterator[Unit]:
        """What lies ahead in this direction."""
        at = self._here + self._step
        while 0 <= at < len(self._order):
            yield self._order[at]
            at += self._step

    def may_go(self, units: Iterable[Unit], needed: bool) -> Sequence[Unit]:
        """What lies behind, the farthest first; where one is needed, then what lies far ahead."""
        far = {unit: self._step * (self._at.get(unit, -1) - self._here) for unit in units}
        behind = sorted((u for u in far if far[u] < 0), key=lambda u: far[u])
        if not needed:
            return behind
        return behind + sorted((u for u in far if far[u] >= 0), key=lambda u: -far[u])

    def forget(self) -> None:
        """Nothing: a pass that ended early has begun at the front as any other."""

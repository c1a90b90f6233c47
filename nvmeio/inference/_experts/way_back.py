"""Which experts backward comes to next: those of the forward pass, layer by layer from its end.

No I/O here. Layers that backward has passed are needed last, at the end of the next pass, so they
go first.
"""

from __future__ import annotations

from collections.abc import Iterable


class WayBack:
    """The experts that each set needed in the last forward pass, and where backward is."""

    def __init__(self) -> None:
        self._needed: dict[int, dict[int, None]] = {}  # by set, in the order of the pass
        self._last: int | None = None
        self._here: int | None = None  # of backward

    def note(self, number: int, experts: Iterable[int]) -> None:
        """A set was called in forward. One that comes again behind others begins another pass."""
        again = number in self._needed and number != self._last
        if again or self._here is not None:
            self._needed.clear()
            self._here = None
        self._last = number
        self._needed.setdefault(number, {}).update(dict.fromkeys(experts))

    def come_to(self, number: int) -> list[int] | None:
        """Backward is at a set; returns the sets that it left behind, None if it was here before.

        A set that the last forward pass did not call tells nothing.
        """
        if number == self._here or number not in self._needed:
            return None
        self._here = number
        order = list(self._needed)
        return order[order.index(number) + 1 :]

    def before(self, number: int) -> int | None:
        """The set that backward comes to next."""
        order = list(self._needed)
        at = order.index(number) if number in self._needed else 0
        return order[at - 1] if at else None

    def needed(self, number: int) -> list[tuple[int, int]]:
        """A set's experts in the last forward pass, each with the number of the set."""
        return [(number, expert) for expert in self._needed.get(number, ())]

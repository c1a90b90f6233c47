"""As coarse units as a budget has room for: layers, or their leaves, or tiles of these."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from nvmeio.inference._plan.budget import WINDOW, Shares, TooSmall, share_out
from nvmeio.inference._plan.units import Partition

# Nothing smaller is cut: a read of so little costs as much as its round trip.
LEAST_BYTES = 1 << 20
# From one attempt to the next, what a unit may have shrinks to this.
_SHRINK = 0.75
# Of the memory that is left, what weights may take when nobody says how much.
SHARE = 0.5


class Fitted(NamedTuple):
    """Units, and what memory is spent on."""

    parts: Partition
    shares: Shares


def fit(
    whole: Partition,
    cut_to: Callable[[int], Partition],
    budget: int | None,
    window: int | None,
    left: int | None = None,
) -> Fitted:
    """Share a budget out; cut a model finer where it is too small.

    Nothing is cut that has room as it is. What has not is cut as little as a window of three, that
    keeps the drive busy, wants; fewer where nothing else will do.

    Args:
        whole: By layers.
        cut_to: The model in units of so many bytes at most, laid out.
        budget: Bytes for all weights.
        window: Layers in the window; None takes 3, or fewer where the budget wants it.
        left: Bytes of memory that there are, where nobody asked for the budget. If it is more than
            these, their usual share is tried, and then as few of them as will do. Only if nothing
            fits within them, the budget is.

    Raises:
        TooSmall: Nothing fits; says what would do.
    """
    levels = [whole]

    def shared(budget: int | None) -> Fitted:
        try:
            return Fitted(whole, share_out(whole.fixed, whole.units, budget, window))
        except TooSmall as refused:
            if len(levels) == 1:
                levels.extend(_finer(whole, cut_to))
            return _first_that_fits(levels[1:], budget, window, refused)

    if left is not None and budget is not None and budget > left:
        try:
            return shared(int(left * SHARE))
        except TooSmall as refused:
            if refused.least <= left:
                return shared(refused.least)
    return shared(budget)


def _finer(whole: Partition, cut_to: Callable[[int], Partition]) -> list[Partition]:
    """Each partition that is another one than that before it."""
    found = [whole]
    most = max((unit.needed_bytes for unit in whole.units if unit.modules), default=0)
    while (most := int(most * _SHRINK)) >= LEAST_BYTES:
        parts = cut_to(most)
        if [u.name for u in parts.units] != [u.name for u in found[-1].units]:
            found.append(parts)
    return found[1:]


def _first_that_fits(
    finer: Sequence[Partition], budget: int | None, window: int | None, too_small: TooSmall
) -> Fitted:
    least = too_small.least
    for layers in [window] if window is not None else range(WINDOW, 0, -1):
        for parts in finer:
            try:
                return Fitted(parts, share_out(parts.fixed, parts.units, budget, layers))
            except TooSmall as refused:
                least = min(least, refused.least)
    if least == too_small.least:
        raise too_small
    raise TooSmall(budget, too_small.layers, too_small.least, least) from None

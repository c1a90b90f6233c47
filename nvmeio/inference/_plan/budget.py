"""The memory of weights: the units that stay, the width of the window, the size of units.

Units are as coarse as the budget has room for: layers, or their leaves, or tiles of these. Pure
arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from nvmeio import _checks
from nvmeio._memory.system import huge_page_bytes
from nvmeio._pages import round_up
from nvmeio.inference._plan.units import Partition, Unit

# Layers in the window unless a number is asked for: one in use, one arriving, one in the queue.
WINDOW = 3


# Nothing smaller is cut: a read of so little costs as much as its round trip.
LEAST_BYTES = 1 << 20
# From one attempt to the next, a unit's limit shrinks to this.
_SHRINK = 0.75
# The share of the available memory that weights may take by default.
SHARE = 0.5


class BudgetTooSmall(ValueError):
    """A budget does not hold the bytes that are needed at once.

    Args:
        budget: Bytes.
        layers: In the window.
        least: Bytes that would do.
        in_tiles: Those that would do where matrices are cut, if these are fewer.

    Attributes:
        layers: As given.
        least: The fewest bytes that would do.
    """

    def __init__(
        self, budget: int | None, layers: int, least: int, in_tiles: int | None = None
    ) -> None:
        cut = ""
        if in_tiles is not None:
            cut = f"with matrices in tiles, {in_tiles} bytes would do; with whole layers, "
        super().__init__(
            f"resident_bytes={budget} is too small: {cut}the parts outside of the layers, a window "
            f"of {layers} layer{'s' if layers > 1 else ''} and the room for conversions need "
            f"{least} bytes"
        )
        self.layers = layers
        self.least = least if in_tiles is None else in_tiles


class ExpertNeeds(NamedTuple):
    """Bytes for the experts of a mixture: those that one call may need at once, and all.

    `widened` are those of the largest matrix that is widened for a product.
    """

    least: int
    most: int
    widened: int = 0


NO_EXPERTS = ExpertNeeds(0, 0)


class Shares(NamedTuple):
    """The parts of the budget, in bytes.

    Attributes:
        window: The slots of streamed units; 0 if everything stays.
        resident: Units that stay, the fixed parts included.
        work: Room for converted weights of one unit.
        layers: How many of the largest streamed unit the window holds.
        others: Room for what only other ranks want.
        experts: The experts of a mixture that are kept over all layers.
        products: Room for a matrix that is widened for a product.
        host_experts: On a GPU: memory of the host for experts; not in `total`.
    """

    window: int
    resident: int
    work: int
    layers: int
    others: int = 0
    experts: int = 0
    products: int = 0
    host_experts: int = 0

    @property
    def total(self) -> int:
        beside = self.work + self.others + self.products
        return self.window + self.resident + self.experts + beside


def check_numbers(window: int | None, resident_bytes: int | None, host_bytes: int | None) -> None:
    """Check numbers that a user gave: None, or an int from 1 on."""
    numbers = {"window": window, "resident_bytes": resident_bytes, "host_bytes": host_bytes}
    for name, value in numbers.items():
        if value is not None:
            _checks.integer(name, value, 1)


def share_out(
    fixed: Unit,
    units: Sequence[Unit],
    budget: int | None,
    window: int | None,
    others: int = 0,
    experts: ExpertNeeds = NO_EXPERTS,
) -> Shares:
    """Decide which units stay, and mark them (`Unit.resident`).

    As many layers as fit stay, evenly spaced: while they compute, the drive brings those in
    between. An output head is kept before any layer, for it would widen the window; an embedding
    last, for reading its rows costs next to nothing. Experts get what is left then: every token
    needs all of the others, and a few of these.

    Args:
        fixed: Stays in any case.
        units: In order.
        budget: Bytes for all weights; None keeps nothing but the fixed parts.
        window: Layers in the window, at least 1; None takes 3, or fewer where the budget wants it.
        others: Room for what only other ranks want.
        experts: The needs of the experts of a mixture.

    Raises:
        BudgetTooSmall: The fixed parts, a window of one layer and a layer's experts do not fit.
    """
    kept_experts = experts.least
    products = max(experts.widened, *(unit.widened_bytes for unit in (fixed, *units)))
    others += kept_experts + products  # as one sum, until the rest is known
    wider = [window] if window is not None else [WINDOW, 2, 1]
    least = 0
    for layers in wider:
        shares = _shares(fixed, units, frozenset(), layers, others)
        least = shares.total
        everything = _shares(fixed, units, _that_may_stay(units), layers, others)
        fits = budget is None or shares.total <= budget
        if fits or (budget is not None and everything.total <= budget):
            break
    else:
        raise BudgetTooSmall(budget, wider[-1], least)
    kept = frozenset() if budget is None else _choose(fixed, units, budget, layers, others)
    for number, unit in enumerate(units):
        unit.resident = number in kept
    shares = _shares(fixed, units, kept, layers, others)
    if budget is not None:
        kept_experts = min(experts.most, experts.least + budget - shares.total)
    others -= experts.least + products
    return shares._replace(others=others, experts=kept_experts, products=products)


def _choose(
    fixed: Unit, units: Sequence[Unit], budget: int, window: int, others: int
) -> frozenset[int]:
    def fits(kept: frozenset[int]) -> bool:
        return _shares(fixed, units, kept, window, others).total <= budget

    everything = _that_may_stay(units)
    if fits(everything):
        return everything
    heads = [n for n, unit in enumerate(units) if not unit.is_layer and unit.modules]
    layers = [n for n, unit in enumerate(units) if unit.is_layer]
    rows = [n for n, unit in enumerate(units) if not unit.modules and not unit.tiles]
    kept: frozenset[int] = frozenset()
    for number in heads:
        if fits(kept | {number}):
            kept |= {number}
    for count in range(len(layers), 0, -1):
        spread = frozenset(layers[(2 * i + 1) * len(layers) // (2 * count)] for i in range(count))
        if fits(kept | spread):
            kept |= spread
            break
    for number in rows:
        if fits(kept | {number}):
            kept |= {number}
    return kept


def _that_may_stay(units: Sequence[Unit]) -> frozenset[int]:
    """All units but those that are read as tiles."""
    return frozenset(number for number, unit in enumerate(units) if not unit.tiles)


def _shares(
    fixed: Unit, units: Sequence[Unit], kept: frozenset[int], window: int, others: int
) -> Shares:
    streamed = [unit.streamed_bytes for n, unit in enumerate(units) if n not in kept]
    slots = [nbytes for nbytes in streamed if nbytes]
    layers = min(window, len(slots))
    resident = fixed.layout.nbytes if fixed.weights else 0
    # The fixed parts' converted weights are kept as the conversion leaves them.
    resident += fixed.converted_bytes
    resident += sum(units[n].layout.nbytes for n in kept)
    work = max((unit.converted_bytes for unit in units if unit.modules), default=0)
    work = max(work, max((units[n].converted_bytes for n in kept), default=0))
    return Shares(_arena(layers * max(slots, default=0)), _arena(resident), work, layers, others)


def _arena(nbytes: int) -> int:
    """Memory that a mapping of so many bytes takes; see `MemoryMapping`."""
    huge = huge_page_bytes()
    return nbytes if nbytes < 8 * huge else round_up(nbytes, huge)


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
    experts: ExpertNeeds = NO_EXPERTS,
) -> Fitted:
    """Share a budget out; cut a model finer where it is too small.

    Nothing is cut that has room as it is. Otherwise it is cut as little as a window of three needs,
    which keeps the drive busy; a smaller window where nothing else will do.

    Args:
        whole: By layers.
        cut_to: The model in units of so many bytes at most, laid out.
        budget: Bytes for all weights.
        window: Layers in the window; None takes 3, or fewer where the budget wants it.
        left: Free bytes of memory, if nobody asked for the budget. If it is more than these, their
            usual share is tried, then as few of them as will do, and only then the budget.
        experts: The needs of the experts of a mixture.

    Raises:
        BudgetTooSmall: Nothing fits; says what would do.
    """
    levels = [whole]

    def shared(budget: int | None) -> Fitted:
        try:
            shares = share_out(whole.fixed, whole.units, budget, window, experts=experts)
            return Fitted(whole, shares)
        except BudgetTooSmall as refused:
            if len(levels) == 1:
                levels.extend(_finer(whole, cut_to))
            return _first_that_fits(levels[1:], budget, window, experts, refused)

    if left is not None and budget is not None and budget > left:
        try:
            return shared(int(left * SHARE))
        except BudgetTooSmall as refused:
            if refused.least <= left:
                return shared(refused.least)
    return shared(budget)


def _finer(whole: Partition, cut_to: Callable[[int], Partition]) -> list[Partition]:
    """Finer and finer partitions, each different from the one before."""
    found = [whole]
    most = max((unit.needed_bytes for unit in whole.units if unit.modules), default=0)
    while (most := int(most * _SHRINK)) >= LEAST_BYTES:
        parts = cut_to(most)
        if [u.name for u in parts.units] != [u.name for u in found[-1].units]:
            found.append(parts)
    return found[1:]


def _first_that_fits(
    finer: Sequence[Partition],
    budget: int | None,
    window: int | None,
    experts: ExpertNeeds,
    too_small: BudgetTooSmall,
) -> Fitted:
    least = too_small.least
    for layers in [window] if window is not None else range(WINDOW, 0, -1):
        for parts in finer:
            try:
                shares = share_out(parts.fixed, parts.units, budget, layers, experts=experts)
                return Fitted(parts, shares)
            except BudgetTooSmall as refused:
                least = min(least, refused.least)
    if least == too_small.least:
        raise too_small
    raise BudgetTooSmall(budget, too_small.layers, too_small.least, least) from None

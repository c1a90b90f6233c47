"""Which rank reads what of a unit, and in what order ranks gather units. No I/O here."""

from __future__ import annotations

from collections.abc import Sequence

from nvmeio._files.plan import PAGE_BYTES, round_down
from nvmeio._formats.packed_index import cuts
from nvmeio.inference._plan.slot_layout import Read


def shares(reads: Sequence[Read], ranks: int) -> list[tuple[Read, ...]]:
    """The reads of a unit in even parts, one a rank; all together they are all of it, once.

    A read is cut at whole pages of itself, so that direct I/O stays direct.
    """
    found: list[list[Read]] = [[] for _ in range(ranks)]
    places = cuts(sum(read.end - read.start for read in reads), ranks)
    before = 0
    for read in reads:
        nbytes = read.end - read.start
        low = 0
        for rank in range(ranks):
            high = min(max(places[rank + 1] - before, 0), nbytes)
            if high < nbytes:
                high = round_down(high, PAGE_BYTES)
            if low < high:
                found[rank].append(
                    Read(read.file, read.start + low, read.start + high, read.at + low)
                )
                low = high
        before += nbytes
    return [tuple(each) for each in found]


def choose(wanted: Sequence[int], count: int) -> int:
    """The unit that is gathered next, where ranks wait for different ones.

    Models go round, so ranks are together again soonest if all wait for those that are behind on
    the shortest arc that holds them all.

    Args:
        wanted: Numbers of units, at least one.
        count: How many units there are.
    """
    places = sorted(set(wanted))
    gaps = [
        ((later - place) % count or count, later)
        for place, later in zip(places, places[1:] + places[:1], strict=True)
    ]
    return max(gaps, key=lambda gap: (gap[0], -gap[1]))[1]

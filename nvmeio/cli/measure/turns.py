"""Who runs when: in turns, so that whatever else the machine does hits everybody."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

Contender = TypeVar("Contender")


def order(contenders: Sequence[Contender], loop: int, loops: int) -> list[Contender]:
    """The order of one loop: each begins with somebody else.

    The starting points are spread over the whole list, and odd loops run backwards, so that nobody
    always follows the same neighbour (whose dirty host pages it would pay for).
    """
    count = len(contenders)
    step = max(1, count // max(1, loops))
    first = loop * step % count if count else 0
    turned = [*contenders[first:], *contenders[:first]]
    return turned[::-1] if loop % 2 else turned

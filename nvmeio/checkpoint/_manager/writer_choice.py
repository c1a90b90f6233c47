"""Which ranks write a file that all of them have: all, one of each machine, or so many."""

from __future__ import annotations

import contextlib
import itertools
import socket
from collections.abc import Sequence
from pathlib import Path

# Of the kernel that runs, so the same in all containers of a machine, whatever their host names.
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def checked(writers: str | int, layout: str, ranks: int) -> str | int:
    """Writers that there can be.

    Args:
        writers: "all", "per_node" or a number, as for `Checkpointer`.
        layout: Of the Checkpointer.
        ranks: How many there are.

    Raises:
        TypeError, ValueError: It is none of these, or there are not so many ranks.
    """
    if isinstance(writers, bool) or not isinstance(writers, (str, int)):
        raise TypeError(
            f"writers must be 'all', 'per_node' or a number of ranks, not {writers!r:.80}"
        )
    if isinstance(writers, str):
        if writers not in ("all", "per_node"):
            raise ValueError(
                f"writers must be 'all', 'per_node' or a number of ranks, not {writers!r:.80}"
            )
    elif not 1 <= writers <= ranks:
        raise ValueError(
            f"writers must be 1 to {ranks}, the number of ranks of process_group, not {writers}"
        )
    if layout != "one" and writers != "all":
        raise ValueError(
            f"writers={writers!r} is for layout='one': with {layout!r} each rank has a state of "
            "its own to write"
        )
    return writers


def node() -> str:
    """The machine that this process is on, the same text for all its ranks."""
    with contextlib.suppress(OSError):
        return _BOOT_ID.read_text(encoding="ascii").strip()
    return socket.gethostname()


def chosen(writers: str | int, nodes: Sequence[str]) -> list[int]:
    """The ranks that write, ascending; rank 0 is one of them.

    Args:
        writers: As `checked` returned it.
        nodes: Of each rank, by rank.
    """
    ranks = len(nodes)
    if writers == "per_node":
        return [rank for rank, each in enumerate(nodes) if each not in nodes[:rank]]
    count = ranks if isinstance(writers, str) else writers
    return [number * ranks // count for number in range(count)]  # far apart: on several nodes


def shares(pages: int, ranks: int, writing: Sequence[int]) -> list[tuple[int, int]]:
    """The [start, end) pages of each rank: even ones for those that write, nothing for others."""
    counts = [0] * ranks
    for number, rank in enumerate(writing):
        counts[rank] = pages * (number + 1) // len(writing) - pages * number // len(writing)
    return list(itertools.pairwise([0, *itertools.accumulate(counts)]))

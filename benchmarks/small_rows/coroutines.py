"""4 KiB reads, one for each of 32 coroutines at a time, beside fio at that depth."""

from __future__ import annotations

from functools import partial

from _lines import Line, at_least, compare, kiops
from _measure import Contender
from _session import Session, calling
from peers import fio
from peers._loops import HAS_UVLOOP
from rows.random_reads import BLOCK, COUNT, DEPTH, QUICK_COUNT

# The file is one of the handle's, or one that any handle takes.
WAYS = ("handle.open", "nvmeio.open")


def measure(session: Session) -> list[Line]:
    """The row `random` of compare_peers.py has more peers; this one fio alone, in less time."""
    (path,) = session.files(1)
    count = min(QUICK_COUNT if session.quick else COUNT, session.size // BLOCK)
    contenders: list[Contender] = []
    worker = session.worker("nvmeio")
    if worker is not None:
        reads: dict[str, object] = {"nbytes": session.size, "count": count, "block": BLOCK}
        reads |= {"path": str(path), "depth": DEPTH, "slices": True}
        for way in WAYS:
            bound = way == "handle.open"
            contenders.append(calling(way, worker, "random_reads", bound=bound, **reads))
    if not HAS_UVLOOP:
        session.skip("uvloop", "not installed; asyncio's own loop runs", "pip install uvloop")
    if session.has_fio():
        run = partial(fio.random_blocks, path, session.size, count, BLOCK, DEPTH)
        contenders.append(Contender("fio", run))
    samples = session.measure("coroutines", contenders)
    loop = "uvloop" if HAS_UVLOOP else "asyncio's loop"
    return [
        compare(
            "coroutines",
            f"{count:,} reads of 4 KiB by {DEPTH} coroutines, {loop}, {way}",
            f"fio libaio, depth {DEPTH}",
            "kIOPS",
            kiops,
            samples.get(way, []),
            samples.get("fio", []),
            at_least(0.85),
            f"both over {DEPTH * BLOCK >> 10} KiB of memory",
        )
        for way in WAYS
    ]

"""4 KiB random reads, 32 in flight: the cost of one small operation, awaited."""

from __future__ import annotations

from functools import partial

from _lines import Line, at_least, best, compare, kiops
from _measure import Contender
from _session import Session, calling
from peers import fio
from peers._loops import HAS_UVLOOP

ROW = "random"
BLOCK = 4096
DEPTH = 32
COUNT = 1 << 16
QUICK_COUNT = 1 << 13
WORK = "4 KiB random reads, 32 in flight"


def measure(session: Session) -> list[Line]:
    """Everybody reads the same number of distinct blocks; all but fio in the same order."""
    (path,) = session.files(1)
    count = min(QUICK_COUNT if session.quick else COUNT, session.size // BLOCK)
    common: dict[str, object] = {
        "path": str(path),
        "nbytes": session.size,
        "count": count,
        "block": BLOCK,
        "depth": DEPTH,
    }
    contenders: list[Contender] = []
    nvmeio = session.worker("nvmeio")
    if nvmeio is not None:
        for name, slices, bound in (
            ("nvmeio", True, True),
            ("nvmeio, 32 tensors", False, True),
            ("nvmeio, nvmeio.open", True, False),
        ):
            reads = calling(name, nvmeio, "random_reads", slices=slices, bound=bound, **common)
            contenders.append(reads)
    if not HAS_UVLOOP:
        session.skip("uvloop", "not installed; asyncio's own loop runs", "pip install uvloop")
    if session.has_fio():
        run = partial(fio.random_blocks, path, session.size, count, BLOCK, DEPTH)
        contenders.append(Contender("fio libaio", run))
    caio = session.worker("caio")
    backends: list[str] = []
    if caio is not None:
        backends = caio.call("backends")
        for backend in backends:
            name = f"caio {backend}"
            contenders.append(calling(name, caio, "random_reads", backend=backend, **common))
    pool = session.worker("thread pool")
    if pool is not None:
        contenders.append(calling("thread pool", pool, "random_reads", **common))

    samples = session.measure("random reads", contenders)
    ours = samples.get("nvmeio", [])
    names = [f"caio {backend}" for backend in backends]
    best_caio, caio_samples = best(samples, names, kiops, "caio")
    others = [(name, samples[name], None, "") for name in names if name != best_caio]
    apart = samples.get("nvmeio, 32 tensors", [])
    unbound = samples.get("nvmeio, nvmeio.open", [])
    loop = "uvloop" if HAS_UVLOOP else "asyncio's loop"
    return [
        compare(ROW, f"{WORK}, {loop}", peer, "kIOPS", kiops, ours, theirs, target, note)
        for peer, theirs, target, note in (
            ("fio libaio", samples.get("fio libaio", []), at_least(0.9), ""),
            (f"{best_caio}, page cache", caio_samples, at_least(2), "cold cache, no O_DIRECT"),
            *others,
            ("thread pool", samples.get("thread pool", []), at_least(3), "preadv, O_DIRECT"),
            ("nvmeio, 32 tensors instead of slices", apart, None, "for information"),
            ("nvmeio, nvmeio.open instead of handle.open", unbound, None, "for information"),
        )
    ]

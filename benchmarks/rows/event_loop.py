"""nvmeio against itself: reads while Python is busy, and the loop while reads go on."""

from __future__ import annotations

from pathlib import Path

from _lines import Line, at_least, at_most, compare, gb_per_s, p99_ms
from _measure import Sample, median
from _session import Session, calling

DISTURBED_FILES = 8
DISTURBED_DEPTH = 32
LAG_FILES = 4
LAG_OPERATIONS = 64
IDLE_S = 2.0


def measure_disturbed(session: Session) -> list[Line]:
    """Row `disturbed`: eight reads at once, so that 100 ms are small against the whole."""
    paths = [str(path) for path in session.files(DISTURBED_FILES)]
    with session.fresh_worker("nvmeio") as worker:
        samples: dict[str, list[Sample]] = {}
        if (
            worker is not None
            and session.attempt("nvmeio", worker, "use_queue_depth", queue_depth=DISTURBED_DEPTH)
            and session.attempt("nvmeio", worker, "prepare", locked=True, nbytes=session.size)
            and session.attempt("nvmeio", worker, "check", path=paths[0])
        ):
            samples = session.measure(
                "reads while Python is busy",
                [
                    calling(how, worker, "read_disturbed", paths=paths, disturbance=how)
                    for how in ("idle", "blocked loop", "GIL hog")
                ],
            )
    idle = samples.get("idle", [])
    note = f"{DISTURBED_FILES} reads at once; up to 0.2 s of blocking counted as I/O"
    return [
        compare(
            "disturbed",
            f"read at depth {DISTURBED_DEPTH}, {what}",
            "nvmeio, idle loop",
            "GB/s",
            gb_per_s,
            samples.get(how, []),
            idle,
            at_least(0.9),
            remark,
        )
        for how, what, remark in (
            ("blocked loop", "loop blocked 100 ms at a time", note),
            ("GIL hog", "a thread hogs the GIL", f"{DISTURBED_FILES} reads at once"),
        )
    ]


def measure_lag(session: Session) -> list[Line]:
    """Row `lag`: a 1 ms timer's lateness while 4 GiB move in 64 operations."""
    paths: list[Path] = session.files(LAG_FILES)
    with session.fresh_worker("nvmeio") as worker:
        samples: dict[str, list[Sample]] = {}
        if worker is not None and session.attempt(
            "nvmeio", worker, "prepare", locked=True, nbytes=LAG_FILES * session.size
        ):
            common: dict[str, object] = {
                "paths": [str(path) for path in paths],
                "count": LAG_OPERATIONS,
            }
            samples = session.measure(
                "event-loop lag",
                [
                    calling("read", worker, "loop_lag", write=False, **common),
                    calling("overwrite", worker, "loop_lag", write=True, **common),
                    calling("idle", worker, "idle_lag", seconds=IDLE_S),
                ],
            )
    idle = samples.get("idle", [])
    return [
        compare(
            "lag",
            f"loop lag p99, {kind} in {LAG_OPERATIONS} operations",
            "the same loop, idle",
            "ms",
            p99_ms,
            samples.get(kind, []),
            idle,
            at_most(2.0, of="value"),
            _spread(samples.get(kind, [])),
        )
        for kind in ("read", "overwrite")
    ]


def _spread(series: list[Sample]) -> str:
    if not series:
        return ""
    middle = median([sample.extra["p50_ms"] for sample in series]) or 0.0
    worst = max(sample.extra["worst_ms"] for sample in series)
    return f"median {middle:.2f} ms, worst of all {worst:.2f} ms"

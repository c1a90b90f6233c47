"""Row `lag`: a 1 ms timer's lateness while passes are awaited beside it."""

from __future__ import annotations

from _lines import Line, at_most, compare, p99_ms
from _session import Session, calling

from inference_rows._model import PASSES, streaming


def measure(session: Session) -> list[Line]:
    ready = streaming(session)
    if ready is None:
        return []
    worker, directory = ready
    samples = session.measure(
        "event-loop lag",
        [
            calling("awaited", worker, "lag", directory=str(directory), share=8, count=PASSES),
            calling("idle", worker, "idle_lag", seconds=2.0),
        ],
    )
    return [
        compare(
            "lag",
            "loop lag p99 beside passes",
            "the same loop, idle",
            "ms",
            p99_ms,
            samples["awaited"],
            samples["idle"],
            at_most(5.0, of="value"),
        )
    ]

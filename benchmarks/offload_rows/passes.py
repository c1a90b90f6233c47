"""Row `passes`: forward and backward with parameters on disk."""

from __future__ import annotations

from _lines import Line, at_most, compare
from _session import Session, calling

from offload_rows import _limits
from offload_rows.steps import seconds


def measure(session: Session) -> list[Line]:
    worker = session.worker("offload")
    if worker is None or not session.attempt(
        "offload",
        worker,
        "prepare_module",
        directory=str(session.directory),
        nbytes=session.size // 3,
    ):
        return []
    nbytes = int(worker.call("module_bytes"))
    first, second = session.files(2)
    with _limits.contenders(session, (first, second), nbytes, 0) as drives:
        samples = session.measure(
            "forward and backward",
            [
                calling("nvmeio", worker, "passes"),
                calling("in memory", worker, "passes_in_memory"),
                *drives,
            ],
        )
    ours, memory = samples["nvmeio"], samples["in memory"]
    name, drive = _limits.fastest(samples, [each.name for each in drives])
    both = [max(a.seconds, b.seconds) for a, b in zip(drive, memory, strict=False)]
    work = "forward and backward, a quarter of the parameters in memory"
    return [
        Line(
            "passes",
            work,
            f"the slower of {name} and computing in memory",
            "s",
            [s.seconds for s in ours],
            both,
            at_most(1.1),
            f"{nbytes / 1e9:.2f} GB read in each",
        ),
        compare("passes", work, "in memory", "s", seconds, ours, memory),
    ]

"""Row `passes`: forward and backward with parameters on disk."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

from _lines import Line, at_most, compare
from _measure import Contender, Sample
from _session import Session, calling

from nvmeio.cli.measure.worker import Worker
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
        at_once = [
            Contender(f"{drive.name}, in memory beside", partial(_at_once, worker, drive))
            for drive in drives
        ]
        samples = session.measure(
            "forward and backward",
            [
                calling("nvmeio", worker, "passes"),
                calling("in memory", worker, "passes_in_memory"),
                *drives,
                *at_once,
            ],
        )
    ours, memory = samples["nvmeio"], samples["in memory"]
    name, drive = _limits.fastest(samples, [each.name for each in drives])
    _, reading_beside = _limits.fastest(samples, [each.name for each in at_once])
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
            f"{nbytes / 1e9:.2f} GB read in each; each of the two has the machine to itself",
        ),
        compare(
            "passes",
            work,
            "computing in memory while fio reads as much",
            "s",
            seconds,
            ours,
            reading_beside,
            at_most(1.1),
            "until both are done; what the two take from each other is in it",
        ),
        compare("passes", work, name, "s", seconds, ours, drive),
        compare("passes", work, "in memory", "s", seconds, ours, memory),
    ]


def _at_once(worker: Worker, drive: Contender) -> Sample:
    """A pass in memory while a drive's contender reads; the time of the slower."""
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(drive.run)
        computing: Sample = worker.call("passes_in_memory")
        return Sample(seconds=max(computing.seconds, reading.result().seconds))

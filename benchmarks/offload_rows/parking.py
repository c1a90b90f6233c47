"""Row `parking`: a model and its optimizer leave memory and come back, beside the drive alone."""

from __future__ import annotations

from functools import partial

from _lines import Line, at_least, compare
from _measure import Sample
from _session import Session, calling


def gb_per_s(sample: Sample) -> float:
    return sample.nbytes / sample.seconds / 1e9


def freed_mib(sample: Sample) -> float:
    return sample.extra.get("freed_mib", sample.nbytes / (1 << 20))


def measure(session: Session) -> list[Line]:
    worker = session.worker("parking")
    if worker is None or not session.attempt(
        "parking",
        worker,
        "prepare",
        directory=str(session.directory),
        nbytes=session.size // 3,
    ):
        return []
    nbytes = int(worker.call("parked_bytes"))
    settle = partial(worker.call, "settle")
    samples = session.measure(
        "parking",
        [
            calling("park", worker, "park", before=partial(settle, parked=False)),
            calling("restore", worker, "restore", before=partial(settle, parked=True)),
            calling("write", worker, "write", nbytes=nbytes),
            calling("read", worker, "read", nbytes=nbytes),
        ],
    )
    park, restore, write, read = (samples[n] for n in ("park", "restore", "write", "read"))
    what = f"{nbytes / 1e6:.0f} MB of weights, gradients and AdamW's state"
    alone = "a handle alone"
    note = "a new file and fdatasync on both sides; new memory where it is read"
    return [
        compare("parking", "park", alone, "GB/s", gb_per_s, park, write, at_least(0.5), note),
        compare("parking", "restore", alone, "GB/s", gb_per_s, restore, read, at_least(0.5), what),
        compare("parking", "memory given back", "bytes written", "MiB", freed_mib, park, write),
    ]

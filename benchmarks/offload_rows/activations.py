"""Row `activations`: a step with what autograd saves on the drive, beside computing it again."""

from __future__ import annotations

from _lines import Line, at_most, compare
from _measure import Sample, median
from _session import Session, calling

from offload_rows.steps import seconds


def peak_mib(sample: Sample) -> float:
    return sample.extra["peak_mib"]


def measure(session: Session) -> list[Line]:
    worker = session.worker("activations")
    if worker is None or not session.attempt(
        "activations",
        worker,
        "prepare",
        directory=str(session.directory),
        nbytes=session.size // 6,
    ):
        return []
    sizes = worker.call("sizes")
    samples = session.measure(
        "forward and backward",
        [
            calling("nvmeio", worker, "on_drive"),
            calling("checkpointing", worker, "checkpointed"),
            calling("in memory", worker, "in_memory"),
        ],
    )
    ours, again, memory = (samples[name] for name in ("nvmeio", "checkpointing", "in memory"))
    work = "forward and backward, activations on the drive"
    computed_s = median([seconds(each) for each in memory]) or 0.0
    needed = sizes["written"] / 1e9 / computed_s if computed_s else 0.0
    note = (
        f"{sizes['written'] / 1e6:.0f} MB written and read, {3 * sizes['flops'] / 1e9:.0f} GFLOP: "
        f"the drive is hidden from {3 * needed:.2f} GB/s of writing on"
    )
    held = "memory of the same, at most"
    window = f"a window of {sizes['window'] / (1 << 20):.0f} MiB"
    return [
        compare(
            "activations", work, "checkpointing", "s", seconds, ours, again, at_most(1.0), note
        ),
        compare("activations", work, "in memory", "s", seconds, ours, memory),
        compare("activations", held, "checkpointing", "MiB", peak_mib, ours, again, note=window),
        compare("activations", held, "in memory", "MiB", peak_mib, ours, memory),
    ]

"""Rows `step`, `written`, `memory`, `lag`, `checksums` and `deepspeed`: the optimizer's step."""

from __future__ import annotations

from functools import partial
from typing import Any

from _lines import Line, at_least, at_most, compare
from _measure import Contender, Sample, median
from _session import Session, calling

from nvmeio.cli.measure.worker import Failed, Worker
from offload_rows import _limits

GROUP = 8 << 20  # elements of a subgroup, on both sides
MIB = 1 << 20


def seconds(sample: Sample) -> float:
    return sample.seconds


def per_second(sample: Sample) -> float:
    return 1 / sample.seconds


def ready(session: Session) -> tuple[Worker, dict[str, int]] | None:
    """The worker with its optimizers, and what it says of its sizes."""
    worker = session.worker("offload")
    if worker is None or not session.attempt("offload", worker, "prepare", **_sizes(session)):
        return None
    return worker, worker.call("sizes")


def _sizes(session: Session) -> dict[str, Any]:
    return {
        "directory": str(session.directory),
        "parameters": session.size // 12,
        "group": GROUP if not session.quick else GROUP // 8,
    }


def measure(session: Session) -> list[Line]:
    made = ready(session)
    if made is None:
        return []
    worker, sizes = made
    first, second = session.files(2)
    paths = (first, second)
    with _limits.contenders(session, paths, sizes["read"], sizes["written"]) as drives:
        samples = session.measure(
            "step",
            [
                calling("nvmeio", worker, "step"),
                calling("in memory", worker, "step_in_memory"),
                calling("awaited", worker, "async_step"),
                *drives,
            ],
        )
    ours, memory = samples["nvmeio"], samples["in memory"]
    name, drive = _limits.fastest(samples, [each.name for each in drives])
    both = [max(a.seconds, b.seconds) for a, b in zip(drive, memory, strict=False)]
    work = "AdamW, fused, fp32"
    moved = f"{sizes['read'] / 1e9:.2f} GB read, {sizes['written'] / 1e9:.2f} GB written"
    written = [float(s.extra["written"]) for s in ours]
    changed = [float(sizes["changed"])] * len(ours)
    awaited = samples["awaited"]
    return [
        Line(
            "step",
            f"{work}: step",
            f"the slower of {name} and computing in memory",
            "s",
            [s.seconds for s in ours],
            both,
            at_most(1.05),
            moved,
        ),
        compare("step", f"{work}: step", name, "s", seconds, ours, drive),
        compare("step", f"{work}: step", "in memory", "s", seconds, ours, memory),
        Line(
            "written",
            "written in a step",
            "state that changed",
            "bytes",
            written,
            changed,
            at_most(1.01),
            "weights and moments; padding is the rest",
        ),
        Line(
            "memory",
            "resident memory of the optimizer",
            "its own plan",
            "MiB",
            [sizes["resident"] / MIB],
            [sizes["planned"] / MIB],
            at_most(1.05),
        ),
        Line(
            "lag",
            "loop lag p99 under async_step",
            "5 ms",
            "ms",
            [s.extra["p99_ms"] for s in awaited],
            [5.0] * len(awaited),
            at_most(5.0, of="value"),
            _worst(awaited),
        ),
    ]


def _worst(series: list[Sample]) -> str:
    worst = max((sample.extra["worst_ms"] for sample in series), default=0.0)
    return f"worst of all {worst:.1f} ms"


def measure_checksums(session: Session) -> list[Line]:
    """A step that writes and compares checksums, beside one that does not."""
    made = ready(session)
    if made is None:
        return []
    worker, _ = made
    if not session.attempt("offload", worker, "prepare_unchecked", **_sizes(session)):
        return []
    samples = session.measure(
        "checksums",
        [
            calling("with", worker, "step"),
            calling("without", worker, "step_unchecked"),
        ],
    )
    work = "step with checksums"
    sides = samples["with"], samples["without"]
    return [compare("checksums", work, "without", "s", seconds, *sides, at_most(1.05))]


def measure_deepspeed(session: Session) -> list[Line]:
    """The optimizer's part of a step of ZeRO-3, pipelined, on DeepSpeed's own op; bf16 weights."""
    worker = session.worker("offload")
    theirs = session.worker("ZeRO-3")
    parameters = session.size // 12
    group = GROUP if not session.quick else GROUP // 8
    if worker is None or theirs is None:
        return []
    folder = session.directory / "zero3"
    folder.mkdir(exist_ok=True)
    aio = {
        "block_size": MIB,
        "queue_depth": 128,
        "intra_op_parallelism": 1,
        "overlap_events": True,
        "single_submit": False,
    }
    common = {"directory": str(folder), "parameters": parameters, "group": group}
    if not session.attempt("ZeRO-3", theirs, "prepare", **common, pipelined=True, aio=aio):
        return []
    if not session.attempt(
        "offload",
        worker,
        "prepare_half",
        directory=str(session.directory),
        parameters=parameters,
        group=group,
    ):
        return []
    samples = session.measure(
        "ZeRO-3",
        [calling("nvmeio", worker, "step_half"), Contender("DeepSpeed", partial(_zero3, theirs))],
    )
    slow = median([s.seconds for s in samples["DeepSpeed"]])
    return [
        compare(
            "deepspeed",
            "AdamW, bf16 with fp32 masters: steps",
            "DeepSpeed ZeRO-3, pipelined, its own op",
            "1/s",
            per_second,
            samples["nvmeio"],
            samples["DeepSpeed"],
            at_least(1.5),
            f"{slow:.2f} s there" if slow else "",
        )
    ]


def _zero3(worker: Worker) -> Sample:
    taken = worker.call("steps", count=1)
    if not taken:
        raise Failed("no step was taken")
    return Sample(seconds=taken[0]["optimizer"])

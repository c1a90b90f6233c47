"""Rows `steady`, `held` and `training`: a Checkpointer beside what it checkpoints."""

from __future__ import annotations

from functools import partial

from _files import huge_pages, remove, write_file
from _lines import Line, at_least, at_most, best, compare, gb_per_s
from _measure import Contender, Sample, median
from _session import Session, calling
from peers import fio

from checkpoint_rows._state import worker_with_state
from checkpoint_rows.saving import against_same_memory, fio_settings, huge_bytes
from nvmeio.cli.measure.worker import Failed

KEEP = 2
TRAIN_STEPS = 4
# A step computes for so many times as long as its checkpoint is written. The copy alone takes a
# third of that time on one fast drive, so the first cannot come near the speed without saves.
COMPUTE_PER_WRITE = (1.5, 4.0)


def measure_steady(session: Session) -> list[Line]:
    """Rows `steady` and `held`, which come from the same saves."""
    ready = worker_with_state(session)
    if ready is None:
        return []
    worker, nbytes = ready
    directory, protected = session.directory / "generations", session.directory / "protected"
    plain, old = session.directory / "plain.pt", session.directory / "old"
    with huge_pages(huge_bytes(nbytes)) as refused:
        settings = fio_settings(session, refused, nbytes)
        try:
            worker.call("open_checkpointer", directory=str(directory), keep=KEEP)
            worker.call("open_protected", directory=str(protected), keep=KEEP)
            for _ in range(KEEP + 1):  # from the next one on, the oldest file is recycled
                worker.call("checkpoint")
                worker.call("checkpoint", protected=True)
            worker.call("copy")
            whole = nbytes >> 20 << 20  # in blocks of fio's
            write_file(old, whole)
            contenders = [
                calling("nvmeio", worker, "checkpoint"),
                calling("protected", worker, "checkpoint", protected=True),
                calling("copy", worker, "copy"),
                Contender(
                    "torch.save",
                    partial(worker.call, "torch_save", path=str(plain)),
                    partial(remove, plain),
                ),
                *[Contender(s.name, partial(fio.overwrite, old, whole, s)) for s in settings],
            ]
            samples = session.measure("steady state", contenders)
        finally:
            worker.call("close_checkpointer")
            remove(plain, old, *directory.glob("*"), *protected.glob("*"))
    ours = samples["nvmeio"]
    name, limit = best(samples, [s.name for s in settings], gb_per_s, "fio")
    work = f"Checkpointer(keep={KEEP}), steady state"
    return [
        compare(
            "steady",
            work,
            "torch.save",
            "GB/s",
            gb_per_s,
            ours,
            samples["torch.save"],
            at_least(5.0),
            "from the call until it is durable",
        ),
        compare("steady", work, name, "GB/s", gb_per_s, ours, list(limit), at_least(0.9)),
        against_same_memory("steady", work, samples, "nvmeio", nbytes, 0.9),
        compare(
            "steady",
            "the same of protected memory: no copy first",
            name,
            "GB/s",
            gb_per_s,
            samples["protected"],
            list(limit),
            at_least(0.9),
            "from the call until it is durable",
        ),
        against_same_memory(
            "steady", "the same of protected memory", samples, "protected", nbytes, 0.9
        ),
        compare(
            "steady",
            "the same, from the end of the copy",
            name,
            "GB/s",
            _write_gb_per_s,
            ours,
            list(limit),
            None,
            "what the background gives the drive",
        ),
        compare(
            "held",
            "held by `await save`",
            "one copy of the state",
            "s",
            _held_s,
            ours,
            samples["copy"],
            at_most(1.2),
        ),
    ]


def measure_training(session: Session) -> list[Line]:
    ready = worker_with_state(session)
    if ready is None:
        return []
    worker, _ = ready
    directory = session.directory / "generations"
    lines = []
    try:
        worker.call("open_checkpointer", directory=str(directory), keep=1)
        writes: list[Sample] = [worker.call("checkpoint") for _ in range(5)]
        write_s = median([sample.seconds for sample in writes[2:]]) or 1.0
        for times in COMPUTE_PER_WRITE:
            worker.call("calibrate", seconds=times * write_s)
            samples = session.measure(
                f"training, {times:g} writes a step",
                [
                    calling("saving", worker, "train", steps=TRAIN_STEPS, save=True),
                    calling("without", worker, "train", steps=TRAIN_STEPS, save=False),
                ],
            )
            lines.append(
                compare(
                    "training",
                    "steps with a save each",
                    "without saves",
                    "steps/s",
                    _steps_per_s,
                    samples["saving"],
                    samples["without"],
                    at_least(0.9),
                    f"compute of {times:g} times the write, on all cores",
                )
            )
    except Failed as error:
        session.leave_out("nvmeio (training)", error)
    finally:
        worker.call("close_checkpointer")
        remove(*directory.glob("*"))
    return lines


def _write_gb_per_s(sample: Sample) -> float:
    """Of the background's write; of the whole for those who have none."""
    return sample.nbytes / sample.extra.get("written_s", sample.seconds) / 1e9


def _held_s(sample: Sample) -> float:
    return sample.extra["held_s"]


def _steps_per_s(sample: Sample) -> float:
    return sample.iops

"""Rows `protect`, `async` and `protect-memory`: a state that is written from where it lies."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from _files import remove, write_file
from _lines import Line, at_least, at_most, compare
from _measure import Contender, Sample, median
from _session import Session, calling
from peers import fio

from checkpoint_rows._state import NAME, worker_with_state
from nvmeio.cli.measure.worker import Failed, Worker
from nvmeio.errors import BackendUnavailableError

MIB = 1 << 20
STEPS = 4
COMPUTE_PER_WRITE = 1.2
_ON_HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"  # of torch's allocator


def measure(session: Session) -> list[Line]:
    ready = worker_with_state(session)
    if ready is None:
        return []
    worker, nbytes = ready
    directory = session.directory / "protected"
    try:
        worker.call("open_checkpointer", directory=str(directory), keep=1, snapshot="protect")
        worker.call("give_gradients")
        writes: list[Sample] = [worker.call("checkpoint") for _ in range(5)]
        write_s = median([sample.extra["written_s"] for sample in writes[2:]]) or 1.0
        worker.call("calibrate", seconds=COMPUTE_PER_WRITE * write_s)
        contenders = [
            calling("saving", worker, "train_with_steps", steps=STEPS, save=True),
            calling("without", worker, "train_with_steps", steps=STEPS, save=False),
            calling("one step", worker, "protected_step"),
        ]
        if session.has_fio():
            alone = worker.call("train_with_steps", steps=STEPS, save=False)
            beside = session.directory / "beside"
            write_file(beside, nbytes // MIB * MIB)
            train = partial(_train_beside_fio, worker, beside, nbytes, nbytes * alone.iops)
            contenders.append(Contender("beside fio", train))
        samples = session.measure("protected", contenders)
        cores = worker.call("leave_a_core_free")
        worker.call("calibrate", seconds=COMPUTE_PER_WRITE * write_s)
        with_a_core = session.measure("protected, one core free", contenders[:2])
    except Failed as error:
        session.leave_out("nvmeio (protected)", error)
        return []
    finally:
        worker.call("close_checkpointer")
        worker.call("take_all_cores")
        remove(*directory.glob("*"), session.directory / "beside")
    ones = samples["one step"]
    return [
        compare(
            "protect",
            "steps with a save of protected memory each",
            "without saves",
            "steps/s",
            lambda sample: sample.iops,
            samples["saving"],
            samples["without"],
            at_least(0.95),
            f"forward and backward of {COMPUTE_PER_WRITE:g} times the write, on all cores",
        ),
        compare(
            "protect",
            "the same, one core free",
            "without saves",
            "steps/s",
            lambda sample: sample.iops,
            with_a_core["saving"],
            with_a_core["without"],
            at_least(0.95),
            f"{cores} computing",
        ),
        compare(
            "protect",
            "the same steps, fio overwriting as much beside",
            "without saves",
            "steps/s",
            lambda sample: sample.iops,
            samples.get("beside fio", []),
            samples["without"],
            note="what these bytes cost at the least: no copy, no checksum; "
            + _kept_up(samples.get("beside fio", [])),
        ),
        _own_figure("held by a save", "ms", ones, "held_s", 10.0),
        _own_figure("held by optimizer.step()", "ms", ones, "step_held_s", 1.0),
    ]


def _train_beside_fio(worker: Worker, path: Path, nbytes: int, per_s: float) -> Sample:
    """Steps without saves, while fio writes what the saves would have."""
    with fio.overwriting(path, nbytes, per_s) as written:
        before = written()
        sample: Sample = worker.call("train_with_steps", steps=STEPS, save=False)
        sample.extra["written"] = (written() - before) / (STEPS * nbytes)
    return sample


def _kept_up(samples: list[Sample]) -> str:
    share = median([sample.extra["written"] for sample in samples])
    return "left out" if share is None else f"it wrote {share:.2f} of what the saves write"


def measure_async(session: Session) -> list[Line]:
    """Who holds training for how long: copied, protected on small and on huge pages, and DCP."""
    ready = worker_with_state(session)
    if ready is None:
        return []
    worker, _ = ready
    folder = session.directory / "async"
    folder.mkdir(exist_ok=True)
    places = [folder / name for name in ("copied", "protected", "huge", "thread", "process")]
    with _huge_pages_of_torch(), session.fresh_worker(NAME) as huge:
        if huge is None or not session.attempt(NAME, huge, "prepare", nbytes=session.size):
            return []
        try:
            worker.call("open_checkpointer", directory=str(places[0]), keep=1)
            worker.call("open_protected", directory=str(places[1]), keep=1)
            huge.call("open_checkpointer", directory=str(places[2]), keep=1, snapshot="protect")
            contenders = [
                calling("copied", worker, "checkpoint"),
                calling("protected", worker, "checkpoint", protected=True),
                calling("huge pages", huge, "checkpoint"),
            ]
            for place in places[3:]:
                by_process = place.name == "process"
                run = partial(worker.call, "dcp_async", path=str(place), process=by_process)
                clear = partial(shutil.rmtree, place, ignore_errors=True)
                contenders.append(Contender(f"DCP, a {place.name}", run, clear))
            for contender in contenders[:3]:  # from the next one on nothing of it is new
                contender.run()
                contender.run()
            samples = session.measure("asynchronous saves", contenders)
        except (Failed, BackendUnavailableError) as error:
            session.leave_out("nvmeio (asynchronous saves)", error)
            return []
        finally:
            worker.call("close_checkpointer")
            huge.call("close_checkpointer")
            shutil.rmtree(folder, ignore_errors=True)
    targets = {"copied": None, "protected": at_most(0.5), "huge pages": at_most(0.1)}
    lines = []
    for name, target in targets.items():
        for peer in ("copied", "DCP, a thread", "DCP, a process"):
            if peer == name:
                continue
            for what, metric in (("held", _held_ms), ("durable", _ms), ("CPU", _cpu_ms)):
                lines.append(
                    compare(
                        "async",
                        f"a save in the background, {name}: {what}",
                        peer,
                        "ms",
                        metric,
                        samples[name],
                        samples[peer],
                        target if what == "held" else None,
                        "its own process's time alone"
                        if what == "CPU" and "process" in peer
                        else "",
                    )
                )
    return lines


@contextlib.contextmanager
def _huge_pages_of_torch() -> Iterator[None]:
    """A process that is begun within has torch's tensors on huge pages."""
    before = os.environ.get(_ON_HUGE_PAGES)
    os.environ[_ON_HUGE_PAGES] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_ON_HUGE_PAGES]
        else:
            os.environ[_ON_HUGE_PAGES] = before


def _held_ms(sample: Sample) -> float:
    return sample.extra["held_s"] * 1e3


def _ms(sample: Sample) -> float:
    return sample.seconds * 1e3


def _cpu_ms(sample: Sample) -> float:
    return sample.cpu_seconds * 1e3


def measure_memory(session: Session) -> list[Line]:
    directory = session.directory / "protected-memory"
    with session.fresh_worker(NAME) as worker:
        if worker is None or not session.attempt(NAME, worker, "prepare", nbytes=session.size):
            return []
        try:
            extra = worker.call("extra_memory_of_protected_save", directory=str(directory))
            worker.call("close_checkpointer")
        except (Failed, BackendUnavailableError) as error:
            session.leave_out("nvmeio (extra memory of a save of protected memory)", error)
            return []
        finally:
            remove(*directory.glob("*"))
    work = "extra memory of a save of protected memory"
    note = "peak resident memory, the handle's own included"
    figures = [extra / MIB]
    return [Line("protect-memory", work, "64 MiB", "MiB", figures, [64.0], at_most(1.0), note=note)]


def _own_figure(work: str, unit: str, samples: list[Sample], key: str, most: float) -> Line:
    figures = [sample.extra[key] * 1e3 for sample in samples]
    return Line("protect", work, f"{most:g} {unit}", unit, figures, [most], at_most(1.0))

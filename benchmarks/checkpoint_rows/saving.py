"""Rows `save` and `memory`: a state into a new file, durable when the clock stops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from _files import huge_pages, remove
from _lines import Line, at_least, at_most, best, compare, gb_per_s
from _measure import Contender, Sample
from _session import Session, calling
from peers import fio

from checkpoint_rows._state import NAME, worker_with_state
from nvmeio.cli.measure.worker import Failed
from nvmeio.errors import BackendUnavailableError

MIB = 1 << 20


def measure(session: Session) -> list[Line]:
    ready = worker_with_state(session)
    if ready is None:
        return []
    worker, nbytes = ready
    path = session.directory / "new.pt"
    contenders = [
        calling("torch.save", worker, "torch_save", path=str(path)),
        calling("nvmeio", worker, "nvmeio_save", path=str(path)),
        calling("no checksum", worker, "nvmeio_save", path=str(path), checksum=False),
        calling("DeepSpeed", worker, "deepspeed_save", path=str(path)),
    ]
    with huge_pages(huge_bytes(nbytes)) as refused:
        settings = fio_settings(session, refused, nbytes)
        contenders += [Contender(s.name, partial(fio.new_file, path, nbytes, s)) for s in settings]
        fresh = [Contender(c.name, c.run, partial(remove, path)) for c in contenders]
        samples = session.measure("save", fresh)
    remove(path)
    ours = samples["nvmeio"]
    name, limit = best(samples, [s.name for s in settings], gb_per_s, "fio")
    work = "save into a new file"

    def line(peer: str, key: str, least: float | None, note: str = "") -> Line:
        target = None if least is None else at_least(least)
        theirs = limit if key == name else samples.get(key, [])
        return compare("save", work, peer, "GB/s", gb_per_s, ours, list(theirs), target, note)

    return [
        line("torch.save", "torch.save", 3.5, "fsync on both sides"),
        line(name, name, 0.9, "a new file, end_fsync"),
        against_same_memory("save", work, samples, "nvmeio", nbytes, 0.93),
        line("nvmeio without checksums", "no checksum", 0.9),
        line("DeepSpeed FastFileWriter", "DeepSpeed", None),
    ]


def measure_memory(session: Session) -> list[Line]:
    path = session.directory / "memory.pt"
    with session.fresh_worker(NAME) as worker:
        if worker is None or not session.attempt(NAME, worker, "prepare", nbytes=session.size):
            return []
        try:
            extra = worker.call("extra_memory_of_save", path=str(path))
        except (Failed, BackendUnavailableError) as error:
            session.leave_out("nvmeio (extra memory)", error)
            return []
        finally:
            remove(path)
    return [
        Line(
            "memory",
            "extra memory of a blocking save",
            "256 MiB",
            "MiB",
            [extra / MIB],
            [256.0],
            at_most(1.0),
            note="peak resident memory",
        )
    ]


def fio_settings(
    session: Session, refused: str | None, nbytes: int | None = None
) -> list[fio.Setting]:
    """fio with large queues, on huge pages where they can be had.

    Args:
        session: Names what is missing.
        refused: Why there are no huge pages.
        nbytes: With it, also fio over so many bytes of memory, as a state has them.
    """
    if not session.has_fio():
        return []
    if refused:
        session.skip("fio on huge pages", refused, "sudo sysctl -w vm.nr_hugepages=1300")
        return [s for s in fio.DEFAULT_BUFFERS if s.queue_depth == 128]
    same = [] if nbytes is None else [fio.as_much_memory(nbytes)]
    return [*(s for s in fio.HUGE_PAGES if s.queue_depth == 128), *same]


def huge_bytes(nbytes: int) -> int:
    """The huge pages that fio needs for `fio_settings` of a state of `nbytes`."""
    settings = [*fio.HUGE_PAGES, fio.as_much_memory(nbytes)]
    return max(setting.buffer_bytes for setting in settings)


def against_same_memory(
    row: str,
    work: str,
    samples: Mapping[str, Sequence[Sample]],
    ours: str,
    nbytes: int,
    least: float,
) -> Line:
    """A line beside fio that goes over as much memory as the state has."""
    name = fio.as_much_memory(nbytes).name
    theirs, mine = list(samples.get(name, [])), list(samples.get(ours, []))
    note = "as much memory on both sides"
    return compare(row, work, name, "GB/s", gb_per_s, mine, theirs, at_least(least), note)

"""One large tensor, page-locked by whoever moves it: read, overwrite, first write, CPU cost."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from pathlib import Path

from _files import huge_pages, remove
from _lines import Line, at_least, at_most, best, compare, cpu_per_gib, gb_per_s
from _measure import Contender, Sample
from _session import Session, calling
from peers import fio

from nvmeio.cli.measure.worker import Failed, Worker

TENSOR_PEERS = ("nvmeio", "DeepSpeed")
DEFAULT_BUFFERS = [setting.name for setting in fio.DEFAULT_BUFFERS]
HUGE_PAGES = [setting.name for setting in fio.HUGE_PAGES]


def measure(session: Session) -> list[Line]:
    """Rows `sequential` and `cpu`, which come from the same runs."""
    (path,) = session.files(1)
    tensor_peers = prepared(session, path)
    lines: list[Line] = []
    same = fio.as_much_memory(session.size)
    with huge_pages(max(s.buffer_bytes for s in [same, *fio.HUGE_PAGES])) as refused:
        settings = _settings(session, refused)
        for write in (False, True):
            contenders = [
                calling(name, worker, "write" if write else "read", path=str(path))
                for name, worker in tensor_peers.items()
            ]
            contenders += [
                Contender(s.name, partial(fio.sequential, path, session.size, write, s))
                for s in settings
            ]
            title = "overwrite" if write else "read"
            samples = session.measure(f"sequential {title}", contenders)
            lines += _lines(samples, write, same.name, memory_note(tensor_peers))
    session.release(tensor_peers)
    return lines


def measure_first_write(session: Session) -> list[Line]:
    """Row `first-write`: a file that does not exist yet, in a directory that is settled."""
    (path,) = session.files(1)
    tensor_peers = prepared(session, path)
    fresh = session.directory / "new"
    contenders = [
        Contender(name, partial(worker.call, "write", path=str(fresh)), partial(remove, fresh))
        for name, worker in tensor_peers.items()
    ]
    try:
        samples = session.measure("first write", contenders)
    finally:
        remove(fresh)
    session.release(tensor_peers)
    ours, theirs = samples.get("nvmeio", []), samples.get("DeepSpeed", [])
    work = "first write of a new file"
    return [
        compare("first-write", work, "DeepSpeed", "GB/s", gb_per_s, ours, theirs, at_least(1.7))
    ]


def prepared(session: Session, path: Path, locked: bool = True) -> dict[str, Worker]:
    """The tensor peers that are there, each with its tensor touched and its bytes checked."""
    ready = {}
    for name in TENSOR_PEERS:
        worker = session.worker(name)
        if worker is None:
            continue
        if session.attempt(
            name, worker, "prepare", locked=locked, nbytes=session.size
        ) and session.attempt(name, worker, "check", path=str(path)):
            ready[name] = worker
    return ready


def memory_note(workers: dict[str, Worker]) -> str:
    """How contiguous the peers' memory happens to be, which explains much of their speed."""
    known = []
    for name, worker in workers.items():
        with suppress(Failed):
            kib = worker.call("contiguous_kib")
            if kib is not None:
                known.append(f"{name}'s of {kib:.0f} KiB")
    return "physical runs: " + ", ".join(known) if known else ""


def _settings(session: Session, refused: str | None) -> list[fio.Setting]:
    if not session.has_fio():
        return []
    if refused:
        session.skip("fio on huge pages", refused, "sudo sysctl -w vm.nr_hugepages=128")
        return fio.DEFAULT_BUFFERS
    same = fio.as_much_memory(session.size)  # which may be one of the others
    return [*dict.fromkeys([*fio.DEFAULT_BUFFERS, *fio.HUGE_PAGES, same])]


def _lines(samples: dict[str, list[Sample]], write: bool, same: str, note: str) -> list[Line]:
    work = "overwrite, page-locked" if write else "read, page-locked"
    cost = f"CPU of the {'overwrite' if write else 'read'}"
    ours = samples.get("nvmeio", [])
    common, default = best(samples, DEFAULT_BUFFERS, gb_per_s, "fio")
    limit, huge = best(samples, HUGE_PAGES, gb_per_s, "fio, huge pages")
    deepspeed = samples.get("DeepSpeed", [])

    def speed(peer: str, theirs: list[Sample], least: float, note: str = "") -> Line:
        target = at_least(least)
        return compare("sequential", work, peer, "GB/s", gb_per_s, ours, theirs, target, note)

    return [
        speed(common, list(default), 1.1),
        speed(limit, list(huge), 0.97),
        speed(same, samples.get(same, []), 0.95, "over as much memory: the same work"),
        speed("DeepSpeed", deepspeed, 1.5 if write else 1.4, note),
        compare("cpu", cost, common, "s/GiB", cpu_per_gib, ours, default, at_most(1.3)),
        compare("cpu", cost, limit, "s/GiB", cpu_per_gib, ours, huge, note="for information"),
    ]

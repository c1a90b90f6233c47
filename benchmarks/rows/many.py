"""A model's worth of tensors of all sizes: one batch, or 1,000 operations started and one wait."""

from __future__ import annotations

import math
import os
import random
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate
from pathlib import Path

from _files import huge_pages, remove, write_file
from _lines import Line, at_least, compare, gb_per_s
from _measure import Contender, Sample
from _session import Session
from peers import fio

from nvmeio.cli.measure.worker import Worker
from rows.sequential import TENSOR_PEERS

ROW = "many"
COUNT = 1000
QUICK_COUNT = 200
SMALLEST = 4 << 10
LARGEST = 16 << 20


@lru_cache
def sizes(quick: bool) -> tuple[int, ...]:
    """Log-uniform, multiples of 4 KiB, always the same: 2 GB in 1,000 tensors."""
    generator = random.Random(1000)
    low, high = math.log(SMALLEST), math.log(LARGEST)
    drawn = (math.exp(generator.uniform(low, high)) for _ in range(QUICK_COUNT if quick else COUNT))
    return tuple(max(1, round(size / SMALLEST)) * SMALLEST for size in drawn)


def total_bytes(quick: bool) -> int:
    return sum(sizes(quick))


@dataclass(frozen=True)
class TensorFiles:
    """Where the tensors go."""

    title: str
    paths: list[Path]
    offsets: list[int]

    @property
    def arguments(self) -> dict[str, object]:
        return {"paths": [str(path) for path in self.paths], "offsets": self.offsets}

    def create(self) -> None:
        """Every byte written before, by nobody who is measured."""
        ends: dict[Path, int] = {}
        for path, offset, size in zip(self.paths, self.offsets, self._sizes(), strict=True):
            ends[path] = max(ends.get(path, 0), offset + size)
        for path, end in ends.items():
            write_file(path, end)
        os.sync()

    def remove(self) -> None:
        remove(*set(self.paths))

    @property
    def parts(self) -> list[fio.Part]:
        """The same for fio."""
        return [*map(fio.Part, self.paths, self.offsets, self._sizes())]

    def _sizes(self) -> tuple[int, ...]:
        return sizes(len(self.paths) == QUICK_COUNT)


def measure(session: Session) -> list[Line]:
    chosen = sizes(session.quick)
    workers: dict[str, Worker] = {}
    for name in TENSOR_PEERS:
        worker = session.worker(name)
        if (
            worker is not None
            and session.attempt(name, worker, "prepare", locked=True, nbytes=sum(chosen))
            and session.attempt(name, worker, "split", sizes=chosen)
        ):
            workers[name] = worker
    lines: list[Line] = []
    for layout in _layouts(session.directory, chosen):
        try:
            lines += _measure_layout(session, layout, workers)
        finally:
            layout.remove()
    session.release(workers)
    return lines


def _layouts(directory: Path, chosen: tuple[int, ...]) -> list[TensorFiles]:
    each = [directory / f"tensor-{number:04d}" for number in range(len(chosen))]
    starts = [0, *accumulate(chosen)][:-1]
    return [
        TensorFiles("one file each", each, [0] * len(chosen)),
        TensorFiles("all in one file", [directory / "tensors"] * len(chosen), starts),
    ]


def _measure_layout(
    session: Session, layout: TensorFiles, workers: dict[str, Worker]
) -> list[Line]:
    new = _round(session, layout, _peers(layout, workers, "write_many", new=True), "new")
    lines = [_line(layout, "new", new, "DeepSpeed")]
    layout.remove()
    layout.create()
    ready = {
        name: worker
        for name, worker in workers.items()
        if session.attempt(name, worker, "check_many", **layout.arguments)
    }
    same, far = _settings(session)
    with huge_pages(max(same.buffer_bytes, far.buffer_bytes)) as refused:
        if refused:
            session.skip("fio on huge pages", refused, "sudo sysctl -w vm.nr_hugepages=2100")
        for kind, method in (("overwrite", "write_many"), ("read", "read_many")):
            contenders = _peers(layout, ready, method)
            if not refused and session.has_fio():
                contenders += _fio(session, layout, kind == "overwrite")
            samples = _round(session, layout, contenders, kind)
            lines.append(_line(layout, kind, samples, "DeepSpeed"))
            memory = f"over {same.buffer_bytes >> 20} MiB of memory"
            lines.append(_line(layout, kind, samples, "fio", f"{same.name}: these parts, {memory}"))
            memory = f"over {far.buffer_bytes >> 20} MiB of memory, as nvmeio"
            lines.append(_line(layout, kind, samples, "fio, sequential", f"{far.name}: {memory}"))
    return lines


def _settings(session: Session) -> tuple[fio.Setting, fio.Setting]:
    """For the same parts; and for one large file over as much memory as the tensors have."""
    far = fio.as_much_memory(min(total_bytes(session.quick), session.size))
    return fio.HUGE_PAGES[1], far


def _fio(session: Session, layout: TensorFiles, write: bool) -> list[Contender]:
    same, far = _settings(session)
    (large,) = session.files(1)
    nbytes = far.queue_depth * fio.BLOCK_SIZE
    log = session.directory / "parts.log"
    return [
        Contender("fio", partial(fio.parts_of_files, layout.parts, write, same, log)),
        Contender("fio, sequential", partial(fio.sequential, large, nbytes, write, far)),
    ]


def _peers(
    layout: TensorFiles, workers: dict[str, Worker], method: str, new: bool = False
) -> list[Contender]:
    return [
        Contender(
            name,
            partial(worker.call, method, **layout.arguments),
            layout.remove if new else None,
        )
        for name, worker in workers.items()
    ]


def _round(
    session: Session, layout: TensorFiles, contenders: list[Contender], kind: str
) -> dict[str, list[Sample]]:
    return session.measure(f"tensors, {layout.title}, {kind}", contenders)


def _line(
    layout: TensorFiles, kind: str, samples: dict[str, list[Sample]], peer: str, note: str = ""
) -> Line:
    what = {"new": "write, new files", "overwrite": "overwrite", "read": "read"}[kind]
    if kind == "new" and layout.title == "all in one file":
        what = "write, new file"
    work = f"{len(layout.paths):,} tensors, {layout.title}, {what}"
    ours, theirs = samples.get("nvmeio", []), samples.get(peer, [])
    target = at_least(1.5 if peer == "DeepSpeed" else 0.95)
    return compare(ROW, work, peer, "GB/s", gb_per_s, ours, theirs, target, note)

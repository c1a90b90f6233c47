"""What the drive can do, by fio, with both directions at once."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from _files import huge_pages
from _measure import Contender, Sample
from _session import Session
from peers import fio

MIB = 1 << 20


def together(
    read: Path, written: Path, read_bytes: int, written_bytes: int, setting: fio.Setting
) -> Sample:
    """One fio reads while another writes; the time of the slower."""
    with ThreadPoolExecutor(2) as pool:
        jobs = [
            pool.submit(fio.sequential, path, nbytes // MIB * MIB, write, setting)
            for path, nbytes, write in ((read, read_bytes, False), (written, written_bytes, True))
            if nbytes >= MIB
        ]
        samples = [job.result() for job in jobs]
    return Sample(
        seconds=max(sample.seconds for sample in samples),
        nbytes=sum(sample.nbytes for sample in samples),
    )


@contextlib.contextmanager
def contenders(session: Session, paths: tuple[Path, Path], read_bytes: int, written_bytes: int):  # type: ignore[no-untyped-def]
    """fio's settings as contenders; none where it is missing, which is said."""
    if not session.has_fio():
        yield []
        return
    with huge_pages(2 * max(setting.buffer_bytes for setting in fio.HUGE_PAGES)) as refused:
        if refused:
            session.skip("fio on huge pages", refused, "sudo sysctl -w vm.nr_hugepages=256")
        settings = fio.DEFAULT_BUFFERS if refused else fio.HUGE_PAGES
        yield [
            Contender(s.name, partial(together, *paths, read_bytes, written_bytes, s))
            for s in settings
            if s.queue_depth == 128
        ]


def fastest(samples: dict[str, list[Sample]], names: list[str]) -> tuple[str, list[Sample]]:
    """The contender with the lowest median time."""
    ran = [(name, samples[name]) for name in names if samples.get(name)]
    if not ran:
        return "fio", []
    return min(ran, key=lambda item: sorted(s.seconds for s in item[1])[len(item[1]) // 2])

"""fio: one job per run, its own clock and CPU accounting taken from its JSON report."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from _measure import Sample

from nvmeio.cli.measure import peers
from nvmeio.cli.measure.worker import Failed

BLOCK_SIZE = 1 << 20
SMALLEST = 4 << 10

Written = Callable[[], int]


@dataclass(frozen=True)
class Setting:
    """What distinguishes one fio run from another."""

    engine: str
    queue_depth: int
    memory: str = "malloc"

    @property
    def name(self) -> str:
        huge = ", huge pages" if self.memory == "mmaphuge" else ""
        return f"fio {self.engine}, depth {self.queue_depth}{huge}"

    @property
    def buffer_bytes(self) -> int:
        """What fio allocates for it and a little more, for whoever reserves huge pages."""
        return (self.queue_depth + 8) * BLOCK_SIZE


class Part(NamedTuple):
    """Some bytes of a file."""

    path: Path
    offset: int
    nbytes: int


def as_much_memory(nbytes: int) -> Setting:
    """A setting that goes over as many bytes of memory as of the file, as one tensor does.

    At a depth of 32 or 128, fio moves everything over the same 32 or 128 MiB, which drives, or the
    hosts of virtual machines, may be faster with.
    """
    return Setting("libaio", max(1, nbytes // BLOCK_SIZE), "mmaphuge")


DEFAULT_BUFFERS = [Setting(e, d) for e in ("libaio", "io_uring") for d in (32, 128)]
HUGE_PAGES = [Setting(s.engine, s.queue_depth, "mmaphuge") for s in DEFAULT_BUFFERS]


def sequential(path: Path, nbytes: int, write: bool, setting: Setting) -> Sample:
    """One pass over a file that exists and was written before.

    Runs are short, so the time is fio's own from first submission to last completion; starting
    the process is not in it. Touching its buffers for the first time is, on reads, and was
    measured to make no difference that the noise does not hide. The writes go out without a
    scratch on the data (`scramble_buffers=0`): nvmeio does not touch its data either.
    """
    return _run(
        path,
        "--readonly" if not write else "--overwrite=1",
        f"--rw={'write' if write else 'read'}",
        f"--size={nbytes}",
        f"--bs={BLOCK_SIZE}",
        f"--ioengine={setting.engine}",
        f"--iodepth={setting.queue_depth}",
        f"--mem={setting.memory}",
        "--scramble_buffers=0",
    )


def new_file(path: Path, nbytes: int, setting: Setting) -> Sample:
    """One pass that makes a file, its blocks allocated first, durable in the end."""
    return _run(path, "--fallocate=native", *_durable_write(nbytes, setting))


def overwrite(path: Path, nbytes: int, setting: Setting) -> Sample:
    """One pass over a file that was written before, durable in the end."""
    return _run(path, "--overwrite=1", *_durable_write(nbytes, setting))


@contextmanager
def beside(path: Path, options: Sequence[str], timeout_s: float = 60.0) -> Iterator[Written]:
    """Fio at work on a file while the body runs; it is there with all its bytes.

    Yields:
        Tells what it has written so far: some, already.

    Raises:
        Failed: It did not begin, or came to an end before the body did; with its own words.
    """
    process = peers.start_fio([path], ["--thread", *options])  # the bytes are that process's own

    def written() -> int:
        if process.poll() is not None:
            raise peers.fio_failed(process, *process.communicate())
        return peers.written_by(process.pid)

    try:
        until = time.monotonic() + timeout_s
        while not written():
            if time.monotonic() > until:
                raise Failed(f"fio: nothing was written in {timeout_s:g} s")
            time.sleep(0.01)
        yield written
        written()
    finally:
        peers.kill(process)


@contextmanager
def overwriting(path: Path, nbytes: int, per_s: float) -> Iterator[Written]:
    """Overwrites the file again and again while the body runs, so many bytes a second.

    Each pass is made durable. Over the memory of 32 blocks.
    """
    setting = Setting("libaio", 32)
    options = [
        "--overwrite=1",
        "--rw=write",
        "--time_based",
        "--runtime=3600",
        f"--rate={max(int(per_s), BLOCK_SIZE)}",
        f"--fdatasync={max(nbytes // BLOCK_SIZE, 1)}",
        f"--size={nbytes >> 20 << 20}",
        f"--bs={BLOCK_SIZE}",
        f"--ioengine={setting.engine}",
        f"--iodepth={setting.queue_depth}",
        f"--mem={setting.memory}",
        "--scramble_buffers=0",
    ]
    with beside(path, options) as written:
        yield written


def _durable_write(nbytes: int, setting: Setting) -> list[str]:
    return [
        "--rw=write",
        "--end_fsync=1",
        f"--size={nbytes >> 20 << 20}",
        f"--bs={BLOCK_SIZE}",
        f"--ioengine={setting.engine}",
        f"--iodepth={setting.queue_depth}",
        f"--mem={setting.memory}",
        "--scramble_buffers=0",
    ]


def random_blocks(
    path: Path, nbytes: int, count: int, block: int, depth: int, write: bool = False
) -> Sample:
    """`count` reads, or overwrites, of distinct random blocks with libaio.

    All of them go over the memory of `depth` blocks.
    """
    return _run(
        path,
        "--overwrite=1" if write else "--readonly",
        f"--rw={'randwrite' if write else 'randread'}",
        f"--size={nbytes}",
        f"--io_size={count * block}",
        f"--bs={block}",
        "--ioengine=libaio",
        f"--iodepth={depth}",
        "--scramble_buffers=0",
    )


def parts_of_files(parts: Sequence[Part], write: bool, setting: Setting, log: Path) -> Sample:
    """Parts of files, whole, one after the other in blocks of 1 MiB, each file opened at its turn.

    Args:
        parts: Where.
        write: Overwrite them instead of reading.
        setting: With what.
        log: A file for the list that fio replays.
    """
    verb = "write" if write else "read"
    lines = ["fio version 2 iolog"]
    lines += [f"{path} add" for path in dict.fromkeys(part.path for part in parts)]
    path = None
    for part in parts:
        if part.path != path:
            lines += [f"{path} close"] if path else []
            lines.append(f"{part.path} open")
        path, end = part.path, part.offset + part.nbytes
        for at in range(part.offset, end, BLOCK_SIZE):
            lines.append(f"{path} {verb} {at} {min(BLOCK_SIZE, end - at)}")
    # What is in flight at the end of a list, fio 3.33 neither times nor counts: let that be small.
    lines += [f"{path} {verb} {end - SMALLEST} {SMALLEST}"] * setting.queue_depth
    log.write_text("\n".join([*lines, f"{path} close"]) + "\n")
    return _run(
        parts[0].path,
        f"--read_iolog={log}",
        "--replay_no_stall=1",
        f"--ioengine={setting.engine}",
        f"--iodepth={setting.queue_depth}",
        f"--mem={setting.memory}",
        "--scramble_buffers=0",
    )


def _run(path: Path, *options: str) -> Sample:
    found = peers.fio_figures(peers.run_fio([path], options, timeout_s=300))
    return Sample(found.seconds, found.nbytes, found.operations, found.cpu_s)

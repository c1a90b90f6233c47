"""Directories to measure in, left as they were found; the cost of a transfer beside time."""

from __future__ import annotations

import atexit
import ctypes
import itertools
import os
import resource
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
import typer

import nvmeio
from nvmeio._bindings import memory_at
from nvmeio._files.system import find_mount
from nvmeio._memory import system
from nvmeio._pages import PAGE_BYTES
from nvmeio._threads.owner import OwnerThread
from nvmeio.cli._terminal import Refused, binary_size
from nvmeio.cli.measure import machine

# The share that stays free in any case: a full file system hurts everybody who shares it.
SPARE_FRACTION = 0.05
SPARE_BYTES_MOST = 1 << 30
SPARE_MEMORY_BYTES = 256 << 20
_IN_MEMORY = ("tmpfs", "ramfs")
_PATTERN_BYTES = 4 << 20
_STEP = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio: multiples lie far apart
_SEED_STEP = 0xD1B54A32D192ED03  # another such number
SECTOR = 512  # /proc/diskstats counts in these whatever the drive's own block is


# The cost of a transfer


def cpu_seconds() -> float:
    """User and system time of this process so far, all threads included."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class DiskBytes(NamedTuple):
    """Bytes that drives have moved since boot, for anybody."""

    read: int
    written: int

    def since(self, earlier: DiskBytes) -> DiskBytes:
        """The bytes that they have moved between two looks."""
        return DiskBytes(self.read - earlier.read, self.written - earlier.written)


class Disks:
    """The counters of the drives below some directories.

    Args:
        directories: Those without a block device (tmpfs, network file systems) count nothing.
    """

    def __init__(self, directories: Iterable[Path]) -> None:
        found = set()
        for directory in directories:
            mount = find_mount(directory)
            device = machine.find_device(directory, mount.source if mount else None)
            if device is not None:
                found.add(device.name)
        self.names = sorted(found)

    def look(self) -> DiskBytes | None:
        """The counters now, added up; None where there is no drive to ask."""
        read = written = 0
        lines = system.text_of("/proc/diskstats").splitlines()
        if not self.names or not lines:
            return None
        for fields in map(str.split, lines):
            if fields[2] in self.names:
                read += int(fields[5]) * SECTOR
                written += int(fields[9]) * SECTOR
        return DiskBytes(read, written)


def free_huge_pages() -> int:
    """Free pages that are reserved for requests of huge ones."""
    # A count, without the unit that `proc_bytes` takes it for.
    return (system.proc_bytes("/proc/meminfo", "HugePages_Free") or 0) >> 10


def drop_from_cache(path: Path) -> None:
    """Takes a file's pages out of the page cache, dirty ones by way of the drive."""
    with path.open("rb") as file:
        os.fdatasync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cached_fraction(path: Path) -> float | None:
    """How much of a file lies in the page cache, from 0 to 1; None where nobody can tell."""
    with suppress(OSError, RuntimeError):
        nbytes = path.stat().st_size
        mapped = torch.from_file(str(path), size=nbytes, dtype=torch.uint8)
        pages = -(-nbytes // PAGE_BYTES)
        resident = ctypes.create_string_buffer(pages)
        if nbytes and not system.libc.mincore(mapped.data_ptr(), nbytes, resident):
            # The lowest bit says resident, the others are reserved (man 2 mincore).
            return (pages - resident.raw.count(b"\0")) / pages
    return None


# Directories


def check_directory(directory: Path) -> None:
    """Makes sure that files can be made in it.

    Raises:
        typer.BadParameter: They cannot, and why.
    """
    try:
        machine.check_directory(directory)
    except OSError as error:
        raise typer.BadParameter(str(error), param_hint="DIR") from error


def check_space(needs: Mapping[Path, int]) -> None:
    """Makes sure that files fit, with something to spare.

    Args:
        needs: Bytes to be written in each directory; those on one file system are added up.

    Raises:
        Refused: They do not; says how much is needed and how much is there.
    """
    by_device: dict[int, tuple[Path, int]] = {}
    for directory, nbytes in needs.items():
        device = directory.stat().st_dev
        first, before = by_device.get(device, (directory, 0))
        by_device[device] = first, before + nbytes
    for directory, nbytes in by_device.values():
        usage = shutil.disk_usage(directory)
        spare = min(int(usage.total * SPARE_FRACTION), SPARE_BYTES_MOST)
        if nbytes + spare > usage.free:
            raise Refused(
                f"the files need {binary_size(nbytes)} and {binary_size(spare)} are to stay free, "
                f"but the file system of {directory} has {binary_size(usage.free)} left: name a "
                "smaller --io-size, or another directory"
            )


def check_memory(nbytes: int, needs: Mapping[Path, int]) -> None:
    """Makes sure that buffers of this many bytes in all fit into memory.

    Args:
        nbytes: The size of the buffers.
        needs: The size of the files, by directory: those on a file system in memory count too.

    Raises:
        Refused: They do not. (The kernel would give them anyway, and then end a process.)
    """
    for directory, files in needs.items():
        mount = find_mount(directory)
        if mount is not None and mount.file_system in _IN_MEMORY:
            nbytes += files
    available = system.available_bytes()
    if available is not None and nbytes + SPARE_MEMORY_BYTES > available:
        raise Refused(
            f"the work needs {binary_size(nbytes)} of memory and {binary_size(available)} are "
            "available: name a smaller --io-size, or fewer processes or engines at a time"
        )


@contextmanager
def scratch(directories: Iterable[Path], name: str) -> Iterator[dict[Path, Path]]:
    """A directory of one's own in each directory; removed with all its files, whatever happens.

    Yields:
        The directories by the one that they lie in.
    """
    # Made and removed by a thread of their own: no Ctrl-C comes between a directory's being made
    # and its being known, or in the middle of a removal.
    owner = OwnerThread("nvmeio-scratch")
    made: dict[Path, Path] = {}

    def remove() -> None:
        for directory, path in list(made.items()):
            shutil.rmtree(path, ignore_errors=True)
            del made[directory]

    def remove_at_exit() -> None:  # an interrupt may come before `finally` does what it is for
        _ignore_signals()
        owner.call(remove)

    atexit.register(remove_at_exit)
    try:
        owner.call(_make, directories, name, made)
        yield made
    finally:
        owner.call(remove)
        owner.close()
        atexit.unregister(remove_at_exit)


def _make(directories: Iterable[Path], name: str, made: dict[Path, Path]) -> None:
    for directory in directories:
        if directory not in made:
            made[directory] = Path(tempfile.mkdtemp(prefix=f".nvmeio-{name}-", dir=directory))


def _ignore_signals() -> None:
    if threading.current_thread() is threading.main_thread():
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, signal.SIG_IGN)


# Contents


def fill(tensor: torch.Tensor, seed: int) -> None:
    """Fills a CPU byte tensor with bytes that no drive can shorten, the same for the same seed.

    One block of random numbers, with every 8-byte word of each further block moved on by another
    amount: as fast as memory, where true random numbers take seconds per GiB.
    """
    for chunk, block in zip(torch.split(tensor, _PATTERN_BYTES), _blocks(seed), strict=False):
        chunk.copy_(block[: chunk.numel()])


def differs_at(tensor: torch.Tensor, seed: int) -> int | None:
    """The first byte at which a CPU byte tensor is not as `fill` makes it; None where all is."""
    chunks = zip(torch.split(tensor, _PATTERN_BYTES), _blocks(seed), strict=False)
    for index, (chunk, block) in enumerate(chunks):
        wanted = block[: chunk.numel()]
        if not torch.equal(chunk, wanted):
            return index * _PATTERN_BYTES + int((chunk != wanted).nonzero()[0])
    return None


def _blocks(seed: int) -> Iterator[torch.Tensor]:
    """The bytes of one block after the other; each is valid until the next is asked for."""
    base = _base_block()
    moved = torch.empty_like(base)
    for index in itertools.count():
        torch.add(base, (index * _STEP + seed * _SEED_STEP) % (1 << 63), out=moved)
        yield moved.view(torch.uint8)


@lru_cache(maxsize=1)
def _base_block() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    limit = (1 << 63) - 1
    return torch.randint(-limit, limit, (_PATTERN_BYTES // 8,), generator=generator)


def write_file(path: Path, tensor: torch.Tensor) -> None:
    """Writes a CPU byte tensor to a file: allocated in one go, direct where that works, durable.

    So whatever is measured later overwrites blocks that were written before, and reads find nothing
    in the page cache where direct I/O works.
    """
    with nvmeio.AioHandle() as handle:
        handle.sync_pwrite(tensor, path)
        handle.sync_fsync(path)


def buffer_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU byte tensor, for plain Python; valid while the tensor is."""
    return memory_at(tensor.data_ptr(), tensor.nbytes)

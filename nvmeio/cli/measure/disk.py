"""What a transfer took beside time: processor, drive, page cache."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from nvmeio._files.plan import PAGE_BYTES
from nvmeio._files.system import find_mount
from nvmeio._memory.system import proc_bytes
from nvmeio.cli.measure import machine

SECTOR = 512  # /proc/diskstats counts in these whatever the drive's own block is


def cpu_seconds() -> float:
    """User and system time of this process so far, all threads included."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class DiskBytes(NamedTuple):
    """What drives have moved since boot, by anybody."""

    read: int
    written: int

    def since(self, earlier: DiskBytes) -> DiskBytes:
        """What they have moved between two looks."""
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
        if not self.names:
            return None
        try:
            lines = Path("/proc/diskstats").read_text().splitlines()
        except OSError:
            return None
        for fields in map(str.split, lines):
            if fields[2] in self.names:
                read += int(fields[5]) * SECTOR
                written += int(fields[9]) * SECTOR
        return DiskBytes(read, written)


def free_huge_pages() -> int:
    """Pages that are reserved for whoever asks for huge ones, and not taken."""
    # A count, without the unit that `proc_bytes` takes it for.
    return (proc_bytes("/proc/meminfo", "HugePages_Free") or 0) >> 10


def drop_from_cache(path: Path) -> None:
    """Takes a file's pages out of the page cache, dirty ones by way of the drive."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fdatasync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def cached_fraction(path: Path) -> float | None:
    """How much of a file lies in the page cache, from 0 to 1; None where nobody can tell."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            nbytes = os.fstat(descriptor).st_size
            return _resident_fraction(descriptor, nbytes) if nbytes else None
        finally:
            os.close(descriptor)
    return None


def _resident_fraction(descriptor: int, nbytes: int) -> float | None:
    # Python's mmap gives no address of a read-only mapping, and mincore(2) wants one.
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    address = libc.mmap(None, nbytes, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    if address == ctypes.c_void_p(-1).value:
        return None
    try:
        pages = -(-nbytes // PAGE_BYTES)
        resident = ctypes.create_string_buffer(pages)
        if libc.mincore(address, nbytes, resident):
            return None
        # The lowest bit says resident, the others are reserved (man 2 mincore).
        absent = resident.raw.count(b"\0")
        return (pages - absent) / pages
    finally:
        libc.munmap(address, nbytes)

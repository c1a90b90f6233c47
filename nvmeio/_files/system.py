"""Facts about files from the kernel: their mount, whether a journal keeps order, what is cached.

nvmeio reads direct and leaves the cache alone. But a file that was just written or downloaded may
be in it, and then a processor brings some of the bytes while the drive brings others.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from nvmeio._bindings import memory_at
from nvmeio._memory.system import text_of
from nvmeio._pages import PAGE_BYTES
from nvmeio._threads.closing import opened


@dataclass(frozen=True)
class Mount:
    """A line of /proc/self/mountinfo."""

    mount_id: int
    device: str
    mount_point: str
    file_system: str
    source: str


def parse_mountinfo(text: str) -> list[Mount]:
    """Reads the format of proc_pid_mountinfo(5); lines that do not follow it are left out."""
    mounts = []
    for line in text.splitlines():
        before, separator, after = line.partition(" - ")
        left, right = before.split(" "), after.split(" ")
        if separator and len(left) >= 6 and len(right) >= 2:
            names = map(_unescape, (left[4], *right[:2]))
            mounts.append(Mount(int(left[0]), left[2], *names))
    return mounts


def find_mount(directory: Path) -> Mount | None:
    """The mount that a directory lies in.

    It is found by mount id: the longest matching path may be hidden by another mount, and btrfs
    gives each subvolume a device number of its own.
    """
    with opened(directory, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
        fdinfo = text_of(f"/proc/self/fdinfo/{descriptor}")
    found = re.search(r"^mnt_id:\s*(\d+)", fdinfo, re.MULTILINE)
    if not found:
        return None
    mounts = parse_mountinfo(text_of("/proc/self/mountinfo"))
    return next((mount for mount in mounts if mount.mount_id == int(found[1])), None)


def file_system_of(device: int) -> str:
    """The type of the file system with this device number, or "" where none is mounted."""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    mounts = parse_mountinfo(text_of("/proc/self/mountinfo"))
    return next((mount.file_system for mount in mounts if mount.device == wanted), "")


def journal_keeps_order(path: str) -> bool:
    """Whether what a drive has of a file here is durable before any later rename of the file is.

    So it is on ext4 with its own journal and data=ordered, and on XFS without a real-time drive:
    both log a change of blocks or sizes before a page counts as written, in the order of the
    changes, and flush the drive before the log is valid. btrfs notes an extent after its pages
    count as written. Source: fs/ext4/page-io.c, fs/xfs/xfs_aops.c (what ends an I/O),
    fs/jbd2/commit.c, fs/xfs/xfs_log_cil.c (the flush). `make power` tries it.
    """
    return _kind_and_order(*_mounted(path))[1]


def is_local(path: str | int) -> bool:
    """Whether files here are on a drive of this machine, or in memory: no server is waited for."""
    return _kind_and_order(*_mounted(path))[0] in _LOCAL


_LOCAL = ("ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "tmpfs", "overlay")


def _mounted(path: str | int) -> tuple[int, int]:
    return os.stat(path).st_dev, os.statvfs(path).f_fsid


@functools.lru_cache(maxsize=64)
def _kind_and_order(device: int, _file_system_id: int) -> tuple[str, bool]:
    kind = file_system_of(device)
    if kind == "xfs":
        return kind, "rtdev=" not in (text_of("/proc/self/mountinfo") or "rtdev=")
    name = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve().name
    ordered = "data=ordered" in text_of(f"/proc/fs/ext4/{name}/options").split()
    return kind, kind == "ext4" and ordered and os.path.exists(f"/proc/fs/jbd2/{name}-8")


def _unescape(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


_CACHESTAT = 451  # the number of the system call on every architecture; Linux 6.5


# Offset and length of a span, and `struct cachestat` of linux/mman.h, in pages: cached, dirty, in
# writeback, evicted, recently evicted.
_Range = ctypes.c_uint64 * 2
_Counts = ctypes.c_uint64 * 5


def is_cached(fd: int, start: int, nbytes: int) -> bool:
    """Whether the page cache holds all of a span of a file; takes microseconds and reads nothing.

    False as well if it cannot be told: before Linux 6.5, on a file system that does not say, or
    where a sandbox forbids the call.
    """
    if nbytes <= 0:
        return False
    span, counts = _Range(start, nbytes), _Counts()
    if _syscall(_CACHESTAT, fd, ctypes.byref(span), ctypes.byref(counts), 0) != 0:
        return False
    return counts[0] >= (start + nbytes - 1) // PAGE_BYTES - start // PAGE_BYTES + 1


def copy_cached(fd: int, start: int, memory: torch.Tensor) -> bool:
    """Fill contiguous CPU memory from a file through the page cache; `fd` has no O_DIRECT.

    False after an error or at the end of the file, whatever was copied. Blocks without the GIL for
    copies in memory, and for reads if pages have gone meanwhile.
    """
    room = memory_at(memory.data_ptr(), memory.nbytes)
    at = 0
    while at < memory.nbytes:
        try:
            got = os.preadv(fd, [room[at:]], start + at)
        except OSError:
            return False
        if not got:
            return False
        at += got
    return True


_syscall = ctypes.CDLL(None, use_errno=True).syscall
_syscall.restype = ctypes.c_long

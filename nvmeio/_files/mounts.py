"""Mounts: which file system a path lies in, as the kernel tells."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path


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
            mounts.append(
                Mount(
                    int(left[0]),
                    left[2],
                    _unescape(left[4]),
                    _unescape(right[0]),
                    _unescape(right[1]),
                )
            )
    return mounts


def find_mount(directory: Path) -> Mount | None:
    """The mount that a directory lies in.

    By mount id, for neither the longest matching path (mounts may hide one another) nor the device
    number (btrfs gives each subvolume its own) settles it.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fdinfo = _read(f"/proc/self/fdinfo/{descriptor}") or ""
    finally:
        os.close(descriptor)
    found = re.search(r"^mnt_id:\s*(\d+)", fdinfo, re.MULTILINE)
    if not found:
        return None
    mounts = parse_mountinfo(_read("/proc/self/mountinfo") or "")
    return next((mount for mount in mounts if mount.mount_id == int(found[1])), None)


def file_system_of(device: int) -> str:
    """The type of the file system with this device number, or "" where none is mounted."""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    mounts = parse_mountinfo(_read("/proc/self/mountinfo") or "")
    return next((mount.file_system for mount in mounts if mount.device == wanted), "")


def _unescape(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return None

"""How much memory is left: of the machine, of the control group, under the process's own limit."""

from __future__ import annotations

import resource
from pathlib import Path

from nvmeio._memory import system

_CGROUPS = Path("/sys/fs/cgroup")


def memory_left() -> int:
    """Bytes that could be taken now, by the strictest limit that is known.

    Source: proc(5), MemAvailable, VmSize and VmData; cgroups(7), memory.max; getrlimit(2),
        RLIMIT_AS and RLIMIT_DATA (private writable memory, since Linux 4.7).
    """
    known = [
        system.available_bytes(),
        _left_in_group(),
        _left_under(resource.RLIMIT_AS, "VmSize"),
        _left_under(resource.RLIMIT_DATA, "VmData"),
    ]
    return max(0, min((left for left in known if left is not None), default=1 << 30))


def _left_under(which: int, field: str) -> int | None:
    limit, _ = resource.getrlimit(which)
    used = system.proc_bytes("/proc/self/status", field)
    return None if limit == resource.RLIM_INFINITY or used is None else limit - used


def _left_in_group() -> int | None:
    """By the control group that this process is in, or one above it."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        name = next(line[3:] for line in lines if line.startswith("0::"))
    except (OSError, StopIteration):
        return None
    left: int | None = None
    group = _CGROUPS / name.lstrip("/")
    for directory in (group, *group.parents):
        if not directory.is_relative_to(_CGROUPS):
            break
        try:
            most = (directory / "memory.max").read_text().strip()
            used = int((directory / "memory.current").read_text())
        except (OSError, ValueError):
            continue
        if most != "max":
            here = int(most) - used
            left = here if left is None else min(left, here)
    return left

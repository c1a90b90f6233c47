"""A limit for what this process takes from here on, the page cache of what it reads included.

What the kernel caches of a mapped file belongs to no process, but to the control group of the one
that had it read. Source: Documentation/admin-guide/cgroup-v1/memory.rst and cgroup-v2.rst.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from nvmeio.cli.measure.worker import PeerUnavailable

_V1 = Path("/sys/fs/cgroup/memory")
_V2 = Path("/sys/fs/cgroup")


@contextlib.contextmanager
def limited(nbytes: int) -> Iterator[None]:
    """A group of this process's own; what it has already stays with the group it comes from.

    Raises:
        PeerUnavailable: Control groups cannot be made here (they take root).
    """
    parent, limit = (_V1, "memory.limit_in_bytes") if _V1.exists() else (_V2, "memory.max")
    group = parent / f"nvmeio-bench-{os.getpid()}"
    try:
        group.mkdir()
        try:
            (group / limit).write_text(str(nbytes))
            (group / "cgroup.procs").write_text(str(os.getpid()))
        except OSError:
            group.rmdir()
            raise
    except OSError as error:
        raise PeerUnavailable(
            f"its memory cannot be limited here ({error})", "run it as root, with control groups"
        ) from error
    try:
        yield
    finally:
        (parent / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()

"""Replaces files where the C library refuses or cuts short; tells what it saw, as JSON."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import sys
from typing import Any

from nvmeio._storage import replace
from nvmeio.errors import TransferError

folder, sent = sys.argv[1], sys.argv[2] == "sent"
libc = ctypes.CDLL(None)
noted = (ctypes.c_char * (1 << 16)).in_dll(libc, "noted")
refused = (ctypes.c_char * 32).in_dll(libc, "refused")
switches = {
    name: ctypes.c_int.in_dll(libc, name)
    for name in ("refused_with", "refused_times", "write_at_most", "steal")
}
replace.is_local = lambda path: True  # whatever holds the tests' files
replace.journal_keeps_order = lambda path: sent
PARTS = [b"", b"one", b"", b"two" * 1000, b"three"]


def tried(call: str = "", code: int = 0, times: int = 0, **others: int) -> dict[str, Any]:
    """Replace a file under one fault; what was called, raised and left."""
    path = os.path.join(folder, "file")
    with open(path, "wb") as old:
        old.write(b"old")
    refused.value, noted.value = call.encode(), b""
    for name, value in {"refused_with": code, "refused_times": times, **others}.items():
        switches[name].value = value
    found: dict[str, Any] = {"error": None}
    try:
        replace.replace_file(path, list(map(memoryview, PARTS)))
    except TransferError as failed:
        found["error"] = [failed.errno, failed.operation]
    for switch in switches.values():
        switch.value = 0
    found["calls"] = noted.value.decode().split()
    found["names"] = sorted(os.listdir(folder))
    with open(path, "rb") as left:
        data = left.read()
    found["left"] = {b"old": "old", b"".join(PARTS): "new"}.get(data, "wrong")
    found["descriptors"] = len(os.listdir("/proc/self/fd"))
    return found


CALLS = ("pwritev", "sync_file_range" if sent else "fdatasync", "rename", "fsync")
tried()
print(
    json.dumps(
        {
            "usual": tried(),
            "cut short": tried(write_at_most=1000),
            "stolen": tried(steal=1),
            "locked by another": tried("flock", errno.EWOULDBLOCK, 1),
            "no locks here": tried("flock", errno.EOPNOTSUPP, 9),
            "no mode": tried("fchmod", errno.EPERM, 9),
            "nothing can be sent": tried("sync_file_range", errno.ENOSYS, 9),
            "a directory without that": tried("fsync", errno.EINVAL, 9),
            **{f"{call} fails": tried(call, errno.EIO, 9) for call in CALLS},
            **{
                f"{call} interrupted": tried(call, errno.EINTR, 3)
                for call in CALLS
                if call != "rename"
            },
        }
    )
)

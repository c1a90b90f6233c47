"""What kernel and registry say of memory, for the tests of buffers and of page-locking."""

from __future__ import annotations

import subprocess
from pathlib import Path

import support

from nvmeio._memory import mappings as mappings_module
from nvmeio._pages import PAGE_BYTES

MIB = 1 << 20
PAGE = PAGE_BYTES


def status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


def entries() -> tuple[int, int, int]:
    """How much the registry has."""
    registry = mappings_module
    return len(registry.mapped), len(registry.locked), len(registry.pinned)


def none_more(before: tuple[int, ...], now: tuple[int, ...]) -> bool:
    return all(count <= then for count, then in zip(now, before, strict=True))


def is_mapped(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(part, 16) for part in line.split(" ")[0].split("-"))
        if start <= address < end:
            return True
    return False


def run_python(script: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a process of its own, where limits and forks do no harm."""
    return support.run_python(script, "-Wignore")

"""What the figures were measured on."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import time
from importlib import metadata
from pathlib import Path

DISTRIBUTIONS = (
    "nvmeio",
    "torch",
    "cffi",
    "uvloop",
    "isal",
    "deepspeed",
    "caio",
    "transformers",
    "safetensors",
    "fastsafetensors",
    "runai-model-streamer",
)


def machine(directory: Path, device: str | None) -> dict[str, str]:
    """Kernel, processor, memory, file system and device, as plain strings."""
    mount, file_system = _mount_of(directory)
    thp = _first_line("/sys/kernel/mm/transparent_hugepage/enabled")
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "kernel": platform.release(),
        "cpu": _cpu_model(),
        "cores": str(os.cpu_count()),
        "memory": f"{memory / (1 << 30):.0f} GiB",
        "file system": f"{file_system} on {mount}",
        "device": _device(device),
        "transparent huge pages": thp.partition("[")[2].partition("]")[0] or thp or "absent",
        "busy before the run": f"{_busy_share():.0%} of all cores",
    }


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    fio = shutil.which("fio")
    run = subprocess.run([fio, "--version"], capture_output=True, text=True) if fio else None
    found["fio"] = run.stdout.strip() if run else "not installed"
    return found


def _busy_share(seconds: float = 2.0) -> float:
    """What part of the processors others use while we do nothing: above some percent, doubt."""
    idle, total = _processor_ticks()
    time.sleep(seconds)
    idle_after, total_after = _processor_ticks()
    return 1 - (idle_after - idle) / max(1, total_after - total)


def _processor_ticks() -> tuple[int, int]:
    ticks = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return ticks[3] + ticks[4], sum(ticks)  # idle and waiting for the drive


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("model name", "Model")):
            return line.partition(":")[2].strip()
    return platform.machine()


def _mount_of(directory: Path) -> tuple[str, str]:
    """The longest mount point that is a parent, and its type."""
    best = ("/", "unknown")
    resolved = directory.resolve()
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mount, kind, *_ = line.split()
        if resolved.is_relative_to(mount) and len(mount) >= len(best[0]):
            best = (mount, kind)
    return best


def _device(name: str | None) -> str:
    if name is None:
        return "no block device"
    queue = Path("/sys/class/block", name, "queue")
    if not queue.is_dir():  # a partition has none; its parent does
        queue = Path("/sys/class/block", name).resolve().parent / "queue"
    model = _first_line(str(queue.parent / "device" / "model"))
    rotational = _first_line(str(queue / "rotational"))
    sector = _first_line(str(queue / "logical_block_size"))
    kind = {"0": "solid state", "1": "rotational"}.get(rotational, "unknown kind")
    return " ".join(part for part in (name, model, f"({kind}, {sector} B sectors)") if part)


def _first_line(path: str) -> str:
    try:
        return Path(path).read_text().strip().splitlines()[0]
    except (OSError, IndexError):
        return ""

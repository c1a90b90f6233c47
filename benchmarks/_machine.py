"""What the figures were measured on."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import time
from importlib import metadata
from pathlib import Path

from nvmeio.cli.measure import machine as facts

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
    "accelerate",
    "airllm",
    "xllamacpp",
)


def machine(directory: Path) -> dict[str, str]:
    """Kernel, processor, memory, file system and device, as plain strings."""
    there, software = facts.look_at(directory), facts.software()
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "kernel": software.kernel,
        "cpu": _cpu_model(),
        "cores": str(os.cpu_count()),
        "memory": f"{memory / (1 << 30):.0f} GiB",
        "file system": f"{there.file_system or 'unknown'} on {there.mount_point}",
        "device": _device(there.device),
        "transparent huge pages": facts.memory().huge_pages or "absent",
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


def _device(device: facts.Device | None) -> str:
    if device is None:
        return "no block device"
    kind = {False: "solid state", True: "rotational", None: "unknown kind"}[device.rotational]
    what = f"({kind}, {device.logical_block_size} B sectors)"
    return " ".join(part for part in (device.name, device.model, what) if part)

"""Part A: is it alive? The machine, bytes through the ring, and what the ring is made of."""

from __future__ import annotations

import dataclasses
import os
import platform
import statistics
import subprocess
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

import nvmeio
from gpu_steps import common
from gpu_steps.common import Plan, Step, check, rate, transfer_rates
from gpu_steps.correctness import correctness


def facts(step: Step) -> dict[str, Any]:
    """Driver, kernel, file system, torch, GPU, and whether cuFile can be used in the directory."""
    from nvmeio.cli.measure.machine import find_cufile, look_into_cufile

    directory = step.file.parent
    cufile = look_into_cufile(find_cufile(), [directory])
    if refused := cufile.refused.get(str(directory)):
        cufile = dataclasses.replace(cufile, usable=False, reason=refused)
    told = {
        "driver": driver(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "file_system": file_system(directory),
        "cufile": dataclasses.asdict(cufile),
    }
    if torch.cuda.is_available():
        told["gpu"] = torch.cuda.get_device_name()
    return told


def driver(path: Path = Path("/proc/driver/nvidia/version")) -> str:
    """Which one of NVIDIA's is loaded; nvidia-smi knows it where a container hides the file."""
    if path.exists():
        return path.read_text().split("\n")[0].removeprefix("NVRM version: ").strip()
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return asked.stdout.strip().split("\n")[0]
    except (OSError, subprocess.SubprocessError):
        return "none"


def file_system(directory: Path) -> str:
    """Its type, and where direct I/O goes."""
    from nvmeio.files import probe_direct

    command = ["stat", "-f", "-c", "%T", str(directory)]
    kind = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    support = probe_direct(directory)
    return f"{kind or 'unknown'}, {'direct I/O' if support.supported else support.reason}"


def host_to_device(step: Step) -> dict[str, Any]:
    """Copies of 16 MiB from page-locked memory, nvmeio's and torch's, and nothing else."""
    tensor = torch.empty(step.size, dtype=torch.uint8, device="cuda")
    # After that: what is page-locked before CUDA has a context is not registered with it.
    ours = nvmeio.empty_pinned(64 * common.MIB, dtype=torch.uint8)
    theirs = torch.zeros(64 * common.MIB, dtype=torch.uint8).pin_memory()

    def up(memory: torch.Tensor) -> None:
        for start in range(0, step.size, 16 * common.MIB):
            part = tensor[start : start + 16 * common.MIB]
            at = start % (64 * common.MIB)
            part.copy_(memory[at : at + part.numel()], non_blocking=True)

    check(ours.is_pinned() and theirs.is_pinned(), "page-locked memory that CUDA knows nothing of")
    rates = {"read": rate(step, lambda: up(ours)), "torch": rate(step, lambda: up(theirs))}
    return {"read": rates["read"], "from_torchs_gb_per_s": rates["torch"]["gb_per_s"]}


def aio_to_cpu(step: Step) -> dict[str, Any]:
    """The drive into page-locked host memory: what the ring can give at most."""
    with nvmeio.AioHandle() as handle, nvmeio.open(step.file) as file:
        memory = nvmeio.empty_pinned(step.size, dtype=torch.uint8)
        return {"read": rate(step, lambda: handle.sync_pread(memory, file))}


def page_locking(step: Step) -> dict[str, Any]:
    """How fast host memory is page-locked and registered with CUDA, in GB/s."""
    from nvmeio._memory import devices

    nbytes = 64 * common.MIB
    devices.enter(torch.device("cuda", 0))
    times = []
    for _ in range(common.TURNS):
        memory = nvmeio.empty_aligned(nbytes, dtype=torch.uint8)
        memory.zero_()  # the kernel has found the pages
        began = time.perf_counter()
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        check(int(runtime.cudaHostRegister(memory.data_ptr(), nbytes, 0)) == 0, "register")
        times.append(time.perf_counter() - began)
        runtime.cudaHostUnregister(memory.data_ptr())
    return {"register_gb_per_s": round(nbytes / 1e9 / statistics.median(times), 2)}


def events(step: Step) -> dict[str, Any]:
    """What an event costs: recorded, asked, and waited for; in microseconds."""
    tensor = torch.zeros(1024, device="cuda")
    event: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    stream: Any = torch.cuda.current_stream()
    told: dict[str, list[float]] = {"record_us": [], "query_us": [], "wait_us": []}
    for _ in range(300):
        tensor.add_(1)
        for name, work in (
            ("record_us", lambda: event.record(stream)),
            ("query_us", event.query),
            ("wait_us", event.synchronize),
        ):
            began = time.perf_counter()
            work()
            told[name].append(1e6 * (time.perf_counter() - began))
    return {name: round(statistics.median(times), 1) for name, times in told.items()}


def steps(on_gpu: bool) -> dict[str, Plan]:
    """By name, those whose results matter most first."""
    of_gpu = {
        "host to device alone": Plan(host_to_device),
        "aio to page-locked CPU": Plan(aio_to_cpu),
        "aio ring": Plan(ring, 90),
        "page-locking": Plan(page_locking),
        "events": Plan(events),
    }
    return {
        "facts": Plan(facts),
        "correctness aio": Plan(partial(correctness, gds=False), 90),
        **(of_gpu if on_gpu else {}),
    }


def ring(step: Step) -> dict[str, Any]:
    """Reads and writes of the whole file through the ring, in GB/s."""
    return transfer_rates(step, False, False)

"""What steps of gpu_check.py share: where they work, the file's contents, and rates."""

from __future__ import annotations

import asyncio
import os
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import nvmeio

MIB = 1 << 20
TURNS = 3


@dataclass(frozen=True)
class Plan:
    """A step: what it does, and the seconds that it may take.

    Attributes:
        work: Does it. The first line of its docstring is what `--plan` says.
        limit_s: How long it may take.
        needs_cufile: It is skipped where cuFile cannot be used.
        is_optional: Others' loaders: that they cannot run here is no failure.
        environment: Variables that its process is started with.
    """

    work: Callable[[Step], dict[str, Any]]
    limit_s: float = 60
    needs_cufile: bool = False
    is_optional: bool = False
    environment: dict[str, str] = field(default_factory=dict)


def wrong(what: str) -> SystemExit:
    """Bytes or numbers are not what they have to be: the run ends with this."""
    return SystemExit(f"WRONG: {what}")


def check(holds: bool, what: str) -> None:
    """Raise `wrong` unless it holds."""
    if not holds:
        raise wrong(what)


class Step:
    """Where a step works, and on what."""

    def __init__(self, directory: Path, size: int, device: str) -> None:
        self.file = directory / "data.bin"
        self.scratch = directory / "scratch.bin"
        self.size = size
        self.device = device

    def handle(self, gds: bool, **options: Any) -> nvmeio.AioHandle:
        if not gds:
            return nvmeio.AioHandle(**options)
        return nvmeio.GdsHandle(cpu_tensors="aio" if self.device == "cuda" else "cufile", **options)


def expected(nbytes: int, start: int = 0) -> torch.Tensor:
    """The file's contents: byte i is i * 2654435761 >> 16."""
    return ((torch.arange(start, start + nbytes) * 2654435761) >> 16).to(torch.uint8)


def make_file(step: Step) -> None:
    period = 1 << 24  # of the contents
    part = expected(period).numpy().tobytes()
    with open(step.file, "wb") as file:
        for start in range(0, step.size, period):
            file.write(part[: step.size - start])
        file.flush()
        os.fsync(file.fileno())


def forget(path: Path) -> None:
    """Out of the page cache."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def synchronize(step: Step) -> None:
    if step.device == "cuda":
        torch.cuda.synchronize()


def rate(
    step: Step, work: Callable[[], Any], reads: bool = True, nbytes: int | None = None
) -> dict[str, float]:
    """GB/s and CPU seconds per GB of a blocking piece of work over the whole file, or `nbytes`."""
    seconds, cpu = [], []
    for _ in range(TURNS):
        if reads:
            forget(step.file)
        used = resource.getrusage(resource.RUSAGE_SELF)
        began = time.perf_counter()
        work()
        synchronize(step)
        seconds.append(time.perf_counter() - began)
        after = resource.getrusage(resource.RUSAGE_SELF)
        cpu.append(after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime)
    gigabytes = (nbytes or step.size) / 1e9
    return {
        "gb_per_s": round(gigabytes / statistics.median(seconds), 3),
        "cpu_s_per_gb": round(statistics.median(cpu) / gigabytes, 3),
    }


def awaited(start: Callable[[], Any], lags: list[float]) -> Callable[[], None]:
    """The same with an event loop beside it, whose lag is noted down."""

    async def main() -> None:
        operation = start()
        while not operation.done():
            began = time.perf_counter()
            await asyncio.sleep(0.001)
            lags.append(time.perf_counter() - began - 0.001)
        await operation

    return lambda: asyncio.run(main())


def transfer_rates(step: Step, gds: bool, registered: bool, **options: Any) -> dict[str, Any]:
    lags: list[float] = []
    with step.handle(gds, **options) as handle:
        if registered:
            assert isinstance(handle, nvmeio.GdsHandle)
            tensor = handle.new_pinned_device_tensor(step.size, torch.uint8)
        elif step.device == "cuda":
            tensor = torch.empty(step.size, dtype=torch.uint8, device="cuda")
        else:
            tensor = nvmeio.empty_aligned(step.size, dtype=torch.uint8)
        with nvmeio.open(step.file, "r+") as file:
            handle.sync_pread(tensor[:MIB], file)
            read = rate(step, awaited(lambda: handle.async_pread(tensor, file), lags))
            write = rate(step, lambda: handle.sync_pwrite(tensor, file), reads=False)
        lags.sort()
        return {
            "read": read,
            "write": write,
            "loop_lag_p99_ms": round(1000 * lags[int(len(lags) * 0.99)], 3) if lags else None,
            "mode": handle.mode if isinstance(handle, nvmeio.GdsHandle) else "ring",
        }

"""CUDA tensors to and from files on this machine, and training with them: right, and how fast?

    python benchmarks/gpu_check.py --dir /mnt/nvme --json gpu.json

Needs torch with CUDA, cffi, numpy and this repository with its shim built in place
(`python setup.py build_ext --inplace`); safetensors and torch's own GdsFile are measured where they
are. Each step is a process of its own with a time limit, so one that hangs or crashes is a line in
the table and not the end of the run. The steps that matter most come first; all of them end after
`--minutes`, and what was not reached is named. `--json` and `--table` (the results as docs/gds.md
has them) are written after each step, so that a run which is cut short leaves what it knows.
Without a GPU it says so, and runs what needs none: training, streaming and checkpoints on the CPU,
and cuFile on host memory, where a libcufile of 1.16 or newer is installed and its driver can be
opened. `--dry-run` does that on any machine, with little data: it tells whether the steps work, and
no figure.

Reads are measured with the file out of the page cache (posix_fadvise); figures are the median of
three turns, in GB/s (10**9 bytes). "mode" is `GdsHandle.mode`: in mode compat nothing is DMA.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import gpu_training  # noqa: E402
import torch  # noqa: E402

import nvmeio  # noqa: E402

MIB = 1 << 20
TURNS = 3
MOST_ROWS = 1 << 20  # of a gather: with sixteen times as many, a step takes a quarter of an hour
MINUTES = 6.5  # below the ten that some machines give a command
OPTIONAL = ("safetensors", "torch GdsFile")  # others' loaders: that they cannot run is no failure


# What steps share


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


# Steps


def facts(step: Step) -> dict[str, Any]:
    from nvmeio.cli.measure.machine import find_cufile, look_into_cufile

    cufile = look_into_cufile(find_cufile())
    told = {
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "cufile": {name: getattr(cufile, name) for name in cufile.__dataclass_fields__},
    }
    if torch.cuda.is_available():
        told["gpu"] = torch.cuda.get_device_name()
    return told


def correctness(step: Step, gds: bool) -> dict[str, Any]:
    """dtypes, views, offsets, unaligned, registered or not, odd tails; order without syncs."""
    checked = 0

    def check(holds: bool, what: str) -> None:
        nonlocal checked
        checked += 1
        if not holds:
            raise SystemExit(f"WRONG: {what}")

    def empty(nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, device=step.device)

    with step.handle(gds) as handle:
        spans = [(0, 1), (0, 4096), (4096, 8192), (1, 5000), (12345, MIB + 3), (4095, 40 * MIB + 1)]
        for offset, nbytes in spans:
            data = expected(nbytes, offset).to(step.device)
            step.scratch.write_bytes(b"\xee" * (offset + nbytes + 100))
            handle.sync_pwrite(data, step.scratch, offset)
            found = torch.frombuffer(bytearray(step.scratch.read_bytes()), dtype=torch.uint8)
            around = torch.cat((found[:offset], found[offset + nbytes :]))
            check(bool((around == 0xEE).all()), f"neighbours of [{offset}, +{nbytes})")
            check(torch.equal(found[offset : offset + nbytes], data.cpu()), f"write at {offset}")
            back = empty(nbytes + 64)[3 : nbytes + 3]
            handle.sync_pread(back, step.scratch, offset)
            check(torch.equal(back, data), f"read at {offset}, {nbytes} bytes")
            if isinstance(handle, nvmeio.GdsHandle):
                whole = handle.new_pinned_device_tensor(nbytes + 8192, torch.uint8)
                handle.sync_pread(whole[4096 : 4096 + nbytes], step.scratch, offset)
                check(torch.equal(whole[4096 : 4096 + nbytes], data), f"registered, {nbytes}")
                step.scratch.write_bytes(b"\xee" * (offset + nbytes + 100))
                handle.sync_pwrite(whole[4096 : 4096 + nbytes], step.scratch, offset)
                there = step.scratch.read_bytes()[offset : offset + nbytes]
                check(there == data.cpu().numpy().tobytes(), f"registered write, {nbytes}")
                handle.free_pinned_device_tensor(whole)
        for dtype in (
            torch.bool,
            torch.bfloat16,
            torch.float8_e4m3fn,
            torch.int64,
            torch.complex64,
        ):
            data = (torch.arange(5001, device=step.device) % 2).to(dtype)
            back = torch.empty_like(data)
            handle.sync_pwrite(data, step.scratch)
            handle.sync_pread(back, step.scratch)
            check(torch.equal(back.view(torch.uint8), data.view(torch.uint8)), str(dtype))
        check(turned_is_right(step, handle), "not contiguous")
        # kernel → write, and read → kernel, with nobody synchronising
        side = torch.cuda.Stream() if step.device == "cuda" else None
        for turn in range(8):
            big = torch.zeros(16 * MIB, device=step.device)
            if side is not None:
                side.wait_stream(torch.cuda.current_stream())  # the zeros are another stream's
            with torch.cuda.stream(side):
                for _ in range(50):
                    big += 1
                big += turn
                writing = handle.async_pwrite(big, step.scratch)
            writing.result()
            back = torch.empty_like(big)
            handle.sync_pread(back, step.scratch)
            check(bool((back == 50 + turn).all()), f"order, turn {turn}")
        # cancel, then the same memory again
        tensor = empty(min(step.size, 512 * MIB))
        for _ in range(5):
            reading = handle.async_pread(tensor, step.file)
            reading.cancel()
            while not reading.done():
                time.sleep(0.001)
            tensor.fill_(7)
            synchronize(step)
            time.sleep(0.01)
            check(bool((tensor == 7).all()), "memory is left alone after a cancel")
        handle.sync_pread(tensor, step.file)
        check(torch.equal(tensor[-MIB:].cpu(), expected(MIB, tensor.numel() - MIB)), "reuse")
        mode = handle.mode if isinstance(handle, nvmeio.GdsHandle) else "ring"
    return {"checked": checked, "mode": mode}


def turned_is_right(step: Step, handle: nvmeio.AioHandle) -> bool:
    """Whether a tensor that is not contiguous comes back as it went."""
    turned = torch.arange(512 * 700, device=step.device).reshape(512, 700).t()
    back = torch.zeros(512, 700, dtype=torch.int64, device=step.device).t()
    handle.sync_pwrite(turned, step.scratch)
    handle.sync_pread(back, step.scratch)
    return torch.equal(back, turned)


def raw_cufile(step: Step, threads: int, task: int, registered: bool) -> dict[str, Any]:
    """The best that a plain loop of cuFileRead in threads can do."""
    from nvmeio.engines.cufile.driver import DRIVER, DriverSettings

    library = DRIVER.acquire(DriverSettings(needs_cuda=step.device == "cuda"))
    if step.device == "cuda":
        tensor = torch.empty(step.size, dtype=torch.uint8, device="cuda")
    else:
        tensor = nvmeio.empty_aligned(step.size, dtype=torch.uint8)
    if registered:
        library.register_memory(tensor.data_ptr(), tensor.nbytes)
    fd = os.open(step.file, os.O_RDONLY | os.O_DIRECT)
    handle = library.register_file(fd)

    def enter() -> None:
        if step.device == "cuda":
            torch.cuda.set_device(0)
            torch.cuda.mem_get_info()

    with ThreadPoolExecutor(threads, initializer=enter) as pool:

        def read(start: int) -> None:
            nbytes = min(task, step.size - start)
            moved = library.read(handle, tensor.data_ptr(), nbytes, start, start)
            if moved != nbytes:
                raise SystemExit(f"cuFileRead moved {moved} of {nbytes} bytes at {start}")

        found = rate(step, lambda: list(pool.map(read, range(0, step.size, task))))
    library.unregister_file(handle)
    os.close(fd)
    if registered:
        library.unregister_memory(tensor.data_ptr())
    DRIVER.release()
    return {"read": found}


def raw_preadv(step: Step) -> dict[str, Any]:
    """Threads of preadv with O_DIRECT, 8 MiB a call."""
    memory = nvmeio.empty_aligned(step.size, dtype=torch.uint8)
    view = memoryview(memory.numpy())
    fd = os.open(step.file, os.O_RDONLY | os.O_DIRECT)
    with ThreadPoolExecutor(8) as pool:

        def read(start: int) -> None:
            os.preadv(fd, [view[start : start + 8 * MIB]], start)

        found = rate(step, lambda: list(pool.map(read, range(0, step.size, 8 * MIB))))
    os.close(fd)
    return {"read": found}


def host_to_device(step: Step) -> dict[str, Any]:
    """Copies of 16 MiB from page-locked memory, and nothing else."""
    chunk = nvmeio.empty_pinned(64 * MIB, dtype=torch.uint8)
    tensor = torch.empty(step.size, dtype=torch.uint8, device="cuda")

    def up() -> None:
        for start in range(0, step.size, 16 * MIB):
            part = tensor[start : start + 16 * MIB]
            at = start % (64 * MIB)
            part.copy_(chunk[at : at + part.numel()], non_blocking=True)

    return {"read": rate(step, up)}


def aio_to_cpu(step: Step) -> dict[str, Any]:
    """The drive into page-locked host memory: what the ring can give at most."""
    with nvmeio.AioHandle() as handle, nvmeio.open(step.file) as file:
        memory = nvmeio.empty_pinned(step.size, dtype=torch.uint8)
        return {"read": rate(step, lambda: handle.sync_pread(memory, file))}


def torch_load(step: Step) -> dict[str, Any]:
    torch.save(torch.empty(step.size, dtype=torch.uint8), step.scratch)

    def load() -> None:
        forget(step.scratch)
        torch.load(step.scratch, map_location=step.device, weights_only=True)

    return {"read": rate(step, load)}


def safetensors_load(step: Step) -> dict[str, Any]:
    from safetensors.torch import load_file, save_file

    save_file({"x": torch.empty(step.size, dtype=torch.uint8)}, step.scratch)

    def load() -> None:
        forget(step.scratch)
        load_file(step.scratch, device=step.device)["x"].clone()

    return {"read": rate(step, load)}


def torch_gds(step: Step) -> dict[str, Any]:
    from torch.cuda.gds import GdsFile

    tensor = torch.empty(step.size, dtype=torch.uint8, device="cuda")
    file = GdsFile(str(step.file), os.O_RDONLY | os.O_DIRECT)
    return {"read": rate(step, lambda: file.load_storage(tensor.untyped_storage(), 0))}


def latency(step: Step, gds: bool) -> dict[str, Any]:
    """Median and p99 of single reads, in microseconds."""
    told: dict[str, Any] = {}
    with step.handle(gds) as handle, nvmeio.open(step.file) as file:
        for nbytes in (4096, 65536, MIB):
            tensor = torch.empty(nbytes, dtype=torch.uint8, device=step.device)
            times = []
            forget(step.file)
            for i in range(300):
                began = time.perf_counter()
                handle.sync_pread(
                    tensor, file, i * 7919 * 4096 % (step.size - nbytes) // 4096 * 4096
                )
                times.append(1e6 * (time.perf_counter() - began))
            times.sort()
            told[f"{nbytes // 1024} KiB"] = {
                "p50_us": round(times[150]),
                "p99_us": round(times[297]),
            }
    return told


def rows(step: Step, gds: bool, row_bytes: int) -> dict[str, Any]:
    """A gather and a scatter of neighbouring rows in any order: right, and how fast?

    Beside it how much host memory the process has taken more than before, in MiB: the ring's, and
    16 bytes a row.
    """
    number = min(step.size // row_bytes, MOST_ROWS)
    whole = number * row_bytes
    order = torch.randperm(number, generator=torch.Generator().manual_seed(0))
    places = order * row_bytes
    with step.handle(gds) as handle, nvmeio.open(step.file, "r+") as file:
        out = torch.zeros(number, row_bytes, dtype=torch.uint8, device=step.device)
        handle.sync_pread(out[0], file)  # the device's context, and the ring itself
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        gathered = rate(step, lambda: handle.sync_gather(out, file, places), nbytes=whole)
        scattered = rate(step, lambda: handle.sync_scatter(out, file, places), False, whole)
        taken = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        out.zero_()
        forget(step.file)
        handle.sync_gather(out, file, places)
        for row in (0, 1, number // 3, number - 1):
            wanted = expected(row_bytes, int(places[row]))
            if not torch.equal(out[row].cpu(), wanted):
                raise SystemExit(f"WRONG: row {row} of {row_bytes} bytes")
        if handle.stats.errors:
            raise SystemExit(f"WRONG: {handle.stats}")
    return {"read": gathered, "write": scattered, "host_mib": taken >> 10}


def checkpoint(step: Step, snapshot: str) -> dict[str, Any]:
    """A save every iteration: is each file the state at its save, and what does it cost?"""
    side = max(int((step.size / 12 / 8) ** 0.5), 64)  # with Adam's moments: as large as the file
    layers = [torch.nn.Linear(side, side, device=step.device) for _ in range(8)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    batch = 4 * side if step.device == "cuda" and step.size >= 1 << 30 else 16
    rows = torch.randn(batch, side, device=step.device)

    def iterate(forwards: int = 4) -> None:
        for _ in range(forwards):  # gradients are accumulated
            model(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def timed(saves: bool) -> float:
        seconds = []
        for number in range(TURNS + 1):
            synchronize(step)
            began = time.perf_counter()
            iterate()
            if saves:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                reports.append(saver.save_sync(state, 100 + number))
            synchronize(step)
            seconds.append(time.perf_counter() - began)
        return statistics.median(seconds[1:])

    reports: list[nvmeio.SaveReport] = []
    with (
        tempfile.TemporaryDirectory(dir=step.file.parent) as directory,
        nvmeio.Checkpointer(directory, keep=2, snapshot=snapshot) as saver,
    ):
        iterate()
        ends = []
        for number in range(3):
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            synchronize(step)
            wanted = torch.cat([each.detach().flatten().cpu() for each in model.parameters()])
            iterate(1)  # queued, and not waited for: the save comes after it
            reports.append(saver.save_sync(state, number))
            before = [each.detach().clone() for each in model.parameters()]
            iterate(1)  # its step comes while the copies are made
            ends.append(saver.wait_sync())
            there = saver.restore(number)["model"]
            for found, each in zip(there.values(), before, strict=True):
                if not torch.equal(found.cpu(), each.cpu()):
                    raise RuntimeError(f"step {number}: a tensor is not what it was when saved")
            if torch.equal(torch.cat([each.flatten() for each in there.values()]).cpu(), wanted):
                raise RuntimeError(f"step {number}: the iteration before the save is not in it")
        alone, beside = timed(False), timed(True)
        saver.wait_sync()
    return {
        "checked": len(ends),
        "held_ms": [round(1e3 * report.held_s, 1) for report in reports],
        "step_held_ms": [round(1e3 * end.step_held_s, 1) for end in ends if end is not None],
        "written_s": [round(end.written_s, 3) for end in ends if end is not None],
        "speed_with_a_save_every_iteration": round(alone / beside, 3),
    }


def train(step: Step, gradients: str, stepped_there: bool = False) -> dict[str, Any]:
    folder, size, device = step.file.parent, step.size, step.device
    return gpu_training.training(folder, size, device, gradients, stepped_there)


def train_by_gds(step: Step) -> dict[str, Any]:
    with step.handle(True) as handle:
        folder, size, device = step.file.parent, step.size, step.device
        return gpu_training.training(folder, size, device, "memory", handle=handle)


@dataclass(frozen=True)
class Plan:
    """A step: what it does, and the seconds that it may take."""

    work: Callable[[Step], dict[str, Any]]
    limit_s: float
    needs_cufile: bool = False


def steps(on_gpu: bool) -> dict[str, Plan]:
    """By name, those whose results matter most first."""
    gpu_alone = {
        "host to device alone": Plan(host_to_device, 60),
        "aio to page-locked CPU": Plan(aio_to_cpu, 60),
        "aio ring": Plan(lambda step: transfer_rates(step, False, False), 90),
        "latency aio": Plan(lambda step: latency(step, False), 60),
    }
    found = {
        "facts": Plan(facts, 60),
        "correctness aio": Plan(lambda step: correctness(step, False), 90),
        **(gpu_alone if on_gpu else {}),
        "correctness gds": Plan(lambda step: correctness(step, True), 90, True),
        **cufile_pair(4, 8, False),
        "train, gradients in memory": Plan(lambda step: train(step, "memory"), 90),
        "stream": Plan(lambda s: gpu_training.streaming(s.file.parent, s.size, s.device), 60),
        "checkpoint, protected": Plan(lambda step: checkpoint(step, "auto"), 90),
        "rows of 4096 bytes, aio": Plan(lambda step: rows(step, False, 4096), 90),
        "train, gds": Plan(train_by_gds, 90, True),
        "train, gradients on the drive": Plan(lambda step: train(step, "disk"), 90),
        "train, stepped on the device": Plan(lambda step: train(step, "memory", True), 90),
        "stream, adapters trained": Plan(
            lambda s: gpu_training.adapters(s.file.parent, s.size, s.device), 60
        ),
        "checkpoint": Plan(lambda step: checkpoint(step, "copy"), 90),
        "latency gds": Plan(lambda step: latency(step, True), 60, True),
        "raw preadv, 8 threads": Plan(raw_preadv, 60),
        "rows of 256 bytes, aio": Plan(lambda step: rows(step, False, 256), 90),
    }
    if on_gpu:
        found |= {
            "rows of 4096 bytes, gds": Plan(lambda step: rows(step, True, 4096), 90, True),
            "torch.load": Plan(torch_load, 60),
            "safetensors": Plan(safetensors_load, 60),
            "torch GdsFile": Plan(torch_gds, 60, True),
            **cufile_pair(4, 8, True),
        }
        for threads, task in [(8, 8), (1, 8), (16, 8), (8, 16), (8, 4)]:
            for registered in (False, True):
                found |= cufile_pair(threads, task, registered)
    return found


def cufile_pair(threads: int, task: int, registered: bool) -> dict[str, Plan]:
    """cuFile by hand and through nvmeio, with so many threads and so many MiB a call."""
    tail = f"{threads} x {task} MiB{', registered' if registered else ''}"

    def by_nvmeio(step: Step) -> dict[str, Any]:
        options = {"intra_op_parallelism": threads, "task_bytes": task * MIB}
        return transfer_rates(step, True, registered, **options)

    return {
        f"raw cuFile, {tail}": Plan(
            lambda step: raw_cufile(step, threads, task * MIB, registered), 60, True
        ),
        f"gds, {tail}": Plan(by_nvmeio, 90, True),
    }


# The run


def run_step(name: str, arguments: argparse.Namespace, directory: Path, limit: float) -> Any:
    command = [sys.executable, __file__, "--step", name, "--dir", str(directory)]
    command += ["--size", str(arguments.size)] + ["--dry-run"] * arguments.dry_run
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=output, stderr=errors)
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            return {"failed": f"not done after {limit:.0f} s"}
        finally:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)  # one that hangs in a driver may not end at all
        output.seek(0)
        errors.seek(0)
        lines = output.read().strip().splitlines()
        if process.returncode or not lines:
            said = [line.rstrip() for line in errors if line.strip() and not line.startswith(" ")]
            return {"failed": f"status {process.returncode}: {said[-1] if said else 'no output'}"}
        return json.loads(lines[-1])


def run_all(
    arguments: argparse.Namespace, on_gpu: bool, directory: Path, ends: float
) -> dict[str, Any]:
    """The results by step, which are written after each."""
    results: dict[str, Any] = {}
    plans = steps(on_gpu)
    chosen = {name: plan for name, plan in plans.items() if arguments.only in name}
    if any(plan.needs_cufile for plan in chosen.values()):
        chosen = {"facts": plans["facts"], **chosen}  # whether it can be used
    for name, plan in chosen.items():
        left = ends - time.monotonic()
        refusal = cufile_refusal(results) if plan.needs_cufile else ""
        if refusal:
            results[name] = {"skipped": refusal}
        elif left < 1:
            results[name] = {"skipped": f"{arguments.minutes:g} minutes are over: --minutes"}
        else:
            began = time.monotonic()
            results[name] = run_step(name, arguments, directory, min(plan.limit_s, left))
            results[name]["seconds"] = round(time.monotonic() - began, 1)
        show(name, results[name])
        write(arguments, on_gpu, results)
    return results


def cufile_refusal(results: dict[str, Any]) -> str:
    """Why steps that need cuFile are pointless, or ""."""
    if "cufile" not in results["facts"]:
        return "it is not known whether cuFile can be used: see the facts"
    cufile = results["facts"]["cufile"]
    return "" if cufile["usable"] else cufile["driver"] or cufile["reason"]


def write(arguments: argparse.Namespace, on_gpu: bool, results: dict[str, Any]) -> None:
    if arguments.table:
        replace(arguments.table, table(results))
    if arguments.json:
        told = verdicts(results)
        whole = {"gpu": on_gpu, "size": arguments.size, "results": results, "verdicts": told}
        replace(arguments.json, json.dumps(whole, indent=2) + "\n")


def replace(path: Path, text: str) -> None:
    """At once: whoever ends the run finds one whole file."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(text)
    new.replace(path)


def verdicts(results: dict[str, Any]) -> dict[str, Any]:
    """What must hold: the ring against its parts, gds against the best raw loop, the loop's lag."""

    def read(name: str) -> float:
        return float(results.get(name, {}).get("read", {}).get("gb_per_s", 0.0))

    told: dict[str, Any] = {}
    parts = min(read("aio to page-locked CPU"), read("host to device alone"))
    if parts and read("aio ring"):
        told["aio ring / min(drive, host to device), >= 0.95"] = round(read("aio ring") / parts, 3)
    raw = max((read(name) for name in results if name.startswith("raw cuFile")), default=0.0)
    gds = max((read(name) for name in results if name.startswith("gds,")), default=0.0)
    if raw and gds:
        told["gds / best raw cuFile loop, >= 0.9"] = round(gds / raw, 3)
    if read("rows of 4096 bytes, aio") and read("aio ring"):
        told["gather of 4096 bytes / aio ring"] = round(
            read("rows of 4096 bytes, aio") / read("aio ring"), 3
        )
    train = "train, gradients in memory"
    ways = [results.get(name, {}).get("passes_s", 0.0) for name in (train, "train, gds")]
    if all(ways) and results["train, gds"]["straight_to_the_device"]:
        told["passes through host memory / by gds, >= 1"] = round(ways[0] / ways[1], 3)
    lags = [result.get("loop_lag_p99_ms") for result in results.values()]
    known = [lag for lag in lags if lag is not None]
    if known:
        told["loop lag p99 in ms, <= 2"] = max(known)
    return told


def show(name: str, result: dict[str, Any]) -> None:
    for state in ("failed", "skipped"):
        if state in result:
            print(f"  {name:36} {state}: {result[state]}", flush=True)
            return
    parts = []
    for op in ("read", "write"):
        if op in result:
            figures = result[op]
            parts.append(
                f"{op} {figures['gb_per_s']:6.2f} GB/s ({figures['cpu_s_per_gb']} CPU s/GB)"
            )
    if "host_mib" in result:
        parts.append(f"{result['host_mib']} MiB of host memory")
    if "mode" in result:
        parts.append(f"mode {result['mode']}")
    if result.get("loop_lag_p99_ms") is not None:
        parts.append(f"lag p99 {result['loop_lag_p99_ms']} ms")
    if not parts or "checked" in result:
        parts = [json.dumps(result)]
    print(f"  {name:36} {', '.join(parts)}", flush=True)


def table(results: dict[str, Any]) -> str:
    """As docs/gds.md has it."""
    lines = ["| step | result |", "|---|---|"]
    for name, result in results.items():
        told = {key: value for key, value in result.items() if key != "cufile"}
        if "read" in told and isinstance(told["read"], dict):
            told["read"] = f"{told['read']['gb_per_s']} GB/s"
        if "write" in told and isinstance(told["write"], dict):
            told["write"] = f"{told['write']['gb_per_s']} GB/s"
        lines.append(f"| {name} | {', '.join(f'{k} {v}' for k, v in told.items())} |")
    return "\n".join(lines) + "\n"


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="on the drive to measure")
    parser.add_argument("--size", type=int, default=4 << 30, help="bytes of the file (4 GiB)")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--table", type=Path, help="and here as a table")
    parser.add_argument(
        "--minutes", type=float, default=MINUTES, help=f"for all of it ({MINUTES:g})"
    )
    parser.add_argument("--only", default="", help="steps whose names have this in them")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, with 64 MiB")
    parser.add_argument("--step", help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    on_gpu = torch.cuda.is_available() and not arguments.dry_run
    if arguments.dry_run:
        arguments.size = 64 * MIB
    if arguments.step:
        step = Step(arguments.dir, arguments.size, "cuda" if on_gpu else "cpu")
        print(json.dumps(steps(on_gpu)[arguments.step].work(step)))
        return
    if arguments.size < 64 * MIB or arguments.size % 4096:
        raise SystemExit("--size: a multiple of 4096, and 64 MiB or more")
    if not on_gpu:
        print("No GPU here: cuFile moves host memory, which says nothing about GPUDirect Storage.")
    ends = time.monotonic() + 60 * arguments.minutes
    with tempfile.TemporaryDirectory(prefix="nvmeio-gpu-check-", dir=arguments.dir) as made:
        make_file(Step(Path(made), arguments.size, "cpu"))
        results = run_all(arguments, on_gpu, Path(made), ends)
    for name, value in verdicts(results).items():
        print(f"{name}: {value}")
    if any("failed" in result for name, result in results.items() if name not in OPTIONAL):
        raise SystemExit(1)


if __name__ == "__main__":
    main()

"""Part C: cuFile beside a plain loop of its calls, right and fast, and in its compat mode."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

import nvmeio
from gpu_steps import common, training
from gpu_steps.common import Plan, Step, check, expected, rate, transfer_rates
from gpu_steps.correctness import correctness
from gpu_steps.speed import latency, rows
from nvmeio.engines.cufile import library

OLDEST_FOR_TMPFS = 1160  # 1.15 wants a block device ("error creating udev_device"), and says 5027


def raw_cufile(step: Step, threads: int, task: int, registered: bool) -> dict[str, Any]:
    """The best that a plain loop of cuFileRead in threads can do."""
    from nvmeio.engines.cufile.driver import DRIVER, DriverSettings

    opened = DRIVER.acquire(DriverSettings(needs_cuda=step.device == "cuda"))
    if step.device == "cuda":
        tensor = torch.empty(step.size, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()  # cuFile knows nothing of the stream that had this memory before
    else:
        tensor = nvmeio.empty_aligned(step.size, dtype=torch.uint8)
    if registered:
        opened.register_memory(tensor.data_ptr(), tensor.nbytes)
    fd = os.open(step.file, os.O_RDONLY | os.O_DIRECT)
    handle = opened.register_file(fd)

    def enter() -> None:
        if step.device == "cuda":
            torch.cuda.set_device(0)
            torch.cuda.mem_get_info()

    with ThreadPoolExecutor(threads, initializer=enter) as pool:

        def read(start: int) -> None:
            nbytes = min(task, step.size - start)
            moved = opened.read(handle, tensor.data_ptr(), nbytes, start, start)
            if moved != nbytes:
                raise SystemExit(f"cuFileRead moved {moved} of {nbytes} bytes at {start}")

        found = rate(step, lambda: list(pool.map(read, range(0, step.size, task))))
    opened.unregister_file(handle)
    os.close(fd)
    if registered:
        opened.unregister_memory(tensor.data_ptr())
    DRIVER.release()
    return {"read": found}


def train_by_gds(step: Step) -> dict[str, Any]:
    """Training with parameters straight between drive and device: losses are those in memory."""
    with step.handle(True) as handle:
        folder, size, device = step.file.parent, step.size, step.device
        return training.training(folder, size, device, "memory", handle=handle)


def torch_gds(step: Step) -> dict[str, Any]:
    """Reads by torch's own GdsFile, in GB/s."""
    from torch.cuda.gds import GdsFile

    tensor = torch.empty(step.size, dtype=torch.uint8, device="cuda")
    file = GdsFile(str(step.file), os.O_RDONLY | os.O_DIRECT)
    return {"read": rate(step, lambda: file.load_storage(tensor.untyped_storage(), 0))}


def compat(step: Step, folder: Path | None) -> dict[str, Any]:
    """Reads and writes in cuFile's compat mode, on the drive or in shared memory, are right."""
    loaded = library.load()
    if folder is not None and loaded.version < OLDEST_FOR_TMPFS:
        return {"skipped": f"cuFile {loaded.version_text} takes no file in tmpfs: from 1.16 on"}
    file = step.scratch if folder is None else folder / f"nvmeio-gpu-check-{os.getpid()}"
    nbytes = 4 * common.MIB
    data = expected(nbytes).to(step.device)
    file.unlink(missing_ok=True)  # another step's may be longer
    try:
        with step.handle(True, allow_compat=True) as handle:
            handle.sync_pwrite(data, file)
            back = torch.zeros_like(data)
            handle.sync_pread(back, file)
            check(torch.equal(back.cpu(), data.cpu()), "what came back")
            check(file.read_bytes() == data.cpu().numpy().tobytes(), "the file")
            return {"checked": 2, "mode": getattr(handle, "mode", "")}
    finally:
        if folder is not None:
            file.unlink(missing_ok=True)


def cufile_pair(threads: int, task: int, registered: bool) -> dict[str, Plan]:
    """cuFile by hand and through nvmeio, with so many threads and so many MiB a call."""
    tail = f"{threads} x {task} MiB{', registered' if registered else ''}"

    def by_hand(step: Step) -> dict[str, Any]:
        """Reads by a plain loop of cuFileRead, in GB/s."""
        return raw_cufile(step, threads, task * common.MIB, registered)

    def by_nvmeio(step: Step) -> dict[str, Any]:
        """The same reads by a GdsHandle, and writes."""
        options = {"intra_op_parallelism": threads, "task_bytes": task * common.MIB}
        return transfer_rates(step, True, registered, **options)

    return {
        f"raw cuFile, {tail}": Plan(by_hand, 60, needs_cufile=True),
        f"gds, {tail}": Plan(by_nvmeio, 90, needs_cufile=True),
    }


def steps(on_gpu: bool) -> dict[str, Plan]:
    """By name, those whose results matter most first."""
    told = {
        "correctness gds": Plan(partial(correctness, gds=True), 90, needs_cufile=True),
        "compat mode on the drive": Plan(partial(compat, folder=None), 60, needs_cufile=True),
        "compat mode in shared memory": Plan(
            partial(compat, folder=Path("/dev/shm")), 60, needs_cufile=True
        ),
        **cufile_pair(4, 8, False),
        "latency gds": Plan(partial(latency, gds=True), 60, needs_cufile=True),
        "train, gds": Plan(train_by_gds, 90, needs_cufile=True),
    }
    if not on_gpu:
        return told
    by_rows = partial(rows, gds=True, row_bytes=4096)
    told["rows of 4096 bytes, gds"] = Plan(by_rows, 90, needs_cufile=True)
    told["torch GdsFile"] = Plan(torch_gds, 60, needs_cufile=True, is_optional=True)
    told |= cufile_pair(4, 8, True)
    for threads, task in [(8, 8), (1, 8), (16, 8), (8, 16), (8, 4)]:
        for registered in (False, True):
            told |= cufile_pair(threads, task, registered)
    return told

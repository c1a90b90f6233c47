"""Part D: how fast? The ring's shapes, small transfers, others' loaders, and where time goes."""

from __future__ import annotations

import os
import resource
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

import nvmeio
from gpu_steps import common, training
from gpu_steps.common import (
    Plan,
    Step,
    check,
    expected,
    forget,
    rate,
    synchronize,
    transfer_rates,
    wrong,
)
from nvmeio.inference import pack
from nvmeio.offload import SwappedOptimizer

MOST_ROWS = 1 << 20  # of a gather: with sixteen times as many, a step takes a quarter of an hour


def raw_preadv(step: Step) -> dict[str, Any]:
    """Threads of preadv with O_DIRECT, 8 MiB a call."""
    memory = nvmeio.empty_aligned(step.size, dtype=torch.uint8)
    view = memoryview(memory.numpy())
    fd = os.open(step.file, os.O_RDONLY | os.O_DIRECT)
    with ThreadPoolExecutor(8) as pool:

        def read(start: int) -> None:
            os.preadv(fd, [view[start : start + 8 * common.MIB]], start)

        found = rate(step, lambda: list(pool.map(read, range(0, step.size, 8 * common.MIB))))
    os.close(fd)
    return {"read": found}


def torch_load(step: Step) -> dict[str, Any]:
    """Reads by torch.load, in GB/s."""
    torch.save(torch.empty(step.size, dtype=torch.uint8), step.scratch)

    def load() -> None:
        forget(step.scratch)
        torch.load(step.scratch, map_location=step.device, weights_only=True)

    return {"read": rate(step, load)}


def safetensors_load(step: Step) -> dict[str, Any]:
    """Reads by safetensors, in GB/s."""
    from safetensors.torch import load_file, save_file

    save_file({"x": torch.empty(step.size, dtype=torch.uint8)}, step.scratch)

    def load() -> None:
        forget(step.scratch)
        load_file(step.scratch, device=step.device)["x"].clone()

    return {"read": rate(step, load)}


def latency(step: Step, gds: bool) -> dict[str, Any]:
    """Median and p99 of single reads, in microseconds."""
    told: dict[str, Any] = {}
    with step.handle(gds) as handle, nvmeio.open(step.file) as file:
        for nbytes in (4096, 65536, common.MIB):
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
        gathered = rate(
            step, lambda: handle.sync_gather(out, file, file_offsets=places), nbytes=whole
        )
        scattered = rate(
            step, lambda: handle.sync_scatter(out, file, file_offsets=places), False, whole
        )
        taken = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        out.zero_()
        forget(step.file)
        handle.sync_gather(out, file, file_offsets=places)
        for row in (0, 1, number // 3, number - 1):
            wanted = expected(row_bytes, int(places[row]))
            if not torch.equal(out[row].cpu(), wanted):
                raise SystemExit(f"WRONG: row {row} of {row_bytes} bytes")
        if handle.stats.errors:
            raise SystemExit(f"WRONG: {handle.stats}")
    return {"read": gathered, "write": scattered, "host_mib": taken >> 10}


def ring(step: Step, lanes: int, chunks: int) -> dict[str, Any]:
    """Reads and writes through a ring of another shape, in GB/s."""
    nbytes = chunks * 16 * common.MIB
    return transfer_rates(step, False, False, intra_op_parallelism=lanes, ring_bytes=nbytes)


def small_reads(step: Step, nbytes: int = 1 << 16, at_once: int = 64) -> dict[str, Any]:
    """Reads of 64 KiB to the device, 64 at once, in GB/s."""
    count = min(step.size // nbytes, 4096)
    out = torch.zeros(at_once, nbytes, dtype=torch.uint8, device=step.device)
    with step.handle(False) as handle, nvmeio.open(step.file) as file:

        def read() -> None:
            for first in range(0, count, at_once):
                number = min(at_once, count - first)
                reading = [
                    handle.async_pread(out[k], file, (first + k) * nbytes) for k in range(number)
                ]
                for operation in reading:
                    operation.result()

        read()
        found = rate(step, read, nbytes=count * nbytes)
    last = (count - 1) % at_once
    if not torch.equal(out[last].cpu(), expected(nbytes, (count - 1) * nbytes)):
        raise wrong("the last of the small reads")
    return {"read": found}


def busy_beside(step: Step) -> dict[str, Any]:
    """Reads through the ring beside a thread that is busy in Python, and alone."""
    over = threading.Event()

    def spin() -> None:
        number = 0
        while not over.is_set():
            number += 1

    with step.handle(False) as handle, nvmeio.open(step.file) as file:
        tensor = torch.empty(step.size, dtype=torch.uint8, device=step.device)
        alone = rate(step, lambda: handle.sync_pread(tensor, file))
        thread = threading.Thread(target=spin, daemon=True)
        thread.start()
        try:
            beside = rate(step, lambda: handle.sync_pread(tensor, file))
        finally:
            over.set()
            thread.join()
    return {"read": beside, "of_alone": round(beside["gb_per_s"] / alone["gb_per_s"], 3)}


def gradients_on_disk(step: Step) -> dict[str, Any]:
    """Seconds of forward and backward with gradients on the drive, and with them in memory."""
    told = {}
    for gradients in ("memory", "disk"):
        found = training.training(step.file.parent, step.size, step.device, gradients)
        told[f"passes_{gradients}_s"] = found["passes_s"]
        told[f"step_{gradients}_s"] = found["step_s"]
    return told


def profiled(step: Step, work: Callable[[], Any]) -> dict[str, Any]:
    """How long the device is at work in the second of two runs, and its longest gaps, in ms."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    work()
    activities = [ProfilerActivity.CPU]
    if step.device == "cuda" and torch.version.cuda:
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        began = time.perf_counter()
        work()
        synchronize(step)
        seconds = time.perf_counter() - began
    of_device = [e for e in profiler.events() if e.device_type == DeviceType.CUDA]
    spans = sorted((e.time_range.start, e.time_range.end) for e in of_device)
    busy, gaps, end = 0.0, [], 0.0
    for first, last in spans:
        if end and first > end:
            gaps.append(first - end)
        busy += max(0.0, last - max(first, end))
        end = max(end, last)
    longest = [round(gap / 1e3, 2) for gap in sorted(gaps, reverse=True)[:5]]
    told = {"ms": round(1e3 * seconds, 2), "kernels": len(spans), "busy_ms": round(busy / 1e3, 2)}
    return {**told, "longest_gaps_ms": longest}


def profile_of_training(step: Step) -> dict[str, Any]:
    """Where the time of one training step goes: the device at work, and its gaps."""
    made, width = training.model(step.size // 32)
    x = torch.randn(training.ROWS, width).to(step.device)
    with (
        tempfile.TemporaryDirectory(dir=step.file.parent) as folder,
        training.half_swapped(made, folder, step.device) as module,
        SwappedOptimizer(
            torch.optim.AdamW, module.parameters(), swap_dir=folder, lr=1e-3
        ) as optimizer,
    ):

        def iterate() -> None:
            module(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return profiled(step, iterate)


def profile_of_token(step: Step) -> dict[str, Any]:
    """Where the time of one streamed token goes: the device at work, and its gaps."""
    with tempfile.TemporaryDirectory(dir=step.file.parent) as made_in, torch.no_grad():
        file = Path(made_in) / "model.safetensors"
        made, width = training.model(step.size // 4)
        whole = training.bytes_of(made)
        nvmeio.save_safetensors(made.state_dict(), file)
        empty, _ = training.model(step.size // 4, "meta")
        x = torch.randn(1, width).to(step.device)
        room = whole // training.PARTS * 5 + (1 << 20)
        streamed = nvmeio.stream_model(empty, file, device=step.device, resident_bytes=room)
        try:
            return profiled(step, lambda: streamed(x))
        finally:
            streamed.weight_stream.close()


@torch.no_grad()
def packed_model(step: Step) -> dict[str, Any]:
    """Milliseconds of a pass over a Llama in memory: bfloat16, 4 bits as chosen, 4 bits widened.

    Of 1, 16 and 256 tokens; and how far logits are from those of the weights widened.
    """
    import transformers

    is_real = step.device == "cuda" and torch.version.cuda
    width, layers, repeats = (2048, 4, 5) if is_real else (256, 1, 2)
    config = transformers.LlamaConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=8,
        vocab_size=512,
    )
    told: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=step.file.parent) as made_in:
        plain, packed = Path(made_in) / "plain", Path(made_in) / "packed"
        transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(plain)
        pack(plain, packed, quant_bits=4)
        wanted: dict[int, torch.Tensor] = {}
        for name, source, compute in (
            ("bfloat16", plain, "auto"),
            ("widened", packed, "widened"),
            ("chosen", packed, "auto"),
        ):
            room = 2 * sum(file.stat().st_size for file in plain.glob("*.safetensors"))
            options: dict[str, Any] = {"device": step.device, "compute": compute}
            model = nvmeio.stream_model(source, resident_bytes=room, **options)
            for count in (1, 16, 256) if is_real else (1, 16):
                ids = torch.arange(count).unsqueeze(0).to(step.device)
                times = []
                for _ in range(repeats):
                    synchronize(step)
                    began = time.perf_counter()
                    logits = model(ids, use_cache=False).logits
                    synchronize(step)
                    times.append(1e3 * (time.perf_counter() - began))
                found = told.setdefault(f"{count} tokens", {})
                found[f"{name}_ms"] = round(sorted(times)[repeats // 2], 3)
                here = logits.float().cpu()
                if name == "chosen":
                    off = (here - wanted[count]).abs().max() / wanted[count].abs().max()
                    found["off"] = round(float(off), 5)
                    check(bool(off < 0.1), f"logits of {count} tokens with packed weights")
                wanted[count] = here
            model.weight_stream.close()
    return told


def deepspeed_handle(step: Step) -> dict[str, Any]:
    """Reads by DeepSpeed's own handle into page-locked memory and from there to the device."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    handle = AsyncIOBuilder().load().aio_handle(1 << 20, 128, False, True, 4)
    memory = torch.empty(step.size, dtype=torch.uint8, pin_memory=step.device == "cuda")
    tensor = torch.empty(step.size, dtype=torch.uint8, device=step.device)

    def read() -> None:
        handle.sync_pread(memory, str(step.file), 0)
        tensor.copy_(memory, non_blocking=True)

    found = rate(step, read)
    if not torch.equal(tensor[-common.MIB :].cpu(), expected(common.MIB, step.size - common.MIB)):
        raise wrong("DeepSpeed's last MiB")
    return {"read": found}


def steps(on_gpu: bool) -> dict[str, Plan]:
    """By name, those whose results matter most first."""
    shapes = [(1, 4), (4, 4), (8, 4), (1, 8), (4, 8), (8, 8)]
    told = {
        "64 KiB reads": Plan(small_reads),
        "a busy Python thread beside": Plan(busy_beside),
        "profile of a training step": Plan(profile_of_training),
        "profile of a streamed token": Plan(profile_of_token),
        "a model of 4 bits": Plan(packed_model, is_optional=True),
        "gradients on the drive and in memory": Plan(gradients_on_disk, 90),
        **{
            f"ring, {lanes} lanes, {chunks} chunks": Plan(partial(ring, lanes=lanes, chunks=chunks))
            for lanes, chunks in (shapes if on_gpu else ())
        },
        "latency aio": Plan(partial(latency, gds=False)),
        "rows of 4096 bytes, aio": Plan(partial(rows, gds=False, row_bytes=4096), 90),
        "rows of 256 bytes, aio": Plan(partial(rows, gds=False, row_bytes=256), 90),
        "raw preadv, 8 threads": Plan(raw_preadv),
    }
    if on_gpu:
        told["safetensors"] = Plan(safetensors_load, is_optional=True)
        told["torch.load"] = Plan(torch_load, is_optional=True)
        # Where its extension is not built yet, compiling took 66 s with ten jobs.
        told["DeepSpeed's handle"] = Plan(deepspeed_handle, 150, is_optional=True)
    return told

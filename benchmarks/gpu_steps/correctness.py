"""Part B: is it right? Each step compares with memory, bit for bit or as its docstring says."""

from __future__ import annotations

import contextlib
import copy
import os
import re
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

import nvmeio
from gpu_steps import common, training
from gpu_steps.common import Plan, Step, check, expected, synchronize
from gpu_steps.mixture import mixture
from nvmeio.offload import SwappedActivations


def correctness(step: Step, gds: bool) -> dict[str, Any]:
    """dtypes, views, offsets, unaligned, registered or not, odd tails; order without syncs."""
    checked = 0

    def check(holds: bool, what: str) -> None:
        nonlocal checked
        checked += 1
        common.check(holds, what)

    def empty(nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, device=step.device)

    with step.handle(gds) as handle:
        spans = [
            (0, 1),
            (0, 4096),
            (4096, 8192),
            (1, 5000),
            (12345, common.MIB + 3),
            (4095, 40 * common.MIB + 1),
        ]
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
            big = torch.zeros(16 * common.MIB, device=step.device)
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
        tensor = empty(min(step.size, 512 * common.MIB))
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
        check(
            torch.equal(
                tensor[-common.MIB :].cpu(), expected(common.MIB, tensor.numel() - common.MIB)
            ),
            "reuse",
        )
        mode = handle.mode if isinstance(handle, nvmeio.GdsHandle) else "ring"
    return {"checked": checked, "mode": mode}


def turned_is_right(step: Step, handle: nvmeio.AioHandle) -> bool:
    """Whether a tensor that is not contiguous comes back as it went."""
    turned = torch.arange(512 * 700, device=step.device).reshape(512, 700).t()
    back = torch.zeros(512, 700, dtype=torch.int64, device=step.device).t()
    handle.sync_pwrite(turned, step.scratch)
    handle.sync_pread(back, step.scratch)
    return torch.equal(back, turned)


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
        for number in range(common.TURNS + 1):
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
    """Parameters, gradients and state on the drive: losses are those in memory."""
    folder, size, device = step.file.parent, step.size, step.device
    return training.training(folder, size, device, gradients, stepped_there)


def some_state(step: Step) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(1,), (1000,), (512, 700), (max(step.size // 64, 4096),)]
    state = {f"t{n}": torch.randn(shape, generator=generator) for n, shape in enumerate(shapes)}
    return {**state, "half": state["t2"].to(torch.bfloat16)}


def same(found: Any, state: dict[str, torch.Tensor], how: str) -> None:
    for name, wanted in state.items():
        check(torch.equal(found[name].cpu(), wanted), f"{name} by {how}")


def saved(step: Step) -> dict[str, Any]:
    """`save` and `save_safetensors` write what a device's tensors hold."""
    state = some_state(step)
    with tempfile.TemporaryDirectory(dir=step.file.parent) as made_in:
        archive, tensors = Path(made_in) / "state.pt", Path(made_in) / "state.safetensors"
        there = {name: value.to(step.device) for name, value in state.items()}
        nvmeio.save(there, archive)
        nvmeio.save_safetensors(there, tensors)
        same(torch.load(archive, map_location="cpu", weights_only=True), state, "save")
        same(nvmeio.load_safetensors(tensors), state, "save_safetensors")
    return {"checked": 2 * len(state)}


def load_and_open(step: Step) -> dict[str, Any]:
    """`load`, `load_safetensors` and `safe_open` give a device the tensors that were saved."""
    state = some_state(step)
    with tempfile.TemporaryDirectory(dir=step.file.parent) as made_in:
        archive, tensors = Path(made_in) / "state.pt", Path(made_in) / "state.safetensors"
        nvmeio.save(state, archive)
        nvmeio.save_safetensors(state, tensors)
        same(nvmeio.load(archive, map_location=step.device), state, "load")
        same(nvmeio.load_safetensors(tensors, device=step.device), state, "load_safetensors")
        with nvmeio.safe_open(tensors, device=step.device) as opened:
            same({name: opened.get_tensor(name) for name in state}, state, "safe_open")
            part = opened.get_slice("t2")[3:9, 5:]
        check(torch.equal(part.cpu(), state["t2"][3:9, 5:]), "a slice")
    return {"checked": 3 * len(state) + 1}


def gradients_of(made: Any, x: torch.Tensor, passes: int = 2) -> list[torch.Tensor]:
    """Those of a few passes, on the CPU; the module has none after."""
    for _ in range(passes):
        made(x).float().square().mean().backward()
    found = [p.grad.cpu().clone() for p in made.parameters() if p.grad is not None]
    made.zero_grad()
    return found


def rows_of(width: int, device: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(training.ROWS, width, generator=generator).to(dtype).to(device)


def compare(found: list[torch.Tensor], wanted: list[torch.Tensor], what: str) -> int:
    check(len(found) == len(wanted) > 0, f"{what}: {len(found)} of {len(wanted)}")
    for number, (mine, theirs) in enumerate(zip(found, wanted, strict=True)):
        check(torch.equal(mine, theirs), f"{what}: number {number} differs")
    return len(found)


def activations(step: Step) -> dict[str, Any]:
    """Gradients with activations on the drive are those in memory."""
    made, width = training.model(step.size // 64)
    made.to(step.device)
    x = rows_of(width, step.device)
    wanted = gradients_of(made, x)
    room = 8 * x.nbytes  # two of the largest
    options: dict[str, Any] = {"device_bytes": room} if step.device == "cuda" else {}
    with (
        tempfile.TemporaryDirectory(dir=step.file.parent) as folder,
        SwappedActivations(
            swap_dir=folder, resident_bytes=room, min_bytes=1024, **options
        ) as swapped,
    ):
        for _ in range(2):
            with swapped.saving():
                loss = made(x).float().square().mean()
            loss.backward()
        found = [p.grad.cpu().clone() for p in made.parameters() if p.grad is not None]
        made.zero_grad()
        checked = compare(found, wanted, "gradient")
        check(swapped.bytes_written > 0, "nothing was on the drive")
        return {"checked": checked, "written_mb": round(swapped.bytes_written / 1e6, 1)}


def kv_store(step: Step) -> dict[str, Any]:
    """Keys and values of a device come back from the drive as they were put away."""
    from nvmeio.inference.kv_cache import KVStore

    generator = torch.Generator().manual_seed(0)
    shape = (1, 8, 128, 64)  # batch, heads, tokens, size of a head
    with (
        tempfile.TemporaryDirectory(dir=step.file.parent) as folder,
        nvmeio.AioHandle() as handle,
        contextlib.closing(KVStore(folder, handle)) as store,
    ):
        pairs = [tuple(torch.randn(shape, generator=generator) for _ in range(2)) for _ in range(8)]
        began = time.perf_counter()
        blocks = [store.put(*(each.to(step.device) for each in pair))[0] for pair in pairs]
        store.settle()
        for block, pair in zip(blocks, pairs, strict=True):
            nbytes = 2 * pair[0].nbytes
            memory = nvmeio.empty_aligned(block.room, dtype=torch.uint8)
            for operation in store.get(block, memory):
                operation.result()
            found = memory[:nbytes].view(torch.float32).view(2, *shape)
            check(torch.equal(found, torch.stack(pair)), "keys and values")
        seconds = time.perf_counter() - began
    return {"checked": len(pairs), "ms_per_block": round(1e3 * seconds / len(pairs), 2)}


@contextlib.contextmanager
def swapped_beside(step: Step, dtype: torch.dtype) -> Iterator[tuple[Any, Any, torch.Tensor]]:
    """A module in memory, the same one on the drive, and rows for both."""
    theirs, width = training.model(step.size // 64)
    theirs.to(dtype)
    ours = copy.deepcopy(theirs)
    theirs.to(step.device)
    with (
        tempfile.TemporaryDirectory(dir=step.file.parent) as folder,
        training.half_swapped(ours, folder, step.device) as module,
    ):
        yield theirs, module, rows_of(width, step.device, dtype)


def autocast(step: Step) -> dict[str, Any]:
    """bf16 weights, and fp32 ones under autocast: gradients are those in memory."""
    checked = 0
    for dtype, casts in ((torch.bfloat16, False), (torch.float32, True)):
        with (
            swapped_beside(step, dtype) as (theirs, ours, x),
            torch.autocast(step.device, torch.bfloat16, enabled=casts),
        ):
            checked += compare(gradients_of(ours, x), gradients_of(theirs, x), f"{dtype}")
    return {"checked": checked}


class Checkpointed(torch.nn.Module):
    """Each part is computed again in backward."""

    def __init__(self, parts: Any) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = torch.utils.checkpoint.checkpoint(part, x, use_reentrant=False)
        return x


def checkpointing(step: Step) -> dict[str, Any]:
    """Gradient checkpointing over a module on the drive: gradients are those in memory."""
    with swapped_beside(step, torch.float32) as (theirs, ours, x):
        wanted = gradients_of(Checkpointed(theirs), x)
        made = Checkpointed(ours.module)
        for _ in range(2):
            made(x).float().square().mean().backward()
        found = [p.grad.cpu().clone() for p in ours.parameters() if p.grad is not None]
        return {"checked": compare(found, wanted, "gradient")}


def user_streams(step: Step) -> dict[str, Any]:
    """40 streams of the user's, with memory of their own, beside a streamed module's."""
    with swapped_beside(step, torch.float32) as (theirs, ours, x), torch.no_grad():
        wanted = theirs(x).cpu()
        kept, checked = [], 0
        for number in range(40):
            if step.device == "cuda":
                stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
                with torch.cuda.stream(stream):
                    kept.append(torch.full((1 << 16,), float(number), device="cuda"))
                    kept = kept[-8:]  # memory goes back to the streams, and comes from them
            check(torch.equal(ours(x).cpu(), wanted), f"with {number + 1} streams")
            checked += 1
        synchronize(step)  # they were filled by their own streams
        for number, tensor in enumerate(kept, 40 - len(kept)):
            check(bool((tensor.cpu() == number).all()), f"the memory of stream {number}")
    return {"checked": checked + len(kept)}


def capture(step: Step) -> dict[str, Any]:
    """A CUDA graph is captured while bytes are read: both are right."""
    x = torch.arange(1 << 16, device=step.device).float()
    tensor = torch.zeros(min(step.size, 256 * common.MIB), dtype=torch.uint8, device=step.device)
    checked = 0
    with step.handle(False) as handle:
        handle.sync_pread(tensor[: common.MIB], step.file)
        for _ in range(4):
            tensor.zero_()
            reading = handle.async_pread(tensor, step.file)
            if step.device == "cuda":
                graph: Any = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    found = x * 2 + 1
                graph.replay()
            else:
                found = x * 2 + 1
            reading.result()
            synchronize(step)
            check(torch.equal(found.cpu(), torch.arange(1 << 16).float() * 2 + 1), "the graph")
            end = tensor.numel() - common.MIB
            check(torch.equal(tensor[end:].cpu(), expected(common.MIB, end)), "the read")
            checked += 2
    return {"checked": checked}


def fork(step: Step) -> dict[str, Any]:
    """A child is forked between reads: it is refused, and the parent reads on."""
    tensor = torch.zeros(8 * common.MIB, dtype=torch.uint8, device=step.device)
    with step.handle(False) as handle:
        for number in range(3):
            handle.sync_pread(tensor, step.file)
            child = os.fork()
            if not child:
                status = 1
                try:
                    handle.sync_pread(torch.zeros(4096, dtype=torch.uint8), step.file)
                except nvmeio.ClosedError:
                    status = 0
                finally:
                    os._exit(status)
            check(os.waitpid(child, 0)[1] == 0, "the child was not refused")
            tensor.zero_()
            handle.sync_pread(tensor, step.file)
            check(
                torch.equal(tensor.cpu(), expected(tensor.numel())), f"read {number} after a fork"
            )
    return {"checked": 6}


def full_device(step: Step) -> dict[str, Any]:
    """A device without room in a pass: an error that says so, and right numbers after it."""
    refused = 0
    with swapped_beside(step, torch.float32) as (theirs, ours, x), torch.no_grad():
        wanted = theirs(x).cpu()
        theirs.to("cpu")
        for _ in range(2):
            hog: list[torch.Tensor] = []
            if step.device == "cuda":
                torch.cuda.empty_cache()
                take_all(hog)
            try:
                ours(x)
            except (MemoryError, torch.OutOfMemoryError):
                refused += 1
            hog.clear()
            if step.device == "cuda":
                torch.cuda.empty_cache()
            check(torch.equal(ours(x).cpu(), wanted), "the pass after one that was refused")
    check(refused > 0 or step.device != "cuda", "a device without room refused nothing")
    return {"checked": 2, "refused": refused}


def take_all(taken: list[torch.Tensor]) -> None:
    """Take the device's memory until it refuses 64 KiB; CUDA says of more that it is free."""
    nbytes = torch.cuda.mem_get_info()[0]
    while nbytes >= common.MIB // 16:
        try:
            taken.append(torch.empty(nbytes, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            nbytes //= 2


def expandable(step: Step) -> dict[str, Any]:
    """PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True: transfers and streaming are right."""
    told = correctness(step, False)
    told |= training.streaming(step.file.parent, step.size // 4, step.device)
    if step.device == "cuda":
        segments = torch.cuda.memory_snapshot()
        told["expandable"] = sum(bool(each.get("is_expandable")) for each in segments)
    return told


# Torch (2.13) asks for "new_.*" where names begin with "aten::", and takes factories for readers.
# It takes `set_` for a writer, which gives a tensor memory and touches none of it.
_FACTORIES = re.compile(r"(\w+::)?(new_\w+|\w+_like|set_)$")


@contextlib.contextmanager
def without_false_alarms(sanitizer: Any) -> Iterator[None]:
    """Tell torch's sanitizer what it does not know: its factories, and what the host has asked for.

    It is told of `Event.synchronize`, and not that `Event.query` has found an event reached. And it
    numbers what threads launch: two at once gave a copy another number than its stream was noted
    to have come to, and six runs of seven on an H200 were called races.
    """
    factories, own_query = sanitizer.FACTORY_FUNCTION_REGEX, torch.cuda.Event.query
    handler = sanitizer.cuda_sanitizer.dispatch.event_handler
    reached, own_launch = handler._handle_event_synchronization, handler._handle_kernel_launch
    one_at_a_time = threading.RLock()

    def launch(*arguments: Any) -> Any:
        with one_at_a_time:
            return own_launch(*arguments)

    def query(event: Any) -> bool:
        found: bool = own_query(event)
        if found:
            reached(event.cuda_event)
        return found

    sanitizer.FACTORY_FUNCTION_REGEX = _FACTORIES
    handler._handle_kernel_launch = launch
    torch.cuda.Event.query = query  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.cuda.Event.query = own_query  # type: ignore[method-assign]
        handler._handle_kernel_launch = own_launch
        sanitizer.FACTORY_FUNCTION_REGEX = factories


def sanitized(step: Step) -> dict[str, Any]:
    """TORCH_CUDA_SANITIZER=1: torch finds no access without an order in a step of training."""
    from torch.cuda import _sanitizer as sanitizer

    from nvmeio._threads import threads

    own_run = threads.Thread.run
    main: Any = sanitizer.cuda_sanitizer

    def run(thread: threads.Thread) -> None:
        """Its dispatch mode is a thread's: ours get the same one."""
        with copy.copy(main.dispatch):
            own_run(thread)

    is_on = step.device == "cuda" and main.enabled
    if is_on:
        threads.Thread.run = run  # type: ignore[method-assign]
    try:
        with without_false_alarms(sanitizer) if is_on else contextlib.nullcontext():
            told = training.training(step.file.parent, step.size // 16, step.device, "memory")
    finally:
        threads.Thread.run = own_run  # type: ignore[method-assign]
    return {"checked": told["checked"], "sanitizer": is_on}


def steps(on_gpu: bool) -> dict[str, Plan]:
    """By name, those whose results matter most first."""
    of_training = {
        "train, gradients in memory": ("memory", False),
        "train, gradients on the drive": ("disk", False),
        "train, stepped on the device": ("memory", True),
    }
    by_name = {
        name: Plan(partial(train, gradients=gradients, stepped_there=there), 90)
        for name, (gradients, there) in of_training.items()
    }
    memory = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    return {
        "train, gradients in memory": by_name.pop("train, gradients in memory"),
        "stream": Plan(stream),
        "experts of a mixture": Plan(mixture),
        "checkpoint, protected": Plan(partial(checkpoint, snapshot="auto"), 90),
        "load and safe_open": Plan(load_and_open),
        "save": Plan(saved),
        "activations": Plan(activations),
        "40 streams of the user's": Plan(user_streams),
        "KV cache": Plan(kv_store),
        **by_name,
        "stream, adapters trained": Plan(adapters),
        "bf16 and autocast": Plan(autocast),
        "gradient checkpointing": Plan(checkpointing),
        "a graph captured beside reads": Plan(capture),
        "a fork between reads": Plan(fork),
        "a full device": Plan(full_device),
        "expandable segments": Plan(expandable, 90, environment=memory),
        "torch's sanitizer": Plan(sanitized, 90, environment={"TORCH_CUDA_SANITIZER": "1"}),
        "FSDP2": Plan(fsdp, 90),
        "checkpoint, copied": Plan(partial(checkpoint, snapshot="copy"), 90),
    }


def stream(step: Step) -> dict[str, Any]:
    """Weights read while they are computed with: values are those in memory."""
    return training.streaming(step.file.parent, step.size, step.device)


def fsdp(step: Step) -> dict[str, Any]:
    """FSDP2 with its shards on the drive, one rank: losses are those with shards in host memory."""
    return training.fsdp(step.file.parent, step.size, step.device)


def adapters(step: Step) -> dict[str, Any]:
    """Adapters trained over a base that is read meanwhile: losses are those in memory."""
    return training.adapters(step.file.parent, step.size, step.device)

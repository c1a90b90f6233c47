"""A device that never does what it was asked: every wait ends, with one clear error.

The stand-in's lazy streams do nothing before somebody synchronises, which nvmeio never does.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_accelerator import DEVICE, Accelerator, Pace, accelerator
from inference.test_training import data, empty, saved, unit_bytes
from offload.test_module_on_device import WIDTH, model, swapped
from support import new_descriptors, open_descriptors, spin_until

import nvmeio
from nvmeio._io import spans
from nvmeio._memory import devices, mappings, page_locked, system
from nvmeio.errors import DeviceTimeoutError, NvmeioError
from nvmeio.offload import SwappedOptimizer

_ended = threading.Event()


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Accelerator]:
    """From `stop` on it does nothing."""
    monkeypatch.setattr(system, "silent_devices", set())
    with accelerator(monkeypatch, Pace.EAGER, Pace.EAGER, tells=False) as cuda:
        try:
            yield cuda
        finally:
            _ended.set()


def stop(cuda: Accelerator, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(devices, "PATIENCE_S", 0.3)
    patch.setattr(devices, "pause_for", lambda seconds, mark: time.sleep(seconds))
    cuda.copies_pace = Pace.LAZY
    for stream in cuda._all_streams():
        stream.pace = Pace.LAZY

    _ended.clear()

    def synchronize(device: object) -> None:
        _ended.wait(3600.0)

    patch.setattr(torch.cuda, "synchronize", synchronize)


def test_whoever_waits_is_told_and_all_that_follow_are_told_at_once(
    silent: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop(silent, monkeypatch)
    tensor = silent.tensor(torch.ones(100))
    mark = devices.now(DEVICE)
    with pytest.raises(DeviceTimeoutError, match="cuda:0 has not finished its work in 0 s"):
        mark.wait()
    with pytest.raises(DeviceTimeoutError):
        mark.done()
    with pytest.raises(DeviceTimeoutError):
        devices.now(DEVICE)
    with pytest.raises(DeviceTimeoutError):
        devices.on_host(tensor)
    devices.now(torch.device("cuda", 1)).wait()  # another device works on


def test_waiting_for_all_of_a_device_ends(
    silent: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop(silent, monkeypatch)
    with pytest.raises(DeviceTimeoutError):
        devices.synchronize(DEVICE)


def test_memory_that_the_device_may_write_to_is_nobody_else_s(
    silent: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = silent.tensor(torch.ones(1000))
    stop(silent, monkeypatch)
    chunk = page_locked.take(4096)
    address, calls = chunk.data_ptr(), silent.calls
    copies = devices.Beside(DEVICE, "load")
    copies.copy(chunk[:4000].view(torch.float32), source)
    mark = copies.mark()
    with pytest.raises(DeviceTimeoutError):
        mark.wait()
    del chunk
    assert page_locked.take(4096).data_ptr() != address
    assert mappings.owns(address, 4096)
    assert "cudaHostUnregister" not in [name for name, _ in calls]


@pytest.mark.parametrize("writing", [False, True])
def test_a_transfer_fails_and_host_memory_goes_on(
    writing: bool, silent: Accelerator, direct_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = silent.tensor(torch.zeros(16, 8192, dtype=torch.uint8))
    direct_path.write_bytes(bytes(tensor.nbytes))
    with nvmeio.AioHandle() as handle:
        move = handle.sync_pwrite if writing else handle.sync_pread
        move(tensor, direct_path)
        stop(silent, monkeypatch)
        for _ in range(2):
            with pytest.raises(DeviceTimeoutError):
                move(tensor, direct_path)
        # What this handle had under way with one device may still be written to.
        other = torch.device("cuda", 1)
        silent.copies_pace = Pace.EAGER
        for stream in silent._all_streams():
            if stream.device == other:
                stream.pace = Pace.EAGER
        with silent.device(other):
            there = silent.tensor(torch.zeros(8192, dtype=torch.uint8))
            with pytest.raises(DeviceTimeoutError):
                handle.sync_pread(there, direct_path)
            with nvmeio.AioHandle() as another:
                another.sync_pread(there, direct_path)
        handle.sync_pread(torch.zeros(8192, dtype=torch.uint8), direct_path)


def test_a_load_ends(
    silent: Accelerator, direct_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    direct_path.write_bytes(bytes(range(256)) * 256)
    stop(silent, monkeypatch)
    with (
        nvmeio.AioHandle() as handle,
        nvmeio.open(direct_path) as file,
        pytest.raises(DeviceTimeoutError),
    ):
        spans.Load().run(handle, [spans.Span(file, 0, 40_000)], DEVICE)


def test_a_streamed_model_ends_and_closes(
    silent: Accelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "base.safetensors"
    saved(path, 5)
    streamed = nvmeio.stream_model(empty(5), path, device="cuda", resident_bytes=3 * unit_bytes())
    x = silent.tensor(data(0))
    try:
        with torch.no_grad():
            streamed(x)
            stop(silent, monkeypatch)
            with pytest.raises(DeviceTimeoutError):
                for _ in range(3):  # a pass may be asked for before anybody has to wait
                    streamed(x)
            with pytest.raises(DeviceTimeoutError):
                streamed(x)
    finally:
        streamed.weight_stream.close()


@pytest.mark.parametrize("awaited", [False, True])
def test_a_closed_handle_keeps_nothing_where_the_device_refuses_its_stream(
    awaited: bool, silent: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel's AIO contexts stayed until the handle was collected."""
    torch.cuda.mem_get_info(DEVICE)  # from now on it is in use
    before = open_descriptors()
    handle = nvmeio.AioHandle()

    def refuse(stream: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "set_stream", refuse)
    if awaited:
        asyncio.run(handle.aclose())
    else:
        handle.close()
    spin_until(lambda: not new_descriptors(before))  # the kernel takes its time
    assert handle.closed


@pytest.mark.parametrize("gradients", ["memory", "disk"])
def test_training_ends_and_closes(
    gradients: str, silent: Accelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = silent.tensor(torch.randn(3, WIDTH))
    with (
        swapped(model(3), tmp_path) as module,
        SwappedOptimizer(
            torch.optim.AdamW,
            module.parameters(),
            swap_dir=tmp_path,
            gradients=gradients,
            durable=False,
            subgroup_bytes=64 << 10,
            device="cuda",
        ) as optimizer,
    ):

        def iterate() -> Any:
            module(x).square().mean().backward()
            optimizer.step()

        iterate()
        stop(silent, monkeypatch)
        for _ in range(2):
            with pytest.raises(DeviceTimeoutError):
                iterate()
        with pytest.raises((NvmeioError, RuntimeError)):  # it is broken, and says so
            optimizer.step()

"""A new thread gets no memory for its first step: a clear error where it is needed, and no hang.

Each of these waited for ever: `threading.Thread.start` waits for the thread's sign of life.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fake_device import FakeDevice
from inside import core_of
from interrupts import _offload
from support import die_at_birth

import nvmeio
from nvmeio._memory import mappings
from nvmeio._memory import mappings as mappings_module
from nvmeio._residency.reader import Reader
from nvmeio._threads.owner import OwnerThread
from nvmeio.checkpoint._snapshot import copies
from nvmeio.engines.base import Options
from nvmeio.engines.cufile import driver
from nvmeio.engines.device_ring import RingEngine
from nvmeio.inference._stream.lockstep import Lockstep
from nvmeio.offload import SwappedOptimizer
from nvmeio.testing import FakeEngine


def lanes(folder: Path) -> None:
    nvmeio.AioHandle(engine="libaio", intra_op_parallelism=3).close()


def workers(folder: Path) -> None:
    nvmeio.AioHandle(engine="threads").close()


def ring(folder: Path) -> None:
    with nvmeio.AioHandle(engine="threads") as handle:
        device = FakeDevice()
        engine = RingEngine(core_of(handle).engine, device)
        try:
            engine.start(Options())
        finally:
            device.stop()
        engine.stop()
        engine.join()


def dispatcher(folder: Path) -> None:
    hold = threading.Event()
    with nvmeio.AioHandle(engine=FakeEngine(hold=hold)) as handle:
        operation = handle.async_pwrite(torch.ones(64), folder / "file")
        try:
            operation.add_done_callback(lambda _: None)
        finally:
            hold.set()


def reader(folder: Path) -> None:
    with nvmeio.AioHandle(engine="threads") as handle:
        Reader(handle).stop()


def owner(folder: Path) -> None:
    made = OwnerThread("nvmeio-owner")
    made.call(int)
    made.close()


def checkpointer(folder: Path) -> None:
    with nvmeio.Checkpointer(folder) as made:
        made.save_sync({"weight": torch.ones(64)}, 1)


def lockstep(folder: Path) -> None:
    Lockstep([lambda: 1, lambda: 2, lambda: 3]).run()


def cufile(folder: Path) -> None:
    driver.call_limited(int, 60, "nvmeio-cufile-call")


NEEDED: dict[str, Callable[[Path], None]] = {
    "nvmeio-lane-0": lanes,
    "nvmeio-lane-2": lanes,
    "nvmeio-worker-0": workers,
    "nvmeio-worker-2": workers,
    "nvmeio-ring": ring,
    "nvmeio-dispatch": dispatcher,
    "nvmeio-stream": reader,
    "nvmeio-owner": owner,
    "nvmeio-checkpointer": checkpointer,
    "nvmeio-batch-0": lockstep,
    "nvmeio-batch-2": lockstep,
    "nvmeio-cufile": cufile,
}


@pytest.mark.parametrize("name", NEEDED)
def test_a_thread_that_is_needed_and_never_begins_is_an_error(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        die_at_birth(patched, name)
        with pytest.raises((MemoryError, nvmeio.ClosedError)) as failed:
            NEEDED[name](tmp_path)
    if name != "nvmeio-owner":
        assert "a new thread did not begin" in str(failed.value)
    NEEDED[name](tmp_path)  # and nothing is broken by it


# Threads that only help


def snapshot(folder: Path) -> None:
    state = {"weight": torch.arange(5 << 20, dtype=torch.int32)}
    with nvmeio.Checkpointer(folder) as made:
        made.save_sync(state, 1)
        made.wait_sync()
        assert torch.equal(made.restore()["weight"], state["weight"])


def prefaulting(folder: Path) -> None:
    with mappings_module.Prefault([mappings.Mapping(1 << 20)]) as made:
        made.check()


def sync(folder: Path) -> None:
    net = _offload.net()
    swapped = SwappedOptimizer(
        _offload.CLASS, net.parameters(), swap_dir=folder, durable=True, **_offload.ARGUMENTS
    )
    with swapped:
        _offload.loss_of(net, 0).backward()
        swapped.step()
        wanted = _offload.InMemory().after(1)
        _offload.assert_same([p.detach() for p in net.parameters()], wanted, "weights")


HELPING: dict[str, Callable[[Path], None]] = {
    "nvmeio-snapshot": snapshot,
    "nvmeio-prefault": prefaulting,
    "nvmeio-offload-help": sync,
}


@pytest.mark.parametrize("name", HELPING)
def test_a_thread_that_only_helps_is_done_without(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mappings_module, "PREFAULT_FROM_BYTES", 1)
    monkeypatch.setattr(copies, "COPY_BYTES", 1 << 20)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    die_at_birth(monkeypatch, name)
    HELPING[name](tmp_path)

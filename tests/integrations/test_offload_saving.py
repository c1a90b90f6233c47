"""Swapped state is saved by Checkpointer and DCP without being in memory as a whole."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support import spin_until

import nvmeio
from nvmeio._formats.torch_archives import torch_writing
from nvmeio.integrations.dcp import NvmeStorageReader, NvmeStorageWriter
from nvmeio.offload import SwappedModule, SwappedOptimizer

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

STATE_BYTES = 12 * 12 * 1024 * 513  # weights and two moments in fp32


@pytest.fixture
def trained(tmp_path: Path) -> Iterator[tuple[SwappedModule, SwappedOptimizer]]:
    torch.manual_seed(0)
    made = torch.nn.Sequential(*(torch.nn.Linear(512, 1024) if n % 2 == 0 else
                                 torch.nn.Linear(1024, 512) for n in range(12)))  # fmt: skip
    swap = tmp_path / "swap"
    swap.mkdir()
    with (
        SwappedModule(made, swap_dir=swap, resident_bytes=8 << 20) as module,
        SwappedOptimizer(
            torch.optim.Adam, module.parameters(), swap_dir=swap, subgroup_bytes=4 << 20
        ) as optimizer,
    ):
        for _ in range(2):
            module(torch.ones(2, 512)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        yield module, optimizer


def anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


@contextlib.contextmanager
def watched() -> Iterator[list[int]]:
    """Growth of anonymous memory at its highest within the block, looked at every millisecond.

    What earlier tests have freed goes back to the kernel first: malloc(3) keeps such pages, and
    what is made of them does not grow anything.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before, highest, over = anonymous_bytes(), [0], threading.Event()

    def look() -> None:
        while not over.wait(0.001):
            highest[0] = max(highest[0], anonymous_bytes() - before)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield highest
    finally:
        over.set()
        thread.join()


def test_the_watch_sees_what_is_given_back_later() -> None:
    with watched() as highest, mmap.mmap(-1, STATE_BYTES, flags=mmap.MAP_PRIVATE) as taken:
        taken.write(bytes(STATE_BYTES))  # pages of its own: none that the allocator had already
        spin_until(lambda: highest[0] > STATE_BYTES / 2)


def state_of(module: SwappedModule, optimizer: SwappedOptimizer) -> dict[str, Any]:
    return {"model": module.state_dict(), "optimizer": optimizer.state_dict()}


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found["model"].keys() == wanted["model"].keys()
    for name, tensor in wanted["model"].items():
        assert torch.equal(found["model"][name], tensor), name
    for key, entry in wanted["optimizer"]["state"].items():
        for name, value in entry.items():
            assert torch.equal(found["optimizer"]["state"][key][name], value), (key, name)


def test_checkpointer(trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_writing, "STAGING_BYTES", 1 << 20)  # as small as the state is here
    module, optimizer = trained
    with nvmeio.Checkpointer(
        tmp_path / "saved", memory_bytes=4 << 20, snapshot="copy"
    ) as checkpointer:
        checkpointer.save_sync({"warm": torch.ones(16 << 20)}, 0)  # a handle, the whole snapshot
        checkpointer.wait_sync()
        with watched() as highest:
            checkpointer.save_sync(state_of(module, optimizer), 1)
            checkpointer.wait_sync()
        assert highest[0] < STATE_BYTES / 2
        loaded = checkpointer.restore(1)
    assert_same(loaded, state_of(module, optimizer))
    plain = torch.nn.Sequential(*(torch.nn.Linear(512, 1024) if n % 2 == 0 else
                                  torch.nn.Linear(1024, 512) for n in range(12)))  # fmt: skip
    plain.load_state_dict(loaded["model"])
    torch.optim.Adam(plain.parameters()).load_state_dict(loaded["optimizer"])


@pytest.mark.parametrize("writer", [NvmeStorageWriter, dcp.FileSystemWriter])
def test_dcp(writer: Any, trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_writing, "STAGING_BYTES", 1 << 20)  # as small as the state is here
    module, optimizer = trained
    wanted = state_of(module, optimizer)
    with watched() as highest:
        dcp.save(state_of(module, optimizer), storage_writer=writer(tmp_path / "saved"))
    assert highest[0] < STATE_BYTES / 2
    found = {
        "model": {name: torch.zeros_like(t) for name, t in wanted["model"].items()},
        "optimizer": {
            "state": {
                key: {name: torch.zeros_like(value) for name, value in entry.items()}
                for key, entry in wanted["optimizer"]["state"].items()
            },
        },
    }
    dcp.load(found, storage_reader=NvmeStorageReader(tmp_path / "saved"))
    assert_same(found, wanted)

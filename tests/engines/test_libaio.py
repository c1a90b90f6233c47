"""The engine on Linux AIO, as far as no other engine is like it."""

from __future__ import annotations

import ctypes
import gc
import os
import select
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from inside import record_of
from interrupting import everywhere
from support import PATIENCE_S, misaligned

import nvmeio
from nvmeio._bindings import lib
from nvmeio.engines import libaio
from nvmeio.engines.base import Opcode, Options, Rows, Transfer
from nvmeio.engines.libaio import LibaioEngine

_prepare_keeping_gil = libaio._prepare_keeping_gil


class Counting:
    """The shim, and how many requests there are that were not given back."""

    def __init__(self) -> None:
        self.requests = 0
        self.made = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(lib, name)

    def nv_request_free(self, request: Any) -> None:
        self.requests -= 1
        lib.nv_request_free(request)

    def nv_prepare(self, *arguments: Any) -> Any:
        return self._count(lib.nv_prepare(*arguments))

    def prepare_keeping_gil(self, *arguments: Any) -> Any:
        return self._count(_prepare_keeping_gil(*arguments))

    def nv_prepare_rows(self, *arguments: Any) -> Any:
        return self._count(lib.nv_prepare_rows(*arguments))

    def nv_prepare_batch(self, *arguments: Any) -> Any:
        return self._count(lib.nv_prepare_batch(*arguments))

    def _count(self, request: Any) -> Any:
        self.requests += 1
        self.made += 1
        return request


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Counting:
    made = Counting()
    monkeypatch.setattr(libaio, "lib", made)
    monkeypatch.setattr(libaio, "_prepare_keeping_gil", made.prepare_keeping_gil)
    return made


@pytest.fixture
def engine(counting: Counting) -> Iterator[LibaioEngine]:
    made = LibaioEngine()
    made.start(Options())
    yield made
    made.stop()
    made.join()


@pytest.mark.parametrize("kind", ["one", "one for the ring", "rows", "batch"])
def test_a_request_that_an_interrupt_took_is_given_back(
    kind: str, engine: LibaioEngine, counting: Counting, tmp_path: Path
) -> None:
    """Between the call that made it and the one that owned it, it was nobody's."""
    rings = kind == "one for the ring"
    cq = engine.open_gil_keeping_queue() if rings else engine.open_completion_queue()
    (tmp_path / "file").write_bytes(bytes(8192))
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    sync = Transfer(Opcode.FSYNC, -1, fd, 0, 0, 0, 0, 0, 1, 1, False, False)
    offsets = torch.tensor([0, 4096])

    def prepare() -> None:
        if kind in ("one", "one for the ring"):
            engine.prepare(cq, 7, sync)
        elif kind == "rows":
            read = sync._replace(opcode=Opcode.READ, address=offsets.data_ptr())
            engine.prepare_rows(cq, 7, read, Rows(2, 8, offsets.data_ptr()))
        else:
            engine.prepare_batch(cq, 7, [sync, sync])

    places = 0
    for _ in everywhere(prepare):
        places += 1
        gc.collect()
        assert counting.requests == 0
    assert places > 3
    assert counting.made > 3
    os.close(fd)
    cq.close()


# What is said of it


async def test_the_queue_is_kept_full_by_a_thread_that_never_takes_the_gil(path: Path) -> None:
    """A transfer of many blocks ends while this thread has the GIL, and gives it to nobody.

    `ctypes.PyDLL` calls C without giving it up: here poll(2), on what the end is reported at.
    """
    nbytes = 4 << 20  # 256 blocks through a queue of 4: refilled many times
    content = os.urandom(nbytes)
    path.write_bytes(content)
    async with nvmeio.AioHandle(engine=LibaioEngine(), block_size=16384, queue_depth=4) as handle:
        tensor = nvmeio.empty_aligned(nbytes, dtype=torch.uint8)
        await handle.async_pread(tensor[:4096], path)  # the thread has begun, which is Python
        operation = handle.async_pread(tensor, path)
        home = record_of(operation).home
        assert home is not None
        asked = ctypes.create_string_buffer(struct.pack("ihh", home.fileno(), select.POLLIN, 0))
        ready = ctypes.PyDLL(None).poll(asked, 1, int(PATIENCE_S * 1000))
        whole = bytes(tensor.numpy()) == content
        assert (ready, whole) == (1, True)
        assert await operation == nbytes


def test_bounce_memory_is_no_more_than_the_queue(path: Path) -> None:
    """256 KiB of 64 MiB here, a lane. Of the process, so that little else is counted with it."""
    path.write_bytes(bytes(64 << 20))
    tensor, _room = misaligned(64 << 20, shift=1)
    with nvmeio.AioHandle(engine=LibaioEngine(), block_size=65536, queue_depth=4) as handle:
        handle.sync_pread(tensor[:4096], path)
        before = resident_bytes()
        operation = handle.async_pread(tensor, path)
        assert operation.result(PATIENCE_S) == tensor.nbytes
        assert operation.bounced_bytes + operation.buffered_bytes == tensor.nbytes
        assert resident_bytes() - before < 8 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

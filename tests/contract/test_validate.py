"""`validate=True`: what was moved is compared with what the page cache says."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import PATIENCE_S, bytes_tensor, on_every_loop, random_bytes, raw

import nvmeio
from nvmeio.engines.base import Opcode
from nvmeio.engines.threads import Block
from nvmeio.testing import FakeEngine

Make = Callable[..., nvmeio.AioHandle]
DATA = random_bytes(9 << 20)  # several of the comparison's chunks
HERE = (5 << 20) + 123


class Flipping(FakeEngine):
    """Changes one byte behind everybody's back."""

    def __init__(self, at: int, opcode: Opcode) -> None:
        super().__init__()
        self.at, self.opcode = at, opcode

    def _move(self, block: Block, fd: int, memory: memoryview, offset: int) -> int:
        transfer = block.request.transfer
        inside = offset <= self.at < offset + len(memory)
        if inside and transfer.opcode == self.opcode == Opcode.WRITE:
            damaged = bytearray(memory)
            damaged[self.at - offset] ^= 0xFF
            memory[:] = damaged
            moved = super()._move(block, fd, memory, offset)
            damaged[self.at - offset] ^= 0xFF
            memory[:] = damaged
            return moved
        moved = super()._move(block, fd, memory, offset)
        if inside and transfer.opcode == self.opcode:
            memory[self.at - offset] ^= 0xFF
        return moved


@pytest.fixture
def file(path: Path) -> Path:
    path.write_bytes(DATA)
    return path


# What is right


@pytest.mark.parametrize("named", ["path", "file", "descriptor"])
def test_validate_passes_right_bytes(make_handle: Make, path: Path, named: str) -> None:
    handle = make_handle(block_size=1 << 20)
    data = DATA[: (1 << 20) + 77]
    with nvmeio.open(path, "w") as opened:
        fd = os.open(path, os.O_WRONLY)  # which it cannot be read back through
        chosen: Any = {"path": path, "file": opened, "descriptor": fd}[named]
        assert handle.pwrite(bytes_tensor(data), chosen, validate=True, file_offset=5) == len(data)
        os.close(fd)
        got = torch.zeros(len(data), dtype=torch.uint8)
        assert handle.pread(got, path, validate=True, file_offset=5) == len(data)
    assert raw(got) == data


def test_tensors_that_are_not_contiguous_are_compared_too(make_handle: Make, path: Path) -> None:
    handle = make_handle()
    tensor = torch.randn(100, 300).t()
    assert handle.pwrite(tensor, path, validate=True) == 120_000
    assert path.read_bytes() == tensor.numpy().tobytes()
    got = torch.zeros(100, 300)
    assert handle.pread(got.t(), path, validate=True) == 120_000
    assert torch.equal(got.t(), tensor)


@pytest.mark.parametrize("nbytes", [0, 1, 4096])
def test_small_and_empty_tensors(make_handle: Make, file: Path, nbytes: int) -> None:
    handle = make_handle()
    got = torch.zeros(nbytes, dtype=torch.uint8)
    assert handle.pread(got, file, True) == nbytes
    assert handle.pwrite(got, file, True) == nbytes


@on_every_loop
async def test_async_op_gives_the_operation(make_handle: Make, file: Path) -> None:
    handle = make_handle(block_size=1 << 20)
    got = torch.zeros(len(DATA), dtype=torch.uint8)
    for validate in (False, True):
        operation = handle.pread(got.zero_(), file, validate, True)
        assert isinstance(operation, nvmeio.Operation)
        assert await operation == len(DATA)
        assert raw(got) == DATA
    operation = handle.pwrite(got[:5000], file, True, True, 33)
    assert isinstance(operation, nvmeio.Operation)
    assert await operation == 5000
    assert file.read_bytes()[:6000] == DATA[:33] + DATA[:5000] + DATA[5033:6000]


# What is wrong


def test_a_byte_flipped_on_the_way_in(new_handle: Make, file: Path) -> None:
    handle = new_handle(Flipping(HERE, Opcode.READ), block_size=1 << 20)
    got = torch.zeros(len(DATA), dtype=torch.uint8)
    with pytest.raises(nvmeio.IntegrityError) as caught:
        handle.pread(got, file, validate=True)
    right, wrong = DATA[HERE], DATA[HERE] ^ 0xFF
    assert raw(got)[HERE] == wrong
    assert str(caught.value) == (
        f"{file}: byte {HERE} is 0x{right:02x} in the page cache, 0x{wrong:02x} in the tensor"
    )
    assert isinstance(caught.value.expected, bytes)
    assert caught.value.expected[0] == wrong
    assert isinstance(caught.value.found, bytes)
    assert caught.value.found[0] == right
    assert handle.pread(got, file) == len(DATA)  # without validate nobody looks


@pytest.mark.parametrize("file_offset", [0, 4096, 4097])
def test_a_byte_flipped_on_the_way_out(new_handle: Make, path: Path, file_offset: int) -> None:
    handle = new_handle(Flipping(HERE, Opcode.WRITE), block_size=1 << 20)
    with pytest.raises(nvmeio.IntegrityError, match=f"byte {HERE} is 0x"):
        handle.pwrite(bytes_tensor(DATA), path, validate=True, file_offset=file_offset)
    assert path.read_bytes()[HERE] == DATA[HERE - file_offset] ^ 0xFF


def test_the_first_and_the_last_byte_count(new_handle: Make, file: Path) -> None:
    for at in (0, len(DATA) - 1, (4 << 20) - 1, 4 << 20):
        handle = new_handle(Flipping(at, Opcode.READ), block_size=1 << 20)
        with pytest.raises(nvmeio.IntegrityError, match=f"byte {at} is"):
            handle.pread(torch.zeros(len(DATA), dtype=torch.uint8), file, validate=True)


@on_every_loop
async def test_an_operation_fails_with_what_was_found(new_handle: Make, file: Path) -> None:
    handle = new_handle(Flipping(HERE, Opcode.READ), block_size=1 << 20)
    operation = handle.pread(torch.zeros(len(DATA), dtype=torch.uint8), file, True, True)
    assert isinstance(operation, nvmeio.Operation)
    with pytest.raises(nvmeio.IntegrityError):
        await operation
    assert isinstance(operation.exception(), nvmeio.IntegrityError)
    later = handle.pread(torch.zeros(len(DATA), dtype=torch.uint8), file, True, True)
    assert isinstance(later, nvmeio.Operation)
    with pytest.raises(nvmeio.IntegrityError):
        await handle.drain()


def test_a_file_that_shrank_in_between(new_handle: Make, file: Path) -> None:
    class Cutting(FakeEngine):
        def _move(self, block: Block, fd: int, memory: memoryview, offset: int) -> int:
            moved = super()._move(block, fd, memory, offset)
            os.truncate(file, 100)
            return moved

    handle = new_handle(Cutting(), block_size=1 << 20)
    with pytest.raises(nvmeio.IntegrityError, match="byte 100 is 0xend of file in the page cache"):
        handle.pread(torch.zeros(4096, dtype=torch.uint8), file, validate=True)


def test_a_file_that_is_gone_in_between(new_handle: Make, file: Path) -> None:
    class Removing(FakeEngine):
        def _move(self, block: Block, fd: int, memory: memoryview, offset: int) -> int:
            moved = super()._move(block, fd, memory, offset)
            file.unlink(missing_ok=True)
            return moved

    handle = new_handle(Removing(), block_size=1 << 20)
    with pytest.raises(FileNotFoundError):
        handle.pread(torch.zeros(4096, dtype=torch.uint8), file, validate=True)


# What cannot be compared


def test_a_transfer_that_failed_is_not_compared(make_handle: Make, file: Path) -> None:
    handle = make_handle(block_size=1 << 20)
    with pytest.raises(nvmeio.ShortTransferError):
        handle.pread(torch.zeros(len(DATA) + 1, dtype=torch.uint8), file, validate=True)
    with pytest.raises(FileNotFoundError):
        handle.pread(torch.zeros(1), f"{file}.missing", validate=True)


@on_every_loop
async def test_comparing_leaves_the_loop_alone(
    make_handle: Make, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is done in another thread: here it waits until the loop has gone round meanwhile."""
    handle = make_handle(block_size=1 << 20)
    pread = os.pread
    comparing, went_round = threading.Event(), threading.Event()

    def waiting(fd: int, nbytes: int, offset: int) -> bytes:
        comparing.set()
        assert went_round.wait(PATIENCE_S), "the loop stands still"
        return pread(fd, nbytes, offset)

    async def tick() -> None:
        while not comparing.is_set():
            await asyncio.sleep(0.0005)
        went_round.set()

    monkeypatch.setattr(os, "pread", waiting)
    ticking = asyncio.create_task(tick())
    values = np.frombuffer(DATA, dtype=np.uint8)
    operation = handle.pread(torch.zeros(len(DATA), dtype=torch.uint8), file, True, True)
    assert isinstance(operation, nvmeio.Operation)
    assert await operation == len(values)
    await ticking

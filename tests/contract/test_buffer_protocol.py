"""Transfers to and from what is no tensor: objects with the buffer protocol, without a copy."""

from __future__ import annotations

import array
import asyncio
import ctypes
import gc
import mmap
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import HeldEngine, random_bytes, spin_until_collected

import nvmeio

DATA = random_bytes(3 * 4096 + 32)
Make = Callable[[int], Any]

BUFFERS: dict[str, Make] = {
    "bytearray": bytearray,
    "memoryview": lambda n: memoryview(bytearray(n)),
    "part": lambda n: memoryview(bytearray(n + 9))[5 : 5 + n],
    "array": lambda n: array.array("d", bytes(n)),
    "ctypes": lambda n: (ctypes.c_uint16 * (n // 2))(),
    "mmap": lambda n: memoryview(mmap.mmap(-1, n)),
    "float32": lambda n: np.zeros(n // 4, np.float32),
    "matrix": lambda n: np.zeros((n // 40, 10), np.int32),
    "records": lambda n: np.zeros(n // 8, [("a", "i4"), ("b", "f4")]),
    "rows of a matrix": lambda n: np.zeros((n // 40 + 2, 5))[1:-1],
}


@pytest.fixture
def file(path: Path) -> Path:
    """A file of `DATA`."""
    path.write_bytes(DATA)
    return path


@pytest.mark.parametrize("offset", [0, 7])
@pytest.mark.parametrize("kind", BUFFERS)
def test_a_buffer_is_written_and_filled_in_place(
    handle: nvmeio.AioHandle, path: Path, kind: str, offset: int
) -> None:
    buffer = BUFFERS[kind](len(DATA))
    path.write_bytes(bytes(offset) + DATA)
    assert handle.async_pread(buffer, path, offset).result() == len(DATA)
    assert bytes(memoryview(buffer)) == DATA
    assert handle.sync_pwrite(buffer, path, offset + 1) == len(DATA)
    assert path.read_bytes()[offset + 1 :] == DATA
    assert handle.pread(buffer, path, validate=True, file_offset=offset + 1) == len(DATA)


@pytest.mark.parametrize("make", [bytes, lambda d: memoryview(d).toreadonly(), np.frombuffer])
def test_what_is_read_only_is_written_but_not_read_into(
    handle: nvmeio.AioHandle, path: Path, make: Callable[..., Any]
) -> None:
    source = make(DATA, np.uint8) if make is np.frombuffer else make(DATA)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of memory that is not writable
        assert handle.sync_pwrite(source, path) == len(DATA)
    assert path.read_bytes() == DATA
    path.write_bytes(bytes(len(DATA)))
    with pytest.raises(TypeError, match=r"cannot read into an? .* its memory is read-only"):
        handle.async_pread(source, path)
    assert bytes(memoryview(source)) == DATA
    assert handle.stats.operations == 1


@pytest.mark.parametrize("make", [bytearray, lambda n: np.empty(n, np.uint8)])
def test_an_empty_buffer_moves_nothing(handle: nvmeio.AioHandle, file: Path, make: Make) -> None:
    assert handle.sync_pread(make(0), file) == 0
    assert handle.sync_pwrite(make(0), file, 5) == 0
    assert file.read_bytes() == DATA


@pytest.mark.parametrize(
    ("made", "error", "says"),
    [
        (lambda: np.zeros((8, 8))[:, ::2], ValueError, r"strides \(64, 16\) is not contiguous"),
        (lambda: memoryview(bytearray(8))[::2], ValueError, "is not contiguous"),
        (lambda: np.array([print]), TypeError, "of Python objects holds addresses"),
        (lambda: np.zeros(3, "M8[s]"), TypeError, r"pass array.view\(numpy.uint8\)"),
    ],
    ids=["columns", "every second", "objects", "dates"],
)
def test_a_buffer_that_is_no_plain_memory_is_refused(
    handle: nvmeio.AioHandle, file: Path, made: Any, error: type[Exception], says: str
) -> None:
    for call in (handle.async_pread, handle.async_pwrite):
        with pytest.raises(error, match=says):
            call(made(), file)
    assert handle.stats.operations == 0
    assert file.read_bytes() == DATA


def test_a_bytearray_is_not_resized_while_it_is_in_use_and_may_be_afterwards(
    handle_held: nvmeio.AioHandle, engine_held: HeldEngine, file: Path
) -> None:
    buffer = bytearray(len(DATA))
    operation = handle_held.async_pread(buffer, file)
    engine_held.wait_until_begun()
    with pytest.raises(BufferError):
        buffer.extend(b"more")
    engine_held.gate.set()
    assert operation.result() == len(DATA)
    buffer.extend(b"more")
    assert buffer == DATA + b"more"


def test_a_buffer_that_nobody_else_keeps_lives_until_the_operation_is_done(
    handle_held: nvmeio.AioHandle, engine_held: HeldEngine, file: Path
) -> None:
    class Region(mmap.mmap):
        pass

    region = Region(-1, 4096)
    seen = weakref.ref(region)
    operation = handle_held.async_pread(memoryview(region), file)
    engine_held.wait_until_begun()
    del region
    gc.collect()
    assert seen() is not None
    engine_held.gate.set()
    assert operation.result() == 4096
    spin_until_collected(lambda: seen() is None)


def test_buffers_are_awaited(make_handle: Callable[..., nvmeio.AioHandle], path: Path) -> None:
    handle = make_handle()

    async def there_and_back() -> Any:
        buffer = np.empty(len(DATA), np.uint8)
        await handle.async_pwrite(DATA, path)
        await asyncio.gather(
            handle.async_pread(buffer[:5000], path),
            handle.async_pread(buffer[5000:], path, 5000),
        )
        return buffer

    assert asyncio.run(there_and_back()).tobytes() == DATA

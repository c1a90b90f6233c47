"""What the page cache holds, and copies out of it."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support import spin_until

from nvmeio._files import system as system_module
from nvmeio._memory import system

BYTES = random.Random(7).randbytes((1 << 20) + 123)


@pytest.fixture
def cached(tmp_path: Path) -> Iterator[int]:
    """A descriptor of a file whose bytes the page cache holds."""
    path = tmp_path / "file"
    path.write_bytes(BYTES)
    with open(path, "rb", buffering=0) as opened:
        os.fsync(opened.fileno())  # what is dirty cannot be dropped
        if not system_module.is_cached(opened.fileno(), 0, len(BYTES)):
            pytest.skip("cachestat(2) is not to be had here (Linux 6.5)")
        yield opened.fileno()


def resident(fd: int) -> int:
    """How many pages of the file the kernel has, by mincore(2)."""
    pages = -(-len(BYTES) // mmap.PAGESIZE)
    with mmap.mmap(fd, len(BYTES), flags=mmap.MAP_PRIVATE) as mapped:
        told, first = ctypes.create_string_buffer(pages), ctypes.c_char.from_buffer(mapped)
        address = ctypes.c_void_p(ctypes.addressof(first))
        del first
        assert system.libc.mincore(address, ctypes.c_size_t(len(BYTES)), told) == 0
    return sum(page & 1 for page in told.raw)


@pytest.fixture
def dropped(cached: int) -> int:
    """The same, and nothing of it is held: what is in use in that moment is not dropped."""
    for _ in range(300):
        os.posix_fadvise(cached, 0, 0, os.POSIX_FADV_DONTNEED)
        if not resident(cached):
            return cached
        time.sleep(0.005)
    pytest.skip("this file system lives in the page cache")


@pytest.mark.parametrize("start, nbytes", [(0, len(BYTES)), (5000, 3), (4095, 2)])
def test_what_was_just_read_is_held(cached: int, start: int, nbytes: int) -> None:
    def held() -> bool:
        os.pread(cached, len(BYTES), 0)
        return system_module.is_cached(cached, start, nbytes)

    spin_until(held)  # memory may have been needed for something else in between


def test_a_span_is_held_only_as_a_whole(cached: int) -> None:
    assert not system_module.is_cached(cached, 0, len(BYTES) + 8192)
    assert not system_module.is_cached(cached, len(BYTES) + 8192, 1)
    assert not system_module.is_cached(cached, 0, 0)


def test_what_was_dropped_is_not_held(dropped: int) -> None:
    assert not system_module.is_cached(dropped, 0, len(BYTES))
    assert not system_module.is_cached(dropped, 0, 4096)


def test_asking_reads_nothing(dropped: int) -> None:
    for _ in range(3):
        assert not system_module.is_cached(dropped, 0, 4096)
    assert not resident(dropped)


@pytest.mark.parametrize("start, nbytes", [(0, len(BYTES)), (1, 4096), (4097, 70001)])
def test_copies_are_the_bytes(cached: int, start: int, nbytes: int) -> None:
    memory = torch.zeros(nbytes + 2, dtype=torch.uint8)
    assert system_module.copy_cached(cached, start, memory[1:-1])
    assert memory[1:-1].numpy().tobytes() == BYTES[start : start + nbytes]
    assert memory[0] == memory[-1] == 0


def test_tensors_of_any_dtype_are_filled(cached: int) -> None:
    memory = torch.zeros(3, 5, dtype=torch.float64)
    assert system_module.copy_cached(cached, 16, memory)
    assert memory.numpy().tobytes() == BYTES[16 : 16 + 120]


def test_the_end_of_the_file_and_errors_are_told(cached: int, tmp_path: Path) -> None:
    memory = torch.zeros(4096, dtype=torch.uint8)
    assert not system_module.copy_cached(cached, len(BYTES) - 10, memory)
    written = os.open(tmp_path / "file", os.O_WRONLY)
    try:
        assert not system_module.copy_cached(written, 0, memory)
    finally:
        os.close(written)


def test_where_the_call_is_refused_nothing_is_held(
    cached: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system_module, "_CACHESTAT", 100_000)  # ENOSYS, as before Linux 6.5
    assert not system_module.is_cached(cached, 0, 4096)

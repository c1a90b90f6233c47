"""What the page cache holds, and copies out of it."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nvmeio import _page_cache

BYTES = random.Random(7).randbytes((1 << 20) + 123)


@pytest.fixture
def cached(tmp_path: Path) -> Iterator[int]:
    """A descriptor of a file whose bytes the page cache holds."""
    path = tmp_path / "file"
    path.write_bytes(BYTES)
    with open(path, "rb", buffering=0) as opened:
        os.fsync(opened.fileno())  # what is dirty cannot be dropped
        if not _page_cache.holds(opened.fileno(), 0, len(BYTES)):
            pytest.skip("cachestat(2) is not to be had here (Linux 6.5)")
        yield opened.fileno()


def test_a_file_that_was_just_written_is_held(cached: int) -> None:
    assert _page_cache.holds(cached, 0, len(BYTES))
    assert _page_cache.holds(cached, 5000, 3)
    assert _page_cache.holds(cached, 4095, 2)


def test_a_span_is_held_only_as_a_whole(cached: int) -> None:
    assert not _page_cache.holds(cached, 0, len(BYTES) + 8192)
    assert not _page_cache.holds(cached, len(BYTES) + 8192, 1)
    assert not _page_cache.holds(cached, 0, 0)


def test_what_was_dropped_is_not_held(cached: int) -> None:
    os.posix_fadvise(cached, 0, 0, os.POSIX_FADV_DONTNEED)
    if _page_cache.holds(cached, 0, len(BYTES)):
        pytest.skip("this file system lives in the page cache")
    assert not _page_cache.holds(cached, 0, 4096)


def test_asking_reads_nothing(cached: int) -> None:
    os.posix_fadvise(cached, 0, 0, os.POSIX_FADV_DONTNEED)
    if _page_cache.holds(cached, 0, len(BYTES)):
        pytest.skip("this file system lives in the page cache")
    for _ in range(3):
        assert not _page_cache.holds(cached, 0, 4096)


@pytest.mark.parametrize("start, nbytes", [(0, len(BYTES)), (1, 4096), (4097, 70001)])
def test_copies_are_the_bytes(cached: int, start: int, nbytes: int) -> None:
    memory = torch.zeros(nbytes + 2, dtype=torch.uint8)
    assert _page_cache.copy(cached, start, memory[1:-1])
    assert memory[1:-1].numpy().tobytes() == BYTES[start : start + nbytes]
    assert memory[0] == memory[-1] == 0


def test_tensors_of_any_dtype_are_filled(cached: int) -> None:
    memory = torch.zeros(3, 5, dtype=torch.float64)
    assert _page_cache.copy(cached, 16, memory)
    assert memory.numpy().tobytes() == BYTES[16 : 16 + 120]


def test_the_end_of_the_file_and_errors_are_told(cached: int, tmp_path: Path) -> None:
    memory = torch.zeros(4096, dtype=torch.uint8)
    assert not _page_cache.copy(cached, len(BYTES) - 10, memory)
    written = os.open(tmp_path / "file", os.O_WRONLY)
    try:
        assert not _page_cache.copy(written, 0, memory)
    finally:
        os.close(written)


def test_where_the_call_is_refused_nothing_is_held(
    cached: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_page_cache, "_CACHESTAT", 100_000)  # ENOSYS, as before Linux 6.5
    assert not _page_cache.holds(cached, 0, 4096)

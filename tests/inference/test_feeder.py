"""The thread that brings layers: from the drive, and beside it from the page cache."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import nvmeio
from nvmeio import _page_cache
from nvmeio.files import File
from nvmeio.inference import _feeder
from nvmeio.inference._feeder import Feeder, Job, Wanted

PIECE = 64 << 10
PIECES = 24
NBYTES = PIECES * PIECE + 77
BYTES = random.Random(11).randbytes(NBYTES)
LIMIT_S = 20


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[File]:
    """A file in the page cache, of which the drive gets one piece at a time."""
    monkeypatch.setattr(_feeder, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(_feeder, "CACHED_FLIGHT_BYTES", 0)
    path = tmp_path / "weights"
    path.write_bytes(BYTES)
    with nvmeio.open(path, "r") as file:
        opened = file.acquire(False)
        try:
            os.fsync(opened.any_fd())
            if not _page_cache.holds(opened.any_fd(), 0, len(BYTES)):
                pytest.skip("cachestat(2) is not to be had here (Linux 6.5)")
        finally:
            opened.release()
        yield file


@pytest.fixture
def feeder() -> Iterator[Feeder]:
    with nvmeio.AioHandle(queue_depth=4, block_size=PIECE) as handle:
        feeder = Feeder(handle)
        yield feeder
        feeder.stop()


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Where the copies out of the page cache began."""
    starts: list[int] = []
    copy = _page_cache.copy

    def noted(fd: int, start: int, memory: torch.Tensor) -> bool:
        starts.append(start)
        return copy(fd, start, memory)

    monkeypatch.setattr(_page_cache, "copy", noted)
    return starts


def bring(feeder: Feeder, file: File, nbytes: int = NBYTES) -> tuple[Job, torch.Tensor]:
    memory = torch.zeros(nbytes, dtype=torch.uint8)
    job = Job([Wanted(file, 0, memory, 0)])
    feeder.submit(job)
    assert job.done.wait(LIMIT_S)
    return job, memory


def slow_drive(feeder: Feeder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads are done only after the page cache has brought what it could."""
    pread = feeder._handle.async_pread

    class Late:
        def __init__(self, *arguments: Any) -> None:
            self._arguments = arguments

        def done(self) -> bool:
            return False

        def exception(self) -> BaseException | None:
            return pread(*self._arguments).exception()

        def cancel(self) -> None:
            pass

    monkeypatch.setattr(feeder._handle, "async_pread", Late)


def test_what_is_cached_is_copied_beside_the_drive(
    feeder: Feeder, weights: File, copies: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_drive(feeder, monkeypatch)
    job, memory = bring(feeder, weights)
    assert job.error is None
    assert memory.numpy().tobytes() == BYTES
    assert len(copies) == PIECES  # all but the first, which the drive had by then


def test_what_is_not_cached_comes_from_the_drive(
    feeder: Feeder, weights: File, copies: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = weights.acquire(False)
    os.posix_fadvise(opened.any_fd(), 0, 0, os.POSIX_FADV_DONTNEED)
    held = _page_cache.holds(opened.any_fd(), 0, len(BYTES))
    opened.release()
    if held:
        pytest.skip("this file system lives in the page cache")
    slow_drive(feeder, monkeypatch)
    job, memory = bring(feeder, weights)
    assert job.error is None
    assert memory.numpy().tobytes() == BYTES
    assert copies == []


def test_a_copy_that_fails_is_read_instead(
    feeder: Feeder, weights: File, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_drive(feeder, monkeypatch)
    monkeypatch.setattr(_page_cache, "copy", lambda fd, start, memory: False)
    job, memory = bring(feeder, weights)
    assert job.error is None
    assert memory.numpy().tobytes() == BYTES


def test_a_file_that_ends_early_is_an_error(
    feeder: Feeder, weights: File, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_drive(feeder, monkeypatch)
    monkeypatch.setattr(_page_cache, "holds", lambda fd, start, nbytes: True)
    job, _ = bring(feeder, weights, len(BYTES) + PIECE)
    assert isinstance(job.error, nvmeio.TransferError)
    assert "weights" in str(job.error)
    job, memory = bring(feeder, weights)  # and the next job is served
    assert memory.numpy().tobytes() == BYTES


def test_a_closed_file_is_an_error(feeder: Feeder, weights: File) -> None:
    weights.close()
    job, _ = bring(feeder, weights)
    assert isinstance(job.error, nvmeio.ClosedError)


def test_a_cancelled_job_is_done_only_when_its_copy_is(
    feeder: Feeder, weights: File, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_drive(feeder, monkeypatch)
    copying, go_on = threading.Event(), threading.Event()
    copy = _page_cache.copy

    def held_up(fd: int, start: int, memory: torch.Tensor) -> bool:
        copying.set()
        assert go_on.wait(LIMIT_S)
        return copy(fd, start, memory)

    monkeypatch.setattr(_page_cache, "copy", held_up)
    memory = torch.zeros(len(BYTES), dtype=torch.uint8)
    job = Job([Wanted(weights, 0, memory, 0)])
    feeder.submit(job)
    assert copying.wait(LIMIT_S)
    cancelling = threading.Thread(target=feeder.cancel, args=(job,), daemon=True)
    cancelling.start()
    cancelling.join(0.2)
    assert cancelling.is_alive()  # the memory is still being written to
    go_on.set()
    cancelling.join(LIMIT_S)
    assert not cancelling.is_alive()
    assert job.done.is_set()
    job, memory = bring(feeder, weights)
    assert memory.numpy().tobytes() == BYTES


def test_pieces_that_were_copied_are_announced_too(
    feeder: Feeder, weights: File, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_drive(feeder, monkeypatch)
    memory = torch.zeros(len(BYTES), dtype=torch.uint8)
    there: list[tuple[int, int]] = []
    finished = threading.Event()
    job = Job(
        [Wanted(weights, 0, memory, 0)],
        arrived=lambda piece: there.append((piece.at, piece.memory.nbytes)),
        finished=finished.set,
    )
    feeder.submit(job)
    assert job.done.wait(LIMIT_S)
    assert finished.is_set()
    assert sorted(there) == [(n * PIECE, PIECE) for n in range(PIECES)] + [(PIECES * PIECE, 77)]

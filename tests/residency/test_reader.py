"""The thread that brings layers: from the drive, and beside it from the page cache."""

from __future__ import annotations

import os
import random
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import nvmeio
from nvmeio._files import system
from nvmeio._residency import reader as reader_module
from nvmeio._residency.reader import Fill, Reader, WantedBytes
from nvmeio.files import File

PIECE = 64 << 10
PIECES = 24
NBYTES = PIECES * PIECE + 77
BYTES = random.Random(11).randbytes(NBYTES)
LIMIT_S = 60


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[File]:
    """A file in the page cache, of which the drive gets one piece at a time."""
    monkeypatch.setattr(reader_module, "CHUNK_BYTES", PIECE)
    monkeypatch.setattr(reader_module, "CACHED_FLIGHT_BYTES", 0)
    path = tmp_path / "weights"
    path.write_bytes(BYTES)
    with nvmeio.open(path, "r") as file:
        opened = file.acquire("test")
        try:
            os.fsync(opened.any_fd())
            if not system.is_cached(opened.any_fd(), 0, len(BYTES)):
                pytest.skip("cachestat(2) is not to be had here (Linux 6.5)")
        finally:
            opened.let_go("test")
        yield file


class ReaderOf(Reader):
    """With the handle that moves the bytes."""

    def __init__(self, handle: nvmeio.AioHandle) -> None:
        super().__init__(handle)
        self.handle = handle


@pytest.fixture
def reader() -> Iterator[ReaderOf]:
    with nvmeio.AioHandle(queue_depth=4, block_size=PIECE) as handle:
        reader = ReaderOf(handle)
        yield reader
        reader.stop()


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Where the copies out of the page cache began."""
    starts: list[int] = []
    copy = system.copy_cached

    def noted(fd: int, start: int, memory: torch.Tensor) -> bool:
        starts.append(start)
        return copy(fd, start, memory)

    monkeypatch.setattr(system, "copy_cached", noted)
    return starts


def bring(reader: ReaderOf, file: File, nbytes: int = NBYTES) -> tuple[Fill, torch.Tensor]:
    memory = torch.zeros(nbytes, dtype=torch.uint8)
    fill = Fill([WantedBytes(file, 0, memory, 0)])
    reader.submit(fill)
    waiting = threading.Thread(target=reader.wait, args=(fill,), daemon=True)
    waiting.start()
    waiting.join(LIMIT_S)
    assert fill.done.is_set()
    return fill, memory


def slow_drive(reader: ReaderOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads are done only after the page cache has brought what it could."""
    pread = reader.handle.async_pread

    class Late:
        def __init__(self, *arguments: Any) -> None:
            self._arguments = arguments

        def done(self) -> bool:
            return False

        def exception(self) -> BaseException | None:
            return pread(*self._arguments).exception()

        def cancel(self) -> None:
            pass

    monkeypatch.setattr(reader.handle, "async_pread", Late)


def test_what_is_cached_is_copied_beside_the_drive(
    reader: ReaderOf, weights: File, copies: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_drive(reader, monkeypatch)
    fill, memory = bring(reader, weights)
    assert fill.error is None
    assert memory.numpy().tobytes() == BYTES
    assert len(copies) == PIECES  # all but the first, which the drive had by then


def test_what_is_not_cached_comes_from_the_drive(
    reader: ReaderOf, weights: File, copies: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = weights.acquire("test")
    fd = opened.any_fd()
    for _ in range(100):  # a page that somebody looks at just then stays
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        held = [at for at in range(0, NBYTES, 4096) if system.is_cached(fd, at, 1)]
        if not held:
            break
    opened.let_go("test")
    if held:
        pytest.skip("this file system lives in the page cache")
    slow_drive(reader, monkeypatch)
    fill, memory = bring(reader, weights)
    assert fill.error is None
    assert memory.numpy().tobytes() == BYTES
    assert copies == []


def test_a_copy_that_fails_is_read_instead(
    reader: ReaderOf, weights: File, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_drive(reader, monkeypatch)
    monkeypatch.setattr(system, "copy_cached", lambda fd, start, memory: False)
    fill, memory = bring(reader, weights)
    assert fill.error is None
    assert memory.numpy().tobytes() == BYTES


def test_a_file_that_ends_early_is_an_error(
    reader: ReaderOf, weights: File, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_drive(reader, monkeypatch)
    monkeypatch.setattr(system, "is_cached", lambda fd, start, nbytes: True)
    fill, _ = bring(reader, weights, len(BYTES) + PIECE)
    assert isinstance(fill.error, nvmeio.TransferError)
    assert "weights" in str(fill.error)
    fill, memory = bring(reader, weights)  # and the next fill is served
    assert memory.numpy().tobytes() == BYTES


def test_a_closed_file_is_an_error(reader: ReaderOf, weights: File) -> None:
    weights.close()
    fill, _ = bring(reader, weights)
    assert isinstance(fill.error, nvmeio.ClosedError)


def test_a_cancelled_job_is_done_only_when_its_copy_is(
    reader: ReaderOf, weights: File, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_drive(reader, monkeypatch)
    copying, go_on = threading.Event(), threading.Event()
    copy = system.copy_cached

    def held_up(fd: int, start: int, memory: torch.Tensor) -> bool:
        copying.set()
        assert go_on.wait(LIMIT_S)
        return copy(fd, start, memory)

    monkeypatch.setattr(system, "copy_cached", held_up)
    memory = torch.zeros(len(BYTES), dtype=torch.uint8)
    fill = Fill([WantedBytes(weights, 0, memory, 0)])
    reader.submit(fill)
    assert copying.wait(LIMIT_S)
    cancelling = threading.Thread(target=reader.cancel, args=(fill,), daemon=True)
    cancelling.start()
    cancelling.join(0.2)
    assert cancelling.is_alive()  # the memory is still being written to
    go_on.set()
    cancelling.join(LIMIT_S)
    assert not cancelling.is_alive()
    assert fill.done.is_set()
    fill, memory = bring(reader, weights)
    assert memory.numpy().tobytes() == BYTES


def test_chunks_that_were_copied_are_announced_too(
    reader: ReaderOf, weights: File, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_drive(reader, monkeypatch)
    memory = torch.zeros(len(BYTES), dtype=torch.uint8)
    there: list[tuple[int, int]] = []
    finished = threading.Event()
    fill = Fill(
        [WantedBytes(weights, 0, memory, 0)],
        arrived=lambda piece: there.append((piece.at, piece.memory.nbytes)),
        finished=finished.set,
    )
    reader.submit(fill)
    assert fill.done.wait(LIMIT_S)
    assert finished.is_set()
    assert sorted(there) == [(n * PIECE, PIECE) for n in range(PIECES)] + [(PIECES * PIECE, 77)]


class Held:
    """A read that ends when the test says so."""

    def __init__(self, memory: torch.Tensor, file: File, file_offset: int = 0) -> None:
        self.over = threading.Event()
        self.asked_by: list[str] = []

    def done(self) -> bool:
        return self.over.is_set()

    def cancelled(self) -> bool:
        return False

    def exception(self) -> BaseException | None:
        self.asked_by.append(threading.current_thread().name)
        assert self.over.wait(LIMIT_S)
        return None

    def cancel(self) -> None:
        pass


def held_reads(reader: ReaderOf, monkeypatch: pytest.MonkeyPatch) -> list[Held]:
    begun: list[Held] = []

    def begin(*arguments: Any) -> Held:
        begun.append(Held(*arguments))
        return begun[-1]

    monkeypatch.setattr(reader.handle, "async_pread", begin)
    return begun


def fill_of(file: File, nbytes: int = PIECE) -> Fill:
    return Fill([WantedBytes(file, 0, torch.zeros(nbytes, dtype=torch.uint8), 0)])


def test_a_fill_of_which_a_read_is_under_way_is_not_whole(
    reader: ReaderOf, weights: File, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_module, "CACHED_FLIGHT_BYTES", 1 << 30)
    begun = held_reads(reader, monkeypatch)
    fill = fill_of(weights, 2 * PIECE)
    assert not fill.whole and fill.under_way
    reader.submit(fill)
    begun[0].over.set()
    assert not fill.whole and fill.under_way
    begun[1].over.set()
    assert fill.whole and not fill.under_way
    assert not fill.done.is_set()  # nobody has waited for it


def test_who_waits_for_a_fill_lands_it_without_the_thread(
    reader: ReaderOf, weights: File, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = held_reads(reader, monkeypatch)
    fill = fill_of(weights)
    reader.submit(fill)
    begun[0].over.set()
    reader.wait(fill)
    assert fill.whole
    assert begun[0].asked_by == [threading.current_thread().name]


def test_two_that_wait_are_both_told(
    reader: ReaderOf, weights: File, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one's fill is landed by the thread where the first one has gone by then."""
    monkeypatch.setattr(reader_module, "CACHED_FLIGHT_BYTES", 1 << 30)
    begun = held_reads(reader, monkeypatch)
    fills = [fill_of(weights), fill_of(weights)]
    waiting = []
    for fill in fills:
        reader.submit(fill)
        waiting.append(threading.Thread(target=reader.wait, args=(fill,), daemon=True))
        waiting[-1].start()
    for number, thread in enumerate(waiting):
        begun[number].over.set()
        thread.join(LIMIT_S)
        assert not thread.is_alive()
    assert all(fill.whole for fill in fills)


def test_a_fill_that_nobody_waited_for_is_cancelled(
    reader: ReaderOf, weights: File, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = held_reads(reader, monkeypatch)
    fill = fill_of(weights)
    reader.submit(fill)
    begun[0].over.set()
    reader.cancel(fill)
    assert fill.done.is_set() and not fill.whole
    assert not reader._flying


class Refusing(deque[Any]):
    """Raises MemoryError in one of its methods, once, after so many calls."""

    def refuse(self, method: str, after: int = 0) -> None:
        self.method, self.after = method, after

    def _called(self, method: str) -> None:
        if method == self.method:
            self.after -= 1
            if self.after == -1:
                raise MemoryError

    def append(self, value: Any) -> None:
        self._called("append")
        super().append(value)

    def popleft(self) -> Any:
        self._called("popleft")
        return super().popleft()


@pytest.mark.parametrize("noted_in", ["operations", "_flying"])
def test_a_read_that_there_is_no_memory_to_note_is_waited_for(
    noted_in: str, reader: ReaderOf, weights: File, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread ended, and whoever waited then waited for ever."""
    monkeypatch.setattr(system, "is_cached", lambda *_: False)
    monkeypatch.setattr(reader_module, "FLIGHT_OPERATIONS", 1)  # the thread begins all but one
    refusing = Refusing()
    refusing.refuse("append", after=2)
    ended = threading.Event()
    fill = Fill([WantedBytes(weights, 0, torch.zeros(NBYTES, dtype=torch.uint8), 0)])
    fill.attended, fill.ended = True, ended.set
    where: Any = fill if noted_in == "operations" else reader
    monkeypatch.setattr(where, noted_in, refusing)
    reader.submit(fill)
    assert ended.wait(LIMIT_S)
    assert isinstance(fill.error, MemoryError) and not fill.whole
    assert reader.handle.stats.in_flight == 0
    fill, memory = bring(reader, weights)
    assert fill.error is None and memory.numpy().tobytes() == BYTES


def test_a_thread_without_memory_fails_what_it_lands_and_goes_on(
    reader: ReaderOf, weights: File, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system, "is_cached", lambda *_: False)
    refusing = Refusing()
    refusing.refuse("popleft", after=1)
    monkeypatch.setattr(reader, "_flying", refusing)
    fills = [fill_of(weights, NBYTES), fill_of(weights, NBYTES)]
    ended = [threading.Event() for _ in fills]
    for fill, event in zip(fills, ended, strict=True):
        fill.attended, fill.ended = True, event.set
        reader.submit(fill)
    for event in ended:
        assert event.wait(LIMIT_S)
    assert any(isinstance(fill.error, MemoryError) for fill in fills)
    assert all(fill.whole or isinstance(fill.error, MemoryError) for fill in fills)
    fill, memory = bring(reader, weights)
    assert fill.error is None and memory.numpy().tobytes() == BYTES

"""Operations in flight: bounded, in order, cancelled from any thread, over at the end."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support import HeldEngine, bytes_tensor, random_bytes, raw, spin_until, thread

import nvmeio
from nvmeio._io import inflight
from nvmeio._io.inflight import InFlight, Stagings
from nvmeio._threads.interruptible import Cancellation, Cancelled
from nvmeio.errors import ShortTransferError

KIB = 1 << 10
CPU = torch.device("cpu")


def reads(handle: nvmeio.AioHandle, path: Path, count: int) -> list[Any]:
    """What begins reads of 4 KiB each, and the memory they fill."""
    memory = [torch.empty(4 * KIB, dtype=torch.uint8) for _ in range(count)]
    return [
        (partial(handle.async_pread, part, str(path), 4 * KIB * index), part)
        for index, part in enumerate(memory)
    ]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "data"
    found.write_bytes(random_bytes(64 * KIB))
    return found


def test_all_are_done_at_the_end_and_in_order(handle: nvmeio.AioHandle, path: Path) -> None:
    begun = reads(handle, path, 16)
    order: list[int] = []
    finished: list[int] = []
    with InFlight(8 * KIB, lambda operation: finished.append(operation.file_offset)) as flight:
        for index, (begin, part) in enumerate(begun):
            flight.start(begin, part.nbytes, partial(order.append, index))
    assert order == list(range(16)) and finished == [4 * KIB * index for index in range(16)]
    assert b"".join(raw(part) for _, part in begun) == path.read_bytes()
    assert not len(flight) and handle.stats.in_flight == 0


@pytest.mark.parametrize(
    ("most_bytes", "most_operations", "most"), [(16 * KIB, 99, 4), (1 << 30, 3, 3), (1, 99, 2)]
)
def test_no_more_are_in_flight_than_the_bounds(
    handle_held: nvmeio.AioHandle,
    engine_held: HeldEngine,
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    most_bytes: int,
    most_operations: int,
    most: int,
) -> None:
    """Two at least, whatever their size: one keeps the drive busy when the other ends."""
    monkeypatch.setattr(inflight, "MOST_OPERATIONS", most_operations)
    lengths: list[int] = []

    def work() -> None:
        with InFlight(most_bytes) as flight:
            for begin, part in reads(handle_held, path, 10):
                flight.start(begin, part.nbytes)
                lengths.append(len(flight))

    with thread(work):
        spin_until(lambda: len(lengths) == most)
        engine_held.gate.set()
    assert max(lengths) == most and len(lengths) == 10


def test_cancelled_from_another_thread(
    handle_held: nvmeio.AioHandle, engine_held: HeldEngine, path: Path
) -> None:
    flight = InFlight(8 * KIB)
    done: list[int] = []
    caught: list[BaseException] = []

    def work() -> None:
        try:
            with flight:
                for index, (begin, part) in enumerate(reads(handle_held, path, 10)):
                    flight.start(begin, part.nbytes, partial(done.append, index))
        except Cancelled as cancelled:
            caught.append(cancelled)

    with thread(work):
        engine_held.wait_until_begun()
        flight.cancel()
        engine_held.gate.set()
    assert caught and len(done) < 10 and handle_held.stats.in_flight == 0
    with pytest.raises(Cancelled):
        flight.start(lambda: pytest.fail("it was begun"), 1)


def test_a_failure_names_what_failed_and_ends_the_others(
    handle: nvmeio.AioHandle, path: Path
) -> None:
    done: list[int] = []
    begun = reads(handle, path, 20)  # the file has 16
    with (
        pytest.raises(ShortTransferError, match="read for part 16") as failed,
        InFlight() as flight,
    ):
        for index, (begin, part) in enumerate(begun):
            flight.start(
                begin,
                part.nbytes,
                partial(done.append, index),
                lambda _, n=index: f"read for part {n}",
            )
    assert failed.value.file_offset == 64 * KIB
    assert done == list(range(16)) and not len(flight) and handle.stats.in_flight == 0


def test_an_error_between_them_waits_for_what_is_in_flight(
    handle_held: nvmeio.AioHandle, engine_held: HeldEngine, path: Path
) -> None:
    begun, left = threading.Event(), threading.Event()

    def work() -> None:
        try:
            with InFlight() as flight:
                for begin, part in reads(handle_held, path, 4):
                    flight.start(begin, part.nbytes)
                engine_held.wait_until_begun()  # what has not begun would be dropped
                begun.set()
                raise ValueError
        except ValueError:
            left.set()

    with thread(work):
        assert begun.wait(100)
        assert not left.is_set()
        engine_held.gate.set()
    assert left.is_set() and handle_held.stats.in_flight == 0


def test_one_flight_may_be_used_again(handle: nvmeio.AioHandle, path: Path) -> None:
    flight = InFlight()
    for _ in range(2):
        with flight:
            for begin, part in reads(handle, path, 4):
                flight.start(begin, part.nbytes)
    assert not len(flight)


def test_a_staging_is_taken_again_when_its_operation_is_done(
    handle: nvmeio.AioHandle, path: Path
) -> None:
    stagings = Stagings(4 * KIB, 2, CPU)
    found = bytearray()
    used: set[int] = set()

    def take(chunk: torch.Tensor) -> None:
        found.extend(raw(chunk))
        stagings.give_back(chunk)

    with InFlight() as flight:
        for offset in range(0, 64 * KIB, 4 * KIB):
            chunk = stagings.take(flight)
            used.add(chunk.data_ptr())
            begin = partial(handle.async_pread, chunk, str(path), offset)
            flight.start(begin, chunk.nbytes, partial(take, chunk))
    assert bytes(found) == path.read_bytes() and len(used) == 2


def test_writes_arrive(handle: nvmeio.AioHandle, tmp_path: Path) -> None:
    data = random_bytes(100 * KIB, 3)
    target = tmp_path / "out"
    with InFlight(8 * KIB) as flight:
        for offset in range(0, len(data), 7 * KIB):
            part = bytes_tensor(data[offset : offset + 7 * KIB])
            flight.start(partial(handle.async_pwrite, part, str(target), offset), part.nbytes)
    assert target.read_bytes() == data


def test_cancellation_tells_those_who_come_late() -> None:
    stop = Cancellation()
    told: list[int] = []
    stop.then(lambda: told.append(1))
    stop.check()
    stop.cancel()
    stop.then(lambda: told.append(2))
    assert told == [1, 2]
    with pytest.raises(Cancelled):
        stop.check()

"""All operations of a handle: `wait` and `drain`."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from contract.operating import CONTENT, SIZE, WAIT_S, Make, builtin_of, rounds, target, threads_in
from support import HeldEngine, on_every_loop, raw, spin_until, thread

import nvmeio
from nvmeio._core.records import LiveRecords, Record, State
from nvmeio.engines.base import Opcode


def test_wait_counts_what_finished_since_the_last_wait(
    handle: nvmeio.AioHandle, file: Path
) -> None:
    assert handle.wait() == 0
    for _ in range(7):
        handle.async_pread(target(500), file)
    assert handle.wait() == 7
    assert handle.wait() == 0
    assert handle.sync_pread(target(500), file) == 500
    assert handle.wait() == 1


def test_wait_gives_up_in_time(
    handle_held: nvmeio.AioHandle, engine_held: HeldEngine, file: Path
) -> None:
    handle_held.async_pread(target(), file)
    for timeout in (0, 0.03):
        with pytest.raises(concurrent.futures.TimeoutError, match="1 operation still"):
            handle_held.wait(timeout)
    engine_held.gate.set()
    assert handle_held.wait(WAIT_S) == 1


def test_wait_raises_the_first_failure_and_attaches_the_others(
    handle: nvmeio.AioHandle, file: Path, tmp_path: Path
) -> None:
    (tmp_path / "short").write_bytes(b"short")
    tensor = target()
    handle.async_pread(target(), tmp_path / "missing-1")
    handle.async_pread(tensor, file)
    handle.async_pread(target(), tmp_path / "missing-2")
    handle.async_pwrite(target(), tmp_path)
    with pytest.raises(FileNotFoundError) as caught:
        handle.wait(WAIT_S)
    failure = caught.value
    assert isinstance(failure, nvmeio.TransferError)
    assert failure.path.endswith("missing-1")
    others: Any = failure.others
    assert [(builtin_of(e), e.path.rpartition("/")[2]) for e in others] == [
        (FileNotFoundError, "missing-2"),
        (IsADirectoryError, tmp_path.name),
    ]
    assert raw(tensor) == CONTENT  # nothing is in flight when wait raises
    assert handle.stats.in_flight == 0
    assert handle.wait() == 0  # each failure is raised once


def test_wait_does_not_raise_what_somebody_has_seen(
    handle: nvmeio.AioHandle, tmp_path: Path
) -> None:
    seen = [handle.async_pread(target(), tmp_path / "missing") for _ in range(2)]
    assert isinstance(seen[0].exception(WAIT_S), FileNotFoundError)
    with pytest.raises(FileNotFoundError):
        seen[1].result(WAIT_S)
    assert handle.wait() == 2


def test_a_failure_of_another_kind_keeps_the_others_too(new_handle: Make, path: Path) -> None:
    """`others` was set on nvmeio's own errors only: torch's swallowed those behind it."""
    handle = new_handle("threads")
    path.write_bytes(bytes(100))
    ended = threading.Event()
    handle.async_pread(torch.zeros(1).expand(8), path).add_done_callback(lambda _: ended.set())
    assert ended.wait(WAIT_S)
    handle.async_pread(target(), f"{path}.missing")
    with pytest.raises(RuntimeError, match="more than one element") as caught:
        handle.wait(WAIT_S)
    assert [builtin_of(e) for e in caught.value.others] == [  # type: ignore[attr-defined]
        FileNotFoundError
    ]


@on_every_loop
async def test_drain_is_wait_awaited(
    handle_held: nvmeio.AioHandle, engine_held: HeldEngine, file: Path
) -> None:
    assert await handle_held.drain() == 0
    tensors = [target() for _ in range(3)]
    for tensor in tensors:
        handle_held.async_pread(tensor, file)
    draining = asyncio.create_task(handle_held.drain())
    await rounds()
    assert not draining.done()
    engine_held.gate.set()
    assert await draining == 3
    assert [raw(tensor) for tensor in tensors] == [CONTENT] * 3
    handle_held.async_pread(target(), f"{file}.missing")
    with pytest.raises(FileNotFoundError):
        await handle_held.drain()
    assert await handle_held.drain() == 0


@on_every_loop
async def test_cancelling_a_drain_cancels_no_operation(
    handle_held: nvmeio.AioHandle, engine_held: HeldEngine, file: Path
) -> None:
    tensor = target()
    operation = handle_held.async_pread(tensor, file)
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(handle_held.drain(), 0.02)
    engine_held.gate.set()
    assert await operation == SIZE
    assert raw(tensor) == CONTENT


def test_wait_waits_for_what_other_threads_started(
    handle_held: nvmeio.AioHandle, engine_held: HeldEngine, file: Path
) -> None:
    with thread(handle_held.async_pread, target(), file) as operations:
        spin_until(lambda: bool(operations))
    with thread(handle_held.wait, WAIT_S) as values:
        spin_until(lambda: threads_in("wait_all") == 1)
        assert not values
        engine_held.gate.set()
    assert values == [1]


def test_an_end_that_was_interrupted_is_counted_by_whoever_finds_it() -> None:
    """It was taken out and not counted: `wait` said one operation too few."""
    live = LiveRecords()
    record = Record(next(live.tokens), Opcode.READ, None, "file", 0, 1)
    live.add(record)
    record.state = State.FINISHED  # and Ctrl-C, before `end` has taken it out
    assert live.any() is None
    assert live.take() == (1, [])

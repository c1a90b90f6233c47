"""An operation without a loop: its result, its end, and callbacks."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
import time
from pathlib import Path

import pytest
import torch
from contract.operating import CONTENT, SIZE, WAIT_S, Make, target
from support import HeldEngine, on_every_loop, raw, spin_until, until

import nvmeio

# The future's face, without a loop


def test_result_blocks_for_the_end(
    handle_held: nvmeio.AioHandle, engine_held: HeldEngine, file: Path
) -> None:
    operation = handle_held.async_pread(target(), file)
    assert not operation.done()
    assert not operation.cancelled()
    for ask in (operation.result, operation.exception):
        before = time.monotonic()
        with pytest.raises(concurrent.futures.TimeoutError):
            ask(0.03)
        assert time.monotonic() - before >= 0.03
        with pytest.raises(concurrent.futures.TimeoutError):
            ask(0)
    threading.Timer(0.05, engine_held.gate.set).start()
    assert operation.result() == SIZE
    assert operation.result(0) == SIZE
    assert operation.exception() is None
    assert operation.done()


def test_result_raises_what_failed(handle: nvmeio.AioHandle, tmp_path: Path) -> None:
    operation = handle.async_pread(target(), tmp_path / "missing")
    with pytest.raises(FileNotFoundError) as caught:
        operation.result(WAIT_S)
    assert operation.exception() is caught.value
    assert operation.done()


def test_each_of_many_that_end_together_ends_as_it_would_alone(
    handle_held: nvmeio.AioHandle, engine_held: HeldEngine, file: Path
) -> None:
    """What went well is finished at once for all of a wake-up; the others one by one."""
    whole = [target(4096) for _ in range(8)]
    strided = torch.zeros(4096, 2, dtype=torch.uint8)[:, 0]
    before = [tensor._version for tensor in whole]
    seen: list[int] = []

    async def main() -> list[int | BaseException]:
        reads = [handle_held.async_pread(tensor, file) for tensor in whole[:4]]
        reads.append(handle_held.async_pread(target(4096), file, SIZE))
        reads.append(handle_held.async_pread(strided, file))
        reads += [handle_held.async_pread(tensor, file) for tensor in whole[4:]]
        # Called while others that have ended are not concluded yet, it waits for one of them.
        reads[0].add_done_callback(lambda _: seen.append(reads[5].result(WAIT_S)))
        engine_held.gate.set()
        spin_until(lambda: engine_held.counters().in_flight == 0)
        return await asyncio.gather(*reads, return_exceptions=True)

    results = asyncio.run(main())
    assert isinstance(results.pop(4), nvmeio.ShortTransferError)
    assert results == [4096] * 9
    assert seen == [4096]
    assert all(raw(tensor) == CONTENT[:4096] for tensor in (*whole, strided.clone()))
    assert all(tensor._version > old for tensor, old in zip(whole, before, strict=True))
    assert handle_held.stats.in_flight == 0


def test_done_can_be_polled_without_a_loop(handle: nvmeio.AioHandle, file: Path) -> None:
    operation = handle.async_pread(target(), file)
    spin_until(operation.done)
    assert operation.result(0) == SIZE


def test_many_threads_may_wait_for_one_operation(
    handle_held: nvmeio.AioHandle, engine_held: HeldEngine, file: Path
) -> None:
    operation = handle_held.async_pread(target(), file)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(operation.result, WAIT_S) for _ in range(8)]
        engine_held.gate.set()
        assert [each.result(WAIT_S) for each in waiting] == [SIZE] * 8


def test_cancel_without_a_loop(
    handle_held: nvmeio.AioHandle, engine_held: HeldEngine, file: Path
) -> None:
    operation = handle_held.async_pread(target(), file)
    engine_held.wait_until_begun()
    assert operation.cancel()
    assert not operation.done()
    engine_held.gate.set()
    with pytest.raises(concurrent.futures.CancelledError):
        operation.result(WAIT_S)
    assert operation.cancelled()
    assert handle_held.wait() == 1  # a cancelled operation is no failure


# Callbacks


def test_callbacks_without_a_loop(handle: nvmeio.AioHandle, file: Path) -> None:
    told: list[tuple[nvmeio.Operation, str]] = []
    event = threading.Event()

    def callback(operation: nvmeio.Operation) -> None:
        told.append((operation, threading.current_thread().name))
        event.set()

    operation = handle.async_pread(target(), file)
    operation.add_done_callback(callback)
    assert event.wait(WAIT_S)  # though nobody waits for the operation itself
    assert [each for each, _ in told] == [operation]
    assert operation.result(0) == SIZE


@on_every_loop
async def test_callbacks_run_in_the_loops_thread(handle: nvmeio.AioHandle, file: Path) -> None:
    told: list[str] = []
    operation = handle.async_pread(target(), file)
    operation.add_done_callback(lambda _: told.append(threading.current_thread().name))
    await until(lambda: bool(told))
    assert told == [threading.current_thread().name]
    assert await operation == SIZE


def test_a_callback_added_after_the_end_runs_at_once(handle: nvmeio.AioHandle, file: Path) -> None:
    operation = handle.async_pread(target(), file)
    operation.result(WAIT_S)
    told: list[nvmeio.Operation] = []
    operation.add_done_callback(told.append)
    assert told == [operation]


def test_callbacks_run_in_their_order_and_for_every_end(
    handle_held: nvmeio.AioHandle, engine_held: HeldEngine, file: Path
) -> None:
    told: list[tuple[str, bool]] = []
    operation = handle_held.async_pread(target(), file)
    for name in "abc":
        operation.add_done_callback(lambda o, name=name: told.append((name, o.cancelled())))
    operation.cancel()
    engine_held.gate.set()
    spin_until(lambda: len(told) == 3)
    assert told == [("a", True), ("b", True), ("c", True)]


def test_a_callback_that_raises_is_logged_and_harms_nobody(
    handle_held: nvmeio.AioHandle,
    engine_held: HeldEngine,
    file: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    told = threading.Event()

    def fail(operation: nvmeio.Operation) -> None:
        raise LookupError("in a callback")

    operation = handle_held.async_pread(target(), file)
    operation.add_done_callback(fail)
    operation.add_done_callback(lambda _: told.set())
    with caplog.at_level(logging.ERROR, "nvmeio"):
        engine_held.gate.set()
        assert operation.result(WAIT_S) == SIZE
        assert told.wait(WAIT_S)
        operation.add_done_callback(fail)  # at once, and no exception comes out
    assert [r.exc_info[0] for r in caplog.records if r.exc_info] == [LookupError] * 2


def test_a_callback_may_start_the_next_operation(handle: nvmeio.AioHandle, file: Path) -> None:
    """A pipeline without a loop: read after read, each begun by the end of the one before."""
    tensors = [target(1000) for _ in range(20)]
    finished = threading.Event()

    def go_on(n: int) -> None:
        if n == len(tensors):
            finished.set()
            return
        operation = handle.async_pread(tensors[n], file, 1000 * n)
        operation.add_done_callback(lambda _: go_on(n + 1))

    go_on(0)
    assert finished.wait(WAIT_S)
    assert b"".join(map(raw, tensors)) == CONTENT[:20_000]
    assert handle.wait() == 20


def test_a_callback_may_close_the_handle(new_handle: Make, file: Path) -> None:
    handle = new_handle("threads")
    closed = threading.Event()

    def close(_: nvmeio.Operation) -> None:
        handle.close()
        closed.set()

    handle.async_pread(target(), file).add_done_callback(close)
    assert closed.wait(WAIT_S)
    assert handle.closed

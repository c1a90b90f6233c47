"""Operations as `concurrent.futures` and as futures of a loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
from pathlib import Path
from typing import Any

import pytest
import torch
from contract.operating import SIZE, WAIT_S, Make, target
from support import HeldEngine, on_every_loop, until

import nvmeio


def test_futures_wait_and_as_completed(handle: nvmeio.AioHandle, file: Path) -> None:
    futures = [nvmeio.as_future(handle.async_pread(target(n), file)) for n in (1, 100, SIZE)]
    done, pending = concurrent.futures.wait(futures, timeout=WAIT_S)
    assert (done, pending) == (set(futures), set())
    assert [future.result() for future in futures] == [1, 100, SIZE]
    futures = [nvmeio.as_future(handle.async_pread(target(n), file)) for n in (5, 6, 7)]
    completed = concurrent.futures.as_completed(futures, timeout=WAIT_S)
    assert sorted(future.result() for future in completed) == [5, 6, 7]


def test_a_future_of_a_failure(handle: nvmeio.AioHandle, tmp_path: Path) -> None:
    future = nvmeio.as_future(handle.async_pread(target(), tmp_path / "missing"))
    assert isinstance(future.exception(WAIT_S), FileNotFoundError)
    assert handle.wait() == 1  # the failure went to the future


def test_cancelling_a_future_cancels_the_operation(
    handle_held: nvmeio.AioHandle, engine_held: HeldEngine, file: Path
) -> None:
    operation = handle_held.async_pread(target(), file)
    future = nvmeio.as_future(operation)
    engine_held.wait_until_begun()
    assert future.cancel()
    assert not future.done()  # not before the kernel lets go
    engine_held.gate.set()
    with pytest.raises(concurrent.futures.CancelledError):
        future.result(WAIT_S)
    assert future.cancelled()
    assert operation.cancelled()
    done, _ = concurrent.futures.wait([future], timeout=WAIT_S)
    assert done == {future}


def test_an_operation_in_place_of_a_future_is_refused(handle: nvmeio.AioHandle, file: Path) -> None:
    """The error was an AttributeError, `_condition`."""
    operation: Any = handle.async_pread(target(), file)
    with pytest.raises(TypeError, match=r"nvmeio\.as_future\(operation\)"):
        concurrent.futures.wait([operation])
    with pytest.raises(TypeError, match=r"nvmeio\.as_future\(operation\)"):
        list(concurrent.futures.as_completed([operation]))
    assert operation.result() == SIZE


def test_as_future_takes_operations_only(handle: nvmeio.AioHandle) -> None:
    with pytest.raises(TypeError, match="expected an nvmeio operation, not int"):
        nvmeio.as_future(3)  # type: ignore[arg-type]


@on_every_loop
async def test_a_future_may_be_waited_for_in_the_loops_own_thread(
    handle: nvmeio.AioHandle, file: Path
) -> None:
    """It blocks the loop that would have told it: that was a deadlock."""
    future = nvmeio.as_future(handle.async_pread(target(), file))
    assert future.result(100) == SIZE


@on_every_loop
async def test_wrap_future(handle: nvmeio.AioHandle, file: Path) -> None:
    future = nvmeio.as_future(handle.async_pread(target(), file))
    assert await asyncio.wrap_future(future) == SIZE
    missing = nvmeio.as_future(handle.async_pread(target(), f"{file}.missing"))
    with pytest.raises(FileNotFoundError):
        await asyncio.wrap_future(missing)


@on_every_loop
async def test_cancelling_a_wrapped_future(
    handle_held: nvmeio.AioHandle, engine_held: HeldEngine, file: Path
) -> None:
    operation = handle_held.async_pread(target(), file)
    wrapped = asyncio.wrap_future(nvmeio.as_future(operation))
    await until(lambda: engine_held.begun > 0)
    wrapped.cancel()
    with pytest.raises(asyncio.CancelledError):
        await wrapped
    await asyncio.sleep(0)  # the loop tells the wrapped one in its next round
    engine_held.gate.set()
    await until(operation.done)
    assert operation.cancelled()


def test_many_futures_from_many_threads_are_all_told(make_handle: Make, file: Path) -> None:
    """Threads without a loop and the dispatcher reap one completion queue at the same time.

    They shared a buffer for what they reaped, and now and then one of them a completion too few.
    """
    handle = make_handle(block_size=4096, queue_depth=64)
    nothing = torch.empty(0)

    def read_many(opened: nvmeio.File) -> int:
        futures = [nvmeio.as_future(handle.async_pread(nothing, opened)) for _ in range(1000)]
        return len(concurrent.futures.wait(futures, timeout=400).done)

    with nvmeio.open(file) as opened, concurrent.futures.ThreadPoolExecutor(6) as pool:
        counts = [pool.submit(read_many, opened) for _ in range(6)]
        assert [count.result(500) for count in counts] == [1000] * 6

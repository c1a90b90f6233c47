"""Cancelling: with the engine held, what is in the kernel stays there until the gate opens."""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from pathlib import Path

import pytest
from contract.operating import (
    CONTENT,
    SIZE,
    WAIT_S,
    Make,
    needs_3_11,
    open_once_cancelled,
    rounds,
    target,
    untouched,
)
from support import HeldEngine, on_every_loop, raw, spin_until, until

import nvmeio


@on_every_loop
async def test_cancelling_a_task_waits_for_the_kernel(
    handle_held: nvmeio.AioHandle, engine_held: HeldEngine, file: Path
) -> None:
    tensor = target()
    operation = handle_held.async_pread(tensor, file)
    task = asyncio.create_task(operation)
    await rounds()
    await until(lambda: engine_held.begun > 0)
    task.cancel()
    await rounds()
    assert not task.done()  # some blocks are in the kernel: the buffer is not the caller's yet
    assert not operation.done()
    engine_held.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert operation.done()
    assert operation.cancelled()
    tensor.fill_(0xA5)
    assert handle_held.stats.cancelled == 1
    # Behind whatever there was left to do.
    assert await handle_held.async_pread(target(), file) == SIZE
    assert untouched(tensor)
    assert await handle_held.async_pread(tensor, file) == SIZE


@on_every_loop
async def test_a_task_cancelled_before_it_ran_waits_for_the_kernel_too(
    handle_held: nvmeio.AioHandle, engine_held: HeldEngine, file: Path
) -> None:
    """The transfer runs though the task has not begun: a sibling in a TaskGroup that fails at once.

    The error was thrown into a generator that had not started, and came straight back.
    """
    tensor = target()
    operation = handle_held.async_pread(tensor, file)
    spin_until(lambda: engine_held.begun > 0)
    task = asyncio.create_task(operation)
    task.cancel()
    await rounds()
    try:
        assert not task.done()
    finally:
        engine_held.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert operation.cancelled()


@on_every_loop
async def test_a_time_out_of_nothing_waits_for_the_kernel_too(
    handle_held: nvmeio.AioHandle, engine_held: HeldEngine, file: Path
) -> None:
    operation = handle_held.async_pread(target(), file)
    spin_until(lambda: engine_held.begun > 0)
    opening = asyncio.create_task(open_once_cancelled(engine_held, operation))
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(operation, 0)
    assert engine_held.gate.is_set()
    assert operation.done()
    await opening


@on_every_loop
async def test_blocks_that_the_kernel_has_not_taken_are_dropped(
    engine_held: HeldEngine, new_handle: Make, file: Path
) -> None:
    handle = new_handle(engine_held, block_size=4096, queue_depth=2)
    tensor = target()
    operation = handle.async_pread(tensor, file)
    await until(lambda: engine_held.begun == 2)
    assert operation.cancel()
    engine_held.gate.set()
    await until(operation.done)
    assert operation.cancelled()
    assert engine_held.system_calls == 2
    assert operation.transferred == 2 * 4096
    assert untouched(tensor[2 * 4096 :])


@on_every_loop
async def test_cancelling_again_does_not_cut_the_wait_short(
    handle_held: nvmeio.AioHandle, engine_held: HeldEngine, file: Path
) -> None:
    operation = handle_held.async_pread(target(), file)
    task = asyncio.create_task(operation)
    await rounds()
    await until(lambda: engine_held.begun > 0)
    for _ in range(5):
        task.cancel()
        await rounds()
    assert not task.done()
    engine_held.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert operation.cancelled()


@on_every_loop
async def test_a_time_out_leaves_the_buffer_alone_afterwards(
    handle_held: nvmeio.AioHandle, engine_held: HeldEngine, file: Path
) -> None:
    tensor = target()
    operation = handle_held.async_pread(tensor, file)
    await until(lambda: engine_held.begun > 0)
    opening = asyncio.create_task(open_once_cancelled(engine_held, operation))
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(operation, 0.02)
    assert engine_held.gate.is_set()  # wait_for came back when the kernel was done, not before
    await opening
    tensor.fill_(0xA5)
    assert await handle_held.drain() == 1
    assert untouched(tensor)


@needs_3_11
@on_every_loop
async def test_asyncio_timeout(
    handle_held: nvmeio.AioHandle, engine_held: HeldEngine, file: Path
) -> None:
    operation = handle_held.async_pread(target(), file)
    await until(lambda: engine_held.begun > 0)
    opening = asyncio.create_task(open_once_cancelled(engine_held, operation))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await operation
    assert engine_held.gate.is_set()
    assert operation.cancelled()
    await opening
    async with asyncio.timeout(WAIT_S):
        assert await handle_held.async_pread(target(), file) == SIZE


@needs_3_11
@on_every_loop
async def test_a_task_group_that_fails_cancels_what_is_in_flight(
    handle_held: nvmeio.AioHandle, engine_held: HeldEngine, file: Path
) -> None:
    operation = handle_held.async_pread(target(), file)
    opening = asyncio.create_task(open_once_cancelled(engine_held, operation))

    async def fail() -> None:
        await until(lambda: engine_held.begun > 0)
        raise LookupError("beside it")

    with pytest.raises(BaseExceptionGroup) as caught:  # noqa: F821
        async with asyncio.TaskGroup() as group:
            task = group.create_task(operation)
            group.create_task(fail())
    assert [type(e) for e in caught.value.exceptions] == [LookupError]
    assert engine_held.gate.is_set()
    assert task.cancelled()
    assert operation.cancelled()
    assert await handle_held.drain() == 1
    await opening


@on_every_loop
async def test_cancelling_the_operation_ends_every_await_of_it(
    handle_held: nvmeio.AioHandle, engine_held: HeldEngine, file: Path
) -> None:
    operation = handle_held.async_pread(target(), file)
    tasks = [asyncio.create_task(operation) for _ in range(2)]
    await until(lambda: engine_held.begun > 0)
    assert operation.cancel()
    assert operation.cancel()  # still on its way
    engine_held.gate.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in results] == [asyncio.CancelledError] * 2
    assert not operation.cancel()  # nothing is left to cancel
    with pytest.raises(asyncio.CancelledError):
        await operation
    with pytest.raises(concurrent.futures.CancelledError):
        operation.result()
    with pytest.raises(concurrent.futures.CancelledError):
        operation.exception()


@on_every_loop
async def test_a_shield_keeps_it_from_being_cancelled(
    handle_held: nvmeio.AioHandle, engine_held: HeldEngine, file: Path
) -> None:
    tensor = target()
    operation = handle_held.async_pread(tensor, file)
    inner = asyncio.ensure_future(operation)
    outer = asyncio.ensure_future(asyncio.shield(inner))
    await until(lambda: engine_held.begun > 0)
    outer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await outer
    assert not operation.done()
    engine_held.gate.set()
    assert await inner == SIZE
    assert raw(tensor) == CONTENT


@on_every_loop
async def test_an_awaiting_task_that_is_cancelled_after_the_end_counts_as_cancelled(
    handle_held: nvmeio.AioHandle, engine_held: HeldEngine, file: Path
) -> None:
    """The transfer may have finished after all; the task was cancelled all the same."""
    operation = handle_held.async_pread(target(4096), file)

    async def wait_for_it() -> int:
        return await operation

    task = asyncio.create_task(wait_for_it())
    await rounds()
    await until(lambda: engine_held.begun == 1)
    task.cancel()
    engine_held.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert operation.done()
    assert not operation.cancelled()  # its only block was in the kernel, and arrived
    assert await operation == 4096


@on_every_loop
async def test_a_write_that_is_cancelled_in_a_short_transfer_is_cancelled(
    new_handle: Make, path: Path
) -> None:
    """A block that came back short was an EIO, though nothing but the cancellation stopped it."""
    engine = HeldEngine(short=0.5)
    handle = new_handle(engine, block_size=16384, queue_depth=1)
    operation = handle.async_pwrite(target(), path)
    try:
        await until(lambda: engine.begun == 1)
        operation.cancel()
    finally:
        engine.gate.set()
    await until(operation.done)
    assert operation.cancelled()
    assert await handle.drain() == 1


@on_every_loop
async def test_cancelling_what_has_ended_changes_nothing(
    handle: nvmeio.AioHandle, file: Path
) -> None:
    operation = handle.async_pread(target(), file)
    assert await operation == SIZE
    assert not operation.cancel()
    assert not operation.cancelled()
    failed = handle.async_pread(target(), f"{file}.missing")
    assert not failed.cancel()
    assert not failed.cancelled()
    with pytest.raises(FileNotFoundError):
        await failed


@pytest.mark.parametrize("writing", [False, True])
def test_cancelling_large_transfers_on_any_engine(
    make_handle: Make, path: Path, writing: bool
) -> None:
    """Finished or cancelled, nothing third; after the end nobody touches the memory."""
    handle = make_handle(block_size=4096, queue_depth=4)
    path.write_bytes(bytes(4 << 20))
    ends: set[str] = set()
    patience = time.monotonic() + WAIT_S
    n = -1
    while n < 19 or ("cancelled" not in ends and time.monotonic() < patience):
        n += 1
        tensor = target(4 << 20)
        start = handle.async_pwrite if writing else handle.async_pread
        operation = start(tensor, path)
        if n % 2:
            time.sleep(0.0005 * (n % 5))  # waits for nothing: cancelled at another moment
        operation.cancel()
        try:
            assert operation.result(WAIT_S) == tensor.nbytes
            ends.add("finished")
        except concurrent.futures.CancelledError:
            ends.add("cancelled")
        tensor.fill_(0x5A)
        assert (tensor == 0x5A).all()
    assert "cancelled" in ends
    assert handle.wait() == n + 1
    assert (handle.stats.errors, handle.stats.in_flight) == (0, 0)
    path.write_bytes(CONTENT)
    tensor = target()
    assert handle.sync_pread(tensor, path) == SIZE
    assert raw(tensor) == CONTENT

"""What an operation promises: to tasks and threads; cancelled, dropped or left behind."""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import gc
import logging
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import (
    LOOPS,
    PATIENCE_S,
    HeldEngine,
    bytes_tensor,
    new_loop,
    nvmeio_threads,
    on_every_loop,
    open_descriptors,
    random_bytes,
    raw,
    run_on,
    run_python,
    spin_until,
    thread,
    until,
)

import nvmeio
from nvmeio.testing import FakeEngine

pytestmark = pytest.mark.timeout(40)

Make = Callable[..., nvmeio.AioHandle]
SIZE = 100_000
CONTENT = random_bytes(SIZE, seed=5)
WAIT_S = PATIENCE_S

needs_3_11 = pytest.mark.skipif(sys.version_info < (3, 11), reason="came with Python 3.11")


@pytest.fixture
def file(path: Path) -> Path:
    """A file of `CONTENT`."""
    path.write_bytes(CONTENT)
    return path


def target(nbytes: int = SIZE) -> torch.Tensor:
    """Aligned, so that an engine writes straight into it; filled with a pattern."""
    return nvmeio.empty_aligned(nbytes, dtype=torch.uint8).fill_(0xA5)


def untouched(tensor: torch.Tensor) -> bool:
    return bool((tensor == 0xA5).all())


def builtin_of(error: BaseException) -> type:
    """The built-in class that an error of ours is too."""
    return next(base for base in type(error).__mro__ if base.__module__ == "builtins")


def aio_contexts() -> int:
    """AIO contexts of this process: the kernel maps a ring for each."""
    return Path("/proc/self/maps").read_text().count("/[aio]")


# Awaiting, on each engine and each loop


@on_every_loop
async def test_await_gives_the_number_of_bytes(handle: nvmeio.AioHandle, file: Path) -> None:
    tensor = target()
    operation = handle.async_pread(tensor, file)
    assert await operation == SIZE
    assert raw(tensor) == CONTENT
    assert operation.done()
    assert not operation.cancelled()
    assert operation.exception() is None
    assert await handle.async_pwrite(tensor[:500], file, 77) == 500
    assert file.read_bytes() == CONTENT[:77] + CONTENT[:500] + CONTENT[577:]


@on_every_loop
async def test_it_starts_when_called_not_when_awaited(handle: nvmeio.AioHandle, file: Path) -> None:
    tensor = target()
    operation = handle.async_pread(tensor, file)
    await until(operation.done)
    assert raw(tensor) == CONTENT
    assert await operation == SIZE


@on_every_loop
async def test_tasks_gather_wait_and_as_completed(handle: nvmeio.AioHandle, file: Path) -> None:
    def read(nbytes: int) -> nvmeio.Operation:
        return handle.async_pread(target(nbytes), file)

    assert await asyncio.create_task(read(10)) == 10
    assert await asyncio.ensure_future(read(20)) == 20
    assert await asyncio.wait_for(read(30), WAIT_S) == 30
    assert await asyncio.shield(read(40)) == 40
    assert await asyncio.gather(read(50), read(60), asyncio.create_task(read(70))) == [50, 60, 70]
    tasks = [asyncio.create_task(read(n)) for n in (80, 90)]
    done, pending = await asyncio.wait(tasks, timeout=WAIT_S)
    assert ({task.result() for task in done}, pending) == ({80, 90}, set())
    sizes = [await each for each in asyncio.as_completed([read(1), read(2), read(3)])]
    assert sorted(sizes) == [1, 2, 3]


@on_every_loop
async def test_awaiting_it_again_gives_the_same(handle: nvmeio.AioHandle, file: Path) -> None:
    operation = handle.async_pread(target(), file)
    assert [await operation, await operation, await operation] == [SIZE] * 3
    missing = handle.async_pread(target(), f"{file}.missing")
    for _ in range(3):
        with pytest.raises(FileNotFoundError):
            await missing


@on_every_loop
async def test_it_may_be_awaited_in_many_tasks(handle: nvmeio.AioHandle, file: Path) -> None:
    operation = handle.async_pread(target(), file)

    async def wait_for_it() -> int:
        return await operation

    tasks = [asyncio.create_task(wait_for_it()) for _ in range(5)]
    assert await asyncio.gather(*tasks) == [SIZE] * 5


@on_every_loop
async def test_several_tasks_may_be_made_of_it(handle: nvmeio.AioHandle, file: Path) -> None:
    """A task of an operation drives it as a coroutine; a second one must not disturb the first."""
    operation = handle.async_pread(target(), file)
    tasks = [asyncio.create_task(operation) for _ in range(3)]
    assert await asyncio.gather(*tasks) == [SIZE] * 3
    # Done already:
    assert await asyncio.create_task(operation) == SIZE
    assert await asyncio.gather(operation) == [SIZE]


@on_every_loop
async def test_it_may_be_shielded_again_and_again(
    handle_held: nvmeio.AioHandle, engine_held: HeldEngine, file: Path
) -> None:
    """The usual way to look up now and then from a long wait."""
    operation = handle_held.async_pread(target(), file)
    for _ in range(3):
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(operation), 0.01)
    engine_held.gate.set()
    assert await asyncio.wait_for(asyncio.shield(operation), WAIT_S) == SIZE


@on_every_loop
async def test_a_failure_is_raised_where_it_is_awaited(
    handle: nvmeio.AioHandle, tmp_path: Path
) -> None:
    operation = handle.async_pread(target(), tmp_path / "missing")
    with pytest.raises(FileNotFoundError) as caught:
        await operation
    assert caught.value is operation.exception()
    results = await asyncio.gather(
        handle.async_pread(target(), tmp_path / "missing"), return_exceptions=True
    )
    assert type(results[0]).__name__ == "TransferError"
    assert await handle.drain() == 2  # both were seen: nothing is left to raise


def test_a_loop_runs_it_as_its_main_coroutine(
    handle: nvmeio.AioHandle, file: Path, loop_kind: str
) -> None:
    async def start() -> nvmeio.Operation:
        return handle.async_pread(target(), file)

    loop = new_loop(loop_kind)
    try:
        operation = loop.run_until_complete(start())
        assert loop.run_until_complete(operation) == SIZE
    finally:
        loop.close()


@needs_3_11
@on_every_loop
async def test_task_group(handle: nvmeio.AioHandle, file: Path) -> None:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(handle.async_pread(target(n), file)) for n in (1, 1000, SIZE)]
    assert [task.result() for task in tasks] == [1, 1000, SIZE]


@needs_3_11
@on_every_loop
async def test_a_task_group_raises_what_failed(handle: nvmeio.AioHandle, file: Path) -> None:
    with pytest.raises(BaseExceptionGroup) as caught:  # noqa: F821
        async with asyncio.TaskGroup() as group:
            group.create_task(handle.async_pread(target(), file))
            group.create_task(handle.async_pread(target(), f"{file}.missing"))
    assert [builtin_of(e) for e in caught.value.exceptions] == [FileNotFoundError]
    assert await handle.async_pread(target(), file) == SIZE


# Cancelling, with the engine held: what is in the kernel stays there until the gate opens


@on_every_loop
async def test_cancelling_a_task_waits_for_the_kernel(
    handle_held: nvmeio.AioHandle, engine_held: HeldEngine, file: Path
) -> None:
    tensor = target()
    operation = handle_held.async_pread(tensor, file)
    task = asyncio.create_task(operation)
    await asyncio.sleep(0.001)
    await until(lambda: engine_held.begun > 0)
    task.cancel()
    for _ in range(20):
        await asyncio.sleep(0.001)
    assert not task.done()  # some blocks are in the kernel: the buffer is not the caller's yet
    assert not operation.done()
    engine_held.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert operation.done()
    assert operation.cancelled()
    tensor.fill_(0xA5)
    await asyncio.sleep(0.02)
    assert untouched(tensor)
    assert handle_held.stats.cancelled == 1
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
    for _ in range(5):
        await asyncio.sleep(0.001)
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
    threading.Timer(0.05, engine_held.gate.set).start()
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(operation, 0)
    assert engine_held.gate.is_set()
    assert operation.done()


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
    await asyncio.sleep(0.001)
    await until(lambda: engine_held.begun > 0)
    for _ in range(5):
        task.cancel()
        await asyncio.sleep(0.001)
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
    threading.Timer(0.1, engine_held.gate.set).start()
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(handle_held.async_pread(tensor, file), 0.02)
    assert engine_held.gate.is_set()  # wait_for came back when the kernel was done, not before
    tensor.fill_(0xA5)
    assert await handle_held.drain() == 1
    assert untouched(tensor)


@needs_3_11
@on_every_loop
async def test_asyncio_timeout(
    handle_held: nvmeio.AioHandle, engine_held: HeldEngine, file: Path
) -> None:
    operation = handle_held.async_pread(target(), file)
    threading.Timer(0.1, engine_held.gate.set).start()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await operation
    assert operation.cancelled()
    async with asyncio.timeout(WAIT_S):
        assert await handle_held.async_pread(target(), file) == SIZE


@needs_3_11
@on_every_loop
async def test_a_task_group_that_fails_cancels_what_is_in_flight(
    handle_held: nvmeio.AioHandle, engine_held: HeldEngine, file: Path
) -> None:
    operation = handle_held.async_pread(target(), file)

    async def fail() -> None:
        await until(lambda: engine_held.begun > 0)
        threading.Timer(0.05, engine_held.gate.set).start()
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
    await asyncio.sleep(0.001)
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
    ends = set()
    for n in range(20):
        tensor = target(4 << 20)
        start = handle.async_pwrite if writing else handle.async_pread
        operation = start(tensor, path)
        if n % 2:
            time.sleep(0.0005 * (n % 5))
        operation.cancel()
        try:
            assert operation.result(WAIT_S) == tensor.nbytes
            ends.add("finished")
        except concurrent.futures.CancelledError:
            ends.add("cancelled")
        tensor.fill_(0x5A)
        assert (tensor == 0x5A).all()
    assert "cancelled" in ends
    assert handle.wait() == 20
    assert (handle.stats.errors, handle.stats.in_flight) == (0, 0)
    path.write_bytes(CONTENT)
    tensor = target()
    assert handle.sync_pread(tensor, path) == SIZE
    assert raw(tensor) == CONTENT


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
        assert 0.03 <= time.monotonic() - before < 5
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


# concurrent.futures


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


def test_as_future_takes_operations_only(handle: nvmeio.AioHandle) -> None:
    with pytest.raises(TypeError, match="expected an nvmeio operation, not int"):
        nvmeio.as_future(3)  # type: ignore[arg-type]


@on_every_loop
async def test_a_future_may_be_waited_for_in_the_loops_own_thread(
    handle: nvmeio.AioHandle, file: Path
) -> None:
    """It blocks the loop that would have told it: that was a deadlock."""
    future = nvmeio.as_future(handle.async_pread(target(), file))
    assert future.result(5) == SIZE


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
        futures = [nvmeio.as_future(handle.async_pread(nothing, opened)) for _ in range(2500)]
        return len(concurrent.futures.wait(futures, timeout=5).done)

    with nvmeio.open(file) as opened, concurrent.futures.ThreadPoolExecutor(6) as pool:
        counts = [pool.submit(read_many, opened) for _ in range(6)]
        assert [count.result(WAIT_S) for count in counts] == [2500] * 6


# Several loops and threads


def test_started_without_a_loop_and_awaited_in_one(
    handle: nvmeio.AioHandle, file: Path, loop_kind: str
) -> None:
    operations = [handle.async_pread(target(), file) for _ in range(10)]

    async def main() -> list[int]:
        return [await operation for operation in operations]

    assert run_on(loop_kind, main()) == [SIZE] * 10


def test_started_without_a_loop_awaited_while_in_flight(
    handle_held: nvmeio.AioHandle, engine_held: HeldEngine, file: Path, loop_kind: str
) -> None:
    operation = handle_held.async_pread(target(), file)

    async def main() -> list[int]:
        tasks = [asyncio.create_task(operation) for _ in range(3)]
        await asyncio.sleep(0.01)
        engine_held.gate.set()
        return await asyncio.gather(*tasks)

    assert run_on(loop_kind, main()) == [SIZE] * 3


def test_started_in_one_loop_and_awaited_in_another(
    handle_held: nvmeio.AioHandle, engine_held: HeldEngine, file: Path, loop_kind: str
) -> None:
    """Both loops run; each awaiting task is resumed in its own loop's thread."""
    started: list[nvmeio.Operation] = []
    resumed: list[str] = []

    async def owner() -> int:
        started.append(handle_held.async_pread(target(), file))
        value = await started[0]
        resumed.append(threading.current_thread().name)
        return value

    async def visitor() -> int:
        await until(lambda: bool(started))
        threading.Timer(0.02, engine_held.gate.set).start()
        value = await started[0]
        resumed.append(threading.current_thread().name)
        return value

    with thread(run_on, loop_kind, owner()) as values:
        assert run_on(loop_kind, visitor()) == SIZE
    assert values == [SIZE]
    assert sorted(resumed) == sorted(["beside", threading.current_thread().name])


def test_two_loops_in_two_threads_on_one_handle(
    handle: nvmeio.AioHandle, tmp_path: Path, loop_kind: str
) -> None:
    async def work(name: str) -> int:
        moved = 0
        for n in range(20):
            data = random_bytes(5000 + n, seed=n)
            moved += await handle.async_pwrite(bytes_tensor(data), tmp_path / name, n * 6000)
            back = target(len(data))
            moved += await handle.async_pread(back, tmp_path / name, n * 6000)
            assert raw(back) == data
        return moved

    with thread(run_on, loop_kind, work("beside")) as values:
        here = run_on(loop_kind, work("here"))
    assert values == [here]
    assert here == 2 * sum(5000 + n for n in range(20))


def test_sync_calls_beside_a_loop(handle: nvmeio.AioHandle, file: Path, loop_kind: str) -> None:
    async def work() -> int:
        count = 0
        for _ in range(50):
            count += await handle.async_pread(target(3000), file)
        return count

    with thread(run_on, loop_kind, work()) as values:
        assert sum(handle.sync_pread(target(3000), file) for _ in range(50)) == 150_000
        handle.wait(WAIT_S)
    assert values == [150_000]


@on_every_loop
async def test_sync_calls_in_a_loop(handle: nvmeio.AioHandle, file: Path) -> None:
    """They block the loop, as they say, but they do end."""
    operation = handle.async_pread(target(), file)
    assert handle.sync_pread(target(), file) == SIZE
    assert operation.result(WAIT_S) == SIZE
    assert handle.wait(WAIT_S) == 2
    assert await operation == SIZE


def test_a_result_may_be_fetched_in_another_thread_while_the_loop_is_busy(
    handle: nvmeio.AioHandle, file: Path, loop_kind: str
) -> None:
    async def main() -> int:
        operation = handle.async_pread(target(), file)
        with thread(operation.result, WAIT_S) as values:
            spin_until(lambda: bool(values))  # the loop sees nothing of all this
        return values[0] + await operation

    assert run_on(loop_kind, main()) == 2 * SIZE


def test_one_loop_after_another(handle: nvmeio.AioHandle, file: Path) -> None:
    async def read() -> int:
        return await handle.async_pread(target(), file)

    for kind in ("asyncio", "debug", "asyncio"):
        before = len(open_descriptors())
        assert [run_on(kind, read()) for _ in range(5)] == [SIZE] * 5
        assert len(open_descriptors()) <= before + 1  # the last loop's is still to be dropped


# Loops that end too early


def leave_behind(
    handle: nvmeio.AioHandle, file: Path, loop_kind: str = "asyncio"
) -> tuple[nvmeio.Operation, torch.Tensor]:
    """An operation whose loop was closed while it was in flight."""
    tensor = target()

    async def start() -> nvmeio.Operation:
        return handle.async_pread(tensor, file)

    loop = new_loop(loop_kind)
    operation = loop.run_until_complete(start())
    loop.close()
    return operation, tensor


def test_a_loop_closed_too_early_is_told_of_at_the_next_use(
    handle_held: nvmeio.AioHandle, engine_held: HeldEngine, file: Path, loop_kind: str
) -> None:
    operation, tensor = leave_behind(handle_held, file, loop_kind)

    async def look() -> int:
        with pytest.warns(ResourceWarning, match=r"loop was closed with 1 operations in flight"):
            other = handle_held.async_pread(target(), file)
        engine_held.gate.set()
        assert await other == SIZE
        return await operation

    assert run_on(loop_kind, look()) == SIZE
    assert raw(tensor) == CONTENT
    assert handle_held.wait() == 2


def test_what_a_closed_loop_left_behind_has_a_result(
    handle_held: nvmeio.AioHandle, engine_held: HeldEngine, file: Path, loop_kind: str
) -> None:
    operation, tensor = leave_behind(handle_held, file, loop_kind)
    assert not operation.done()
    engine_held.gate.set()
    assert operation.result(WAIT_S) == SIZE
    assert raw(tensor) == CONTENT


def test_what_a_closed_loop_left_behind_is_waited_for(
    handle_held: nvmeio.AioHandle, engine_held: HeldEngine, file: Path, loop_kind: str
) -> None:
    left = [leave_behind(handle_held, file, loop_kind)]
    with pytest.warns(ResourceWarning):
        left.append(leave_behind(handle_held, file, loop_kind))
    engine_held.gate.set()
    assert handle_held.wait(WAIT_S) == 2
    assert [raw(tensor) for _, tensor in left] == [CONTENT] * 2
    handle_held.close()


def test_a_future_of_what_a_closed_loop_left_behind_is_told(
    handle_held: nvmeio.AioHandle, engine_held: HeldEngine, file: Path, loop_kind: str
) -> None:
    """Its callback was the closed loop's to call: nobody did, and the future waited for ever."""
    tensor = target()

    async def start() -> concurrent.futures.Future[int]:
        return nvmeio.as_future(handle_held.async_pread(tensor, file))

    loop = new_loop(loop_kind)
    future = loop.run_until_complete(start())
    loop.close()
    engine_held.gate.set()
    assert future.result(5) == SIZE


def test_a_waiter_of_a_closed_loop_is_forgotten(
    handle_held: nvmeio.AioHandle, engine_held: HeldEngine, file: Path, loop_kind: str
) -> None:
    """Something awaited it there and never will be resumed; others are told."""
    operation = handle_held.async_pread(target(), file)
    loop = new_loop(loop_kind)

    async def wait_for_it() -> int:
        return await operation

    task = loop.create_task(wait_for_it())
    loop.run_until_complete(asyncio.sleep(0.01))
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    loop.close()
    engine_held.gate.set()
    assert operation.result(WAIT_S) == SIZE
    del task, loop
    gc.collect()


def test_a_handle_closed_outside_of_its_loop_leaves_no_descriptor(
    new_engine: Callable[[], Any], file: Path, loop_kind: str
) -> None:
    """`close` after the loop has stopped, and before it is closed."""

    async def read(handle: nvmeio.AioHandle) -> int:
        return await handle.async_pread(target(), file)

    before = open_descriptors()
    handle = nvmeio.AioHandle(16384, 8, engine=new_engine())
    loop = new_loop(loop_kind)
    assert loop.run_until_complete(read(handle)) == SIZE
    handle.close()
    loop.close()
    del handle, loop
    gc.collect()
    assert open_descriptors().items() <= before.items()


# All operations of a handle: wait, drain


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
        with pytest.raises(concurrent.futures.TimeoutError, match="1 operations are still"):
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
    handle.async_pread(torch.zeros(1).expand(8), path).add_done_callback(lambda _: None)
    spin_until(lambda: handle.stats.in_flight == 0)
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
    await asyncio.sleep(0.01)
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
        time.sleep(0.02)
        assert not values
        engine_held.gate.set()
    assert values == [1]


# fsync


@on_every_loop
async def test_fsync(handle: nvmeio.AioHandle, file: Path) -> None:
    await handle.fsync(file)
    await handle.fsync(str(file), data_only=True)
    with nvmeio.open(file) as opened, open(file, "rb") as descriptor:
        await handle.fsync(opened)
        await handle.fsync(descriptor.fileno())
    assert handle.stats.errors == 0


def test_sync_fsync(handle: nvmeio.AioHandle, file: Path) -> None:
    handle.sync_fsync(file)
    handle.sync_fsync(file, data_only=True)
    with pytest.raises(FileNotFoundError):
        handle.sync_fsync(f"{file}.missing")


@pytest.mark.parametrize("named", ["path", "other-path", "descriptor", "file"])
@on_every_loop
async def test_fsync_waits_for_the_writes_before_it(
    handle_held: nvmeio.AioHandle,
    engine_held: HeldEngine,
    file: Path,
    named: str,
) -> None:
    """Whatever the file was called: writes are found by device and inode."""
    link = file.with_name("link")
    link.symlink_to(file)
    with nvmeio.open(file, "r+") as opened, open(file, "rb") as descriptor:
        names: dict[str, Any] = {
            "path": file,
            "other-path": link,
            "descriptor": descriptor.fileno(),
            "file": opened,
        }
        writes = [handle_held.async_pwrite(target(), file, n * SIZE) for n in range(3)]
        syncing = asyncio.create_task(handle_held.fsync(names[named]))
        await asyncio.sleep(0.01)
        assert not syncing.done()
        engine_held.gate.set()
        await syncing
        assert all(write.done() for write in writes)


def test_sync_fsync_waits_for_the_writes_before_it(
    handle_held: nvmeio.AioHandle, engine_held: HeldEngine, file: Path
) -> None:
    write = handle_held.async_pwrite(target(), file)
    threading.Timer(0.05, engine_held.gate.set).start()
    handle_held.sync_fsync(file)
    assert engine_held.gate.is_set()
    assert write.done()


@on_every_loop
async def test_fsync_does_not_wait_for_other_files(
    handle_held: nvmeio.AioHandle, engine_held: HeldEngine, file: Path
) -> None:
    write = handle_held.async_pwrite(target(4096), f"{file}.other")  # held; workers are left
    await asyncio.wait_for(handle_held.fsync(file), WAIT_S)
    assert not write.done()
    engine_held.gate.set()
    assert await write == 4096


@on_every_loop
async def test_a_failed_write_is_not_fsyncs_to_report(new_handle: Make, file: Path) -> None:
    handle = new_handle(FakeEngine(fail=lambda kind, *_: errno.EIO if kind == "pwrite" else 0))
    write = handle.async_pwrite(target(), file)
    await handle.fsync(file)
    with pytest.raises(nvmeio.TransferError) as caught:
        await write
    assert caught.value.errno == errno.EIO


@on_every_loop
async def test_fsync_of_what_is_not_there(handle: nvmeio.AioHandle, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        await handle.fsync(tmp_path / "missing")
    assert isinstance(caught.value, nvmeio.TransferError)
    assert caught.value.operation == "open"
    with pytest.raises(nvmeio.TransferError) as closed:
        await handle.fsync(9999)
    assert closed.value.errno == errno.EBADF


# Closing


def test_close_finishes_what_is_in_flight(make_handle: Make, path: Path) -> None:
    handle = make_handle()
    data = random_bytes(1 << 20)
    operation = handle.async_pwrite(bytes_tensor(data), path)
    handle.close()
    assert operation.done()
    assert operation.result(0) == len(data)
    assert path.read_bytes() == data
    assert handle.closed


def test_close_is_idempotent(make_handle: Make, file: Path) -> None:
    handle = make_handle()
    handle.async_pread(target(), file)
    for _ in range(3):
        handle.close()
    run_on("asyncio", handle.aclose())


def test_a_closed_handle_refuses(make_handle: Make, file: Path) -> None:
    handle = make_handle()
    handle.close()
    tensor = target()
    for use in (
        lambda: handle.async_pread(tensor, file),
        lambda: handle.async_pwrite(tensor, file),
        lambda: handle.sync_pread(tensor, file),
        lambda: handle.sync_pwrite(tensor, file),
        lambda: handle.pread(tensor, file, async_op=True),
        lambda: handle.pwrite(tensor, file),
        lambda: handle.sync_fsync(file),
        lambda: run_on("asyncio", handle.fsync(file)),
    ):
        with pytest.raises(nvmeio.ClosedError, match="the handle is closed"):
            use()
    assert file.read_bytes() == CONTENT
    assert untouched(tensor)
    assert handle.wait() == 0
    assert run_on("asyncio", handle.drain()) == 0


@on_every_loop
async def test_a_loop_that_comes_while_another_thread_closes_opens_no_port(
    make_handle: Make, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would close it: `nothing_leaks` looks at the descriptors."""
    handle = make_handle()
    queues = handle._cores.host._completions
    of = queues.of

    def late(loop: asyncio.AbstractEventLoop) -> Any:
        closing = threading.Thread(target=handle.close)
        closing.start()
        closing.join()
        return of(loop)

    monkeypatch.setattr(queues, "of", late)
    before = open_descriptors()
    with pytest.raises(nvmeio.ClosedError, match="the handle is closed"):
        handle.async_pread(target(), file)
    assert open_descriptors().keys() <= before.keys()


def test_a_closed_handle_still_tells_what_it_did(make_handle: Make, file: Path) -> None:
    handle = make_handle(queue_depth=7)
    handle.sync_pread(target(), file)
    before = handle.stats
    handle.close()
    assert handle.stats == before
    assert before.bytes_read == SIZE
    assert handle.get_queue_depth() == 7
    assert "closed" in repr(handle)


def test_close_raises_the_failures_that_nobody_has_seen(
    make_handle: Make, file: Path, tmp_path: Path
) -> None:
    handle = make_handle()
    for n in range(3):
        handle.async_pread(target(), tmp_path / f"missing-{n}")
    tensor = target()
    handle.async_pread(tensor, file)
    with pytest.raises(FileNotFoundError) as caught:
        handle.close()
    assert isinstance(caught.value, nvmeio.TransferError)
    assert len(caught.value.others) == 2
    assert handle.closed
    assert raw(tensor) == CONTENT
    handle.close()  # raised once


def test_with_closes(make_handle: Make, file: Path) -> None:
    tensor = target()
    with make_handle() as handle:
        operation = handle.async_pread(tensor, file)
    assert handle.closed
    assert operation.result(0) == SIZE
    assert raw(tensor) == CONTENT


@on_every_loop
async def test_async_with_closes(make_handle: Make, file: Path) -> None:
    tensor = target()
    async with make_handle() as handle:
        operation = handle.async_pread(tensor, file)
    assert handle.closed
    assert await operation == SIZE
    assert raw(tensor) == CONTENT


def test_with_raises_what_failed(make_handle: Make, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), make_handle() as handle:
        handle.async_pread(target(), tmp_path / "missing")
    assert handle.closed


@on_every_loop
async def test_a_failure_on_closing_does_not_hide_the_bodys_error(
    make_handle: Make, tmp_path: Path
) -> None:
    with pytest.warns(ResourceWarning, match="an operation failed too: .*missing"):  # noqa: SIM117
        with pytest.raises(LookupError, match="the body's"):
            async with make_handle() as handle:
                handle.async_pread(target(), tmp_path / "missing")
                raise LookupError("the body's")
    assert handle.closed
    with pytest.warns(ResourceWarning, match="an operation failed too: .*missing"):  # noqa: SIM117
        with pytest.raises(LookupError, match="the body's"):
            with make_handle() as handle:
                handle.async_pread(target(), tmp_path / "missing")
                raise LookupError("the body's")
    assert handle.closed


@on_every_loop
async def test_aclose_lets_the_loop_run(
    handle_held: nvmeio.AioHandle, engine_held: HeldEngine, file: Path
) -> None:
    tensor = target()
    handle_held.async_pread(tensor, file)
    closing = asyncio.create_task(handle_held.aclose())
    await asyncio.sleep(0.01)
    assert not closing.done()
    with pytest.raises(nvmeio.ClosedError):
        handle_held.async_pread(tensor, file)
    engine_held.gate.set()
    await closing
    assert raw(tensor) == CONTENT
    await handle_held.aclose()


@on_every_loop
async def test_aclose_may_be_cancelled_and_called_again(
    handle_held: nvmeio.AioHandle, engine_held: HeldEngine, file: Path
) -> None:
    operation = handle_held.async_pread(target(), file)
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(handle_held.aclose(), 0.02)
    assert not operation.done()
    engine_held.gate.set()
    await asyncio.gather(handle_held.aclose(), handle_held.aclose())
    assert operation.result(0) == SIZE


def test_closing_from_two_threads(
    handle_held: nvmeio.AioHandle, engine_held: HeldEngine, file: Path
) -> None:
    operation = handle_held.async_pread(target(), file)
    with thread(handle_held.close), thread(handle_held.close):
        time.sleep(0.01)
        engine_held.gate.set()
    assert operation.result(0) == SIZE


def test_closing_gives_back_the_kernels_resources_at_once(make_handle: Make, file: Path) -> None:
    """A closed handle that was still referenced kept its AIO context, an eventfd and its memory."""
    gc.collect()
    before = (open_descriptors(), aio_contexts(), nvmeio_threads())
    handle = make_handle()
    handle.sync_pread(target(), file)
    handle.close()
    assert (open_descriptors(), aio_contexts(), nvmeio_threads()) == before
    assert handle.stats.bytes_read == SIZE


def test_transfers_may_end_after_their_file_is_closed(
    handle_held: nvmeio.AioHandle, engine_held: HeldEngine, file: Path
) -> None:
    tensor = target()
    with nvmeio.open(file) as opened:
        operation = handle_held.async_pread(tensor, opened)
    assert opened.closed
    engine_held.gate.set()
    assert operation.result(WAIT_S) == SIZE
    assert raw(tensor) == CONTENT


# Things that are dropped


def test_a_tensor_dropped_in_flight_stays_until_the_end(
    handle_held: nvmeio.AioHandle, engine_held: HeldEngine, path: Path
) -> None:
    data = random_bytes(SIZE, seed=6)
    tensor = bytes_tensor(data)
    gone = weakref.ref(tensor)
    operation = handle_held.async_pwrite(tensor, path)
    del tensor
    gc.collect()
    others = [target() for _ in range(20)]  # whoever would have got its memory
    engine_held.gate.set()
    assert operation.result(WAIT_S) == SIZE
    assert path.read_bytes() == data
    assert len(others) == 20
    assert gone() is None  # and no longer than that


def test_an_operation_dropped_in_flight_goes_on(
    handle_held: nvmeio.AioHandle, engine_held: HeldEngine, file: Path
) -> None:
    tensor = target()
    handle_held.async_pread(tensor, file)
    gc.collect()
    engine_held.gate.set()
    assert handle_held.wait(WAIT_S) == 1
    assert raw(tensor) == CONTENT


def test_a_handle_dropped_in_flight_warns_and_finishes(engine_held: HeldEngine, file: Path) -> None:
    tensor = target()
    handle = nvmeio.AioHandle(16384, 8, engine=engine_held)
    operation = handle.async_pread(tensor, file)
    engine_held.wait_until_begun()
    with pytest.warns(ResourceWarning, match=r"1 in flight> was dropped with operations in flight"):
        del handle
        gc.collect()
    assert not operation.done()
    engine_held.gate.set()
    assert operation.result(WAIT_S) == SIZE
    assert raw(tensor) == CONTENT


def test_a_handle_dropped_at_rest_says_nothing(new_engine: Callable[[], Any], file: Path) -> None:
    before = nvmeio_threads()
    handle = nvmeio.AioHandle(16384, 8, engine=new_engine())
    assert nvmeio_threads() > before
    handle.sync_pread(target(), file)
    del handle
    gc.collect()
    spin_until(lambda: nvmeio_threads() == before)


def test_a_handle_may_be_collected_at_any_moment(file: Path, loop_kind: str) -> None:
    """The collector runs where it likes: `__del__` met a lock that its own thread held."""
    new_loop(loop_kind).close()  # skips

    collected: list[int] = []

    class Collecting(HeldEngine):
        def prepare(self, cq: Any, token: int, transfer: Any) -> Any:
            request = super().prepare(cq, token, transfer)
            move = request.move

            def collect_and_move(cq: Any) -> None:
                collected.append(gc.collect())
                move(cq)

            request.move = collect_and_move  # type: ignore[method-assign]
            return request

    engine = Collecting()
    operations: list[nvmeio.Operation] = []

    class Owner:
        def __init__(self) -> None:
            self.myself = self  # only the collector finds out that nobody else knows us
            self.handle = nvmeio.AioHandle(16384, 8, engine=engine)
            operations.append(self.handle.async_pread(target(), file))

    async def main() -> int:
        threading.Timer(0.05, engine.gate.set).start()
        return await operations[0]

    gc.disable()
    try:
        Owner()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            with thread(run_on, loop_kind, main()) as values:
                pass
    finally:
        gc.enable()
        engine.gate.set()
    assert values == [SIZE]
    assert collected[0] > 0


def test_a_dropped_handle_is_given_up_even_where_warnings_are_errors(file: Path) -> None:
    """The warning was raised in `__del__`, and what came after it never happened."""
    done = run_python(
        f"""
        import sys, threading, time, torch, nvmeio
        tensor = torch.zeros({SIZE}, dtype=torch.uint8)
        handle = nvmeio.AioHandle(engine=nvmeio.testing.FakeEngine(delay_s=0.05))
        operation = handle.async_pread(tensor, {str(file)!r})
        sys.unraisablehook = lambda unraisable: print(unraisable.exc_type.__name__)
        del handle
        assert operation.result(10) == {SIZE}
        patience = time.monotonic() + 10
        while [t for t in threading.enumerate() if t.name.startswith("nvmeio")]:
            assert time.monotonic() < patience, threading.enumerate()
            time.sleep(0.001)
        """.replace("import sys", "import nvmeio.testing, sys"),
        "-W",
        "error::ResourceWarning",
    )
    assert (done.stdout.split(), done.stderr, done.returncode) == (["ResourceWarning"], "", 0)


def test_the_interpreter_may_end_with_operations_in_flight(path: Path) -> None:
    done = run_python(
        f"""
        import torch, nvmeio, nvmeio.testing
        data = torch.full((1 << 20,), 7, dtype=torch.uint8)
        handle = nvmeio.AioHandle(engine=nvmeio.testing.FakeEngine(delay_s=0.05))
        operation = handle.async_pwrite(data, {str(path)!r})
        """,
        "-W",
        "always::ResourceWarning",
    )
    assert done.returncode == 0
    assert "ResourceWarning" in done.stderr
    assert "in flight" in done.stderr
    assert path.read_bytes() == b"\7" * (1 << 20)


# The loop is never blocked


class _Lag:
    """The longest that a loop did not come round."""

    def __init__(self) -> None:
        self.worst_s = 0.0
        self._stop = False

    async def watch(self) -> None:
        last = time.monotonic()
        while not self._stop:
            await asyncio.sleep(0)
            now = time.monotonic()
            self.worst_s = max(self.worst_s, now - last)
            last = now

    def stop(self) -> None:
        self._stop = True


def lag_while(kind: str, main: Callable[[], Any]) -> float:
    """The best of several: a busy machine adds lag of its own, never takes any away."""
    worst = []
    for _ in range(5):
        lag = _Lag()

        async def measured(lag: _Lag = lag) -> None:
            watching = asyncio.create_task(lag.watch())
            await asyncio.sleep(0)
            await main()
            lag.stop()
            await watching

        run_on(kind, measured())
        worst.append(lag.worst_s)
        if worst[-1] < 0.05:
            break
    return min(worst)


@pytest.mark.parametrize("kind", [kind for kind in LOOPS if kind != "debug"])
def test_submissions_to_a_held_engine_do_not_block_the_loop(
    new_handle: Make, file: Path, kind: str
) -> None:
    """Far more than the queue takes, none of which moves."""

    async def main() -> None:
        engine = HeldEngine()
        handle = new_handle(engine, block_size=4096, queue_depth=2)
        try:
            for _ in range(50):
                handle.async_pread(target(4096 * 8), file)
                await asyncio.sleep(0)
            assert handle.stats.in_flight == 50
        finally:
            engine.gate.set()
        assert await handle.drain() == 50
        await handle.aclose()

    assert lag_while(kind, main) < 0.05


@pytest.mark.parametrize("kind", [kind for kind in LOOPS if kind != "debug"])
def test_long_endings_do_not_block_the_loop(new_handle: Make, path: Path, kind: str) -> None:
    """Copying back what was read into a non-contiguous tensor is done by another thread."""
    rows, copying_s = 1024, 0.0
    while copying_s < 0.08 and rows <= 16384:  # up to 256 MiB
        rows *= 2
        base = torch.zeros(rows, 4096)
        before = time.monotonic()
        base.t().copy_(torch.zeros(4096, rows))
        copying_s = time.monotonic() - before
    assert copying_s >= 0.08
    with open(path, "wb") as opened:
        opened.truncate(base.nbytes)
    handle = new_handle("threads", block_size=8 << 20)

    async def main() -> None:
        assert await handle.async_pread(base.t(), path) == base.nbytes

    assert lag_while(kind, main) < 0.05


# How it shows itself


@on_every_loop
async def test_repr_tells_what_where_and_how_far(
    handle_held: nvmeio.AioHandle, engine_held: HeldEngine, file: Path
) -> None:
    operation = handle_held.async_pread(target(500), file, 7)
    assert repr(operation) == f"<pread {file} [7, 507) pending>"
    assert (operation.path, operation.file_offset, operation.nbytes) == (str(file), 7, 500)
    assert operation.transferred == 0
    assert repr(handle_held) == (
        "<nvmeio.AioHandle fake block_size=16384 queue_depth=8 lanes=1 open, 1 in flight>"
    )
    engine_held.gate.set()
    await operation
    assert repr(operation) == f"<pread {file} [7, 507) finished>"
    assert operation.transferred == 500
    missing = handle_held.async_pwrite(target(10), file.parent)
    assert missing.exception() is not None
    assert repr(missing) == f"<pwrite {file.parent} [0, 10) failed>"

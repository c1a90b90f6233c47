"""An operation, awaited: by one task, by many, on each engine and each loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from contract.operating import CONTENT, SIZE, WAIT_S, builtin_of, needs_3_11, target
from inside import record_of
from support import HeldEngine, new_loop, on_every_loop, raw, until

import nvmeio

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
@needs_3_11
async def test_asyncio_wait_takes_tasks_of_operations_and_refuses_them_bare(
    handle_held: nvmeio.AioHandle, engine_held: HeldEngine, file: Path
) -> None:
    """As its documentation says: `asyncio.wait` refuses coroutines, and `create_task` all else.

    The refusal is Python's, and comes when the transfer runs: nothing of that may be lost by it.
    """
    tensor = target()
    operation = handle_held.async_pread(tensor, file)
    with pytest.raises(TypeError, match="use tasks explicitly"):
        await asyncio.wait([operation])  # type: ignore[type-var]
    assert not operation.done()
    engine_held.gate.set()
    tasks = {asyncio.ensure_future(operation)}
    assert await asyncio.wait(tasks, timeout=WAIT_S) == (tasks, set())
    assert await operation == SIZE
    assert raw(tensor) == CONTENT


@on_every_loop
async def test_who_resumes_an_await_before_its_end_is_told(
    new_handle: Callable[..., nvmeio.AioHandle], file: Path
) -> None:
    engine = HeldEngine()
    operation = new_handle(engine).async_pread(target(), file)
    driven = operation.__await__()
    next(driven)
    with pytest.raises(RuntimeError, match="await wasn't used with future"):
        next(driven)
    engine.gate.set()
    assert await operation == SIZE


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
    tasks = [asyncio.create_task(operation) for _ in range(3)]  # as `shield` makes one of it
    for task in tasks:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(task), 0.01)
    engine_held.gate.set()
    assert await asyncio.wait_for(asyncio.shield(operation), WAIT_S) == SIZE
    assert await asyncio.gather(*tasks) == [SIZE] * 3


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


def test_a_waiter_that_found_the_end_itself_is_not_kept(
    handle_held: nvmeio.AioHandle, engine_held: HeldEngine, file: Path
) -> None:
    """It stayed with the operation, and with it the event loop, for as long as that was kept."""

    async def main() -> None:
        operation = handle_held.async_pread(target(), file)
        record = record_of(operation)

        class EndsMeanwhile(list[Any]):
            def append(self, waiter: Any) -> None:
                engine_held.gate.set()
                operation.result(WAIT_S)  # as another thread would have it settled
                super().append(waiter)

        record.waiters = EndsMeanwhile()
        assert await operation == SIZE
        assert list(record.waiters) == []

    asyncio.run(main())

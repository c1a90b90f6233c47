"""One handle among several loops and threads, and loops that end too early."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from contract.operating import CONTENT, SIZE, WAIT_S, rounds, target
from inside import record_of
from support import (
    HeldEngine,
    bytes_tensor,
    new_descriptors,
    new_loop,
    on_every_loop,
    open_descriptors,
    random_bytes,
    raw,
    run_on,
    spin_until,
    spin_until_collected,
    thread,
    until,
)

import nvmeio

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
        await rounds()
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
        most = len(open_descriptors()) + 1  # the last loop's is still to be dropped
        assert [run_on(kind, read()) for _ in range(5)] == [SIZE] * 5
        spin_until_collected(lambda most=most: len(open_descriptors()) <= most)  # type: ignore[misc]


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
        with pytest.warns(ResourceWarning, match=r"loop was closed with 1 operation in flight"):
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
    assert future.result(WAIT_S) == SIZE


def test_a_waiter_of_a_closed_loop_is_forgotten(
    handle_held: nvmeio.AioHandle, engine_held: HeldEngine, file: Path, loop_kind: str
) -> None:
    """Something awaited it there and never will be resumed; others are told."""
    operation = handle_held.async_pread(target(), file)
    loop = new_loop(loop_kind)

    async def wait_for_it() -> int:
        return await operation

    task = loop.create_task(wait_for_it())
    loop.run_until_complete(rounds())
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
    spin_until_collected(lambda: not new_descriptors(before))


@on_every_loop
@pytest.mark.parametrize("order", ["told", "not told"])
async def test_settled_by_another_thread_while_it_begins_to_be_awaited(
    new_handle: Callable[..., nvmeio.AioHandle], path: Path, order: str
) -> None:
    """Whoever awaits takes no lock for it: he is told, or finds out by himself."""
    engine = HeldEngine()
    handle = new_handle(engine)
    path.write_bytes(bytes(4096))
    operation = handle.async_pread(torch.empty(4096, dtype=torch.uint8), path)

    class Late(list[Any]):
        def append(self, item: Any) -> None:
            if order == "told":
                super().append(item)
            engine.gate.set()
            other = threading.Thread(target=operation.result, args=(60,))
            other.start()
            other.join(60)
            assert not other.is_alive()
            if order == "not told":
                super().append(item)

    record_of(operation).waiters = Late()
    assert await operation == 4096


def test_a_closed_loop_is_not_kept_alive(handle: nvmeio.AioHandle, file: Path) -> None:
    """Nor what hangs on it, by a handle that is used without a loop from then on."""

    async def main() -> weakref.ref[asyncio.AbstractEventLoop]:
        assert await handle.async_pread(target(), file) == SIZE
        return weakref.ref(asyncio.get_running_loop())

    loop = asyncio.run(main())
    assert handle.sync_pread(target(), file) == SIZE
    spin_until_collected(lambda: loop() is None)

"""PinnedPool: leases of a fixed budget, waited for in turn from any thread and loop."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import interrupting
import pytest
import torch
from support import collect, new_loop, run_python, spin_until_collected

from nvmeio import buffers
from nvmeio._memory import mappings
from nvmeio._memory.leases import LeaseQueue, Waiter
from nvmeio._memory.mappings import Mapping
from nvmeio._pages import PAGE_BYTES
from nvmeio.errors import ClosedError
from nvmeio.pool import PinnedPool

PAGE = PAGE_BYTES


async def until(condition: Callable[[], bool]) -> None:
    """Let the others run until it holds; pytest-timeout ends a wait that never does."""
    while not condition():
        await asyncio.sleep(0)


def spin_until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.0005)


# What a lease is


@pytest.mark.parametrize("nbytes", [0, 1, 511, PAGE, PAGE + 1, 16 * PAGE])
async def test_a_lease_is_a_byte_tensor_of_exactly_the_size_asked_for(nbytes: int) -> None:
    with PinnedPool(16 * PAGE) as pool:
        lease = pool.take(nbytes)
        assert lease.nbytes == nbytes
        assert pool.in_use_bytes == 0  # taken on entering
        async with lease as tensor:
            assert (tensor.shape, tensor.dtype) == ((nbytes,), torch.uint8)
            assert tensor.untyped_storage().data_ptr() % 4096 == 0
            assert tensor.untyped_storage().nbytes() == max(nbytes, 1)
            assert pool.in_use_bytes == -(-nbytes // PAGE) * PAGE
            tensor.fill_(1)
        assert pool.in_use_bytes == 0
        with pool.take(nbytes) as tensor:
            assert (tensor.shape, tensor.dtype) == ((nbytes,), torch.uint8)
            assert buffers.owns(tensor.untyped_storage().data_ptr(), nbytes)
        assert pool.in_use_bytes == 0


def test_the_budget_is_rounded_up_to_whole_pages() -> None:
    pool = PinnedPool(PAGE + 1)
    assert pool.budget_bytes == 2 * PAGE
    with pool.take(2 * PAGE):
        assert pool.in_use_bytes == pool.budget_bytes


@pytest.mark.parametrize("budget", [0, -1])
def test_a_budget_below_one_byte_is_refused(budget: int) -> None:
    with pytest.raises(ValueError, match=f"1 or more, not {budget}"):
        PinnedPool(budget)


@pytest.mark.parametrize("value", [1.5, b"1M", None, True])
def test_sizes_that_are_no_ints_are_refused(value: object) -> None:
    with pytest.raises(TypeError, match="budget_bytes must be an int"):
        PinnedPool(value)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="nbytes must be an int"):
        PinnedPool(PAGE).take(value)  # type: ignore[arg-type]


def test_a_request_that_can_never_succeed_is_refused_at_once() -> None:
    pool = PinnedPool(4 * PAGE)
    with pytest.raises(ValueError, match=f"{4 * PAGE + 1} bytes.*the budget is {4 * PAGE}"):
        pool.take(4 * PAGE + 1)
    with pytest.raises(ValueError, match="0 or more, not -1"):
        pool.take(-1)
    with pytest.raises(ValueError, match="timeout"):
        pool.take(1, timeout=-1)
    with pytest.raises(ValueError, match="timeout"):
        pool.take(1, timeout=float("nan"))
    with pool.take(1, timeout=float("inf")):
        pass


def test_a_lease_is_entered_once() -> None:
    pool = PinnedPool(PAGE)
    lease = pool.take(1)
    with lease:
        pass
    with pytest.raises(RuntimeError, match="entered once"), lease:
        pass
    assert pool.in_use_bytes == 0


def test_an_exception_in_the_block_gives_the_bytes_back() -> None:
    pool = PinnedPool(PAGE)
    with pytest.raises(KeyError), pool.take(1):
        raise KeyError
    assert pool.in_use_bytes == 0


def test_locked_tells_whether_the_arena_is() -> None:
    with PinnedPool(16 * PAGE) as pool, pool.take(100) as tensor:
        assert buffers.is_pinned(tensor) == pool.locked


def test_a_refused_lock_leaves_a_pool_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: object) -> None:
        raise OSError("limit")

    for step in ("lock", "register_with_cuda"):
        with monkeypatch.context() as patch:
            patch.setattr(mappings.Mapping, step, refuse)
            pool = PinnedPool(PAGE)
            assert not pool.locked
            with pool.take(5) as tensor:
                assert tensor.fill_(1).sum() == 5


def test_a_tensor_that_outlives_lease_and_pool_is_still_mapped() -> None:
    pool = PinnedPool(PAGE)
    with pool.take(100) as tensor:
        tensor.fill_(4)
    pool.close()
    address = tensor.data_ptr()
    del pool
    gc.collect()
    assert tensor.tolist() == [4] * 100
    del tensor
    spin_until_collected(lambda: not buffers.owns(address, 1))


def test_a_lease_that_is_dropped_warns() -> None:
    pool = PinnedPool(2 * PAGE)
    with pytest.warns(ResourceWarning, match="Lease of 100 bytes, held.*dropped"):
        tensor = pool.take(100).__enter__()
    assert pool.in_use_bytes == PAGE  # the tensor may be in use still
    tensor.fill_(1)


@pytest.mark.filterwarnings("ignore:.*was dropped, not left:ResourceWarning")
def test_what_nobody_gave_back_is_free_when_its_memory_is_gone() -> None:
    pool = PinnedPool(2 * PAGE)
    tensor = pool.take(PAGE).__enter__()  # as where Ctrl-C comes before the block begins
    part = tensor[10:20]
    del tensor
    with pytest.raises(TimeoutError), pool.take(2 * PAGE, timeout=0):
        pass
    with pool.take(PAGE, timeout=0) as other:
        assert other.data_ptr() != part.data_ptr() - 10
    del part
    with pool.take(2 * PAGE, timeout=0):
        assert pool.in_use_bytes == 2 * PAGE
    assert pool.in_use_bytes == 0


@pytest.mark.filterwarnings("ignore:.*was dropped, not left:ResourceWarning")
async def test_waiters_get_what_nobody_gave_back() -> None:
    pool = PinnedPool(PAGE)
    for wait_on_a_loop in (True, False):
        tensors = [pool.take(PAGE).__enter__()]

        def take() -> int:
            with pool.take(1) as memory:
                return len(memory)

        async def async_take() -> int:
            async with pool.take(2) as memory:
                return len(memory)

        served = asyncio.ensure_future(async_take() if wait_on_a_loop else asyncio.to_thread(take))
        await until(lambda: pool.waiting == 1)
        tensors.clear()
        assert await served == (2 if wait_on_a_loop else 1)
    assert pool.in_use_bytes == 0


@pytest.mark.filterwarnings("ignore:.*was dropped, not left:ResourceWarning")
def test_waiters_get_what_lies_in_a_cycle() -> None:
    class Cycle:
        pass

    pool = PinnedPool(PAGE)
    kept: Any = Cycle()
    kept.itself, kept.memory = kept, pool.take(PAGE).__enter__()
    gc.disable()
    try:
        del kept
        with pool.take(PAGE):
            assert pool.in_use_bytes == PAGE
    finally:
        gc.enable()


@pytest.mark.filterwarnings("ignore:.*was dropped, not left:ResourceWarning")
def test_a_request_that_was_dropped_leaves_the_queue() -> None:
    pool = PinnedPool(PAGE)
    with pool.take(PAGE):
        lease = pool.take(1)
        pool._enqueue(lease._start(lambda: True))  # as where Ctrl-C comes twice as it waits
        assert pool.waiting == 1
        del lease
    with pool.take(PAGE, timeout=0):
        assert pool.waiting == 0


def test_the_repr_tells_the_state() -> None:
    pool = PinnedPool(4 * PAGE)
    lease = pool.take(5)
    assert repr(lease) == "<Lease of 5 bytes, not entered>"
    with lease:
        kind = "page-locked" if pool.locked else "not locked"
        assert repr(pool) == (
            f"<PinnedPool {PAGE} of {4 * PAGE} bytes in 1 lease, 0 waiting, {kind}>"
        )
    pool.close()
    assert repr(pool).endswith(", closed>")


# Waiting


async def test_a_waiter_is_served_when_bytes_come_back() -> None:
    pool = PinnedPool(2 * PAGE)
    order = []

    async def wait() -> None:
        async with pool.take(PAGE + 1) as tensor:
            order.append(tensor.numel())

    async with pool.take(PAGE):
        task = asyncio.create_task(wait())
        await until(lambda: pool.waiting == 1)
        assert order == []
    await task
    assert order == [PAGE + 1]
    assert pool.in_use_bytes == 0


async def test_small_requests_do_not_pass_a_big_one() -> None:
    pool = PinnedPool(4 * PAGE)
    order: list[str] = []

    async def take(name: str, nbytes: int) -> None:
        async with pool.take(nbytes):
            order.append(name)
            await asyncio.sleep(0)

    async with pool.take(PAGE):
        tasks = [asyncio.create_task(take("big", 4 * PAGE))]
        await until(lambda: pool.waiting == 1)
        for index in range(20):  # there is room for these, and they wait all the same
            tasks.append(asyncio.create_task(take(f"small {index}", PAGE)))
        await until(lambda: pool.waiting == 21)
        assert order == []
    await asyncio.gather(*tasks)
    assert order == ["big", *(f"small {index}" for index in range(20))]


async def test_cancelling_the_first_in_the_queue_serves_the_next() -> None:
    pool = PinnedPool(4 * PAGE)

    async def take(nbytes: int) -> int:
        async with pool.take(nbytes):
            return nbytes

    async with pool.take(PAGE):
        big = asyncio.create_task(take(4 * PAGE))
        await until(lambda: pool.waiting == 1)
        small = asyncio.create_task(take(PAGE))
        await until(lambda: pool.waiting == 2)
        big.cancel()
        assert await asyncio.wait_for(small, 100) == PAGE
        with pytest.raises(asyncio.CancelledError):
            await big
    assert (pool.in_use_bytes, pool.waiting) == (0, 0)


async def test_a_waiter_cancelled_after_it_was_served_loses_nothing() -> None:
    """The bytes were granted, but its task was cancelled before it ran again."""
    pool = PinnedPool(PAGE)

    async def take() -> str:
        async with pool.take(PAGE):
            return "served"

    holder = pool.take(PAGE)
    await holder.__aenter__()
    first, second = asyncio.create_task(take()), asyncio.create_task(take())
    await until(lambda: pool.waiting == 2)
    await holder.__aexit__(None, None, None)
    assert (pool.waiting, pool.in_use_bytes) == (1, PAGE)  # first has it, and does not know yet
    first.cancel()
    assert await asyncio.wait_for(second, 100) == "served"
    with pytest.raises(asyncio.CancelledError):
        await first
    assert pool.in_use_bytes == 0


async def test_a_timeout_holds_nothing_and_serves_the_next() -> None:
    pool = PinnedPool(2 * PAGE)

    async def patient() -> None:
        async with pool.take(PAGE):
            pass

    async with pool.take(PAGE):
        lease = pool.take(2 * PAGE, timeout=0.02)
        entering = asyncio.create_task(lease.__aenter__())
        behind = asyncio.create_task(patient())
        await asyncio.sleep(0)
        assert pool.waiting == 2
        with pytest.raises(TimeoutError, match=rf"{2 * PAGE} bytes were not free within 0.02 s"):
            await entering
        await asyncio.wait_for(behind, 100)
        with pytest.raises(TimeoutError), pool.take(2 * PAGE, timeout=0.02):
            pass
        with pytest.raises((TimeoutError, asyncio.TimeoutError)):
            await asyncio.wait_for(pool.take(2 * PAGE).__aenter__(), 0.02)
        with pytest.raises(TimeoutError):
            async with pool.take(2 * PAGE, timeout=0):
                pass
        async with pool.take(PAGE, timeout=0):
            pass
    assert (pool.in_use_bytes, pool.waiting) == (0, 0)
    async with pool.take(2 * PAGE, timeout=100):
        pass


async def test_an_abandoned_coroutine_gives_its_place_up() -> None:
    pool = PinnedPool(PAGE)

    async def take() -> None:
        async with pool.take(PAGE):
            await asyncio.Event().wait()

    with pool.take(1):
        waiting = take()
        waiting.send(None)
        assert pool.waiting == 1
        waiting.close()
        assert pool.waiting == 0
    holding = take()
    holding.send(None)
    assert pool.in_use_bytes == PAGE
    holding.close()
    assert pool.in_use_bytes == 0


def test_threads_wait_in_the_same_queue_as_coroutines() -> None:
    pool = PinnedPool(4 * PAGE)
    order: list[str] = []

    def in_thread(name: str, nbytes: int) -> None:
        with pool.take(nbytes):
            order.append(name)

    def in_loop(name: str, nbytes: int) -> None:
        async def main() -> None:
            async with pool.take(nbytes):
                order.append(name)

        asyncio.run(main())

    with ThreadPoolExecutor(6) as executor:
        with pool.take(1):
            futures = []
            for index, work in enumerate((in_thread, in_loop) * 3):
                futures.append(executor.submit(work, f"{index} {work.__name__}", 4 * PAGE))
                spin_until(lambda: pool.waiting == index + 1)  # noqa: B023
            assert order == []
        for future in futures:
            future.result(500)
    assert [name[0] for name in order] == ["0", "1", "2", "3", "4", "5"]
    assert pool.in_use_bytes == 0


@pytest.mark.parametrize("kind", ["asyncio", "uvloop"])
def test_a_loop_closed_with_a_waiter_does_not_hold_up_the_queue(kind: str) -> None:
    pool = PinnedPool(PAGE)
    loop = new_loop(kind)

    async def take() -> None:
        async with pool.take(PAGE):
            pass

    with ThreadPoolExecutor(1) as executor:
        with pool.take(PAGE):
            entering = pool.take(PAGE).__aenter__()

            async def start() -> None:
                entering.send(None)  # waits on a future of this loop from here on

            loop.run_until_complete(start())
            assert pool.waiting == 1
            loop.close()
            behind = executor.submit(lambda: asyncio.run(take()))
            spin_until(lambda: pool.waiting == 2)
        behind.result(100)
    entering.close()
    assert (pool.in_use_bytes, pool.waiting) == (0, 0)


# Closing


async def test_closing_refuses_waiters_and_leaves_leases_alone() -> None:
    pool = PinnedPool(PAGE)
    caught: list[BaseException] = []

    def in_thread() -> None:
        try:
            with pool.take(PAGE):
                pass
        except ClosedError as error:
            caught.append(error)

    async def in_loop() -> None:
        async with pool.take(PAGE):
            pass

    async with pool.take(10) as tensor:
        thread = threading.Thread(target=in_thread)
        thread.start()
        await until(lambda: pool.waiting == 1)
        task = asyncio.create_task(in_loop())
        await until(lambda: pool.waiting == 2)
        not_entered = pool.take(PAGE)
        pool.close()
        pool.close()
        thread.join(100)
        with pytest.raises(ClosedError, match="closed: 4096 bytes were waited for"):
            await task
        assert len(caught) == 1
        with pytest.raises(ClosedError, match="pool is closed"):
            pool.take(1)
        with pytest.raises(ClosedError):
            async with not_entered:
                pass
        with pytest.raises(ClosedError), pool:
            pass
        address = tensor.data_ptr()
        tensor.fill_(6)
        assert buffers.owns(address, 10)
    assert (pool.closed, pool.in_use_bytes, pool.waiting) == (True, 0, 0)
    del tensor
    spin_until_collected(lambda: not buffers.owns(address, 1))


class Asked:
    """Two requests for all of an arena: one is served, the other waits."""

    def __init__(self, is_there: bool = True) -> None:
        self.queue = LeaseQueue(Mapping(PAGE), PAGE)
        self.woken: list[str] = []
        leases = [Asked.Request(), Asked.Request()]
        self._kept = leases
        self.served, self.waiting = (
            Waiter(PAGE, wake, weakref.ref(lease, self.queue.died.put))
            for wake, lease in zip((lambda: True, self._wake), leases, strict=True)
        )
        self._is_there = is_there
        self.queue.enqueue(self.served)
        self.queue.enqueue(self.waiting)

    class Request:
        """What is dropped with whoever asks."""

    def _wake(self) -> bool:
        self.woken.append("waiting")
        return self._is_there


def test_an_interrupted_close_leaves_nobody_waiting() -> None:
    """One that had left the queue, and was not told yet, waited for ever."""
    asked = [Asked()]
    for where in interrupting.everywhere(lambda: asked[-1].queue.close()):
        asked[-1].queue.look()  # as who waits does, now and then
        assert asked[-1].woken or not asked[-1].queue.closed, where
        asked.append(Asked())


def test_what_nobody_takes_is_free_again_after_an_interrupt() -> None:
    """Whose loop was closed meanwhile is found when he is woken, and had the bytes after that."""
    asked = [Asked(is_there=False)]
    for where in interrupting.everywhere(lambda: asked[-1].queue.withdraw(asked[-1].served)):
        queue = asked[-1].queue
        queue.look()
        queue.withdraw(asked[-1].served)
        assert (queue.leases, queue.free_bytes) == (0, PAGE), where
        asked.append(Asked(is_there=False))


async def test_a_pool_is_a_context_manager_of_both_kinds() -> None:
    with PinnedPool(PAGE) as pool:
        assert not pool.closed
    assert pool.closed
    async with PinnedPool(PAGE) as pool, pool.take(1):
        pass
    assert pool.closed


def test_pools_leak_nothing() -> None:
    collect()
    before = (len(mappings.mapped), len(mappings.locked))
    for _ in range(200):
        with PinnedPool(PAGE) as pool, pool.take(10):
            pass
        PinnedPool(PAGE)  # dropped, never closed
    del pool
    spin_until_collected(lambda: len(mappings.mapped) <= before[0])
    spin_until_collected(lambda: len(mappings.locked) <= before[1])


def test_a_forked_child_is_refused_and_the_parent_goes_on() -> None:
    script = """
        import os
        from nvmeio.errors import ClosedError
        from nvmeio.pool import PinnedPool
        pool = PinnedPool(8192)
        with pool.take(100) as tensor:
            child = os.fork()
            if child == 0:
                try:
                    pool.take(1)
                except ClosedError as error:
                    print(error, flush=True)
        if child == 0:
            pool.close()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        with pool.take(8192):
            print("parent goes on")
    """
    done = run_python(script, "-Wignore")
    assert done.returncode == 0, done.stderr
    assert "make a pool of your own after the fork" in done.stdout
    assert done.stdout.endswith("parent goes on\n")

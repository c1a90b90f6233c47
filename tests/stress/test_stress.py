"""Cancellation, handles, threads and loops in large numbers; a short form runs every time.

What is checked after each cancellation is what the operation promises: nobody touches the memory
any more, and what has been moved is the right bytes or nothing.
"""

import asyncio
import concurrent.futures
import contextlib
import gc
import os
import random
import sys
import threading
import time
from typing import Any

import pytest
import torch
from faults._support import (
    KIB,
    MIB,
    aio_contexts,
    aligned,
    bytes_of,
    eventually,
    make_file,
    noise,
    resident_bytes,
)
from support import PATIENCE_S, nvmeio_threads, open_descriptors, until

import nvmeio
from nvmeio.engines import libaio
from nvmeio.engines._queued import EventfdQueue
from nvmeio.engines.base import Opcode, Options, Transfer

FILE_BYTES = 8 * MIB
MOST = 160 * KIB  # bytes per operation
ACTORS = 12
UNTOUCHED = 0xA5
OURS = 0x5A

LONG = [pytest.mark.stress, pytest.mark.timeout(7200)]  # minutes, on a machine that is not busy


def short_and_long(name, short, much):
    """A parameter with a value for every run and one for `make stress`."""
    return pytest.mark.parametrize(name, [short, pytest.param(much, marks=LONG)])


class _Boom(Exception):
    pass


class Actor:
    """Reads, writes and cancels in a random order, and looks what became of it."""

    def __init__(self, handle, folder, content, index, seed):
        self.handle = handle
        self.file = folder / "file"
        self.content = content
        self.chance = random.Random(f"{seed} {index}")
        # Writes go to a file of its own, whose bytes are known.
        self.mine = folder / f"actor-{index}"
        self.mine.write_bytes(bytes_of(content[: 2 * MIB]))
        self.written = content[: 2 * MIB].clone()
        self.cancelled = self.finished = 0
        # Memory that was ours again after a cancellation, and since when.
        self.watched = []

    async def run(self, count):
        for _ in range(count):
            await self.once()
            self.look_at_watched(0.05)
        await asyncio.sleep(0.05)
        self.look_at_watched(0.0)

    async def once(self):
        writing = self.chance.random() < 0.4
        nbytes = self.chance.choice([1, 512, 4096, 64 * KIB, self.chance.randrange(MOST), MOST])
        room = aligned(nbytes + 8192)
        shift = 4096 + self.chance.choice([0, 0, 1, 64, 512])
        tensor = room[shift : shift + nbytes]
        if writing:
            offset = self.chance.randrange(2 * MIB - nbytes)
            tensor.copy_(noise(MOST, seed=self.chance.randrange(8))[:nbytes])
            data, start = tensor.clone(), self.handle.async_pwrite
            operation = start(tensor, self.mine, offset)
        else:
            offset = self.chance.randrange(FILE_BYTES - nbytes)
            data, start = self.content[offset : offset + nbytes], self.handle.async_pread
            operation = start(tensor, self.file, offset)
        try:
            finished = await self.chance.choice(
                [
                    self.just_await,
                    self.cancel_task,
                    self.cancel_operation,
                    self.time_out,
                    self.fail_beside,
                    self.gather_and_fail,
                ]
            )(operation, nbytes)
        except BaseException as failed:
            raise AssertionError(f"{operation!r} ended with {failed!r}") from failed
        assert operation.done()
        self.check(writing, finished, room, shift, data, offset)

    async def just_await(self, operation, nbytes):
        assert await operation == nbytes
        return True

    async def cancel_task(self, operation, nbytes):
        task = asyncio.create_task(operation)
        await self.a_moment()
        task.cancel()
        try:
            assert await task == nbytes
        except asyncio.CancelledError:
            return False
        return True

    async def cancel_operation(self, operation, nbytes):
        await self.a_moment()
        operation.cancel()
        try:
            assert await operation == nbytes
        except asyncio.CancelledError:
            assert operation.cancelled()
            return False
        return True

    async def time_out(self, operation, nbytes):
        try:
            seconds = self.chance.choice([0, 0.0002, 0.001])
            assert await asyncio.wait_for(operation, seconds) == nbytes
        except (asyncio.TimeoutError, TimeoutError):
            return False
        return True

    async def fail_beside(self, operation, nbytes):
        if sys.version_info < (3, 11):
            return await self.gather_and_fail(operation, nbytes)
        with contextlib.suppress(ExceptionGroup):  # type: ignore[name-defined]  # noqa: F821
            async with asyncio.TaskGroup() as group:
                task = group.create_task(operation)
                await self.a_moment()
                raise _Boom
        return not task.cancelled()

    async def gather_and_fail(self, operation, nbytes):
        async def fail():
            await self.a_moment()
            raise _Boom

        task = asyncio.ensure_future(operation)
        with contextlib.suppress(_Boom):
            await asyncio.gather(task, fail())
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=PATIENCE_S)
        assert done, "never ended"
        return not task.cancelled()

    async def a_moment(self):
        if self.chance.random() < 0.5:
            for _ in range(self.chance.randrange(4)):
                await asyncio.sleep(0)
        else:
            await asyncio.sleep(self.chance.choice([0.0001, 0.0005, 0.002]))

    def check(self, writing, finished, room, shift, data, offset):
        nbytes = data.numel()
        tensor = room[shift : shift + nbytes]
        self.finished += finished
        self.cancelled += not finished
        if writing:
            there = self.written[offset : offset + nbytes]
            with open(self.mine, "rb") as file:
                found = bytearray(os.pread(file.fileno(), nbytes, offset))
            now = torch.frombuffer(found, dtype=torch.uint8)
            if finished:
                assert torch.equal(now, data)
            else:
                assert bool(((now == data) | (now == there)).all()), "neither old nor new"
            self.written[offset : offset + nbytes] = now
            assert torch.equal(tensor, data), "a write has changed its tensor"
        elif finished:
            assert torch.equal(tensor, data)
        else:
            assert bool(((tensor == data) | (tensor == UNTOUCHED)).all()), "bytes from elsewhere"
        before, behind = room[:shift], room[shift + nbytes :]
        assert bool((before == UNTOUCHED).all()) and bool((behind == UNTOUCHED).all())
        if not finished:
            room.fill_(OURS)
            self.watched.append((time.monotonic(), room))

    def look_at_watched(self, age_s):
        now = time.monotonic()
        while self.watched and now - self.watched[0][0] >= age_s:
            _, room = self.watched.pop(0)
            assert bool((room == OURS).all()), "written to after CancelledError"


@pytest.mark.parametrize("engine", ["libaio", "threads"])
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@short_and_long("rounds", 5, 300)
def test_random_cancellations(tmp_path, engine, loop, rounds):
    """Operations end by cancellation, time-out, failures beside them, or well; in all orders.

    How many are cancelled is a matter of the machine's speed (of 60 in a round some 35 as a rule),
    so it is the operations that are counted, and that some were is asked.
    """
    content = noise(FILE_BYTES, seed=1)
    make_file(tmp_path / "file", content)
    contexts, threads = aio_contexts(), nvmeio_threads()
    run = asyncio.run if loop == "asyncio" else pytest.importorskip("uvloop").run
    kept = []

    async def main():
        # Short queues: a slot that is lost is soon missed.
        async with nvmeio.AioHandle(64 * KIB, 3, intra_op_parallelism=2, engine=engine) as handle:
            kept.append(handle)
            actors = [Actor(handle, tmp_path, content, i, engine + loop) for i in range(ACTORS)]
            await asyncio.gather(*(actor.run(3) for actor in actors))
            descriptors = open_descriptors().items()
            for _ in range(rounds):
                await asyncio.gather(*(actor.run(5) for actor in actors))
            await until(lambda: handle.stats.in_flight == 0)
            await until(lambda: open_descriptors().items() <= descriptors)
            for actor in actors:
                while not actor.finished:  # those that are just awaited are, and one comes
                    await actor.once()
            assert sum(actor.cancelled for actor in actors) > 0
            assert handle.stats.cancelled > 0
            assert handle.stats.errors == 0
            # All slots are there: more blocks than slots, many at once.
            tensors = [aligned(FILE_BYTES) for _ in range(3)]
            operations = [handle.async_pread(t, tmp_path / "file") for t in tensors]
            moved = await asyncio.wait_for(asyncio.gather(*operations), PATIENCE_S)
            assert moved == [FILE_BYTES] * 3
            assert all(torch.equal(tensor, content) for tensor in tensors)
            for actor in actors:
                assert actor.mine.read_bytes() == bytes_of(actor.written)

    run(main())
    assert kept[0].stats.in_flight == 0
    assert eventually(lambda: aio_contexts() <= contexts)
    assert eventually(lambda: nvmeio_threads() <= threads)


@pytest.mark.parametrize("engine", ["libaio", "threads"])
@short_and_long("count", 60, 1_000)
def test_many_handles_one_after_another(tmp_path, engine, count):
    """Nothing is left to the garbage collector: it is switched off."""
    path = make_file(tmp_path / "file", noise(MIB, seed=2))
    tensor = aligned(MIB)[1 : MIB - 1]

    def use():
        with nvmeio.AioHandle(64 * KIB, 32, intra_op_parallelism=2, engine=engine) as handle:
            assert handle.sync_pread(tensor, path) == tensor.nbytes

    async def use_with_loop():
        async with nvmeio.AioHandle(64 * KIB, 32, engine=engine) as handle:
            assert await handle.async_pread(tensor, path) == tensor.nbytes

    def drop():
        nvmeio.AioHandle(64 * KIB, 32, engine=engine)

    def grown():
        """Resident bytes, by so many handles."""
        memory = resident_bytes()
        for turn in range(count):
            if turn % 10 == 9:
                asyncio.run(use_with_loop())
            else:
                use()
        assert eventually(lambda: nvmeio_threads() <= threads)
        assert eventually(lambda: aio_contexts() <= contexts)
        assert eventually(lambda: open_descriptors().items() <= descriptors)
        return resident_bytes() - memory

    for _ in range(10):
        use()
        asyncio.run(use_with_loop())
    gc.collect()
    descriptors, threads = open_descriptors().items(), nvmeio_threads()
    contexts = aio_contexts()
    gc.disable()
    try:
        # What the allocators take for themselves they take once; what is lost is lost each time.
        found = [grown()]
        while found[-1] >= 8 * MIB + count * 20 * KIB and len(found) < 4:
            found.append(grown())
        assert found[-1] < 8 * MIB + count * 20 * KIB, f"{found} bytes for {count} handles each"
    finally:
        gc.enable()
    for _ in range(count // 10):
        drop()
    assert eventually(lambda: gc.collect() >= 0 and nvmeio_threads() <= threads)
    assert eventually(lambda: gc.collect() >= 0 and aio_contexts() <= contexts)
    assert eventually(lambda: gc.collect() >= 0 and open_descriptors().items() <= descriptors)


@short_and_long("count", 20, 300)
def test_many_loops_one_after_another(tmp_path, count):
    """A loop's completion queue goes with the loop, at the latest when the next one comes."""
    path = make_file(tmp_path / "file", noise(MIB, seed=3))
    tensor = aligned(MIB)
    with nvmeio.AioHandle(64 * KIB, 8) as handle:

        async def use():
            assert await handle.async_pread(tensor, path) == MIB

        asyncio.run(use())
        descriptors = len(open_descriptors())
        for _ in range(count):
            asyncio.run(use())
            assert eventually(lambda: len(open_descriptors()) <= descriptors + 1)
        assert handle.stats.operations == count + 1


@pytest.mark.parametrize("engine", ["libaio", "threads"])
@short_and_long("turns", 25, 600)
def test_threads_and_loops_on_one_handle(tmp_path, engine, turns):
    """Loops, blocking threads, callbacks and futures at once; and operations that change hands."""
    content = noise(FILE_BYTES, seed=4)
    path = make_file(tmp_path / "file", content)
    handle = nvmeio.AioHandle(64 * KIB, 8, intra_op_parallelism=2, engine=engine)
    file = nvmeio.open(path)
    begun = threading.Barrier(9)
    counted = []
    shared: concurrent.futures.Future[int] = concurrent.futures.Future()  # of another thread's loop

    def pick(chance):
        nbytes = chance.choice([0, 100, 4096, chance.randrange(200 * KIB)])
        offset = chance.randrange(FILE_BYTES - nbytes)
        return aligned(nbytes + 1)[1:], offset, chance.choice([path, file])

    def right(tensor, offset):
        return torch.equal(tensor, content[offset : offset + tensor.nbytes])

    def loop(seed):
        chance = random.Random(seed)

        async def one():
            tensor, offset, where = pick(chance)
            operation: Any = handle.async_pread(tensor, where, offset)
            if chance.random() < 0.2:
                operation = asyncio.wrap_future(nvmeio.as_future(operation))
            assert await operation == tensor.nbytes
            assert right(tensor, offset)
            counted.append(1)

        async def main():
            begun.wait()
            for _ in range(turns):
                await asyncio.gather(*(one() for _ in range(4)))

        asyncio.run(main())

    def blocking(seed):
        chance = random.Random(seed)
        begun.wait()
        for _ in range(turns):
            taken = [pick(chance) for _ in range(4)]
            operations = [handle.async_pread(t, where, o) for t, o, where in taken]
            if chance.random() < 0.5:
                futures = [nvmeio.as_future(operation) for operation in operations]
                assert not concurrent.futures.wait(futures, timeout=PATIENCE_S).not_done
            for operation, (tensor, offset, _) in zip(operations, taken, strict=True):
                assert operation.result(PATIENCE_S) == tensor.nbytes
                assert right(tensor, offset)
                counted.append(1)

    def started_here_awaited_there(seed):
        chance = random.Random(seed)

        async def take(operation):
            return await operation

        begun.wait()
        other = shared.result(PATIENCE_S)
        for _ in range(turns):
            tensor, offset, where = pick(chance)
            operation = handle.async_pread(tensor, where, offset)
            ended = asyncio.run_coroutine_threadsafe(take(operation), other)
            assert ended.result(PATIENCE_S) == tensor.nbytes
            assert right(tensor, offset)
            counted.append(1)

    def host():
        async def main():
            begun.wait()
            shared.set_result(asyncio.get_running_loop())
            await asyncio.get_running_loop().run_in_executor(None, over.wait)

        asyncio.run(main())

    over = threading.Event()
    with concurrent.futures.ThreadPoolExecutor(9) as pool:
        hosted = pool.submit(host)
        running = [pool.submit(loop, seed) for seed in range(3)]
        running += [pool.submit(blocking, seed) for seed in range(3)]
        running += [pool.submit(started_here_awaited_there, seed) for seed in range(2)]
        try:
            for each in concurrent.futures.as_completed(running):
                each.result()
        finally:
            over.set()
        hosted.result(PATIENCE_S)
    expected = turns * (3 * 4 + 3 * 4 + 2)
    assert len(counted) == expected
    assert handle.wait(PATIENCE_S) == expected
    assert handle.stats.operations == expected
    assert handle.stats.in_flight == 0
    file.close()
    handle.close()


@pytest.mark.parametrize("engine", ["libaio", "threads"])
@short_and_long("turns", 8, 200)
def test_close_among_threads_that_submit(tmp_path, engine, turns):
    """Whoever got an operation gets its end; whoever comes later is told that it is closed."""
    content = noise(MIB, seed=5)
    path = make_file(tmp_path / "file", content)
    for turn in range(turns):
        handle = nvmeio.AioHandle(16 * KIB, 8, intra_op_parallelism=1 + turn % 2, engine=engine)
        begun = threading.Barrier(5)
        results: list[Any] = []

        def submit(handle=handle, begun=begun, results=results, seed=turn):
            chance = random.Random(seed)
            tensor = aligned(MIB)
            begun.wait()
            operations = []
            try:
                for _ in range(100_000):
                    nbytes = chance.choice([100, 40 * KIB])
                    operations.append(handle.async_pread(tensor[:nbytes], path))
                    if len(operations) % 16 == 0:
                        operations[-1].result(PATIENCE_S)
            except nvmeio.ClosedError:
                pass
            results.append([each.result(PATIENCE_S) == each.nbytes for each in operations])

        def await_(handle=handle, begun=begun, results=results):
            async def main():
                begun.wait()
                ended = []
                with contextlib.suppress(nvmeio.ClosedError):
                    for _ in range(100_000):
                        tensor = aligned(4096)
                        ended.append(await handle.async_pread(tensor, path) == 4096)
                        ended.append(torch.equal(tensor, content[:4096]))
                results.append(ended)

            asyncio.run(main())

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            running = [pool.submit(submit), pool.submit(submit), pool.submit(submit)]
            running.append(pool.submit(await_))
            begun.wait()
            time.sleep(0.005 * (turn % 8))
            handle.close()
            for each in concurrent.futures.as_completed(running):
                each.result()
        assert len(results) == 4
        assert all(all(each) for each in results)
        assert handle.stats.in_flight == 0


class _KnowsFreedQueues:
    """The shim, refusing to touch a completion queue that was freed."""

    def __init__(self, lib):
        self._lib = lib
        self._freed = set()

    def __getattr__(self, name):
        return getattr(self._lib, name)

    def nv_cq_free(self, cq):
        self._freed.add(int(libaio.ffi.cast("uintptr_t", cq)))
        self._lib.nv_cq_free(cq)

    def _checked(self, cq):
        assert int(libaio.ffi.cast("uintptr_t", cq)) not in self._freed, "looked at a freed queue"
        return cq

    def nv_cq_peek(self, cq, tokens, most):
        return self._lib.nv_cq_peek(self._checked(cq), tokens, most)

    def nv_cq_peek_ends(self, cq, ends, most):
        return self._lib.nv_cq_peek_ends(self._checked(cq), ends, most)

    def nv_cq_acknowledge(self, cq, tokens, count):
        return self._lib.nv_cq_acknowledge(self._checked(cq), tokens, count)


@pytest.mark.parametrize("engine", ["libaio", "threads"])
def test_close_while_another_thread_is_about_to_reap(tmp_path, monkeypatch, engine):
    """A thread that submits reaps in passing; close freed the queue before it came to that."""
    path = make_file(tmp_path / "file", noise(4096, seed=6))
    monkeypatch.setattr(libaio, "lib", _KnowsFreedQueues(libaio.lib))
    about_to, closed = threading.Event(), threading.Event()
    deadline = time.monotonic() + 60
    cq = libaio.LibaioQueue if engine == "libaio" else EventfdQueue
    name = "peek_ends"
    peek = getattr(cq, name)

    def late(self):
        if threading.current_thread().name == "submitter":
            about_to.set()
            closed.wait(0.5)
        return peek(self)

    monkeypatch.setattr(cq, name, late)
    handle = nvmeio.AioHandle(engine=engine)
    failures = []

    def submit():
        tensor = aligned(4096)
        try:
            while not about_to.is_set() and time.monotonic() < deadline:
                handle.async_pread(tensor, path)
        except BaseException as failed:
            failures.append(failed)

    submitter = threading.Thread(target=submit, name="submitter")
    submitter.start()
    assert about_to.wait(60)
    handle.close()
    closed.set()
    submitter.join(PATIENCE_S)
    assert not failures


def test_two_threads_reap_one_port(tmp_path, monkeypatch):
    """They shared the array that the shim fills: a token of one was overwritten by the other.

    An operation with a callback, whose token was lost, never called back.
    """

    own = libaio.LibaioQueue._reap_into

    def reap(*arguments):
        """The thread "slow" comes back late."""
        n = own(*arguments)
        if threading.current_thread().name == "slow":
            reaped.set()
            other_has_reaped.wait(PATIENCE_S)
        return n

    monkeypatch.setattr(libaio.LibaioQueue, "_reap_into", reap)
    reaped, other_has_reaped = threading.Event(), threading.Event()
    engine = libaio.LibaioEngine()
    engine.start(Options())
    cq = engine.open_completion_queue()
    with open(tmp_path / "file", "wb") as file:
        sync = Transfer(Opcode.FSYNC, -1, file.fileno(), 0, 0, 0, 0, 0, 1, 1, False, False)
        requests = [engine.prepare(cq, token, sync) for token in (1, 2)]
        requests[0].start()
        assert requests[0].wait(PATIENCE_S)
        found = []
        slow = threading.Thread(target=lambda: found.append(cq.reap()), name="slow")
        slow.start()
        assert reaped.wait(PATIENCE_S)
        requests[1].start()
        assert requests[1].wait(PATIENCE_S)
        mine = cq.reap()
        other_has_reaped.set()
        slow.join(PATIENCE_S)
    cq.close()
    engine.stop()
    engine.join()
    assert (found, mine) == ([[1]], [2])


@short_and_long("turns", 15, 300)
def test_loops_come_and_go_in_many_threads(tmp_path, turns):
    content = noise(MIB, seed=7)
    path = make_file(tmp_path / "file", content)
    with nvmeio.AioHandle(64 * KIB, 8) as handle:

        def use():
            async def read():
                tensor = aligned(4096)
                assert await handle.async_pread(tensor, path, 4096) == 4096
                assert torch.equal(tensor, content[4096:8192])

            for _ in range(turns):
                asyncio.run(read())

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            running = [pool.submit(use) for _ in range(8)]
            for each in concurrent.futures.as_completed(running):
                each.result()
        assert handle.wait(PATIENCE_S) == 8 * turns


def test_loop_comes_while_another_thread_looks_for_closed_ones(tmp_path):
    """A new loop's first operation walks over the known loops: one more came in between."""
    path = make_file(tmp_path / "file", noise(4096, seed=8))
    looking, come = threading.Event(), threading.Event()

    class Loop(asyncio.SelectorEventLoop):
        def is_closed(self):
            if threading.current_thread().name == "looks" and not looking.is_set():
                looking.set()
                come.wait(0.5)
            return super().is_closed()

    with nvmeio.AioHandle() as handle, contextlib.closing(Loop()) as known:

        async def read():
            return await handle.async_pread(aligned(4096), path)

        assert known.run_until_complete(read()) == 4096
        found = []
        looks = threading.Thread(target=lambda: found.append(asyncio.run(read())), name="looks")
        looks.start()
        assert looking.wait(PATIENCE_S)
        assert asyncio.run(read()) == 4096
        come.set()
        looks.join(PATIENCE_S)
        assert found == [4096]

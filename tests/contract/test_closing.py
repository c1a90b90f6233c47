"""Closing a handle: what is finished, refused, raised and given back."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from contract.operating import (
    CONTENT,
    SIZE,
    WAIT_S,
    Make,
    aio_contexts,
    rounds,
    target,
    threads_in,
    untouched,
)
from inside import core_of
from support import (
    HeldEngine,
    bytes_tensor,
    collect,
    new_descriptors,
    nvmeio_threads,
    on_every_loop,
    open_descriptors,
    random_bytes,
    raw,
    run_on,
    spin_until,
    thread,
)

import nvmeio
from nvmeio.testing import FakeEngine


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
    queues = core_of(handle).queues
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
    spin_until(lambda: open_descriptors().keys() <= before.keys())


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
    await rounds()
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
        spin_until(lambda: threads_in("wait_for_live") == 2)
        engine_held.gate.set()
    assert operation.result(0) == SIZE


def test_closing_does_not_wait_for_a_transfer_that_could_not_be_begun(
    new_handle: Callable[..., nvmeio.AioHandle], file: Path
) -> None:
    """It was found among those in flight, taken back, and waited for all the same, for ever."""

    class Refusing(FakeEngine):
        def enqueue(self, request: Any) -> None:
            spin_until(lambda: threads_in("wait_for_live") == 1)
            raise MemoryError("no room for it")

    handle, closed = new_handle(Refusing()), threading.Event()

    def close() -> None:
        spin_until(lambda: handle.stats.in_flight == 1)
        handle.close()
        closed.set()

    with thread(close):
        with pytest.raises(MemoryError, match="no room"):
            handle.async_pread(target(), file)
        assert closed.wait(WAIT_S)
    assert handle.closed


def test_closing_gives_back_the_kernels_resources_at_once(make_handle: Make, file: Path) -> None:
    """A closed handle that was still referenced kept its AIO context, an eventfd and its memory."""
    collect()
    descriptors, contexts, threads = open_descriptors(), aio_contexts(), nvmeio_threads()
    handle = make_handle()
    handle.sync_pread(target(), file)
    handle.close()
    # The handle is still there, so this waits for no collector, but for threads that return.
    spin_until(lambda: not new_descriptors(descriptors))
    spin_until(lambda: aio_contexts() <= contexts)
    spin_until(lambda: not nvmeio_threads() - threads)
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

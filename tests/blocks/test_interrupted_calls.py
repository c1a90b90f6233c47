"""Ctrl-C, closing, a fork: no call hangs, and no memory is in use behind its owner's back."""

from __future__ import annotations

import _thread
import errno
import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from blocks.test_store import BLOCK, SLOT, block, loaded, opened, put
from interrupting import at_places, at_random_times, everywhere
from support import HeldEngine, collect, nvmeio_threads, spin_until, thread

from nvmeio import AioHandle
from nvmeio._kv_blocks import catalog
from nvmeio._kv_blocks.store import BlockStore
from nvmeio._kv_blocks.table import Table
from nvmeio._kv_blocks.transfers import StoreWorker
from nvmeio.errors import ClosedError

pytestmark = [
    pytest.mark.skipif(sys.version_info < (3, 11), reason="reads 3.11's exception tables"),
    # A real signal may come in a destructor, where Python swallows what it raises.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
Interrupts = Callable[[Callable[[], object], int], Iterator[object]]
# At random moments tests/interrupts does the same in a process of its own.
HOW = pytest.mark.parametrize(
    "interrupts", [at_places, pytest.param(at_random_times, marks=pytest.mark.stress)]
)


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "STEP_BYTES", 4 * SLOT)


@pytest.fixture(scope="module")
def handle() -> Iterator[AioHandle]:
    with AioHandle(engine="threads") as made:
        yield made


@pytest.mark.slow
@HOW
def test_storing_and_loading(tmp_path: Path, handle: AioHandle, interrupts: Interrupts) -> None:
    seeds = [1, 2, 3]
    with opened(tmp_path, handle) as store:

        def work() -> None:
            store.clear()
            put(store, seeds)
            store.touch(["1"])
            loaded(store, seeds)
            store.remove(["2"])

        for where in interrupts(work, 150):
            put(store, seeds)
            assert loaded(store, seeds) == [True] * 3, where
        assert store.stats.damaged == 0
        store.clear()
        assert put(store, list(range(8))) == [True] * 8  # no slot is lost


@HOW
def test_opening_and_closing(tmp_path: Path, handle: AioHandle, interrupts: Interrupts) -> None:
    with opened(tmp_path, handle) as store:
        put(store, [1, 2])
    collect()
    before = nvmeio_threads()

    def work() -> None:
        opened(tmp_path, handle).close()

    for where in interrupts(work, 120):
        gc.collect()  # what an interrupted call made may be in its traceback's frames
        with opened(tmp_path, handle) as store:
            assert loaded(store, [1, 2]) == [True, True], where
    spin_until(lambda: gc.collect() >= 0 and nvmeio_threads() <= before)


def interrupted(work: Callable[[], object], engine: HeldEngine, times: int) -> bool:
    """Interrupt work that waits for the drive so often; whether it ended before the drive did."""
    over = threading.Event()
    early: list[bool] = []

    def interrupt() -> None:
        engine.wait_until_begun()
        for _ in range(times):
            _thread.interrupt_main()
            if over.wait(0.5):
                break
        early.append(over.is_set())
        engine.gate.set()

    with thread(interrupt):
        try:
            with pytest.raises(KeyboardInterrupt):
                work()
        finally:
            over.set()
    return early[0]


@pytest.mark.parametrize("verb", ["store", "load"])
def test_an_interrupted_call_is_done_with_the_memory(verb: str, tmp_path: Path) -> None:
    """It went on behind its caller: bytes came into memory, or were stored out of memory, that held
    something else by then."""
    engine = HeldEngine()
    with AioHandle(engine=engine) as held, opened(tmp_path, held) as store:
        if verb == "load":
            engine.gate.set()
            put(store, [1])
            engine.gate.clear()
            engine.begun = 0
        room = block(1).clone() if verb == "store" else torch.zeros(BLOCK, dtype=torch.uint8)
        call = getattr(store, verb)
        assert not interrupted(lambda: call(["1"], [room]), engine, 1)
        assert room.equal(block(1))
        room.zero_()
        store.drain()
        assert not room.any()
        assert loaded(store, [1]) == [True]


def test_a_second_interrupt_is_not_kept_waiting(tmp_path: Path) -> None:
    engine = HeldEngine()
    with AioHandle(engine=engine) as held, opened(tmp_path, held) as store:
        given = block(1)
        assert interrupted(lambda: store.store(["1"], [given]), engine, 1000)
        store.drain()
        assert loaded(store, [1]) == [True]


def test_whoever_begins_something_while_it_is_closed_is_answered(
    tmp_path: Path, handle: AioHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the end of its thread nobody answered, and a server waited for ever."""
    store = opened(tmp_path, handle)
    post = StoreWorker.post

    def close_meanwhile(worker: StoreWorker, *given: Any) -> None:
        closer.start()
        closer.join(0.3)  # for as long as it can, which it must not be able to
        post(worker, *given)

    closer = threading.Thread(target=store.close)
    with monkeypatch.context() as patch:
        patch.setattr(StoreWorker, "post", close_meanwhile)
        answers: list[list[bool]] = []
        store.begin_load(["1"], [torch.zeros(BLOCK, dtype=torch.uint8)], answers.append)
        closer.join()
    spin_until(lambda: answers == [[False]])
    with pytest.raises(ClosedError, match="is closed"):
        store.begin_load(["1"], [torch.zeros(BLOCK, dtype=torch.uint8)], answers.append)


def test_a_forked_child_is_refused(tmp_path: Path, handle: AioHandle) -> None:
    """What it began was never answered: the threads are its parent's."""
    with opened(tmp_path, handle) as store:
        put(store, [1])
        told, tell = os.pipe()
        child = os.fork()
        if not child:
            try:
                store.begin_load(["1"], [torch.zeros(BLOCK, dtype=torch.uint8)], print)
            except ClosedError as refused:
                os.write(tell, str(refused).encode())
            finally:
                store.close()
                os._exit(0)
        os.close(tell)
        with os.fdopen(told) as said:
            assert "is of another process: open it here" in said.read()
        os.waitpid(child, 0)
        assert loaded(store, [1]) == [True]


def test_a_store_without_a_thread_is_refused(
    tmp_path: Path, handle: AioHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nvmeio._threads import threads

    start = threads.start

    def refuse(run: Any, name: str, failed: Any) -> None:
        if name == "nvmeio-blocks-loads":
            failed(RuntimeError("can't start new thread"))
        else:
            start(run, name, failed)

    with monkeypatch.context() as patch:
        patch.setattr(threads, "start", refuse)
        with pytest.raises(ClosedError):
            opened(tmp_path, handle)
    with opened(tmp_path, handle) as store:
        assert put(store, [1]) == [True]


@pytest.mark.parametrize("method", ["put", "empty"])
def test_a_table_that_cannot_be_written_loses_no_slot(
    method: str, tmp_path: Path, handle: AioHandle, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """The rest of the batch was lost for ever, and with it its slots."""
    with opened(tmp_path, handle, 4) as store:
        put(store, [1, 2])
        with monkeypatch.context() as patch:

            def fail(*_: object) -> None:
                raise OSError(errno.EIO, "the drive failed")

            patch.setattr(Table, method, fail)
            assert put(store, [3, 4]) == [False, False]
            store.remove(["1"])
            assert loaded(store, [1, 2]) == [False, True]
        assert put(store, [5, 6, 7]) == [True] * 3
        assert loaded(store, [2, 5, 6, 7]) == [True] * 4
        assert store.stats.refused == 2
    assert caplog.text.count("its table cannot be written") == 1
    with opened(tmp_path, handle, 4) as store:
        assert loaded(store, [2, 5, 6, 7]) == [True] * 4


def test_everywhere_in_a_batch_that_is_begun(tmp_path: Path, handle: AioHandle) -> None:
    rooms = [torch.zeros(BLOCK, dtype=torch.uint8) for _ in range(2)]
    with opened(tmp_path, handle) as store:
        put(store, [1, 2])
        for where in everywhere(
            lambda: store.begin_load(["1", "2"], rooms, lambda found: None), step=2
        ):
            store.drain()
            assert loaded(store, [1, 2]) == [True, True], where


def test_a_reader_is_interrupted(tmp_path: Path, handle: AioHandle) -> None:
    with opened(tmp_path, handle) as store:
        put(store, [1])
        with opened(tmp_path, handle, writer=False) as reader:
            assert isinstance(reader, BlockStore)

            def work() -> None:
                store.clear()
                put(store, [1])
                assert reader.contains(["1"]) == [True]
                assert loaded(reader, [1]) == [True]

            for where in at_places(work, 80):
                put(store, [1])
                assert loaded(reader, [1]) == [True], where

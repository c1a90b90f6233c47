"""How blocks get to their slots: by whom, in how many operations, and what of it may fail."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from blocks.test_store import opened
from support import PATIENCE_S, HeldEngine, spin_until, thread
from torch.overrides import TorchFunctionMode

from nvmeio import AioHandle, buffers
from nvmeio._core.core import totals
from nvmeio._kv_blocks import transfers
from nvmeio._kv_blocks.store import BlockStore
from nvmeio._kv_blocks.table import Table
from nvmeio._threads.owner import OwnerThread
from nvmeio.errors import ClosedError
from nvmeio.testing import FakeEngine

PAGE = 4096


def rows(number: int, nbytes: int = PAGE, seed: int = 0) -> torch.Tensor:
    made = buffers.empty_aligned((number, nbytes), dtype=torch.uint8)
    return made.random_(generator=torch.Generator().manual_seed(seed))


def names(number: int) -> list[str]:
    return [str(n) for n in range(number)]


def in_a_thread(work: Callable[[], Any]) -> Any:
    with thread(work) as values:
        pass
    return values[0]


class Counting(FakeEngine):
    """Notes what the drive is asked for, and fails what covers a page of these."""

    def __init__(self) -> None:
        self.bad: set[int] = set()
        self.asked: list[tuple[str, int, int]] = []
        super().__init__(fail=self._note)

    def _note(self, kind: str, offset: int, nbytes: int) -> int:
        self.asked.append((kind, offset // PAGE, nbytes // PAGE))
        slots = range(offset // PAGE, -(-(offset + nbytes) // PAGE))
        return errno.EIO if self.bad.intersection(slots) else 0


@pytest.fixture
def engine() -> Counting:
    return Counting()


@pytest.fixture
def store(tmp_path: Path, engine: Counting) -> Iterator[BlockStore]:
    with (
        AioHandle(engine=engine) as handle,
        BlockStore(tmp_path, "kv", PAGE, 64 * PAGE, handle=handle) as made,
    ):
        yield made


# Runs


def test_blocks_in_a_row_are_one_piece(store: BlockStore, engine: Counting) -> None:
    given, found = rows(16), rows(16, seed=1)
    assert store.store(names(16), list(given)) == [True] * 16
    assert store.load(names(16), list(found)) == [True] * 16
    assert found.equal(given)
    assert engine.asked == [("pwrite", 0, 16), ("pread", 0, 16)]


def test_blocks_that_lie_here_and_there_are_pieces_of_their_own(
    store: BlockStore, engine: Counting
) -> None:
    given, found = rows(6), rows(6)
    store.store(names(6), list(given))
    engine.asked.clear()
    order = [4, 5, 1, 0, 3]
    assert store.load([str(n) for n in order], [found[n] for n in order]) == [True] * 5
    assert sorted(engine.asked) == [("pread", n, 1 + (n == 4)) for n in (0, 1, 3, 4)]
    assert all(found[n].equal(given[n]) for n in order)


def test_tensors_of_their_own_are_never_joined(store: BlockStore, engine: Counting) -> None:
    """Two storages may happen to lie one behind the other."""
    given = [rows(1)[0] for _ in range(3)]
    store.store(names(3), given)
    assert len(engine.asked) == 3


@pytest.mark.parametrize("verb", ["store", "load"])
def test_of_a_run_that_fails_only_what_failed_is_missing(
    verb: str, store: BlockStore, engine: Counting, caplog: Any
) -> None:
    given, found = rows(8), rows(8)
    if verb == "store":
        engine.bad = {5}
        assert store.store(names(8), list(given)) == [n != 5 for n in range(8)]
        engine.bad = set()
    else:
        store.store(names(8), list(given))
        engine.bad = {5}
    assert store.load(names(8), list(found)) == [n != 5 for n in range(8)]
    assert all(found[n].equal(given[n]) for n in range(8) if n != 5)
    told = "1 blocks are not stored" if verb == "store" else "1 blocks are dropped"
    assert told in caplog.text


# In place


@pytest.fixture
def own(tmp_path: Path, direct_path: Path) -> Iterator[BlockStore]:
    """A store with a handle of its own."""
    with BlockStore(tmp_path, "kv", PAGE, 600 * PAGE) as made:
        yield made


@pytest.fixture
def operations(own: BlockStore) -> Callable[[], int]:
    """How many were made since the store was opened."""

    def count() -> int:
        return totals()[0].operations

    before = count()
    return lambda: count() - before


@pytest.mark.parametrize("run", [in_a_thread, lambda work: work()], ids=["thread", "main"])
@pytest.mark.parametrize("number", [1, 16])
def test_a_few_slots_in_a_row_need_no_operation(
    number: int,
    run: Callable[[Callable[[], Any]], Any],
    own: BlockStore,
    operations: Callable[[], int],
) -> None:
    given = rows(number)
    found = [torch.zeros(PAGE + 1, dtype=torch.uint8)[1:] for _ in range(number)]  # not aligned
    assert run(lambda: own.store(names(number), list(given))) == [True] * number
    assert run(lambda: own.load(names(number), found)) == [True] * number
    assert all(one.equal(other) for one, other in zip(given, found, strict=True))
    assert found[0]._version >= 1  # autograd is told, as of any transfer
    assert operations() == 0


def test_a_block_of_any_length_is_moved_in_place(
    own: BlockStore, operations: Callable[[], int]
) -> None:
    for nbytes in (1, 77, PAGE - 1):
        given, found = rows(1, nbytes)[0], torch.zeros(nbytes, dtype=torch.uint8)
        assert own.store([str(nbytes)], [given]) == [True]
        assert own.load([str(nbytes)], [found]) == [True]
        assert found.equal(given)
    assert operations() == 0


def test_memory_that_is_not_aligned_is_copied_by_whoever_asks(
    own: BlockStore, operations: Callable[[], int]
) -> None:
    """torch's copy is one of several threads from 32 KiB on: with no core idle it took 15 ms, for
    what takes 10 us."""
    given = [torch.full((PAGE + 1,), n, dtype=torch.uint8)[1:] for n in range(3)]
    given[1] = rows(1)[0]  # which is moved where it lies
    found = [torch.zeros(PAGE + 1, dtype=torch.uint8)[1:], rows(1, seed=1)[0], rows(1, seed=2)[0]]
    asked: list[str] = []

    class Noting(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            asked.append(getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))

    def work() -> bool:
        with Noting():
            return all(own.store(names(3), given)) and all(own.load(names(3), found))

    assert in_a_thread(work)
    assert all(one.equal(other) for one, other in zip(given, found, strict=True))
    assert "data_ptr" in asked
    assert not {"copy_", "clone", "__setitem__"}.intersection(asked)
    assert operations() == 0


def test_long_runs_and_scattered_blocks_are_the_engines(
    own: BlockStore, operations: Callable[[], int]
) -> None:
    number = transfers.IN_PLACE_BYTES // PAGE + 1
    given, found = rows(number), rows(number)
    assert all(own.store(names(number), list(given)))
    assert operations() > 0
    before = operations()
    assert own.load(["0", "7"], [found[0], found[7]]) == [True, True]
    assert operations() > before
    assert found[0].equal(given[0])
    assert found[7].equal(given[7])


def test_what_fails_in_place_is_told_by_the_engine(
    own: BlockStore, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    given, found = rows(1), rows(1)
    own.store(["0"], [given[0]])
    asked: list[int] = []

    def refuse(fd: int, views: Any, offset: int) -> int:
        asked.append(offset)
        raise OSError(errno.EINVAL, "no direct I/O after all")

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", refuse)
        assert own.load(["0"], [found[0]]) == [True]
    assert asked == [0]
    assert found.equal(given)
    os.truncate(own.path, 0)
    assert own.load(["0"], [found[0]]) == [False]
    assert "1 blocks are dropped" in caplog.text


# Whose turn it is


def test_closing_waits_for_what_a_callers_thread_reads(tmp_path: Path) -> None:
    """And who waits for a turn behind it is told that the store is closed."""
    engine = HeldEngine()
    with AioHandle(engine=engine) as handle:
        store = opened(tmp_path, handle)
        engine.gate.set()
        room = torch.ones(100, dtype=torch.uint8)
        store.store(["1"], [room])
        engine.gate.clear()
        engine.begun = 0
        answers: list[Any] = []

        def load() -> None:
            try:
                answers.append(store.load(["1"], [torch.zeros(100, dtype=torch.uint8)]))
            except ClosedError as refused:
                answers.append(type(refused))

        first = threading.Thread(target=load)
        first.start()
        engine.wait_until_begun()
        second = threading.Thread(target=load)
        second.start()
        closing = threading.Thread(target=store.close)
        closing.start()
        spin_until(lambda: "closed" in repr(store))
        assert [True] not in answers
        engine.gate.set()
        for each in (first, second, closing):
            each.join(PATIENCE_S)
            assert not each.is_alive()
        assert [True] in answers
        assert ClosedError in answers


def test_draining_asks_no_thread_that_was_given_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That was two switches of thread for nothing, each of them as long as a small read."""
    with AioHandle(engine="threads") as handle, opened(tmp_path, handle) as store:
        asked: list[object] = []
        real = OwnerThread.call

        def call(owner: OwnerThread, work: Any, *args: Any, **how: Any) -> Any:
            asked.append(work)
            return real(owner, work, *args, **how)

        monkeypatch.setattr(OwnerThread, "call", call)
        store.drain()
        in_a_thread(lambda: store.load(["1"], [torch.zeros(100, dtype=torch.uint8)]))
        store.drain()
        assert not asked
        monkeypatch.undo()


# The table


def test_a_batch_is_announced_once(
    store: BlockStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    announced: list[Table] = []
    announce = Table.announce

    def note(table: Table) -> None:
        announced.append(table)
        announce(table)

    monkeypatch.setattr(Table, "announce", note)
    store.store(names(64), list(rows(64)))
    assert len(announced) == 1  # the slots were empty
    store.store(["new", "newer"], list(rows(2)))
    assert len(announced) == 3  # two that held something were emptied first
    with BlockStore(tmp_path, "kv", PAGE, 64 * PAGE, writer=False) as reader:
        assert reader.contains(["63", "62", "0", "new", "newer"]) == [
            False,
            False,
            True,
            True,
            True,
        ]
        store.clear()
        assert len(announced) == 4
        assert reader.contains(["2", "new"]) == [False, False]


def test_records_that_were_not_announced_keep_their_order(tmp_path: Path) -> None:
    """A process that was killed between its records and the header left numbers behind that the
    next one gave away again; then it was left to chance which of two records counted."""
    path = tmp_path / "kv.table"

    def table(new: bool) -> Table:
        return Table(os.open(path, os.O_RDWR | os.O_CREAT), PAGE, 8, new=new)

    killed = table(True)
    killed.put(0, b"a" * 32, 1, 0)
    killed.announce()
    killed.put(5, b"a" * 32, 2, 0)
    killed.close()
    following = table(False)
    following.put(2, b"a" * 32, 3, 0)
    following.announce()
    found = [(slot, record.sequence) for slot, record in following.records() if record]
    assert found == [(0, 1), (5, 2), (2, 3)]
    following.close()

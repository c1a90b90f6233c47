"""Names kept whole, what is told of blocks that come and go, kinds, and pins."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from blocks.test_sizes import PAGE, block
from support import PATIENCE_S, spin_until, thread

from nvmeio import AioHandle
from nvmeio._kv_blocks.catalog import Change
from nvmeio._kv_blocks.store import BlockStore
from nvmeio._kv_blocks.whole_names import WholeNames
from nvmeio.errors import ClosedError

SLOTS = 8


@pytest.fixture(scope="module")
def handle() -> Iterator[AioHandle]:
    with AioHandle(engine="threads") as made:
        yield made


class Heard:
    """Notes what a store tells."""

    def __init__(self) -> None:
        self.changes: list[Change] = []

    def __call__(self, changes: list[Change]) -> None:
        self.changes += changes

    def take(self) -> list[tuple[str, bool]]:
        changes, self.changes = self.changes, []
        return [(change.name.decode(), change.is_stored) for change in changes]


def opened(directory: Path, handle: AioHandle, **options: Any) -> BlockStore:
    options = {"name_bytes": 30, **options}
    return BlockStore(directory, "kv", PAGE, SLOTS * PAGE, handle=handle, **options)


def put(store: BlockStore, *names: str, kind: int = 0, seed: int = 1) -> list[bool]:
    return store.store(names, [block(seed, PAGE) for _ in names], [kind] * len(names))


def test_what_comes_and_goes_is_told_in_its_order(tmp_path: Path, handle: AioHandle) -> None:
    heard = Heard()
    with opened(tmp_path, handle, on_change=heard) as store:
        put(store, "a", "b")
        assert heard.take() == [("b", True), ("a", True)]
        put(store, "a")
        assert heard.take() == []
        store.remove(["a", "none"])
        assert heard.take() == [("a", False)]
        put(store, *(str(n) for n in range(SLOTS)))
        assert heard.take()[0] == ("b", False)
        path = store.path
        with path.open("r+b") as file:  # a damaged block is told of as well
            file.write(bytes(SLOTS * PAGE))
        assert store.load(["0"], [torch.zeros(PAGE, dtype=torch.uint8)]) == [False]
        assert heard.take() == [("0", False)]
        store.clear()
        assert len(heard.take()) == SLOTS - 1


def test_names_are_listed_by_pages(tmp_path: Path, handle: AioHandle) -> None:
    names = [f"name {n}" for n in range(SLOTS)]
    with opened(tmp_path, handle) as store:
        put(store, *names)
    with opened(tmp_path, handle) as store:
        at: int | None = 0
        found, pages = [], 0
        while at is not None:
            page, at = store.listed(at, 3)
            found += page
            pages += 1
        assert sorted(each.name.decode() for each in found) == names
        assert {each.nbytes for each in found} == {PAGE}
        assert pages == 3
        with pytest.raises(ValueError, match="list 1 block or more"):
            store.listed(0, 0)
        with pytest.raises(ValueError, match="a name has 31 bytes; up to 30 are kept"):
            put(store, "x" * 31)
        store.new_generation()
        assert store.listed() == ([], None)
    with opened(tmp_path, handle, identity="others") as store:
        assert store.listed() == ([], None)


def test_blocks_that_were_there_before_are_told_of(tmp_path: Path, handle: AioHandle) -> None:
    with opened(tmp_path, handle) as store:
        put(store, "m1 a", "m1 b", "m2 a")
    heard = Heard()
    with opened(tmp_path, handle, on_change=heard) as store:
        store.tell_of(b"m1 ")
        assert sorted(heard.take()) == [("m1 a", True), ("m1 b", True)]


def test_a_damaged_name_is_not_listed(tmp_path: Path, handle: AioHandle) -> None:
    with opened(tmp_path, handle) as store:
        put(store, "a", "b")
    names = tmp_path / "nvmeio-blocks" / "kv.names"
    bytes_before = names.read_bytes()
    names.write_bytes(bytes_before.replace(b"a", b"x"))
    with opened(tmp_path, handle) as store:
        assert [each.name for each in store.listed()[0]] == [b"b"]
        assert store.contains(["a", "b"]) == [True, True]
    names.unlink()
    with opened(tmp_path, handle) as store:
        assert store.listed() == ([], None)


def test_a_block_whose_name_cannot_be_written_is_not_stored(
    tmp_path: Path, handle: AioHandle, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    def full(names: WholeNames, slot: int, name: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    heard = Heard()
    with opened(tmp_path, handle, on_change=heard) as store:
        with monkeypatch.context() as patch:
            patch.setattr(WholeNames, "put", full)
            assert put(store, "a") == [False]
        assert heard.take() == []
        assert put(store, "a") == [True]
        assert heard.take() == [("a", True)]
    assert "No space left" in caplog.text


def test_whoever_is_told_may_call_the_store(tmp_path: Path, handle: AioHandle) -> None:
    heard: list[tuple[bytes, bool]] = []

    def changed(changes: list[Change]) -> None:
        heard.extend((change.name, change.is_stored) for change in changes)
        if changes[0].is_stored:
            store.remove([changes[0].name])

    with opened(tmp_path, handle, on_change=changed) as store:
        put(store, "a")
        assert heard == [(b"a", True), (b"a", False)]
        assert store.contains(["a"]) == [False]


def test_an_error_of_whoever_is_told_harms_nothing(
    tmp_path: Path, handle: AioHandle, caplog: Any
) -> None:
    def changed(changes: list[Change]) -> None:
        raise RuntimeError("no listener")

    with opened(tmp_path, handle, on_change=changed) as store:
        assert put(store, "a") == [True]
        assert store.load(["a"], [torch.zeros(PAGE, dtype=torch.uint8)]) == [True]
    assert "no listener" in caplog.text


def test_a_slow_listener_holds_up_no_load(tmp_path: Path, handle: AioHandle) -> None:
    """What the load has to tell, the thread that is at it tells next."""
    begun, go_on, heard = threading.Event(), threading.Event(), Heard()
    go_on.set()

    def changed(changes: list[Change]) -> None:
        begun.set()
        assert go_on.wait(PATIENCE_S)
        heard(changes)

    room = torch.zeros(PAGE, dtype=torch.uint8)
    with opened(tmp_path, handle, on_change=changed) as store:
        put(store, "damaged")
        with store.path.open("r+b") as file:
            file.write(bytes(PAGE))
        begun.clear()
        go_on.clear()
        with thread(lambda: put(store, "b")):
            try:
                assert begun.wait(PATIENCE_S)
                assert store.load(["damaged"], [room]) == [False]
                assert len(heard.changes) == 1
            finally:
                go_on.set()
        spin_until(lambda: len(heard.changes) == 3)
        assert heard.take()[1:] == [("b", True), ("damaged", False)]


def test_changes_are_for_a_writer_that_keeps_names(tmp_path: Path, handle: AioHandle) -> None:
    with pytest.raises(ValueError, match="give name_bytes"):
        opened(tmp_path, handle, name_bytes=0, on_change=print)


def test_a_block_of_another_time_does_not_take_a_name_away(
    tmp_path: Path, handle: AioHandle
) -> None:
    """It made room, and its name was told as gone while a block of that name was there."""
    heard = Heard()
    with opened(tmp_path, handle, on_change=heard) as store:
        put(store, "a", "b")
        store.new_generation()
        put(store, "a")
        heard.take()
        put(store, *(str(n) for n in range(SLOTS - 3)))
        heard.take()
        put(store, "x", "y")  # in the place of both of the generation before
        assert heard.take() == [("b", False), ("y", True), ("x", True)]
        assert store.contains(["a"]) == [True]
        put(store, "z")
        assert heard.take() == [("a", False), ("z", True)]


def test_blocks_of_other_weights_do_not_take_names_away(tmp_path: Path, handle: AioHandle) -> None:
    heard = Heard()
    with opened(tmp_path, handle, identity="one") as store:
        put(store, "a")
    with opened(tmp_path, handle, identity="two", on_change=heard) as store:
        put(store, "a", *(str(n) for n in range(SLOTS - 2)))
        heard.take()
        put(store, "x")
        assert heard.take() == [("x", True)]
        store.remove(["a"])
        assert heard.take() == [("a", False)]


@pytest.mark.parametrize("name_bytes", [0, 20])
def test_names_that_were_not_kept_for_a_while_are_not_told(
    name_bytes: int, tmp_path: Path, handle: AioHandle
) -> None:
    """What a slot held before was told as gone; and of slots that had none, a name of no bytes."""
    with opened(tmp_path, handle) as store:
        put(store, "a")
    with opened(tmp_path, handle, name_bytes=name_bytes) as store:
        store.clear()
        put(store, "b", "c")  # "c" where "a" was
    heard = Heard()
    with opened(tmp_path, handle, on_change=heard) as store:
        put(store, "a", *(str(n) for n in range(SLOTS - 3)))
        heard.take()
        store.remove(["b", "c"])
        assert heard.take() == []
        assert store.contains(["a", "b", "c"]) == [True, False, False]


# Kinds


def test_a_block_of_another_kind_is_replaced_and_not_loaded(
    tmp_path: Path, handle: AioHandle
) -> None:
    heard, room = Heard(), torch.zeros(PAGE, dtype=torch.uint8)
    with opened(tmp_path, handle, on_change=heard) as store:
        assert put(store, "a", kind=1, seed=1) == [True]
        assert store.load(["a"], [room], [2]) == [False]
        assert store.load(["a"], [room]) == [False]
        assert store.load(["a"], [room], [1]) == [True]
        assert put(store, "a", kind=1, seed=2) == [True]
        assert store.load(["a"], [room], [1]) == [True]
        assert room.equal(block(1, PAGE))
        heard.take()
        assert put(store, "a", kind=2**64 - 1, seed=2) == [True]
        assert heard.take() == [("a", False), ("a", True)]
        assert len(store) == 1
    with opened(tmp_path, handle) as store:
        assert store.load(["a"], [room], [1]) == [False]
        assert store.load(["a"], [room], [2**64 - 1]) == [True]
        assert room.equal(block(2, PAGE))
        with pytest.raises(ValueError, match="each block has one kind: 2 are given for 1"):
            store.load(["a"], [room], [1, 1])


# Pins


def test_a_pinned_block_never_makes_room(tmp_path: Path, handle: AioHandle) -> None:
    with opened(tmp_path, handle) as store:
        put(store, "a", "b")
        assert store.pin(["a", "none", "a"]) == [True, False, True]
        assert store.usage.pinned == 1
        for n in range(3 * SLOTS):
            assert put(store, str(n)) == [True]
        assert store.contains(["a", "b"]) == [True, False]
        store.remove(["a"], spare_pinned=True)
        store.unpin(["a", "none"])
        store.remove(["a"], spare_pinned=True)
        assert store.contains(["a"]) == [True]
        store.unpin(["a"])
        store.unpin(["a"])
        assert store.usage.pinned == 0
        for n in range(SLOTS):
            put(store, f"later {n}")
        assert store.contains(["a"]) == [False]
    store.unpin(["a"])


def test_nothing_is_stored_when_all_is_pinned(tmp_path: Path, handle: AioHandle) -> None:
    names = [str(n) for n in range(SLOTS)]
    with opened(tmp_path, handle) as store:
        assert all(put(store, *names))
        assert all(store.pin(names))
        assert put(store, "one more") == [False]
        assert store.contains(names) == [True] * SLOTS
        store.unpin(names[:1])
        assert put(store, "one more") == [True]
    with opened(tmp_path, handle) as store:  # pins ended with their owner
        assert put(store, *(f"new {n}" for n in range(SLOTS))) == [True] * SLOTS


def test_a_pin_is_of_the_block_it_was_taken_for(tmp_path: Path, handle: AioHandle) -> None:
    """Removed and stored anew, it is another block, which its owner's `unpin` does not free."""
    with opened(tmp_path, handle) as store:
        put(store, "a")
        assert store.pin(["a"]) == [True]
        store.remove(["a"])  # by whoever may: a damaged one goes so as well
        assert put(store, "a", seed=2) == [True]
        assert store.pin(["a"]) == [True]
        store.unpin(["a"])
        for n in range(2 * SLOTS):
            put(store, str(n))
        assert store._catalog.index.limit == SLOTS
        store.unpin(["a"])
        assert store.usage.pinned == 0
        store.clear()
        assert sum(count for _, count in store._catalog.index._free) == SLOTS


def test_a_new_generation_ends_pins(tmp_path: Path, handle: AioHandle) -> None:
    """Their names are others then, so nobody could end them."""
    with opened(tmp_path, handle) as store:
        put(store, "a")
        assert store.pin(["a"]) == [True]
        store.new_generation()
        spin_until(lambda: store.usage.pinned == 0)
        assert put(store, *(str(n) for n in range(SLOTS))) == [True] * SLOTS


def test_a_reader_has_no_pins(tmp_path: Path, handle: AioHandle) -> None:
    with (
        opened(tmp_path, handle),
        opened(tmp_path, handle, writer=False) as reader,
        pytest.raises(ClosedError, match="reading only"),
    ):
        reader.pin(["a"])

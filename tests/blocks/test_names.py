"""A store whose blocks are of something: another finds nothing, and nothing has to be removed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support import random_tensor

from nvmeio import AioHandle
from nvmeio._kv_blocks.store import BlockStore

BLOCK = 4096
NAMES = ["a", "b", "c"]


@pytest.fixture(scope="module")
def handle() -> Iterator[AioHandle]:
    with AioHandle(engine="threads") as made:
        yield made


def opened(
    directory: Path, handle: AioHandle, identity: str | None, *, writer: bool = True
) -> BlockStore:
    given = {"writer": writer, "handle": handle, "identity": identity}
    return BlockStore(directory, "kv", BLOCK, 8 * BLOCK, **given)


def put(store: BlockStore, seed: int = 0) -> None:
    assert store.store(NAMES, [random_tensor(BLOCK, seed + n) for n in range(3)]) == [True] * 3


def loaded(store: BlockStore, seed: int = 0) -> list[bool]:
    rooms = [torch.zeros(BLOCK, dtype=torch.uint8) for _ in NAMES]
    found = store.load(NAMES, rooms)
    for number, (room, there) in enumerate(zip(rooms, found, strict=True)):
        assert not there or room.equal(random_tensor(BLOCK, seed + number))
    assert store.contains(NAMES) == found
    return found


def test_blocks_of_something_else_are_not_found(
    tmp_path: Path, handle: AioHandle, caplog: pytest.LogCaptureFixture
) -> None:
    """With other weights at the same path the blocks of those before were found."""
    with opened(tmp_path, handle, "one") as store:
        put(store)
    with opened(tmp_path, handle, "one") as store:
        assert loaded(store) == [True] * 3
    assert not caplog.records
    with opened(tmp_path, handle, "other") as store:
        assert loaded(store) == [False] * 3
        put(store, 7)
        assert loaded(store, 7) == [True] * 3
    (said,) = caplog.messages
    assert "its 3 blocks were stored with other weights" in said
    caplog.clear()
    with opened(tmp_path, handle, "other") as store:
        assert loaded(store, 7) == [True] * 3
    assert not caplog.records
    with opened(tmp_path, handle, "one") as store:  # as much of them as has room is still there
        assert loaded(store) == [True] * 3


def test_blocks_without_identity_are_found_until_the_store_is_closed(
    tmp_path: Path, handle: AioHandle
) -> None:
    with opened(tmp_path, handle, None) as store:
        put(store)
        assert loaded(store) == [True] * 3
    for identity in (None, "", "one"):
        with opened(tmp_path, handle, identity) as store:
            assert loaded(store) == [False] * 3


def test_a_new_generation_finds_nothing_of_the_one_before(
    tmp_path: Path, handle: AioHandle
) -> None:
    for identity in ("one", "", None):
        with opened(tmp_path / f"{identity}", handle, identity) as store:
            put(store)
            for generation in (1, 2):
                store.new_generation()
                assert store.generation == generation
                assert loaded(store) == [False] * 3
            put(store, 5)
            assert loaded(store, 5) == [True] * 3
            store.touch(NAMES)
            store.remove(NAMES[:1])
            assert loaded(store, 5) == [False, True, True]
        with opened(tmp_path / f"{identity}", handle, identity) as store:
            assert loaded(store) == [identity is not None] * 3  # of the generation before all


def test_blocks_that_are_on_their_way_are_of_the_generation_that_they_were_given_to(
    tmp_path: Path, handle: AioHandle
) -> None:
    with opened(tmp_path, handle, "one") as store:
        answers: list[list[bool]] = []
        store.begin_store(NAMES, [random_tensor(BLOCK, n) for n in range(3)], answers.append)
        store.new_generation()
        store.drain()
        assert answers == [[True] * 3]
        assert loaded(store) == [False] * 3
    with opened(tmp_path, handle, "one") as store:
        assert loaded(store) == [True] * 3


@pytest.mark.parametrize("identity", ["one", None])
def test_readers_follow_their_writers_generations(
    identity: str | None, tmp_path: Path, handle: AioHandle
) -> None:
    with opened(tmp_path, handle, identity) as store:
        put(store)
        with opened(tmp_path, handle, identity, writer=False) as reader:
            assert loaded(reader) == [True] * 3
            reader.new_generation()
            assert loaded(reader) == [False] * 3
            store.new_generation()
            put(store, 9)
            assert loaded(reader, 9) == [True] * 3
            store.close()
            with opened(tmp_path, handle, identity) as again:  # the next writer, as a server's
                again.new_generation()
                assert loaded(reader, 9) == [False] * 3
                put(again, 4)
                assert loaded(reader, 4) == [True] * 3
        with opened(tmp_path, handle, "other", writer=False) as other:
            assert loaded(other) == [False] * 3

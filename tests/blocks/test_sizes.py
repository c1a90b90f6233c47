"""Blocks of several sizes in one store: they take slots in a row, and never those of another."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from blocks.test_moving import Counting
from hypothesis import given, settings
from hypothesis import strategies as st
from support import random_tensor

from nvmeio import AioHandle, buffers
from nvmeio._kv_blocks import catalog
from nvmeio._kv_blocks.free_slots import FreeSlots
from nvmeio._kv_blocks.store import BlockStore
from nvmeio._kv_blocks.table import HEADER_BYTES, RECORD_BYTES

PAGE = 4096
SLOTS = 24
LARGEST = 5 * PAGE


@pytest.fixture(scope="module")
def handle() -> Iterator[AioHandle]:
    with AioHandle(engine="threads") as made:
        yield made


def opened(directory: Path, handle: AioHandle | None, **options: Any) -> BlockStore:
    options = {"largest_bytes": LARGEST, **options}
    return BlockStore(directory, "kv", PAGE, SLOTS * PAGE, handle=handle, **options)


def block(seed: int, nbytes: int) -> torch.Tensor:
    return random_tensor(nbytes, seed)


def is_right(store: BlockStore, seed: int, nbytes: int) -> bool:
    """Whether a block is there; if so, it has the bytes that were stored."""
    room = torch.zeros(nbytes, dtype=torch.uint8)
    (found,) = store.load([str(seed)], [room])
    assert not found or room.equal(block(seed, nbytes))
    return found


def test_blocks_of_several_sizes_come_back_after_a_restart(tmp_path: Path) -> None:
    sizes = [PAGE, LARGEST, 1, 2 * PAGE + 7, 3 * PAGE]
    with opened(tmp_path, None) as store:
        blocks = [block(seed, nbytes) for seed, nbytes in enumerate(sizes)]
        assert store.store([str(seed) for seed in range(5)], blocks) == [True] * 5
        assert all(is_right(store, seed, nbytes) for seed, nbytes in enumerate(sizes))
        assert store.usage[:2] == (sum(sizes), SLOTS * PAGE)
    with opened(tmp_path, None) as store:
        assert all(is_right(store, seed, nbytes) for seed, nbytes in enumerate(sizes))
        assert store.usage.nbytes == sum(sizes)


def test_the_oldest_makes_room_with_those_behind_it(tmp_path: Path, handle: AioHandle) -> None:
    with opened(tmp_path, handle) as store:
        for seed in range(SLOTS):
            store.store([str(seed)], [block(seed, PAGE)])
        store.touch(["0", "1"])
        assert store.store(["large"], [block(99, 3 * PAGE)]) == [True]
        there = store.contains([str(seed) for seed in range(SLOTS)])
        assert there == [seed not in (2, 3, 4) for seed in range(SLOTS)]
        assert store.stats.evicted == 3
        # What is left of a larger block's slots is free.
        store.touch([str(seed) for seed in range(SLOTS)])
        assert store.store(["small"], [block(7, PAGE)]) == [True]
        assert store.contains(["large"]) == [False]
        assert store.store(["also"], [block(8, 2 * PAGE)]) == [True]
        assert (store.stats.evicted, len(store)) == (4, SLOTS - 3 + 2)


def test_sizes_that_cannot_be_are_refused(tmp_path: Path, handle: AioHandle) -> None:
    with pytest.raises(ValueError, match="largest_bytes must be block_bytes"):
        opened(tmp_path, handle, largest_bytes=1)
    with pytest.raises(ValueError, match=f"{32 * PAGE} or more, for one block"):
        opened(tmp_path, handle, largest_bytes=32 * PAGE)
    with (
        opened(tmp_path, handle) as store,
        pytest.raises(ValueError, match=f"1 to {LARGEST} are possible"),
    ):
        store.store(["1"], [block(1, LARGEST + 1)])


def test_large_blocks_in_a_row_are_one_piece(tmp_path: Path) -> None:
    engine = Counting()
    rows = buffers.empty_aligned((4, 2 * PAGE), dtype=torch.uint8).random_()
    found = buffers.empty_aligned((4, 2 * PAGE), dtype=torch.uint8)
    names = list("abcd")
    with AioHandle(engine=engine) as counted, opened(tmp_path, counted) as store:
        assert store.store(names, list(rows)) == [True] * 4
        assert store.load(names, list(found)) == [True] * 4
    assert found.equal(rows)
    assert engine.asked == [("pwrite", 0, 8), ("pread", 0, 8)]


def test_memory_that_is_aligned_to_64_bytes_is_staged(tmp_path: Path) -> None:
    """As a server's pool may be: direct I/O takes whole pages only."""
    pool = buffers.empty_aligned(16 * PAGE, dtype=torch.uint8).random_()
    given = [pool[64 + at * 3 * PAGE :][: 3 * PAGE] for at in range(4)]
    rooms = [torch.zeros(3 * PAGE + 64, dtype=torch.uint8)[64:] for _ in given]
    with opened(tmp_path, None) as store:
        assert store.store(list("abcd"), given) == [True] * 4
        assert store.load(list("abcd"), rooms) == [True] * 4
        assert all(room.equal(block) for room, block in zip(rooms, given, strict=True))


@pytest.mark.parametrize("newer", [0, 1])
def test_of_records_that_overlap_the_later_one_counts(
    newer: int, tmp_path: Path, handle: AioHandle, caplog: Any
) -> None:
    """A crash of the machine may leave records of different moments."""
    with opened(tmp_path, handle) as store:
        store.store(["0"], [block(0, 3 * PAGE)])
        where = store._catalog.index.where
        small = (store._digests(["1"])[0], *where[store._digests(["0"])[0]][1:])
        table = store._catalog._table
        if not newer:
            table.put(1, small[0], PAGE, 5)
            table.put(0, store._digests(["0"])[0], *where[store._digests(["0"])[0]][1:3])
        else:
            table.put(1, small[0], PAGE, 5)
    with opened(tmp_path, handle) as store:
        assert store.contains(["0", "1"]) == [not newer, bool(newer)]
        assert store.stats.damaged == 1
        assert store.store(["x"], [block(9, LARGEST)]) == [True]
    assert "records of its table are damaged" in caplog.text
    with opened(tmp_path, handle) as store:
        assert store.contains(["0", "1", "x"]) == [not newer, bool(newer), True]


def test_a_record_within_a_block_is_emptied(tmp_path: Path, handle: AioHandle) -> None:
    """Found after a restart, it would be of bytes that are others now."""
    with opened(tmp_path, handle) as store:
        for seed in range(SLOTS):
            store.store([str(seed)], [block(seed, PAGE)])
        store.store(["large"], [block(50, LARGEST)])
        table = (tmp_path / "nvmeio-blocks" / "kv.table").read_bytes()
    records = [table[HEADER_BYTES + slot * RECORD_BYTES :][:RECORD_BYTES] for slot in range(SLOTS)]
    assert sum(any(record[40:48]) for record in records) == SLOTS - 5 + 1
    with opened(tmp_path, handle) as store:
        assert len(store) == SLOTS - 5 + 1


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["store", "remove", "pin", "unpin"]), st.integers(0, 30)),
        max_size=60,
    )
)
def test_no_block_ever_has_the_bytes_of_another(
    steps: list[tuple[str, int]], tmp_path_factory: Any, handle: AioHandle
) -> None:
    directory = tmp_path_factory.mktemp("sizes")
    pinned: list[int] = []
    there: dict[bytes, int] = {}

    wrong: list[catalog.Change] = []

    def changed(changes: list[catalog.Change]) -> None:
        for change in changes:
            if change.is_stored:
                wrong.extend([change] if change.name in there else [])
                there[change.name] = change.nbytes
            elif there.pop(change.name, None) != change.nbytes:
                wrong.append(change)

    def nbytes(seed: int) -> int:
        return 1 + (seed * 1777) % LARGEST

    options = {"name_bytes": 8, "on_change": changed}
    with opened(directory, handle, **options) as store:
        for what, seed in steps:
            if what == "store":
                store.store([str(seed)], [block(seed, nbytes(seed))])
            elif what == "remove":
                store.remove([str(seed)], spare_pinned=True)
            elif what == "pin":
                if store.pin([str(seed)])[0]:
                    pinned.append(seed)
            else:
                store.unpin([str(seed)])
                if seed in pinned:
                    pinned.remove(seed)
            assert store.contains([str(seed) for seed in pinned]) == [True] * len(pinned)
        for seed in range(31):
            assert is_right(store, seed, nbytes(seed)) == (str(seed).encode() in there)
        listed, following = store.listed(most=1000)
        assert following is None
        assert dict(listed) == there
        assert store.usage.nbytes == sum(there.values())
    assert wrong == []
    with opened(directory, handle, name_bytes=8) as store:
        assert dict(store.listed(most=1000)[0]) == there
        for seed in range(31):
            assert is_right(store, seed, nbytes(seed)) == (str(seed).encode() in there)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 6)), max_size=40))
def test_free_slots_are_given_once(steps: list[tuple[bool, int]]) -> None:
    free = FreeSlots()
    free.add(0, 40)
    taken: list[tuple[int, int]] = []
    for takes, count in steps:
        if takes:
            first = free.take(count)
            if first is not None:
                taken.append((first, count))
        elif taken:
            free.add(*taken.pop(count % len(taken)))
        used = sorted([*taken, *free])
        assert sum(count for _, count in used) == 40
        assert all(a + n == b for (a, n), (b, _) in itertools.pairwise(used))
    runs = sorted(free)
    assert all(a + n < b for (a, n), (b, _) in itertools.pairwise(runs))


def test_the_files_are_private_and_within_their_size(tmp_path: Path, handle: AioHandle) -> None:
    with opened(tmp_path, handle, name_bytes=62) as store:
        for seed in range(40):
            store.store([str(seed)], [block(seed, 1 + seed * 400)])
    files = sorted((tmp_path / "nvmeio-blocks").iterdir())
    assert [file.name for file in files] == ["kv.blocks", "kv.names", "kv.table"]
    assert [os.stat(file).st_mode & 0o777 for file in files] == [0o600] * 3
    assert os.stat(files[0]).st_size <= SLOTS * PAGE
    assert os.stat(files[1]).st_size <= SLOTS * 64


def test_the_newest_block_does_not_go_with_the_oldest_before_it(
    tmp_path: Path, handle: AioHandle
) -> None:
    """It lay behind the oldest, which was too small alone, and went with it."""
    with opened(tmp_path, handle) as store:
        for seed in range(SLOTS):
            store.store([str(seed)], [block(seed, PAGE)])
        store.remove(["1"])
        assert store.store(["newest"], [block(100, PAGE)]) == [True]  # behind the oldest
        assert store.store(["large"], [block(101, 2 * PAGE)]) == [True]
        assert store.contains(["newest", "large", "0"]) == [True, True, True]
        assert store.contains(["2", "3"]) == [False, False]
        assert store.store(["whole"], [block(102, LARGEST)]) == [True]


def keeps_storing(directory: Path) -> None:
    """Store blocks of all sizes until killed; the numbers of those that were answered are said."""
    with opened(directory, None, name_bytes=8) as store:
        first = int(torch.randint(1 << 20, (1,)))
        for seed in range(first, first + 100_000):
            store.store([str(seed)], [block(seed, size_of(seed))])
            print(seed, flush=True)


def size_of(seed: int) -> int:
    return 1 + (seed * 7919) % LARGEST


KILLS = 4


def test_a_killed_writer_leaves_no_wrong_block(tmp_path: Path, handle: AioHandle) -> None:
    """Blocks of several sizes lie over the slots of others that were there before."""
    program = (
        f"import sys; sys.path[:0] = {sys.path!r}\n"
        "from pathlib import Path; from blocks import test_sizes\n"
        f"test_sizes.keeps_storing(Path({str(tmp_path)!r}))"
    )
    for turn in range(KILLS):
        with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            for _ in range(40 + 37 * turn):
                last = int(writer.stdout.readline())
            writer.kill()
            said = writer.stdout.read().split()
        last = int(said[-1]) if said else last
        with opened(tmp_path, handle, name_bytes=8) as store:
            listed, _ = store.listed(most=100)
            assert len(listed) == len(store) > 3
            for name, nbytes in listed:
                assert nbytes == size_of(int(name))
                assert is_right(store, int(name), nbytes)
            assert is_right(store, last, size_of(last))
            assert store.stats.damaged == 0

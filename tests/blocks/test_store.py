"""Blocks on the drive: what is stored is there, also after a killed process, and never wrong."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import Program
from support import HeldEngine, random_tensor

from nvmeio import AioHandle
from nvmeio._kv_blocks import catalog
from nvmeio._kv_blocks.store import BlockStore
from nvmeio._kv_blocks.table import HEADER_BYTES, RECORD_BYTES
from nvmeio._storage import locks
from nvmeio.errors import ClosedError, TransferError
from nvmeio.testing import FakeEngine

BLOCK = 10_000
SLOT = 12_288


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "STEP_BYTES", 4 * SLOT)


@pytest.fixture(scope="module")
def handle() -> Iterator[AioHandle]:
    with AioHandle(engine="threads") as made:
        yield made


def opened(directory: Path, handle: AioHandle | None, slots: int = 8, **options: Any) -> BlockStore:
    return BlockStore(directory, "kv", BLOCK, slots * SLOT, handle=handle, **options)


def block(seed: int, nbytes: int = BLOCK) -> torch.Tensor:
    return random_tensor(nbytes, seed)


def loaded(store: BlockStore, seeds: list[int], nbytes: int = BLOCK) -> list[bool]:
    """Which blocks are there; none has other bytes than were stored."""
    rooms = [torch.zeros(nbytes, dtype=torch.uint8) for _ in seeds]
    found = store.load([str(seed) for seed in seeds], rooms)
    for seed, room, there in zip(seeds, rooms, found, strict=True):
        assert not there or room.equal(block(seed, nbytes))
    return found


def put(store: BlockStore, seeds: list[int]) -> list[bool]:
    return store.store([str(seed) for seed in seeds], [block(seed) for seed in seeds])


def table_of(directory: Path) -> Path:
    return directory / "nvmeio-blocks" / "kv.table"


# Storing and loading


def test_blocks_come_back(tmp_path: Path, handle: AioHandle) -> None:
    with opened(tmp_path, handle) as store:
        assert put(store, [1, 2, 3]) == [True] * 3
        assert loaded(store, [3, 9, 1]) == [True, False, True]
        assert store.contains(["1", "9"]) == [True, False]
        assert put(store, [1]) == [True]
        assert (store.stats.stored, store.stats.loaded, len(store)) == (3, 2, 3)
    with pytest.raises(ClosedError):
        store.contains(["1"])
    with pytest.raises(ClosedError):
        loaded(store, [1])
    store.close()


def test_a_block_of_another_length_is_a_miss(tmp_path: Path, handle: AioHandle) -> None:
    with opened(tmp_path, handle) as store:
        assert store.store(["1"], [block(1, 77)]) == [True]
        assert loaded(store, [1], 78) == [False]
        assert loaded(store, [1], 77) == [True]


def test_what_cannot_be_a_block_is_refused(tmp_path: Path, handle: AioHandle) -> None:
    with opened(tmp_path, handle) as store:
        with pytest.raises(ValueError, match="10001 bytes"):
            store.store(["1"], [block(1, BLOCK + 1)])
        with pytest.raises(ValueError, match="0 bytes"):
            store.load(["1"], [block(1, 0)])
        with pytest.raises(ValueError, match="each block has one name: 1 are given for 2"):
            store.store(["1"], [block(1), block(2)])
        with pytest.raises(ValueError, match="contiguous"):
            store.load(["1"], [torch.zeros(10, 10).t()])
    for sizes in ((0, 100), (100, 100)):
        with pytest.raises(ValueError, match="block"):
            BlockStore(tmp_path, "kv", *sizes, handle=handle)
    with pytest.raises(ValueError, match="is not a name"):
        BlockStore(tmp_path, "../kv", 10, 1 << 20, handle=handle)


def test_whoever_begins_something_does_not_wait_for_the_drive(tmp_path: Path) -> None:
    engine = HeldEngine()
    with AioHandle(engine=engine) as held, opened(tmp_path, held) as store:
        answers: list[list[bool]] = []
        blocks = [block(seed) for seed in range(6)]
        store.begin_store([str(seed) for seed in range(6)], blocks, answers.append)
        engine.wait_until_begun(1)
        assert answers == []
        engine.gate.set()
        store.drain()
        assert answers == [[True] * 6]


def test_in_the_background(tmp_path: Path, handle: AioHandle) -> None:
    with opened(tmp_path, handle) as store:
        answers: list[list[bool]] = []
        store.begin_store(["1", "2"], [block(1), block(2)], answers.append)
        store.drain()
        room = torch.zeros(BLOCK, dtype=torch.uint8)
        store.begin_load(["2"], [room], answers.append)
        store.drain()
        assert answers == [[True, True], [True]]
        assert room.equal(block(2))


operations = st.lists(
    st.one_of(
        st.tuples(st.just("store"), st.lists(st.integers(0, 15), min_size=1, max_size=6)),
        st.tuples(st.just("load"), st.lists(st.integers(0, 15), min_size=1, max_size=6)),
        st.tuples(st.just("remove"), st.lists(st.integers(0, 15), min_size=1, max_size=3)),
        st.tuples(st.just("touch"), st.lists(st.integers(0, 15), min_size=1, max_size=3)),
        st.tuples(st.just("clear"), st.just([])),
        st.tuples(st.just("reopen"), st.just([])),
    ),
    max_size=15,
)


@settings(max_examples=25)
@given(operations)
def test_a_store_is_a_dict_that_forgets_what_was_used_longest_ago(
    tmp_path_factory: pytest.TempPathFactory, handle: AioHandle, steps: list[tuple[str, list[int]]]
) -> None:
    directory, slots = tmp_path_factory.mktemp("store"), 6
    store = opened(directory, handle, slots)
    model: list[int] = []  # least recently used first
    written: list[int] = []  # in the order of writing, which is what survives
    try:
        for verb, seeds in steps:
            if verb == "store":
                put(store, seeds)
                fresh: list[int] = []  # behind those of the batch that were there
                for seed in [seed for seed in reversed(seeds) if seed in model]:
                    model.remove(seed)
                    model.append(seed)
                for seed in dict.fromkeys(seeds):
                    if seed in model:
                        continue
                    if len(model) + len(fresh) < slots:
                        fresh.append(seed)
                    elif model:
                        written.remove(model.pop(0))
                        fresh.append(seed)
                model += reversed(fresh)
                written += reversed(fresh)
            elif verb == "load":
                assert loaded(store, seeds) == [seed in model for seed in seeds]
            elif verb == "touch":
                store.touch([str(seed) for seed in seeds])
            elif verb == "remove":
                store.remove([str(seed) for seed in seeds])
                model = [seed for seed in model if seed not in seeds]
                written = [seed for seed in written if seed not in seeds]
            elif verb == "clear":
                store.clear()
                model, written = [], []
            else:
                store.close()
                store = opened(directory, handle, slots)
                model = list(written)
            if verb in ("load", "touch"):
                for seed in [seed for seed in reversed(seeds) if seed in model]:
                    model.remove(seed)
                    model.append(seed)
            assert store.contains([str(seed) for seed in range(16)]) == [
                seed in model for seed in range(16)
            ]
            assert len(store) == len(model)
    finally:
        store.close()


def test_of_a_prompt_the_last_blocks_make_room_first(tmp_path: Path, handle: AioHandle) -> None:
    """The first did, without which all others are of no use: of 8 blocks 0 were left to a prompt
    whose last 2 had to go."""
    with opened(tmp_path, handle, 10) as store:
        put(store, list(range(8)))
        put(store, list(range(20, 24)))
        assert loaded(store, list(range(8))) == [True] * 6 + [False] * 2
        store.touch([str(seed) for seed in range(6)])
        put(store, list(range(30, 36)))
        assert loaded(store, list(range(6))) == [True] * 4 + [False] * 2
    with opened(tmp_path, handle, 10) as store:  # in the order of writing
        put(store, [40, 41])
        assert loaded(store, list(range(4))) == [True, True, False, False]


# Room


def test_the_file_grows_in_steps_and_no_further(tmp_path: Path, handle: AioHandle) -> None:
    with opened(tmp_path, handle, 10) as store:
        assert store.path.stat().st_size == 4 * SLOT
        put(store, list(range(5)))
        assert store.path.stat().st_size == 8 * SLOT
        put(store, list(range(30)))
        assert store.path.stat().st_size == 10 * SLOT
        assert store.path.stat().st_mode & 0o777 == 0o600
        assert len(store) == 10


def test_a_batch_larger_than_the_store(tmp_path: Path, handle: AioHandle) -> None:
    with opened(tmp_path, handle, 4) as store:
        found = put(store, list(range(7)))
        assert sum(found) == len(store) == 4
        assert store.stats.refused == 3
        assert loaded(store, list(range(7))) == found


def test_a_full_disk_is_a_smaller_store(
    tmp_path: Path, handle: AioHandle, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    reserve = catalog.reserve

    def refuse(fd: int, nbytes: int, path: str) -> None:
        if nbytes > 4 * SLOT:
            raise TransferError(errno.ENOSPC, operation="fallocate", path=path, nbytes=nbytes)
        reserve(fd, nbytes, path)

    monkeypatch.setattr(catalog, "reserve", refuse)
    with opened(tmp_path, handle) as store:
        for seed in range(9):
            assert put(store, [seed]) == [True]
        assert loaded(store, list(range(9))) == [False] * 5 + [True] * 4
    assert caplog.text.count("stays at 4 blocks") == 1
    monkeypatch.setattr(catalog, "STEP_BYTES", 8 * SLOT)
    with pytest.raises(TransferError, match="ENOSPC"):
        BlockStore(tmp_path, "other", BLOCK, 8 * SLOT, handle=handle)


def test_a_drive_that_fails_writes_is_a_miss(tmp_path: Path, caplog: Any) -> None:
    engine = FakeEngine(fail=lambda *_: errno.EIO)
    with AioHandle(engine=engine) as bad, opened(tmp_path, bad) as store:
        assert put(store, [1, 2]) == [False, False]
        assert store.contains(["1"]) == [False]
        assert store.stats.refused == 2
    assert "2 blocks are not stored" in caplog.text


# What other processes left


def test_damaged_bytes_are_a_miss_and_told(tmp_path: Path, handle: AioHandle, caplog: Any) -> None:
    with opened(tmp_path, handle) as store:
        put(store, [1, 2])
    with store.path.open("r+b") as file:
        file.seek(0)
        file.write(b"damaged")
    with opened(tmp_path, handle) as store:
        assert sorted(loaded(store, [1, 2])) == [False, True]
        assert len(store) == 1
        assert store.stats.damaged == 1
    assert "differ from what was stored" in caplog.text


@pytest.mark.parametrize("at", [0, 20, HEADER_BYTES + 3, HEADER_BYTES + RECORD_BYTES + 60])
def test_a_damaged_table_is_never_believed(
    at: int, tmp_path: Path, handle: AioHandle, caplog: Any
) -> None:
    """And it is told: a record that is not whole was forgotten without a word."""
    with opened(tmp_path, handle) as store:
        put(store, [1, 2, 3])
    with table_of(tmp_path).open("r+b") as file:
        file.seek(at)
        found = file.read(1)
        file.seek(at)
        file.write(bytes([found[0] ^ 1]))
    with opened(tmp_path, handle) as store:
        there = loaded(store, [1, 2, 3])
        assert sum(there) == (0 if at < HEADER_BYTES else 2)
        assert put(store, [4, 5]) == [True, True]
        assert loaded(store, [4, 5]) == [True, True]
        assert store.stats.damaged == 3 - sum(there) - 3 * (at < HEADER_BYTES)
    assert ("beginning with an empty one" in caplog.text) == (at < HEADER_BYTES)
    assert ("1 records of its table are damaged" in caplog.text) == (at >= HEADER_BYTES)


def test_a_foreign_file_is_not_believed(tmp_path: Path, handle: AioHandle, caplog: Any) -> None:
    directory = tmp_path / "nvmeio-blocks"
    directory.mkdir()
    table_of(tmp_path).write_text("something else")
    with opened(tmp_path, handle) as store:
        assert len(store) == 0
        assert put(store, [1]) == [True]
    assert "it is not a table of blocks" in caplog.text
    assert directory.stat().st_mode & 0o777 == 0o700


def test_a_link_is_not_followed(tmp_path: Path, handle: AioHandle) -> None:
    (tmp_path / "nvmeio-blocks").mkdir()
    (tmp_path / "mine").write_text("precious")
    (tmp_path / "nvmeio-blocks" / "kv.blocks").symlink_to(tmp_path / "mine")
    with pytest.raises(TransferError, match="symbolic link"):
        opened(tmp_path, handle)
    assert (tmp_path / "mine").read_text() == "precious"


def test_a_file_that_was_cut(tmp_path: Path, handle: AioHandle, caplog: Any) -> None:
    with opened(tmp_path, handle) as store:
        put(store, [1, 2, 3])
    os.truncate(store.path, SLOT)
    with opened(tmp_path, handle) as store:
        assert sum(loaded(store, [1, 2, 3])) == 1
        assert put(store, [4, 5, 6]) == [True] * 3
    assert "was cut: 2 blocks" in caplog.text


def test_a_store_grows_and_shrinks_in_place(
    tmp_path: Path, handle: AioHandle, caplog: pytest.LogCaptureFixture
) -> None:
    """With another capacity all blocks were forgotten."""
    with opened(tmp_path, handle, 8) as store:
        put(store, list(range(8)))
    with opened(tmp_path, handle, 12) as store:
        assert loaded(store, list(range(8))) == [True] * 8
        put(store, list(range(8, 12)))
        assert loaded(store, list(range(12))) == [True] * 12
    assert "room for 12 blocks instead of 8" in caplog.text
    with opened(tmp_path, handle, 4) as store:
        assert loaded(store, list(range(12))).count(True) == 4
        assert store.path.stat().st_size == 4 * SLOT
        kept = [seed for seed, there in enumerate(loaded(store, list(range(12)))) if there]
        with opened(tmp_path, handle, 30, writer=False) as reader:  # of whatever size there is
            assert loaded(reader, kept) == [True] * 4
    assert "those that lay behind are gone" in caplog.text
    with opened(tmp_path, handle, 12) as store:  # nothing of the time when it was larger
        assert len(store) == 4
        assert loaded(store, kept) == [True] * 4
        put(store, list(range(50, 58)))
        assert loaded(store, list(range(50, 58))) == [True] * 8


def test_a_refused_store_leaves_nothing(
    tmp_path: Path, handle: AioHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took all that was free, and left its files."""
    directory = tmp_path / "nvmeio-blocks"
    with opened(tmp_path, handle) as store:
        put(store, [1])
        monkeypatch.setattr(catalog, "free_bytes", lambda _: (5 * SLOT, 1 << 40))
        with pytest.raises(TransferError, match="are left to others") as refused:
            BlockStore(tmp_path, "other", BLOCK, 8 * SLOT, handle=handle)
        assert refused.value.errno == errno.ENOSPC
        before = sorted(directory.iterdir())
        assert [path.name for path in before] == ["kv.blocks", "kv.table"]
        with pytest.raises(TransferError, match="another process writes"):
            opened(tmp_path, handle)
        assert sorted(directory.iterdir()) == before
        for seed in range(12):  # one that there is stays as large as it was
            assert put(store, [seed]) == [True]
        assert store.path.stat().st_size == 4 * SLOT


def test_a_store_takes_what_is_free_above_the_floor(
    tmp_path: Path, handle: AioHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog, "free_bytes", lambda _: (7 * SLOT, 100 * SLOT))
    with opened(tmp_path, handle) as store:
        assert store.path.stat().st_size == 2 * SLOT


def test_other_sizes_begin_anew(tmp_path: Path, handle: AioHandle, caplog: Any) -> None:
    with opened(tmp_path, handle) as store:
        put(store, [1])
    with BlockStore(tmp_path, "kv", 2 * BLOCK, 8 * SLOT, handle=handle) as store:
        assert len(store) == 0
    assert "another size" in caplog.text


# Several processes


def test_a_table_that_is_removed_before_it_is_locked_is_made_anew(
    tmp_path: Path, handle: AioHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever fails to open a new store removes its files; another one had opened them by then."""
    locked: list[int] = []

    def lock(fd: int, must_lock: bool) -> bool:
        if not locked:
            os.unlink(os.readlink(f"/proc/self/fd/{fd}"))
        locked.append(fd)
        return become_writer(fd, must_lock)

    become_writer = locks.become_writer
    monkeypatch.setattr(locks, "become_writer", lock)
    with opened(tmp_path, handle) as store:
        put(store, [1])
    assert len(locked) == 2
    with opened(tmp_path, handle) as store:
        assert loaded(store, [1]) == [True]


def test_a_forked_child_does_not_keep_the_store(tmp_path: Path, handle: AioHandle) -> None:
    """A data loader's worker had the table, and with it the lock, after its parent closed it."""
    waiting, go = os.pipe()
    with opened(tmp_path, handle) as store:
        put(store, [1])
        child = os.fork()
        if not child:
            os.close(go)
            os.read(waiting, 1)
            os._exit(0)
    try:
        with opened(tmp_path, handle) as store:
            assert loaded(store, [1]) == [True]
    finally:
        os.close(go)
        os.close(waiting)
        os.waitpid(child, 0)


def test_one_process_writes_and_others_read(tmp_path: Path, handle: AioHandle) -> None:
    with opened(tmp_path, handle) as store:
        with pytest.raises(TransferError, match="another process writes") as refused:
            opened(tmp_path, handle)
        assert refused.value.errno == errno.EBUSY
        put(store, [1])
        with opened(tmp_path, handle, writer=False) as reader:
            assert loaded(reader, [1, 2]) == [True, False]
            put(store, [2])
            assert reader.contains(["1", "2"]) == [True, True]
            store.remove(["1"])
            assert loaded(reader, [1, 2]) == [False, True]
            with pytest.raises(ClosedError, match="reading only"):
                put(reader, [3])
            with pytest.raises(ClosedError, match="reading only"):
                reader.clear()
    with pytest.raises(FileNotFoundError):
        BlockStore(tmp_path, "none", BLOCK, 8 * SLOT, writer=False, handle=handle)


def test_a_slot_that_is_overwritten_under_a_readers_hands_is_a_miss(
    tmp_path: Path, handle: AioHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path, handle, 1) as store:
        put(store, [1])
        with opened(tmp_path, handle, 1, writer=False) as reader:
            find = catalog.Catalog.pin

            def found(read: catalog.Catalog, digests: list[bytes]) -> Any:
                answer = find(read, digests)
                put(store, [2])
                return answer

            monkeypatch.setattr(catalog.Catalog, "pin", found)
            assert loaded(reader, [1]) == [False]


CHILD = """
    import sys, torch
    from pathlib import Path
    sys.path.insert(0, {tests!r})
    from blocks import test_store as t
    t.catalog.STEP_BYTES = 4 * t.SLOT
    store = t.opened(Path({directory!r}), None, 64)
    print("open", flush=True)
    for seed in range(100_000):
        t.put(store, [seed, seed + 1_000_000])
        print(seed, flush=True)
"""


@pytest.mark.parametrize("stored", [1, 40, 75])
def test_a_killed_process_leaves_whole_blocks(stored: int, tmp_path: Path) -> None:
    text = CHILD.format(tests=str(Path(__file__).parents[1]), directory=str(tmp_path))
    child = Program[str](
        [sys.executable, "-c", textwrap.dedent(text)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "open\n"
    while int(child.stdout.readline()) < stored:
        pass
    child.send_signal(signal.SIGKILL)
    last = stored
    for line in child.stdout:
        if line.endswith("\n"):
            last = int(line)
    child.wait()
    child.stdout.close()
    with opened(tmp_path, None, 64) as store:
        # What was answered is there, but for what made room; at most one batch was under way.
        recent = list(range(max(0, last - 29), last + 1))
        assert loaded(store, recent) == [True] * len(recent)
        assert len(store) <= 64
        every = [n for seed in range(last + 2) for n in (seed, seed + 1_000_000)]
        assert sum(loaded(store, every)) == len(store)
        assert store.stats.damaged == 0
        assert put(store, [-5]) == [True]


# Threads


def test_loads_and_stores_from_many_threads(tmp_path: Path, handle: AioHandle) -> None:
    """Blocks that are read are not overwritten meanwhile; nothing is ever wrong."""
    with opened(tmp_path, handle, 6) as store:
        wrong: list[BaseException] = []

        def work(first: int) -> None:
            try:
                for turn in range(15):
                    seeds = [(first + turn * 3 + n) % 20 for n in range(3)]
                    put(store, seeds)
                    loaded(store, seeds)
            except BaseException as failed:
                wrong.append(failed)

        workers = [threading.Thread(target=work, args=(5 * n,)) for n in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert not wrong
        assert store.stats.damaged == 0
        assert len(store) == 6

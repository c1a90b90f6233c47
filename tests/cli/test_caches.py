"""`nvmeio cache`: what it says of a store is so, and what it does to one may end at any moment."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import random_tensor
from typer.testing import CliRunner

from nvmeio._kv_blocks import upkeep
from nvmeio._kv_blocks.index import BlockPlace, Index
from nvmeio._kv_blocks.store import BlockStore
from nvmeio._kv_blocks.table import HEADER_BYTES, RECORD_BYTES
from nvmeio.cli import app

SLOT = 8192


def block(seed: int, nbytes: int = SLOT) -> torch.Tensor:
    return random_tensor(nbytes, seed)


def opened(directory: Path, slots: int = 16, **options: Any) -> BlockStore:
    return BlockStore(directory, "kv", SLOT, slots * SLOT, **options)


def filled(directory: Path, seeds: Sequence[int], slots: int = 16, **options: Any) -> Path:
    with opened(directory, slots, **options) as store:
        for seed in seeds:
            assert store.store([str(seed)], [block(seed)]) == [True]
        return store.path


def there(directory: Path, seeds: Sequence[int], slots: int = 16, **options: Any) -> list[int]:
    """Which blocks can be loaded; none has other bytes than were stored."""
    with opened(directory, slots, **options) as store:
        rooms = [torch.zeros(SLOT, dtype=torch.uint8) for _ in seeds]
        found = store.load([str(seed) for seed in seeds], rooms)
        assert store.stats.damaged == 0
    for seed, room, is_there in zip(seeds, rooms, found, strict=True):
        assert not is_there or room.equal(block(seed))
    return [seed for seed, is_there in zip(seeds, found, strict=True) if is_there]


def ran(*words: object, status: int = 0) -> str:
    done = CliRunner().invoke(app, ["cache", *map(str, words)])
    assert done.exit_code == status, done.output
    return done.output


def told(*words: object, status: int = 0) -> Any:
    return json.loads(ran(*words, "--json", status=status))


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def bytes_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


# verify


def test_whole_blocks_are_whole(tmp_path: Path) -> None:
    filled(tmp_path, range(20))
    (store,) = told("verify", tmp_path)["stores"]
    assert (store["whole"], store["blocks"], store["bytes"]) == (True, 16, 16 * SLOT)
    assert "whole, 16 blocks" in ran("verify", tmp_path)


def test_damage_is_named_and_nothing_changes(tmp_path: Path) -> None:
    path = filled(tmp_path, range(8))
    flip(path, 3 * SLOT + 100)
    flip(path.with_suffix(".table"), HEADER_BYTES + 5 * RECORD_BYTES + 1)
    before = bytes_of(tmp_path)
    (store,) = told("verify", tmp_path, status=1)["stores"]
    assert [problem["slot"] for problem in store["problems"]] == [3, 5]
    assert "CRC-32" in store["problems"][0]["what"]
    assert "DAMAGED, 2 of" in ran("verify", tmp_path, status=1)
    assert bytes_of(tmp_path) == before


def test_a_file_that_was_cut_is_damage(tmp_path: Path) -> None:
    path = filled(tmp_path, range(8))
    os.truncate(path, 6 * SLOT)
    (store,) = told("verify", tmp_path, status=1)["stores"]
    assert [problem["slot"] for problem in store["problems"]] == [6, 7]
    assert all("cannot be read" in problem["what"] for problem in store["problems"])


def test_verify_beside_a_writer_finds_no_damage(tmp_path: Path) -> None:
    """Slots are overwritten all the time; a block that goes meanwhile is not a damaged one."""
    writer = started(
        tmp_path,
        """
        for n in itertools.count():
            store.store([str(n)], [torch.full((SLOT,), n % 251, dtype=torch.uint8)])
            if n == 40:
                print("ready", flush=True)
        """,
    )
    try:
        for _ in range(15):
            (store,) = told("verify", tmp_path)["stores"]
            assert store["whole"]
    finally:
        ended(writer)


def started(directory: Path, body: str, writer: bool = True) -> subprocess.Popen[str]:
    """A process that has the store open, once it has said that it is ready."""
    code = f"""
import itertools, sys, torch
from nvmeio._kv_blocks.store import BlockStore
SLOT = {SLOT}
with BlockStore({str(directory)!r}, "kv", SLOT, 16 * SLOT, writer={writer}) as store:
    torch.set_num_threads(1)
{textwrap.indent(textwrap.dedent(body), "    ")}
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def ended(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate(timeout=60)


# stats


def test_stats_say_what_there_is(tmp_path: Path) -> None:
    with opened(tmp_path, identity="weights") as store:
        store.store(["a", "b", "c"], [block(1), block(2, 100), block(3)], [0, 7, 7])
        store.new_generation()
        store.new_generation()
        store.drain()
        (facts,) = told("stats", tmp_path)["stores"]
        assert (facts["blocks"], facts["bytes"]) == (3, 2 * SLOT + 100)
        assert facts["kinds"] == {"0": 1, "7": 2}
        assert (facts["capacity_bytes"], facts["block_bytes"]) == (16 * SLOT, SLOT)
        assert facts["generation"] == 2
        assert facts["tag"] != "0" * 64
        assert facts["users"] == []  # this process asks
    opened(tmp_path, identity="weights").close()
    (facts,) = told("stats", tmp_path)["stores"]
    assert facts["generation"] == 0
    assert "no process has it open" in ran("stats", tmp_path)


@pytest.mark.parametrize("writer", [True, False])
def test_who_has_it_open_is_named_and_keeps_changes_out(tmp_path: Path, writer: bool) -> None:
    filled(tmp_path, range(8))
    process = started(tmp_path, "print('ready', flush=True); sys.stdin.read()", writer)
    try:
        (facts,) = told("stats", tmp_path)["stores"]
        assert [(user["pid"], user["writes"]) for user in facts["users"]] == [(process.pid, writer)]
        before = bytes_of(tmp_path)
        for words in (["purge"], ["resize", "--capacity", 4 * SLOT]):
            output = ran(words[0], tmp_path, *words[1:], status=2)
            assert "refused" in output
            assert f"process {process.pid} (" in output
        assert bytes_of(tmp_path) == before
    finally:
        ended(process)
    assert told("purge", tmp_path)["stores"][0]["blocks"] == 8


def test_who_cannot_be_seen_keeps_changes_out_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another container: /proc does not have it, but the lock and the lease know."""
    filled(tmp_path, range(8))
    monkeypatch.setattr(upkeep, "users_of", lambda paths: [])
    for writer in (True, False):
        process = started(tmp_path, "print('ready', flush=True); sys.stdin.read()", writer)
        try:
            assert "cannot be seen" in ran("purge", tmp_path, status=2)
        finally:
            ended(process)
    assert there(tmp_path, range(8)) == [*range(8)]


# purge


def test_purge_empties_and_gives_room_back(tmp_path: Path) -> None:
    path = filled(tmp_path, range(8), name_bytes=40)
    assert told("purge", tmp_path)["stores"] == [{"path": str(path), "blocks": 8}]
    assert path.stat().st_size == path.with_suffix(".names").stat().st_size == 0
    (facts,) = told("stats", tmp_path)["stores"]
    assert (facts["blocks"], facts["capacity_bytes"]) == (0, 16 * SLOT)
    assert there(tmp_path, range(8), name_bytes=40) == []
    filled(tmp_path, [9], name_bytes=40)
    assert there(tmp_path, range(12), name_bytes=40) == [9]


# resize


def test_a_smaller_store_keeps_what_was_stored_last(tmp_path: Path) -> None:
    path = filled(tmp_path, range(22), name_bytes=40)
    done = told("resize", tmp_path, "--capacity", 5 * SLOT + 100)
    assert (done["capacity_before"], done["capacity_bytes"]) == (16 * SLOT, 5 * SLOT)
    assert (done["kept"], done["dropped"]) == (5, 11)
    assert path.stat().st_size == 5 * SLOT
    assert told("verify", tmp_path)["stores"][0]["blocks"] == 5
    with opened(tmp_path, 5, name_bytes=40) as store:
        names = sorted(int(each.name) for each in store.listed()[0])
        assert names == [17, 18, 19, 20, 21]
        assert store.store(["99"], [block(99)]) == [True]
        assert not store.contains(["17"])[0]  # still the oldest: their order is as before
    assert there(tmp_path, range(22), 5, name_bytes=40) == [18, 19, 20, 21]


def test_a_larger_store_keeps_all(tmp_path: Path) -> None:
    filled(tmp_path, range(16))
    done = told("resize", tmp_path, "--capacity", 64 * SLOT)
    assert (done["kept"], done["moved"], done["dropped"]) == (16, 0, 0)
    assert told("stats", tmp_path)["stores"][0]["capacity_bytes"] == 64 * SLOT
    filled(tmp_path, range(100, 148), 64)
    assert len(there(tmp_path, [*range(16), *range(100, 148)], 64)) == 64


def test_blocks_of_several_slots_are_moved_whole(tmp_path: Path) -> None:
    options: dict[str, Any] = {"largest_bytes": 16 * SLOT, "name_bytes": 40}
    sizes = [3, 1, 2, 4, 1, 3, 2]
    with opened(tmp_path, **options) as store:
        for seed, size in enumerate(sizes):
            assert store.store([str(seed)], [block(seed, size * SLOT)]) == [True]
    done = told("resize", tmp_path, "--capacity", 9 * SLOT)
    assert told("verify", tmp_path)["stores"][0]["whole"]
    options["largest_bytes"] = 9 * SLOT
    with opened(tmp_path, 9, **options) as store:
        kept = {int(each.name) for each in store.listed()[0]}
        for seed in kept:
            room = torch.zeros(sizes[seed] * SLOT, dtype=torch.uint8)
            assert store.load([str(seed)], [room]) == [True]
            assert room.equal(block(seed, sizes[seed] * SLOT))
    assert len(kept) == done["kept"] >= 2
    assert {5, 6} <= kept


def test_a_damaged_block_is_dropped_when_it_would_be_moved(tmp_path: Path) -> None:
    path = filled(tmp_path, range(16))
    flip(path, 15 * SLOT)
    done = told("resize", tmp_path, "--capacity", 4 * SLOT)
    assert (done["kept"], done["dropped"]) == (3, 13)
    assert there(tmp_path, range(16), 4) == [12, 13, 14]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_places_do_not_overlap_and_the_newest_stay(data: st.DataObject) -> None:
    before = data.draw(st.integers(1, 24))
    index = Index(before, 1)
    free = {*range(before)}
    for number, slot in enumerate(data.draw(st.permutations(range(before)))):
        nbytes = data.draw(st.integers(1, 4))
        if free.issuperset(range(slot, slot + nbytes)):
            free.difference_update(range(slot, slot + nbytes))
            index.recover(str(number).encode(), BlockPlace(slot, nbytes, 0))
    slots = data.draw(st.integers(1, before))
    places = upkeep.placed(index, slots)
    taken = [
        slot for place in places.values() for slot in range(place.slot, place.slot + place.nbytes)
    ]
    assert len(taken) == len(set(taken))
    assert all(slot < slots for slot in taken)
    assert all(places[digest].nbytes == index.where[digest].nbytes for digest in places)
    if all(place.nbytes == 1 for place in index.where.values()):
        assert {*places} == {*list(index.where)[-slots:]}
    # Nothing is moved over what stays, or to where the one across the end begins before it has
    # gone; that one is moved first.
    for digest, place in places.items():
        was = index.where[digest]
        if was.slot < slots < was.slot + was.nbytes:
            own = {*range(was.slot, was.slot + was.nbytes)}
            assert own.isdisjoint(range(place.slot, place.slot + place.nbytes))


def test_names_of_an_older_version_are_not_lost(tmp_path: Path) -> None:
    path = filled(tmp_path, range(8), name_bytes=40)
    with path.with_suffix(".table").open("r+b") as file:
        file.seek(200)
        file.write(bytes(8))
    before = bytes_of(tmp_path)
    assert "by an older nvmeio" in ran("resize", tmp_path, "--capacity", 3 * SLOT, status=2)
    assert bytes_of(tmp_path) == before
    opened(tmp_path, name_bytes=40).close()
    assert told("resize", tmp_path, "--capacity", 3 * SLOT)["kept"] == 3


# Interrupted


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("command", [["purge"], ["resize", "--capacity", str(24 * SLOT)]])
def test_ended_at_any_moment_it_leaves_a_whole_store(
    tmp_path: Path, how: signal.Signals, command: list[str]
) -> None:
    chance = random.Random(command[0])
    seeds = [*range(64)]
    whole_s = 0.0
    for trial in range(3):
        directory = tmp_path / str(trial)
        filled(directory, seeds, 64, name_bytes=40)
        words = [sys.executable, "-m", "nvmeio", "cache", command[0], str(directory), *command[1:]]
        begun = time.monotonic()
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        if trial:
            time.sleep(whole_s * chance.uniform(0.5, 1))
            process.send_signal(how)
        _, errors = process.communicate(timeout=120)
        whole_s = whole_s or time.monotonic() - begun
        if how == signal.SIGINT:
            assert process.returncode in (0, 130, -signal.SIGINT), errors
        assert told("verify", directory)["stores"][0]["whole"]
        capacity = told("stats", directory)["stores"][0]["capacity_bytes"] // SLOT
        left = there(directory, seeds, capacity, name_bytes=40)
        if command[0] == "resize":  # once more, and it is done
            assert left[-24:] == seeds[-24:]
            told(command[0], directory, *command[1:])
            assert there(directory, seeds, 24, name_bytes=40) == seeds[-24:]


@pytest.mark.parametrize("name", ["pwrite", "ftruncate"])
def test_ended_at_each_write_it_leaves_a_whole_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """As if it were killed: nothing that comes behind that write is done."""
    real = getattr(os, name)
    for fatal in range(1000):
        directory = tmp_path / str(fatal)
        filled(directory, range(8), 8, name_bytes=40)
        calls = 0

        def dying(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > fatal:  # noqa: B023
                raise OSError(5, "killed here")
            return real(*args)

        with monkeypatch.context() as patch:
            patch.setattr(os, name, dying)
            try:
                upkeep.resize(directory / "nvmeio-blocks" / "kv.blocks", 3 * SLOT)
            except OSError:
                done = False
            else:
                done = True
        assert told("verify", directory)["stores"][0]["whole"]
        capacity = told("stats", directory)["stores"][0]["capacity_bytes"] // SLOT
        assert there(directory, range(8), capacity, name_bytes=40)[-3:] == [5, 6, 7]
        if done:
            assert fatal > 0
            return
    raise AssertionError("it never ends")


# Usage


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    assert "no block store" in ran("stats", tmp_path, status=2)
    assert "no block store" in ran("verify", tmp_path / "missing", status=2)
    filled(tmp_path, range(2))
    assert "has no room" in ran("resize", tmp_path, "--capacity", 100, status=2)
    assert "take one of kv" in ran("purge", tmp_path, "--name", "other", status=2)
    BlockStore(tmp_path, "second", SLOT, 4 * SLOT).close()
    assert "--name: kv, second" in ran("resize", tmp_path, "--capacity", "1M", status=2)
    told("resize", tmp_path, "--capacity", "1M", "--name", "second")
    assert [store["blocks"] for store in told("purge", tmp_path)["stores"]] == [2, 0]


def test_a_table_that_is_damaged_says_so(tmp_path: Path) -> None:
    path = filled(tmp_path, range(2))
    flip(path.with_suffix(".table"), 20)
    for command in (["verify"], ["stats"], ["purge"], ["resize", "--capacity", "1M"]):
        assert "its header is damaged" in ran(command[0], tmp_path, *command[1:], status=1)

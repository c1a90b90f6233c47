"""A loss of power while Checkpointers of several ranks save, one of them on a slow drive."""

from __future__ import annotations

import os
import random
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint._rank_program import own, replicated, same
from disk_log import DiskLog

import nvmeio
from nvmeio._distributed.rank_store import RankStore
from nvmeio.checkpoint import checkpointer as module

pytestmark = pytest.mark.slow

if not dist.is_available():
    pytest.skip("torch is built without torch.distributed", allow_module_level=True)

STEPS = 5
KEEP = 2


class _Group:
    """Stands in for a process group: which of the ranks in this process a Checkpointer is."""

    def __init__(self, store: Any, rank: int, world: int) -> None:
        self.store = store
        self.rank = rank
        self.world = world


def store_of(group: Any, directory: str, *timeout: Any) -> RankStore:
    if group is None:
        return RankStore(None, 0, 1, directory, "save")
    return RankStore(group.store, group.rank, group.world, directory, "save")


def save_all(
    log: DiskLog,
    folder: Path,
    layout: str,
    world: int,
    writers: str | int,
    shared: bool = True,
) -> None:
    """Every rank saves every step, and notes when it was told that one is durable."""
    store = dist.HashStore() if world > 1 else None
    failed: list[BaseException] = []

    def train(rank: int) -> None:
        try:
            group: Any = _Group(store, rank, world) if world > 1 else None
            handle = nvmeio.AioHandle(engine="threads")
            options: Any = {"layout": layout, "writers": writers, "shared": shared}
            mine = folder if shared else folder / f"rank-{rank:05d}"
            with handle, nvmeio.Checkpointer(mine, KEEP, handle, group, **options) as saver:
                for step in range(STEPS):
                    state = replicated(step) if layout == "one" else own(step, rank)
                    saver.save_sync(state, step)
                    saver.wait_sync()
                    log.note("durable", None, step)
        except BaseException as error:
            failed.append(error)

    threads = [
        threading.Thread(target=train, args=(rank,), name=f"rank {rank}") for rank in range(world)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    if failed:
        raise failed[0]


@pytest.mark.parametrize(
    ("world", "layout", "writers"),
    [
        (1, "one", "all"),
        (2, "one", "all"),
        (2, "one", "per_node"),
        (3, "one", 2),
        (1, "per_rank", "all"),
        (2, "per_rank", "all"),
    ],
)
def test_what_was_durable_is_there_after_a_loss_of_power(
    world: int,
    layout: str,
    writers: str | int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The newest checkpoint that a rank was told of is whole, and so is every one that is named."""
    folder = tmp_path / "disk" / "checkpoints"
    folder.parent.mkdir()
    slow = f"rank-{world - 1:05d}"
    log = DiskLog(folder.parent, lambda path: time.sleep(0.02) if slow in path else None)
    monkeypatch.setattr(module, "store_of", store_of)
    monkeypatch.setattr(module, "ranks_of", lambda group: 1 if group is None else group.world)
    with log.recording(monkeypatch):
        save_all(log, folder, layout, world, writers)
    chance = random.Random(world)
    seen = set()
    handle = nvmeio.AioHandle(engine="threads")
    for number in range(20):
        at = chance.randrange(1, len(log) + 1)
        image = tmp_path / f"image{number}"
        log.image(at, image, chance)
        durable = max((e.what[0] for e in log.events[:at] if e.kind == "durable"), default=-1)
        there = nvmeio.Checkpointer(image / "checkpoints", KEEP, handle, read_only=True)
        steps = there.steps()
        latest = there.latest_step()
        assert durable < 0 or (latest is not None and latest >= durable)
        assert len(steps) >= min(durable + 1, KEEP)
        if latest is not None and os.path.lexists(image / "checkpoints" / "latest"):
            assert (image / "checkpoints" / "latest").exists()
        for step in steps:
            for rank in range(world):
                found = there.restore(step, rank=rank if layout == "per_rank" else None)
                assert same(found, own(step, rank) if layout == "per_rank" else replicated(step))
        seen.add(latest)
    handle.close()
    assert len(seen) > 2


@pytest.mark.parametrize(
    "images",
    [20, pytest.param(300, marks=[pytest.mark.stress, pytest.mark.timeout(1800)])],
)
@pytest.mark.parametrize(
    ("world", "layout", "writers"),
    [(2, "one", "all"), (3, "one", 2), (2, "per_rank", "all")],
)
def test_ranks_with_drives_of_their_own_find_one_step_after_a_loss_of_power(
    world: int,
    layout: str,
    writers: str | int,
    images: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each drive loses what it likes; what is whole is of one save, and as new as was promised."""
    folder = tmp_path / "disk"
    folder.mkdir()
    slow = f"rank-{world - 1:05d}"
    log = DiskLog(folder, lambda path: time.sleep(0.02) if slow in path else None)
    monkeypatch.setattr(module, "store_of", store_of)
    monkeypatch.setattr(module, "ranks_of", lambda group: 1 if group is None else group.world)
    with log.recording(monkeypatch):
        save_all(log, folder, layout, world, writers, shared=False)
    chance = random.Random(world)
    seen = set()
    handle = nvmeio.AioHandle(engine="threads")
    for number in range(images):
        at = chance.randrange(1, len(log) + 1)
        image = tmp_path / f"image{number}"
        log.image(at, image, chance)
        durable = max((e.what[0] for e in log.events[:at] if e.kind == "durable"), default=-1)
        drives = [image / f"rank-{rank:05d}" for rank in range(world)]
        there = nvmeio.Checkpointer(drives, KEEP, handle, shared=False, read_only=True)
        steps, latest = there.steps(), there.latest_step()
        assert durable < 0 or (latest is not None and latest >= durable)
        assert len(steps) >= min(durable + 1, KEEP)
        for step in steps:
            wanted: Any = replicated(step)
            if layout == "per_rank":
                wanted = [own(step, rank) for rank in range(world)]
            assert same(there.restore(step), wanted)
        seen.add(latest)
        shutil.rmtree(image)
    handle.close()
    print(f"{images} images of {world} drives, {layout}: all right, {len(seen)} states")
    assert len(seen) > 2


def test_a_drive_that_forgets_what_was_flushed_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The images tell: without fdatasync what is called durable is not there."""
    folder = tmp_path / "disk"
    folder.mkdir()
    log = DiskLog(folder)
    with log.recording(monkeypatch):
        monkeypatch.setattr(os, "fdatasync", lambda fd: None)
        with nvmeio.AioHandle(engine="threads") as handle:
            saver = nvmeio.Checkpointer(folder, KEEP, handle)
            saver.save_sync({"a": torch.ones(100_000)}, 1)
            saver.close()
    broken = 0
    for number in range(20):
        image = tmp_path / f"image{number}"
        log.image(len(log), image, random.Random(number))
        try:
            found = nvmeio.load(image / "step-00000001.pt")
            broken += not torch.equal(found["a"], torch.ones(100_000))
        except nvmeio.NvmeioError:
            broken += 1
    assert broken > 5

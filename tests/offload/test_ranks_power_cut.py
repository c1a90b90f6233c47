"""A loss of power while several ranks train: all of them go on from the same step, bit for bit."""

from __future__ import annotations

import errno
import random
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from disk_log import DiskLog
from inside import store_of

from nvmeio import AioHandle, TransferError
from nvmeio._distributed.rank_store import RankStore
from nvmeio._io.drives import DriveHandles
from nvmeio.buffers import empty_aligned
from nvmeio.offload import SwappedOptimizer
from nvmeio.offload._generations import rank_steps
from nvmeio.offload._generations.generations import Change, Generations
from nvmeio.offload._generations.rank_steps import Agreed, DurableSteps, Made
from nvmeio.offload._generations.state_files import NAMES, StateFiles
from nvmeio.offload._swap_files import manifests
from nvmeio.offload._swap_files.subgroups import Piece, Subgroup, pack, place
from nvmeio.offload._swap_files.swap_dirs import SwapDirs

pytestmark = pytest.mark.slow

if not dist.is_available():
    pytest.skip("torch is built without torch.distributed", allow_module_level=True)

NUMEL = 3000
STEPS = 6


class Rank:
    """The store of one rank's optimizer, and steps that write what tells rank and step."""

    def __init__(self, number: int, folder: Path, steps: DurableSteps | None) -> None:
        self.number = number
        self.handle = AioHandle(engine="threads")
        self.directory = SwapDirs(folder, f"rank{number}", resume=True)
        handles = DriveHandles(self.handle, self.directory.paths)
        self.store = Generations(self.directory, handles, True, False, steps)
        pieces = [
            Piece(n, 0, NUMEL, (NUMEL,), torch.float32, torch.float32, (), True, True)
            for n in range(3)
        ]
        self.subgroups = pack(pieces, NUMEL * 4 * 2)
        for subgroup in self.subgroups:
            place(subgroup)
        self.store.place(self.subgroups)

    def slot(self, subgroup: Subgroup) -> torch.Tensor:
        return empty_aligned(subgroup.nbytes, dtype=torch.uint8)

    def step(self, generation: int) -> None:
        self.store.prepare()
        moved: set[int] = set()
        for subgroup in self.subgroups:
            slot = self.slot(subgroup)
            slot.view(torch.float32).fill_(self.value(generation))
            for move in self.store.files.writes(subgroup, subgroup.pieces):
                self.handle.sync_pwrite(move.part(slot), move.file, move.file_offset)
            moved |= {piece.number for piece in subgroup.pieces}
        small = {number: {"step": torch.tensor(float(generation))} for number in moved}
        change = Change(moved, dict.fromkeys(moved, True), small)
        self.store.commit(change, [{"lr": 0.5}])

    def value(self, generation: int) -> float:
        return 100.0 * self.number + generation

    def check(self) -> None:
        """What the files hold is of the generation that was resumed."""
        generation = self.store.generation
        assert [each["step"] for each in self.store.small] == [generation] * 3
        for subgroup in self.subgroups:
            slot = self.slot(subgroup)
            for move in self.store.files.weights(subgroup, subgroup.pieces):
                self.handle.sync_pread(move.part(slot), move.file, move.file_offset)
            for piece in subgroup.pieces:
                span = piece.spans["weights"]
                found = slot[span.offset : span.offset + span.nbytes].view(torch.float32)
                assert bool((found == self.value(generation)).all()), (self.number, generation)

    def close(self) -> None:
        self.store.close()
        self.handle.close()
        self.directory.release()


def read(directory: Path) -> list[manifests.Manifest]:
    return manifests.read(str(directory)).complete


def steps_of(store: Any, world: int, timeout_s: float = 60) -> list[DurableSteps]:
    steps = [new_steps(store, rank, world, Made(), timeout_s) for rank in range(world)]
    for each in steps:
        each.stay()
    return steps


def new_steps(store: Any, rank: int, world: int, made: Made, timeout_s: float = 60) -> DurableSteps:
    return DurableSteps(RankStore(store, rank, world, "swap", "step"), timeout_s, made)


def on_all(ranks: list[Any], work: Callable[[Any], object]) -> None:
    """In a thread each; the first failure is raised."""
    failed: list[BaseException] = []

    def run(rank: Any) -> None:
        try:
            work(rank)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    if failed:
        raise failed[0]


@pytest.mark.parametrize("backward_waits", [True, False])
@pytest.mark.parametrize("world", [2, 3])
def test_all_ranks_go_on_from_the_newest_step_that_all_had_durable(
    world: int, backward_waits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One drive was slower to flush: rank 0 had given up the step before, that rank 1 had alone.

    Its manifest, and the data of a newer step under it: wrong bytes without an error.
    """
    folder = tmp_path / "swap"
    folder.mkdir()
    slow = f"rank{world - 1}"
    log = DiskLog(folder, lambda path: time.sleep(0.03) if slow in path else None)
    barrier = threading.Barrier(world)
    tell = DurableSteps.tell

    def told(self: DurableSteps, generation: int) -> None:
        log.note("durable", None, self._store.rank, generation)
        tell(self, generation)

    def train(rank: Rank) -> None:
        rank.store.open()
        barrier.wait(60)  # resume=True: all ranks tell each other what they have
        for generation in range(1, STEPS + 1):
            if backward_waits:
                barrier.wait(60)  # an all-reduce of gradients
            rank.step(generation)
        rank.close()

    with log.recording(monkeypatch):
        monkeypatch.setattr(DurableSteps, "tell", told)
        lockstep = steps_of(dist.HashStore(), world)
        ranks = [Rank(number, folder, steps) for number, steps in enumerate(lockstep)]
        on_all(ranks, train)

    monkeypatch.setattr(manifests, "boot_id", lambda: "after the power came back")
    monkeypatch.setattr(rank_steps, "several", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: world)
    chance = random.Random(world)
    resumed = set()
    for number in range(40):
        at = chance.randrange(len(log) // 4, len(log) + 1)
        image = tmp_path / f"image{number}"
        log.image(at, image, chance)
        durable = [0] * world
        for event in log.events[:at]:
            if event.kind == "durable":
                durable[event.what[0]] = max(durable[event.what[0]], event.what[1])
        if not min(durable):
            continue  # their very first state may be lost
        told_by_all = [
            ([(m.generation, m.run) for m in read(image / f"rank{n}")], "", "run")
            for n in range(world)
        ]

        def gather(into: list[Any], mine: object, told: list[Any] = told_by_all) -> None:
            into[:] = told

        monkeypatch.setattr(dist, "all_gather_object", gather)
        again = [Rank(n, image, None) for n in range(world)]
        generations = set()
        for rank in again:
            assert rank.store.resume() is not None
            rank.store.open()
            rank.check()
            generations.add(rank.store.generation)
            rank.close()
        assert len(generations) == 1
        assert generations.pop() >= min(durable)
        resumed.add(rank.store.generation)
    assert len(resumed) > 2


def test_rank_waits_until_all_have_made_the_step_durable() -> None:
    first, second = steps_of(dist.HashStore(), 2)
    for each in (first, second):
        each.join()
    first.tell(1)
    waited = threading.Event()

    def wait() -> None:
        first.wait(1)
        waited.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert not waited.wait(0.1)
    second.tell(1)
    thread.join(60)
    assert waited.is_set()


def test_rank_that_lost_a_step_is_told_to_those_that_wait() -> None:
    first, second = steps_of(dist.HashStore(), 2)
    for each in (first, second):
        each.join()
        each.tell(4)
    first.tell(5)
    second.lose(5, "the drive failed")
    with pytest.raises(TransferError, match=r"rank 1 of 2 could not .* 5 durable \(the drive"):
        first.wait(5)


def test_rank_that_makes_no_further_step_is_given_up_and_said() -> None:
    first, second = steps_of(dist.HashStore(), 2, timeout_s=0.05)
    for each in (first, second):
        each.join()
        each.tell(4)
    first.tell(5)
    with pytest.raises(TransferError, match="1 of 2 ranks have not made generation 5 durable"):
        first.wait(5)
    second.leave()
    first.wait(5)


def test_ranks_without_such_an_optimizer_are_not_waited_for() -> None:
    first, _ = steps_of(dist.HashStore(), 2)
    first.join()
    first.tell(1)
    first.wait(1)


def test_a_rank_that_joins_late_does_not_wait_for_what_nobody_counts_any_more() -> None:
    """Its first step waited for 300 s, and failed: rank 0 had struck the counts off by then."""
    first, second = steps_of(dist.HashStore(), 2, timeout_s=0.05)
    first.join()
    for generation in range(1, 8):
        first.tell(generation)
        first.wait(generation)
    second.join()
    for generation in range(1, 6):
        second.tell(generation)
        second.wait(generation)
    with pytest.raises(TransferError, match="1 of 2 ranks have not made generation 8 durable"):
        first.tell(8)
        first.wait(8)


def test_ranks_that_resume_wait_for_each_other_from_the_first_step_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank was counted from its own first step on only: a quicker one was eight steps ahead."""
    first, second = steps_of(dist.HashStore(), 2, timeout_s=0.05)
    joined: list[bool] = []

    def agreed(directory: str) -> Agreed:
        joined.append(len(joined) + 1 == store_of(first).add("joined", 0))
        return Agreed(None, [], [], "")  # when all have come so far

    monkeypatch.setattr("nvmeio.offload._generations.generations.agreed", agreed)
    ranks = [Rank(number, tmp_path, steps) for number, steps in enumerate((first, second))]
    for rank in ranks:
        assert rank.store.resume() is None
    assert joined == [True, True]
    ranks[0].store.open()
    ranks[0].step(1)
    with pytest.raises(TransferError, match="1 of 2 ranks have not made generation 1 durable"):
        ranks[0].step(2)
    for rank in ranks:
        rank.close()


def test_state_of_a_killed_process_is_made_durable_when_it_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step after it overwrote the only generation that was."""
    killed = Rank(0, tmp_path, None)
    killed.store.open()
    killed.step(1)
    killed.store.settle()
    with monkeypatch.context() as patch:
        patch.setattr(Generations, "_sync", lambda *_: None)  # killed before
        killed.step(2)
        killed.close()
    resumed = Rank(0, tmp_path, None)
    found = resumed.store.resume()
    assert found is not None and (found.generation, found.durable) == (2, False)
    resumed.store.open()
    resumed.store.settle()
    newest = manifests.newest(resumed.directory.path)
    assert newest is not None and (newest.generation, newest.durable) == (2, True)
    resumed.close()
    assert set(NAMES) <= {path.name for path in (tmp_path / "rank0").iterdir()}


def test_store_timeout_is_that_of_the_process_group() -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=77))
    assert RankStore(store, 0, 1, "", "").timeout_s == 77


@pytest.mark.parametrize("joined", [False, True], ids=["before it joined", "after it joined"])
@pytest.mark.parametrize("late", [False, True], ids=["alone", "when others had closed theirs"])
def test_a_rank_that_was_refused_is_with_the_others_when_it_tries_again(
    joined: bool, late: bool
) -> None:
    """It took another number: nobody waited for it any more, nor it for anybody."""
    store, mine, theirs = dist.HashStore(), Made(), Made()
    other = new_steps(store, 0, 2, theirs)
    other.join()
    other.stay()
    other.tell(1)
    refused = new_steps(store, 1, 2, mine)
    if joined:
        refused.join()
        refused.tell(1)
    refused.leave()
    again = new_steps(store, 1, 2, mine, timeout_s=0.05)
    again.join()
    again.tell(1)
    again.stay()
    if late:
        again.wait(1)  # a state dict is loaded; the others close theirs after that
        other.leave()
        other = new_steps(store, 0, 2, theirs)
        other.join()
        other.stay()
        other.tell(1)
    again.wait(1)
    again.tell(2)
    with pytest.raises(TransferError, match="1 of 2 ranks have not made generation 2"):
        again.wait(2)
    other.wait(1)
    other.tell(2)
    again.wait(2)
    other.wait(2)
    for each in (again, other):
        each.leave()
    third = [new_steps(store, rank, 2, made, 0.05) for rank, made in ((1, mine), (0, theirs))]
    for each in third:
        each.join()
    third[0].tell(1)
    with pytest.raises(TransferError, match="1 of 2 ranks"):
        third[0].wait(1)


def test_an_optimizer_that_is_refused_takes_no_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = dist.HashStore()

    def of_group(group: object, name: str, path: str, operation: str) -> RankStore:
        return RankStore(dist.PrefixStore(name, store), 0, 2, path, operation)

    monkeypatch.setattr(rank_steps, "several", lambda: True)
    monkeypatch.setattr(rank_steps, "_made", Made())
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(RankStore, "of_group", of_group)

    def make() -> SwappedOptimizer:
        weights = [torch.nn.Parameter(torch.ones(10))]
        return SwappedOptimizer(torch.optim.AdamW, weights, swap_dir=tmp_path)

    def refuse(files: StateFiles) -> None:
        raise TransferError(errno.ENOSPC, operation="fallocate", path=str(tmp_path))

    with monkeypatch.context() as full:
        full.setattr(StateFiles, "open", refuse)
        with pytest.raises(TransferError, match="ENOSPC"):
            make()
    for number in (0, 1):
        assert store.add(f"steps/{number}/joined", 0) == 0
        with make():
            assert store.add(f"steps/{number}/joined", 0) == 1
        assert store.add(f"steps/{number}/left", 0) == 1
    assert not store.check(["steps/2/joined"])

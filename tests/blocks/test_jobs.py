"""Jobs of a few blocks each, as servers begin them: moved together, answered one by one."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from support import PATIENCE_S, Block, HeldEngine, random_tensor, spin_until

from nvmeio import AioHandle
from nvmeio._kv_blocks import transfers
from nvmeio._kv_blocks.store import BlockStore
from nvmeio.testing import FakeEngine

BLOCK = 8192
JOBS = 20


class FirstAlone(FakeEngine):
    """Moves what lies in the first slot, and all others once `gate` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()

    def _move(self, block: Block, fd: int, memory: memoryview, offset: int) -> int:
        if offset >= BLOCK:
            self.gate.wait(PATIENCE_S)
        return super()._move(block, fd, memory, offset)


def block(seed: int) -> torch.Tensor:
    return random_tensor(BLOCK, seed)


@pytest.fixture
def engine() -> HeldEngine:
    return HeldEngine()


@pytest.fixture
def store(tmp_path: Path, engine: HeldEngine) -> Iterator[BlockStore]:
    with (
        AioHandle(engine=engine) as handle,
        BlockStore(tmp_path, "kv", BLOCK, 1024 * BLOCK, handle=handle) as made,
    ):
        try:
            yield made
        finally:
            engine.gate.set()


class Answers:
    """The answer to each job, which comes once."""

    def __init__(self) -> None:
        self.of: dict[int, list[bool]] = {}

    def to(self, job: int) -> Callable[[list[bool]], None]:
        def answer(found: list[bool]) -> None:
            assert job not in self.of
            self.of[job] = found

        return answer


def put(store: BlockStore, engine: HeldEngine | FirstAlone, seeds: range) -> None:
    engine.gate.set()
    assert all(store.store([str(seed) for seed in seeds], [block(seed) for seed in seeds]))
    engine.gate.clear()


def test_jobs_that_wait_are_one_submission(store: BlockStore, engine: HeldEngine) -> None:
    """Each was moved by itself: 256 blocks took four times as long as all at once."""
    put(store, engine, range(JOBS + 1))
    handle, answers = store._reads._handle, Answers()
    before, begun = handle.stats.operations, engine.begun
    rooms = [torch.zeros(BLOCK, dtype=torch.uint8) for _ in range(JOBS + 1)]
    for job, room in enumerate(rooms):
        store.begin_load([str(job)], [room], answers.to(job))
        if not job:
            engine.wait_until_begun(begun + 1)  # what comes now waits for it
    engine.gate.set()
    store.drain()
    assert answers.of == {job: [True] for job in range(JOBS + 1)}
    assert all(room.equal(block(job)) for job, room in enumerate(rooms))
    # A batch counts an operation for each of its parts: the kernel was asked twice.
    assert handle.stats.operations - before <= JOBS + 1
    assert engine.begun - begun <= JOBS + 1


def test_stores_that_wait_are_one_submission(store: BlockStore, engine: HeldEngine) -> None:
    answers, calls = Answers(), []
    move = transfers.Transfers.move

    def counted(
        mover: transfers.Transfers, pieces: list[transfers.SlotPiece], *rest: object
    ) -> object:
        calls.append(len(pieces))
        return move(mover, pieces, *rest)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfers.Transfers, "move", counted)
        for job in range(JOBS):
            store.begin_store([f"{job}", f"{job} too"], [block(job)] * 2, answers.to(job))
            if not job:
                engine.wait_until_begun()
        engine.gate.set()
        store.drain()
    assert calls == [2, 2 * (JOBS - 1)]
    assert answers.of == {job: [True, True] for job in range(JOBS)}


def test_each_job_gets_its_own_answer(store: BlockStore, engine: HeldEngine) -> None:
    put(store, engine, range(JOBS))
    answers = Answers()
    engine.gate.set()
    for job in range(JOBS):
        names = [str(job), f"missing {job}"][: 1 + job % 2]
        rooms = [torch.zeros(BLOCK, dtype=torch.uint8) for _ in names]
        store.begin_load(names, rooms, answers.to(job))
    store.drain()
    assert answers.of == {job: [True, False][: 1 + job % 2] for job in range(JOBS)}


def test_a_job_is_answered_while_others_are_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "GROUP_BYTES", BLOCK)
    engine = FirstAlone()
    first, answers = threading.Event(), Answers()
    with (
        AioHandle(engine=engine) as handle,
        BlockStore(tmp_path, "kv", BLOCK, 64 * BLOCK, handle=handle) as store,
    ):
        put(store, engine, range(2))
        rooms = [torch.zeros(BLOCK, dtype=torch.uint8) for _ in range(3)]
        with store._loads._turn:  # its thread waits with the first job, and the others for it
            store.begin_load(["0"], rooms[:1], answers.to(0))
            store.begin_load(["0"], rooms[1:2], lambda _: first.set())
            store.begin_load(["1"], rooms[2:], answers.to(1))
        try:
            assert first.wait(PATIENCE_S)
            assert 1 not in answers.of
        finally:
            engine.gate.set()
        store.drain()
        assert answers.of == {0: [True], 1: [True]}


def test_an_answer_may_ask_for_more(store: BlockStore, engine: HeldEngine) -> None:
    """The worker's thread has the turn while it moves: asking for another would wait for itself."""
    put(store, engine, range(3))
    engine.gate.set()
    answers, again = Answers(), []
    rooms = [torch.zeros(BLOCK, dtype=torch.uint8) for _ in range(3)]
    with store._loads._turn:
        store.begin_load(["0"], rooms[:1], lambda _: again.append(store.load(["2"], rooms[2:])))
        store.begin_load(["1"], rooms[1:2], answers.to(1))
    store.drain()
    assert again == [[True]]
    assert answers.of == {1: [True]}
    assert all(room.equal(block(seed)) for seed, room in enumerate(rooms))


def test_an_answer_that_raises_costs_no_other_job(
    store: BlockStore, engine: HeldEngine, caplog: pytest.LogCaptureFixture
) -> None:
    put(store, engine, range(3))
    engine.gate.set()
    answers = Answers()

    def fail(_: list[bool]) -> None:
        raise RuntimeError("the server's own")

    with store._loads._turn, caplog.at_level(logging.ERROR, "nvmeio"):
        for job in range(3):
            room = torch.zeros(BLOCK, dtype=torch.uint8)
            store.begin_load([str(job)], [room], answers.to(job) if job != 1 else fail)
    store.drain()
    assert answers.of == {0: [True], 2: [True]}
    assert "the server's own" in caplog.text


def test_a_job_that_fails_as_a_whole_costs_no_other(
    store: BlockStore, engine: HeldEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, engine, range(3))
    engine.gate.set()
    answers, move = Answers(), transfers.Transfers.move
    rooms = [torch.zeros(BLOCK, dtype=torch.uint8) for _ in range(3)]

    def failing(
        mover: transfers.Transfers, pieces: list[transfers.SlotPiece], *rest: object
    ) -> object:
        if any(piece.block is rooms[1] for piece in pieces):
            raise MemoryError("of one job")
        return move(mover, pieces, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(transfers.Transfers, "move", failing)
    with store._loads._turn:
        for job, room in enumerate(rooms):
            store.begin_load([str(job)], [room], answers.to(job))
    store.drain()
    assert answers.of == {0: [True], 1: [False], 2: [True]}


def test_what_is_asked_between_two_jobs_comes_between_them(
    store: BlockStore, engine: HeldEngine
) -> None:
    answers = Answers()
    with store._stores._turn:
        store.begin_store(["a"], [block(1)], answers.to(0))
        clearing = threading.Thread(target=store.clear)
        clearing.start()
    engine.gate.set()
    clearing.join(PATIENCE_S)
    store.begin_store(["b"], [block(2)], answers.to(1))
    store.drain()
    assert store.contains(["b"]) == [True]
    assert answers.of == {0: [True], 1: [True]}


def test_blocks_smaller_than_a_slot_make_room_for_one_another(
    store: BlockStore, engine: HeldEngine
) -> None:
    """Their bytes were added up, not their slots: of 2,000 jobs, half were refused."""
    answers, small = Answers(), torch.ones(16, dtype=torch.uint8)
    engine.gate.set()
    with store._stores._turn:
        for job in range(2000):
            store.begin_store([str(job)], [small], answers.to(job))
    store.drain()
    assert answers.of == {job: [True] for job in range(2000)}
    assert store.stats.refused == 0


def test_who_is_told_of_a_damaged_block_can_store_it_again(
    store: BlockStore, engine: HeldEngine
) -> None:
    """It was still there then, so that it was not written, and dropped afterwards."""
    put(store, engine, range(2))
    engine.gate.set()
    slot = store._catalog.index.where[store._digests(["0"])[0]].slot
    with open(store.path, "r+b") as blocks:
        blocks.seek(slot * BLOCK)
        blocks.write(bytes(BLOCK))
    room, seen = torch.zeros(BLOCK, dtype=torch.uint8), []

    def answer(found: list[bool]) -> None:
        seen.append((found, store.contains(["0"]), store.store(["0"], [block(0)])))

    store.begin_load(["0"], [room], answer)
    store.drain()
    assert seen == [([False], [False], [True])]
    assert store.load(["0"], [room]) == [True]
    assert room.equal(block(0))


def test_jobs_that_come_and_come_keep_nobody_waiting(store: BlockStore, engine: HeldEngine) -> None:
    """Each came while another was moved, and went before whatever else its thread was asked."""
    put(store, engine, range(1))
    engine.gate.set()
    begun, asked = 0, threading.Event()

    def again(_: list[bool]) -> None:
        nonlocal begun
        begun += 1
        if begun < 500:
            store.begin_load(["0"], [torch.zeros(BLOCK, dtype=torch.uint8)], again)
        if begun == 1:
            assert asked.wait(PATIENCE_S)

    store.begin_load(["0"], [torch.zeros(BLOCK, dtype=torch.uint8)], again)
    served = store._loads.owner.begin(lambda: begun)
    asked.set()
    assert store._loads.owner.answer(served) < 10
    store.drain()
    spin_until(lambda: begun == 500)

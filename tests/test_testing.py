"""FakeEngine: real bytes, and every fault that can be ordered."""

from __future__ import annotations

import errno
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support import HeldEngine, bytes_tensor, random_bytes, raw, spin_until

import nvmeio
from nvmeio.engines import threads
from nvmeio.engines.base import Options
from nvmeio.engines.threads import Block
from nvmeio.testing import FakeEngine

Make = Callable[..., nvmeio.AioHandle]
KIB = 1024
DATA = random_bytes(128 * KIB)


@pytest.fixture
def file(path: Path) -> Path:
    path.write_bytes(DATA)
    return path


def target(nbytes: int = len(DATA)) -> torch.Tensor:
    return nvmeio.empty_aligned(nbytes, dtype=torch.uint8)


def test_it_moves_real_bytes(new_handle: Make, path: Path) -> None:
    engine = FakeEngine()
    handle = new_handle(engine)
    assert handle.engine == engine.name == "fake"
    assert handle.sync_pwrite(bytes_tensor(DATA), path) == len(DATA)
    assert path.read_bytes() == DATA
    got = target()
    assert handle.sync_pread(got, path) == len(DATA)
    assert raw(got) == DATA
    assert engine.system_calls >= 2 * len(DATA) // (16 * KIB)
    assert engine.refusals == 0


# Delay


def test_delay(new_handle: Make, file: Path) -> None:
    handle = new_handle(FakeEngine(delay_s=0.05))
    before = time.monotonic()
    handle.sync_pread(target(4096), file)
    assert time.monotonic() - before >= 0.05


def test_delay_by_block(new_handle: Make, file: Path) -> None:
    asked: list[tuple[str, int, int]] = []

    def delay(kind: str, file_offset: int, nbytes: int) -> float:
        asked.append((kind, file_offset, nbytes))
        return 0.05 if file_offset == 32 * KIB else 0.0

    handle = new_handle(FakeEngine(delay_s=delay), queue_depth=1)
    before = time.monotonic()
    handle.sync_pread(target(64 * KIB), file)
    assert time.monotonic() - before >= 0.05
    assert asked == [("pread", n * 16 * KIB, 16 * KIB) for n in range(4)]
    asked.clear()
    handle.sync_pwrite(target(16 * KIB), file)
    assert asked == [("pwrite", 0, 16 * KIB)]


# Reorder


def served_in_order(seed: int, reorder: bool, file: Path) -> list[int]:
    served: list[int] = []

    class Watching(HeldEngine):
        def _choose(self, queue: deque[Block]) -> Block:
            block = super()._choose(queue)
            served.append(block.offset)
            return block

    engine = Watching(reorder=reorder, seed=seed)
    # One worker, so that the order in which blocks are chosen is the order in which they move.
    with nvmeio.AioHandle(4096, 128, engine=engine) as handle:
        operation = handle.async_pread(target(), file)
        engine.wait_until_begun()
        engine.gate.set()
        assert operation.result(100) == len(DATA)
    return served


def test_reorder_serves_blocks_out_of_their_order(file: Path) -> None:
    offsets = [n * 4096 for n in range(32)]
    assert served_in_order(0, False, file) == offsets
    shuffled = served_in_order(1, True, file)
    assert shuffled != offsets
    assert sorted(shuffled) == offsets


# Short transfers


@pytest.mark.parametrize("short", [0.01, 0.5, 0.99])
def test_short_transfers_are_continued(new_handle: Make, path: Path, short: float) -> None:
    engine = FakeEngine(short=short)
    handle = new_handle(engine)
    assert handle.sync_pwrite(bytes_tensor(DATA), path) == len(DATA)
    got = target()
    assert handle.sync_pread(got, path) == len(DATA)
    assert raw(got) == DATA
    assert engine.system_calls > 2 * len(DATA) // (16 * KIB)


@pytest.mark.parametrize("short", [0, 1, -0.5, 1.5])
def test_a_share_that_is_none(short: float) -> None:
    with pytest.raises(ValueError, match="short must lie between 0 and 1"):
        FakeEngine(short=short)


# Errors


def test_errors_by_offset(new_handle: Make, file: Path) -> None:
    handle = new_handle(FakeEngine(fail={32 * KIB: errno.EIO}), queue_depth=1)
    operation = handle.async_pread(target(), file)
    failure = operation.exception(100)
    assert isinstance(failure, nvmeio.TransferError)
    assert (failure.errno, failure.transferred) == (errno.EIO, 32 * KIB)
    got = target(32 * KIB)
    assert handle.sync_pread(got, file) == 32 * KIB


def test_errors_by_function(new_handle: Make, file: Path) -> None:
    asked: list[tuple[str, int, int]] = []

    def fail(kind: str, file_offset: int, nbytes: int) -> int:
        asked.append((kind, file_offset, nbytes))
        return errno.ENOSPC if kind == "pwrite" else 0

    handle = new_handle(FakeEngine(fail=fail))
    assert handle.sync_pread(target(4096), file) == 4096
    failure = handle.async_pwrite(target(4096), file).exception(100)
    assert isinstance(failure, nvmeio.TransferError)
    assert (failure.errno, failure.transferred) == (errno.ENOSPC, 0)
    assert asked == [("pread", 0, 4096), ("pwrite", 0, 4096)]
    assert file.read_bytes() == DATA


@pytest.mark.parametrize("code", [errno.EINTR, errno.EAGAIN])
def test_passing_errors_are_transparent(new_handle: Make, file: Path, code: int) -> None:
    attempts = 0

    def fail(kind: str, file_offset: int, nbytes: int) -> int:
        nonlocal attempts
        attempts += 1
        return code if attempts % 3 else 0

    handle = new_handle(FakeEngine(fail=fail), queue_depth=1)
    got = target()
    assert handle.sync_pread(got, file) == len(DATA)
    assert raw(got) == DATA
    assert attempts == 3 * len(DATA) // (16 * KIB)


# A queue that refuses


def test_partial_acceptance_is_transparent(new_handle: Make, file: Path) -> None:
    engine = FakeEngine(accept=lambda n: (n + 1) // 2)
    handle = new_handle(engine, block_size=4096, queue_depth=16)
    got = target()
    assert handle.sync_pread(got, file) == len(DATA)
    assert raw(got) == DATA
    assert engine.refusals > 0


def test_a_full_queue_is_asked_again(new_handle: Make, file: Path) -> None:
    asked = 0

    def accept(n: int) -> int:
        nonlocal asked
        asked += 1
        return n if asked % 4 == 0 else 0

    engine = FakeEngine(accept=accept)
    handle = new_handle(engine)
    got = target()
    assert handle.sync_pread(got, file) == len(DATA)
    assert raw(got) == DATA
    assert engine.refusals >= 3


def test_a_queue_that_accepts_nothing_is_given_up(
    new_handle: Make, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "REFUSED_LIMIT_S", 0.05)
    open_for_business = threading.Event()
    engine = FakeEngine(accept=lambda n: n if open_for_business.is_set() else 0)
    handle = new_handle(engine)
    failure = handle.async_pread(target(), file).exception(100)
    assert isinstance(failure, nvmeio.TransferError)
    assert isinstance(failure, BlockingIOError)
    assert (failure.errno, failure.transferred) == (errno.EAGAIN, 0)
    open_for_business.set()
    assert handle.sync_pread(target(), file) == len(DATA)


def test_a_cancelled_operation_leaves_a_full_queue(new_handle: Make, file: Path) -> None:
    """Its blocks are not in the kernel: nothing has to be waited for."""
    accepting = threading.Event()
    engine = FakeEngine(accept=lambda n: n if accepting.is_set() else 0)
    handle = new_handle(engine)
    operation = handle.async_pread(target(), file)
    spin_until(lambda: engine.refusals > 0)
    assert operation.cancel()
    spin_until(operation.done)
    assert operation.cancelled()
    assert engine.system_calls == 0
    accepting.set()
    assert handle.sync_pread(target(), file) == len(DATA)


@pytest.mark.parametrize("answer", [-3, 1000])
def test_an_answer_out_of_range_is_brought_into_it(
    new_handle: Make, file: Path, answer: int
) -> None:
    answers = deque([answer] * 3)
    engine = FakeEngine(accept=lambda n: answers.popleft() if answers else n)
    handle = new_handle(engine)
    got = target()
    assert handle.sync_pread(got, file) == len(DATA)
    assert raw(got) == DATA


# Hold


def test_hold_keeps_every_block_from_moving(new_handle: Make, file: Path) -> None:
    gate = threading.Event()
    engine = FakeEngine(hold=gate)
    handle = new_handle(engine)
    got = target().zero_()
    operation = handle.async_pread(got, file)
    try:
        time.sleep(0.02)
        assert not operation.done()
        assert engine.system_calls == 0
        assert (got == 0).all()
        assert handle.stats.in_flight == 1
    finally:
        gate.set()
    assert operation.result(100) == len(DATA)
    assert raw(got) == DATA


# As an engine


def test_it_is_started_once() -> None:
    engine = FakeEngine()
    with (
        nvmeio.AioHandle(engine=engine),
        pytest.raises(RuntimeError, match="one engine serves one handle"),
    ):
        engine.start(Options())


def test_everything_at_once(new_handle: Make, path: Path) -> None:
    """Reordered, short, refused and slow, on small queues: still every byte."""
    for seed in range(10):
        engine = FakeEngine(
            delay_s=lambda *_: 0.0005,
            reorder=True,
            short=0.3,
            accept=lambda n: n // 2 if n > 1 else n,
            seed=seed,
        )
        handle = new_handle(
            engine,
            block_size=12288,
            queue_depth=1 + seed % 5,
            overlap_events=bool(seed % 2),
            single_submit=seed % 3 == 0,
        )
        tensors = [bytes_tensor(DATA[n : n + 30_000]) for n in range(0, 120_000, 30_000)]
        writes = [handle.async_pwrite(t, path, 30_000 * n + 7) for n, t in enumerate(tensors)]
        assert [write.result(100) for write in writes] == [30_000] * 4
        assert path.read_bytes()[7:] == DATA[:120_000]
        got = target(120_000)
        assert handle.sync_pread(got, path, 7) == 120_000
        assert raw(got) == DATA[:120_000]


def test_the_example_in_its_documentation(file: Path) -> None:
    engine = FakeEngine(fail={1 << 20: errno.EIO})
    big = torch.zeros(2 << 20, dtype=torch.uint8)
    with pytest.raises(nvmeio.TransferError), nvmeio.AioHandle(engine=engine) as handle:
        handle.sync_pwrite(big, file)


# What the options mean, seen from the kernel's side of the queue


def test_no_more_blocks_in_the_kernel_than_queue_depth(new_handle: Make, file: Path) -> None:
    taken = 0

    def accept(n: int) -> int:
        nonlocal taken
        taken += n
        return n

    engine = HeldEngine(accept=accept)
    handle = new_handle(engine, block_size=4096, queue_depth=3, intra_op_parallelism=2)
    operation = handle.async_pread(target(), file)
    try:
        engine.wait_until_begun(6)
        time.sleep(0.01)
        assert taken == 6  # of 32
    finally:
        engine.gate.set()
    assert operation.result(100) == len(DATA)
    assert taken == 32


@pytest.mark.parametrize("single_submit", [False, True])
def test_single_submit_hands_over_one_block_a_call(
    new_handle: Make, file: Path, single_submit: bool
) -> None:
    offered: list[int] = []
    engine = FakeEngine(accept=lambda n: offered.append(n) or n)  # type: ignore[func-returns-value]
    handle = new_handle(engine, block_size=4096, queue_depth=8, single_submit=single_submit)
    handle.sync_pread(target(), file)
    assert sum(offered) == 32
    assert (max(offered) == 1) is single_submit


@pytest.mark.parametrize("overlap_events", [False, True])
def test_overlap_events_refills_before_the_queue_is_empty(
    new_handle: Make, file: Path, overlap_events: bool
) -> None:
    left_when_filled: list[int] = []
    in_kernel = 0
    lock = threading.Lock()

    class Counting(FakeEngine):
        def _accept(self, blocks: list[Block]) -> int:
            nonlocal in_kernel
            with lock:
                left_when_filled.append(in_kernel)
                in_kernel += len(blocks)
            return super()._accept(blocks)

        def _move(self, block: Block, fd: int, memory: memoryview, offset: int) -> int:
            nonlocal in_kernel
            moved = super()._move(block, fd, memory, offset)
            with lock:
                in_kernel -= 1
            return moved

    handle = new_handle(
        Counting(delay_s=lambda kind, offset, _: 0.002 if offset % 8192 else 0.0),
        block_size=4096,
        queue_depth=8,
        overlap_events=overlap_events,
    )
    handle.sync_pread(target(), file)
    assert (max(left_when_filled) > 0) is overlap_events

"""Spans of files into memory: planning, places, errors, cancelling, devices."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import gc
import os
import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import (
    PATIENCE_S,
    HeldEngine,
    on_every_loop,
    random_bytes,
    spin_until,
    spin_until_collected,
    thread,
    until,
)

import nvmeio
from nvmeio._io import spans as span_reads
from nvmeio._io import spans as spans_module
from nvmeio._io.spans import Load, Span, inside, plan_reads, read
from nvmeio._memory import mappings
from nvmeio._memory import mappings as mappings_module
from nvmeio._memory.mappings import Prefault
from nvmeio._pages import PAGE_BYTES
from nvmeio._threads.interruptible import in_thread

NewHandle = Callable[..., nvmeio.AioHandle]

# Every kind of length: none, less than a page, several pages, beyond OWN_BYTES (see `small`).
LENGTHS = [0, 1, 100, 4096, 5000, 70_000, 300_000]
GAPS = [0, 0, 1, 64, 300, 4096, 100_000]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits small enough for small files to meet all of them."""
    monkeypatch.setattr(spans_module, "OWN_BYTES", 256 << 10)
    monkeypatch.setattr(spans_module, "ARENA_BYTES", 128 << 10)
    monkeypatch.setattr(span_reads, "CHUNK_BYTES", 96 << 10)
    monkeypatch.setattr(span_reads, "GROUP_BYTES", 64 << 10)


def some_spans(path: Path, data: bytes, seed: int) -> list[Span]:
    rng = random.Random(seed)
    spans: list[Span] = []
    offset = rng.choice(GAPS)
    while offset < len(data):
        nbytes = min(rng.choice(LENGTHS), len(data) - offset)
        spans.append(Span(path, offset, nbytes, f"tensor {len(spans)}"))
        offset += nbytes + rng.choice(GAPS)
    rng.shuffle(spans)
    return spans


async def async_read(handle: nvmeio.AioHandle, spans: Sequence[Span]) -> list[torch.Tensor]:
    """`read` as loads that are awaited do it."""
    load = Load()
    return await in_thread(lambda: load.run(handle, spans, torch.device("cpu")), load.cancel)


def assert_holds(spans: Sequence[Span], found: Sequence[torch.Tensor], data: bytes) -> None:
    assert len(found) == len(spans)
    for span, tensor in zip(spans, found, strict=True):
        assert tensor.dtype is torch.uint8
        assert tensor.shape == (span.nbytes,)
        assert tensor.untyped_storage().nbytes() == span.nbytes
        assert bytes(tensor.numpy()) == data[span.offset : span.offset + span.nbytes]


# Planning


@st.composite
def span_lists(draw: st.DrawFn) -> tuple[list[Span], list[int], list[int]]:
    spans: list[Span] = []
    keys: list[int] = []
    sizes: list[int] = []
    for key in range(draw(st.integers(1, 3))):
        offset = 0
        for _ in range(draw(st.integers(0, 12))):
            offset += draw(st.sampled_from([0, 1, 4095, 4096, 65_536, 65_537, 1 << 20, 1 << 33]))
            nbytes = draw(
                st.sampled_from([0, 1, 64, 4096, 1 << 20, (8 << 20) - 1, 8 << 20, 9 << 30])
            )
            spans.append(Span(f"file {key}", offset, nbytes))
            keys.append(key)
            offset += nbytes
        sizes.append(offset + draw(st.sampled_from([0, 1, 5000])))
    order = draw(st.permutations(range(len(spans))))
    return [spans[i] for i in order], [keys[i] for i in order], sizes


@given(span_lists())
def test_a_plan_reads_every_span_once_to_its_place(
    case: tuple[list[Span], list[int], list[int]],
) -> None:
    spans, keys, sizes = case
    placed: set[int] = set()
    for region in plan_reads(spans, keys, sizes):
        assert region.nbytes % PAGE_BYTES == 0
        ends = 0
        for run in region.runs:
            assert run.start % PAGE_BYTES == run.at % PAGE_BYTES == 0
            assert run.end % PAGE_BYTES == 0 or run.end == sizes[run.file]
            assert run.start < run.end <= sizes[run.file]
            assert ends <= run.at
            ends = run.at + run.end - run.start
            assert ends <= region.nbytes
        for index, at in region.places:
            assert index not in placed
            placed.add(index)
            span = spans[index]
            assert any(
                run.file == keys[index]
                and run.start <= span.offset
                and span.offset + span.nbytes <= run.end
                and at - run.at == span.offset - run.start
                for run in region.runs
            )
        own = [index for index, _ in region.places if spans[index].nbytes >= spans_module.OWN_BYTES]
        assert not own or len(region.places) == 1
        assert own or region.nbytes <= spans_module.ARENA_BYTES
    assert placed == {index for index, span in enumerate(spans) if span.nbytes}


@given(span_lists())
def test_what_is_inside_a_run_is_found(case: tuple[list[Span], list[int], list[int]]) -> None:
    spans, keys, sizes = case
    for region in plan_reads(spans, keys, sizes):
        for run in region.runs:
            first, last = run.at, run.at + run.end - run.start
            assert inside(run, region, spans) == [
                (index, at)
                for index, at in region.places
                if at < last and at + spans[index].nbytes > first
            ]


def test_neighbours_are_read_in_one_go() -> None:
    spans = [Span("f", 100 + 5000 * n, 4000) for n in range(100)]
    regions = plan_reads(spans, [0] * 100, [1 << 20])
    assert [len(region.runs) for region in regions] == [1]


def test_a_wide_hole_is_not_read() -> None:
    spans = [Span("f", 0, 10), Span("f", 1 << 20, 10)]
    (region,) = plan_reads(spans, [0, 0], [2 << 20])
    assert [(run.start, run.end) for run in region.runs] == [(0, 4096), (1 << 20, (1 << 20) + 4096)]
    assert region.nbytes == 8192


def test_spans_that_overlap_are_refused() -> None:
    spans = [Span("f", 0, 10, "first"), Span("f", 9, 10, "second")]
    with pytest.raises(ValueError, match=r"first \[0, 10\) and second \[9, 19\) overlap"):
        plan_reads(spans, [0, 0], [100])
    assert plan_reads(spans, [0, 1], [100, 100])  # in two files they do not


# Reading


@pytest.mark.parametrize("seed", range(3))
def test_spans_are_read(path: Path, handle: nvmeio.AioHandle, small: None, seed: int) -> None:
    data = random_bytes(1_500_000 + seed)
    path.write_bytes(data)
    spans = some_spans(path, data, seed)
    found = read(handle, spans)
    assert_holds(spans, found, data)
    for span, tensor in zip(spans, found, strict=True):
        if span.nbytes:
            assert tensor.data_ptr() % PAGE_BYTES == span.offset % PAGE_BYTES


def test_several_files_are_read_together(
    tmp_path: Path, handle: nvmeio.AioHandle, small: None
) -> None:
    data = [random_bytes(400_000, seed) for seed in range(3)]
    spans: list[Span] = []
    for number, content in enumerate(data):
        (tmp_path / str(number)).write_bytes(content)
        spans += some_spans(tmp_path / str(number), content, number)
    random.Random(0).shuffle(spans)
    with nvmeio.open(tmp_path / "1") as opened:
        spans = [s._replace(file=opened) if str(s.file).endswith("1") else s for s in spans]
        found = read(handle, spans)
        assert not opened.closed
    for span, tensor in zip(spans, found, strict=True):
        content = data[1 if span.file is opened else int(Path(str(span.file)).name)]
        assert bytes(tensor.numpy()) == content[span.offset : span.offset + span.nbytes]


@on_every_loop
async def test_spans_are_read_awaited(path: Path, handle: nvmeio.AioHandle, small: None) -> None:
    data = random_bytes(700_000)
    path.write_bytes(data)
    spans = some_spans(path, data, 7)
    first, second = await asyncio.gather(async_read(handle, spans), async_read(handle, spans))
    assert_holds(spans, first, data)
    assert_holds(spans, second, data)


def test_spans_are_read_blocking_on_a_running_loop(path: Path, new_handle: NewHandle) -> None:
    """As a notebook does it, whose cells run on a loop."""
    data = random_bytes(50_000)
    path.write_bytes(data)
    spans = some_spans(path, data, 3)

    async def cell() -> list[torch.Tensor]:
        return read(new_handle("threads"), spans)

    assert_holds(spans, asyncio.run(cell()), data)


def test_reads_are_direct_and_nothing_is_bounced(
    direct_path: Path, new_handle: NewHandle, small: None
) -> None:
    data = random_bytes(1 << 20)  # whole pages: the last block is, too
    direct_path.write_bytes(data)
    handle = new_handle("auto")
    spans = some_spans(direct_path, data, 1)
    found = read(handle, spans)
    assert_holds(spans, found, data)
    assert handle.stats.bounced_bytes == handle.stats.buffered_bytes == 0
    assert handle.stats.direct_bytes >= sum(span.nbytes for span in spans)


def test_memory_goes_with_the_tensors_of_its_arena(
    path: Path, new_handle: NewHandle, small: None
) -> None:
    path.write_bytes(random_bytes(1 << 20))
    spans = [Span(path, 0, 1000), Span(path, 2000, 1000), Span(path, 8192, 512 << 10)]
    first, second, large = read(new_handle("threads"), spans)
    memory = first.untyped_storage().data_ptr()
    address, apart = memory - memory % PAGE_BYTES, large.data_ptr()
    assert nvmeio.buffers.owns(address, 1)
    del first, large
    # The thread that has read them may not have ended yet.
    spin_until_collected(lambda: not nvmeio.buffers.owns(apart, 1))
    assert nvmeio.buffers.owns(address, 1)  # `second` lies there, too
    del second
    spin_until_collected(lambda: not nvmeio.buffers.owns(address, 1))


def test_a_default_device_of_torch_does_not_matter(path: Path, new_handle: NewHandle) -> None:
    path.write_bytes(b"12345")
    with torch.device("meta"):
        found = read(new_handle("threads"), [Span(path, 1, 3), Span(path, 0, 0)])
    assert [bytes(tensor.numpy()) for tensor in found] == [b"234", b""]


def test_nothing_is_read_for_no_spans(new_handle: NewHandle) -> None:
    handle = new_handle("threads")
    assert read(handle, []) == []
    assert handle.stats.operations == 0


# Other devices


def test_spans_on_meta_are_not_read(new_handle: NewHandle) -> None:
    handle = new_handle("threads")
    (found,) = read(handle, [Span("/nowhere/at all", 0, 1 << 50)], "meta")
    assert found.is_meta
    assert found.shape == (1 << 50,)
    assert handle.stats.operations == 0


@pytest.mark.parametrize("seed", range(3))
def test_chunks_are_passed_on_to_a_device(
    path: Path,
    new_handle: NewHandle,
    small: None,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
) -> None:
    """The ring's arithmetic, with the CPU in the place of the device."""
    monkeypatch.setattr(span_reads.Load, "_on_host", property(lambda self: False))
    data = random_bytes(1_500_000 + seed)
    path.write_bytes(data)
    spans = some_spans(path, data, seed)
    assert_holds(spans, read(new_handle("threads"), spans), data)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_spans_are_read_to_a_gpu(path: Path, new_handle: NewHandle, small: None) -> None:
    data = random_bytes(1_500_000)
    path.write_bytes(data)
    spans = some_spans(path, data, 5)
    found = read(new_handle("auto"), spans, "cuda")
    assert all(tensor.is_cuda for tensor in found)
    assert_holds(spans, [tensor.cpu() for tensor in found], data)


# Errors


def test_a_span_beyond_the_file_is_refused_before_anything_is_allocated(
    path: Path, new_handle: NewHandle
) -> None:
    path.write_bytes(b"x" * 100)
    handle = new_handle("threads")
    spans = [Span(path, 0, 10, "whole"), Span(path, 90, 1 << 60, "layers.0.weight")]
    with pytest.raises(nvmeio.ShortTransferError, match=r"ends at byte 100.*layers\.0\.weight"):
        read(handle, spans)
    assert handle.stats.operations == 0


def test_a_missing_file_is_told(tmp_path: Path, new_handle: NewHandle) -> None:
    with pytest.raises(FileNotFoundError, match="no-such"):
        read(new_handle("threads"), [Span(tmp_path / "no-such", 0, 1)])


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 5), (5, -1)])
def test_negative_spans_are_refused(
    path: Path, new_handle: NewHandle, offset: int, nbytes: int
) -> None:
    with pytest.raises(ValueError, match="negative"):
        read(new_handle("threads"), [Span(path, offset, nbytes)])


def test_more_than_there_is_memory_is_refused(path: Path, new_handle: NewHandle) -> None:
    """Mapped one by one and not touched, the parts would all have fitted."""
    part, parts = 1 << 30, 1 << 12
    with path.open("wb") as file:
        file.truncate(part * parts)
    with pytest.raises(MemoryError, match="more than is available"):
        read(new_handle("threads"), [Span(path, n * part, part) for n in range(parts)])


class FailingEngine(nvmeio.testing.FakeEngine):
    """Reads of one place fail."""

    def __init__(self, offset: int) -> None:
        self.offset = offset
        super().__init__()

    def _move(self, block: object, fd: int, memory: memoryview, offset: int) -> int:
        if offset == self.offset:
            raise OSError(5, "broken")
        return super()._move(block, fd, memory, offset)  # type: ignore[arg-type]


def test_a_failed_read_names_file_and_spans(path: Path, new_handle: NewHandle) -> None:
    path.write_bytes(bytes(1 << 20))
    spans = [Span(path, n * 100_000, 1000, f"layers.{n}.weight") for n in range(10)]
    handle = new_handle(FailingEngine(300_000 // 4096 * 4096))
    with pytest.raises(nvmeio.TransferError, match=r"read for layers\.3\.weight") as caught:
        read(handle, spans)
    assert str(path) in str(caught.value)
    assert caught.value.errno == 5
    assert handle.stats.in_flight == 0


def test_many_reads_are_one_operation(
    path: Path, handle: nvmeio.AioHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = bytes(range(256)) * (1 << 14)
    path.write_bytes(data)
    begun: list[int] = []
    begin = nvmeio.AioHandle.async_pread_batch

    def counted(self: nvmeio.AioHandle, tensors: Any, *places: Any) -> nvmeio.Operation:
        begun.append(len(tensors))
        return begin(self, tensors, *places)

    monkeypatch.setattr(nvmeio.AioHandle, "async_pread_batch", counted)
    spans = [Span(path, at, 300) for at in range(100, len(data) - 300, 100_000)]
    found = read(handle, spans)
    assert begun == [len(spans)]
    assert_holds(spans, found, data)


def test_a_failure_in_a_later_operation_is_told_of_its_spans(
    path: Path, new_handle: NewHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.write_bytes(bytes(1 << 20))
    monkeypatch.setattr(span_reads, "GROUP_BYTES", 3 * 4096)
    handle = new_handle(FailingEngine(700_000 // 4096 * 4096))
    with pytest.raises(nvmeio.TransferError, match=r"read for number 7\.") as caught:
        read(handle, [Span(path, n * 100_000, 1000, f"number {n}.") for n in range(10)])
    assert not isinstance(caught.value, nvmeio.BatchError) and caught.value.errno == 5
    assert isinstance(caught.value.__cause__, nvmeio.TransferError)
    assert handle.stats.in_flight == 0


# Cancelling


async def test_cancelling_leaves_nothing_in_flight(
    path: Path, handle_held: nvmeio.AioHandle, engine_held: HeldEngine
) -> None:
    path.write_bytes(bytes(1 << 20))
    spans = [Span(path, n * 200_000, 1000) for n in range(5)]
    task = asyncio.create_task(async_read(handle_held, spans))
    await until(lambda: engine_held.begun > 0)
    task.cancel()
    await asyncio.sleep(0.01)
    task.cancel()  # asked again: it still waits for the drive
    await asyncio.sleep(0.01)
    assert not task.done()
    engine_held.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert handle_held.stats.in_flight == 0


def test_an_abandoned_read_ends(
    path: Path, handle_held: nvmeio.AioHandle, engine_held: HeldEngine
) -> None:
    """Its loop is gone before the drive is done."""
    path.write_bytes(bytes(1 << 20))
    loop = asyncio.new_event_loop()
    task = loop.create_task(async_read(handle_held, [Span(path, 0, 1000)]))
    loop.run_until_complete(until(lambda: engine_held.begun > 0))
    coroutine = task.get_coro()
    assert coroutine is not None
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    coroutine.close()
    loop.close()
    engine_held.gate.set()
    spin_until(lambda: handle_held.stats.in_flight == 0)


def test_an_interrupt_leaves_nothing_in_flight(
    path: Path, handle_held: nvmeio.AioHandle, engine_held: HeldEngine
) -> None:
    path.write_bytes(bytes(1 << 20))

    def interrupt() -> None:
        engine_held.wait_until_begun()
        os.kill(os.getpid(), 2)
        engine_held.gate.set()

    with pytest.raises(KeyboardInterrupt), thread(interrupt):
        read(handle_held, [Span(path, 0, 1 << 20)])
    assert handle_held.stats.in_flight == 0


async def test_the_loop_runs_on_meanwhile(
    path: Path, handle_held: nvmeio.AioHandle, engine_held: HeldEngine
) -> None:
    path.write_bytes(bytes(100_000))
    task = asyncio.create_task(async_read(handle_held, [Span(path, 0, 100_000)]))
    await until(lambda: engine_held.begun > 0)
    turns = 0
    while turns < 100:
        await asyncio.sleep(0)
        turns += 1
    assert not task.done()
    engine_held.gate.set()
    (found,) = await task
    assert not found.any()


async def test_results_are_not_kept(path: Path, new_handle: NewHandle) -> None:
    path.write_bytes(bytes(100_000))
    found = await async_read(new_handle("threads"), [Span(path, 0, 100_000)])
    address = found[0].data_ptr()
    del found
    gc.collect()
    await until(lambda: not nvmeio.buffers.owns(address, 1))  # the thread may not have ended yet


# Prefault


def test_new_memory_is_touched_beside_the_reads(
    path: Path, new_handle: NewHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    touched: list[int] = []

    def madvise(address: int, nbytes: int, advice: int) -> int:
        touched.append(nbytes)
        return 0

    data = random_bytes(300_000)
    path.write_bytes(data)
    spans = some_spans(path, data, 11)
    handle = new_handle("threads")
    monkeypatch.setattr(mappings_module, "PREFAULT_FROM_BYTES", 1)
    monkeypatch.setattr(mappings_module, "_POPULATE_BYTES", 64 << 10)
    assert_holds(spans, read(handle, spans), data)  # by the real one
    monkeypatch.setattr(mappings_module, "_madvise", madvise)
    with Prefault([mappings.Mapping(1 << 20), mappings.Mapping(96 << 10)]):
        spin_until(lambda: sum(touched) == (1 << 20) + (96 << 10))


def test_it_begins_at_the_end() -> None:
    first, second = mappings.Mapping(40 << 20), mappings.Mapping(4096)
    pieces = list(mappings_module.backwards([first, second]))
    assert [nbytes >> 12 for _, nbytes in pieces] == [1, 2048, 4096, 4096]
    assert [address - first.address for address, _ in pieces[1:]] == [32 << 20, 16 << 20, 0]


def test_memory_that_is_not_there_is_an_error(
    path: Path, new_handle: NewHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = threading.Event()

    def madvise(address: int, nbytes: int, advice: int) -> int:
        refused.set()
        ctypes.set_errno(errno.ENOMEM)
        return -1

    class AfterThat(nvmeio.testing.FakeEngine):
        def _move(self, block: object, fd: int, memory: memoryview, offset: int) -> int:
            assert refused.wait(PATIENCE_S)
            spin_until(
                lambda: not [t for t in threading.enumerate() if t.name == "nvmeio-prefault"]
            )
            return super()._move(block, fd, memory, offset)  # type: ignore[arg-type]

    path.write_bytes(bytes(1 << 20))
    monkeypatch.setattr(mappings_module, "PREFAULT_FROM_BYTES", 1)
    monkeypatch.setattr(mappings_module, "_madvise", madvise)
    handle = new_handle(AfterThat())
    with pytest.raises(MemoryError, match="Cannot allocate memory"):
        read(handle, [Span(path, 0, 1 << 20)])
    assert handle.stats.in_flight == 0

"""Gathers and scatters: many rows at places of their own, compared with a bytearray."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import errno
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_device import fake_device
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import (
    PATIENCE_S,
    HeldEngine,
    bytes_tensor,
    misaligned,
    on_every_loop,
    random_bytes,
    random_tensor,
    raw,
)

import nvmeio
from nvmeio.engines.base import Capabilities
from nvmeio.testing import FakeEngine

MAX_FILE = 150_000
CONTENT = random_bytes(MAX_FILE, seed=3)
PAYLOAD = random_bytes(4 * MAX_FILE, seed=4)
Make = Callable[..., nvmeio.AioHandle]
OPTIONS: list[dict[str, Any]] = [
    {"block_size": 4096, "queue_depth": 1},
    {"block_size": 4096, "queue_depth": 9, "single_submit": True, "intra_op_parallelism": 3},
    {"block_size": 12288, "queue_depth": 3, "overlap_events": False},
    {"block_size": 16384, "queue_depth": 4, "intra_op_parallelism": 2},
    {"block_size": 1 << 20, "queue_depth": 128},
]
WHICH = st.integers(0, len(OPTIONS) - 1)
SHIFTS = st.sampled_from([0, 0, 1, 64, 512])
ROW_BYTES = st.one_of(
    st.integers(1, 700),
    st.sampled_from([1, 255, 256, 512, 4095, 4096, 4097, 8192, 12288, 20_000, 65_536]),
)
# Many rows near each other, or few anywhere.
PLACES = st.one_of(
    st.lists(st.integers(0, MAX_FILE), max_size=60),
    st.lists(st.integers(0, 9000), max_size=200),
    st.lists(st.integers(0, 36).map(lambda page: 4096 * page), max_size=60),
)


@pytest.fixture
def handles(make_handle: Make) -> Callable[[int], nvmeio.AioHandle]:
    """Handles with these options; making one takes the kernel tens of milliseconds."""
    return functools.cache(lambda which: make_handle(**OPTIONS[which]))


@pytest.fixture
def file(path: Path) -> Path:
    path.write_bytes(CONTENT)
    return path


def rows_of(count: int, row_bytes: int, shift: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for rows, and what lies around it."""
    tensor, room = misaligned(count * row_bytes, shift)
    return tensor.view(count, row_bytes), room


def around(room: torch.Tensor, shift: int, nbytes: int) -> bool:
    return bool((room[:shift] == 0xA5).all() and (room[shift + nbytes :] == 0xA5).all())


# Against a bytearray


@settings(max_examples=50)
@given(places=PLACES, row_bytes=ROW_BYTES, size=st.integers(0, MAX_FILE), which=WHICH, shift=SHIFTS)
@example(places=[0, 4096, 8192, 8192], row_bytes=4096, size=MAX_FILE, which=4, shift=0)
@example(places=[0, 9000, 9000, 1], row_bytes=65_536, size=MAX_FILE, which=0, shift=0)
def test_a_gather_reads_what_lies_there(
    handles: Callable[[int], nvmeio.AioHandle],
    path: Path,
    places: list[int],
    row_bytes: int,
    size: int,
    which: int,
    shift: int,
) -> None:
    path.write_bytes(CONTENT[:size])
    out, room = rows_of(len(places), row_bytes, shift)
    operation = handles(which).async_gather(out, path, file_offsets=places)
    failure = operation.exception(100)
    there = [place + row_bytes <= size for place in places]
    for row, place, whole in zip(out, places, there, strict=True):
        if whole:
            assert raw(row) == CONTENT[place : place + row_bytes]
    assert around(room, shift, out.nbytes)
    ways = operation.direct_bytes + operation.bounced_bytes + operation.buffered_bytes
    assert ways == operation.transferred
    if all(there):
        assert failure is None
        assert operation.result() == operation.transferred == out.nbytes
    else:
        assert isinstance(failure, nvmeio.RowsError)
        first = there.index(False)
        assert (failure.errno, failure.row) == (errno.ENODATA, first)
        assert (failure.file_offset, failure.nbytes) == (places[first], row_bytes)
        assert (failure.rows, failure.whole) == (len(places), sum(there))
        assert failure.mask().tolist() == there


@st.composite
def apart(draw: st.DrawFn) -> tuple[list[int], int]:
    """Rows of one length that do not overlap, in any order, often one behind the other."""
    row_bytes = draw(ROW_BYTES)
    gaps = draw(
        st.lists(st.sampled_from([0, 0, 0, 1, 100, 4096, 5000, 30_000]), min_size=1, max_size=60)
    )
    at, places = draw(st.sampled_from([0, 1, 4096, 4097, 140_000])), []
    for gap in gaps:
        if at + row_bytes > 3 * MAX_FILE:
            break
        places.append(at)
        at += row_bytes + gap
    return draw(st.permutations(places)), row_bytes


@settings(max_examples=50)
@given(rows=apart(), size=st.integers(0, MAX_FILE), which=WHICH, shift=SHIFTS)
def test_a_scatter_writes_its_rows_and_nothing_else(
    handles: Callable[[int], nvmeio.AioHandle],
    path: Path,
    rows: tuple[list[int], int],
    size: int,
    which: int,
    shift: int,
) -> None:
    places, row_bytes = rows
    path.write_bytes(CONTENT[:size])
    expected = bytearray(CONTENT[:size])
    source, room = rows_of(len(places), row_bytes, shift)
    payload = PAYLOAD[: source.nbytes].ljust(source.nbytes, b"\x11")
    source.copy_(bytes_tensor(payload).view(source.shape))
    for number, place in enumerate(places):
        expected.extend(bytes(max(0, place + row_bytes - len(expected))))
        expected[place : place + row_bytes] = payload[number * row_bytes : (number + 1) * row_bytes]
    operation = handles(which).async_scatter(source, path, file_offsets=places)
    assert operation.result(100) == operation.transferred == source.nbytes
    assert path.read_bytes() == expected
    assert raw(source) == payload
    assert around(room, shift, source.nbytes)
    ways = operation.direct_bytes + operation.bounced_bytes + operation.buffered_bytes
    assert ways == source.nbytes


def test_a_scatter_reads_nothing(make_handle: Make, direct_path: Path) -> None:
    """Whatever its rows share pages with: nothing is read, changed and written back."""
    direct_path.write_bytes(bytes(1 << 20))
    handle = make_handle()
    rows = torch.full((200, 3001), 7, dtype=torch.uint8)
    handle.async_scatter(
        rows, direct_path, file_offsets=[5 + 5000 * row for row in range(200)]
    ).result(PATIENCE_S)
    assert handle.stats.bytes_written == rows.nbytes
    assert handle.stats.bytes_read == 0


def test_many_rows_over_several_lanes(make_handle: Make, direct_path: Path) -> None:
    """More than are sorted in passing: a thread of the shim's does it."""
    handle = make_handle(block_size=65536, intra_op_parallelism=3)
    count, row_bytes = 5000, 24
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1))
    source = random_tensor(count * row_bytes).view(count, row_bytes)
    with nvmeio.open(direct_path, "w") as file:
        assert handle.sync_scatter(source, file, file_offsets=order * 40 + 5) == source.nbytes
        out = torch.zeros(2 * count, row_bytes, dtype=torch.uint8)
        twice = torch.cat([order, order.flip(0)]) * 40 + 5
        assert handle.sync_gather(out, file, file_offsets=twice) == out.nbytes
    assert torch.equal(out[:count], source)
    assert torch.equal(out[count:], source.flip(0))
    stats = handle.stats
    assert stats.rows == 3 * count
    # 200,000 bytes, in blocks that lanes begin where they like, and at most two reads of one edge.
    assert 0 < stats.row_blocks < 40
    assert stats.row_bytes_saved > 2 * count * 512 - 250_000


def test_two_at_once_on_rows_that_share_every_page(make_handle: Make, file: Path) -> None:
    handle = make_handle()
    count, row_bytes = 600, 100
    sources = [torch.full((count, row_bytes), number, dtype=torch.uint8) for number in (1, 2)]
    places = [[200 * row + 100 * number for row in range(count)] for number in (0, 1)]
    operations = [
        handle.async_scatter(source, file, file_offsets=place)
        for source, place in zip(sources, places, strict=True)
    ]
    assert [operation.result(100) for operation in operations] == [60_000, 60_000]
    found = file.read_bytes()
    assert found[:120_000] == (bytes([1]) * 100 + bytes([2]) * 100) * count
    assert found[120_000:] == CONTENT[120_000:]


# How they are read


def test_what_is_aligned_and_alone_is_read_in_place(make_handle: Make, direct_path: Path) -> None:
    direct_path.write_bytes(bytes(4096) * 64)
    out = nvmeio.empty_aligned(3, 4096, dtype=torch.uint8)
    operation = make_handle().async_gather(out, direct_path, file_offsets=[200_704, 0, 98_304])
    assert operation.result(100) == operation.direct_bytes == out.nbytes


def test_rows_in_one_sector_are_one_read(make_handle: Make, direct_path: Path) -> None:
    direct_path.write_bytes(CONTENT)
    handle = make_handle()
    out = torch.empty(1000, 8, dtype=torch.uint8)
    handle.sync_gather(out, direct_path, file_offsets=[8 * (row % 50) for row in range(1000)])
    stats = handle.stats
    assert (stats.rows, stats.row_blocks, stats.bytes_read) == (1000, 1, 8000)
    assert stats.row_bytes_saved >= 999 * 400  # an aligned sector or page for each but the first


def test_whole_pages_of_a_run_are_written_direct(make_handle: Make, direct_path: Path) -> None:
    source = torch.arange(4096 * 4, dtype=torch.int16).view(-1, 64)  # 256 rows of 128 bytes
    order = torch.randperm(256, generator=torch.Generator().manual_seed(2))
    operation = make_handle().async_scatter(
        source[order], direct_path, file_offsets=order * 128 + 4096
    )
    assert operation.result(100) == operation.bounced_bytes == 32_768
    assert direct_path.read_bytes() == bytes(4096) + raw(source)


def test_rows_far_behind_the_end_leave_a_hole(make_handle: Make, path: Path) -> None:
    """Blocks are allocated ahead where a file grows, but not between rows."""
    make_handle().sync_scatter(
        torch.ones(2, 4096, dtype=torch.uint8), path, file_offsets=[0, 1 << 30]
    )
    facts = os.stat(path)
    assert facts.st_size == (1 << 30) + 4096
    assert facts.st_blocks * 512 < 1 << 20


# What may be a tensor, what may be offsets


def test_any_dtype_and_shape(handle: nvmeio.AioHandle, path: Path) -> None:
    table = torch.randn(100, 3, 5, dtype=torch.bfloat16)
    handle.sync_pwrite(table, path)
    wanted = [7, 7, 99, 0]
    out = torch.empty(4, 3, 5, dtype=torch.bfloat16)
    handle.sync_gather(out, path, file_offsets=[30 * row for row in wanted])
    assert torch.equal(out, table[wanted])


def test_an_out_that_is_not_contiguous(handle: nvmeio.AioHandle, file: Path) -> None:
    out = torch.zeros(10, 6, dtype=torch.uint8)
    assert handle.sync_gather(out[::2, ::3], file, file_offsets=[10, 20, 30, 40, 50]) == 10
    for row in range(5):
        assert raw(out[2 * row, ::3].contiguous()) == CONTENT[10 * row + 10 :][:2]
    assert not out[1::2].any()


def test_a_source_that_is_not_contiguous(handle: nvmeio.AioHandle, file: Path) -> None:
    source = torch.arange(40, dtype=torch.uint8).view(4, 10)
    handle.sync_scatter(source[:, ::5], file, file_offsets=[3, 9, 6, 0])
    assert file.read_bytes()[:12] == (
        bytes([30, 35]) + CONTENT[2:3] + bytes([0, 5]) + CONTENT[5:6]
        + bytes([20, 25]) + CONTENT[8:9] + bytes([10, 15]) + CONTENT[11:12]
    )  # fmt: skip


def offsets_of_every_kind() -> list[Any]:
    numpy = pytest.importorskip("numpy")
    plain = [4096, 5, 5]
    frozen = numpy.array(plain)
    frozen.flags.writeable = False
    return [
        plain,
        tuple(plain),
        torch.tensor(plain),
        torch.tensor(plain, dtype=torch.int32),
        torch.tensor([4096, 0, 5, 0, 5])[::2],
        numpy.array(plain),
        numpy.array(plain, dtype="uint32"),
        numpy.array(plain[::-1])[::-1],
        frozen,
    ]


def test_offsets_of_every_kind(handle: nvmeio.AioHandle, file: Path) -> None:
    for offsets in offsets_of_every_kind():
        out = torch.zeros(3, 10, dtype=torch.uint8)
        handle.sync_gather(out, file, file_offsets=offsets)
        assert raw(out) == CONTENT[4096:4106] + CONTENT[5:15] * 2


def test_numbers_of_rows_are_no_offsets(handle: nvmeio.AioHandle, path: Path) -> None:
    """Numbers of rows in the place of offsets read and wrote wrong rows, silently.

    Those that are far apart look like offsets: the name of the argument says what it takes.
    """
    table = torch.arange(40 * 16, dtype=torch.float32).reshape(40, 16)
    handle.sync_pwrite(table, path)
    ids = torch.tensor([7, 3, 30, 3])
    out = torch.empty(4, 16)
    for call in (
        handle.async_gather,
        handle.async_scatter,
        handle.sync_gather,
        handle.sync_scatter,
    ):
        with pytest.raises(TypeError, match="positional argument"):
            call(out, path, ids)  # type: ignore[misc]
    with pytest.raises(ValueError, match=r"are in bytes, .* multiply the numbers of rows by their"):
        handle.async_gather(out, path, file_offsets=ids)
    handle.sync_gather(out, path, file_offsets=ids * 64)
    assert out.equal(table[ids])
    # Windows that overlap by whole elements, wherever the first begins, are nobody's mistake.
    handle.sync_gather(out, path, file_offsets=torch.tensor([0, 4, 100, 96]))
    assert out[:, 0].tolist() == [0, 1, 25, 24]
    handle.sync_gather(out.view(torch.uint8), path, file_offsets=ids)
    handle.sync_gather(out, path, file_offsets=ids, allow_overlap=True)
    assert out.view(torch.uint8)[1].equal(table.view(torch.uint8).flatten()[3:67])


@pytest.mark.parametrize(
    ("offsets", "error", "words"),
    [
        ([0], ValueError, "one for each of the 2 rows"),
        (torch.zeros(1, 2, dtype=torch.int64), ValueError, "one for each of the 2 rows"),
        ([0, -1], ValueError, "between 0 and"),
        ([0, 2**63 - 9], ValueError, "between 0 and"),
        ([0, 2**63], TypeError, "below 2\\*\\*63"),
        ([0, 1.5], TypeError, "integers"),
        (torch.tensor([0.0, 1.0]), TypeError, "integers"),
        ("ab", TypeError, "sequence of integers"),
        (7, TypeError, "sequence of integers"),
    ],
)
def test_offsets_that_are_none(
    handle: nvmeio.AioHandle, file: Path, offsets: Any, error: type[Exception], words: str
) -> None:
    out = torch.zeros(2, 10, dtype=torch.uint8)
    for call in (handle.async_gather, handle.async_scatter):
        with pytest.raises(error, match=words):
            call(out, file, file_offsets=offsets)
    assert out.untyped_storage().resizable()
    with pytest.raises(TypeError, match="not in bytes"):
        handle.async_scatter(b"12", file, file_offsets=[0, 1])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no rows"):
        handle.async_gather(torch.tensor(1), file, file_offsets=[0])
    assert file.read_bytes() == CONTENT


@pytest.mark.parametrize("shape", [(0, 10), (3, 0), (0,)])
def test_no_bytes_are_no_work(handle: nvmeio.AioHandle, file: Path, shape: tuple[int, ...]) -> None:
    empty = torch.empty(shape, dtype=torch.uint8)
    assert handle.sync_gather(empty, file, file_offsets=[0] * shape[0]) == 0
    assert handle.sync_scatter(empty, file, file_offsets=[0] * shape[0]) == 0
    assert handle.stats.rows == 0


def test_autograd_is_told(handle: nvmeio.AioHandle, file: Path) -> None:
    weight = torch.ones(2, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match="leaf tensor"):
        handle.async_gather(weight, file, file_offsets=[0, 16])
    saved = torch.ones(2, 4)
    result = (weight * saved).sum()
    handle.sync_gather(saved, file, file_offsets=[0, 16])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()


def test_a_device_tensor_goes_through_host_memory(
    make_handle: Make, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_device(monkeypatch) as device:
        handle = make_handle()
        out = device.take(torch.zeros(3, 1000, dtype=torch.uint8))
        assert handle.sync_gather(out, file, file_offsets=[5, 50_000, 5]) == 3000
        assert raw(out) == CONTENT[5:1005] + CONTENT[50_000:51_000] + CONTENT[5:1005]
        assert handle.sync_scatter(out, file, file_offsets=[0, 2000, 1000]) == 3000
    assert file.read_bytes()[:2000] == CONTENT[5:1005] * 2


# Failures


def test_rows_that_overlap_are_refused_before_anything_is_written(
    handle: nvmeio.AioHandle, file: Path
) -> None:
    source = torch.zeros(4, 100, dtype=torch.uint8)
    for places in ([0, 500, 599, 300], [0, 7000, 300, 7000]):
        operation = handle.async_scatter(source, file, file_offsets=places)
        with pytest.raises(ValueError, match=r"rows 1 and [23] of a scatter overlap"):
            operation.result(100)
    assert file.read_bytes() == CONTENT
    assert source.untyped_storage().resizable()


def test_the_first_row_of_a_bad_block_is_named(new_handle: Make, direct_path: Path) -> None:
    """The others are there; the operation's error says which."""

    def bad(kind: str, offset: int, nbytes: int) -> int:
        return errno.EIO if offset <= 81_920 < offset + nbytes else 0

    direct_path.write_bytes(CONTENT)
    handle = new_handle(FakeEngine(fail=bad), block_size=4096)
    places = [100_000, 82_000, 5, 82_100, 140_000]
    out = torch.zeros(5, 50, dtype=torch.uint8)
    with pytest.raises(nvmeio.RowsError) as caught:
        handle.sync_gather(out, direct_path, file_offsets=places)
    failure = caught.value
    assert (failure.errno, failure.row, failure.file_offset) == (errno.EIO, 1, 82_000)
    assert (failure.whole, failure.transferred) == (3, 150)
    assert failure.mask().tolist() == [True, False, True, False, True]
    assert "row 1 at byte 82000, 3 of 5 rows are whole; gather" in str(failure)
    for row in (0, 2, 4):
        assert raw(out[row]) == CONTENT[places[row] :][:50]
    assert (handle.stats.rows, handle.stats.errors) == (3, 1)


def test_a_bad_block_of_a_scatter(new_handle: Make, direct_path: Path) -> None:
    direct_path.write_bytes(CONTENT)
    handle = new_handle(FakeEngine(fail={81_920: errno.ENOSPC}), block_size=4096)
    source = torch.ones(4, 8192, dtype=torch.uint8)
    with pytest.raises(nvmeio.RowsError, match="free space") as caught:
        handle.sync_scatter(source, direct_path, file_offsets=[0, 40_960, 81_920, 16_484])
    assert (caught.value.row, caught.value.whole) == (2, 3)
    expected = bytearray(CONTENT)
    for place in (0, 40_960, 16_484, 86_016):
        expected[place : place + (4096 if place == 86_016 else 8192)] = bytes([1]) * (
            4096 if place == 86_016 else 8192
        )
    assert direct_path.read_bytes() == expected


def test_a_file_that_cannot_be_opened(handle: nvmeio.AioHandle, path: Path) -> None:
    out = torch.zeros(2, 10, dtype=torch.uint8)
    operation = handle.async_gather(out, path, file_offsets=[0, 1])
    with pytest.raises(FileNotFoundError):
        operation.result(100)
    assert out.untyped_storage().resizable()


def test_direct_io_that_is_refused_after_all(
    new_handle: Make, direct_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    direct_path.write_bytes(CONTENT)

    class Refusing(FakeEngine):
        def _move(self, block: Any, fd: int, memory: memoryview, offset: int) -> int:
            if fd == block.request.transfer.direct_fd:
                raise OSError(errno.EINVAL, "refused")
            return super()._move(block, fd, memory, offset)

    handle = new_handle(Refusing())
    out = torch.zeros(3, 70, dtype=torch.uint8)
    assert handle.async_gather(out, direct_path, file_offsets=[5, 90_000, 5]).result(100) == 210
    assert raw(out[1]) == CONTENT[90_000:90_070]
    assert "refused direct I/O" in caplog.text
    assert (handle.stats.rows, handle.stats.operations, handle.stats.errors) == (3, 1, 0)


def test_an_engine_that_moves_no_rows(new_handle: Make, file: Path) -> None:
    class Old(FakeEngine):
        capabilities = Capabilities(batches=True)

    handle = new_handle(Old())
    out = torch.zeros(2, 10, dtype=torch.uint8)
    with pytest.raises(nvmeio.BackendUnavailableError, match="moves no rows"):
        handle.async_gather(out, file, file_offsets=[0, 1])
    assert out.untyped_storage().resizable()
    assert handle.stats.in_flight == 0


# The life of an operation


def test_in_flight_offsets_and_rows_are_held(
    handle_held: nvmeio.AioHandle, engine_held: HeldEngine, file: Path
) -> None:
    out, offsets = torch.zeros(3, 10, dtype=torch.uint8), torch.tensor([0, 9, 99])
    operation = handle_held.async_gather(out, file, file_offsets=offsets)
    for tensor in (out, offsets):
        with pytest.raises(RuntimeError):
            tensor.untyped_storage().resize_(0)
        with pytest.raises(RuntimeError, match="in flight"):
            tensor.share_memory_()
    assert "gather" in repr(operation)
    assert "3 rows of 10 bytes" in repr(operation)
    with pytest.raises(concurrent.futures.TimeoutError):
        operation.result(0.01)
    engine_held.gate.set()
    assert operation.result(100) == 30
    assert offsets.untyped_storage().resizable()
    assert out.untyped_storage().resizable()


def test_offsets_that_are_dropped_stay(
    handle_held: nvmeio.AioHandle, engine_held: HeldEngine, file: Path
) -> None:
    out = torch.zeros(3000, 10, dtype=torch.uint8)
    operation = handle_held.async_gather(out, file, file_offsets=torch.arange(3000))
    engine_held.gate.set()
    assert operation.result(100) == 30_000
    assert raw(out[2999]) == CONTENT[2999:3009]


def test_cancelling(handle_held: nvmeio.AioHandle, engine_held: HeldEngine, file: Path) -> None:
    out = torch.full((100, 64), 7, dtype=torch.uint8)
    operation = handle_held.async_gather(out, file, file_offsets=[1000 * row for row in range(100)])
    engine_held.wait_until_begun()
    assert operation.cancel()
    engine_held.gate.set()
    with pytest.raises(concurrent.futures.CancelledError):
        operation.result(100)
    assert bool((out == 7).all())
    assert handle_held.stats.cancelled == 1


@on_every_loop
async def test_awaited_and_cancelled(make_handle: Make, file: Path) -> None:
    """However it ends, the memory is the caller's afterwards."""
    handle = make_handle()
    for turn in range(10):
        out = torch.zeros(4000, 30, dtype=torch.uint8)
        offsets = torch.arange(4000) * 30
        task = asyncio.ensure_future(handle.async_gather(out, file, file_offsets=offsets))
        for _ in range(turn):
            await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            assert await task == 120_000
        assert out.untyped_storage().resizable()
        assert await handle.async_gather(out, file, file_offsets=offsets) == 120_000
        assert raw(out) == CONTENT[:120_000]


def test_closing_finishes_what_is_in_flight(make_handle: Make, file: Path) -> None:
    handle = make_handle()
    out = torch.zeros(4000, 30, dtype=torch.uint8)
    operation = handle.async_gather(out, file, file_offsets=torch.arange(4000) * 30)
    source = torch.zeros(3000, 10, dtype=torch.uint8)
    handle.async_scatter(source, file, file_offsets=torch.arange(3000) * 10 + 120_000)
    handle.close()
    assert operation.result() == 120_000
    assert raw(out) == CONTENT[:120_000]
    assert file.read_bytes() == CONTENT[:120_000] + bytes(30_000)
    with pytest.raises(nvmeio.ClosedError):
        handle.async_gather(out, file, file_offsets=torch.arange(4000))


def test_a_flush_waits_for_a_scatter(make_handle: Make, file: Path) -> None:
    handle = make_handle()
    rows, offsets = torch.zeros(3000, 10, dtype=torch.uint8), torch.arange(3000) * 20
    operation = handle.async_scatter(rows, file, file_offsets=offsets)
    handle.sync_fsync(file)
    assert operation.done()

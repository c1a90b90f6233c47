"""Batches: many tensors of any sizes, in files of their own or in one, as one operation."""

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
from hypothesis import given, settings
from hypothesis import strategies as st
from support import (
    HeldEngine,
    bytes_tensor,
    misaligned,
    on_every_loop,
    random_bytes,
    random_tensor,
    raw,
)

import nvmeio
from nvmeio._core import batches
from nvmeio.engines.base import Capabilities
from nvmeio.testing import FakeEngine

MAX_FILE = 60_000
CONTENTS = [random_bytes(MAX_FILE, seed=seed) for seed in range(3)]
Make = Callable[..., nvmeio.AioHandle]
OPTIONS: list[dict[str, Any]] = [
    {"block_size": 4096, "queue_depth": 1},
    {"block_size": 12288, "queue_depth": 3, "overlap_events": False},
    {"block_size": 16384, "queue_depth": 2, "intra_op_parallelism": 2},
]
PIECES = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.one_of(st.integers(0, MAX_FILE), st.integers(0, 14).map(lambda page: 4096 * page)),
        st.one_of(st.integers(0, 9000), st.sampled_from([4096, 8192, 40_960])),
        st.sampled_from([0, 0, 1, 512]),
    ),
    max_size=25,
)


@pytest.fixture
def handles(make_handle: Make) -> Callable[[int], nvmeio.AioHandle]:
    """Handles with these options; making one takes the kernel tens of milliseconds."""
    return functools.cache(lambda which: make_handle(**OPTIONS[which]))


@pytest.fixture
def paths(path: Path) -> list[Path]:
    """Three files with contents of their own."""
    found = [path.with_name(f"file-{number}") for number in range(3)]
    for each, content in zip(found, CONTENTS, strict=True):
        each.write_bytes(content)
    return found


@pytest.fixture
def two_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches have two files open at most."""
    monkeypatch.setattr(batches, "_FILES_MOST", 2)
    monkeypatch.setattr(batches, "_LATER_TIMES", 1)


def zeros(number: int, nbytes: int = 10) -> list[torch.Tensor]:
    return [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(number)]


# Against bytearrays


@settings(max_examples=60)
@given(pieces=PIECES, which=st.integers(0, 2))
def test_a_batch_reads_what_lies_there(
    handles: Callable[[int], nvmeio.AioHandle],
    paths: list[Path],
    pieces: list[tuple[int, int, int, int]],
    which: int,
) -> None:
    made = [misaligned(nbytes, shift) for _, _, nbytes, shift in pieces]
    tensors = [tensor for tensor, _ in made]
    files = [paths[file] for file, _, _, _ in pieces]
    operation = handles(which).async_pread_batch(tensors, files, [at for _, at, _, _ in pieces])
    failure = operation.exception(100)
    short = [at + nbytes > MAX_FILE and nbytes > 0 for _, at, nbytes, _ in pieces]
    got = 0
    for (file, at, nbytes, shift), tensor, (_, room) in zip(pieces, tensors, made, strict=True):
        there = CONTENTS[file][at : at + nbytes]
        got += len(there)
        assert raw(tensor)[: len(there)] == there
        assert (room[:shift] == 0xA5).all()
        assert (room[shift + nbytes :] == 0xA5).all()
    assert operation.transferred == got
    ways = operation.direct_bytes + operation.bounced_bytes + operation.buffered_bytes
    assert ways == got
    if not any(short):
        assert failure is None
        assert operation.result() == sum(nbytes for _, _, nbytes, _ in pieces)
        return
    assert isinstance(failure, nvmeio.BatchError)
    first = short.index(True)
    assert (failure.errno, failure.item, failure.file_offset, failure.nbytes) == (
        errno.ENODATA, first, *pieces[first][1:3],
    )  # fmt: skip
    assert (failure.items, failure.whole) == (len(pieces), short.count(False))
    assert [item for item, _ in failure.failures] == [i for i, bad in enumerate(short) if bad]
    assert isinstance(failure.__cause__, nvmeio.ShortTransferError)
    assert failure.path == str(files[first])


@settings(max_examples=60)
@given(
    lengths=st.lists(
        st.tuples(
            st.integers(0, 2),
            st.one_of(st.integers(0, 9000), st.sampled_from([4096, 8192])),
            st.sampled_from([0, 0, 0, 1, 4096, 5000]),
        ),
        max_size=20,
    ),
    start=st.sampled_from([0, 5, 4096, 58_000]),
    turned=st.randoms(use_true_random=False),
    which=st.integers(0, 2),
)
def test_a_batch_writes_its_bytes_and_no_others(
    handles: Callable[[int], nvmeio.AioHandle],
    path: Path,
    lengths: list[tuple[int, int, int]],
    start: int,
    turned: Any,
    which: int,
) -> None:
    paths = [path.with_name(f"file-{number}") for number in range(3)]
    expected = [bytearray(content) for content in CONTENTS]
    for each, content in zip(paths, CONTENTS, strict=True):
        each.write_bytes(content)
    ends, pieces = [start] * 3, []
    for file, nbytes, gap in lengths:
        pieces.append((file, ends[file] + gap, nbytes))
        ends[file] += gap + nbytes
    turned.shuffle(pieces)
    data = [random_bytes(nbytes, seed=i) for i, (_, _, nbytes) in enumerate(pieces)]
    for (file, at, nbytes), part in zip(pieces, data, strict=True):
        if nbytes:
            expected[file].extend(bytes(max(0, at + nbytes - len(expected[file]))))
            expected[file][at : at + nbytes] = part
    operation = handles(which).async_pwrite_batch(
        [bytes_tensor(part) for part in data],
        [paths[file] for file, _, _ in pieces],
        [at for _, at, _ in pieces],
    )
    assert operation.result(100) == operation.transferred == sum(map(len, data))
    assert [each.read_bytes() for each in paths] == [bytes(each) for each in expected]


# What is named


def test_one_file_without_offsets_is_filled_in_order(handle: nvmeio.AioHandle, path: Path) -> None:
    parts = [CONTENTS[0][:5000], b"", CONTENTS[1][:4096], CONTENTS[2][:1]]
    assert handle.sync_pwrite_batch([bytes_tensor(part) for part in parts], path) == 9097
    assert path.read_bytes() == b"".join(parts)
    found = [torch.zeros(len(part), dtype=torch.uint8) for part in parts]
    assert handle.sync_pread_batch(found, path) == 9097
    assert [raw(each) for each in found] == parts


def test_files_without_offsets_are_taken_from_their_beginning(
    handle: nvmeio.AioHandle, paths: list[Path]
) -> None:
    found = zeros(4, 100)
    handle.sync_pread_batch(found, [*paths, paths[0]])
    assert [raw(each) for each in found] == [each[:100] for each in [*CONTENTS, CONTENTS[0]]]


def test_files_and_offsets_of_every_kind(handle: nvmeio.AioHandle, paths: list[Path]) -> None:
    numpy = pytest.importorskip("numpy")
    fd = os.open(paths[2], os.O_RDONLY)
    try:
        with nvmeio.open(paths[1]) as opened:
            files = [str(paths[0]), paths[0], opened, fd, opened]
            for offsets in (
                [0, 5, 4096, 7, 9],
                (0, 5, 4096, 7, 9),
                torch.tensor([0, 5, 4096, 7, 9], dtype=torch.int32),
                numpy.array([0, 5, 4096, 7, 9]),
                list(numpy.array([0, 5, 4096, 7, 9])),
            ):
                found = zeros(5)
                handle.sync_pread_batch(found, files, offsets)
                for tensor, content, at in zip(
                    found, [0, 0, 1, 2, 1], [0, 5, 4096, 7, 9], strict=True
                ):
                    assert raw(tensor) == CONTENTS[content][at : at + 10]
    finally:
        os.close(fd)


def test_a_file_that_is_closed_meanwhile_stays_open_for_the_batch(
    handle_held: nvmeio.AioHandle, engine_held: HeldEngine, paths: list[Path], two_at_once: None
) -> None:
    opened = nvmeio.open(paths[0])
    fd = os.open(paths[1], os.O_RDONLY)
    found = zeros(5)
    files = [paths[2], paths[1], paths[0], opened, fd]
    operation = handle_held.async_pread_batch(found, files)
    opened.close()
    os.close(fd)
    engine_held.gate.set()
    assert operation.result(100) == 50
    assert [raw(found[3]), raw(found[4])] == [CONTENTS[0][:10], CONTENTS[1][:10]]


def test_relative_paths_are_meant_as_they_were_named(
    handle_held: nvmeio.AioHandle,
    engine_held: HeldEngine,
    paths: list[Path],
    two_at_once: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(paths[0].parent)
    found = zeros(3)
    operation = handle_held.async_pread_batch(found, [each.name for each in paths])
    monkeypatch.chdir("/")
    engine_held.gate.set()
    assert operation.result(100) == 30
    assert [raw(each) for each in found] == [content[:10] for content in CONTENTS]


def test_memory_of_every_kind(handle: nvmeio.AioHandle, paths: list[Path]) -> None:
    """What a single operation takes: strided, other dtypes, buffers, empty, autograd's."""
    wide = torch.zeros(20, 2, dtype=torch.uint8)
    buffer, halves, empty = bytearray(10), torch.zeros(5, dtype=torch.float16), torch.empty(0, 3)
    with torch.inference_mode():
        inferred = torch.zeros(10, dtype=torch.uint8)
    saved = torch.ones(3)
    result = (torch.ones(3, requires_grad=True) * saved).sum()
    tensors = [wide[:, 0], buffer, halves, empty, saved]
    assert handle.sync_pread_batch(tensors, paths[0], [0, 1, 2, 3, 8]) == 52
    with torch.inference_mode():
        assert handle.sync_pread_batch([inferred, halves], paths[0], [4, 2]) == 20
    assert raw(wide[:, 0].contiguous()) == CONTENTS[0][:20]
    assert not wide[:, 1].any()
    assert bytes(buffer) == CONTENTS[0][1:11]
    assert raw(halves) == CONTENTS[0][2:12]
    assert raw(inferred) == CONTENTS[0][4:14]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()
    assert handle.sync_pwrite_batch([wide[:, 0], b"ab", torch.tensor(7)], paths[1]) == 30
    assert paths[1].read_bytes()[:30] == CONTENTS[0][:20] + b"ab" + raw(torch.tensor(7))


def test_nothing_is_no_work(handle: nvmeio.AioHandle, path: Path) -> None:
    assert handle.sync_pread_batch([], []) == 0
    operation = handle.async_pwrite_batch([], path)
    assert operation.done()
    assert (operation.result(), operation.transferred) == (0, 0)
    assert not path.exists()
    assert handle.wait() == 2


@pytest.mark.parametrize(
    ("files", "offsets", "error", "words"),
    [
        (["a"], None, ValueError, "2 tensors, but 1 file"),
        ("a", [0], ValueError, "2 tensors, but 1 offset: one for each"),
        ("a", [0, -1], ValueError, r"file_offsets\[1\] must lie between"),
        ("a", [0, 2**63 - 9], ValueError, r"file_offsets\[1\] must lie between"),
        ("a", [0, 1.5], TypeError, r"file_offsets\[1\] must be an int"),
        ("a", [True, 1], TypeError, r"file_offsets\[0\] must be an int"),
        ("a", "ab", TypeError, "sequence of integers"),
        (["a", None], None, TypeError, "a file must be a path"),
        (["a", []], None, TypeError, "a file must be a path"),
        (True, None, TypeError, "a file must be a path"),
        (b"ab", None, TypeError, "or a list of these, not bytes"),
        (["a", "a\0"], None, ValueError, "null character"),
    ],
)
def test_places_that_are_none(
    handle: nvmeio.AioHandle, files: Any, offsets: Any, error: type[Exception], words: str
) -> None:
    tensors = zeros(2)
    for call in (handle.async_pread_batch, handle.async_pwrite_batch):
        with pytest.raises(error, match=words):
            call(tensors, files, offsets)
    assert tensors[0].untyped_storage().resizable()
    assert handle.stats.operations == 0


def test_tensors_that_are_none(handle: nvmeio.AioHandle, path: Path) -> None:
    good = torch.zeros(4)
    with pytest.raises(TypeError, match="a list of them, not a Tensor"):
        handle.async_pread_batch(good, path)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"item 1: expected a torch\.Tensor"):
        handle.async_pread_batch([good, 7], path)  # type: ignore[list-item]
    with pytest.raises(TypeError, match="item 1: cannot read into a bytes"):
        handle.async_pread_batch([good, b"12"], path)
    with pytest.raises(RuntimeError, match="item 1: cannot read into a leaf"):
        handle.async_pread_batch([good, torch.zeros(4, requires_grad=True)], path)
    assert good.untyped_storage().resizable()
    assert not path.exists()


def test_pieces_that_overlap_are_not_written(handle: nvmeio.AioHandle, paths: list[Path]) -> None:
    tensors = [*zeros(3, 100), torch.empty(0)]
    for files, offsets in ((paths[0], [0, 250, 151]), ([paths[0], paths[1], str(paths[0])], None)):
        named = [*files, paths[0]] if isinstance(files, list) else files
        places = None if offsets is None else [*offsets, 10]
        with pytest.raises(ValueError, match=r"items (1 and 2|0 and 2) of a batch overlap in"):
            handle.async_pwrite_batch(tensors, named, places)
    assert paths[0].read_bytes() == CONTENTS[0]
    assert tensors[0].untyped_storage().resizable()


# Device memory


def test_device_tensors_go_through_the_ring(
    make_handle: Make, paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_device(monkeypatch) as device:
        handle = make_handle(ring_bytes=1 << 16)
        found = [device.take(tensor) for tensor in (*zeros(2, 20_000), *zeros(1, 7))]
        assert handle.sync_pread_batch(found, paths, [0, 5, 9]) == 40_007
        assert raw(found[0]) == CONTENTS[0][:20_000]
        assert raw(found[1]) == CONTENTS[1][5:20_005]
        assert raw(found[2]) == CONTENTS[2][9:16]
        assert handle.sync_pwrite_batch(found, paths[0], [20_000, 0, 50_000]) == 40_007
        with pytest.raises(ValueError, match="item 1 is on another kind of device"):
            handle.async_pread_batch([torch.zeros(4), found[0]], paths[0])
    written = paths[0].read_bytes()
    assert written[:20_000] == CONTENTS[1][5:20_005]
    assert written[20_000:40_000] == CONTENTS[0][:20_000]


# Failures


def test_files_that_cannot_be_opened_cost_their_items(
    handle: nvmeio.AioHandle, paths: list[Path]
) -> None:
    found = zeros(5)
    missing = paths[0].with_name("missing")
    files = [paths[0], missing, paths[1], missing, paths[0].parent]
    operation = handle.async_pread_batch(found, files)
    with pytest.raises(FileNotFoundError) as caught:
        operation.result(100)
    failure = caught.value
    assert isinstance(failure, nvmeio.BatchError)
    assert (failure.item, failure.path, failure.items, failure.whole) == (1, str(missing), 5, 2)
    assert [(item, error.errno) for item, error in failure.failures] == [  # type: ignore[attr-defined]
        (1, errno.ENOENT), (3, errno.ENOENT), (4, errno.EISDIR),
    ]  # fmt: skip
    assert failure.others == tuple(error for _, error in failure.failures[1:])
    assert "item 1 [0, 10), 2 of 5 items are whole; pread_batch" in str(failure)
    assert operation.transferred == 20
    assert [raw(found[0]), raw(found[2])] == [CONTENTS[0][:10], CONTENTS[1][:10]]
    assert (handle.stats.operations, handle.stats.errors) == (5, 3)


def test_a_tensor_that_torch_refuses_raises_as_in_a_single_call(
    handle: nvmeio.AioHandle, paths: list[Path]
) -> None:
    """It was EIO, and code for dying drives ran; a drive's own failure is never hidden by it."""
    expanded = torch.zeros(1, dtype=torch.uint8).expand(10)
    with pytest.raises(RuntimeError) as single:
        handle.async_pread(expanded, paths[0]).result(100)
    assert not isinstance(single.value, OSError)
    with pytest.raises(RuntimeError) as batched:
        handle.async_pread_batch([zeros(1)[0], expanded], paths[:2]).result(100)
    assert (type(batched.value), str(batched.value)) == (type(single.value), str(single.value))
    missing = paths[0].with_name("missing")
    with pytest.raises(FileNotFoundError) as both:
        handle.async_pread_batch([expanded, zeros(1)[0]], [paths[0], missing]).result(100)
    failure = both.value
    assert isinstance(failure, nvmeio.BatchError)
    assert [item for item, _ in failure.failures] == [1, 0] and failure.path == str(missing)


def test_a_batch_of_which_nothing_could_be_opened(handle: nvmeio.AioHandle, path: Path) -> None:
    found = zeros(2)
    operation = handle.async_pread_batch(found, path)
    assert operation.done()
    assert isinstance(operation.exception(), nvmeio.BatchError)
    assert found[0].untyped_storage().resizable()
    handle.async_pread_batch(found, path)
    with pytest.raises(nvmeio.BatchError):
        handle.wait()


def test_a_closed_file_is_refused(handle: nvmeio.AioHandle, paths: list[Path]) -> None:
    opened, found = nvmeio.open(paths[0]), zeros(2)
    opened.close()
    with pytest.raises(nvmeio.ClosedError):
        handle.async_pread_batch(found, [paths[1], opened])
    assert found[0].untyped_storage().resizable()
    assert handle.stats.in_flight == 0


def test_one_bad_block_costs_its_item(new_handle: Make, direct_path: Path) -> None:
    direct_path.write_bytes(CONTENTS[0])
    handle = new_handle(FakeEngine(fail={8192: errno.EIO}), block_size=4096)
    found = zeros(4, 4096)
    with pytest.raises(nvmeio.BatchError, match="smartctl") as caught:
        handle.sync_pread_batch(found, direct_path, [4096, 8192, 100, 12_288])
    assert (caught.value.errno, caught.value.item, caught.value.whole) == (errno.EIO, 1, 3)
    for item, at in ((0, 4096), (2, 100), (3, 12_288)):
        assert raw(found[item]) == CONTENTS[0][at : at + 4096]


def test_direct_io_that_is_refused_after_all(
    new_handle: Make, direct_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    direct_path.write_bytes(CONTENTS[0])
    other = direct_path.with_name("other")
    other.write_bytes(CONTENTS[1])

    class Refusing(FakeEngine):
        def _move(self, block: Any, fd: int, memory: memoryview, offset: int) -> int:
            if fd == block.request.transfer.direct_fd:
                raise OSError(errno.EINVAL, "refused")
            return super()._move(block, fd, memory, offset)

    handle = new_handle(Refusing())
    found = zeros(3, 4096)
    operation = handle.async_pread_batch(found, [direct_path, direct_path, other], [5, 8192, 0])
    assert operation.result(100) == operation.buffered_bytes == operation.transferred == 12_288
    assert raw(found[0]) == CONTENTS[0][5:4101]
    assert raw(found[2]) == CONTENTS[1][:4096]
    assert "refused direct I/O" in caplog.text
    assert (handle.stats.operations, handle.stats.errors) == (3, 0)


def test_an_engine_that_moves_no_batches(new_handle: Make, paths: list[Path]) -> None:
    class Old(FakeEngine):
        capabilities = Capabilities(rows=True)

    handle, found = new_handle(Old()), zeros(2)
    with pytest.raises(nvmeio.BackendUnavailableError, match="moves no batches"):
        handle.async_pread_batch(found, paths[0])
    assert found[0].untyped_storage().resizable()
    assert handle.stats.in_flight == 0


# Many files


def test_more_files_than_may_be_open(make_handle: Make, path: Path, two_at_once: None) -> None:
    handle = make_handle()
    paths = [path.with_name(f"many-{number}") for number in range(7)]
    written = [random_tensor(5000, seed=number) for number in range(7)]
    operation = handle.async_pwrite_batch(written, paths)
    assert operation.result(100) == operation.transferred == 35_000
    found = zeros(7, 5000)
    files = [*paths[:3], path, *paths[3:]]
    with pytest.raises(FileNotFoundError) as caught:
        handle.sync_pread_batch([*found[:3], torch.zeros(1), *found[3:]], files)
    assert caught.value.whole == 7  # type: ignore[attr-defined]
    assert [raw(each) for each in found] == [raw(each) for each in written]


def test_cancelling_begins_no_further_file(
    handle_held: nvmeio.AioHandle, engine_held: HeldEngine, path: Path, two_at_once: None
) -> None:
    paths = [path.with_name(f"many-{number}") for number in range(5)]
    operation = handle_held.async_pwrite_batch(zeros(5), paths)
    assert operation.cancel()
    engine_held.gate.set()
    with pytest.raises(concurrent.futures.CancelledError):
        operation.result(100)
    assert [each.exists() for each in paths] == [True, True, False, False, False]


# The life of an operation


def test_in_flight_all_storages_are_held(
    handle_held: nvmeio.AioHandle, engine_held: HeldEngine, paths: list[Path]
) -> None:
    found = [*zeros(2), torch.zeros(20, dtype=torch.uint8)[:10]]
    operation = handle_held.async_pread_batch(found, paths)
    for tensor in found:
        with pytest.raises(RuntimeError):
            tensor.untyped_storage().resize_(0)
        with pytest.raises(RuntimeError, match="in flight"):
            tensor.share_memory_()
    assert repr(operation) == "<pread_batch 3 files 3 items, 30 bytes, pending>"
    with pytest.raises(concurrent.futures.TimeoutError):
        operation.result(0.01)
    engine_held.gate.set()
    assert operation.result(100) == 30
    assert all(tensor.untyped_storage().resizable() for tensor in found)


def test_storages_that_are_dropped_stay(
    handle_held: nvmeio.AioHandle, engine_held: HeldEngine, path: Path
) -> None:
    operation = handle_held.async_pwrite_batch(
        [torch.full((5000,), number, dtype=torch.uint8) for number in range(20)], path
    )
    engine_held.gate.set()
    assert operation.result(100) == 100_000
    assert path.read_bytes() == b"".join(bytes([number]) * 5000 for number in range(20))


def test_a_cancelled_batch_leaves_memory_alone_once_it_is_over(
    handle_held: nvmeio.AioHandle, engine_held: HeldEngine, paths: list[Path]
) -> None:
    found = [torch.full((64,), 7, dtype=torch.uint8) for _ in range(100)]
    operation = handle_held.async_pread_batch(found, paths[0], [100 * n for n in range(100)])
    engine_held.wait_until_begun()
    assert operation.cancel()
    engine_held.gate.set()
    with pytest.raises(concurrent.futures.CancelledError):
        operation.result(100)
    assert operation.cancelled()
    assert all(tensor.untyped_storage().resizable() for tensor in found)


@on_every_loop
async def test_awaited_and_cancelled(make_handle: Make, paths: list[Path]) -> None:
    """However it ends, the memory is the caller's afterwards."""
    handle = make_handle()
    offsets = [100 * number for number in range(300)]
    for turn in range(8):
        found = zeros(300, 100)
        task = asyncio.ensure_future(handle.async_pread_batch(found, paths[0], offsets))
        for _ in range(turn):
            await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            assert await task == 30_000
        assert all(tensor.untyped_storage().resizable() for tensor in found)
        assert await handle.async_pread_batch(found, paths[0], offsets) == 30_000
        assert raw(torch.cat(found)) == CONTENTS[0][:30_000]


def test_closing_finishes_what_is_in_flight(
    make_handle: Make, paths: list[Path], two_at_once: None
) -> None:
    handle = make_handle()
    found = zeros(3, 50_000)
    operation = handle.async_pread_batch(found, paths)
    handle.close()
    assert operation.result() == 150_000
    assert [raw(each) for each in found] == [content[:50_000] for content in CONTENTS]
    with pytest.raises(nvmeio.ClosedError):
        handle.async_pread_batch(found, paths)


def test_a_flush_waits_for_a_batch(make_handle: Make, path: Path, two_at_once: None) -> None:
    handle = make_handle()
    paths = [path.with_name(f"many-{number}") for number in range(5)]
    path.touch()
    operation = handle.async_pwrite_batch(zeros(6, 5000), [*paths, path])
    handle.sync_fsync(path)
    assert operation.done()
    assert path.stat().st_size == 5000

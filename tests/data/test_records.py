"""Records: what is where in a file, what may name them, and what became of the file meanwhile."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import multiprocessing
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import PATIENCE_S, HeldEngine, on_every_loop, raw, run_python, thread
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Subset

import nvmeio
from nvmeio._core.core import totals
from nvmeio.data import Records

ROWS = torch.arange(300 * 7, dtype=torch.int32).view(300, 7)


@pytest.fixture
def file(path: Path) -> Path:
    path.write_bytes(raw(ROWS))
    return path


@pytest.fixture
def records(file: Path, handle: nvmeio.AioHandle) -> Any:
    """On each engine in turn."""
    with Records(file, torch.int32, 7, mode="r+", handle=handle) as opened:
        yield opened


# A sequence


def test_numbers_of_every_kind_name_records(records: Records) -> None:
    numpy = pytest.importorskip("numpy")
    assert len(records) == 300
    for one in (0, 299, torch.tensor(5), numpy.int64(5)):
        assert torch.equal(records[one], ROWS[int(one)])
    plain = [299, 0, 5, 5]
    for batch in (
        plain,
        tuple(plain),
        torch.tensor(plain),
        torch.tensor(plain, dtype=torch.int32),
        numpy.array(plain),
        numpy.array(plain, dtype="uint16"),
    ):
        assert torch.equal(records[batch], ROWS[plain])
    for batch in (slice(None), slice(3, 9), slice(-5, None), slice(20, 10, -3), slice(5, 5)):
        assert torch.equal(records[batch], ROWS[range(*batch.indices(300))])
    assert torch.equal(records[range(7, 300, 11)], ROWS[7::11])
    assert records[[]].shape == (0, 7)


@given(
    numbers=st.lists(st.integers(0, 40), max_size=30),
    shape=st.sampled_from([(), (1,), (3, 5)]),
    file_offset=st.integers(0, 600),
    gap=st.integers(-1, 100),
)
def test_a_batch_is_what_lies_there(
    tmp_path_factory: pytest.TempPathFactory,
    numbers: list[int],
    shape: tuple[int, ...],
    file_offset: int,
    gap: int,
) -> None:
    """With a header, with room between records, and with records that overlap."""
    nbytes = 2 * torch.Size(shape).numel()
    stride = max(1, nbytes + gap)
    content = bytes(range(251)) * 40
    size = file_offset + 40 * stride + nbytes
    path = _scratch(tmp_path_factory) / "given.bin"
    path.write_bytes(content[:size].ljust(size, b"\1"))
    found = Records(
        path, torch.int16, shape, file_offset=file_offset, stride_bytes=stride, handle=_shared()
    )
    with found as records:
        assert len(records) == 41
        rows = records.gather(numbers).result(PATIENCE_S)
    assert rows.shape == (len(numbers), *shape)
    whole = path.read_bytes()
    places = [file_offset + number * stride for number in numbers]
    assert raw(rows) == b"".join(whole[place : place + nbytes] for place in places)


_kept: dict[str, Any] = {}


def _shared() -> nvmeio.AioHandle:
    """One handle for all examples."""
    if "handle" not in _kept:
        _kept["handle"] = nvmeio.AioHandle(engine="threads")
    handle: nvmeio.AioHandle = _kept["handle"]
    return handle


def _scratch(factory: pytest.TempPathFactory) -> Path:
    if "folder" not in _kept:
        _kept["folder"] = factory.mktemp("given")
    folder: Path = _kept["folder"]
    return folder


@pytest.fixture(autouse=True)
def nothing_kept() -> Any:
    yield
    if "handle" in _kept:
        _kept.pop("handle").close()


WRONG: list[tuple[Any, type[Exception], str]] = [
    ([0, -1], IndexError, r"indices\[1\] is -1, and the 300 records of .* numbered from 0"),
    (-1, IndexError, "is -1"),
    ([300], IndexError, r"indices\[0\] is 300"),
    (300, IndexError, "is 300"),
    (range(299, 301), IndexError, r"indices\[1\] is 300"),
    (range(1, -2, -1), IndexError, r"indices\[2\] is -1"),
    (True, TypeError, "not bool"),
    (torch.tensor(True), TypeError, "not torch.bool"),
    ([True, False], TypeError, "bool among them"),
    ([1, True], TypeError, "bool among them"),
    (["item-1"], TypeError, "indices must be integers, and there is a str among them"),
    ([1, "2"], TypeError, "str among them"),
    ([b"1"], TypeError, "bytes among them"),
    ([None, 1], TypeError, "NoneType among them"),
    (torch.ones(300, dtype=torch.bool), TypeError, "not torch.bool"),
    (1.0, TypeError, "sequence of integers"),
    ([1.0], TypeError, "must be integers, not"),
    (torch.tensor([1.0]), TypeError, "must be integers, not"),
    ([2**63], TypeError, r"below 2\*\*63"),
    (None, TypeError, "sequence of integers"),
    ("12", TypeError, "sequence of integers"),
    ([[1, 2]], ValueError, "must have one dimension"),
    (torch.zeros(2, 2, dtype=torch.int64), ValueError, "must have one dimension"),
]


def is_one(index: Any) -> bool:
    return isinstance(index, int) or (isinstance(index, torch.Tensor) and not index.dim())


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_what_names_no_record_is_refused(file: Path, number: int) -> None:
    indices, error, words = WRONG[number]
    with Records(file, torch.int32, 7, mode="r+") as records:
        with pytest.raises(error, match=words):
            records[indices]
        with pytest.raises(error, match=words):
            records[indices] = ROWS[0] if is_one(indices) else ROWS[:2]
    assert file.read_bytes() == raw(ROWS)


def test_numpys_wrong_numbers_are_refused(file: Path) -> None:
    numpy = pytest.importorskip("numpy")
    with Records(file, torch.int32, 7) as records:
        for wrong in (numpy.array([1.0]), numpy.array([True]), numpy.array([1], dtype="uint64")):
            with pytest.raises(TypeError, match="must be integers, not"):
                records[wrong]
        with pytest.raises(IndexError):
            records[numpy.array([-1])]


# Into memory of the caller's, and back


def test_a_batch_goes_where_it_is_wanted(records: Records) -> None:
    out = torch.zeros(3, 7, dtype=torch.int32)
    gather = records.gather([5, 5, 299], out)
    assert gather.result(PATIENCE_S) is out is gather.out
    assert gather.done()
    assert not gather.cancel()
    assert torch.equal(out, ROWS[[5, 5, 299]])
    wide = torch.zeros(3, 14, dtype=torch.int32)
    records.gather([1, 2, 3], wide[:, ::2]).result(PATIENCE_S)
    assert torch.equal(wide[:, ::2], ROWS[1:4])
    assert not wide[:, 1::2].any()


def test_memory_that_does_not_fit_is_refused(records: Records) -> None:
    for call in (records.gather, records.scatter):
        with pytest.raises(TypeError, match=r"must be of torch.int32, not torch.int64"):
            call([1, 2], torch.zeros(2, 7, dtype=torch.int64))
        with pytest.raises(ValueError, match=r"the shape \(2, 7\), not \(3, 7\)"):
            call([1, 2], torch.zeros(3, 7, dtype=torch.int32))
        with pytest.raises(ValueError, match=r"the shape \(2, 7\), not \(14,\)"):
            call([1, 2], torch.zeros(14, dtype=torch.int32))
        with pytest.raises(TypeError, match=r"must be a torch\.Tensor, not list"):
            call([1, 2], [[0] * 7] * 2)
    with pytest.raises(ValueError, match=r"a record must have the shape \(7,\)"):
        records[4] = ROWS[:1]
    assert torch.equal(records[:], ROWS)


def test_what_is_written_is_read(records: Records, file: Path) -> None:
    changed = ROWS.clone()
    order = torch.randperm(300, generator=torch.Generator().manual_seed(1))[:150]
    changed[order] = -changed[order]
    assert records.scatter(order, changed[order]).result(PATIENCE_S) == 150 * 28
    assert torch.equal(records[:], changed)
    changed[7] = 1
    changed[[3, 1]] = torch.stack((ROWS[0], ROWS[9]))
    changed[20:30] = 2
    records[7] = changed[7]
    records[[3, 1]] = changed[[3, 1]]
    records[20:30] = changed[20:30]
    records[[]] = changed[:0]
    records.sync_fsync()
    assert file.read_bytes() == raw(changed)


def test_a_record_is_written_once_in_a_scatter(records: Records, file: Path) -> None:
    """A gather may name it twice; which of two was to be written nobody can say."""
    with pytest.raises(ValueError, match="rows 0 and 2 of a scatter overlap"):
        records.scatter([4, 9, 4], ROWS[:3]).result(PATIENCE_S)
    assert file.read_bytes() == raw(ROWS)


def test_windows_over_a_text_are_read_and_not_written(path: Path) -> None:
    path.write_bytes(raw(torch.arange(21, dtype=torch.int16)))
    with Records(path, torch.int16, 6, stride_bytes=10, mode="r+") as records:
        assert len(records) == 4
        assert records[[3, 0]].tolist() == [list(range(15, 21)), list(range(6))]
        with pytest.raises(ValueError, match="overlap cannot be written: each has 12 bytes"):
            records.scatter([0], torch.zeros(1, 6, dtype=torch.int16))


def test_what_was_opened_to_be_read_is_not_written(file: Path) -> None:
    with Records(file, torch.int32, 7) as records:
        with pytest.raises(OSError, match='opened with mode "r"'):
            records.scatter([1], ROWS[:1])
        assert torch.equal(records[1], ROWS[1])


# What a file holds


def test_a_file_ends_with_a_record(path: Path) -> None:
    path.write_bytes(bytes(10 + 3 * 28 + 5))
    with pytest.raises(ValueError, match="3 records of 28 bytes from byte 10 on, and 5 bytes more"):
        Records(path, torch.int32, 7, file_offset=10)
    assert len(Records(path, torch.int32, 7, file_offset=10, count=3)) == 3
    assert len(Records(path, torch.int32, 7, file_offset=10, count=2)) == 2
    assert len(Records(path, torch.int32, 7, file_offset=10, count=0)) == 0
    with pytest.raises(ValueError, match="99 bytes, which hold 3 records, not 4"):
        Records(path, torch.int32, 7, file_offset=10, count=4)
    with pytest.raises(ValueError, match="file_offset must be at most"):
        Records(path, torch.int32, 7, file_offset=100)


def test_room_behind_the_last_record_may_be_there_or_not(path: Path) -> None:
    for size in (2 * 40 + 28, 3 * 40):
        path.write_bytes(bytes(size))
        assert len(Records(path, torch.int32, 7, stride_bytes=40)) == 3
    path.write_bytes(bytes(3 * 40 - 1))
    with pytest.raises(ValueError, match="11 bytes more"):
        Records(path, torch.int32, 7, stride_bytes=40)


def test_an_empty_file_has_no_records(path: Path) -> None:
    path.touch()
    with Records(path, torch.int32, 7) as records:
        assert len(records) == 0
        assert list(records) == []
        with pytest.raises(IndexError):
            records[0]


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"dtype": "int32"}, TypeError, "must be a torch.dtype"),
        ({"dtype": torch.qint8}, TypeError, "records cannot be of torch.qint8"),
        ({"shape": (0,)}, ValueError, "1 or more"),
        ({"shape": (2, True)}, TypeError, "must be an int"),
        ({"shape": 1.5}, TypeError, "must be an int"),
        ({"file_offset": -1}, ValueError, "0 or more"),
        ({"stride_bytes": 0}, ValueError, "1 or more"),
        ({"count": -1}, ValueError, "0 or more"),
        ({"mode": "w"}, ValueError, '"r" or "r\\+"'),
        ({"handle": "libaio"}, TypeError, "must be an AioHandle"),
    ],
)
def test_what_describes_no_records_is_refused(
    file: Path, arguments: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        Records(file, **{"dtype": torch.int32, "shape": 7, **arguments})


def test_a_missing_file_is_missed_at_once(path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Records(path, torch.int32)


def _numpys(path: Path) -> None:
    import numpy

    numpy.save(path, numpy.arange(16))


@pytest.mark.parametrize(
    ("written", "says"),
    [
        (_numpys, r"an array of numpy: give file_offset=numpy.load\(path, mmap_mode='r'\).offset;"),
        (lambda p: torch.save({"a": ROWS}, p), "a zip archive: nvmeio.load reads"),
        (lambda p: nvmeio.save({"a": ROWS}, p), "a zip archive: nvmeio.load reads"),
        (lambda p: nvmeio.save_safetensors({"a": ROWS}, p), "nvmeio.load_safetensors reads it"),
        (lambda p: nvmeio.save_safetensors({"a": ROWS}, p, align=True), "nvmeio.load_safetensors"),
        (lambda p: p.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(504)), "HDF5.*h5py"),
        (lambda p: p.write_bytes(b"PAR1" + bytes(508)), "pyarrow"),
    ],
)
@pytest.mark.parametrize("mode", ["r", "r+"])
def test_a_header_is_not_read_as_records(
    written: Callable[[Path], object], says: str, mode: str, tmp_path: Path
) -> None:
    """Its bytes came as the first records, without a word."""
    path = tmp_path / "array.npy"  # numpy.save adds the suffix where it is missing
    written(path)
    with pytest.raises(ValueError, match=f"begins as .*{says}.* give file_offset=0"):
        Records(path, torch.uint8, mode=mode)
    if written is _numpys:
        offset = numpy_offset(path)
        with Records(path, torch.int64, file_offset=offset, mode=mode) as records:
            assert records[:].tolist() == list(range(16))
    with Records(path, torch.uint8, file_offset=0, mode=mode) as records:
        assert raw(records[:]) == path.read_bytes()
        copy = pickle.loads(pickle.dumps(records))
        assert len(copy) == len(records)


def numpy_offset(path: Path) -> int:
    import numpy

    offset: int = numpy.load(path, mmap_mode="r").offset
    return offset


@pytest.mark.parametrize(
    "first",
    [
        torch.tensor([9, 123, 34, 120] * 20),  # int64: a small number, then "{" and zeros
        torch.tensor([5, 0x227B] * 40, dtype=torch.int32),
        torch.tensor([80, 75, 3, 4] * 20, dtype=torch.int16),
        torch.tensor([], dtype=torch.int16),
    ],
)
def test_numbers_that_look_a_little_like_a_header_are_records(
    first: torch.Tensor, path: Path
) -> None:
    path.write_bytes(raw(first))
    with Records(path, first.dtype) as records:
        assert torch.equal(records[:], first)


def test_records_that_were_made_here_may_begin_as_they_like(path: Path) -> None:
    with Records.create(path, 64, torch.uint8) as made:
        made[range(6)] = torch.frombuffer(bytearray(b"\x93NUMPY"), dtype=torch.uint8)
        with Records(path, torch.uint8, file_offset=0) as again:
            assert raw(again[:6]) == b"\x93NUMPY"


def test_new_records_are_zero(path: Path) -> None:
    with Records.create(path, 50, torch.float32, (4, 4), file_offset=3, stride_bytes=100) as made:
        assert (len(made), made.shape, made.dtype) == (50, (4, 4), torch.float32)
        assert not made[:].any()
        made[49] = torch.ones(4, 4)
        assert made.record_bytes == 64
        assert made.path == str(path)
    assert path.stat().st_size == 3 + 49 * 100 + 64
    with Records(path, torch.float32, (4, 4), file_offset=3, stride_bytes=100) as found:
        assert bool((found[49] == 1).all())
    with pytest.raises(
        FileExistsError, match=r'open the existing file with mode="r\+", or remove it'
    ):
        Records.create(path, 50, torch.float32)
    with pytest.raises(ValueError, match="0 or more"):
        Records.create(path.with_name("other"), -1, torch.float32)
    assert not path.with_name("other").exists()


def test_records_that_find_no_room_leave_no_file(path: Path) -> None:
    with pytest.raises(nvmeio.TransferError):
        Records.create(path, 1 << 40, torch.float32, 1 << 20)
    assert not path.exists()


# A file that changes


def test_a_file_that_is_cut_short_says_which_record_is_missing(records: Records) -> None:
    assert torch.equal(records[299], ROWS[299])
    os.truncate(records.path, 28 * 100)
    with pytest.raises(nvmeio.RowsError, match="the file ends before the row does; row 1") as cut:
        records[[5, 200, 99]]
    assert cut.value.mask().tolist() == [True, False, True]
    assert torch.equal(records[[5, 99]], ROWS[[5, 99]])


def test_a_file_that_is_another_one_at_first_use_is_refused(file: Path) -> None:
    with Records(file, torch.int32, 7) as replaced:
        file.with_name("new").write_bytes(raw(ROWS))
        os.replace(file.with_name("new"), file)
        with pytest.raises(nvmeio.IntegrityError, match="was replaced after"):
            replaced[0]
    with Records(file, torch.int32, 7) as cut:
        os.truncate(file, 28 * 100)
        with pytest.raises(nvmeio.IntegrityError, match="100 of 300 records are left"):
            cut[0]
        file.unlink()
        with pytest.raises(FileNotFoundError):
            cut[0]


def test_a_file_that_is_made_anew_is_another_one(file: Path) -> None:
    """It often has the inode number of the one that was removed."""
    data = file.read_bytes()
    with Records(file, torch.int32, 7) as records:
        file.unlink()
        file.write_bytes(data[::-1])
        with pytest.raises(nvmeio.IntegrityError, match="was replaced after"):
            records[0]


def test_a_file_that_is_replaced_as_it_is_looked_at_is_not_taken_for_the_new_one(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The size was the old file's, and which file it is the new one's."""
    stock = nvmeio.open

    def opened(*arguments: Any) -> nvmeio.File:
        found = stock(*arguments)
        file.with_name("new").write_bytes(raw(ROWS) * 2)
        os.replace(file.with_name("new"), file)
        return found

    with monkeypatch.context() as patch:
        patch.setattr("nvmeio.files.open", opened)
        records = Records(file, torch.int32, 7)
    with records, pytest.raises(nvmeio.IntegrityError, match="was replaced after"):
        records[0]


def test_a_file_that_is_replaced_while_open_stays_what_it_was(records: Records, file: Path) -> None:
    assert torch.equal(records[0], ROWS[0])
    file.with_name("new").write_bytes(bytes(28 * 300))
    os.replace(file.with_name("new"), file)
    assert torch.equal(records[:], ROWS)


def test_a_file_that_grows_keeps_its_records(file: Path) -> None:
    with Records(file, torch.int32, 7) as records:
        with file.open("ab") as more:
            more.write(bytes(5))
        assert torch.equal(records[:], ROWS)


# Closing


def test_closed_records_say_so(file: Path) -> None:
    for used in (False, True):
        records = Records(file, torch.int32, 7, mode="r+")
        if used:
            assert torch.equal(records[3], ROWS[3])
        assert not records.closed
        records.close()
        records.close()
        assert records.closed
        assert "closed" in repr(records)
        for call in (
            lambda r: r[0],
            lambda r: r.gather([0]),
            lambda r: r.scatter([0], ROWS[:1]),
            lambda r: r.sync_fsync(),
            lambda r: asyncio.run(r.fsync()),
            lambda r: next(r.prefetch([[0]])),
            lambda r: r.handle,
        ):
            with pytest.raises(nvmeio.ClosedError, match="are closed: open them again"):
                call(records)
        assert len(records) == 300


def test_closing_finishes_what_is_in_flight(file: Path) -> None:
    records = Records(file, torch.int32, 7)
    gathers = [records.gather(range(300)) for _ in range(5)]
    handle = records.handle
    records.close()
    assert handle.closed
    for gather in gathers:
        assert torch.equal(gather.result(0), ROWS)


def test_a_given_handle_stays_open(handle: nvmeio.AioHandle, file: Path) -> None:
    with Records(file, torch.int32, 7, handle=handle) as records:
        assert records.handle is handle
        gather = records.gather([1])
    assert torch.equal(gather.result(PATIENCE_S), ROWS[1:2])
    assert not handle.closed


def test_a_batch_outlives_its_records(file: Path) -> None:
    gather = Records(file, torch.int32, 7).gather(range(300))
    gc.collect()
    assert torch.equal(gather.result(PATIENCE_S), ROWS)


@on_every_loop
async def test_a_batch_is_taken_by_whatever_takes_an_operation(records: Records) -> None:
    """create_task and TaskGroup refused it, when its reads had begun: it was no coroutine."""
    waited = await asyncio.wait_for(asyncio.shield(records.gather([7])), PATIENCE_S)
    assert torch.equal(waited, ROWS[7:8])
    gather = records.gather([1, 2])
    tasks = [
        asyncio.create_task(gather),
        asyncio.ensure_future(gather),
        asyncio.create_task(gather),
    ]
    done, _ = await asyncio.wait(tasks, timeout=PATIENCE_S)
    assert all(task.result() is gather.out for task in done)
    assert len(done) == 3
    assert torch.equal(gather.out, ROWS[1:3])
    both = await asyncio.gather(records.gather([3]), records.gather([4]))
    assert torch.equal(torch.cat(both), ROWS[3:5])


def test_a_cancelled_batch_says_so(
    handle_held: nvmeio.AioHandle, engine_held: HeldEngine, file: Path
) -> None:
    with Records(file, torch.int32, 7, handle=handle_held) as records:
        gather = records.gather([1, 2, 3])
        engine_held.wait_until_begun()
        with pytest.raises(concurrent.futures.TimeoutError):
            gather.result(0.01)
        assert not gather.done()
        assert "gather" in repr(gather)
        assert gather.cancel()
        engine_held.gate.set()
        gather.wait()
        with pytest.raises(concurrent.futures.CancelledError):
            gather.result(PATIENCE_S)


@on_every_loop
async def test_awaited(handle: nvmeio.AioHandle, file: Path) -> None:
    async with Records(file, torch.int32, 7, mode="r+", handle=handle) as records:
        batches = await asyncio.gather(*(records.gather([n, n + 1]) for n in range(20)))
        assert torch.equal(torch.stack(batches)[:, 0], ROWS[:20])
        assert torch.equal(records[[4]], ROWS[4:5])  # blocking, on a loop
        assert await asyncio.wait_for(records.scatter([7], ROWS[:1]), PATIENCE_S) == 28
        await records.fsync()
        assert torch.equal(await records.gather([7]), ROWS[:1])


@on_every_loop
async def test_closed_by_a_loop(file: Path) -> None:
    async with Records(file, torch.int32, 7) as records:
        gather = records.gather([1])
    assert torch.equal(await gather, ROWS[1:2])
    with pytest.raises(nvmeio.ClosedError):
        records.gather([1])


def test_used_first_by_several_threads_at_once(file: Path) -> None:
    """One file and handle stay open, whoever came first."""
    before = totals()[1]
    with Records(file, torch.int32, 7) as records, thread(lambda: None):
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            for found in pool.map(lambda n: records[[n, n]], range(40)):
                assert torch.equal(found[0], found[1])
        assert totals()[1] == before + 1


# A data set


def sums(batches: Any) -> int:
    return sum(int(batch.sum()) for batch in batches)


def test_a_loader_asks_for_batches(file: Path) -> None:
    with Records(file, torch.int32, 7) as records:
        batches = list(DataLoader(records, batch_size=64))
        assert [len(batch) for batch in batches] == [64, 64, 64, 64, 44]
        assert torch.equal(torch.cat(batches), ROWS)
        assert records.handle.stats.operations == 5
        whole = BatchSampler(RandomSampler(records), 100, drop_last=False)
        assert sums(DataLoader(records, batch_size=None, sampler=whole)) == int(ROWS.sum())
        assert records.handle.stats.operations == 8
        part = Subset(records, [7, 8, 9])
        assert torch.equal(next(iter(DataLoader(part, batch_size=3))), ROWS[7:10])
        assert sum(1 for _ in records) == 300
        assert torch.equal((records + records)[301], ROWS[1])


def test_workers_open_the_file_themselves(file: Path) -> None:
    """Forked while the parent has it open."""
    with Records(file, torch.int32, 7) as records:
        assert torch.equal(records[3], ROWS[3])
        fork = multiprocessing.get_context("fork")
        loader = DataLoader(
            records, batch_size=50, shuffle=True, num_workers=1, multiprocessing_context=fork
        )
        assert sums(loader) == int(ROWS.sum())
        assert torch.equal(records[4], ROWS[4])


def test_another_process_opens_the_file_itself(file: Path) -> None:
    """Made from a pickle, as in a worker that was spawned."""
    with Records(file, torch.int32, 7) as records:
        assert torch.equal(records[3], ROWS[3])
        data = pickle.dumps(records)
    done = run_python(
        f"""
        import pickle
        records = pickle.loads({data!r})
        print(int(sum(row.sum() for row in records.__getitems__(range(300)))))
        """
    )
    assert (done.stdout.strip(), done.stderr) == (str(int(ROWS.sum())), "")


def test_a_copy_is_opened_anew(file: Path, handle: nvmeio.AioHandle) -> None:
    with Records(file, torch.int32, 7, handle=handle) as records:
        assert torch.equal(records[1], ROWS[1])
        data = pickle.dumps(records)
        with pickle.loads(data) as copy:
            assert torch.equal(copy[299], ROWS[299])
            assert copy.handle is not records.handle
            assert (len(copy), copy.path) == (300, records.path)
        assert torch.equal(records[1], ROWS[1])
    with pickle.loads(pickle.dumps(records)) as copy:  # of closed ones too
        assert torch.equal(copy[2], ROWS[2])
    os.truncate(file, 28)
    with pickle.loads(data) as copy, pytest.raises(nvmeio.IntegrityError, match="1 of 300"):
        copy[0]


def test_what_is_on_its_way_is_not_pickled(records: Records) -> None:
    with pytest.raises(TypeError, match="pickle the tensor"):
        pickle.dumps(records.gather([1]))
    batches = records.prefetch([[1]])
    with pytest.raises(TypeError, match="pickle the records"):
        pickle.dumps(batches)
    batches.close()


def test_a_forked_child_leaves_its_parents_alone(file: Path) -> None:
    """What it inherits it neither uses nor closes; what it opens is its own."""
    with Records(file, torch.int32, 7) as records:
        assert torch.equal(records[1], ROWS[1])
        in_flight = records.gather(range(300))
        batches = records.prefetch([[1], [2], [3]])
        next(batches)
        read, write = os.pipe()
        child = os.fork()
        if not child:
            status = 1
            try:
                good = torch.equal(records[5], ROWS[5])
                batches.close()
                del batches
                records.close()
                del records, in_flight
                gc.collect()
                status = 0 if good else 2
            finally:
                os.write(write, bytes([status]))
                os._exit(status)
        os.close(write)
        assert os.read(read, 1) == b"\0"
        os.close(read)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert torch.equal(in_flight.result(PATIENCE_S), ROWS)
        assert torch.equal(next(batches), ROWS[2:3])
        batches.close()
        assert torch.equal(records[6], ROWS[6])

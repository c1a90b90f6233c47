"""`GdsHandle` on a libcufile that moves bytes and misbehaves on order."""

from __future__ import annotations

import errno
import os
import pickle
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_device import FakeDevice
from gds._support import PAGE, TASK, FakeCuFile, room
from support import (
    bytes_tensor,
    random_bytes,
    raw,
    spin_until,
    spin_until_collected,
)

import nvmeio

# Bytes


@pytest.mark.parametrize("offset", [0, 1, PAGE - 1, PAGE, 3 * PAGE + 17])
@pytest.mark.parametrize("nbytes", [0, 1, PAGE, 5 * PAGE, 23 * PAGE + 3])
def test_bytes_arrive_both_ways(
    gds: nvmeio.GdsHandle, path: Path, nbytes: int, offset: int
) -> None:
    before, data = random_bytes(40 * PAGE, 1), random_bytes(nbytes)
    path.write_bytes(before)
    assert gds.sync_pwrite(bytes_tensor(data), path, offset) == nbytes
    expected = bytearray(before)
    expected[offset : offset + nbytes] = data
    assert path.read_bytes() == bytes(expected)
    back = room(nbytes)
    assert gds.sync_pread(back, path, offset) == nbytes
    assert raw(back) == data


def test_rows_go_through_host_memory_without_cufile(
    gds: nvmeio.GdsHandle, fake: FakeCuFile, path: Path
) -> None:
    """cuFile takes one call for each row: the engine for host memory reads them, for any tensor."""
    before, rows = random_bytes(40 * PAGE, 1), random_bytes(5 * 700)
    path.write_bytes(before)
    places = [3 * PAGE, 0, 700, 20 * PAGE - 350, 39 * PAGE]
    assert gds.sync_scatter(bytes_tensor(rows).view(5, 700), path, file_offsets=places) == 3500
    expected = bytearray(before)
    for row, place in enumerate(places):
        expected[place : place + 700] = rows[700 * row : 700 * (row + 1)]
    assert path.read_bytes() == bytes(expected)
    out = room(5 * 700).view(5, 700)
    assert gds.sync_gather(out, path, file_offsets=places) == 3500
    assert raw(out) == rows
    assert fake.noted == []
    assert gds.stats.rows == 10


def test_tasks_are_cut_where_no_two_share_a_block(
    gds: nvmeio.GdsHandle, fake: FakeCuFile, direct_path: Path
) -> None:
    data = random_bytes(5 * TASK)
    gds.sync_pwrite(bytes_tensor(data), direct_path, 1000)
    spans = sorted((at, at + size) for _, size, at, _ in fake.noted)
    # The head and the tail of the span went another way: cuFile would write back whole blocks.
    assert spans[0][0] == PAGE
    assert spans[-1][1] == (1000 + 5 * TASK) // PAGE * PAGE
    assert all(start % PAGE == 0 and end % PAGE == 0 for start, end in spans)
    assert max(end - start for start, end in spans) <= TASK
    assert direct_path.read_bytes()[1000:] == data
    operation = gds.async_pwrite(bytes_tensor(data), direct_path, 1000)
    operation.result()
    head_and_tail = 5 * TASK - (spans[-1][1] - spans[0][0])
    assert (operation.buffered_bytes, operation.direct_bytes) == (head_and_tail, 0)


def test_short_results_are_continued(gds: nvmeio.GdsHandle, fake: FakeCuFile, path: Path) -> None:
    fake.most = 5000
    data = random_bytes(3 * TASK + 77)
    gds.sync_pwrite(bytes_tensor(data), path)
    back = room(len(data))
    gds.sync_pread(back, path)
    assert raw(back) == data
    assert fake.calls > 2 * 3 * 3


def test_threads_work_side_by_side(
    new_gds: Callable[..., nvmeio.GdsHandle], fake: FakeCuFile, path: Path
) -> None:
    gds = new_gds(intra_op_parallelism=3)
    path.write_bytes(bytes(8 * TASK))
    fake.hold = 1
    reading = gds.async_pread(room(8 * TASK), path)
    spin_until(lambda: fake.together == 3)
    assert not reading.done()
    fake.hold = 0
    assert reading.result() == 8 * TASK
    assert fake.most_together == 3


def test_python_runs_on_while_a_call_blocks(
    gds: nvmeio.GdsHandle, fake: FakeCuFile, path: Path
) -> None:
    path.write_bytes(bytes(TASK))
    fake.hold = 1
    reading = gds.async_pread(room(TASK), path)
    spin_until(lambda: fake.together == 1)  # would never come back were the GIL held
    fake.hold = 0
    reading.result()


def test_small_one_does_not_wait_behind_a_large_one(
    new_gds: Callable[..., nvmeio.GdsHandle], fake: FakeCuFile, tmp_path: Path
) -> None:
    gds = new_gds(intra_op_parallelism=1)
    (tmp_path / "large").write_bytes(bytes(60 * TASK))
    (tmp_path / "small").write_bytes(bytes(10))
    fake.hold = 1
    large = gds.async_pread(room(60 * TASK), tmp_path / "large")
    spin_until(lambda: fake.together == 1)
    small = gds.async_pread(room(10), tmp_path / "small")
    fake.hold = 0
    small.result()
    large.result()
    assert [size for _, size, _, _ in fake.noted].index(10) <= 2


# Errors


@pytest.mark.parametrize(
    ("result", "code", "status", "number"),
    [
        (-5036, 0, 5036, errno.ENOMEM),
        (-5008, 0, 5008, errno.EOPNOTSUPP),
        (-5999, 0, 5999, errno.EIO),  # a status that nobody knows
        (-1, 5027, 5027, errno.EBADF),  # errno that is a cuFile status
        (-1, errno.ENOSPC, 0, errno.ENOSPC),
        (-1, 0, 0, errno.EIO),
        (-errno.EACCES, 0, 0, errno.EACCES),
    ],
)
def test_every_kind_of_failure_is_told(
    gds: nvmeio.GdsHandle,
    fake: FakeCuFile,
    path: Path,
    result: int,
    code: int,
    status: int,
    number: int,
) -> None:
    fake.result, fake.result_errno, fake.result_from = result, code, TASK
    for start, call in ((gds.async_pwrite, "cuFileWrite"), (gds.async_pread, "cuFileRead")):
        path.write_bytes(bytes(4 * TASK))
        with pytest.raises(nvmeio.CuFileError, match=call) as failed:
            start(room(4 * TASK), path).result()
        error = failed.value
        assert (error.errno, error.cufile_status, error.cuda_status) == (number, status, 0)
        assert (error.path, error.nbytes) == (str(path), 4 * TASK)
        assert 0 <= error.transferred <= TASK
        assert isinstance(error, OSError)
        again = pickle.loads(pickle.dumps(error))
        assert (str(again), again.cufile_status) == (str(error), status)
    fake.result = 0
    assert gds.sync_pread(room(4 * TASK), path) == 4 * TASK


def test_errno_on_success_means_nothing(gds: nvmeio.GdsHandle, path: Path) -> None:
    """The fake leaves errno dirty after every success, as the real library does."""
    assert gds.sync_pwrite(room(TASK), path) == TASK


def test_end_of_file_is_a_short_transfer(gds: nvmeio.GdsHandle, path: Path) -> None:
    data = random_bytes(2 * TASK + 100)
    path.write_bytes(data)
    tensor = room(6 * TASK)
    with pytest.raises(nvmeio.ShortTransferError) as failed:
        gds.sync_pread(tensor, path)
    assert failed.value.transferred == len(data)
    assert raw(tensor) == data + b"\xa5" * (6 * TASK - len(data))


def test_nothing_read_in_the_middle_of_a_file_is_an_error(
    gds: nvmeio.GdsHandle, fake: FakeCuFile, path: Path
) -> None:
    """With a broken libcuda, cuFile returned 0 and no error: not the end of the file."""
    path.write_bytes(bytes(4 * TASK))
    fake.result = 1
    with pytest.raises(nvmeio.CuFileError, match="moved nothing at byte"):
        gds.sync_pread(room(4 * TASK), path)
    with pytest.raises(nvmeio.CuFileError, match="moved nothing and reported no error"):
        gds.sync_pwrite(room(4 * TASK), path)


def test_file_that_cufile_refuses(gds: nvmeio.GdsHandle, fake: FakeCuFile, path: Path) -> None:
    path.write_bytes(bytes(TASK))
    fake.file_status = 5027
    with pytest.raises(nvmeio.CuFileError, match="/run/udev/data has to be there") as failed:
        gds.sync_pread(room(TASK), path)
    assert failed.value.cufile_status == 5027
    with pytest.raises(FileNotFoundError):
        gds.sync_pread(room(TASK), path.with_name("nowhere"))


# Files


def test_open_file_is_registered_once_and_let_go_before_it_is_closed(
    gds: nvmeio.GdsHandle, fake: FakeCuFile, path: Path
) -> None:
    path.write_bytes(bytes(TASK))
    with nvmeio.open(path, "r+") as file:
        for _ in range(3):
            gds.sync_pread(room(TASK), file)
            gds.sync_pwrite(room(TASK), file)
        assert fake.files == 1
    assert fake.files == 0
    gds.sync_pread(room(TASK), path)
    assert fake.files == 0


def test_descriptor_of_the_callers(gds: nvmeio.GdsHandle, fake: FakeCuFile, path: Path) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        assert gds.sync_pwrite(room(TASK), fd) == TASK
        assert gds.sync_pread(room(TASK), fd) == TASK
    finally:
        os.close(fd)
    assert fake.files == 0


def test_one_open_file_serves_several_handles(
    new_gds: Callable[..., nvmeio.GdsHandle], fake: FakeCuFile, path: Path
) -> None:
    """Registered twice, a descriptor is status 5028."""
    path.write_bytes(bytes(TASK))
    first, second = new_gds(), new_gds()
    with nvmeio.open(path) as file:
        for gds in (first, second):
            assert gds.sync_pread(room(TASK), file) == TASK
        first.close()
        assert second.sync_pread(room(TASK), file) == TASK
        assert fake.files == 1
    assert fake.files == 0


def test_open_file_outlives_the_driver(
    new_gds: Callable[..., nvmeio.GdsHandle], fake: FakeCuFile, path: Path
) -> None:
    path.write_bytes(bytes(TASK))
    with nvmeio.open(path) as file:
        for turn in range(3):
            gds = new_gds()
            assert gds.sync_pread(room(TASK), file) == TASK
            gds.close()
            assert (fake.files, fake.closes) == (0, turn + 1)
    assert fake.dangling == 0


# Registered memory


def test_registered_device_memory_is_named_by_its_base(
    on_device: nvmeio.GdsHandle, device: FakeDevice, fake: FakeCuFile, path: Path
) -> None:
    path.write_bytes(random_bytes(8 * TASK))
    whole = device.take(room(8 * TASK))
    on_device.pin_device_tensor(whole)
    on_device.sync_pread(whole[5000 : 5000 + TASK], path, 0)
    assert fake.noted == [(whole.data_ptr(), TASK, 0, 5000)]
    assert raw(whole[5000 : 5000 + TASK]) == path.read_bytes()[:TASK]
    on_device.unpin_device_tensor(whole)
    on_device.sync_pread(whole[5000 : 5000 + TASK], path, 0)
    assert fake.noted[1:] == [(whole.data_ptr() + 5000, TASK, 0, 0)]


def test_host_memory_is_named_by_each_calls_own_address(
    gds: nvmeio.GdsHandle, fake: FakeCuFile, path: Path
) -> None:
    """cuFile looked at an aligned base, and gave the kernel an odd address with O_DIRECT."""
    path.write_bytes(random_bytes(2 * TASK))
    whole = gds.new_pinned_device_tensor(8 * TASK, torch.uint8)
    assert (whole.shape, whole.dtype, fake.memories) == ((8 * TASK,), torch.uint8, 1)
    gds.sync_pread(whole[64 : 64 + 2 * TASK], path)
    first = whole.data_ptr() + 64
    assert sorted(fake.noted) == [(first, TASK, 0, 0), (first + TASK, TASK, TASK, 0)]
    gds.free_pinned_device_tensor(whole)
    assert fake.memories == 0


def test_pin_and_unpin(gds: nvmeio.GdsHandle, fake: FakeCuFile) -> None:
    tensor = torch.zeros(100, 50)
    gds.pin_device_tensor(tensor)
    for again in (tensor, tensor[10:], tensor.view(torch.int32)):
        with pytest.raises(ValueError, match="registered already"):
            gds.pin_device_tensor(again)
    with pytest.raises(ValueError, match="view into the middle"):
        gds.unpin_device_tensor(tensor[10:])
    gds.unpin_device_tensor(tensor.view(torch.int32)[:3])
    with pytest.raises(ValueError, match="never pinned, is unpinned already"):
        gds.unpin_device_tensor(tensor)
    assert fake.memories == 0


def test_memory_that_cannot_be_registered(gds: nvmeio.GdsHandle, fake: FakeCuFile) -> None:
    with pytest.raises(ValueError, match="not contiguous"):
        gds.pin_device_tensor(torch.zeros(4, 4).t()[1:])
    with pytest.raises(ValueError, match="without elements"):
        gds.pin_device_tensor(torch.zeros(0))
    with pytest.raises(TypeError, match="expected a torch"):
        gds.pin_device_tensor([1])  # type: ignore[arg-type]
    fake.memory_status = 5036
    with pytest.raises(nvmeio.CuFileError, match="GPU memory could not be pinned") as failed:
        gds.pin_device_tensor(torch.zeros(9))
    assert (failed.value.operation, failed.value.cufile_status) == ("register", 5036)
    fake.memory_status = 0
    gds.pin_device_tensor(torch.zeros(9))


@pytest.mark.parametrize("wrong", [-1, 1.5, True, "9"])
def test_new_pinned_device_tensor_checks_its_arguments(gds: nvmeio.GdsHandle, wrong: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="num_elem must be"):
        gds.new_pinned_device_tensor(wrong, torch.float32)
    with pytest.raises(TypeError, match="example must be"):
        gds.new_pinned_device_tensor(9, wrong)


def test_empty_pinned_device_tensor(gds: nvmeio.GdsHandle, fake: FakeCuFile) -> None:
    tensor = gds.new_pinned_device_tensor(0, torch.zeros(1, dtype=torch.int16))
    assert (tensor.numel(), tensor.dtype, fake.memories) == (0, torch.int16, 1)
    gds.free_pinned_device_tensor(tensor)
    assert fake.memories == 0


def test_memory_in_use_cannot_be_unregistered(
    gds: nvmeio.GdsHandle, fake: FakeCuFile, path: Path
) -> None:
    path.write_bytes(bytes(TASK))
    tensor = gds.new_pinned_device_tensor(TASK, torch.uint8)
    fake.hold = 1
    reading = gds.async_pread(tensor, path)
    with pytest.raises(ValueError, match="1 operation in flight"):
        gds.unpin_device_tensor(tensor)
    fake.hold = 0
    reading.result()
    gds.unpin_device_tensor(tensor)


def test_close_unregisters_what_is_left(
    new_gds: Callable[..., nvmeio.GdsHandle], fake: FakeCuFile
) -> None:
    first, second = new_gds(), new_gds()
    kept = first.new_pinned_device_tensor(100, torch.float32)
    second.pin_device_tensor(torch.zeros(5))
    with pytest.raises(ValueError, match="by this handle"):
        second.unpin_device_tensor(kept)
    first.close()
    assert fake.memories == 1
    second.close()
    assert fake.memories == 0
    with pytest.raises(nvmeio.ClosedError):
        first.pin_device_tensor(torch.zeros(5))


def test_memory_that_another_handle_uses_is_unregistered_when_that_is_done(
    new_gds: Callable[..., nvmeio.GdsHandle], fake: FakeCuFile, path: Path
) -> None:
    path.write_bytes(bytes(TASK))
    first, second = new_gds(), new_gds()
    tensor = first.new_pinned_device_tensor(TASK, torch.uint8)
    fake.hold = 1
    reading = second.async_pread(tensor, path)
    spin_until(lambda: fake.together == 1)
    first.close()
    assert fake.memories == 1
    fake.hold = 0
    reading.result()
    spin_until(lambda: fake.memories == 0)
    second.pin_device_tensor(tensor)


def test_dropped_handle_gives_everything_back(
    new_gds: Callable[..., nvmeio.GdsHandle], fake: FakeCuFile
) -> None:
    gds = nvmeio.GdsHandle(cpu_tensors="cufile", queue_depth=8)
    buffer = gds.new_pinned_device_tensor(TASK, torch.uint8)
    storage = weakref.ref(buffer.untyped_storage())
    del gds, buffer
    spin_until(lambda: fake.closes == 1)
    assert fake.memories == 0
    spin_until_collected(lambda: storage() is None)
    spin_until(lambda: not [t for t in threading.enumerate() if "nvmeio-cufile" in t.name])


def test_memory_is_not_kept_after_a_transfer(
    new_gds: Callable[..., nvmeio.GdsHandle], fake: FakeCuFile, path: Path
) -> None:
    """Neither by the threads, waiting for the next one, nor by the operation that is over."""
    path.write_bytes(bytes(9 * TASK))
    gds = new_gds(intra_op_parallelism=3)
    tensor = room(9 * TASK)
    gone = weakref.ref(tensor)
    reading = gds.async_pread(tensor, path)
    assert reading.result() == 9 * TASK
    del tensor
    spin_until_collected(lambda: gone() is None)
    assert reading.transferred == 9 * TASK

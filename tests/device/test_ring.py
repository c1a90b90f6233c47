"""CUDA tensors on an `AioHandle`: the ring, with a device made of host memory.

Everything but the few lines of `_memory.devices.CudaCopier` is what runs on a GPU.
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_device import FakeDevice, fake_device
from support import (
    PLAIN_DTYPES,
    SUB_BYTE,
    HeldEngine,
    LateEngine,
    bytes_tensor,
    dtype_id,
    make_tensor,
    on_every_loop,
    random_bytes,
    raw,
    run_python,
    spin_until,
    until,
)

import nvmeio
from nvmeio._files.descriptors import Descriptors, open_error
from nvmeio._memory.devices import Copy
from nvmeio.engines.device_ring import RingEngine
from nvmeio.testing import FakeEngine

PAGE = 4096
SMALL_RING = 4 * 4 * PAGE  # four chunks of four pages: many pieces from little data


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
    with fake_device(monkeypatch) as made:
        yield made


@pytest.fixture
def ring(device: FakeDevice, make_handle: Callable[..., nvmeio.AioHandle]) -> nvmeio.AioHandle:
    """A handle on each engine in turn, whose ring is small."""
    return make_handle(ring_bytes=SMALL_RING)


@pytest.fixture
def one(device: FakeDevice, new_handle: Callable[..., nvmeio.AioHandle]) -> nvmeio.AioHandle:
    """A handle on the portable engine, whose ring is small."""
    return new_handle("threads", ring_bytes=SMALL_RING)


def on(device: FakeDevice, data: bytes) -> torch.Tensor:
    return device.tensor(bytes_tensor(data))


def room(device: FakeDevice, nbytes: int) -> torch.Tensor:
    return device.take(torch.full((nbytes,), 0xA5, dtype=torch.uint8))


# Bytes


@pytest.mark.parametrize("offset", [0, 1, PAGE - 1, PAGE, 3 * PAGE + 17])
@pytest.mark.parametrize("nbytes", [0, 1, PAGE, 5 * PAGE, 64 * PAGE + 3, 65 * PAGE])
def test_bytes_arrive_both_ways(
    ring: nvmeio.AioHandle, device: FakeDevice, path: Path, nbytes: int, offset: int
) -> None:
    before, data = random_bytes(70 * PAGE, 1), random_bytes(nbytes)
    path.write_bytes(before)
    assert ring.sync_pwrite(on(device, data), path, offset) == nbytes
    expected = bytearray(before)
    expected[offset : offset + nbytes] = data
    assert path.read_bytes() == bytes(expected)
    back = room(device, nbytes)
    assert ring.sync_pread(back, path, offset) == nbytes
    assert raw(back) == data


@pytest.mark.parametrize("dtype", [d for d in PLAIN_DTYPES if d not in SUB_BYTE], ids=dtype_id)
def test_every_dtype(one: nvmeio.AioHandle, device: FakeDevice, path: Path, dtype: Any) -> None:
    data = bytes(16 * 5) if dtype is torch.bool else random_bytes(16 * 5)
    tensor = device.take(make_tensor(dtype, data))
    back = device.take(make_tensor(dtype, bytes(16 * 5)))
    one.sync_pwrite(tensor, path)
    one.sync_pread(back, path)
    assert path.read_bytes() == data
    assert raw(back) == data


def test_views_and_tensors_that_are_not_contiguous(
    one: nvmeio.AioHandle, device: FakeDevice, path: Path
) -> None:
    whole = device.tensor(torch.arange(64 * PAGE, dtype=torch.int32).reshape(256, -1))
    # What contiguous() makes is on the device as well; here nobody else would know.
    turned, cut = whole.t(), whole[3:7]
    one.sync_pwrite(cut, path)
    assert path.read_bytes() == raw(cut.contiguous())
    one.sync_pwrite(turned, path)
    assert path.read_bytes() == raw(turned.contiguous())
    back = device.tensor(torch.zeros(256, 64 * PAGE // 256, dtype=torch.int32)).t()
    one.sync_pread(back, path)
    assert torch.equal(back, turned)


def test_reading_into_a_tensor_is_noted_by_autograd(
    one: nvmeio.AioHandle, device: FakeDevice, path: Path
) -> None:
    path.write_bytes(random_bytes(PAGE))
    tensor = room(device, PAGE)
    version = tensor._version
    one.sync_pread(tensor, path)
    assert tensor._version > version
    leaf = device.take(torch.zeros(8, requires_grad=True))
    with pytest.raises(RuntimeError, match="leaf tensor that requires grad"):
        one.async_pread(leaf, path)


def test_inference_mode(one: nvmeio.AioHandle, device: FakeDevice, path: Path) -> None:
    """The pump is in no inference mode, and may not write to an alias made in one."""
    data = random_bytes(9 * PAGE)
    path.write_bytes(data)
    with torch.inference_mode():
        tensor = room(device, 9 * PAGE)
        assert tensor.is_inference()
        one.sync_pread(tensor, path)
        assert raw(tensor) == data
        one.sync_pwrite(tensor, path, 1)
    assert path.read_bytes()[1:] == data
    with pytest.raises(RuntimeError, match="inference tensor outside"):
        one.async_pread(tensor, path)


def test_validate_compares_what_is_on_the_device(
    one: nvmeio.AioHandle, device: FakeDevice, path: Path
) -> None:
    path.write_bytes(random_bytes(9 * PAGE))
    assert one.pread(room(device, 9 * PAGE), path, validate=True) == 9 * PAGE
    assert one.pwrite(on(device, random_bytes(99)), path, validate=True, file_offset=7) == 99


# Order


@on_every_loop
async def test_begins_when_the_callers_stream_gets_there(
    one: nvmeio.AioHandle, device: FakeDevice, path: Path
) -> None:
    device.work.clear()
    tensor = on(device, bytes(9 * PAGE))
    writing = one.async_pwrite(tensor, path)
    await asyncio.sleep(0.02)
    assert not device.log
    tensor.fill_(7)  # what the stream was still to do
    device.work.set()
    assert await writing == 9 * PAGE
    assert path.read_bytes() == bytes([7]) * 9 * PAGE


def test_waiting_for_one_stream_holds_up_no_other(
    one: nvmeio.AioHandle, device: FakeDevice, path: Path
) -> None:
    path.write_bytes(random_bytes(PAGE))
    busy, device.work = device.work, threading.Event()
    late = one.async_pread(room(device, PAGE), path)
    device.work, blocked = busy, device.work
    assert one.sync_pread(room(device, PAGE), path) == PAGE
    assert not late.done()
    blocked.set()
    assert late.result() == PAGE


@on_every_loop
async def test_is_done_only_when_the_device_is(
    one: nvmeio.AioHandle, device: FakeDevice, path: Path
) -> None:
    data = random_bytes(3 * PAGE)
    path.write_bytes(data)
    device.gate.clear()
    tensor = room(device, 3 * PAGE)
    reading = one.async_pread(tensor, path)
    await asyncio.sleep(0.02)
    assert not reading.done()
    device.gate.set()
    await reading
    assert raw(tensor) == data


# The ring


def test_ring_is_all_that_is_page_locked(
    device: FakeDevice, new_handle: Callable[..., nvmeio.AioHandle], path: Path
) -> None:
    handle = new_handle("threads", ring_bytes=SMALL_RING)
    assert device.most_locked == 0
    handle.sync_pwrite(torch.ones(9), path)
    assert device.most_locked == 0  # none of it for host memory
    for _ in range(3):
        handle.sync_pwrite(room(device, 100 * PAGE), path)
        handle.sync_pread(room(device, 100 * PAGE), path)
    assert device.most_locked == SMALL_RING
    assert max(nbytes for _, nbytes in device.log) == SMALL_RING // 4


@pytest.mark.parametrize("wrong", [0, -1, 8 * PAGE - 1])
def test_ring_that_is_too_small_is_refused(wrong: int) -> None:
    with pytest.raises(ValueError, match="ring_bytes must be 32768 or more"):
        nvmeio.AioHandle(ring_bytes=wrong)
    with pytest.raises(TypeError, match="ring_bytes must be an int"):
        nvmeio.AioHandle(ring_bytes=True)


def test_default_is_four_chunks_of_16_mib() -> None:
    engine = RingEngine(FakeEngine(), FakeDevice())
    assert (engine.chunks, engine.chunk_bytes) == (4, 16 << 20)


def test_drive_goes_on_while_a_chunk_goes_up(
    device: FakeDevice, new_handle: Callable[..., nvmeio.AioHandle], path: Path
) -> None:
    """With the device held, three more chunks are read and then nothing is."""
    path.write_bytes(random_bytes(40 * PAGE))
    engine = FakeEngine()
    handle = new_handle(engine, ring_bytes=SMALL_RING)
    device.gate.clear()
    reading = handle.async_pread(room(device, 40 * PAGE), path)
    spin_until(lambda: engine.counters().bytes_read == SMALL_RING)
    assert not device.log
    device.gate.set()
    assert reading.result() == 40 * PAGE


def test_device_goes_on_while_a_chunk_is_written(
    device: FakeDevice, new_handle: Callable[..., nvmeio.AioHandle], path: Path
) -> None:
    gate = threading.Event()
    handle = new_handle(FakeEngine(hold=gate), ring_bytes=SMALL_RING)
    writing = handle.async_pwrite(room(device, 40 * PAGE), path)
    spin_until(lambda: len(device.log) == 4)  # all four chunks are filled, none is written
    assert handle.stats.bytes_written == 0
    gate.set()
    assert writing.result() == 40 * PAGE


def test_small_ones_share_chunks(
    device: FakeDevice, new_handle: Callable[..., nvmeio.AioHandle], path: Path
) -> None:
    """Each took a chunk of 16 MiB, so that only four were under way: 0.25 GB/s."""
    data = random_bytes(200 << 10)
    path.write_bytes(data)
    engine = FakeEngine()
    handle = new_handle(engine, ring_bytes=16 << 20)  # cells of 256 KiB
    device.gate.clear()
    rooms = [room(device, 100_000) for _ in range(60)]
    reading = [handle.async_pread(each, path, 997 * n) for n, each in enumerate(rooms)]
    spin_until(lambda: engine.counters().bytes_read == 60 * 100_000)
    large = room(device, 6 << 20)
    writing = handle.async_pwrite(large, path, 1 << 20)  # needs whole chunks
    assert not device.log and not writing.done()
    device.gate.set()
    for number, (operation, each) in enumerate(zip(reading, rooms, strict=True)):
        assert operation.result() == 100_000
        assert raw(each) == data[997 * number : 997 * number + 100_000]
    assert writing.result() == 6 << 20
    assert path.read_bytes()[1 << 20 :] == raw(large)


def test_what_has_landed_together_is_copied_with_one_mark(
    device: FakeDevice,
    new_handle: Callable[..., nvmeio.AioHandle],
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each copy had a mark of its own, and each look asked all of them: most of a small read."""
    data = random_bytes(60 * PAGE)
    path.write_bytes(data)
    engine, copied = FakeEngine(), list[int]()
    handle = new_handle(engine, ring_bytes=16 << 20)
    own = device.upload

    def upload(copies: list[Copy]) -> Any:
        if not copied:  # meanwhile the drive gets on with the others
            spin_until(lambda: engine.counters().bytes_read == 60 * PAGE)
        copied.append(len(copies))
        return own(copies)

    monkeypatch.setattr(device, "upload", upload)
    device.work.clear()  # so that all of them begin at once
    rooms = [room(device, PAGE) for _ in range(60)]
    reading = [handle.async_pread(each, path, n * PAGE) for n, each in enumerate(rooms)]
    device.work.set()
    for number, (operation, each) in enumerate(zip(reading, rooms, strict=True)):
        assert operation.result() == PAGE
        assert raw(each) == data[number * PAGE : (number + 1) * PAGE]
    assert sum(copied) == 60 and len(copied) <= 2


def test_one_copy_that_fails_fails_alone(
    one: nvmeio.AioHandle, device: FakeDevice, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.write_bytes(bytes(20 * PAGE))
    bad, own = room(device, PAGE), device.upload

    def upload(copies: list[Copy]) -> Any:
        if any(copy.device.data_ptr() == bad.data_ptr() for copy in copies):
            raise RuntimeError("CUDA error: misaligned address")
        return own(copies)

    monkeypatch.setattr(device, "upload", upload)
    device.work.clear()  # so that all of them begin at once
    rooms = [bad, *(room(device, PAGE) for _ in range(19))]
    failed, *others = [one.async_pread(each, path, n * PAGE) for n, each in enumerate(rooms)]
    device.work.set()
    with pytest.raises(RuntimeError, match="misaligned address"):
        failed.result()
    assert [operation.result() for operation in others] == [PAGE] * 19


def test_a_chunk_takes_few_turns_of_the_gil(
    device: FakeDevice, new_handle: Callable[..., nvmeio.AioHandle], path: Path
) -> None:
    """Each call of the shim lets go of it, and a thread busy in Python has it for 5 ms then.

    The pump asked each part that was under way, at every look: eight turns a chunk. Then it
    prepared each part, started it and asked for its outcome by calls that let go of the GIL, and
    reaped by one: four, and then three. Now it sleeps in poll, and lets go of it nowhere else.
    """
    chunks, calls = 64, Counter[str]()
    path.write_bytes(bytes(chunks * 4 * PAGE))

    def note(frame: Any, event: str, what: Any) -> None:
        name = getattr(what, "__qualname__", "")
        if event == "c_call" and name.startswith(("Lib.nv_", "poll.poll", "eventfd")):
            calls[name] += 1

    before = threading.getprofile()
    threading.setprofile(note)  # of the threads that begin now
    try:
        handle = new_handle("libaio", ring_bytes=SMALL_RING)
        handle.sync_pread(room(device, chunks * 4 * PAGE), path)
        handle.close()
    finally:
        threading.setprofile(before)  # type: ignore[arg-type]
    for name in ("nv_prepare", "nv_start", "nv_cq_reap", "nv_request_result", "nv_wait"):
        assert not calls[f"Lib.{name}"]
    assert sum(calls.values()) <= 1.5 * chunks + 20, calls


def test_small_one_does_not_wait_behind_a_large_one(
    one: nvmeio.AioHandle, device: FakeDevice, path: Path
) -> None:
    path.write_bytes(bytes(800 * PAGE))
    device.gate.clear()
    large = one.async_pread(room(device, 800 * PAGE), path)
    small = one.async_pread(room(device, PAGE), path)
    device.gate.set()
    assert (small.result(), large.result()) == (PAGE, 800 * PAGE)
    # The four chunks that were under way go first, and a few more until the pump looks again.
    assert device.log.index(("upload", PAGE)) < 50
    assert len(device.log) == 201


@on_every_loop
async def test_many_at_once_with_host_memory_among_them(
    ring: nvmeio.AioHandle, device: FakeDevice, tmp_path: Path
) -> None:
    data = [random_bytes(random.Random(i).randrange(12 * PAGE), i) for i in range(24)]
    make = [on, lambda _, some: bytes_tensor(some)]
    tensors = [make[i % 2](device, some) for i, some in enumerate(data)]
    await asyncio.gather(*(ring.async_pwrite(t, tmp_path / f"{i}") for i, t in enumerate(tensors)))
    back = [make[i // 2 % 2](device, bytes(len(some))) for i, some in enumerate(data)]
    await asyncio.gather(*(ring.async_pread(t, tmp_path / f"{i}") for i, t in enumerate(back)))
    assert [raw(t) for t in back] == data
    total = sum(map(len, data))
    stats = ring.stats
    assert (stats.bytes_read, stats.bytes_written) == (total, total)
    assert (stats.operations, stats.errors, stats.in_flight) == (48, 0, 0)
    assert await ring.drain() == 48


def test_statistics_count_each_transfer_once(
    one: nvmeio.AioHandle, device: FakeDevice, path: Path
) -> None:
    operation = one.async_pwrite(room(device, 40 * PAGE), path)
    operation.result()
    assert operation.transferred == 40 * PAGE == operation.bounced_bytes + operation.buffered_bytes
    assert operation.direct_bytes == 0
    stats = one.stats
    assert (stats.operations, stats.bytes_written, stats.direct_bytes) == (1, 40 * PAGE, 0)
    assert stats.bounced_bytes + stats.buffered_bytes == 40 * PAGE


def test_fsync_waits_for_device_writes(
    one: nvmeio.AioHandle, device: FakeDevice, path: Path
) -> None:
    path.touch()
    device.gate.clear()
    writing = one.async_pwrite(on(device, random_bytes(PAGE)), path)
    opener = threading.Timer(0.05, device.gate.set)
    opener.start()
    one.sync_fsync(path)
    assert writing.done()
    opener.join()


# Failures


def test_file_that_ends_first_is_an_error_and_gives_what_there_was(
    one: nvmeio.AioHandle, device: FakeDevice, path: Path
) -> None:
    data = random_bytes(21 * PAGE + 5)
    path.write_bytes(data)
    tensor = room(device, 60 * PAGE)
    with pytest.raises(nvmeio.ShortTransferError) as failed:
        one.sync_pread(tensor, path)
    assert failed.value.transferred == len(data)
    assert raw(tensor)[: len(data)] == data
    assert raw(tensor)[len(data) :] == b"\xa5" * (60 * PAGE - len(data))
    with pytest.raises(nvmeio.ShortTransferError, match="nothing could be read"):
        one.sync_pread(tensor, path, 100 * PAGE)


def test_missing_file_and_full_disk(
    device: FakeDevice, new_handle: Callable[..., nvmeio.AioHandle], path: Path
) -> None:
    handle = new_handle(
        FakeEngine(fail=lambda kind, at, n: errno.ENOSPC if at >= 16 * PAGE else 0),
        ring_bytes=SMALL_RING,
    )
    with pytest.raises(FileNotFoundError):
        handle.sync_pread(room(device, 8), path)
    with pytest.raises(nvmeio.TransferError) as failed:
        handle.sync_pwrite(room(device, 60 * PAGE), path)
    assert failed.value.errno == errno.ENOSPC
    assert 0 < failed.value.transferred <= 16 * PAGE
    assert handle.sync_pwrite(room(device, 8 * PAGE), path) == 8 * PAGE  # and it goes on


def test_errors_of_the_device_are_the_operations(
    one: nvmeio.AioHandle, device: FakeDevice, path: Path
) -> None:
    path.write_bytes(bytes(40 * PAGE))
    device.fail = RuntimeError("CUDA error: an illegal memory access was encountered")
    for start in (one.async_pread, one.async_pwrite):
        with pytest.raises(RuntimeError, match="illegal memory access"):
            start(room(device, 40 * PAGE), path).result()
    device.fail = None
    assert one.sync_pread(room(device, 40 * PAGE), path) == 40 * PAGE


def test_ring_that_cannot_be_made_is_the_operations_error(
    one: nvmeio.AioHandle, device: FakeDevice, path: Path
) -> None:
    device.refuse = OSError(errno.ENOMEM, "cannot page-lock 65536 bytes")
    with pytest.raises(OSError, match="cannot page-lock"):
        one.sync_pwrite(room(device, PAGE), path)
    device.refuse = None
    assert one.sync_pwrite(room(device, PAGE), path) == PAGE


@on_every_loop
async def test_cancelled_read_leaves_the_memory_alone(
    device: FakeDevice, new_handle: Callable[..., nvmeio.AioHandle], path: Path
) -> None:
    path.write_bytes(random_bytes(40 * PAGE))
    engine = HeldEngine()
    handle = new_handle(engine, ring_bytes=SMALL_RING)
    tensor = room(device, 40 * PAGE)
    reading = asyncio.create_task(handle.async_pread(tensor, path))
    await until(lambda: engine.begun > 0)
    reading.cancel()
    await asyncio.sleep(0.01)
    assert not reading.done()  # the kernel has not let go
    engine.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert raw(tensor) == b"\xa5" * 40 * PAGE
    assert handle.stats.cancelled == 1
    assert await handle.async_pread(tensor, path) == 40 * PAGE
    assert raw(tensor) == path.read_bytes()


def test_cancelled_read_whose_parts_the_drive_has_done_is_cancelled(
    device: FakeDevice, new_handle: Callable[..., nvmeio.AioHandle], path: Path
) -> None:
    path.write_bytes(random_bytes(2 * PAGE))
    engine = LateEngine()
    handle = new_handle(engine, ring_bytes=SMALL_RING)
    tensor = room(device, 2 * PAGE)
    reading = handle.async_pread(tensor, path)
    spin_until(lambda: engine.moved > 0)
    assert reading.cancel()
    engine.gate.set()
    spin_until(reading.done)
    assert reading.cancelled()  # and not done: the device has nothing of it
    assert raw(tensor) == b"\xa5" * 2 * PAGE


def test_cancelled_while_it_waits_for_the_stream(
    one: nvmeio.AioHandle, device: FakeDevice, path: Path
) -> None:
    path.write_bytes(bytes(PAGE))
    device.work.clear()
    reading = one.async_pread(room(device, PAGE), path)
    assert reading.cancel()
    spin_until(reading.done)
    assert reading.cancelled()


def test_refused_direct_io_goes_through_the_page_cache(
    device: FakeDevice, new_handle: Callable[..., nvmeio.AioHandle], direct_path: Path
) -> None:
    direct_path.write_bytes(random_bytes(40 * PAGE))
    refusals: list[int] = []

    class Refusing(FakeEngine):
        def _move(self, block: Any, fd: int, memory: memoryview, offset: int) -> int:
            if block.request.transfer.direct_fd >= 0:
                refusals.append(offset)
                raise OSError(errno.EINVAL, "no direct I/O after all")
            return super()._move(block, fd, memory, offset)

    handle = new_handle(Refusing(), ring_bytes=SMALL_RING)
    tensor = room(device, 40 * PAGE)
    with nvmeio.open(direct_path) as file:
        assert handle.sync_pread(tensor, file) == 40 * PAGE
    assert refusals
    assert raw(tensor) == direct_path.read_bytes()


def test_page_cache_that_cannot_be_opened_is_the_operations_error(
    device: FakeDevice,
    new_handle: Callable[..., nvmeio.AioHandle],
    direct_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Chunks of what the drive refused, and no descriptor was left for, are there for others."""
    direct_path.write_bytes(bytes(40 * PAGE))
    fail = {at: errno.EINVAL for at in range(0, 40 * PAGE, PAGE)}
    handle = new_handle(FakeEngine(fail=fail), ring_bytes=SMALL_RING)

    def refuse(opened: Descriptors) -> int:
        raise open_error(errno.EMFILE, opened.path)

    with nvmeio.open(direct_path) as file:
        with monkeypatch.context() as patch:
            patch.setattr(Descriptors, "buffered_fd", refuse)
            with pytest.raises(nvmeio.TransferError) as failed:
                handle.sync_pread(room(device, 40 * PAGE), file)
        assert failed.value.errno == errno.EMFILE
        fail.clear()
        assert handle.sync_pread(room(device, 40 * PAGE), file) == 40 * PAGE


# Life


def test_closed_handle_refuses_device_memory_too(
    one: nvmeio.AioHandle, device: FakeDevice, path: Path
) -> None:
    one.sync_pwrite(room(device, PAGE), path)
    one.close()
    with pytest.raises(nvmeio.ClosedError):
        one.async_pwrite(room(device, PAGE), path)


def test_handle_that_never_met_the_device_makes_no_ring_when_closed(
    one: nvmeio.AioHandle, device: FakeDevice, path: Path
) -> None:
    before = threading.enumerate()
    one.close()
    with pytest.raises(nvmeio.ClosedError):
        one.async_pwrite(room(device, PAGE), path)
    new = [thread for thread in threading.enumerate() if thread not in before]
    assert "nvmeio-ring" not in [thread.name for thread in new]


def test_close_finishes_what_is_in_flight(
    one: nvmeio.AioHandle, device: FakeDevice, path: Path
) -> None:
    data = random_bytes(40 * PAGE)
    device.delay_s = 0.002
    writing = one.async_pwrite(on(device, data), path)
    one.close()
    assert writing.done()
    assert path.read_bytes() == data


def test_failures_of_both_kinds_of_memory_come_from_one_wait(
    one: nvmeio.AioHandle, device: FakeDevice, tmp_path: Path
) -> None:
    one.async_pread(room(device, 8), tmp_path / "a")
    one.async_pread(torch.empty(8), tmp_path / "b")
    with pytest.raises(FileNotFoundError) as failed:
        one.wait()
    assert len(failed.value.others) == 1  # type: ignore[attr-defined]
    assert one.wait() == 0


def test_dropped_handle_finishes_device_writes(device: FakeDevice, tmp_path: Path) -> None:
    handle = nvmeio.AioHandle(block_size=16384, queue_depth=8, ring_bytes=SMALL_RING)
    data = random_bytes(40 * PAGE)
    device.gate.clear()
    path = tmp_path / "written"
    writing = handle.async_pwrite(on(device, data), path)
    with pytest.warns(ResourceWarning, match="operations in flight"):
        del handle
    device.gate.set()
    assert writing.result() == 40 * PAGE
    assert path.read_bytes() == data


@on_every_loop
async def test_wait_and_drain_and_aclose(
    one: nvmeio.AioHandle, device: FakeDevice, path: Path
) -> None:
    one.async_pwrite(room(device, 9 * PAGE), path)
    one.async_pwrite(torch.ones(9), path)
    assert await one.drain() == 2
    one.async_pwrite(room(device, 9 * PAGE), path)
    assert one.wait(100) == 1
    await one.aclose()
    assert one.closed


def test_interpreter_exits_with_device_writes_in_flight(tmp_path: Path) -> None:
    """The ring's core is closed before the one whose engine it works through."""
    script = """
        import sys; sys.path.insert(0, "TESTS")
        import torch, nvmeio, warnings
        from fake_device import FakeDevice
        from nvmeio._memory import devices as _device
        device = FakeDevice()
        _device.is_device, _device.new_copier = device.has, lambda: device
        handles = [nvmeio.AioHandle(ring_bytes=65536) for _ in range(3)]
        device.gate.clear()
        for i, handle in enumerate(handles):
            tensor = device.take(torch.full((40 * 4096,), 7, dtype=torch.uint8))
            handle.async_pwrite(tensor, f"DIR/{i}")
        show = warnings.showwarning
        def showing(*args, **named):
            show(*args, **named)
            device.gate.set()
        warnings.showwarning = showing
    """
    here = str(Path(__file__).parents[1])
    done = run_python(script.replace("TESTS", here).replace("DIR", str(tmp_path)), "-Wdefault")
    assert done.returncode == 0, done.stderr
    assert "in flight, which it waits for" in done.stderr
    for i in range(3):
        assert (tmp_path / f"{i}").read_bytes() == bytes([7]) * 40 * PAGE


def test_after_fork_device_memory_is_refused_as_well(
    one: nvmeio.AioHandle, device: FakeDevice, path: Path
) -> None:
    one.sync_pwrite(room(device, PAGE), path)
    child = os.fork()
    if not child:
        try:
            one.async_pwrite(room(device, PAGE), path)
        except nvmeio.ClosedError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


async def test_loop_stays_free(one: nvmeio.AioHandle, device: FakeDevice, path: Path) -> None:
    device.gate.clear()
    writing = one.async_pwrite(room(device, 40 * PAGE), path)
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while not writing.done():
            turns += 1
            await asyncio.sleep(0.001)

    beside = asyncio.create_task(turn())
    await until(lambda: turns > 20)
    device.gate.set()
    assert await writing == 40 * PAGE
    await beside

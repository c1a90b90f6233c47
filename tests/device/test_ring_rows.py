"""Gathers and scatters of device memory: through the ring, a chunk of rows at a time."""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fake_cuda
import pytest
import torch
from fake_device import FakeDevice, fake_device
from hypothesis import example, given, settings
from hypothesis import strategies as st
from inside import core_of
from support import (
    HeldEngine,
    LateEngine,
    bytes_tensor,
    on_every_loop,
    random_bytes,
    raw,
    spin_until,
    until,
)

import nvmeio
from nvmeio._memory.mappings import Mapping
from nvmeio.engines.base import Capabilities
from nvmeio.testing import FakeEngine

PAGE = 4096
SMALL_RING = 4 * 4 * PAGE  # four chunks of four pages
CONTENT = random_bytes(60 * PAGE, seed=3)
Make = Callable[..., nvmeio.AioHandle]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
    with fake_device(monkeypatch) as made:
        yield made


@pytest.fixture
def ring(device: FakeDevice, make_handle: Make) -> nvmeio.AioHandle:
    """A handle on each engine in turn, whose ring is small."""
    return make_handle(ring_bytes=SMALL_RING)


@pytest.fixture
def one(device: FakeDevice, new_handle: Make) -> nvmeio.AioHandle:
    return new_handle("threads", ring_bytes=SMALL_RING)


@pytest.fixture
def file(path: Path) -> Path:
    path.write_bytes(CONTENT)
    return path


def room(device: FakeDevice, rows: int, row_bytes: int) -> torch.Tensor:
    return device.take(torch.full((rows, row_bytes), 0xA5, dtype=torch.uint8))


def apart(rows: int, row_bytes: int, seed: int = 0) -> list[int]:
    """Places in any order where no two rows overlap."""
    order = random.Random(seed).sample(range(rows), rows)
    return [place * (row_bytes + 3) for place in order]


# Bytes

ROW_BYTES = st.sampled_from([1, 7, 256, 512, 1000, 4095, 4096, 5000, 8192, 16384, 16385, 40_000])


@settings(max_examples=40)
@given(row_bytes=ROW_BYTES, data=st.data())
@example(row_bytes=40_000, data=None)
def test_a_gather_brings_what_lies_there(
    ring: nvmeio.AioHandle, device: FakeDevice, path: Path, row_bytes: int, data: Any
) -> None:
    path.write_bytes(CONTENT)
    places = [0, len(CONTENT) - row_bytes, 4096, 4096]
    if data is not None:
        most = len(CONTENT) - row_bytes
        places = data.draw(st.lists(st.integers(0, most), max_size=max(4, 100_000 // row_bytes)))
    out = room(device, len(places), row_bytes)
    assert ring.sync_gather(out, path, file_offsets=places) == out.nbytes
    assert raw(out) == b"".join(CONTENT[at : at + row_bytes] for at in places)


@pytest.mark.parametrize("row_bytes", [1, 256, 4096, 5000, 16384, 16385, 40_000])
@pytest.mark.parametrize("step", ["apart", "one behind the other"])
def test_a_scatter_writes_its_rows_and_nothing_else(
    ring: nvmeio.AioHandle, device: FakeDevice, file: Path, row_bytes: int, step: str
) -> None:
    rows = min(3000, 200_000 // row_bytes)
    places = apart(rows, row_bytes)
    if step == "one behind the other":
        places = [row * row_bytes for row in reversed(range(rows))]
    data = random_bytes(rows * row_bytes, 7)
    source = device.tensor(bytes_tensor(data).view(rows, row_bytes))
    assert ring.sync_scatter(source, file, file_offsets=places) == len(data)
    expected = bytearray(CONTENT)
    for row, place in enumerate(places):
        expected[place : place + row_bytes] = data[row * row_bytes : (row + 1) * row_bytes]
    assert file.read_bytes() == expected


def test_rows_of_every_shape(one: nvmeio.AioHandle, device: FakeDevice, path: Path) -> None:
    values = torch.arange(6000, dtype=torch.float64)
    path.write_bytes(raw(values))
    out = device.tensor(torch.zeros(50, 3, 4, dtype=torch.float64))
    places = [8 * 96 * (row % 7) for row in range(50)]
    one.sync_gather(out, path, file_offsets=torch.tensor(places))
    for row, at in enumerate(places):
        assert torch.equal(out[row].flatten(), values[at // 8 : at // 8 + 12])
    turned = device.tensor(torch.zeros(12, 50, dtype=torch.float64)).t()
    one.sync_gather(turned, path, file_offsets=places)
    assert torch.equal(turned, out.view(50, 12))


@pytest.mark.parametrize("shape", [(0, 10), (3, 0)])
def test_no_bytes_are_no_work(
    one: nvmeio.AioHandle, device: FakeDevice, file: Path, shape: tuple[int, int]
) -> None:
    out = room(device, *shape)
    assert one.sync_gather(out, file, file_offsets=[0] * shape[0]) == 0
    assert one.sync_scatter(out, file, file_offsets=[0] * shape[0]) == 0


def test_autograd_is_told(one: nvmeio.AioHandle, device: FakeDevice, file: Path) -> None:
    out = room(device, 2, 8)
    version = out._version
    one.sync_gather(out, file, file_offsets=[0, 8])
    assert out._version > version


# The ring


def test_the_ring_is_all_that_is_page_locked(
    device: FakeDevice, new_handle: Make, file: Path
) -> None:
    handle = new_handle("threads", ring_bytes=SMALL_RING)
    out = room(device, 3000, 300)  # 55 chunks of 54 rows and one of 30
    places = [70 * row for row in range(3000)]
    for _ in range(2):
        handle.sync_gather(out, file, file_offsets=places)
        handle.sync_scatter(out, file, file_offsets=[300 * row for row in range(3000)])
    assert device.most_locked == SMALL_RING
    assert {nbytes for _, nbytes in device.log} == {54 * 300, 30 * 300}


def test_the_drive_goes_on_while_rows_go_up(
    device: FakeDevice, new_handle: Make, file: Path
) -> None:
    """With the device held, all four chunks are filled, and then nothing is read."""
    engine = FakeEngine()
    handle = new_handle(engine, ring_bytes=SMALL_RING)
    device.gate.clear()
    gathering = handle.async_gather(
        room(device, 40, PAGE), file, file_offsets=[PAGE * r for r in range(40)]
    )
    spin_until(lambda: engine.counters().bytes_read == SMALL_RING)
    assert not device.log
    device.gate.set()
    assert gathering.result(100) == 40 * PAGE
    assert len(device.log) == 10


@on_every_loop
async def test_begins_when_the_callers_stream_gets_there(
    one: nvmeio.AioHandle, device: FakeDevice, file: Path
) -> None:
    device.work.clear()
    source = device.tensor(torch.zeros(30, 1000, dtype=torch.uint8))
    scattering = one.async_scatter(source, file, file_offsets=[2000 * row for row in range(30)])
    await asyncio.sleep(0.02)
    assert not device.log
    source.fill_(7)  # what the stream was still to do
    device.work.set()
    assert await scattering == 30_000
    assert file.read_bytes()[2000:3000] == bytes([7]) * 1000


def test_statistics_count_each_row_once(
    one: nvmeio.AioHandle, device: FakeDevice, file: Path
) -> None:
    gathering = one.async_gather(room(device, 200, 512), file, file_offsets=[0, PAGE] * 100)
    gathering.result(100)
    assert (gathering.transferred, gathering.direct_bytes) == (102_400, 0)
    stats = one.stats
    assert (stats.operations, stats.rows, stats.bytes_read) == (1, 200, 102_400)
    assert stats.in_flight == stats.errors == 0
    one.sync_scatter(room(device, 3, 40_000), file, file_offsets=[0, 50_000, 100_000])
    stats = one.stats
    assert (stats.operations, stats.rows, stats.bytes_written) == (2, 203, 120_000)


# Failures


def test_the_first_row_that_failed_is_named_and_all_others_are_there(
    device: FakeDevice, new_handle: Make, direct_path: Path
) -> None:
    def bad(kind: str, offset: int, nbytes: int) -> int:
        return errno.EIO if offset <= 81_920 < offset + nbytes else 0

    direct_path.write_bytes(CONTENT)
    handle = new_handle(FakeEngine(fail=bad), block_size=4096, ring_bytes=SMALL_RING)
    # 16 rows a chunk: in the third and the fifth there is a bad one.
    places = [row * 100 for row in range(100)]
    places[40], places[47], places[70] = 82_000, 83_000, 82_100
    out = room(device, 100, 1000)
    with pytest.raises(nvmeio.RowsError) as caught:
        handle.sync_gather(out, direct_path, file_offsets=places)
    failure = caught.value
    assert (failure.errno, failure.row, failure.file_offset) == (errno.EIO, 40, 82_000)
    assert (failure.whole, failure.transferred) == (97, 97_000)
    assert failure.mask().nonzero().flatten().tolist() == [
        row for row in range(100) if row not in (40, 47, 70)
    ]
    for row, at in enumerate(places):
        expected = bytes(1000) if row in (40, 47, 70) else CONTENT[at : at + 1000]
        assert raw(out[row]) == expected
    assert (handle.stats.rows, handle.stats.errors, handle.stats.operations) == (97, 1, 1)


def test_rows_behind_the_end_of_the_file(
    ring: nvmeio.AioHandle, device: FakeDevice, file: Path
) -> None:
    for row_bytes in (1000, 20_000):
        places = [0, len(CONTENT) - row_bytes, len(CONTENT) - 9, len(CONTENT) + PAGE, 5]
        out = room(device, 5, row_bytes)
        with pytest.raises(nvmeio.RowsError) as caught:
            ring.sync_gather(out, file, file_offsets=places)
        failure = caught.value
        assert (failure.errno, failure.row, failure.whole) == (errno.ENODATA, 2, 3)
        assert failure.file_offset == len(CONTENT) - 9
        assert failure.mask().tolist() == [True, True, False, False, True]
        assert raw(out[1]) == CONTENT[-row_bytes:]
        assert raw(out[4]) == CONTENT[5 : 5 + row_bytes]
    assert ring.stats.rows == 6


@pytest.mark.parametrize("rows", [100, 5000])
def test_rows_that_overlap_are_refused_before_anything_is_written(
    ring: nvmeio.AioHandle, device: FakeDevice, file: Path, rows: int
) -> None:
    """They are in different chunks."""
    places = [40 * row for row in range(rows)]
    places[rows - 1] = 40 * 3 + 39
    with pytest.raises(ValueError, match=rf"rows [34] and {rows - 1} of a scatter overlap"):
        ring.async_scatter(room(device, rows, 40), file, file_offsets=places).result(100)
    assert file.read_bytes() == CONTENT
    assert device.log == []


@pytest.mark.parametrize("row_bytes", [1000, 20_000])
def test_errors_of_the_device_are_the_operations(
    one: nvmeio.AioHandle, device: FakeDevice, file: Path, row_bytes: int
) -> None:
    device.fail = RuntimeError("CUDA error: an illegal memory access was encountered")
    places = [row * row_bytes for row in range(8)]
    for start in (one.async_gather, one.async_scatter):
        with pytest.raises(RuntimeError, match="illegal memory access"):
            start(room(device, 8, row_bytes), file, file_offsets=places).result(100)
    device.fail = None
    assert one.sync_gather(room(device, 8, row_bytes), file, file_offsets=places) == 8 * row_bytes


def test_direct_io_that_is_refused_after_all(
    device: FakeDevice, new_handle: Make, direct_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    direct_path.write_bytes(CONTENT)

    class Refusing(FakeEngine):
        def _move(self, block: Any, fd: int, memory: memoryview, offset: int) -> int:
            if fd == block.request.transfer.direct_fd:
                raise OSError(errno.EINVAL, "refused")
            return super()._move(block, fd, memory, offset)

    handle = new_handle(Refusing(), ring_bytes=SMALL_RING)
    out = room(device, 100, 700)
    places = [1000 * row for row in range(100)]
    assert handle.async_gather(out, direct_path, file_offsets=places).result(100) == 70_000
    assert raw(out[99]) == CONTENT[99_000:99_700]
    assert "refused direct I/O" in caplog.text
    assert (handle.stats.rows, handle.stats.operations, handle.stats.errors) == (100, 1, 0)


def test_an_engine_that_moves_no_rows(device: FakeDevice, new_handle: Make, file: Path) -> None:
    class Old(FakeEngine):
        capabilities = Capabilities(batches=True)

    handle = new_handle(Old(), ring_bytes=SMALL_RING)
    out = room(device, 2, 10)
    with pytest.raises(nvmeio.BackendUnavailableError, match="moves no rows"):
        handle.async_gather(out, file, file_offsets=[0, 1])
    assert out.untyped_storage().resizable()
    assert handle.stats.in_flight == 0


def test_offsets_that_are_changed_meanwhile(
    device: FakeDevice, new_handle: Make, file: Path
) -> None:
    """Told not to, and done: an error, whatever the size of the rows."""
    for row_bytes in (1000, 20_000):
        handle = new_handle("threads", ring_bytes=SMALL_RING)
        offsets = torch.zeros(300_000 // row_bytes, dtype=torch.int64)
        device.gate.clear()
        gathering = handle.async_gather(
            room(device, len(offsets), row_bytes), file, file_offsets=offsets
        )
        spin_until(lambda handle=handle: core_of(handle).engine.counters().operations == 4)  # type: ignore[misc]
        offsets.fill_(-1)
        device.gate.set()
        with pytest.raises(ValueError, match="file_offsets changed"):
            gathering.result(100)


# The life of an operation


@on_every_loop
@pytest.mark.parametrize("row_bytes", [1000, 20_000])
async def test_cancelled_gather_leaves_the_memory_alone(
    device: FakeDevice, new_handle: Make, file: Path, row_bytes: int
) -> None:
    engine = HeldEngine()
    handle = new_handle(engine, ring_bytes=SMALL_RING)
    out = room(device, 8, row_bytes)
    places = [row * row_bytes for row in range(8)]
    gathering = asyncio.create_task(handle.async_gather(out, file, file_offsets=places))
    await until(lambda: engine.begun > 0)
    gathering.cancel()
    await asyncio.sleep(0.01)
    assert not gathering.done()  # the kernel has not let go
    engine.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await gathering
    assert bool((out == 0xA5).all())
    assert handle.stats.cancelled == 1
    assert await handle.async_gather(out, file, file_offsets=places) == out.nbytes
    assert raw(out) == CONTENT[: out.nbytes]


@pytest.mark.parametrize("row_bytes", [1000, 20_000])
def test_cancelled_gather_whose_rows_the_drive_has_done_is_cancelled(
    device: FakeDevice, new_handle: Make, file: Path, row_bytes: int
) -> None:
    engine = LateEngine()
    handle = new_handle(engine, ring_bytes=SMALL_RING)
    out = room(device, 2, row_bytes)
    gathering = handle.async_gather(out, file, file_offsets=[0, row_bytes])
    spin_until(lambda: engine.moved > 0)
    assert gathering.cancel()
    engine.gate.set()
    spin_until(gathering.done)
    assert gathering.cancelled()
    assert bool((out == 0xA5).all())


@pytest.mark.parametrize("rows", [100, 5000])
def test_cancelled_while_it_waits_for_the_stream(
    one: nvmeio.AioHandle, device: FakeDevice, file: Path, rows: int
) -> None:
    device.work.clear()
    scattering = one.async_scatter(
        room(device, rows, 8), file, file_offsets=[16 * r for r in range(rows)]
    )
    assert scattering.cancel()
    spin_until(scattering.done)
    assert scattering.cancelled()
    assert file.read_bytes() == CONTENT


def test_in_flight_offsets_and_rows_are_held(
    one: nvmeio.AioHandle, device: FakeDevice, file: Path
) -> None:
    device.gate.clear()
    out, offsets = room(device, 3, 10), torch.tensor([0, 9, 99])
    operation = one.async_gather(out, file, file_offsets=offsets)
    for tensor in (out, offsets):
        with pytest.raises(RuntimeError):
            tensor.untyped_storage().resize_(0)
    with pytest.raises(concurrent.futures.TimeoutError):
        operation.result(0.01)
    device.gate.set()
    assert operation.result(100) == 30
    assert out.untyped_storage().resizable()
    assert offsets.untyped_storage().resizable()


def test_closing_finishes_what_is_in_flight(
    one: nvmeio.AioHandle, device: FakeDevice, file: Path
) -> None:
    device.delay_s = 0.002
    out = room(device, 100, 600)
    gathering = one.async_gather(out, file, file_offsets=[600 * row for row in range(100)])
    one.close()
    assert gathering.done()
    assert raw(out) == CONTENT[:60_000]
    with pytest.raises(nvmeio.ClosedError):
        one.async_gather(out, file, file_offsets=[0] * 100)


def test_small_one_does_not_wait_behind_a_large_one(
    one: nvmeio.AioHandle, device: FakeDevice, file: Path
) -> None:
    device.gate.clear()
    large = one.async_gather(
        room(device, 4000, 512), file, file_offsets=[40 * row for row in range(4000)]
    )
    small = one.async_gather(room(device, 1, 512), file, file_offsets=[0])
    device.gate.set()
    assert (small.result(100), large.result(100)) == (512, 4000 * 512)
    assert device.log.index(("upload", 512)) < 50
    assert len(device.log) == 126


def test_a_handle_whose_device_memory_goes_another_way(device: FakeDevice, file: Path) -> None:
    """Such as `GdsHandle`: its rows have a ring of their own, which is closed with the rest."""

    class Other(nvmeio.AioHandle):
        def _device_maker(self, ring_bytes: int) -> Any:
            return None

        def _rows_maker(self, ring_bytes: int) -> Any:
            return super()._device_maker(SMALL_RING)

    with Other() as handle:
        out = room(device, 100, 600)
        gathering = handle.async_gather(out, file, file_offsets=[600 * row for row in range(100)])
        assert handle.stats.in_flight <= 1
    assert gathering.done()
    assert raw(out) == CONTENT[:60_000]
    assert handle.stats.rows == 100
    rings = [each for each in threading.enumerate() if each.name == "nvmeio-ring"]
    spin_until(lambda: not any(each.is_alive() for each in rings))


# As on a device


def test_through_streams_of_cuda_and_memory_that_the_host_cannot_touch(
    new_handle: Make, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever touches `out` on the host dies of it; all that is page-locked is the ring."""
    locked: list[int] = []
    register = Mapping.register_with_cuda

    def counting(mapping: Mapping) -> bool:
        locked.append(mapping.nbytes)
        return register(mapping)

    monkeypatch.setattr(Mapping, "register_with_cuda", counting)
    with fake_cuda.asynchronous(monkeypatch) as cuda:
        handle = new_handle("threads", ring_bytes=SMALL_RING)
        out = cuda.tensor(torch.zeros(700, 300, dtype=torch.uint8))
        places = [(997 * row) % (len(CONTENT) - 300) for row in range(700)]
        held = threading.Event()

        def wait(number: int) -> None:
            assert held.wait(30)

        cuda.before_copy = wait
        gathering = handle.async_gather(out, file, file_offsets=places)
        with pytest.raises(concurrent.futures.TimeoutError):
            gathering.result(0.05)
        held.set()
        assert gathering.result(100) == 210_000
        rows = cuda.inside(out).clone()
        handle.sync_scatter(out, file, file_offsets=[300 * row for row in range(700)])
        handle.close()
    assert raw(rows) == b"".join(CONTENT[at : at + 300] for at in places)
    assert file.read_bytes()[:210_000] == raw(rows)
    assert locked == [SMALL_RING]

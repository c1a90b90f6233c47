"""Short transfers of a bound file, on a kernel that holds them back or refuses them."""

import asyncio
import concurrent.futures
import logging
import mmap
import threading
import weakref

import pytest
import torch
from faults._support import (
    KIB,
    aligned,
    bytes_of,
    end_in_a_forked_child,
    eventually,
    make_file,
    noise,
)
from inside import record_of
from support import collect, open_descriptors

import nvmeio

NBYTES = 4 * KIB


@pytest.fixture
def path(tmp_path):
    return make_file(tmp_path / "file", noise(4 * NBYTES, seed=3))


def content_of(path):
    return path.read_bytes()[:NBYTES]


@pytest.mark.parametrize("writing", [False, True])
def test_a_storage_is_held_until_the_kernel_is_done(faulty, path, writing):
    with faulty.handle() as handle, handle.open(path, "r+") as file:
        tensor = torch.zeros(NBYTES, dtype=torch.uint8)
        storage = tensor.untyped_storage()
        faulty.close_gate()
        operation = (file.pwrite if writing else file.pread)(tensor)
        assert not storage.resizable()
        with pytest.raises(RuntimeError, match="resiz"):
            storage.resize_(0)
        with pytest.raises(RuntimeError, match="in flight"):
            tensor.share_memory_()
        faulty.open_gate()
        assert operation.result(100) == NBYTES
        assert storage.resizable()
        storage.resize_(0)


def test_operations_in_one_storage_hold_it_together(faulty, path):
    with faulty.handle() as handle, handle.open(path) as file:
        tensor = torch.zeros(2 * NBYTES, dtype=torch.uint8)
        storage = tensor.untyped_storage()
        faulty.close_gate()
        operations = [file.pread(tensor[:NBYTES]), file.pread(tensor[NBYTES:], NBYTES)]
        operations.append(handle.async_pread(tensor, file))
        assert not storage.resizable()
        faulty.open_gate()
        assert sum(each.result(100) for each in operations) == 4 * NBYTES
        assert storage.resizable()
    assert bytes_of(tensor) == path.read_bytes()[: 2 * NBYTES]


class Region(mmap.mmap):
    """Memory whose end can be seen."""


def test_memory_is_kept_until_the_kernel_is_done_and_no_longer(faulty, path):
    with faulty.handle() as handle, handle.open(path) as file:
        region = Region(-1, NBYTES)
        tensor, gone = torch.frombuffer(region, dtype=torch.uint8), weakref.ref(region)
        del region
        faulty.close_gate()
        operation = file.pread(tensor)
        del tensor
        collect()
        assert gone() is not None
        faulty.open_gate()
        assert operation.result(100) == NBYTES
        assert eventually(lambda: collect() or gone() is None)


def test_a_forked_child_is_refused_and_holds_nothing(faulty, path):
    long = make_file(path.with_name("long"), noise(500_000, seed=4))
    with faulty.handle() as handle, handle.open(path) as file:
        tensor = torch.zeros(NBYTES, dtype=torch.uint8)
        faulty.close_gate()
        inside = file.pread(tensor)
        whole = torch.zeros(500_000, dtype=torch.uint8)

        def start():
            operation = handle.async_pread(whole, long)
            threading.Timer(0.0, faulty.open_gate).start()
            return operation

        def resized_in_the_child():
            assert tensor.untyped_storage().resizable()
            file.pread(tensor)

        end_in_a_forked_child(start, [resized_in_the_child, lambda: file.pwrite(tensor)])
        assert inside.result(100) == NBYTES
        assert tensor.untyped_storage().resizable()


@pytest.mark.parametrize("writing", [False, True])
def test_refused_direct_io_goes_buffered(faulty, tmp_path, path, caplog, writing):
    if not nvmeio.files.probe_direct(tmp_path).supported:
        pytest.skip(f"no direct I/O in {tmp_path}")
    with faulty.handle() as handle, handle.open(path, "r+") as file:
        faulty.set(refuse_direct=1)
        tensor = torch.zeros(2 * NBYTES, dtype=torch.uint8)[:NBYTES]
        for turn in range(2):
            tensor.copy_(noise(NBYTES, seed=20 + turn))
            version = tensor._version
            assert (file.pwrite if writing else file.pread)(tensor).result(100) == NBYTES
            assert bytes_of(tensor) == content_of(path)
            assert (tensor._version > version) == (not writing)
            assert tensor.untyped_storage().resizable()
        assert file.alignment == 0
        stats = handle.stats
    assert (stats.buffered_bytes, stats.direct_bytes, stats.bounced_bytes) == (2 * NBYTES, 0, 0)
    assert (stats.operations, stats.errors, stats.in_flight) == (2, 0, 0)
    told = [r.levelno for r in caplog.records if str(path) in r.getMessage()]
    assert told == [logging.WARNING]


async def test_a_hold_ends_with_what_was_refused_first(faulty, tmp_path, path):
    """The first request held the storage, and was believed to die with the second one's end."""
    if not nvmeio.files.probe_direct(tmp_path).supported:
        pytest.skip(f"no direct I/O in {tmp_path}")
    with faulty.handle() as handle, handle.open(path) as file:
        faulty.set(refuse_direct=1)
        tensor = torch.zeros(NBYTES, dtype=torch.uint8)
        faulty.close_gate()
        operation = file.pread(tensor)
        refused = record_of(operation).request  # as somebody who polls it has it
        faulty.open_gate()
        assert await operation == NBYTES
        assert refused is not record_of(operation).request
        assert tensor.untyped_storage().resizable()


async def test_cancelling_waits_for_the_kernel(faulty, path):
    with faulty.handle() as handle, handle.open(path) as file:
        tensor = torch.zeros(NBYTES, dtype=torch.uint8)
        faulty.close_gate()
        task = asyncio.ensure_future(file.pread(tensor))
        while not faulty["events_held"]:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
        assert not tensor.untyped_storage().resizable()
        faulty.open_gate()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert tensor.untyped_storage().resizable()


def test_closing_waits_and_the_file_may_be_closed_before(faulty, path):
    with faulty.handle() as handle:
        tensor = aligned(NBYTES)
        faulty.close_gate()
        file = handle.open(path)
        operation = file.pread(tensor)
        file.close()
        assert str(path) in open_descriptors().values(), "closed under the kernel's feet"
        with pytest.raises(nvmeio.ClosedError):
            file.pread(tensor)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            closing = pool.submit(handle.close)
            with pytest.raises(concurrent.futures.TimeoutError):
                closing.result(0.2)
            faulty.open_gate()
            closing.result(100)
        assert operation.result(0) == NBYTES
    assert bytes_of(tensor) == content_of(path)
    assert str(path) not in open_descriptors().values()


def test_a_failed_read_tells_where(faulty, path):
    with faulty.handle() as handle, handle.open(path) as file:
        tensor = torch.zeros(NBYTES, dtype=torch.uint8)
        with pytest.raises(nvmeio.ShortTransferError, match="ends before"):
            file.pread(tensor, 1 << 30).result(100)
        assert tensor.untyped_storage().resizable()
        assert handle.stats.errors == 1

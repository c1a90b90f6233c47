"""A kernel that refuses, interrupts, shortens, reorders and fails: what the pump makes of it.

fakes/faulty_libaio.c stands between the native lanes and the kernel. Every test proves by its
counters that the fault took place.
"""

import asyncio
import concurrent.futures
import errno
import logging
import os
import random
import sys
import time
from typing import Any

import pytest
from faults._support import (
    KIB,
    MIB,
    aio_contexts,
    aligned,
    bytes_of,
    eventually,
    make_file,
    mapped_bytes,
    misaligned,
    noise,
)
from support import collect, new_descriptors, open_descriptors, spin_until_collected

import nvmeio
from nvmeio.engines.libaio import LibaioEngine

BLOCK = 64 * KIB
NBYTES = 2 * MIB
FSYNC = 2  # IOCB_CMD_FSYNC

# Every fault that nobody above the lane may notice, and the counter that tells that it happened.
TRANSPARENT = {
    "EAGAIN-3-times": (
        {"submit_error": errno.EAGAIN, "submit_error_first": 3},
        "submit_refusals",
    ),
    "EAGAIN-every-2nd": (
        {"submit_error": errno.EAGAIN, "submit_error_every": 2},
        "submit_refusals",
    ),
    "EINTR-from-submit": (
        {"submit_error": errno.EINTR, "submit_error_every": 2},
        "submit_refusals",
    ),
    "partial-submit": ({"submit_at_most": 3}, "submit_partial"),
    "EINTR-from-getevents": (
        {"getevents_error": errno.EINTR, "getevents_error_every": 2},
        "getevents_refusals",
    ),
    "EAGAIN-from-getevents": (
        {"getevents_error": errno.EAGAIN, "getevents_error_every": 3},
        "getevents_refusals",
    ),
    "few-events-at-a-time": ({"getevents_at_most": 1}, "getevents_calls"),
    "short-by-pages": ({"short_nbytes": 12 * KIB}, "submit_shortened"),
    "short-to-one-sector": ({"short_nbytes": 4 * KIB}, "submit_shortened"),
    "EINTR-of-a-block": ({"event_error": errno.EINTR, "event_every": 3}, "events_changed"),
    "EAGAIN-of-a-block": ({"event_error": errno.EAGAIN, "event_every": 3}, "events_changed"),
    "reversed": ({"reverse": 1, "hold_every": 3}, "events_held"),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "single-submit": {"single_submit": True},
    "no-overlap": {"overlap_events": False},
    "three-lanes": {"intra_op_parallelism": 3},
    "depth-2": {"queue_depth": 2},
}
# Direct, bounced, and bounced with an unaligned head and tail: memory, file offset, length.
WAYS = (
    (aligned, 0, NBYTES),
    (misaligned, 0, NBYTES),
    (misaligned, 12345, NBYTES - 4321),
)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("fault", TRANSPARENT)
def test_transient_fault_is_not_noticed(faulty, tmp_path, fault, options):
    switches, proof = TRANSPARENT[fault]
    before = noise(3 * MIB, seed=1)
    parameters = {"block_size": BLOCK, "queue_depth": 16, **OPTIONS[options]}
    if fault == "partial-submit" and (parameters["queue_depth"] < 4 or options == "single-submit"):
        pytest.skip("there is never more than that limit of three blocks to submit")
    with faulty.handle(**parameters) as handle:
        for turn, (allocate, offset, nbytes) in enumerate(WAYS):
            faulty.set(**switches, **{proof: 0})
            path = make_file(tmp_path / f"file-{turn}", before)
            written, found = allocate(nbytes), allocate(nbytes)
            written.copy_(noise(nbytes, seed=2))
            assert handle.async_pwrite(written, path, offset).result(100) == nbytes
            assert handle.async_pread(found, path, offset).result(100) == nbytes
            expected = bytearray(bytes_of(before))
            expected[offset : offset + nbytes] = bytes_of(written)
            assert path.read_bytes() == expected, "a write went wrong, or touched its neighbours"
            assert bytes_of(found) == bytes_of(written)
            if not (fault == "partial-submit" and allocate is misaligned):
                # (what is bounced is submitted block by block, as it is copied)
                assert faulty[proof] > 0, "the fault did not happen: this test tests nothing"
        stats = handle.stats
    total = sum(nbytes for _, _, nbytes in WAYS)
    assert (stats.bytes_written, stats.bytes_read) == (total, total)
    assert (stats.operations, stats.errors, stats.cancelled, stats.in_flight) == (6, 0, 0, 0)


@pytest.mark.parametrize("seed", range(4))
def test_all_transient_faults_at_once(faulty, tmp_path, seed):
    """Many operations over three lanes, while the kernel does everything wrong that it may."""
    chance = random.Random(seed)
    content = noise(4 * MIB, seed=seed)
    old = make_file(tmp_path / "old", content)
    with faulty.handle(block_size=BLOCK, queue_depth=8, intra_op_parallelism=3) as handle:
        faulty.set(
            submit_error=errno.EAGAIN,
            submit_error_every=3,
            submit_at_most=2,
            short_nbytes=20 * KIB,
            getevents_at_most=3,
            reverse=1,
            hold_every=4,
            event_every=5,
            event_error=errno.EINTR,
        )
        reads, writes = [], []
        for index in range(40):
            nbytes = chance.choice([0, 1, 511, 4096, chance.randrange(MIB)])
            allocate = chance.choice([aligned, misaligned])
            tensor = allocate(nbytes)
            if index % 2:
                offset = chance.randrange(4 * MIB - nbytes)
                reads.append((handle.async_pread(tensor, old, offset), tensor, offset))
            else:
                tensor.copy_(noise(nbytes, seed=index))
                offset = chance.randrange(MIB)
                path = tmp_path / f"new-{index}"
                writes.append((handle.async_pwrite(tensor, path, offset), tensor, offset, path))
        assert handle.wait(100) == 40
        proofs = ("submit_refusals", "submit_shortened", "events_changed")
        counted = {name: faulty[name] for name in (*proofs, "events_held", "events_reversed")}
    for operation, tensor, offset in reads:
        assert operation.result() == tensor.nbytes
        assert bytes_of(tensor) == bytes_of(content[offset : offset + tensor.nbytes])
    for operation, tensor, offset, path in writes:
        assert operation.result() == tensor.nbytes
        found = path.read_bytes()
        assert found[offset:] == bytes_of(tensor)
        assert not any(found[:offset])
    assert all(counted.values()), counted


async def test_transient_faults_are_not_noticed_by_a_loop(faulty, tmp_path):
    path = tmp_path / "file"
    tensors = [noise(300 * KIB + i, seed=i) for i in range(8)]
    with faulty.handle(block_size=BLOCK, queue_depth=4) as handle:
        faulty.set(
            submit_error=errno.EAGAIN,
            submit_error_every=2,
            short_nbytes=8 * KIB,
            getevents_error=errno.EINTR,
            getevents_error_every=2,
        )
        async with asyncio.timeout(100) if sys.version_info >= (3, 11) else _no_timeout():
            await asyncio.gather(
                *(handle.async_pwrite(t, path, i * MIB) for i, t in enumerate(tensors))
            )
            found = [misaligned(t.nbytes) for t in tensors]
            await asyncio.gather(
                *(handle.async_pread(t, path, i * MIB) for i, t in enumerate(found))
            )
        assert faulty["submit_refusals"] and faulty["getevents_refusals"]
    assert [bytes_of(t) for t in found] == [bytes_of(t) for t in tensors]


class _no_timeout:
    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        return None


# --- failures ---------------------------------------------------------------------------------


@pytest.mark.parametrize("allocate", [aligned, misaligned])
@pytest.mark.parametrize("lanes", [1, 2])
def test_failed_block_of_a_read_fails_its_operation_alone(faulty, tmp_path, allocate, lanes):
    content = noise(NBYTES, seed=3)
    path = make_file(tmp_path / "file", content)
    others = [make_file(tmp_path / f"other-{i}", noise(5 * BLOCK, seed=i)) for i in range(4)]
    bad = 7 * BLOCK
    with faulty.handle(block_size=BLOCK, queue_depth=64, intra_op_parallelism=lanes) as handle:
        faulty.set(event_offset=bad, event_error=errno.EIO)
        tensor = allocate(NBYTES)
        failing = handle.async_pread(tensor, path)
        beside = [(allocate(5 * BLOCK), other) for other in others]
        running = [handle.async_pread(t, other) for t, other in beside]
        failed = failing.exception(100)
        assert type(failed) is nvmeio.TransferError
        assert [operation.result(100) for operation in running] == [5 * BLOCK] * 4
        assert failed.errno == errno.EIO
        if lanes == 1:
            # All blocks are in the kernel's queue before the first comes back and get through.
            assert failed.transferred == NBYTES - BLOCK
        else:  # another lane may hear of the failure before it has begun
            assert failed.transferred in range(BLOCK, NBYTES, BLOCK)
        assert (failed.operation, failed.path) == ("pread", str(path))
        assert (failed.file_offset, failed.nbytes) == (0, NBYTES)
        assert faulty["events_changed"] == 1
        stats = handle.stats
        assert (stats.errors, stats.operations, stats.in_flight) == (1, 5, 0)
        faulty.off()
        again = allocate(NBYTES)
        assert handle.async_pread(again, path).result(100) == NBYTES
    assert bytes_of(again) == bytes_of(content)
    if lanes == 1:
        assert bytes_of(tensor[:bad]) == bytes_of(content[:bad])
        assert bytes_of(tensor[bad + BLOCK :]) == bytes_of(content[bad + BLOCK :])
    for (tensor, other), _ in zip(beside, others, strict=True):
        assert bytes_of(tensor) == other.read_bytes()


@pytest.mark.parametrize("allocate", [aligned, misaligned])
def test_failed_block_of_a_write_tells_what_got_through(faulty, tmp_path, allocate):
    path = make_file(tmp_path / "file", noise(NBYTES, seed=4))
    tensor = allocate(NBYTES)
    tensor.copy_(noise(NBYTES, seed=5))
    with faulty.handle(block_size=BLOCK, queue_depth=64) as handle:
        faulty.set(event_offset=3 * BLOCK, event_error=errno.EIO)
        beside = handle.async_pwrite(noise(2 * BLOCK, seed=6), tmp_path / "other")
        with pytest.raises(nvmeio.TransferError) as failed:
            handle.async_pwrite(tensor, path).result(100)
        assert (failed.value.errno, failed.value.transferred) == (errno.EIO, NBYTES - BLOCK)
        assert failed.value.operation == "pwrite"
        assert beside.result(100) == 2 * BLOCK
        assert handle.wait(100) == 2, "the failure was seen through result: wait raises nothing"
    assert (tmp_path / "other").read_bytes() == bytes_of(noise(2 * BLOCK, seed=6))


def test_after_a_failed_block_no_further_one_is_issued(faulty, tmp_path):
    content = noise(64 * BLOCK, seed=7)
    path = make_file(tmp_path / "file", content)
    with faulty.handle(block_size=BLOCK, queue_depth=4) as handle:
        faulty.set(event_offset=2 * BLOCK, event_error=errno.EIO)
        with pytest.raises(nvmeio.TransferError) as failed:
            handle.async_pread(aligned(64 * BLOCK), path).result(100)
        assert faulty["blocks"] < 20, "64 blocks were wanted, the third failed"
        assert failed.value.transferred == (faulty["blocks"] - 1) * BLOCK


def test_first_of_several_errnos_is_told(faulty, tmp_path):
    path = make_file(tmp_path / "file", noise(NBYTES))
    with faulty.handle(block_size=BLOCK, queue_depth=64) as handle:
        faulty.set(event_every=1, event_error=errno.ENODEV)
        with pytest.raises(nvmeio.TransferError) as failed:
            handle.async_pread(aligned(NBYTES), path).result(100)
        assert (failed.value.errno, failed.value.transferred) == (errno.ENODEV, 0)
        assert faulty["events_changed"] == NBYTES // BLOCK


def test_write_that_makes_no_progress_is_an_error_not_a_loop(faulty, tmp_path):
    with faulty.handle(block_size=BLOCK, queue_depth=4) as handle:
        faulty.set(event_offset=BLOCK, event_error=-1)
        with pytest.raises(nvmeio.TransferError) as failed:
            handle.async_pwrite(aligned(4 * BLOCK), tmp_path / "file").result(100)
        assert (failed.value.errno, failed.value.transferred) == (errno.EIO, 3 * BLOCK)
        assert faulty["events_changed"] == 1


@pytest.mark.parametrize("allocate", [aligned, misaligned])
def test_end_of_file_is_found_behind_short_transfers(faulty, tmp_path, allocate):
    """A short transfer and the end of the file look alike to the first look at `res`."""
    nbytes = 5 * BLOCK + 1000
    content = noise(nbytes, seed=8)
    path = make_file(tmp_path / "file", content)
    with faulty.handle(block_size=BLOCK, queue_depth=4) as handle:
        faulty.set(short_nbytes=4 * KIB)
        tensor = allocate(8 * BLOCK)
        with pytest.raises(nvmeio.ShortTransferError) as short:
            handle.async_pread(tensor, path).result(100)
        assert (short.value.requested, short.value.transferred) == (8 * BLOCK, nbytes)
        assert faulty["submit_shortened"] > 0
    assert bytes_of(tensor[:nbytes]) == bytes_of(content)
    # The kernel fills up the last sector.
    assert bytes_of(tensor[nbytes + 4096 :]) == b"\xa5" * (8 * BLOCK - nbytes - 4096)


def test_fsync_tells_the_kernels_error(faulty, tmp_path):
    path = make_file(tmp_path / "file", noise(BLOCK))
    with faulty.handle() as handle:
        faulty.set(event_opcode=FSYNC, event_error=errno.EIO)
        with pytest.raises(nvmeio.TransferError) as failed:
            handle.sync_fsync(path)
        assert (failed.value.errno, failed.value.operation) == (errno.EIO, "fsync")
        assert faulty["events_changed"] == 1


async def test_fsync_works_on_a_kernel_without_that_command(faulty, tmp_path):
    """Before Linux 4.18 io_submit refused IOCB_CMD_FSYNC."""
    path = make_file(tmp_path / "file", noise(BLOCK))
    with faulty.handle() as handle:
        faulty.set(event_opcode=FSYNC, event_error=errno.EINVAL)
        handle.sync_fsync(path)
        await handle.fsync(path)
        assert faulty["events_changed"] == 2
        assert handle.stats.in_flight == 0


# --- direct I/O refused -----------------------------------------------------------------------


@pytest.fixture
def direct_folder(tmp_path):
    probe = nvmeio.files.probe_direct(tmp_path)
    if not probe.supported:
        pytest.skip(f"no direct I/O in {tmp_path}: {probe.reason}")
    return tmp_path


@pytest.mark.parametrize("writing", [False, True])
@pytest.mark.parametrize("allocate", [aligned, misaligned])
def test_refused_direct_io_goes_buffered(faulty, direct_folder, caplog, writing, allocate):
    content = noise(NBYTES, seed=9)
    path = make_file(direct_folder / "file", content)
    with faulty.handle(block_size=BLOCK) as handle, nvmeio.open(path, "r+") as file:
        faulty.set(refuse_direct=1)
        tensor = allocate(NBYTES)
        for turn in range(2):
            if writing:
                tensor.copy_(noise(NBYTES, seed=10 + turn))
                assert handle.async_pwrite(tensor, file).result(100) == NBYTES
            else:
                tensor.fill_(0)
                assert handle.async_pread(tensor, file).result(100) == NBYTES
            assert path.read_bytes() == bytes_of(tensor)
            if turn == 0:
                refused = faulty["submit_refusals"]
                assert refused > 0
        assert faulty["submit_refusals"] == refused, "the file has forgotten the refusal"
        assert file.alignment == 0
        stats = handle.stats
    assert (stats.buffered_bytes, stats.direct_bytes, stats.bounced_bytes) == (2 * NBYTES, 0, 0)
    assert (stats.operations, stats.errors, stats.in_flight) == (2, 0, 0)
    assert stats.bytes_written + stats.bytes_read == 2 * NBYTES
    told = [r.levelno for r in caplog.records if str(path) in r.getMessage()]
    assert told == [logging.WARNING]


def test_one_refused_direct_block_counts_no_byte_twice(faulty, direct_folder):
    """Blocks that got through before the refusal are moved again; the statistics tell one way."""
    path = make_file(direct_folder / "file", noise(NBYTES, seed=11))
    tensor = aligned(NBYTES)
    with faulty.handle(block_size=BLOCK) as handle:
        faulty.set(refuse_offset=9 * BLOCK)
        operation = handle.async_pread(tensor, path)
        assert operation.result(100) == NBYTES
        assert faulty["submit_refusals"] == 1
        stats = handle.stats
        assert operation.buffered_bytes == NBYTES
    assert bytes_of(tensor) == path.read_bytes()
    assert (stats.operations, stats.errors) == (1, 0)
    assert stats.bytes_read == NBYTES
    assert stats.direct_bytes + stats.buffered_bytes == NBYTES


def test_a_second_attempt_may_end_before_the_first_is_taken_off_the_queue(
    faulty, direct_folder, monkeypatch
):
    """An await never ended: who noticed the refusal took the end of the second attempt with it."""
    path = make_file(direct_folder / "file", noise(NBYTES, seed=12))
    prepare = LibaioEngine.prepare

    def prompt(engine, cq, token, transfer):
        request = prepare(engine, cq, token, transfer)
        return request if transfer.direct_fd >= 0 else Prompt(request)

    class Prompt:
        """Has ended when it has begun."""

        def __init__(self, request):
            self._request = request

        def __getattr__(self, name):
            return getattr(self._request, name)

        def start(self):
            self._request.start()
            assert self._request.wait(100)

    monkeypatch.setattr(LibaioEngine, "prepare", prompt)

    async def read(handle):
        tensor = aligned(NBYTES)
        assert await asyncio.wait_for(handle.async_pread(tensor, path), 100) == NBYTES
        return tensor

    with faulty.handle(block_size=BLOCK) as handle:
        faulty.set(refuse_offset=9 * BLOCK)
        tensor = asyncio.run(read(handle))
    assert bytes_of(tensor) == path.read_bytes()


def test_refused_buffered_block_is_an_error(faulty, direct_folder):
    path = make_file(direct_folder / "file", noise(NBYTES))
    with faulty.handle(block_size=BLOCK) as handle:
        faulty.set(event_every=1, event_error=errno.EINVAL)
        with pytest.raises(nvmeio.TransferError) as failed:
            handle.async_pread(aligned(NBYTES), path).result(100)
        assert failed.value.errno == errno.EINVAL
        stats = handle.stats
        assert (stats.operations, stats.errors, stats.in_flight) == (1, 1, 0)


# --- a kernel that takes nothing --------------------------------------------------------------


def test_kernel_that_stays_unwilling_ends_with_its_error(faulty, tmp_path):
    path = make_file(tmp_path / "file", noise(NBYTES))
    with faulty.handle(block_size=BLOCK, queue_depth=8) as handle:
        faulty.set(submit_error=errno.EAGAIN, submit_error_always=1)
        began = time.monotonic()
        operations = [handle.async_pread(aligned(NBYTES), path) for _ in range(3)]
        for operation in operations:
            with pytest.raises(nvmeio.TransferError) as failed:
                operation.result(200)
            assert (failed.value.errno, failed.value.transferred) == (errno.EAGAIN, 0)
        assert time.monotonic() - began > 8
        assert handle.stats.in_flight == 0
        faulty.off()
        tensor = aligned(NBYTES)
        assert handle.async_pread(tensor, path).result(100) == NBYTES
        assert bytes_of(tensor) == path.read_bytes()


def test_an_old_stall_does_not_shorten_the_patience_with_a_new_one(faulty, tmp_path):
    """The clock of a stall must stop when the stalled blocks are cancelled."""
    path = make_file(tmp_path / "file", noise(NBYTES))
    with faulty.handle(block_size=BLOCK, queue_depth=8) as handle:
        faulty.set(submit_error=errno.EAGAIN, submit_error_always=1)
        stalled = handle.async_pread(aligned(NBYTES), path)
        assert eventually(lambda: faulty["submit_refusals"] > 2)
        began = time.monotonic()
        assert stalled.cancel()
        assert eventually(stalled.cancelled)
        # No way round waiting: it is the lane's clock, and its limit of 10 s, that is tested.
        time.sleep(max(0.0, began + 10.5 - time.monotonic()))
        faulty.set(submit_error_always=0, submit_error_first=1)
        tensor = aligned(NBYTES)
        assert handle.async_pread(tensor, path).result(100) == NBYTES
        assert bytes_of(tensor) == path.read_bytes()


@pytest.mark.parametrize("writing", [False, True])
def test_stalled_operation_can_be_cancelled(faulty, tmp_path, writing):
    content = noise(NBYTES, seed=12)
    path = make_file(tmp_path / "file", content)
    tensor = aligned(NBYTES)
    with faulty.handle(block_size=BLOCK, queue_depth=8) as handle:
        faulty.set(submit_error=errno.EAGAIN, submit_error_always=1)
        start = handle.async_pwrite if writing else handle.async_pread
        stalled = start(tensor, path)
        behind = start(aligned(NBYTES), path)
        assert eventually(lambda: faulty["submit_refusals"] > 2)
        began = time.monotonic()
        assert stalled.cancel()
        with pytest.raises(concurrent.futures.CancelledError):
            stalled.result(100)
        assert time.monotonic() - began < 8  # it would give up after ten
        assert not behind.done(), "only the one was cancelled"
        assert behind.cancel()
        assert eventually(behind.cancelled)
        stats = handle.stats
        assert (stats.cancelled, stats.in_flight, stats.errors) == (2, 0, 0)
        assert faulty["blocks"] == 0
        faulty.off()
        again = aligned(NBYTES)
        assert handle.async_pread(again, path).result(100) == NBYTES
    assert bytes_of(tensor) == b"\xa5" * NBYTES
    assert path.read_bytes() == bytes_of(content) == bytes_of(again)


async def test_stalled_operation_times_out_with_its_awaiter(faulty, tmp_path):
    path = make_file(tmp_path / "file", noise(NBYTES))
    tensor = aligned(NBYTES)
    with faulty.handle(block_size=BLOCK, queue_depth=8) as handle:
        faulty.set(submit_error=errno.EAGAIN, submit_error_always=1)
        began = time.monotonic()
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(handle.async_pread(tensor, path), 0.1)
        assert time.monotonic() - began < 8  # it would give up after ten
        assert handle.stats.in_flight == 0
    assert bytes_of(tensor) == b"\xa5" * NBYTES


@pytest.mark.parametrize("allocate", [aligned, misaligned])
async def test_cancellation_waits_for_what_the_kernel_holds(faulty, tmp_path, allocate):
    """Some blocks are in the kernel, some are not yet: the first are waited for, the others go."""
    path = make_file(tmp_path / "file", noise(NBYTES, seed=13))
    tensor = allocate(NBYTES)
    with faulty.handle(block_size=BLOCK, queue_depth=4) as handle:
        faulty.close_gate()
        task = asyncio.create_task(handle.async_pread(tensor, path))
        await asyncio.sleep(0)
        while faulty["events_held"] < 4:
            await asyncio.sleep(0.001)
        for _ in range(3):
            task.cancel()
            done, _ = await asyncio.wait([task], timeout=0.1)
            assert not done, "cancelled while the kernel may still write into the tensor"
        assert handle.stats.in_flight == 1
        faulty.open_gate()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 100)
        assert handle.stats.in_flight == 0
        tensor.fill_(0x5A)  # ours again
        assert faulty["blocks"] == 4, "28 blocks were not yet issued, and never are"
        assert await handle.async_pread(allocate(NBYTES), path) == NBYTES
        assert bytes_of(tensor) == b"\x5a" * NBYTES
        assert handle.stats.cancelled == 1


@pytest.mark.parametrize("error", [errno.EINTR, errno.EAGAIN])
def test_cancelled_operation_whose_block_was_interrupted_is_cancelled(faulty, tmp_path, error):
    """Uncancelled, such a block is asked for again; its errno was told as a failure then."""
    path = make_file(tmp_path / "file", noise(NBYTES))
    with faulty.handle(block_size=BLOCK, queue_depth=4) as handle:
        faulty.close_gate()
        faulty.set(event_every=1, event_error=error)
        operation = handle.async_pread(aligned(NBYTES), path)
        assert eventually(lambda: faulty["events_held"] == 4)
        assert operation.cancel()
        faulty.open_gate()
        with pytest.raises(concurrent.futures.CancelledError):
            operation.result(100)
        assert faulty["events_changed"] == 4
        assert (handle.stats.cancelled, handle.stats.errors) == (1, 0)


def test_done_callback_may_wait_for_what_ended_at_the_same_time(faulty, tmp_path):
    """Both are noticed together, and the second was claimed for after the first: a deadlock."""
    path = make_file(tmp_path / "file", noise(NBYTES))
    results = []
    with faulty.handle(block_size=BLOCK, queue_depth=8) as handle:
        faulty.close_gate()
        first, second = (handle.async_pread(aligned(BLOCK), path, i * BLOCK) for i in range(2))
        first.add_done_callback(lambda _: results.append(second.result(200)))
        second.add_done_callback(lambda _: results.append(first.result(200)))
        assert eventually(lambda: faulty["events_held"] == 2)
        faulty.open_gate()
        assert eventually(lambda: len(results) == 2, 100), "a callback waits in vain"
        assert first.result(100) == second.result(100) == BLOCK
    assert results == [BLOCK, BLOCK]


def test_close_waits_for_what_the_kernel_holds(faulty, tmp_path):
    content = noise(NBYTES, seed=14)
    path = make_file(tmp_path / "file", content)
    tensor = aligned(NBYTES)
    with faulty.handle(block_size=BLOCK, queue_depth=4) as handle:
        faulty.close_gate()
        operation = handle.async_pread(tensor, path)
        assert eventually(lambda: faulty["events_held"] == 4)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            closing = pool.submit(handle.close)
            with pytest.raises(concurrent.futures.TimeoutError):
                closing.result(0.2)
            with pytest.raises(nvmeio.ClosedError):
                handle.async_pread(aligned(BLOCK), path)
            faulty.open_gate()
            closing.result(100)
        assert operation.result(0) == NBYTES
    assert bytes_of(tensor) == bytes_of(content)


def test_closed_handle_holds_nothing_of_the_kernels(faulty, tmp_path):
    """The context lived on with the last reference to the handle or to one of its operations.

    Contexts count against fs.aio-max-nr: some hundred closed handles, kept or waiting for the
    garbage collector, would use it up.
    """
    path = make_file(tmp_path / "file", noise(NBYTES))
    bounce = 192 * MIB  # more than the arena of malloc that a new thread may get
    options = {"block_size": 64 * MIB, "queue_depth": 8, "intra_op_parallelism": 2}
    collect()
    before, memory = aio_contexts(), mapped_bytes()
    with faulty.handle(**options) as handle:
        operation = handle.async_pread(misaligned(NBYTES), path)
        assert operation.result(100) == NBYTES
        assert aio_contexts() == before + 2
        assert mapped_bytes() - memory > bounce
    assert eventually(lambda: aio_contexts() <= before)
    assert eventually(lambda: mapped_bytes() - memory < bounce), "the bounce blocks are still there"
    assert operation.transferred == handle.stats.bytes_read == NBYTES, "its account remains"


def test_faults_leak_neither_descriptors_nor_contexts(faulty, tmp_path):
    path = make_file(tmp_path / "file", noise(NBYTES))
    with faulty.handle() as handle:  # whatever is opened once and kept, is opened here
        handle.sync_pread(aligned(BLOCK), path)
    del handle
    collect()
    before, contexts = open_descriptors(), aio_contexts()
    for error in (errno.EIO, errno.EINVAL, errno.ENOMEM):
        with faulty.handle(block_size=BLOCK, queue_depth=4) as handle:
            faulty.set(event_every=2, event_error=error)
            for _ in range(5):
                assert handle.async_pread(aligned(NBYTES), path).exception(100) is not None
        del handle
    spin_until_collected(lambda: not new_descriptors(before))
    spin_until_collected(lambda: aio_contexts() <= contexts)
    assert os.path.getsize(path) == NBYTES

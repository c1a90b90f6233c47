"""Gathers and scatters: a kernel that misbehaves, a forked child, the interpreter's end."""

import errno
import random
import textwrap
from functools import partial

import pytest
import torch
from faults._support import (
    KIB,
    aligned,
    bytes_of,
    end_in_a_forked_child,
    make_file,
    misaligned,
    noise,
)
from faults.test_faulty_kernel import TRANSPARENT
from support import run_python

import nvmeio

SIZE = 512 * KIB


# What is copied is submitted block by block, so never more than one at a time.
FAULTS = [fault for fault in TRANSPARENT if fault != "partial-submit"]


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("fault", FAULTS)
def test_transient_fault_is_not_noticed(faulty, tmp_path, fault, lanes):
    switches, proof = TRANSPARENT[fault]
    chance = random.Random(1)
    content = noise(SIZE, seed=1)
    with faulty.handle(block_size=16 * KIB, queue_depth=8, intra_op_parallelism=lanes) as handle:
        for turn, (row_bytes, allocate) in enumerate([(4096, aligned), (300, misaligned)]):
            faulty.set(**switches, **{proof: 0})
            path = make_file(tmp_path / f"file-{turn}", content)
            places = [place * row_bytes for place in range(SIZE // row_bytes) if place % 5]
            chance.shuffle(places)
            source = allocate(len(places) * row_bytes).view(len(places), row_bytes)
            source.copy_(noise(source.numel(), seed=2).view(source.shape))
            assert (
                handle.async_scatter(source, path, file_offsets=places).result(100) == source.nbytes
            )
            out = allocate(source.numel()).view(source.shape).zero_()
            assert handle.async_gather(out, path, file_offsets=places).result(100) == source.nbytes
            assert torch.equal(out, source)
            expected = bytearray(bytes_of(content))
            for row, place in enumerate(places):
                expected[place : place + row_bytes] = bytes_of(source[row])
            assert path.read_bytes() == expected
        assert faulty[proof] > 0, "the fault did not happen: this test tests nothing"
        stats = handle.stats
    assert (stats.operations, stats.errors, stats.in_flight) == (4, 0, 0)


def test_one_bad_block_costs_its_rows(faulty, tmp_path):
    path = make_file(tmp_path / "file", noise(SIZE, seed=1))
    places = [128 * KIB, 40, 200 * KIB, 200 * KIB + 700, 300 * KIB]
    with faulty.handle(block_size=16 * KIB, queue_depth=8) as handle:
        faulty.set(event_offset=200 * KIB, event_error=errno.EIO)
        out = torch.zeros(5, 100, dtype=torch.uint8)
        with pytest.raises(nvmeio.RowsError) as caught:
            handle.sync_gather(out, path, file_offsets=places)
        assert faulty["events_changed"] == 1
        assert handle.stats.rows == 3
    failure = caught.value
    assert (failure.errno, failure.row, failure.whole) == (errno.EIO, 2, 3)
    assert failure.file_offset == 200 * KIB
    assert failure.mask().tolist() == [True, True, False, False, True]
    for row in (0, 1, 4):
        assert bytes_of(out[row]) == path.read_bytes()[places[row] :][:100]


def test_a_file_that_refuses_direct_io_is_done_again_without(faulty, tmp_path):
    content = noise(SIZE, seed=1)
    path = make_file(tmp_path / "file", content)
    places = [5, 400 * KIB, 4096 * 9, 17]
    with faulty.handle(block_size=16 * KIB, queue_depth=8) as handle:
        faulty.set(refuse_direct=1)
        out = torch.zeros(4, 4096, dtype=torch.uint8)
        operation = handle.async_gather(out, path, file_offsets=places)
        assert operation.result(100) == operation.buffered_bytes == out.nbytes
        assert handle.async_scatter(
            out, path, file_offsets=[32 * KIB * row for row in range(4)]
        ).result(100)
        assert (handle.stats.rows, handle.stats.errors) == (8, 0)
    for row, place in enumerate(places):
        wanted = content[place : place + 4096]
        assert torch.equal(out[row], wanted)
        assert path.read_bytes()[32 * KIB * row :][:4096] == bytes_of(wanted)


def test_a_cancelled_gather_leaves_memory_alone_once_it_is_over(faulty, tmp_path):
    path = make_file(tmp_path / "file", noise(SIZE, seed=1))
    with faulty.handle(block_size=16 * KIB, queue_depth=4) as handle:
        faulty.close_gate()
        out = torch.full((4000, 100), 7, dtype=torch.uint8)
        operation = handle.async_gather(out, path, file_offsets=torch.arange(4000) * 100)
        assert operation.cancel()
        faulty.open_gate()
        handle.wait(100)
        assert operation.cancelled()
        assert bool((out == 7).all())
        assert out.untyped_storage().resizable()


MEMORY = """
import mmap, os, sys, torch, nvmeio
path = sys.argv[1]
with open(path, "wb") as made:
    made.write(bytes(range(256)) * 1024)
shared = os.open(path + ".memory", os.O_RDWR | os.O_CREAT)
os.ftruncate(shared, 8192)
region = mmap.mmap(shared, 8192)
out = torch.frombuffer(region, dtype=torch.uint8).view(8, 1024)
os.ftruncate(shared, 4096)  # the last four rows are not there any more
for engine in ("auto", "threads"):
    with nvmeio.AioHandle(block_size=16384, queue_depth=4, engine=engine) as handle:
        for call in (handle.sync_gather, handle.sync_scatter):
            try:
                call(out, path, file_offsets=[3 + 2000 * row for row in range(8)])
            except nvmeio.RowsError as failed:
                assert failed.row == 4 and failed.errno == 14, failed
                assert failed.mask().tolist() == [True] * 4 + [False] * 4, failed.mask()
            else:
                raise AssertionError("memory that is not there was touched")
print("fine")
"""


def test_memory_that_is_not_there_is_an_error(tmp_path):
    done = run_python(MEMORY.replace("sys.argv[1]", repr(str(tmp_path / "file"))))
    assert done.stdout == "fine\n", done.stderr


@pytest.mark.parametrize("engine", ["auto", "threads"])
def test_a_forked_child_is_refused_and_the_parent_goes_on(tmp_path, engine):
    content = noise(SIZE, seed=1)
    path = make_file(tmp_path / "file", content)
    out, offsets = torch.zeros(5000, 100, dtype=torch.uint8), torch.arange(5000) * 100
    with nvmeio.AioHandle(block_size=16 * KIB, queue_depth=4, engine=engine) as handle:
        calls = [
            partial(call, out, path, file_offsets=offsets)
            for call in (handle.async_gather, handle.async_scatter)
        ]
        end_in_a_forked_child(calls[0], calls)
    assert bytes_of(out) == bytes_of(content[:500_000])


AT_EXIT = """
    import torch, nvmeio, sys
    handle = nvmeio.AioHandle(block_size=16384, queue_depth=4, engine=ENGINE)
    rows = torch.arange(5000 * 100, dtype=torch.int32).view(5000, 100)
    handle.async_scatter(rows, PATH, file_offsets=torch.arange(5000) * 400 + 3)
"""


@pytest.mark.parametrize("engine", ["auto", "threads"])
def test_the_interpreters_end_waits_for_a_scatter(tmp_path, engine):
    path = tmp_path / "file"
    script = textwrap.dedent(AT_EXIT).replace("ENGINE", repr(engine))
    done = run_python(script.replace("PATH", repr(str(path))))
    assert done.returncode == 0, done.stderr
    expected = torch.arange(5000 * 100, dtype=torch.int32)
    assert path.read_bytes() == bytes(3) + bytes_of(expected.view(torch.uint8))

"""Batches: a kernel that misbehaves, few descriptors, a forked child, the interpreter's end."""

import random
import textwrap
from functools import partial

import pytest
import torch
from faults._support import KIB, bytes_of, end_in_a_forked_child, make_file, misaligned, noise
from faults.test_faulty_kernel import TRANSPARENT
from faults.test_gathers_and_scatters import FAULTS
from support import run_python

import nvmeio

SIZE = 512 * KIB


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("fault", FAULTS)
def test_transient_fault_is_not_noticed(faulty, tmp_path, fault, lanes):
    switches, proof = TRANSPARENT[fault]
    chance = random.Random(1)
    with faulty.handle(block_size=16 * KIB, queue_depth=8, intra_op_parallelism=lanes) as handle:
        faulty.set(**switches, **{proof: 0})
        paths = [make_file(tmp_path / f"file-{n}", noise(SIZE, seed=n)) for n in range(3)]
        expected = [bytearray(path.read_bytes()) for path in paths]
        pieces, tensors = [], []
        for file in range(3):
            at = 0
            while at < SIZE - 70_000:
                nbytes = chance.choice([4096, 300, 65_536, 8192])
                pieces.append((file, at))
                tensors.append(misaligned(nbytes).copy_(noise(nbytes, seed=at)))
                expected[file][at : at + nbytes] = bytes_of(tensors[-1])
                at += nbytes + chance.choice([0, 0, 1, 4096 - nbytes % 4096])
        files, offsets = [paths[file] for file, _ in pieces], [at for _, at in pieces]
        total = sum(tensor.nbytes for tensor in tensors)
        assert handle.async_pwrite_batch(tensors, files, offsets).result(100) == total
        found = [torch.zeros_like(tensor) for tensor in tensors]
        assert handle.async_pread_batch(found, files, offsets).result(100) == total
        assert torch.equal(torch.cat(found), torch.cat(tensors))
        assert faulty[proof] > 0, "the fault did not happen: this test tests nothing"
        stats = handle.stats
    assert [path.read_bytes() for path in paths] == expected
    assert (stats.operations, stats.errors, stats.in_flight) == (2 * len(tensors), 0, 0)


def test_a_file_that_refuses_direct_io_is_done_again_without(faulty, tmp_path):
    paths = [make_file(tmp_path / f"file-{n}", noise(SIZE, seed=n)) for n in range(2)]
    with faulty.handle(block_size=16 * KIB, queue_depth=8) as handle:
        faulty.set(refuse_direct=1)
        found = [torch.zeros(9000, dtype=torch.uint8) for _ in range(6)]
        operation = handle.async_pread_batch(found, paths * 3, [0, 5, 90_000, 4096, 7, 100_000])
        assert operation.result(100) == operation.buffered_bytes == operation.transferred == 54_000
        assert (handle.stats.operations, handle.stats.errors) == (6, 0)
    assert bytes_of(found[5]) == paths[1].read_bytes()[100_000:109_000]


def test_a_cancelled_batch_is_over_when_it_says_so(faulty, tmp_path):
    path = make_file(tmp_path / "file", noise(SIZE, seed=1))
    with faulty.handle(block_size=16 * KIB, queue_depth=4) as handle:
        faulty.close_gate()
        found = [torch.full((100,), 7, dtype=torch.uint8) for _ in range(1000)]
        operation = handle.async_pread_batch(found, path, [100 * n for n in range(1000)])
        assert operation.cancel()
        faulty.open_gate()
        handle.wait(100)
        assert operation.cancelled()
        assert any(bool((tensor == 7).all()) for tensor in found)  # some were never read
        assert all(tensor.untyped_storage().resizable() for tensor in found)


FEW = """
import os, resource, torch, nvmeio
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
paths = [PATH + str(number) for number in range(1500)]
for engine in ("auto", "threads"):
    with nvmeio.AioHandle(block_size=16384, queue_depth=8, engine=engine) as handle:
        tensors = [torch.full((1000 + n % 7,), n % 251, dtype=torch.uint8) for n in range(1500)]
        handle.sync_pwrite_batch(tensors, paths, [4090] * 1500)  # a head: two descriptors each
        found = [torch.zeros_like(tensor) for tensor in tensors]
        handle.sync_pread_batch(found, paths, [4090] * 1500)
        assert torch.equal(torch.cat(found), torch.cat(tensors))
        held = []
        try:
            while True:
                held.append(os.open("/", os.O_RDONLY))
        except OSError:
            os.close(held.pop())
            os.close(held.pop())
        handle.sync_pread_batch(found[:50], paths[:50], [4090] * 50)  # one after the other
        os.close(os.dup(held[0]))
        for fd in held:
            os.close(fd)
print("fine")
"""


def test_few_descriptors_are_enough_for_many_files(tmp_path):
    done = run_python(FEW.replace("PATH", repr(str(tmp_path / "file"))))
    assert done.stdout == "fine\n", done.stderr


@pytest.mark.parametrize("engine", ["auto", "threads"])
def test_a_forked_child_is_refused_and_the_parent_goes_on(tmp_path, engine):
    content = noise(SIZE, seed=1)
    path = make_file(tmp_path / "file", content)
    found = [torch.zeros(1000, dtype=torch.uint8) for _ in range(500)]
    with nvmeio.AioHandle(block_size=16 * KIB, queue_depth=4, engine=engine) as handle:
        calls = [
            partial(call, found, path)
            for call in (handle.async_pread_batch, handle.async_pwrite_batch)
        ]
        end_in_a_forked_child(calls[0], calls)
    assert bytes_of(torch.cat(found)) == bytes_of(content[:500_000])


AT_EXIT = """
    import torch, nvmeio, sys
    from nvmeio._core import batches as _batch_record
    _batch_record._FILES_MOST = 3
    handle = nvmeio.AioHandle(block_size=16384, queue_depth=4, engine=ENGINE)
    tensors = [torch.full((5000,), number, dtype=torch.uint8) for number in range(20)]
    handle.async_pwrite_batch(tensors, [PATH + str(number) for number in range(20)])
"""


@pytest.mark.parametrize("engine", ["auto", "threads"])
def test_the_interpreters_end_waits_for_all_files_of_a_batch(tmp_path, engine):
    path = tmp_path / "file"
    script = textwrap.dedent(AT_EXIT).replace("ENGINE", repr(engine))
    done = run_python(script.replace("PATH", repr(str(path))))
    assert done.returncode == 0, done.stderr
    for number in range(20):
        assert path.with_name(f"file{number}").read_bytes() == bytes([number]) * 5000

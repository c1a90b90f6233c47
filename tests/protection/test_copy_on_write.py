"""Write protection: bytes as they were at one moment, whoever writes afterwards."""

from __future__ import annotations

import ctypes
import errno
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from protecting import MIB, numbers, protect, read
from support import needs_protection, run_python

import nvmeio
from nvmeio._bindings import lib
from nvmeio._memory.copy_on_write import WriteProtection
from nvmeio._memory.mappings import Mapping
from nvmeio._pages import PAGE_BYTES

pytestmark = needs_protection


# Who writes


def by_torch(tensor: torch.Tensor) -> None:
    tensor.add_(1)


def by_data(tensor: torch.Tensor) -> None:
    tensor.data.copy_(tensor.data ^ 255)


def by_numpy(tensor: torch.Tensor) -> None:
    tensor.numpy()[::PAGE_BYTES] ^= 255


def by_pointer(tensor: torch.Tensor) -> None:
    ctypes.memset(tensor.data_ptr() + 5, 77, tensor.nbytes - 5)


def by_another_thread(tensor: torch.Tensor) -> None:
    writer = threading.Thread(target=by_torch, args=(tensor,))
    writer.start()
    writer.join(60)
    assert not writer.is_alive()


def by_the_kernel(tensor: torch.Tensor) -> None:
    with open("/dev/zero", "rb") as zeros:
        assert os.readv(zeros.fileno(), [memoryview(tensor.numpy())]) == tensor.nbytes


WRITERS: list[Callable[[torch.Tensor], None]] = [
    by_torch,
    by_data,
    by_numpy,
    by_pointer,
    by_another_thread,
    by_the_kernel,
]


@pytest.mark.parametrize("arena", [64 * MIB, 2 * MIB + 4096, 0], ids=["memory", "little", "file"])
@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
def test_what_was_there_is_read_whoever_writes(
    write: Callable[[torch.Tensor], None], arena: int, tmp_path: Path
) -> None:
    tensor = numbers(7 * MIB + 12_345)
    before = tensor.clone()
    protection = protect(tensor, arena=arena, directory=tmp_path)
    write(tensor)
    changed = tensor.clone()
    assert not torch.equal(changed, before)
    assert protection.aside_bytes > 0 and protection.held_s > 0
    assert torch.equal(read(protection, tensor), before)
    protection.end()
    assert torch.equal(tensor, changed)
    spilled = protection.spilled_bytes
    assert (spilled > 0) == (protection.aside_bytes > arena)
    assert os.listdir(tmp_path) == []


def test_what_was_read_is_free_for_writers() -> None:
    """Nothing is copied for who writes behind the reader."""
    tensor = numbers(8 * MIB)
    before = tensor.clone()
    protection = protect(tensor)
    assert torch.equal(read(protection, tensor), before)
    tensor.zero_()
    assert protection.aside_bytes == 0


def registered(tensor: torch.Tensor) -> list[bool]:
    """Of each MiB, whether the kernel still watches it (``uw``; man 5 proc, smaps)."""
    watched: list[tuple[int, int]] = []
    span = (0, 0)
    with open("/proc/self/smaps") as lines:
        for line in lines:
            first, *rest = line.split()
            if first == "VmFlags:" and "uw" in rest:
                watched.append(span)
            elif not first.endswith(":"):
                start, end = first.split("-")
                span = int(start, 16), int(end, 16)
    places = range(tensor.data_ptr() + PAGE_BYTES, tensor.data_ptr() + tensor.nbytes, MIB)
    return [any(low <= place < high for low, high in watched) for place in places]


def test_what_was_read_is_let_go_of_before_the_end() -> None:
    """All of it was registered until then, and its pages were gone through once more."""
    mapping = Mapping(40 * MIB)
    tensor = mapping.tensor(0, (40 * MIB,), torch.uint8).fill_(1)
    protection = protect(tensor)
    copy = torch.empty_like(tensor)
    assert registered(tensor) == [True] * 40
    for offset in range(0, 30 * MIB, MIB):
        at = tensor.data_ptr() + offset
        if offset == 25 * MIB:
            tensor[: 30 * MIB] = 2  # let go of, read but not let go of, and not read
        protection.read(at, MIB, copy.data_ptr() + offset, None)
    assert registered(tensor) == [False] * 16 + [True] * 24
    protection.read(tensor.data_ptr() + 30 * MIB, 10 * MIB, copy.data_ptr() + 30 * MIB, None)
    assert not any(registered(tensor))
    assert (copy == 1).all() and protection.aside_bytes == 6 * MIB
    protection.end()


def test_memory_that_was_never_touched_is_zero() -> None:
    """Its pages do not exist yet, and their first write has to be seen all the same."""
    tensor = Mapping(6 * MIB).tensor(0, (6 * MIB,), torch.uint8)
    protection = protect(tensor)
    tensor.fill_(3)
    assert not read(protection, tensor).any()
    assert int(tensor.sum()) == 3 * 6 * MIB


def test_a_write_elsewhere_in_the_pages_beside_is_nobodys() -> None:
    """First and last page of a range are shared with other objects, and so never protected."""
    whole = numbers(4 * MIB)
    page = -whole.data_ptr() % PAGE_BYTES  # where the first page begins within it
    first, end = page + 100, page + 3 * MIB + 70
    inner = whole[first:end]
    before = inner.clone()
    protection = protect(inner)
    whole[:first] = 1
    whole[end:] = 2
    assert protection.aside_bytes == 0
    inner[:50] = 3  # of the first page, which was copied at once
    inner[-50:] = 4
    assert protection.aside_bytes == 0
    assert torch.equal(read(protection, inner), before)


def test_a_crc_goes_on_with_what_is_read() -> None:
    from nvmeio._storage import crc32

    if not crc32.CAN_COPY:
        pytest.skip("this processor has no instruction for it")
    tensor = numbers(5 * MIB + 3)
    wanted = crc32.of_tensor(tensor)
    for arena in (0, 64 * MIB):
        protection = protect(tensor, arena=arena)
        kept, crc = tensor.clone(), 0
        tensor[2 * MIB :] ^= 255
        copy = torch.empty_like(tensor)
        for offset in range(0, tensor.nbytes, MIB):
            nbytes = min(MIB, tensor.nbytes - offset)
            to = copy.data_ptr() + offset
            crc = protection.read(tensor.data_ptr() + offset, nbytes, to, crc)
        assert crc == wanted
        protection.end()
        tensor.copy_(kept)


@pytest.mark.parametrize("arena", [0, 64 * MIB], ids=["file", "memory"])
def test_who_reads_where_it_lies_is_told_what_changed(arena: int, tmp_path: Path) -> None:
    from nvmeio._storage import crc32

    if not crc32.CAN_COPY:
        pytest.skip("this processor has no instruction for it")
    tensor = Mapping(8 * MIB).tensor(0, (8 * MIB,), torch.uint8).copy_(numbers(8 * MIB))
    before = tensor.clone()
    start = tensor.data_ptr()
    protection = protect(tensor, arena=arena, directory=tmp_path)
    crc = protection.read(start, 3 * MIB, 0, 0)
    tensor[3 * MIB] ^= 1
    assert protection.read(start + 3 * MIB, 5 * MIB, 0, crc) == crc32.of_tensor(before)
    assert protection.settle(start, 4 * MIB) == [(start + 2 * MIB, 2 * MIB)]
    copy = torch.empty(2 * MIB, dtype=torch.uint8)
    protection.read(start + 2 * MIB, 2 * MIB, copy.data_ptr(), None)
    assert torch.equal(copy, before[2 * MIB : 4 * MIB])
    assert protection.settle(start + 4 * MIB, 3 * MIB) == []
    tensor.zero_()  # what is settled is free; of the last cell half is not
    assert protection.aside_bytes == 4 * MIB
    assert protection.settle(start + 7 * MIB, MIB) == [(start + 7 * MIB, MIB)]


def test_bytes_are_read_once() -> None:
    tensor = numbers(4 * MIB)
    protection = protect(tensor)
    read(protection, tensor)
    with pytest.raises(nvmeio.IntegrityError, match="read twice"):
        read(protection, tensor)


def test_one_snapshot_at_a_time_has_a_page() -> None:
    one, other = numbers(4 * MIB), numbers(4 * MIB, 1)
    protection = protect(one)
    second = WriteProtection([(t.data_ptr(), t.nbytes) for t in (other, one, one[:MIB])], "/tmp")
    assert second.taken == [True, False, False]
    assert second.protect(None)
    before = one.clone()
    one.zero_()
    assert torch.equal(read(protection, one), before)
    protection.end()
    assert protect(one).taken == [True]


# Memory of nvmeio's, which is protected as far as its mapping goes

TAIL = 12345  # what a tensor leaves of its last huge page


def test_no_huge_page_is_split_at_the_end_of_memory_of_ours() -> None:
    """To protect a part of a huge page splits it: 2 MiB more on small pages in each tensor."""
    memory = nvmeio.empty_aligned(32 * MIB - TAIL, dtype=torch.uint8).fill_(3)
    if not lib.nv_is_on_huge_pages(memory.data_ptr(), 32 * MIB):
        pytest.skip("the kernel has no huge pages to give")
    protection = protect(memory)
    assert lib.nv_is_on_huge_pages(memory.data_ptr(), 32 * MIB)
    memory.fill_(4)
    assert read(protection, memory).eq(3).all()
    protection.end()
    assert lib.nv_is_on_huge_pages(memory.data_ptr(), 32 * MIB)


@pytest.mark.parametrize("way", [by_torch, by_numpy])
def test_neighbours_within_one_huge_page_are_each_exact(
    way: Callable[[torch.Tensor], None],
) -> None:
    memory = nvmeio.empty_aligned(8 * MIB, dtype=torch.uint8).copy_(numbers(8 * MIB))
    one, other = memory[: 5 * MIB + 7], memory[5 * MIB + 7 : 6 * MIB + TAIL]
    rest = memory[6 * MIB + TAIL :]
    before = memory.clone()
    protection = protect(one, other)
    for part in (rest, other, one):
        way(part)
    changed = memory.clone()
    assert torch.equal(read(protection, one), before[: one.nbytes])
    assert torch.equal(read(protection, other), before[one.nbytes :][: other.nbytes])
    way(memory)  # all of it is read: nobody waits
    protection.end()
    assert not torch.equal(changed, before)


def test_memory_behind_a_range_that_another_snapshot_has_stays_its_own() -> None:
    memory = nvmeio.empty_aligned(8 * MIB, dtype=torch.uint8).copy_(numbers(8 * MIB))
    one, other = memory[: 5 * MIB], memory[5 * MIB :]
    before = memory.clone()
    second, first = protect(other), protect(one)
    memory.zero_()
    assert torch.equal(read(first, one), before[: 5 * MIB])
    assert torch.equal(read(second, other), before[5 * MIB :])


def test_memory_that_cannot_be_protected_is_told(tmp_path: Path) -> None:
    path = tmp_path / "mapped"
    path.write_bytes(bytes(MIB))
    mapped = torch.from_file(str(path), shared=False, size=MIB, dtype=torch.uint8)
    tiny = numbers(100)
    made = WriteProtection([(t.data_ptr(), t.nbytes) for t in (mapped, tiny)], str(tmp_path))
    assert made.taken == [False, False]
    assert made.protect(None)


def test_no_room_aside_and_no_file_either_is_an_error_and_holds_nobody() -> None:
    tensor = numbers(6 * MIB)
    before = tensor.clone()
    protection = protect(tensor, arena=2 * MIB, directory="/nowhere")
    tensor.zero_()
    assert not tensor.any()
    with pytest.raises(OSError, match="No such file") as failed:
        read(protection, tensor)
    assert failed.value.errno == errno.ENOENT
    protection.end()
    tensor.copy_(before)  # as if nothing had been


def test_a_dropped_protection_lets_writers_go_on() -> None:
    tensor = numbers(4 * MIB)
    protection = protect(tensor)
    del protection
    tensor.zero_()
    assert protect(tensor).taken == [True]


def test_many_writers_and_a_reader_at_random_places() -> None:
    """Each range exact, with writers in four threads beside the reader."""
    seed = random.randrange(1 << 30)
    chance = random.Random(seed)
    for turn in range(12):
        sizes = [chance.randrange(2 * PAGE_BYTES, 5 * MIB) for _ in range(8)]
        tensors = [numbers(size, seed + i) for i, size in enumerate(sizes)]
        before = [tensor.clone() for tensor in tensors]
        arena = chance.choice([0, 3 * MIB, 64 * MIB])
        protection = protect(*tensors, arena=arena)
        start = threading.Barrier(5)

        def write(seed: int, mine: Any = tensors, gate: Any = start) -> None:
            chance = random.Random(seed)
            gate.wait(60)
            for _ in range(60):
                tensor = chance.choice(mine)
                low = chance.randrange(tensor.nbytes)
                tensor[low : low + chance.choice([1, 5000, 400_000])] = chance.randrange(256)

        writers = [threading.Thread(target=write, args=(seed + turn * 4 + i,)) for i in range(4)]
        for writer in writers:
            writer.start()
        start.wait(60)
        for tensor, kept in zip(tensors, before, strict=True):
            assert torch.equal(read(protection, tensor, chance.randrange(1, 3 * MIB)), kept), seed
        for writer in writers:
            writer.join(60)
            assert not writer.is_alive()
        protection.end()


# Our own reads


@pytest.mark.parametrize("engine", ["libaio", "threads"])
def test_a_read_into_protected_memory(engine: str, tmp_path: Path) -> None:
    path = tmp_path / "data"
    data = numbers(6 * MIB, 9)
    data.numpy().tofile(path)
    tensor = nvmeio.empty_aligned(6 * MIB, dtype=torch.uint8)
    tensor.fill_(1)
    protection = protect(tensor)
    with nvmeio.AioHandle(engine=engine) as handle:
        handle.sync_pread(tensor, path)
    assert torch.equal(tensor, data)
    assert (read(protection, tensor) == 1).all()


# Forks and ends


def test_a_forked_child_is_free_and_its_parent_exact() -> None:
    tensor = numbers(8 * MIB)
    before = tensor.clone()
    child_own = numbers(4 * MIB, 4)
    kept = child_own.numpy().tobytes()
    protection = protect(tensor)
    tensor[0] ^= 1
    child = os.fork()
    if child == 0:
        try:  # without torch's threads, which are the parent's
            ctypes.memset(tensor.data_ptr(), 0, tensor.nbytes)  # what nobody serves here
            protection.end()
            again = protect(child_own)  # the child's own
            ctypes.memset(child_own.data_ptr(), 0, child_own.nbytes)
            copy = bytearray(child_own.nbytes)
            to = ctypes.addressof(ctypes.c_char.from_buffer(copy))
            again.read(child_own.data_ptr(), child_own.nbytes, to, None)
            zeros = not any(ctypes.string_at(tensor.data_ptr(), tensor.nbytes))
            os._exit(0 if copy == kept and zeros else 1)
        finally:
            os._exit(2)
    tensor[4 * MIB :] = 9
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(read(protection, tensor), before)


def test_a_fork_that_waits_for_a_writer() -> None:
    """Before a fork other libraries wait for their threads (OpenBLAS does); it waited for ever."""
    found = run_python(
        """
        import ctypes, os, threading, torch
        tensor = torch.ones(2 << 20)
        forking, written = threading.Event(), threading.Event()

        @ctypes.CFUNCTYPE(None)
        def before_fork():
            forking.set()
            print("written" if written.wait(60) else "the writer is held")

        ctypes.CDLL(None).__register_atfork(before_fork, None, None, None)
        from nvmeio._memory.copy_on_write import WriteProtection
        protection = WriteProtection([(tensor.data_ptr(), tensor.nbytes)], "/tmp")
        assert protection.protect(None)

        def write():
            forking.wait(60)
            ctypes.memset(tensor.data_ptr() + 8192, 1, 10)
            written.set()

        threading.Thread(target=write, daemon=True).start()
        child = os.fork()
        if child == 0:
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        """,
        fresh=True,
    )
    assert (found.returncode, found.stdout, found.stderr) == (0, "written\n", "")


def test_several_threads_end_it_beside_writers() -> None:
    """Those that waited for a handler looked for what the first of them had removed: SIGSEGV."""
    found = run_python(
        """
        import ctypes, threading, torch
        from nvmeio._memory.copy_on_write import WriteProtection
        for _ in range(100):
            tensor = torch.ones(4 << 20, dtype=torch.uint8)
            protection = WriteProtection([(tensor.data_ptr(), tensor.nbytes)], "/tmp")
            assert protection.protect(None)
            start = threading.Barrier(5)

            def write(at):
                start.wait(60)
                ctypes.memset(tensor.data_ptr() + at, 1, 1)

            def end():
                start.wait(60)
                protection.end()

            threads = [threading.Thread(target=write, args=(at,)) for at in (100_000, 3_000_000)]
            threads += [threading.Thread(target=end) for _ in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
        """
    )
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")


def test_a_program_that_ends_in_the_middle() -> None:
    found = run_python(
        """
        import os, torch
        from nvmeio._memory.copy_on_write import WriteProtection
        tensor = torch.ones(8 << 20)
        protection = WriteProtection([(tensor.data_ptr(), tensor.nbytes)], "/tmp")
        assert protection.protect(None)
        tensor[5] = 3
        """
    )
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")


def test_a_snapshot_of_no_memory_is_empty() -> None:
    """The loop over the ranges' ends raised ValueError for a state without memory to protect."""
    assert WriteProtection([], ".").taken == []

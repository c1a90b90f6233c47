"""What the kernel or the program does to protected memory, and what a process may protect."""

from __future__ import annotations

import mmap
import os
import signal
from pathlib import Path

import pytest
import torch
from protecting import MIB, advise, give_away, numbers, page_tables_tell, protect, read
from support import needs_protection, run_python

import nvmeio
from nvmeio._memory.copy_on_write import WriteProtection
from nvmeio._memory.mappings import Mapping
from nvmeio._pages import PAGE_BYTES

pytestmark = needs_protection


# What takes the protection away

# asm-generic/mman-common.h
HARMLESS = {
    "MADV_FREE": 8,
    "MADV_MERGEABLE": 12,
    "MADV_HUGEPAGE": 14,
    "MADV_NOHUGEPAGE": 15,
    "MADV_COLD": 20,
    "MADV_PAGEOUT": 21,
    "MADV_POPULATE_WRITE": 23,
    "MADV_COLLAPSE": 25,
}


def tensor_on(pages: str, nbytes: int) -> torch.Tensor:
    if pages == "small":
        return numbers(nbytes)
    return Mapping(nbytes).tensor(0, (nbytes,), torch.uint8).copy_(numbers(nbytes))


@pytest.mark.parametrize("pages", ["small", "huge"])
@pytest.mark.parametrize("advice", HARMLESS)
def test_advice_to_the_kernel_about_protected_memory(advice: str, pages: str) -> None:
    """It may move, merge, collapse or split the pages: their next write is seen all the same."""
    tensor = tensor_on(pages, 8 * MIB)
    before = tensor.clone()
    protection = protect(tensor)
    advise(tensor, HARMLESS[advice])
    tensor.fill_(3)
    assert protection.aside_bytes > 7 * MIB
    assert torch.equal(read(protection, tensor), before)


@pytest.mark.parametrize("pages", ["small", "huge"])
@pytest.mark.parametrize("then_written", [False, True])
def test_memory_that_is_given_away_fails_the_reader(then_written: bool, pages: str) -> None:
    """Its bytes were gone, and zeros, or whatever was written next, were read in their place."""
    tensor = tensor_on(pages, 8 * MIB)
    before = tensor.clone()
    protection = protect(tensor)
    give_away(tensor[4 * MIB + PAGE_BYTES :][: MIB // 2])
    if then_written:
        tensor[4 * MIB :] = 3
    if page_tables_tell():
        with pytest.raises(nvmeio.TransferError, match="lost its protection"):
            read(protection, tensor)
    protection.end()
    tensor.copy_(before)


def test_memory_that_is_given_away_fails_who_reads_where_it_lies() -> None:
    if not page_tables_tell():
        pytest.skip("before Linux 6.7 nobody can tell")
    tensor = tensor_on("huge", 8 * MIB)
    protection = protect(tensor)
    give_away(tensor[4 * MIB + PAGE_BYTES :][: MIB // 2])
    assert protection.settle(tensor.data_ptr(), 4 * MIB) == []
    with pytest.raises(nvmeio.TransferError, match="lost its protection"):
        protection.settle(tensor.data_ptr() + 4 * MIB, 4 * MIB)


CLOSED = """
import ctypes, os, sys, threading, torch, nvmeio
from nvmeio._memory.copy_on_write import WriteProtection
from nvmeio._memory.mappings import Mapping

NBYTES, MIB = 32 << 20, 1 << 20
tensor = torch.ones(NBYTES, dtype=torch.uint8)
copy = torch.empty_like(tensor)

def protect():
    made = WriteProtection([(tensor.data_ptr(), NBYTES)], "/tmp")
    assert made.taken == [True] and made.protect(Mapping(NBYTES))
    return made

def read(protection, low, high):
    for at in range(low, high, MIB):
        protection.read(tensor.data_ptr() + at, MIB, copy.data_ptr() + at, None)

def close_descriptors():
    for name in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{name}"
        if os.path.exists(path) or os.path.islink(path):
            if "userfaultfd" in os.readlink(path):
                os.close(int(name))
                if reused:  # by what answers none of our calls
                    os.dup2(os.open("/dev/zero", os.O_RDWR), int(name))

when, reused, written = sys.argv[1], sys.argv[2] == "reused", sys.argv[3] == "written"
protection = protect()
if when == "in the middle":
    read(protection, 0, NBYTES // 2)
close_descriptors()
if written:
    writers = [
        threading.Thread(target=ctypes.memset, args=(tensor.data_ptr() + at, 2, NBYTES // 4))
        for at in range(0, NBYTES, NBYTES // 4)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
        assert not writer.is_alive(), "a writer is held for ever"
try:
    read(protection, 0 if when == "before" else NBYTES // 2, NBYTES)
except nvmeio.TransferError as failed:
    assert "lost its protection" in str(failed)
else:
    raise AssertionError("nobody was told")
protection.end()
tensor.fill_(5)
again = protect()
tensor.fill_(6)
read(again, 0, NBYTES)
assert (copy == 5).all() and again.aside_bytes > 0
print("right")
"""


@pytest.mark.parametrize("written", ["written", "untouched"])
@pytest.mark.parametrize("reused", ["reused", "closed"])
@pytest.mark.parametrize("when", ["before", "in the middle"])
def test_a_program_that_closes_our_descriptor(when: str, reused: str, written: str) -> None:
    """The handlers end by it. Writers were not seen any more, or held for ever."""
    found = run_python(f"import sys; sys.argv[1:] = {[when, reused, written]}\n{CLOSED}")
    assert (found.returncode, found.stdout, found.stderr) == (0, "right\n", "")


def test_signals_for_a_handler_do_not_end_it() -> None:
    """It takes none: they are for threads of the program."""
    found = run_python(
        """
        import ctypes, os, signal, torch
        from nvmeio._memory.copy_on_write import WriteProtection, support
        before = set(os.listdir("/proc/self/task"))
        support()
        handlers = set(os.listdir("/proc/self/task")) - before
        assert len(handlers) >= 2
        tensor = torch.ones(4 << 20, dtype=torch.uint8)
        copy = torch.empty_like(tensor)
        protection = WriteProtection([(tensor.data_ptr(), tensor.nbytes)], "/tmp")
        assert protection.protect(None)
        libc = ctypes.CDLL(None)
        for handler in handlers:
            for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGALRM):
                assert libc.tgkill(os.getpid(), int(handler), int(number)) == 0
        tensor.fill_(2)
        protection.read(tensor.data_ptr(), tensor.nbytes, copy.data_ptr(), None)
        assert (copy == 1).all() and protection.aside_bytes > 0
        print("right", flush=True)
        os._exit(0)
        """,
        fresh=True,
    )
    assert (found.returncode, found.stdout, found.stderr) == (0, "right\n", "")


def test_a_writer_that_signals_interrupt() -> None:
    """A fault is left for a signal's handler, which writes too, and is met again."""
    tensor, other = numbers(24 * MIB), numbers(24 * MIB, 1)
    wanted = tensor.clone(), other.clone()
    protection = protect(tensor, other)
    signals = [0]

    def write(*_: object) -> None:
        signals[0] += 1
        other[signals[0] * 10_007 % other.nbytes] += 1

    before = signal.signal(signal.SIGALRM, write)
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    try:
        while not signals[0] or protection.aside_bytes < 16 * MIB:
            for at in range(0, tensor.nbytes, 1000):
                tensor[at] += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    for each, kept in zip((tensor, other), wanted, strict=True):
        assert torch.equal(read(protection, each), kept)


def test_memory_of_hugetlbfs() -> None:
    """Whole pages of it are protected; where a range has a part of one, it is to be copied."""
    path = Path("/proc/sys/vm/nr_overcommit_hugepages")
    if not os.access(path, os.W_OK):
        pytest.skip("only root has the kernel give such pages")
    before = path.read_text()
    try:
        path.write_text("4")
        try:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40000  # MAP_HUGETLB
            memory = mmap.mmap(-1, 8 * MIB, flags=flags)
        except OSError as failed:
            pytest.skip(f"no memory of this kind here: {failed}")
        tensor = torch.frombuffer(memory, dtype=torch.uint8).copy_(numbers(8 * MIB))
        whole, part = tensor[: 4 * MIB], tensor[4 * MIB + PAGE_BYTES :]
        wanted = whole.clone()
        ranges = [(each.data_ptr(), each.nbytes) for each in (whole, part)]
        made = WriteProtection(ranges, "/tmp")
        assert made.taken == [True, False] and made.protect(Mapping(4 * MIB))
        tensor.fill_(3)
        assert made.aside_bytes == 4 * MIB
        assert torch.equal(read(made, whole), wanted)
        made.end()
        del tensor, whole, part
        memory.close()
    finally:
        path.write_text(before)


# What a process may do


def test_where_only_programs_faults_are_served() -> None:
    """A system call that writes there fails, so it is for those who ask for it."""
    found = run_python(
        """
        import errno, os, tempfile, torch, nvmeio
        from nvmeio._memory import copy_on_write as _copy_on_write
        from nvmeio._memory.copy_on_write import WriteProtection
        assert _copy_on_write.support().kind == "user", _copy_on_write.support()
        assert "NVMEIO_USERFAULTFD=user" in _copy_on_write.support().reason
        tensor = torch.arange(4 << 20)
        before = tensor.clone()
        protection = WriteProtection([(tensor.data_ptr(), tensor.nbytes)], ".")
        assert protection.protect(None)
        tensor[7] = 0
        with open("/dev/zero", "rb") as zeros:
            try:
                os.readv(zeros.fileno(), [memoryview(tensor.numpy()[1 << 20:])])
            except OSError as failed:
                assert failed.errno == errno.EFAULT
            else:
                raise AssertionError("it was written")
        folder = tempfile.TemporaryDirectory()
        path = os.path.join(folder.name, "data")
        before.numpy().tofile(path)
        for engine in ("libaio", "threads"):  # ours goes through
            with nvmeio.AioHandle(engine=engine) as handle:
                handle.sync_pread(tensor[2 << 20 :], path)
        copy = torch.empty_like(tensor)
        protection.read(tensor.data_ptr(), tensor.nbytes, copy.data_ptr(), None)
        assert torch.equal(copy, before)
        """,
        fresh=True,
        NVMEIO_USERFAULTFD="user",
    )
    assert (found.returncode, found.stderr) == (0, "")


def test_what_is_given_up_begins_anywhere() -> None:
    """Protected memory behind the first address, in the same 2 MiB, was left out: EFAULT."""
    found = run_python(
        """
        import os, torch
        from nvmeio._memory import copy_on_write as _copy_on_write
        from nvmeio._memory.copy_on_write import WriteProtection
        small, large = torch.ones(5 << 20, dtype=torch.uint8).split([1 << 20, 4 << 20])
        before = large.clone()
        ranges = [(large.data_ptr() + at, 300_000) for at in range(0, 3_800_000, 400_000)]
        protection = WriteProtection(ranges, ".")
        assert all(protection.taken) and protection.protect(None)
        _copy_on_write.give_up(small.data_ptr(), 5 << 20)
        with open("/dev/zero", "rb") as zeros:
            assert os.readv(zeros.fileno(), [small.numpy(), large.numpy()]) == 5 << 20
        copy = torch.empty(300_000, dtype=torch.uint8)
        for address, nbytes in ranges:
            protection.read(address, nbytes, copy.data_ptr(), None)
            assert (copy == 1).all()
        """,
        fresh=True,
        NVMEIO_USERFAULTFD="user",
    )
    assert (found.returncode, found.stderr) == (0, "")


def test_memory_that_the_kernel_merges_is_not_protected() -> None:
    """Where KSM puts a page into the place of an equal one, Linux forgets the protection."""
    found = run_python(
        """
        import ctypes
        merge = ctypes.CDLL(None).prctl(67, 1, 0, 0, 0)  # PR_SET_MEMORY_MERGE
        from nvmeio._memory import copy_on_write as _copy_on_write
        print(_copy_on_write.support().kind if merge == 0 else "cannot merge")
        print(_copy_on_write.support().reason)
        """,
        fresh=True,
    )
    if "cannot merge" in found.stdout:
        pytest.skip("this process may not ask for merging")
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout.startswith("none\n") and "KSM" in found.stdout


def test_a_process_that_has_its_pages_merged_later() -> None:
    found = run_python(
        """
        import ctypes, torch
        from nvmeio._memory.copy_on_write import WriteProtection
        tensor = torch.ones(4 << 20)
        ranges = [(tensor.data_ptr(), tensor.nbytes)]
        assert WriteProtection(ranges, "/tmp").taken == [True]
        merge = ctypes.CDLL(None).prctl(67, 1, 0, 0, 0)  # PR_SET_MEMORY_MERGE
        print(WriteProtection(ranges, "/tmp").taken if merge == 0 else "cannot merge")
        """,
        fresh=True,
    )
    if "cannot merge" in found.stdout:
        pytest.skip("this process may not ask for merging")
    assert (found.returncode, found.stdout, found.stderr) == (0, "[False]\n", "")


def test_where_nothing_is_allowed() -> None:
    found = run_python(
        """
        from nvmeio._memory import copy_on_write as _copy_on_write
        kind, attempts = _copy_on_write.support()
        assert kind == "none"
        assert [name for name, _ in attempts] == [
            "userfaultfd", "/dev/userfaultfd", "userfaultfd for programs alone"]
        """,
        fresh=True,
        NVMEIO_USERFAULTFD="none",
    )
    assert (found.returncode, found.stderr) == (0, "")

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

ENDED = """
import ctypes, os, struct, threading, torch, nvmeio
from nvmeio._memory.copy_on_write import WriteProtection, support
from nvmeio._memory.mappings import Mapping

# Calls by their numbers (x86-64), with one of their arguments. Only handlers make them.
call, argument, value = {
    "waiting": (7, 1, 1),  # poll
    "told": (0, 2, 32),  # read, of a fault
    "copying": (18, 2, 2 << 20),  # pwrite64, of a cell
    "lifting": (16, 1, 3 << 30 | 24 << 16 | 0xAA06),  # ioctl, UFFDIO_WRITEPROTECT
    "locked": (257, 2, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC),  # openat
}[doing := os.environ["DOING"]]
libc = ctypes.CDLL(None)

def end_threads_that_call():
    "A filter for this thread, and those that it begins: the call ends them, and nobody else."
    program = [(0x20, 0, 0, 0), (0x15, 0, 3, call), (0x20, 0, 0, 16 + 8 * argument)]
    program += [(0x15, 0, 1, value), (0x06, 0, 0, 0), (0x06, 0, 0, 0x7FFF0000)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in program))
    filter = struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, filter, 0, 0) == 0

def begin():
    end_threads_that_call()
    assert support().kind == "any"

beginner = threading.Thread(target=begin)
beginner.start()
beginner.join(60)
tensor = torch.ones(8 << 20, dtype=torch.uint8)
other = torch.ones(8 << 20, dtype=torch.uint8)

def write(where, value):  # the writer has the GIL, and whoever saves waits for that
    ctypes.PyDLL(None).memset(ctypes.c_void_p(where.data_ptr() + 5_000_000), value, 1000)

def protect(memory):
    made = WriteProtection([(memory.data_ptr(), memory.nbytes)], "/tmp")
    assert made.taken == [True] and made.protect(memory is other and Mapping(8 << 20) or None)
    return made

protection = protect(tensor)  # copies go into a file
writers = [threading.Thread(target=write, args=(tensor, 2)) for _ in range(3)]
for writer in writers:
    writer.start()
for writer in writers:
    writer.join(60)
    assert not writer.is_alive()
copy = torch.empty_like(tensor)
try:
    protection.read(tensor.data_ptr(), tensor.nbytes, copy.data_ptr(), None)
except nvmeio.TransferError as failed:
    assert "was ended, alone" in str(failed), failed
else:  # its thread was replaced before anybody wrote
    assert doing == "waiting" and (copy == 1).all()
protection.end()
for left in (1, 0):  # the other handler may end in the same way
    other.fill_(1)
    again = protect(other)
    write(other, 3)
    try:
        again.read(other.data_ptr(), other.nbytes, copy.data_ptr(), None)
        break
    except nvmeio.TransferError as failed:
        assert left and "was ended, alone" in str(failed), failed
        again.end()
assert (copy == 1).all() and other[5_000_000] == 3
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="its filter has x86-64's numbers")
@pytest.mark.parametrize("doing", ["waiting", "told", "copying", "lifting", "locked"])
def test_a_handler_that_is_ended_alone_holds_nobody(doing: str) -> None:
    """Writers, the save and the end of the program waited for it for ever."""
    found = run_python(ENDED, fresh=True, DOING=doing)
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")


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
        from nvmeio._bindings import protection as binding
        from nvmeio._memory.copy_on_write import WriteProtection
        small, large = torch.ones(5 << 20, dtype=torch.uint8).split([1 << 20, 4 << 20])
        before = large.clone()
        ranges = [(large.data_ptr() + at, 300_000) for at in range(0, 3_800_000, 400_000)]
        protection = WriteProtection(ranges, ".")
        assert all(protection.taken) and protection.protect(None)
        binding.lib.nv_snapshot_give_up(small.data_ptr(), 5 << 20)
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


@pytest.mark.parametrize("kind", ["user", ""])
def test_what_lies_behind_may_be_written_to_by_system_calls(kind: str) -> None:
    """Memory of ours is protected to its end, for huge pages; where only programs' faults are
    served, a `read` into what lies there, and is of nobody's state, was EFAULT.
    """
    found = run_python(
        """
        import os, torch, nvmeio
        from nvmeio._memory.copy_on_write import WriteProtection
        state, other = nvmeio.empty_aligned(2 << 20, dtype=torch.uint8).fill_(1).chunk(2)
        protection = WriteProtection([(state.data_ptr(), state.nbytes)], ".")
        assert protection.taken == [True] and protection.protect(None)
        with open("/dev/zero", "rb") as zeros:
            assert os.readv(zeros.fileno(), [other.numpy()]) == other.nbytes
        assert not other.any()
        copy = torch.empty_like(state)
        protection.read(state.data_ptr(), state.nbytes, copy.data_ptr(), None)
        assert (copy == 1).all()
        """,
        fresh=True,
        NVMEIO_USERFAULTFD=kind,
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

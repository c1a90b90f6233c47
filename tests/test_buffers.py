"""Aligned and page-locked tensors: alignment, lifetime, limits, and who knows what is locked."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import mmap
import os
import resource
import struct
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import Any

import pytest
import support
import torch
from support import collect, new_descriptors, open_descriptors, spin_until_collected

from nvmeio import buffers
from nvmeio._files.plan import PAGE_BYTES
from nvmeio._memory import mappings as mappings_module
from nvmeio._memory import system
from nvmeio._threads.serial import Serial

MIB = 1 << 20
PAGE = PAGE_BYTES
HUGE = system.huge_page_bytes()

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.uint16,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


def status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


def backed_bytes(address: int, nbytes: int) -> int:
    """How much of this memory the kernel has given pages: of the process's own it tells exactly."""
    count = nbytes // PAGE
    with open("/proc/self/pagemap", "rb", buffering=0) as table:
        entries = struct.unpack(
            f"{count}Q", os.pread(table.fileno(), 8 * count, address // PAGE * 8)
        )
    return PAGE * sum(entry >> 62 > 0 for entry in entries)  # in memory, or swapped out


def huge_bytes(address: int) -> int:
    """How much of the mapping at an address lies on huge pages; -1 where it asked for none."""
    huge, asked, inside = 0, False, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split(" ")[0]
        if "-" in first and not first.endswith(":"):
            start, end = (int(part, 16) for part in first.split("-"))
            inside = start <= address < end
        elif inside and first == "AnonHugePages:":
            huge = int(line.split()[1]) * 1024
        elif inside and first == "VmFlags:":
            asked = "hg" in line.split()
    return huge if asked else -1


def entries() -> tuple[int, int, int]:
    """How much the registry has."""
    registry = mappings_module
    return len(registry.mapped), len(registry.locked), len(registry.pinned)


@pytest.fixture
def mappings(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[mappings_module.Mapping]]:
    """All that tensors are made of. One whose reference is dead is unmapped (see `Mapping`).

    To look whether its address is mapped would tell nothing: it may be somebody else's by then.
    """
    made: list[weakref.ref[mappings_module.Mapping]] = []
    tensor = mappings_module.Mapping.tensor

    def noted(self: mappings_module.Mapping, *arguments: object) -> torch.Tensor:
        made.append(weakref.ref(self))
        return tensor(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(mappings_module.Mapping, "tensor", noted)
    return made


def none_more(before: tuple[int, ...], now: tuple[int, ...]) -> bool:
    return all(count <= then for count, then in zip(now, before, strict=True))


def is_mapped(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(part, 16) for part in line.split(" ")[0].split("-"))
        if start <= address < end:
            return True
    return False


def run_python(script: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a process of its own, where limits and forks do no harm."""
    return support.run_python(script, "-Wignore")


@pytest.fixture
def lockable() -> None:
    try:
        buffers.empty_pinned(PAGE, dtype=torch.uint8)
    except OSError as error:
        pytest.skip(f"this process may not lock memory: {error}")


# Shape, dtype, alignment


SIZES = [1, 4095, 4096, 4097, HUGE - 1, HUGE, HUGE + 1, 2 * HUGE + 513]


@pytest.mark.parametrize(
    ("make", "nbytes"),
    [
        *((buffers.empty_aligned, nbytes) for nbytes in [*SIZES, 7 * HUGE + 1, 16 * HUGE - 1]),
        *((buffers.empty_pinned, nbytes) for nbytes in SIZES),  # most users may lock 8 MiB
    ],
)
def test_address_is_aligned_and_every_byte_usable(make, nbytes: int, lockable: None) -> None:
    tensor = make(nbytes, dtype=torch.uint8)
    assert tensor.data_ptr() % (HUGE if nbytes >= HUGE else PAGE) == 0
    assert tensor.data_ptr() % 4096 == 0
    assert tensor.untyped_storage().nbytes() == nbytes
    tensor.fill_(7)
    assert int(tensor.sum(dtype=torch.int64)) == 7 * nbytes


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (2, 5), (0,), (0, 4), (4, 0, 2), (1,)], ids=str)
def test_any_shape_and_dtype_gives_a_plain_contiguous_tensor(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    tensor = buffers.empty_aligned(shape, dtype=dtype)
    assert tuple(tensor.shape) == shape
    assert tensor.dtype == dtype
    assert tensor.device.type == "cpu"
    assert tensor.is_contiguous()
    assert not tensor._is_view()
    assert tensor.untyped_storage().data_ptr() % 4096 == 0
    raw = tensor.reshape(-1).view(torch.uint8)
    raw.fill_(1)  # every byte is there and writable
    assert int(raw.sum()) == tensor.numel() * dtype.itemsize


def test_shape_is_given_as_ints_or_as_one_tuple_as_for_torch_empty() -> None:
    assert buffers.empty_aligned(2, 3).shape == (2, 3)
    assert buffers.empty_aligned((2, 3)).shape == (2, 3)
    assert buffers.empty_aligned([2, 3]).shape == (2, 3)
    assert buffers.empty_aligned(torch.Size([2, 3])).shape == (2, 3)
    assert buffers.empty_aligned(()).shape == ()
    assert buffers.empty_aligned().shape == ()
    assert buffers.empty_aligned(4).dtype == torch.float32


def test_bad_shapes_and_dtypes_are_refused_with_what_was_wrong() -> None:
    with pytest.raises(ValueError, match=r"\(2, -1\) has a negative size"):
        buffers.empty_aligned(2, -1)
    with pytest.raises(TypeError, match=r"ints or one tuple of ints.*2\.5"):
        buffers.empty_aligned(2.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="ints or one tuple"):
        buffers.empty_aligned((2, 3), 4)
    with pytest.raises(TypeError, match=r"torch\.dtype or the name of one, not <class 'float'>"):
        buffers.empty_aligned(2, dtype=float)  # type: ignore[arg-type]


def test_a_quantised_dtype_is_refused_for_torch_would_crash() -> None:
    """frombuffer makes one without a quantizer; reshaping that was a segmentation fault."""
    with pytest.raises(TypeError, match=r"torch\.quint8.*scale.*torch\.uint8"):
        buffers.empty_aligned(2, 3, dtype=torch.quint8)


def test_tensors_behave_as_leaves_and_can_be_saved(tmp_path: Path) -> None:
    tensor = buffers.empty_aligned(2, 3)
    tensor.fill_(2.0).requires_grad_()
    (tensor * tensor).sum().backward()
    assert tensor.grad is not None and float(tensor.grad.sum()) == 24.0
    with torch.no_grad():
        tensor.add_(1)
    for saved in (tensor.detach(), buffers.empty_aligned(0, 4, dtype=torch.bfloat16)):
        torch.save(saved, tmp_path / "t.pt")
        assert torch.equal(torch.load(tmp_path / "t.pt"), saved)


def test_the_default_device_does_not_matter() -> None:
    with torch.device("meta"):
        assert buffers.empty_aligned(8).device.type == "cpu"


# Pages


def test_memory_is_populated_so_that_first_use_faults_nothing() -> None:
    tensor = buffers.empty_aligned(64 * MIB, dtype=torch.uint8)
    assert backed_bytes(tensor.data_ptr(), tensor.nbytes) == 64 * MIB
    faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    ctypes.memset(tensor.data_ptr(), 1, tensor.nbytes)
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - faults < 16


def test_a_kernel_without_populate_gets_its_pages_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        mappings_module, "_MADV_POPULATE_WRITE", 9999
    )  # EINVAL, as before Linux 5.14
    tensor = buffers.empty_aligned(64 * MIB, dtype=torch.uint8)
    assert backed_bytes(tensor.data_ptr(), tensor.nbytes) == 64 * MIB
    assert not tensor.any()


def test_large_tensors_lie_on_huge_pages() -> None:
    mode = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not mode.exists() or "[never]" in mode.read_text():
        pytest.skip("transparent huge pages are switched off here")
    for _ in range(20):
        tensor = buffers.empty_aligned(32 * MIB, dtype=torch.uint8)
        huge = huge_bytes(tensor.data_ptr())
        assert huge >= 0
        if huge >= 24 * MIB:
            return
        del tensor
        # What memory is left may have no huge page in it: then nobody else gets one either.
        with mmap.mmap(-1, 32 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as other:
            other.madvise(mmap.MADV_HUGEPAGE)
            other.write(bytes(32 * MIB))
            view = ctypes.c_char.from_buffer(other)
            others = huge_bytes(ctypes.addressof(view) + HUGE)
            del view
        if others < 24 * MIB:
            pytest.skip("memory is too fragmented here for huge pages")
    raise AssertionError(f"{huge} bytes of 32 MiB lie on huge pages, and of another's {others}")


def test_alignment_holds_where_the_kernel_does_not_give_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Linux before 6.7 does not align large mappings: a longer one is made, its middle used."""
    anonymous = mappings_module._anonymous

    def unaligned(cls: type[mappings_module.Mapping], length: int) -> mappings_module.Mapping:
        mapping = anonymous(cls, length)
        mapping.address += PAGE  # as if the kernel had put it there
        return mapping

    monkeypatch.setattr(mappings_module, "_anonymous", unaligned)
    mapping = mappings_module.Mapping(4 * HUGE)
    assert len(mapping) == 5 * HUGE
    assert mapping.address % HUGE == 0
    first = mappings_module._address_of(mapping)
    assert first < mapping.address
    assert mapping.address + 4 * HUGE <= first + len(mapping)
    tensor = mapping.tensor(8192, (5,), torch.int16)
    assert tensor.data_ptr() == mapping.address + 8192
    mapping.populate()
    tensor.fill_(3)
    assert buffers.owns(mapping.address, 4 * HUGE)
    assert not buffers.owns(mapping.address, 4 * HUGE + 1)


# Lifetime


def test_memory_lives_exactly_as_long_as_its_last_view(
    mappings: list[weakref.ref[mappings_module.Mapping]],
) -> None:
    tensor = buffers.empty_aligned(3 * MIB, dtype=torch.uint8)
    address = tensor.data_ptr()
    tensor.fill_(9)
    view = tensor[MIB : MIB + 8].view(torch.int64)
    del tensor
    gc.collect()
    assert is_mapped(address) and buffers.owns(address, 3 * MIB)
    array = view.numpy()
    del view
    assert array.view("uint8").tolist() == [9] * 8
    assert [mapping() is not None for mapping in mappings] == [True]
    del array
    spin_until_collected(lambda: mappings[0]() is None)
    assert not buffers.owns(address, 1)


def test_the_registry_forgets_a_buffer_before_its_address_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Weak references of a mmap are called after munmap: the address may be another's by then."""
    seen = []
    remove = mappings_module.mapped.remove

    def spy(address: int) -> None:
        seen.append(is_mapped(address))
        remove(address)

    monkeypatch.setattr(mappings_module.mapped, "remove", spy)
    buffers.empty_aligned(4 * MIB)
    spin_until_collected(lambda: bool(seen))
    assert all(seen)


@pytest.mark.parametrize("make", [buffers.empty_aligned, buffers.empty_pinned])
def test_a_thousand_allocations_leak_nothing(
    make, lockable: None, mappings: list[weakref.ref[mappings_module.Mapping]]
) -> None:
    def allocate(count: int) -> None:
        for index in range(count):
            make((1 + index % 3) * MIB + index, dtype=torch.uint8)

    def counts() -> tuple[int, ...]:
        return (
            len(mappings_module.mapped),
            len(mappings_module.locked),
            len(mappings_module.pinned),
            status_bytes("VmLck"),
        )

    allocate(20)
    collect()
    before, descriptors = counts(), open_descriptors()
    size, resident = status_bytes("VmSize"), status_bytes("VmRSS")
    allocate(1000)
    spin_until_collected(lambda: none_more(before, counts()))
    assert len(mappings) == 1020 and not any(mapping() for mapping in mappings)
    spin_until_collected(lambda: not new_descriptors(descriptors))
    # 2 GB were allocated. Of the rest of the process, a thread's arena of malloc is 64 MiB.
    assert status_bytes("VmSize") - size < 256 * MIB
    assert status_bytes("VmRSS") - resident < 256 * MIB


def test_tensors_in_reference_cycles_are_freed_by_the_collector() -> None:
    collect()
    before = len(mappings_module.mapped)
    for _ in range(200):
        cycle: list[object] = [buffers.empty_aligned(16)]
        cycle.append(cycle)
    del cycle
    spin_until_collected(lambda: len(mappings_module.mapped) <= before)


def test_threads_may_allocate_and_free_at_once(lockable: None) -> None:
    def counts() -> tuple[int, ...]:
        return len(mappings_module.mapped), len(mappings_module.locked), status_bytes("VmLck")

    collect()
    before = counts()
    failures: list[object] = []

    def work(seed: int) -> None:
        try:
            keep: list[torch.Tensor] = []
            for index in range(150):
                tensor = buffers.empty_pinned(64 + seed, dtype=torch.uint8)
                tensor.fill_(seed)
                if not (buffers.is_pinned(tensor) and buffers.owns(tensor.data_ptr(), 64)):
                    failures.append("unknown to the registry")
                if index % 3 == 0:
                    buffers.free_pinned(tensor)
                    if buffers.is_pinned(tensor):
                        failures.append("pinned after free")
                keep.append(tensor)
                if len(keep) > 5:
                    old = keep.pop(0)
                    if not bool((old == seed).all()):
                        failures.append("shared memory")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    spin_until_collected(lambda: none_more(before, counts()))


def test_a_buffer_alive_at_interpreter_exit_is_no_trouble() -> None:
    done = run_python(
        """
        import torch
        from nvmeio import buffers
        kept = buffers.empty_aligned(4 << 20, dtype=torch.uint8)
        cycle = [kept, buffers.empty_aligned(5)]
        cycle.append(cycle)
        print("fine")
        """
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "fine\n", "")


# Too much


def test_more_than_is_available_is_refused_before_it_is_touched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Overcommit would let mmap succeed, and the OOM killer would answer the touching."""
    small = {"MemAvailable": 100 * MIB, "SwapFree": 20 * MIB}
    monkeypatch.setattr(system, "proc_bytes", lambda path, field: small[field])
    buffers.empty_aligned(118 * MIB, dtype=torch.uint8)
    wanted = 128 * MIB
    with pytest.raises(MemoryError, match=rf"{wanted} bytes.*available: {100 * MIB} bytes"):
        buffers.empty_aligned(wanted, dtype=torch.uint8)


@pytest.mark.parametrize("wanted", [1 << 58, 1 << 70])
def test_an_mmap_that_fails_is_a_memory_error_with_the_figures(
    wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mappings_module, "check_available", lambda nbytes, length: None)
    collect()
    before = len(mappings_module.mapped)
    with pytest.raises(MemoryError, match=rf"{wanted} bytes.*MemAvailable"):
        buffers.empty_aligned(wanted, dtype=torch.uint8)
    assert len(mappings_module.mapped) <= before


def test_memory_running_out_while_touching_is_a_memory_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(address: int, nbytes: int, advice: int) -> int:
        ctypes.set_errno(errno.ENOMEM)
        return -1

    monkeypatch.setattr(system.libc, "madvise", full)
    collect()
    before = len(mappings_module.mapped)
    with pytest.raises(MemoryError, match=f"allocate {2 * PAGE} bytes: Cannot allocate"):
        buffers.empty_aligned(2 * PAGE, dtype=torch.uint8)
    spin_until_collected(lambda: len(mappings_module.mapped) <= before)


# owns


def test_owns_is_exact_at_both_ends() -> None:
    tensor = buffers.empty_aligned(2 * PAGE, dtype=torch.uint8)
    address = tensor.data_ptr()
    assert buffers.owns(address, 2 * PAGE)
    assert buffers.owns(address + 100, 5)
    assert buffers.owns(address + PAGE, PAGE)
    assert buffers.owns(address, 0)
    assert not buffers.owns(address, 2 * PAGE + 1)
    assert not buffers.owns(address - 1, 2)
    assert not buffers.owns(0, 1)
    ordinary = torch.empty(1000)
    assert not buffers.owns(ordinary.data_ptr(), 4000)


def test_adjacent_regions_do_not_make_one() -> None:
    regions = mappings_module._Regions()
    for start in (3 * PAGE, PAGE, 2 * PAGE):
        regions.add(start, PAGE)
    assert regions.covers(2 * PAGE, PAGE)
    assert not regions.covers(2 * PAGE, PAGE + 1)
    regions.remove(2 * PAGE)
    regions.remove(12345)  # never added
    assert not regions.covers(2 * PAGE, 1)
    assert regions.covers(PAGE, PAGE) and regions.covers(3 * PAGE, PAGE)
    assert len(regions) == 2


def test_a_step_that_runs_into_the_collector_does_not_deadlock() -> None:
    """A destructor may call in while its own thread is in the middle of a step."""
    serial = Serial()
    ran = []

    class Garbage:
        def __del__(self) -> None:
            serial.run(lambda: ran.append("inner"))
            ran.append("destructor returned")

    def outer() -> None:
        garbage = Garbage()
        del garbage
        ran.append("outer")

    serial.run(outer)
    assert ran == ["destructor returned", "outer", "inner"]
    serial.run(lambda: ran.append("next"))
    assert ran[-1] == "next"


# Page-locking


@pytest.fixture
def locked_before(lockable: None) -> Iterator[int]:
    collect()
    before = status_bytes("VmLck")
    yield before
    spin_until_collected(lambda: status_bytes("VmLck") <= before)


def test_empty_pinned_locks_and_free_pinned_unlocks_now(locked_before: int) -> None:
    tensor = buffers.empty_pinned(3, MIB // 4, dtype=torch.float32)
    assert tensor.shape == (3, MIB // 4)
    assert status_bytes("VmLck") - locked_before == 3 * MIB
    assert buffers.is_pinned(tensor)
    tensor.fill_(1.5)
    buffers.free_pinned(tensor)
    assert status_bytes("VmLck") == locked_before
    assert not buffers.is_pinned(tensor)
    assert bool((tensor == 1.5).all())  # still valid
    assert buffers.owns(tensor.data_ptr(), tensor.nbytes)


def test_the_last_view_unlocks(locked_before: int) -> None:
    tensor = buffers.empty_pinned(MIB, dtype=torch.uint8)
    address = tensor.data_ptr()
    view = tensor[5:]
    del tensor
    assert buffers.is_pinned(view)
    assert status_bytes("VmLck") > locked_before
    del view
    assert status_bytes("VmLck") == locked_before
    assert address not in mappings_module.pinned
    assert not mappings_module.locked.covers(address, 1)


def test_mlock_without_mlock2_does_as_well(
    locked_before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*arguments: object) -> int:
        ctypes.set_errno(errno.ENOSYS)
        return -1

    monkeypatch.setattr(system.libc, "mlock2", missing)
    tensor = buffers.empty_pinned(MIB, dtype=torch.uint8)
    assert status_bytes("VmLck") - locked_before == MIB
    assert buffers.is_pinned(tensor)


def test_free_pinned_accepts_any_view_that_starts_at_the_base(locked_before: int) -> None:
    for view in (
        lambda t: t,
        lambda t: t[:7],
        lambda t: t.view(torch.uint8),
        lambda t: t.view(2, 32)[0],
        lambda t: torch.from_numpy(t.numpy())[::3],
        lambda t: t[:0],
    ):
        tensor = buffers.empty_pinned(64)
        buffers.free_pinned(view(tensor))
        assert not buffers.is_pinned(tensor)
    empty = buffers.empty_pinned(0, 4)
    assert buffers.is_pinned(empty)
    buffers.free_pinned(empty)
    assert not buffers.is_pinned(empty)


def test_free_pinned_refuses_what_is_not_a_locked_tensor_of_ours(lockable: None) -> None:
    tensor = buffers.empty_pinned(64)
    with pytest.raises(ValueError, match="view into the middle"):
        buffers.free_pinned(tensor[1:])
    assert buffers.is_pinned(tensor)
    buffers.free_pinned(tensor)
    with pytest.raises(ValueError, match="freed before"):
        buffers.free_pinned(tensor)
    with pytest.raises(ValueError, match="empty_aligned"):
        buffers.free_pinned(buffers.empty_aligned(4))
    for ordinary in (torch.empty(4), torch.empty(0), torch.empty(4, device="meta")):
        with pytest.raises(ValueError, match="not page-locked by nvmeio"):
            buffers.free_pinned(ordinary)
    with pytest.raises(TypeError, match=r"torch\.Tensor, not bytearray"):
        buffers.free_pinned(bytearray(4))  # type: ignore[arg-type]


def test_of_many_threads_that_free_one_tensor_exactly_one_succeeds(locked_before: int) -> None:
    tensor = buffers.empty_pinned(64)
    barrier = threading.Barrier(8)
    outcomes: list[str] = []

    def free() -> None:
        barrier.wait(100)
        try:
            buffers.free_pinned(tensor)
            outcomes.append("freed")
        except ValueError:
            outcomes.append("refused")

    threads = [threading.Thread(target=free) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["freed"] + ["refused"] * 7


def test_is_pinned_looks_at_the_memory_not_at_the_object(lockable: None) -> None:
    tensor = buffers.empty_pinned(64, 64)
    for view in (
        tensor[3],
        tensor[:, 1],
        tensor.t(),
        tensor[::7, 5::3],
        tensor.view(torch.int16),
        tensor.expand(2, 64, 64),
        tensor[5, 5],
        torch.from_numpy(tensor.numpy()),
        tensor[:0],
        tensor.detach(),
    ):
        assert buffers.is_pinned(view)
    assert not buffers.is_pinned(tensor.clone())
    assert not buffers.is_pinned(buffers.empty_aligned(4))
    assert not buffers.is_pinned(torch.empty(4))
    assert not buffers.is_pinned(torch.empty(0))
    assert not buffers.is_pinned(torch.empty(4, device="meta"))
    assert not buffers.is_pinned(torch.eye(4).to_sparse())
    with pytest.raises(TypeError, match=r"torch\.Tensor, not int"):
        buffers.is_pinned(3)  # type: ignore[arg-type]


def test_new_locked_takes_the_dtype_from_a_tensor_or_a_dtype(lockable: None) -> None:
    tensor = buffers.new_locked(10, torch.empty(3, 3, dtype=torch.bfloat16))
    assert (tensor.shape, tensor.dtype) == ((10,), torch.bfloat16)
    assert buffers.is_pinned(tensor)
    assert buffers.new_locked(7, torch.int64).dtype == torch.int64
    assert buffers.new_locked(0, torch.int64).shape == (0,)
    assert (
        buffers.new_locked(2, torch.empty(1, device="meta", dtype=torch.int8)).dtype == torch.int8
    )


@pytest.mark.parametrize(
    ("num_elem", "example", "kind", "says"),
    [
        (-1, torch.int8, ValueError, "num_elem must be 0 or more, not -1"),
        (1.5, torch.int8, TypeError, "num_elem must be an int, not float: 1.5"),
        (True, torch.int8, TypeError, "num_elem must be an int, not bool"),
        ("4", torch.int8, TypeError, "num_elem must be an int, not str"),
        (4, "int8", TypeError, r"torch\.Tensor or a torch\.dtype, not 'int8'"),
        (4, None, TypeError, r"torch\.Tensor or a torch\.dtype, not None"),
    ],
)
def test_new_locked_says_what_was_wrong(
    num_elem: object, example: object, kind: type[Exception], says: str
) -> None:
    with pytest.raises(kind, match=says):
        buffers.new_locked(num_elem, example)  # type: ignore[arg-type]


# The lock limit

# Root may lock without limit (CAP_IPC_LOCK, man 7 capabilities), so the script drops that first.
UNPRIVILEGED = """
import ctypes, os, resource, sys
import torch
from nvmeio._memory import mappings
from nvmeio import buffers
from nvmeio._files.plan import PAGE_BYTES
from nvmeio.errors import TransferError
from nvmeio.pool import PinnedPool

CAP_IPC_LOCK = 14

def limit_to(soft, hard):
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this thread
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable, twice 32 bits
    libc = ctypes.CDLL(None)
    libc.capget(header, sets)
    for index in (0, 1, 2):
        sets[index] &= ~(1 << CAP_IPC_LOCK)
    libc.capset(header, sets)
    for line in open("/proc/thread-self/status"):
        if line.startswith("CapEff:") and int(line.split()[1], 16) >> CAP_IPC_LOCK & 1:
            print("SKIP: CAP_IPC_LOCK cannot be dropped here")
            sys.exit()
"""


def run_unprivileged(script: str) -> dict[str, str]:
    hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    if hard != resource.RLIM_INFINITY and hard < 2 * MIB and os.geteuid() != 0:
        pytest.skip("the hard limit RLIMIT_MEMLOCK is below the 2 MiB that this test sets")
    done = run_python(UNPRIVILEGED + textwrap.dedent(script))
    if done.stdout.startswith("SKIP"):
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stderr
    return dict(line.split("=", 1) for line in done.stdout.splitlines())


def test_a_lock_limit_hit_names_the_limit_and_how_to_raise_it() -> None:
    found = run_unprivileged(
        """
        limit_to(1 << 20, 2 << 20)
        held = buffers.empty_pinned(PAGE_BYTES, dtype=torch.uint8)
        rss = lambda: int(open("/proc/self/statm").read().split()[1]) * 4096
        before = rss()
        try:
            buffers.new_locked(64 << 20, torch.uint8)
        except OSError as error:
            print(f"errno={error.errno}")
            print(f"transfer={isinstance(error, TransferError)}")
            print(f"text={error}")
            print(f"grown={rss() - before}")
        print(f"held={buffers.is_pinned(held)}")
        print(f"entries={len(mappings.locked)},{len(mappings.pinned)}")
        print(f"still={buffers.is_pinned(buffers.empty_pinned(4096))}")
        """
    )
    assert found["errno"] == str(errno.ENOMEM)
    assert found["transfer"] == "False"
    text = found["text"]
    for part in (
        f"page-lock {64 * MIB} bytes",
        "RLIMIT_MEMLOCK is 1048576 bytes (hard limit 2097152 bytes)",
        f"{PAGE} bytes locked",
        "ulimit -l",
        "/etc/security/limits.conf",
        "LimitMEMLOCK",
        "--ulimit memlock=-1",
        "does not need locked memory",
        "empty_aligned is as fast",
    ):
        assert part in text
    assert int(found["grown"]) < 8 * MIB  # refused before it was touched
    assert found["held"] == found["still"] == "True"
    assert found["entries"] == "1,1"


def test_a_process_that_may_lock_nothing_is_told_so_and_everything_else_works() -> None:
    found = run_unprivileged(
        """
        limit_to(0, 0)
        try:
            buffers.empty_pinned(4)
        except OSError as error:
            print(f"kind={type(error).__name__},{error.errno}")
            print(f"text={error}")
        print(f"aligned={buffers.empty_aligned(4 << 20).shape[0]}")
        with PinnedPool(8 << 20) as pool:
            with pool.take(1 << 20) as tensor:
                tensor.fill_(3)
                print(f"pool={pool.locked},{buffers.is_pinned(tensor)},{int(tensor[-1])}")
        """
    )
    assert found["kind"] == f"PermissionError,{errno.EPERM}"
    assert "RLIMIT_MEMLOCK is 0 bytes (hard limit 0 bytes)" in found["text"]
    assert found["aligned"] == str(4 << 20)
    assert found["pool"] == "False,False,3"


# Fork


def test_a_forked_child_has_the_memory_but_not_the_locks(lockable: None) -> None:
    done = run_python(
        """
        import os, torch
        from nvmeio import buffers
        tensor = buffers.empty_pinned(4096, dtype=torch.uint8)
        tensor.fill_(5)
        child = os.fork()
        if child == 0:
            fine = not buffers.is_pinned(tensor) and buffers.owns(tensor.data_ptr(), 4096)
            fine = fine and int(tensor[-1]) == 5
            try:
                buffers.free_pinned(tensor)
                fine = False
            except ValueError:
                pass
            again = buffers.empty_pinned(4)
            fine = fine and buffers.is_pinned(again)
            os._exit(0 if fine else 1)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(status, buffers.is_pinned(tensor))
        """
    )
    assert (done.returncode, done.stdout) == (0, "0 True\n"), done.stderr


# CUDA, played


class FakeRuntime:
    """Stands in for torch.cuda.cudart()."""

    def __init__(self, register: int = 0, unregister: int = 0) -> None:
        self.results = (register, unregister)
        self.known: dict[int, int] = {}
        self.device = 3

    @contextlib.contextmanager
    def on(self, device: int) -> Iterator[None]:
        before, self.device = self.device, device
        yield
        self.device = before

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        assert flags == 0
        if self.results[0] == 0:
            self.known[address] = nbytes
        return self.results[0]

    def cudaHostUnregister(self, address: int) -> int:
        assert self.device == 3  # where it was registered
        return 713 if self.known.pop(address, None) is None else self.results[1]

    def cudaGetErrorString(self, error: int) -> str:
        return f"fake error {error}"


def play_cuda(monkeypatch: pytest.MonkeyPatch, runtime: FakeRuntime) -> FakeRuntime:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "device", runtime.on)
    return runtime


def test_locked_memory_is_registered_with_cuda_until_freed(
    monkeypatch: pytest.MonkeyPatch, locked_before: int
) -> None:
    runtime = play_cuda(monkeypatch, FakeRuntime())
    first, second = (buffers.empty_pinned(PAGE, dtype=torch.uint8) for _ in range(2))
    address, other = first.data_ptr(), second.data_ptr()
    assert runtime.known == {address: PAGE, other: PAGE}
    buffers.empty_aligned(4)
    buffers.free_pinned(first)
    assert runtime.known == {other: PAGE}
    del first
    view = second[7:]
    del second
    assert runtime.known == {other: PAGE}
    runtime.device = 0  # the thread of the last view is on another one
    del view
    assert runtime.known == {}


@pytest.fixture
def unraisable(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a destructor raises is dropped: pytest keeps it, and with it the object."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)


def test_an_interrupted_destructor_leaves_no_entry(
    monkeypatch: pytest.MonkeyPatch, unraisable: None
) -> None:
    """Python goes on after a KeyboardInterrupt there: nobody would do it again."""
    registry, calls = mappings_module.mapped, []

    class Interrupted:
        def remove(self, address: int) -> None:
            calls.append(address)
            if len(calls) == 1:
                raise KeyboardInterrupt
            registry.remove(address)

    collect()
    mapping = mappings_module.Mapping(4096)
    address = mapping.address
    assert registry.covers(address, 1)
    monkeypatch.setattr(mappings_module, "mapped", Interrupted())
    del mapping
    assert not registry.covers(address, 1)
    assert calls == [address, address]


def test_a_destructor_that_never_began_leaves_no_entry(lockable: None, unraisable: None) -> None:
    """Ctrl-C may take all of it: the address would have been known as ours, and as locked."""
    destructor = mappings_module.Mapping.__del__.__code__
    taken = []

    def interrupt(frame: FrameType, event: str, _: object) -> None:
        if frame.f_code is destructor:
            taken.append(frame.f_locals["self"].address)
            raise KeyboardInterrupt

    collect()
    before = (
        len(mappings_module.mapped),
        len(mappings_module.locked),
        len(mappings_module.pinned),
    )
    mapping = mappings_module.Mapping(PAGE)
    mapping.lock()
    address = mapping.address
    tracing = sys.gettrace()
    sys.settrace(interrupt)
    try:
        del mapping
    finally:
        sys.settrace(tracing)
    assert taken == [address]
    assert not mappings_module.mapped.covers(address, 1) and not mappings_module.locked.covers(
        address, 1
    )
    assert address not in mappings_module.pinned and address not in mappings_module.alive
    assert none_more(
        before,
        (len(mappings_module.mapped), len(mappings_module.locked), len(mappings_module.pinned)),
    )


def test_what_a_destructor_left_is_known_before_its_address_is_free(
    monkeypatch: pytest.MonkeyPatch, unraisable: None
) -> None:
    """Another thread may be given it at once, and register it anew."""
    seen = []

    class Died(SimpleQueue[Any]):
        def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
            seen.append(is_mapped(address))
            super().put(item)

    class Interrupted:
        def remove(self, address: int) -> None:
            raise KeyboardInterrupt

    collect()
    registry = mappings_module.mapped
    monkeypatch.setattr(mappings_module, "died", Died())
    mapping = mappings_module.Mapping(4 * MIB)
    address = mapping.address
    monkeypatch.setattr(mappings_module, "mapped", Interrupted())
    del mapping
    monkeypatch.setattr(mappings_module, "mapped", registry)
    assert seen == [True]
    assert not registry.covers(address, 1)


@pytest.mark.parametrize("at", ["locked", "CUDA", "after CUDA", "munlock"])
def test_unlocking_that_is_interrupted_is_gone_on_with(
    at: str, monkeypatch: pytest.MonkeyPatch, locked_before: int
) -> None:
    """The entry went first: what was left stayed locked, known to CUDA and known as locked."""
    runtime = FakeRuntime()
    play_cuda(monkeypatch, runtime)
    tensor = buffers.empty_pinned(PAGE, dtype=torch.uint8)
    address = tensor.data_ptr()

    def once(thing: Any, name: str, after: bool = False) -> None:
        call = getattr(thing, name)

        def cut(*arguments: Any) -> Any:
            monkeypatch.setattr(thing, name, call)
            if after:
                call(*arguments)
            raise KeyboardInterrupt

        monkeypatch.setattr(thing, name, cut)

    if at == "locked":
        once(mappings_module.locked, "remove")
    elif at == "munlock":
        once(system.libc, "munlock")
    else:
        once(runtime, "cudaHostUnregister", after=at != "CUDA")
    with pytest.raises(KeyboardInterrupt):
        buffers.free_pinned(tensor)
    buffers.free_pinned(tensor)
    assert not buffers.is_pinned(tensor) and address not in mappings_module.pinned
    assert runtime.known == {}
    assert status_bytes("VmLck") == locked_before


def test_a_refusal_by_cuda_leaves_nothing_locked(
    monkeypatch: pytest.MonkeyPatch, locked_before: int
) -> None:
    play_cuda(monkeypatch, FakeRuntime(register=2))
    taken: list[int] = []

    def take() -> None:
        taken.append(1)

    monkeypatch.setattr(system.libc, "cudaGetLastError", take, raising=False)
    with pytest.raises(
        OSError, match=f"cudaHostRegister of {PAGE} bytes failed: fake error 2"
    ) as info:
        buffers.empty_pinned(PAGE, dtype=torch.uint8)
    assert info.value.errno == errno.EIO
    assert taken == [1]  # or the thread's next kernel would be told to have failed
    assert status_bytes("VmLck") == locked_before
    play_cuda(monkeypatch, FakeRuntime(unregister=1))
    tensor = buffers.empty_pinned(4096, dtype=torch.uint8)
    with pytest.raises(OSError, match="cudaHostUnregister"):
        buffers.free_pinned(tensor)
    assert not buffers.is_pinned(tensor)


def test_memory_of_a_device_that_failed_is_in_nobodys_way(
    monkeypatch: pytest.MonkeyPatch, locked_before: int
) -> None:
    """No memory could be had any more, not even to save what was computed."""

    def failed(device: int) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    play_cuda(monkeypatch, FakeRuntime())
    first, second = (buffers.empty_pinned(PAGE, dtype=torch.uint8) for _ in range(2))
    monkeypatch.setattr(torch.cuda, "device", failed)
    with pytest.raises(OSError, match=r"Unregister of \d+ bytes failed: CUDA error: an illegal"):
        buffers.free_pinned(first)
    address = second.data_ptr()
    del second
    spin_until_collected(lambda: not buffers.owns(address, 1))
    assert not buffers.is_pinned(first)
    assert status_bytes("VmLck") == locked_before
    buffers.empty_aligned(PAGE, dtype=torch.uint8).zero_()


def test_cuda_that_cannot_be_initialised_is_left_out(
    monkeypatch: pytest.MonkeyPatch, lockable: None
) -> None:
    def cudart() -> object:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", cudart)
    assert buffers.is_pinned(buffers.empty_pinned(4))


def test_nothing_but_locking_touches_cuda() -> None:
    done = run_python(
        """
        import torch
        def refuse(*arguments):
            raise AssertionError("CUDA was touched")
        torch.cuda.is_available = torch.cuda.cudart = torch.cuda._lazy_init = refuse
        torch.cuda.init = refuse
        from nvmeio import buffers
        tensor = buffers.empty_aligned(4)
        print(buffers.is_pinned(tensor), buffers.owns(tensor.data_ptr(), 16))
        """
    )
    assert (done.returncode, done.stdout) == (0, "False True\n"), done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_cuda_itself_knows_the_memory() -> None:
    tensor = buffers.empty_pinned(MIB)
    assert tensor.is_pinned() and tensor[5:].is_pinned()
    device = tensor.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    assert not buffers.is_pinned(device)
    assert buffers.is_pinned(torch.empty(8, pin_memory=True))
    buffers.free_pinned(tensor)
    assert not tensor.is_pinned()

"""Aligned tensors: shape, alignment, pages, lifetime, and whose an address is."""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import os
import resource
import struct
import threading
import weakref
from pathlib import Path

import pytest
import torch
from memory.facts import MIB, PAGE, is_mapped, none_more, run_python, status_bytes
from support import collect, new_descriptors, open_descriptors, spin_until_collected

from nvmeio import buffers
from nvmeio._memory import mappings as mappings_module
from nvmeio._memory import system
from nvmeio._memory.mappings import Serial

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


def test_of_other_memory_the_kernel_says_whether_it_lies_on_huge_pages() -> None:
    mode = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not mode.exists() or "[madvise]" not in mode.read_text():
        pytest.skip("transparent huge pages are not for those who ask, here")
    if tuple(int(part) for part in os.uname().release.split(".")[:2]) < (6, 7):
        pytest.skip("this kernel has no PAGEMAP_SCAN")

    def told(advice: int) -> tuple[int, bool]:
        with mmap.mmap(-1, 8 * HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
            memory.madvise(advice)
            memory.write(bytes(8 * HUGE))
            view = ctypes.c_char.from_buffer(memory)
            address = ctypes.addressof(view)
            del view
            # Neither begins nor ends where a huge page does.
            return huge_bytes(address), buffers.on_huge_pages(address + 4096, 7 * HUGE)

    assert told(mmap.MADV_NOHUGEPAGE) == (-1, False)
    held, on_huge = told(mmap.MADV_HUGEPAGE)
    if held < 7 * HUGE:
        pytest.skip("memory is too fragmented here for huge pages")
    assert on_huge


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
    first = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
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
    monkeypatch.setattr(system, "check_available", lambda nbytes, length: None)
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
    regions = type(mappings_module.mapped)()
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

"""The memory behind nvmeio's buffers: mappings on huge pages, whose they are, their first touch.

The registry (`mapped`, and of these `locked`) is process-wide because addresses are. It holds no
mapping: each leaves with its destructor, and the part that an interrupt cut off is done by the
thread that looks next.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import math
import mmap
import os
import sys
import threading
import weakref
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import Any

import torch

from nvmeio._bindings import lib
from nvmeio._memory import system
from nvmeio._pages import PAGE_BYTES, round_up
from nvmeio._threads.threads import helped

_NOT_REGISTERED = 713  # cudaErrorHostMemoryNotRegistered; driver_types.h
_MADV_DONTNEED = 4
_MADV_HUGEPAGE = 14
_MADV_COLD = 20  # Linux 5.4
_MADV_POPULATE_READ = 22  # Linux 5.14; linux/mman.h
_MADV_POPULATE_WRITE = 23
_MLOCK_ONFAULT = 1  # Linux 4.4

# The kernel holds the process's memory map for the whole of one populate call, and every other
# thread that maps or unmaps memory waits for it. Populating 1 GiB in one call stalled such a thread
# for 88 ms, or 1.2 s where a virtual machine's host had to find the pages first; 64 MiB at a time
# for 5 to 60 ms; 16 MiB at a time for 1 to 2 ms, at the same 11 to 12 GB/s.
_POPULATE_BYTES = 16 << 20

# A tail shorter than a huge page lies on small pages. It is rounded up to a whole huge page where
# that costs at most this fraction of the buffer.
_ROUNDING_SHARE = 8

# Below this the reads are done before a thread has begun.
PREFAULT_FROM_BYTES = 64 << 20

_madvise = system.libc.madvise  # lets go of the GIL
_PREFAULT_THREADS = max(1, min(4, (os.cpu_count() or 1) - 1))


class Serial:
    """Runs short steps one after another, whichever thread they come from.

    A plain lock will not do: destructors call steps too, and the garbage collector may run one at
    any moment, in a thread that is in the middle of a step. Such a call leaves its step to the one
    under way and returns; every other call returns once its step has run. Steps must not raise and
    must not wait. One that an interrupt (Ctrl-C) cuts short is run again from its beginning, and
    must be written for that.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._steps: deque[Callable[[], None]] = deque()
        self._running = False

    @property
    def was_cut_short(self) -> bool:
        """Whether interrupts left steps that nobody runs."""
        return bool(self._steps) and not self._running

    def run(self, step: Callable[[], None]) -> None:
        self._steps.append(step)
        try:
            self._run_all()
        except BaseException:  # Ctrl-C, in the middle of a step: once more
            self._run_all()
            raise

    def _run_all(self) -> None:
        with self._lock:
            if self._running:
                return
            while self._steps:
                self._running = True
                try:
                    while self._steps:
                        self._steps[0]()
                        self._steps.popleft()
                finally:
                    self._running = False


class _Regions:
    """A set of disjoint spans of addresses, asked without a lock.

    A change replaces the whole table, which is one store: a reader sees the old or the new one.
    Copying costs 70 us at 10,000 spans; mapping and touching the smallest, 20 us.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._table: tuple[list[int], list[int]] = ([], [])  # starts (sorted), ends

    def add(self, address: int, nbytes: int) -> None:
        _changes.run(lambda: self._insert(address, address + nbytes))

    def remove(self, address: int) -> None:
        _changes.run(lambda: self._delete(address))

    def covers(self, address: int, nbytes: int) -> bool:
        take_out_dead()  # as `end_of`, with a call less: each transfer asks
        starts, ends = self._table
        index = bisect_right(starts, address) - 1
        return index >= 0 and address + nbytes <= ends[index]

    def end_of(self, address: int) -> int:
        """The end of the last span that begins before an address or there; 0: none does."""
        take_out_dead()
        starts, ends = self._table
        index = bisect_right(starts, address) - 1
        return ends[index] if index >= 0 else 0

    def _insert(self, start: int, end: int) -> None:
        starts, ends = self._table
        at = bisect_left(starts, start)
        if starts[at : at + 1] == [start]:
            return  # done, and interrupted after that
        self._table = ([*starts[:at], start, *starts[at:]], [*ends[:at], end, *ends[at:]])

    def _delete(self, start: int) -> None:
        starts, ends = self._table
        at = bisect_left(starts, start)
        if starts[at : at + 1] == [start]:
            self._table = (starts[:at] + starts[at + 1 :], ends[:at] + ends[at + 1 :])

    def __len__(self) -> int:
        take_out_dead()
        return len(self._table[0])


class Alive:
    """The state of a live mapping."""

    __slots__ = ("__weakref__",)


class Pin:
    """The work that `unpin` undoes."""

    __slots__ = ("device", "lock", "nbytes", "runtime")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.lock = threading.Lock()
        self.runtime: Any = None  # torch.cuda.cudart() where CUDA knows the memory
        self.device = 0  # that was current then

    def unregister(self, address: int) -> str:
        """Unregister it from CUDA; the reason if that failed, or ""."""
        if self.runtime is None or system.silent_devices:  # CUDA would wait for them
            return ""
        try:
            # A destructor's thread may be on a device not in use: CUDA would make a context.
            with torch.cuda.device(self.device):
                error = self.runtime.cudaHostUnregister(address)
        except Exception as failed:  # a device that has failed refuses to be made current
            return f"cudaHostUnregister of {self.nbytes} bytes failed: {failed}"
        if int(error) == _NOT_REGISTERED:  # an interrupt came after CUDA had forgotten it
            system.clear_cuda_error()
            return ""
        if int(error) == 0:
            return ""
        return system.cuda_refusal(self.runtime, "cudaHostUnregister", self.nbytes, error)


_changes = Serial()  # one for both: a destructor may come in the middle of a change of either
mapped = _Regions()
locked = _Regions()
pinned: dict[int, Pin] = {}  # by address
alive: dict[int, weakref.ref[Alive]] = {}  # by address, what is to leave the registry
died: SimpleQueue[weakref.ref[Alive]] = SimpleQueue()  # of these, what was interrupted in that


def leave(address: int) -> None:
    """Take a mapping out of the registry; a step that an interrupt cuts short is done again."""
    with contextlib.suppress(OSError):  # a destructor has nobody to tell
        unpin(address)
    mapped.remove(address)
    alive.pop(address, None)


def take_out_dead() -> None:
    """Take mappings that have died out of the registry."""
    if not died.empty():
        _changes.run(_leave_all_dead)
    elif _changes.was_cut_short:
        _changes.run(lambda: None)


def _leave_all_dead() -> None:
    count = died.qsize()
    for address, known in alive.copy().items():  # in one step of C: the collector may come any time
        if known() is None:
            leave(address)
    for _ in range(count):  # last: after an interrupt all of this is done again
        died.get_nowait()


def unpin(address: int) -> bool:
    """Undo `Mapping.lock` and `register_with_cuda`; False if there is nothing to undo.

    Raises OSError if CUDA refused (EIO); the page lock is gone anyway.
    """
    pin = pinned.get(address)
    if pin is None:
        return False
    locked.remove(address)
    with pin.lock:  # within it no step of the registry's, which may be waiting for it
        if pinned.get(address) is not pin:
            return False
        refused = pin.unregister(address)
        system.libc.munlock(address, pin.nbytes)
        pinned.pop(address, None)  # last: after an interrupt all of this is done again
    if refused:
        raise OSError(errno.EIO, refused)
    return True


def _after_fork_in_child() -> None:
    # Page locks and CUDA stay with the parent (man 2 mlock), the mappings are here too; another
    # thread of the parent may have been inside a step.
    global _changes
    _changes = Serial()
    locked.reset()
    pinned.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)


class Mapping(mmap.mmap):
    """An anonymous private mapping that knows its aligned start and leaves the registry in time.

    The steps are separate so that a lock that is refused costs no touching: create, `lock` if
    wanted, `populate` once, `register_with_cuda` if wanted, `tensor` as often as needed.

    It has a `__del__` rather than `weakref.finalize`: that runs before the memory is unmapped,
    whereas mmap's own deallocator calls weak references after that, when another thread may have
    been given the same address already. A `__del__` that Ctrl-C cuts short is never repeated, so
    there is a second way: Python drops a subclass's slots between the two, and the weak reference
    to what lies in one puts itself in a queue (`died`), in C.
    """

    __slots__ = ("_alive", "address", "base", "nbytes")

    _alive: Alive

    base: int  # of the first byte
    address: int  # of the first usable byte
    nbytes: int  # usable from there, whole pages

    def __new__(cls, nbytes: int) -> Mapping:
        """Reserve at least `nbytes` bytes, and a page, of address space; or raise MemoryError."""
        huge = system.huge_page_bytes()
        align = huge if nbytes >= huge else PAGE_BYTES
        length = round_up(max(nbytes, 1), PAGE_BYTES)
        rounded = round_up(length, align)
        if (rounded - length) * _ROUNDING_SHARE <= length:
            length = rounded
        system.check_available(nbytes, length)
        try:
            # Linux aligns a mapping of whole huge pages by itself from 6.7 on; where it did not,
            # a longer one contains an aligned span. The rest is never touched.
            self = _anonymous(cls, length)
            if self.address % align:
                self = _anonymous(cls, length + align)
                self.address = round_up(self.address, align)
        except (OSError, OverflowError, ValueError) as error:
            raise MemoryError(system.no_memory(nbytes, str(error))) from None
        if align == huge:
            # Refused (EINVAL) only by a kernel without huge pages, where small ones must do.
            system.libc.madvise(self.address, length, _MADV_HUGEPAGE)
        take_out_dead()  # one of them may have had this address
        self._alive = Alive()
        self.nbytes = length
        alive[self.address] = weakref.ref(self._alive, died.put)
        mapped.add(self.address, length)
        return self

    def lock(self) -> None:
        """Page-lock all of it, on fault; see `buffers.empty_pinned` for the errors.

        Pages that `populate` brings in are locked as they come, so a refusal is known at once, and
        `mlock` does not populate in one long call (see _POPULATE_BYTES).
        """
        pinned[self.address] = Pin(self.nbytes)  # first: what is interrupted can be undone
        if system.libc.mlock2(self.address, self.nbytes, _MLOCK_ONFAULT) != 0:
            code = ctypes.get_errno()
            if code != errno.ENOSYS or system.libc.mlock(self.address, self.nbytes) != 0:
                code = ctypes.get_errno()
                unpin(self.address)
                raise OSError(code, system.not_lockable(self.nbytes, code))
        locked.add(self.address, self.nbytes)

    def populate(self) -> None:
        """Back every page with memory, or raise MemoryError."""
        for start in range(0, self.nbytes, _POPULATE_BYTES):
            length = min(_POPULATE_BYTES, self.nbytes - start)
            if system.libc.madvise(self.address + start, length, _MADV_POPULATE_WRITE) == 0:
                continue
            code = ctypes.get_errno()
            if code not in (errno.EINVAL, errno.ENOSYS):
                raise MemoryError(system.no_memory(self.nbytes, os.strerror(code)))
            ctypes.memset(self.address + start, 0, length)  # Linux before 5.14; no GIL either

    def register_with_cuda(self) -> bool:
        """Register it with CUDA, after `populate`, and `lock` if wanted; False if CUDA is not used.

        CUDA page-locks what is not locked yet.
        """
        device = system.cuda_device()
        if device is None:
            return False
        with torch.cuda.device(device):
            self._register(device)
        return True

    def _register(self, device: int) -> None:
        cuda: Any = torch.cuda
        runtime = cuda.cudart()
        if self.address not in pinned:
            pinned[self.address] = Pin(self.nbytes)
            locked.add(self.address, self.nbytes)
        pin = pinned[self.address]
        pin.device = device
        pin.runtime = runtime  # before the call: what is interrupted after it can be undone
        # 0, cudaHostRegisterDefault: with unified addressing it is page-locked to every device.
        error = runtime.cudaHostRegister(self.address, self.nbytes, 0)
        if int(error) != 0:
            pin.runtime = None
            unpin(self.address)
            raise OSError(
                errno.EIO, system.cuda_refusal(runtime, "cudaHostRegister", self.nbytes, error)
            )

    def lock_if_allowed(self) -> bool:
        """Page-lock it where the process may, and have its pages; whether it is locked.

        CUDA knows a locked one, if it was used before.
        """
        try:
            self.lock()
        except OSError:
            self.populate()
            return False
        self.populate()
        try:
            self.register_with_cuda()
        except OSError:
            return False
        return True

    def tensor(self, offset: int, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor from byte `offset` on, with a storage of exactly its size.

        It holds this mapping: torch keeps the object that it was given a buffer of.
        """
        start = self.address - self.base + offset
        # frombuffer makes no empty tensor; one element of storage stands behind it instead.
        count = max(math.prod(sizes), 1)
        flat = torch.frombuffer(self, dtype=dtype, count=count, offset=start)
        # Not view(): the tensor should not be another one's view. It never grows, so no copy.
        return flat if sizes == (count,) else flat.resize_(sizes)

    def lend(
        self, offset: int, nbytes: int, died: Callable[[weakref.ref[Any]], object]
    ) -> tuple[torch.Tensor, weakref.ref[memoryview]]:
        """Do as `tensor`, of bytes; `died` is called when nobody has its storage any more.

        The weak reference that comes with it has to be kept for that.
        """
        start = self.address - self.base + offset
        part = memoryview(self)[start : start + max(nbytes, 1)]
        flat = torch.frombuffer(part, dtype=torch.uint8)  # keeps the part, and that the mapping
        return (flat if nbytes else flat.resize_(0)), weakref.ref(part, died)

    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # At the end of the interpreter the globals may be gone; so is the process, soon.
        if finalizing() or not hasattr(self, "nbytes"):
            return
        leave(self.address)


def _anonymous(cls: type[Mapping], length: int) -> Mapping:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    self: Mapping = mmap.mmap.__new__(cls, -1, length, flags=flags)
    self.base = self.address = _address_of(self)
    return self


def _address_of(mapping: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


def owns(address: int, nbytes: int) -> bool:
    """Whether the span lies wholly in one live nvmeio buffer, and so on huge pages.

    The transfer plan sends such memory straight to the drive. Buffers of less than a huge page
    count too; they lie on small pages. 0 bytes ask for the address alone. Cost: 0.3 us among 10,000
    buffers; takes no lock.
    """
    return mapped.covers(address, nbytes)


def on_huge_pages(address: int, nbytes: int) -> bool:
    """Whether large memory lies on huge pages, or is taken to.

    nvmeio's own buffers are, and so is all memory if transparent huge pages are "always". For other
    memory the kernel is asked (PAGEMAP_SCAN, since Linux 6.7), in 1 to 2 us.
    """
    return (
        system.huge_pages_for_all()
        or owns(address, nbytes)
        or lib.nv_is_on_huge_pages(address, nbytes) == 1
    )


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """Address and length of the bytes from the tensor's first element to its last."""
    if tensor.layout is not torch.strided or tensor.device.type != "cpu":
        return 0, 0
    if tensor.numel() == 0:
        # data_ptr() says 0 for an empty tensor, whatever its storage.
        start = tensor.untyped_storage().data_ptr()
        return start and start + int(tensor.storage_offset()) * tensor.element_size(), 0
    steps = sum(
        (int(size) - 1) * int(step)
        for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return tensor.data_ptr(), (steps + 1) * tensor.element_size()


def accessible(address: int, nbytes: int, writing: bool) -> bool:
    """Whether memory can be read (or written), found by having the kernel bring it in.

    Before Linux 5.14, which has no such call, all memory is taken to be accessible.
    """
    advice = _MADV_POPULATE_WRITE if writing else _MADV_POPULATE_READ
    start = address - address % PAGE_BYTES
    if not nbytes or system.libc.madvise(start, address + nbytes - start, advice) == 0:
        return True
    code = ctypes.get_errno()
    if code == errno.EINVAL:  # read-only, or an advice that this kernel does not know
        return not _knows_populate()
    return code not in (errno.EFAULT, errno.ENOMEM)


@functools.cache
def _knows_populate() -> bool:
    page = mmap.mmap(-1, PAGE_BYTES)
    return bool(system.libc.madvise(_address_of(page), PAGE_BYTES, _MADV_POPULATE_READ) == 0)


def give_back_pages(address: int, nbytes: int) -> None:
    """Give the whole pages of some private memory back to the system; they read as zeros then.

    Their bytes are lost, and addresses stay valid. Memory of a file reads as the file does.

    Raises:
        OSError: It cannot be given back; some of it may have been.
    """
    start, length = _whole_pages(address, nbytes)
    if length and system.libc.madvise(start, length, _MADV_DONTNEED) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"madvise(MADV_DONTNEED): {os.strerror(code)}")


def bring_pages(address: int, nbytes: int) -> None:
    """Have memory for the whole pages of a span that was given back: huge pages if possible.

    Pages that are not brought here come when they are touched.
    """
    start, length = _whole_pages(address, nbytes)
    if length:
        system.libc.madvise(start, length, _MADV_HUGEPAGE)
    for at in range(start, start + length, _POPULATE_BYTES):
        step = min(_POPULATE_BYTES, start + length - at)
        if system.libc.madvise(at, step, _MADV_POPULATE_WRITE) != 0:
            return


def can_be_given_back(address: int, nbytes: int) -> bool:
    """Whether `give_back_pages` will do: not for memory that is locked, or a device's.

    Before Linux 5.4 it is taken to.
    """
    start, length = _whole_pages(address, nbytes)
    return not length or system.libc.madvise(start, length, _MADV_COLD) == 0 or not _knows_cold()


def shared_or_read_only() -> list[tuple[int, int]]:
    """Begin and end of this process's mappings that it shares, or may not write to.

    Empty if there is no /proc.
    """
    spans = []
    for line in system.text_of("/proc/self/maps").splitlines():
        span, permissions, _ = line.split(maxsplit=2)
        if permissions[1] != "w" or permissions[3] != "p":
            low, high = span.split("-")
            spans.append((int(low, 16), int(high, 16)))
    return spans


def _whole_pages(address: int, nbytes: int) -> tuple[int, int]:
    start = round_up(address, PAGE_BYTES)
    return start, max(0, (address + nbytes) // PAGE_BYTES * PAGE_BYTES - start)


@functools.cache
def _knows_cold() -> bool:
    page = mmap.mmap(-1, PAGE_BYTES)
    return bool(system.libc.madvise(_address_of(page), PAGE_BYTES, _MADV_COLD) == 0)


class Prefault:
    """Populates new memory in several threads, while the drive fills it from the other end.

    The first touch of a page makes the kernel find and clear it: 11 GB/s on one core at best, and
    on a virtual machine, whose host has to find the page as well, 0.3 to 0.9. A direct read touches
    pages when it pins them, on the thread that submits it, which is then what the drive waits for.

    So helpers touch the memory (mappings in the order in which they are filled) from its end
    backwards, for as long as a ``with`` block lasts, until they meet the reads that come from its
    beginning. Pages that are there already cost them nothing, so the order need not be kept
    exactly.
    """

    def __init__(self, mappings: Sequence[Mapping]) -> None:
        self._pieces = backwards(mappings)
        self._lock = threading.Lock()
        self._stopping = False
        self._refused = 0
        large = sum(mapping.nbytes for mapping in mappings) >= PREFAULT_FROM_BYTES
        self._helped = helped(_PREFAULT_THREADS if large else 0, self._run, "nvmeio-prefault")

    def check(self) -> None:
        """Raise MemoryError if the kernel refused a page."""
        if self._refused:
            raise MemoryError(f"cannot allocate memory: {os.strerror(self._refused)}")

    def _run(self) -> None:
        while not self._stopping:
            with self._lock:
                piece = next(self._pieces, None)
            if piece is None:
                return
            if _madvise(*piece, _MADV_POPULATE_WRITE) != 0:
                code = ctypes.get_errno()
                if code not in (errno.EINVAL, errno.ENOSYS):  # before 5.14: the reads touch it
                    self._refused = code
                return

    def __enter__(self) -> Prefault:
        self._helped.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping = True
        self._helped.__exit__(None, None, None)


def backwards(mappings: Sequence[Mapping]) -> Iterator[tuple[int, int]]:
    for mapping in reversed(mappings):
        for start in reversed(range(0, mapping.nbytes, _POPULATE_BYTES)):
            yield mapping.address + start, min(_POPULATE_BYTES, mapping.nbytes - start)

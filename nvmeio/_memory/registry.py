"""Which addresses are nvmeio's memory (`mapped`), and which of them are locked (`locked`).

It is process-wide because addresses are. It holds no mapping: each leaves with its destructor, and
what an interrupt took of that is done by whoever looks next.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import weakref
from bisect import bisect_left, bisect_right
from queue import SimpleQueue
from typing import Any

import torch

from nvmeio._memory.system import clear_cuda_error, cuda_refusal, libc
from nvmeio._threads.serial import Serial

_NOT_REGISTERED = 713  # cudaErrorHostMemoryNotRegistered; driver_types.h


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
        take_out_dead()
        starts, ends = self._table
        index = bisect_right(starts, address) - 1
        return index >= 0 and address + nbytes <= ends[index]

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
    """What a mapping has while it lives."""

    __slots__ = ("__weakref__",)


class Pin:
    """What `unpin` has to undo."""

    __slots__ = ("device", "lock", "nbytes", "runtime")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.lock = threading.Lock()
        self.runtime: Any = None  # torch.cuda.cudart() where CUDA knows the memory
        self.device = 0  # that was current then

    def unregister(self, address: int) -> str:
        """Have CUDA forget it; why it did not, or ""."""
        if self.runtime is None:
            return ""
        try:
            # A destructor's thread may be on a device not in use: CUDA would make a context.
            with torch.cuda.device(self.device):
                error = self.runtime.cudaHostUnregister(address)
        except Exception as failed:  # a device that has failed refuses to be made current
            return f"cudaHostUnregister of {self.nbytes} bytes failed: {failed}"
        if int(error) == _NOT_REGISTERED:  # an interrupt came after CUDA had forgotten it
            clear_cuda_error()
            return ""
        if int(error) == 0:
            return ""
        return cuda_refusal(self.runtime, "cudaHostUnregister", self.nbytes, error)


_changes = Serial()  # one for both: a destructor may come in the middle of a change of either
mapped = _Regions()
locked = _Regions()
pinned: dict[int, Pin] = {}  # by address
alive: dict[int, weakref.ref[Alive]] = {}  # by address, what is to leave the registry
died: SimpleQueue[weakref.ref[Alive]] = SimpleQueue()  # of these, what was interrupted in that


def leave(address: int) -> None:
    """A mapping out of the registry; what an interrupt cuts short is done again later."""
    with contextlib.suppress(OSError):  # a destructor has nobody to tell
        unpin(address)
    mapped.remove(address)
    alive.pop(address, None)


def take_out_dead() -> None:
    """Out of the registry with what died and is still there."""
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
    """Undo `Mapping.lock` and `register_with_cuda`; False where there is nothing to undo.

    Raises:
        OSError: CUDA refused (EIO); the page lock is gone all the same.
    """
    pin = pinned.get(address)
    if pin is None:
        return False
    locked.remove(address)
    with pin.lock:  # within it no step of the registry's, which may be waiting for it
        if pinned.get(address) is not pin:
            return False
        refused = pin.unregister(address)
        libc.munlock(address, pin.nbytes)
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

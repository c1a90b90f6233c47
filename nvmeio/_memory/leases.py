"""Leases of a memory: the lent bytes, their owners, and waiting callers; for `PinnedPool`."""

from __future__ import annotations

import weakref
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from nvmeio._memory.mappings import Mapping, Serial
from nvmeio._pages import PAGE_BYTES, round_up


class FreeBlocks:
    """The free parts of [0, nbytes): best fit, lowest address among equals, merged on return.

    Finding is a binary search; each change moves one list by one place.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = 0
        self._by_size: list[tuple[int, int]] = []  # (size, start), sorted
        self._size_at: dict[int, int] = {}  # start → size
        self._start_before: dict[int, int] = {}  # end → start
        self.put(0, nbytes)

    def take(self, nbytes: int) -> int | None:
        """The start of a block of `nbytes` bytes, or None if no free part is that long."""
        if nbytes == 0:
            return 0
        at = bisect_left(self._by_size, (nbytes, 0))
        if at == len(self._by_size):
            return None
        size, start = self._by_size[at]
        self._remove(size, start)
        if size > nbytes:
            self._insert(size - nbytes, start + nbytes)
        return start

    def take_at(self, start: int, nbytes: int) -> None:
        """Take this very block, of which all is free."""
        for size, first in list(self._by_size):
            if first <= start and start + nbytes <= first + size:
                self._remove(size, first)
                if first < start:
                    self._insert(start - first, first)
                if start + nbytes < first + size:
                    self._insert(first + size - start - nbytes, start + nbytes)
                return

    def put(self, start: int, nbytes: int) -> None:
        if nbytes == 0:
            return
        before = self._start_before.get(start)
        if before is not None:
            self._remove(start - before, before)
            start, nbytes = before, nbytes + start - before
        after = self._size_at.get(start + nbytes)
        if after is not None:
            self._remove(after, start + nbytes)
            nbytes += after
        self._insert(nbytes, start)

    def _insert(self, size: int, start: int) -> None:
        insort(self._by_size, (size, start))
        self._size_at[start] = size
        self._start_before[start + size] = start
        self.nbytes += size

    def _remove(self, size: int, start: int) -> None:
        del self._by_size[bisect_left(self._by_size, (size, start))]
        del self._size_at[start]
        del self._start_before[start + size]
        self.nbytes -= size


class Waiter:
    """One request in the queue. Hashed by identity; changed by the queue's steps only.

    `wake` returns False if nobody is left to be woken. `lease` stands for the request; once it is
    dead, with its memory, they are taken back.
    """

    __slots__ = ("arena", "charged_bytes", "lease", "memory", "nbytes", "start", "wake_up", "woken")

    def __init__(self, nbytes: int, wake: Callable[[], bool], lease: weakref.ref[Any]) -> None:
        self.nbytes = nbytes
        self.charged_bytes = round_up(nbytes, PAGE_BYTES)
        self.wake_up = wake  # False: nobody is left to be woken
        self.woken = False
        self.start: int | None = None  # offset in the arena once granted
        self.arena: Mapping | None = None
        self.lease: weakref.ref[Any] | None = lease
        self.memory: weakref.ref[memoryview] | None = None  # under the tensor

    @property
    def is_dead(self) -> bool:
        """Whether nobody has the lease or its memory any more."""
        lease, memory = self.lease, self.memory
        return (lease is None or lease() is None) and (memory is None or memory() is None)

    def wake(self) -> bool:
        """Wake a waiter, twice if an interrupt comes after the first time; False: there is none."""
        self.woken = self.wake_up()
        return self.woken


class LeaseQueue:
    """Leases of the first `nbytes`, in whole pages, of an arena, and requests for them.

    It keeps the arena until it is closed and all leases are back. The weak references of leases and
    of their memory put themselves into `died`.
    """

    def __init__(self, arena: Mapping, nbytes: int) -> None:
        self._arena: Mapping | None = arena
        self._nbytes = nbytes
        self._free = FreeBlocks(nbytes)
        self._granted: dict[Waiter, None] = {}
        self._cut = False  # a step began to change what is free, and has not ended
        self._waiters: OrderedDict[Waiter, None] = OrderedDict()  # in the order they came
        self._serial = Serial()
        self.died: SimpleQueue[weakref.ref[Any]] = SimpleQueue()
        self.closed = False

    def enqueue(self, waiter: Waiter) -> None:
        """Serve a request, now or later."""
        self._serial.run(lambda: self._admit(waiter))

    def withdraw(self, waiter: Waiter) -> None:
        """Give up waiting, or give back what was granted; harmless if there is neither."""
        self._serial.run(lambda: self._dismiss(waiter))

    def look(self) -> None:
        """Take back what nobody has any more."""
        self._serial.run(self._sweep)

    def close(self) -> None:
        """Refuse new requests; wake all waiters."""
        self._serial.run(self._refuse_all)

    def forget(self) -> None:
        """In a forked child: close it; nobody waits here."""
        self.closed, self._arena = True, None

    @property
    def free_bytes(self) -> int:
        return self._free.nbytes

    @property
    def waiting(self) -> int:
        return len(self._waiters)

    @property
    def leases(self) -> int:
        return len(self._granted)

    # Run in the Serial, one at a time

    def _admit(self, waiter: Waiter) -> None:
        if self.closed:
            waiter.wake()
            return
        if waiter not in self._granted:
            self._waiters[waiter] = None
        self._sweep()

    def _serve(self) -> None:
        self._recover()
        while self._waiters:
            waiter = next(iter(self._waiters))
            self._cut = True
            start = self._free.take(waiter.charged_bytes)
            if start is None:
                self._cut = False
                return
            # No call among these, so no interrupt: granted or not.
            waiter.start, waiter.arena = start, self._arena
            self._granted[waiter] = None
            del self._waiters[waiter]
            self._cut = False
            if not waiter.wake():
                self._take_back(waiter)

    def _sweep(self) -> None:
        """Take back leases that died without being given back, and serve waiting callers."""
        self._recover()
        died = self.died.qsize()
        if died:
            for waiter in [waiter for waiter in self._waiters if waiter.is_dead]:
                self._waiters.pop(waiter, None)
            for waiter in [waiter for waiter in self._granted if waiter.is_dead]:
                self._take_back(waiter)
            for _ in range(died):  # last: after an interrupt all of this is done again
                self.died.get_nowait()
        self._serve()

    def _recover(self) -> None:
        """Recover from a step that was cut short: free is what nobody was granted."""
        if self._cut:
            self._free = FreeBlocks(self._nbytes)
            for waiter in self._granted:
                if waiter.start is not None and waiter.charged_bytes:
                    self._free.take_at(waiter.start, waiter.charged_bytes)
            self._cut = False
        for waiter in [each for each in self._granted if not each.woken]:
            if not waiter.wake():
                self._take_back(waiter)

    def _dismiss(self, waiter: Waiter) -> None:
        self._recover()
        if waiter in self._granted:
            self._take_back(waiter)
        else:
            self._waiters.pop(waiter, None)
            waiter.lease = None
        self._serve()

    def _take_back(self, waiter: Waiter) -> None:
        start = waiter.start
        if waiter in self._granted and start is not None:
            self._cut = True
            del self._granted[waiter]
            waiter.start = waiter.arena = None
            waiter.lease = waiter.memory = None  # nobody needs to be told of their end any more
            self._free.put(start, waiter.charged_bytes)
            self._cut = False

    def _refuse_all(self) -> None:
        self.closed = True
        self._arena = None
        while self._waiters:
            waiter = next(iter(self._waiters))
            waiter.wake()
            del self._waiters[waiter]  # after that: an interrupt has it woken again

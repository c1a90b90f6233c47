"""`PinnedPool`: a fixed budget of nvmeio memory, leased out and taken back.

First touch is expensive (`empty_aligned` has the figures), so a program that moves many tensors
through host memory maps one arena and reuses it; a caller that must stay within a budget waits here
until enough of it is back.

`_memory.leases` knows the owner of each byte, and the waiting callers.

If Ctrl-C comes between a lease and its ``with`` block, or as the block is left, nobody gives its
bytes back. They come back when both the lease and the memory are dead: the callbacks of their weak
references are `SimpleQueue.put` itself, a C function, which no interrupt cuts in half, and every
taking or waiting thread looks there (`LeaseQueue.look`).
"""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable

import torch

from nvmeio import _checks
from nvmeio._checks import NotPickled
from nvmeio._memory.leases import LeaseQueue, Waiter
from nvmeio._memory.mappings import Mapping
from nvmeio._pages import PAGE_BYTES, round_up
from nvmeio._threads.closing import Closing
from nvmeio._threads.running_loop import resolve, running_loop
from nvmeio.errors import ClosedError, counted

__all__ = ["Lease", "PinnedPool"]

_SLICE_S = 0.25  # who waits looks this often for what nobody gave back
# Objects of an exception's traceback may lie in a cycle, and a waiting thread makes no garbage that
# would start the collector.
_COLLECT_AFTER_S = 1.0
_COLLECT_EVERY_S = 10.0


class PinnedPool(NotPickled, Closing):
    """A fixed budget of aligned huge-page memory from which byte tensors are leased.

        with PinnedPool(256 << 20) as pool:
            async with pool.take(tensor.nbytes) as staging:  # waits until that much is free
                await h.async_pread(staging, path)
                tensor.view(torch.uint8).copy_(staging)

    May be used from several threads and several event loops at once. Page-locked where the process
    may lock that much, else not; direct I/O is as fast either way, and `locked` tells. CUDA knows
    it, and copies need not wait, if the process used CUDA before it was made (see `empty_pinned`).

    Args:
        budget_bytes: Size of the arena, at least 1, or a text such as "8G" (GiB); rounded up to
            whole pages.

    Raises:
        MemoryError: The arena cannot be had; says how much is available.
        TypeError, ValueError: `budget_bytes` is not an int, or below 1.

    Cost:
        The arena is mapped and touched once, here (about 0.1 s per GiB; see `empty_aligned`).
    """

    _elsewhere = (
        "keep its budget, and make one in each process; to share memory use tensor.share_memory_()"
    )

    def __init__(self, budget_bytes: int | str) -> None:
        self._budget = round_up(_checks.size("budget_bytes", budget_bytes, 1), PAGE_BYTES)
        arena = Mapping(self._budget)
        self._locked = arena.lock_if_allowed()
        self._queue = LeaseQueue(arena, self._budget)
        self._collected_s = 0.0
        self._pid = os.getpid()

    def take(self, nbytes: int, *, timeout: float | None = None) -> Lease:
        """A lease of `nbytes` bytes, for ``async with`` (waits) or ``with`` (blocks).

        Its value is a 1-D uint8 tensor of exactly `nbytes` elements, contiguous, page-aligned
        (4096 or more), with the bytes that its last user left in it. The place in the queue is
        taken when the block is entered, in turn with all others whatever their size. A lease is
        entered once.

        The tensor is the caller's until the block ends. One that is used after that is the
        caller's mistake: its memory stays mapped, so nothing crashes, but the bytes belong to the
        next lease. Taking a second lease while holding one can wait forever, like any two locks.
        ``with`` in a coroutine blocks its event loop: use ``async with`` there.

        Args:
            nbytes: Bytes wanted, 0 or more; whole pages of the budget are charged.
            timeout: Seconds to wait at most; None waits without end. `asyncio.timeout` and
                cancelling work as well.

        Raises:
            ValueError: `nbytes` is negative, or more than the budget, so would never be free.
            TypeError: `nbytes` is not an int.
            ClosedError: The pool is closed, or belongs to the parent of this forked process;
                raised here, and on entering where it was closed meanwhile.
            TimeoutError: On entering: not free within `timeout`. Nothing is held then.

        After an error or cancellation:
            Nothing is held, and the next in the queue has been served. Only after a Ctrl-C in the
            very moment in which the block is entered or left are the bytes held until the tensor
            is gone; a `ResourceWarning` may say so.

        Cost:
            10 us where the bytes are free.
        """
        wanted = _checks.integer("nbytes", nbytes, 0)
        if wanted > self._budget:
            raise ValueError(f"{wanted} bytes can never be free: the budget is {self._budget}")
        if timeout is not None and not timeout >= 0:
            raise ValueError(f"timeout must be None or 0 or more seconds, not {timeout!r}")
        if timeout is not None and timeout > threading.TIMEOUT_MAX:  # 292 years, or math.inf
            timeout = None
        self._check_open()
        return Lease(self, wanted, timeout)

    # Steps of a lease

    def _enqueue(self, waiter: Waiter) -> None:
        self._check_open()
        self._queue.enqueue(waiter)

    def _withdraw(self, waiter: Waiter) -> None:
        """Give up waiting, or give back granted bytes; harmless if there is neither."""
        if os.getpid() == self._pid:  # in a forked child there is nobody to give it to
            self._queue.withdraw(waiter)

    def _tensor(self, waiter: Waiter) -> torch.Tensor:
        arena = waiter.arena
        if arena is None or waiter.start is None:
            raise ClosedError(f"the pool was closed: {waiter.nbytes} bytes were waited for")
        memory, waiter.memory = arena.lend(waiter.start, waiter.nbytes, self._queue.died.put)
        waiter.arena = None  # the memory keeps it, as long as it is needed
        return memory

    def _look(self, waited_s: float = 0.0) -> None:
        """Take back what nobody has any more; called now and then by waiters."""
        if os.getpid() != self._pid:
            return
        now_s = time.monotonic()
        if waited_s > _COLLECT_AFTER_S and now_s > self._collected_s + _COLLECT_EVERY_S:
            self._collected_s = now_s
            gc.collect()
        self._queue.look()

    # Closing

    def close(self) -> None:
        """Refuse new requests; waiting callers get `ClosedError`. Never waits, never raises.

        Leases that are out stay valid and are given back as usual. The arena is unlocked and
        unmapped when the last of them, and the last tensor of one, is gone: at once if none is.
        """
        if os.getpid() == self._pid:
            self._queue.close()
        else:
            self._queue.forget()

    def __enter__(self) -> PinnedPool:
        self._check_open()
        return self

    async def __aenter__(self) -> PinnedPool:
        return self.__enter__()

    async def __aexit__(self, *_: object) -> None:
        self.close()

    # State

    @property
    def budget_bytes(self) -> int:
        """Size of the arena in bytes: the requested size, rounded up to whole pages."""
        return self._budget

    @property
    def in_use_bytes(self) -> int:
        """Bytes of the budget that are out on lease, in whole pages."""
        self._look()
        return self._budget - self._queue.free_bytes

    @property
    def waiting(self) -> int:
        """How many requests wait for bytes to come back."""
        return self._queue.waiting

    @property
    def locked(self) -> bool:
        """Whether the arena is page-locked (and known to CUDA, if CUDA was used before)."""
        return self._locked

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._queue.closed

    def _check_open(self) -> None:
        if self._queue.closed:
            raise ClosedError("the pool is closed: make a new one")
        if os.getpid() != self._pid:
            raise ClosedError(
                f"the pool belongs to process {self._pid}, which forked this one: "
                "make a pool of your own after the fork"
            )

    def __repr__(self) -> str:
        kind = "page-locked" if self._locked else "not locked"
        leases = self._queue.leases
        return (
            f"<PinnedPool {self.in_use_bytes} of {self._budget} bytes in "
            f"{counted(leases, 'lease')}, "
            f"{self.waiting} waiting, {kind}{', closed' if self._queue.closed else ''}>"
        )


class Lease(NotPickled):
    """The result of `PinnedPool.take`: a request until it is entered, bytes until it is left."""

    _elsewhere = "send the tensor, which is copied, or share_memory_()"

    def __init__(self, pool: PinnedPool, nbytes: int, timeout: float | None) -> None:
        self._pool = pool
        self._nbytes = nbytes
        self._timeout = timeout
        self._waiter: Waiter | None = None

    def __enter__(self) -> torch.Tensor:
        # A raw lock: waiting for it ends at once with Ctrl-C, and leaves nothing behind.
        gate = threading.Lock()
        gate.acquire()

        def wake() -> bool:
            if gate.locked():
                gate.release()
            return True

        waiter = self._start(wake)
        try:
            self._pool._enqueue(waiter)
            patience = _Patience(self._timeout)
            while not gate.acquire(timeout=patience.slice_s()):
                if patience.is_over:
                    raise self._timed_out()
                self._pool._look(patience.waited_s)
            return self._pool._tensor(waiter)
        except BaseException:
            self._pool._withdraw(waiter)
            raise

    def __exit__(self, *_: object) -> None:
        if self._waiter is not None:
            try:
                self._pool._withdraw(self._waiter)
            except BaseException:  # Ctrl-C
                self._pool._withdraw(self._waiter)
                raise

    async def __aenter__(self) -> torch.Tensor:
        served = running_loop().create_future()
        # Weak: the loop keeps the waiter, by the timer of its patience. A strong reference to a
        # closed loop's waiter might keep the task that has the bytes.
        reached = weakref.ref(served)
        waiter = self._start(lambda: _wake(reached))
        try:
            self._pool._enqueue(waiter)
            patience = _Patience(self._timeout)
            while not served.done():
                await asyncio.wait((served,), timeout=patience.slice_s())
                if not served.done():
                    if patience.is_over:
                        raise self._timed_out()
                    self._pool._look(patience.waited_s)
            return self._pool._tensor(waiter)
        except BaseException:
            self._pool._withdraw(waiter)
            raise

    async def __aexit__(self, *_: object) -> None:
        self.__exit__()

    def _start(self, wake: Callable[[], bool]) -> Waiter:
        if self._waiter is not None:
            raise RuntimeError("a lease is entered once: call pool.take() again")
        self._waiter = Waiter(self._nbytes, wake, weakref.ref(self, self._pool._queue.died.put))
        return self._waiter

    def _timed_out(self) -> TimeoutError:
        return TimeoutError(
            f"{self._nbytes} bytes were not free within {self._timeout} s: {self._pool!r}"
        )

    @property
    def nbytes(self) -> int:
        """Bytes asked for."""
        return self._nbytes

    def __del__(self, warn: Callable[..., None] = warnings.warn) -> None:
        # The bytes come back when their tensor is gone as well.
        waiter = getattr(self, "_waiter", None)
        if waiter is not None and waiter.start is not None and not self._pool.closed:
            warn(f"{self!r} was dropped, not left", ResourceWarning, stacklevel=2, source=self)

    def __repr__(self) -> str:
        waiter = self._waiter
        if waiter is None:
            state = "not entered"
        else:
            state = "held" if waiter.start is not None else "waiting or left"
        return f"<Lease of {self._nbytes} bytes, {state}>"


class _Patience:
    """How long somebody waits, in slices."""

    def __init__(self, timeout: float | None) -> None:
        self._began_s = time.monotonic()
        self._timeout = timeout

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self._began_s

    @property
    def is_over(self) -> bool:
        return self._timeout is not None and self.waited_s >= self._timeout

    def slice_s(self) -> float:
        if self._timeout is None:
            return _SLICE_S
        return min(_SLICE_S, max(self._timeout - self.waited_s, 0.0))


def _wake(reached: weakref.ref[asyncio.Future[None]]) -> bool:
    served = reached()
    return served is not None and resolve(served.get_loop(), served)

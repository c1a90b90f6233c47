"""The life of operations: started, in flight, claimed, settled; and who notices.

A completion is noticed by whoever watches the completion queue at which it arrives
(`_completions`). An operation started on a running event loop reports at that loop's queue. One
started with no loop reports at the default queue, where nobody watches: `result`, `done` and `wait`
look at the operation itself. Only when somebody asks to be told does it move to a loop's queue (an
await), or does a thread begin to watch the default queue (a callback).

Whoever notices first claims the operation, and only the claimer concludes it, so every operation
is settled exactly once.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import errno
import itertools
import logging
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from typing import Any

from nvmeio import _transfer, files
from nvmeio._completions import CompletionQueues
from nvmeio._loops import in_a_thread
from nvmeio._plan import Plan
from nvmeio._tensor import Memory, touch
from nvmeio.engines.base import CompletionQueue, Counters, Engine, Opcode, Transfer
from nvmeio.errors import ClosedError, TransferError
from nvmeio.files import Descriptors, File
from nvmeio.operation import Operation

logger = logging.getLogger("nvmeio")

Planner = Callable[[Opcode, Memory, Descriptors, int], tuple[Plan, Transfer]]

# A blocked thread looks up this often, so that Ctrl-C is served.
_SLICE_S = 0.1
# Without a loop nobody reaps; a submission in so many does it in passing.
_REAP_EVERY = 64
_HANDED_ON = -1  # claimed by no thread in particular
_FORKED = "this process was forked from the handle's owner: open a new handle here"
_CLOSED = "the handle is closed: open a new one"


class Core:
    """What an `AioHandle` and its operations share; outlives the handle while one is in flight.

    Args:
        engine: Is started, and this core's alone.
        planner: Makes the transfer that the engine is given.
        below: The core whose engine this one's works through; it has to be closed later.
    """

    def __init__(
        self, engine: Engine, planner: Planner = _transfer.plan, below: Core | None = None
    ) -> None:
        self.engine = engine
        self.below = below
        self._planner = planner
        self._lock = threading.RLock()  # the collector may run `__del__` while it is held
        self._condition = threading.Condition(self._lock)
        self._sleepers = 0
        self._refusal = ""  # why no operation is accepted any more
        self._shut = False
        self._live: dict[int, Operation] = {}
        self._failed: dict[int, Operation] = {}  # whose error nobody has seen yet
        self._finished = 0
        self._unissued = Counters()  # what the engine's counters lack, or have too much
        self._tokens = itertools.count(1)
        self._completions = CompletionQueues(engine, self.reap, self._adopt)
        self._finisher: concurrent.futures.ThreadPoolExecutor | None = None
        _unreleased.add(self)

    # --- starting -----------------------------------------------------------------------------

    def start(
        self,
        opcode: Opcode,
        memory: Memory,
        file: str | os.PathLike[str] | int | File,
        file_offset: int,
        check: Callable[[], None] | None = None,
    ) -> Operation:
        """Start a read or write; failures of the open are the operation's, not the call's.

        `check` runs after success, off the event loop; what it raises is the operation's error.
        """
        opened: Descriptors | None = None
        try:
            opened = files.acquire(file, opcode is Opcode.WRITE)
            planned, transfer = self._planner(opcode, memory, opened, file_offset)
        except BaseException as failed:
            if opened is not None:
                opened.release()
            if isinstance(failed, TransferError):
                return self._failed_at_once(opcode, memory, failed, file_offset)
            memory.end()
            raise
        operation = Operation(
            self, next(self._tokens), opcode, memory, opened.path, file_offset, memory.nbytes
        )
        operation._check = check
        return self._submit(operation, opened, planned, transfer)

    def start_sync(self, opcode: Opcode, opened: Descriptors) -> Operation:
        """Start an fsync or fdatasync; takes over the caller's use of `opened`."""
        operation = Operation(self, next(self._tokens), opcode, None, opened.path, 0, 0)
        return self._submit(operation, opened, *_transfer.plan_sync(opcode, opened))

    def _submit(
        self, operation: Operation, opened: Descriptors, plan: Plan, transfer: Transfer
    ) -> Operation:
        operation._opened = opened
        operation._plan = plan
        token = operation._token
        try:
            operation._home = cq = self._completions.here()
            operation._request = request = self.engine.prepare(cq, token, transfer)
            with self._lock:
                self.check_open()
                self._live[token] = operation
            request.start()
        except BaseException:
            self._withdraw(operation)
            raise
        if cq is self._completions.default and not token % _REAP_EVERY:
            self.reap(cq, True)
        return operation

    def _withdraw(self, operation: Operation) -> None:
        """The start failed or was interrupted; one that has begun after all goes on."""
        request = operation._request
        if request is not None and request.started():
            return
        with self._lock:
            self._live.pop(operation._token, None)
        if operation._opened is not None:
            operation._opened.release()
        if operation._memory is not None:
            operation._memory.end()

    def _failed_at_once(
        self, opcode: Opcode, memory: Memory | None, failed: TransferError, file_offset: int
    ) -> Operation:
        nbytes = memory.nbytes if memory else 0
        operation = Operation(
            self, next(self._tokens), opcode, memory, failed.path, file_offset, nbytes
        )
        operation._claimed = threading.get_ident()
        with self._lock:
            self._live[operation._token] = operation
            self._count(operations=1, errors=1)
        operation._settle("failed", failed)
        return operation

    def _count(self, **more: int) -> None:
        counted = self._unissued
        self._unissued = counted._replace(**{k: getattr(counted, k) + n for k, n in more.items()})

    # --- noticing and concluding --------------------------------------------------------------

    def reap(self, cq: CompletionQueue, may_block: bool) -> None:
        """Conclude what has arrived at a queue; without `may_block`, long work is handed on."""
        tokens = cq.reap()
        if not tokens:
            return
        claimed = []
        with self._lock:
            for token in tokens:
                operation = self._live.get(token)
                if operation is not None and not operation._claimed:
                    operation._claimed = threading.get_ident()
                    claimed.append(operation)
        interrupt: BaseException | None = None
        for operation in claimed:
            try:
                self._conclude(operation, may_block)
            except Exception as failed:  # torch's, say: this operation's error, not the others'
                operation._settle("failed", failed)
            except BaseException as failed:  # Ctrl-C: not before all of them are concluded
                interrupt = failed
                if operation._state == "pending":
                    self._conclude(operation, may_block)
        if interrupt is not None:
            raise interrupt

    def poll(self, operation: Operation) -> None:
        """Conclude an operation here and now if the kernel is done with it."""
        if self._refusal is _FORKED:
            raise ClosedError(_FORKED)
        request = operation._request
        if request is not None and request.wait(0.0) and self._claim(operation):
            self._conclude(operation, asyncio._get_running_loop() is None)

    def _claim(self, operation: Operation) -> bool:
        with self._lock:
            # One's own claim is what an interrupt (Ctrl-C) has left of it: begin again.
            if operation._claimed not in (0, threading.get_ident()):
                return False
            operation._claimed = threading.get_ident()
            return True

    def _conclude(self, operation: Operation, may_block: bool) -> None:
        """What follows when the kernel is done with an operation; its claimer's to call."""
        request = operation._request
        assert request is not None
        moved = request.moved()
        code = -moved if moved < 0 else 0
        if code == errno.EINVAL and self._demoted(operation):
            return
        memory = operation._memory
        if memory is not None and memory.changed is not None:
            touch(memory.changed)  # however it ended: some bytes may have arrived
        if code == errno.ECANCELED:
            operation._settle("cancelled", None)
        elif code == errno.EINVAL and operation._opcode >= Opcode.FSYNC:
            # IOCB_CMD_FSYNC came with Linux 4.18.
            self._off_loop(operation, may_block, self._fsync_here)
        elif moved != operation.nbytes:
            operation._settle("failed", operation._failure())
        elif operation._check is not None or (memory is not None and memory.copy_back is not None):
            self._off_loop(operation, may_block, self._last_steps)
        else:
            operation._settle("finished", None)

    def _demoted(self, operation: Operation) -> bool:
        """Refused as direct I/O: once more, through the page cache, and so from now on."""
        plan, opened, memory = operation._plan, operation._opened, operation._memory
        if plan is None or opened is None or memory is None or not plan.direct:
            return False
        try:
            operation._plan, transfer = _transfer.plan_buffered(
                operation._opcode, memory, opened, operation.file_offset
            )
        except TransferError:
            return False
        logger.warning("%s refused direct I/O (EINVAL): buffered instead", operation.path)
        assert operation._request is not None
        refused = operation._request.outcome()
        moved = "bytes_read" if operation._opcode is Opcode.READ else "bytes_written"
        with self._lock:
            self._count(
                operations=-1,
                errors=-1,
                direct_bytes=-refused.direct_bytes,
                bounced_bytes=-refused.bounced_bytes,
                buffered_bytes=-refused.buffered_bytes,
                **{moved: -refused.transferred},
            )
            operation._claimed = 0
            assert operation._home is not None
            operation._request = self.engine.prepare(operation._home, operation._token, transfer)
            operation._request.start()
        return True

    def _off_loop(
        self, operation: Operation, may_block: bool, step: Callable[[Operation], None]
    ) -> None:
        """Run a last step that may take long, and settle with what comes of it."""

        def run() -> None:
            error: BaseException | None = None
            try:
                step(operation)
            except BaseException as failed:
                error = failed
            operation._settle("failed" if error else "finished", error)

        if may_block:
            run()
            return
        with self._lock:
            operation._claimed = _HANDED_ON
            if self._finisher is None:
                self._finisher = concurrent.futures.ThreadPoolExecutor(1, "nvmeio-finish")
        self._finisher.submit(run)

    @staticmethod
    def _last_steps(operation: Operation) -> None:
        memory = operation._memory
        if memory is not None and memory.copy_back is not None:
            operation._telling(memory.copy_back)
        if operation._check is not None:
            operation._check()

    @staticmethod
    def _fsync_here(operation: Operation) -> None:
        assert operation._opened is not None
        fd = operation._opened.any_fd()
        try:
            (os.fsync if operation._opcode is Opcode.FSYNC else os.fdatasync)(fd)
        except OSError as failed:
            raise TransferError(
                failed.errno or errno.EIO, operation="fsync", path=operation.path
            ) from failed

    # --- for operations -----------------------------------------------------------------------

    def settled(
        self, operation: Operation, state: str
    ) -> tuple[Iterable[Any], Iterable[Callable[[Operation], object]]]:
        """Strike an operation off the list; who is to be told."""
        with self._lock:
            operation._state = state
            self._live.pop(operation._token, None)
            self._finished += 1
            if state == "failed":
                self._failed[operation._token] = operation
            waiters, callbacks = operation._waiters or (), operation._callbacks or ()
            operation._waiters = operation._callbacks = None
            if self._sleepers:
                self._condition.notify_all()
        return waiters, callbacks

    def retrieved(self, operation: Operation) -> None:
        """Somebody has seen the operation's error; `wait` need not raise it again."""
        if self._failed:
            self._failed.pop(operation._token, None)

    def watch(self, operation: Operation, loop: asyncio.AbstractEventLoop) -> asyncio.Future[None]:
        """A future of this (running) loop that is resolved when the operation is settled."""
        if self._refusal is _FORKED:
            raise ClosedError(_FORKED)
        waiter = loop.create_future()
        cq = self._completions.of(loop)
        with self._lock:
            if operation._state != "pending":
                waiter.set_result(None)
                return waiter
            lonely = not operation._waiters and not operation._callbacks
            if operation._waiters is None:
                operation._waiters = [(loop, waiter)]
            else:
                operation._waiters.append((loop, waiter))
            if operation._home is cq:
                return waiter
            default = self._completions.default
            target = cq if lonely and operation._home is default else default
            self._move(operation, target)
        if target is default:
            self._completions.dispatch()
        return waiter

    def on_settled(
        self,
        operation: Operation,
        callback: Callable[[Operation], object],
        anywhere: bool = False,
    ) -> bool:
        """Have a pending operation call back; False if it is settled already.

        With `anywhere`, no event loop is relied on to notice the end.
        """
        if self._refusal is _FORKED:
            raise ClosedError(_FORKED)
        with self._lock:
            if operation._state != "pending":
                return False
            if operation._callbacks is None:
                operation._callbacks = []
            operation._callbacks.append(callback)
            if anywhere and operation._home is not self._completions.default:
                self._move(operation, self._completions.default)
            nobody_watches = operation._home is self._completions.default
        if nobody_watches:
            self._completions.dispatch()
        return True

    def wait_settled(self, operation: Operation, deadline: float | None) -> bool:
        """Block until an operation is settled, concluding it here if nobody else does."""
        self.poll(operation)
        while operation._state == "pending":
            if self._refusal is _FORKED:
                raise ClosedError(_FORKED)
            patience = _SLICE_S
            if deadline is not None:
                patience = min(patience, deadline - time.monotonic())
                if patience <= 0:
                    return False
            request = operation._request
            if operation._claimed in (0, threading.get_ident()):
                if request is not None and request.wait(patience) and self._claim(operation):
                    self._conclude(operation, True)
            else:
                with self._condition:
                    self._sleepers += 1
                    if operation._state == "pending":
                        self._condition.wait(patience)
                    self._sleepers -= 1
        return True

    def _move(self, operation: Operation, cq: CompletionQueue) -> None:
        """With the lock held: report an unsettled operation at this completion queue."""
        operation._home = cq
        if operation._request is not None:
            operation._request.move(cq)

    def _adopt(self, cq: CompletionQueue) -> None:
        """A loop was closed with its queue: what was to report there reports at the default."""
        with self._lock:
            orphans = [o for o in self._live.values() if o._home is cq]
            for operation in orphans:
                self._move(operation, self._completions.default)
        if orphans:
            warnings.warn(
                f"an event loop was closed with {len(orphans)} operations in flight, e.g. "
                f"{orphans[0]!r}; await them (or handle.drain()) before the loop ends",
                ResourceWarning,
                stacklevel=6,
            )
        self.reap(self._completions.default, False)

    # --- waiting for all ------------------------------------------------------------------------

    def wait_for_live(self, deadline: float | None) -> None:
        """Block until nothing is in flight, whatever became of it."""
        if self._refusal is _FORKED:
            raise ClosedError(_FORKED)
        while (operation := self._any_live()) is not None:
            if not self.wait_settled(operation, deadline):
                raise concurrent.futures.TimeoutError(
                    f"{len(self._live)} operations are still in flight, e.g. {operation!r}"
                )

    async def writes_to(self, inode: tuple[int, int]) -> None:
        """Await the writes to a file that have been started up to now."""
        loop = asyncio.get_running_loop()
        for operation in self._live_writes(inode):
            await self.watch(operation, loop)

    def wait_for_writes_to(self, inode: tuple[int, int]) -> None:
        """`writes_to`, blocking."""
        for operation in self._live_writes(inode):
            self.wait_settled(operation, None)

    def _live_writes(self, inode: tuple[int, int]) -> list[Operation]:
        with self._lock:
            return [
                operation
                for operation in self._live.values()
                if operation._opcode is Opcode.WRITE
                and (opened := operation._opened) is not None
                and opened.inode == inode
            ]

    async def settle_live(self) -> None:
        """`wait_for_live`, awaited."""
        loop = asyncio.get_running_loop()
        while (operation := self._any_live()) is not None:
            await self.watch(operation, loop)

    def _any_live(self) -> Operation | None:
        with self._lock:
            while self._live:
                operation = next(iter(self._live.values()))
                if operation._state == "pending":
                    return operation
                self._live.pop(operation._token)  # interrupted half way through `settled`
        return None

    def take(self) -> tuple[int, list[BaseException]]:
        """How many have finished since the last call, and the errors that nobody has seen."""
        if self._refusal is _FORKED:
            return 0, []
        with self._lock:
            finished, self._finished = self._finished, 0
            failed, self._failed = self._failed, {}
        return finished, [o._error for o in failed.values() if o._error is not None]

    # --- closing --------------------------------------------------------------------------------

    def check_open(self) -> None:
        """Raise `ClosedError` once operations are refused."""
        if self._refusal:
            raise ClosedError(self._refusal)

    def refuse(self, reason: str = _CLOSED) -> None:
        """Accept no operation from now on."""
        with self._lock:
            self._refusal = self._refusal or reason

    def close(self) -> None:
        """Refuse, drain, release; failures that nobody has seen are left to `take`."""
        if self._refusal is _FORKED:
            return
        self.refuse()
        self.wait_for_live(None)
        self._release()
        self.engine.join()

    async def aclose(self) -> None:
        """`close` without blocking the loop."""
        if self._refusal is _FORKED:
            return
        self.refuse()
        await self.settle_live()
        self._release()
        await in_a_thread(self.engine.join)

    def abandon(self) -> None:
        """The handle was dropped: finish what is in flight in the background, below last."""
        cores: list[Core] = [self]
        while (below := cores[-1].below) is not None:
            cores.append(below)
        if all(core._refusal for core in cores):
            return
        for core in cores:
            core.refuse()
        if not any(core._live for core in cores):
            for core in cores:
                core._release()
            return

        def close() -> None:
            for core in cores:
                core._close_quietly()

        threading.Thread(target=close, name="nvmeio-close", daemon=True).start()

    def _close_quietly(self) -> None:
        self.close()
        for failed in self.take()[1]:
            logger.error("an operation of a dropped handle failed: %s", failed)

    def _release(self) -> None:
        with self._lock:
            if self._shut:
                return
            self._shut = True
            finisher = self._finisher
        if finisher is not None:
            finisher.shutdown(wait=False)
        self.engine.stop()
        self._completions.release()
        _unreleased.discard(self)

    @property
    def closed(self) -> bool:
        return bool(self._refusal)

    @property
    def in_flight(self) -> int:
        return len(self._live)

    def counters(self) -> Counters:
        """The engine's counters, corrected for what it never saw and what was done twice."""
        with self._lock:
            pairs = zip(self.engine.counters(), self._unissued, strict=True)
            return Counters(*(sum(pair) for pair in pairs))._replace(in_flight=len(self._live))

    # --- fork and exit --------------------------------------------------------------------------

    def _after_fork(self) -> None:
        # Locks may have been copied while held, lanes do not exist here: only refuse.
        self._lock = threading.RLock()  # the collector may run `__del__` while it is held
        self._condition = threading.Condition(self._lock)
        self._completions.after_fork()
        self._refusal = _FORKED

    def _at_exit(self) -> None:
        if self._refusal is _FORKED:
            return
        try:
            if self._live:
                warnings.warn(
                    f"the interpreter exits with {len(self._live)} operations in flight, waiting "
                    "for them; close the handle (or use it in a with statement)",
                    ResourceWarning,
                    stacklevel=2,
                )
        finally:  # warnings may be errors
            # Idle ones too: the interpreter freezes daemon threads, with whatever lock they hold.
            self._close_quietly()


# Strong references. In a cycle, the collector finalises the shim's objects together with the handle
# whose `__del__` hands them on; what is reachable from here it leaves alone until it is released.
_unreleased: set[Core] = set()


def _after_fork_in_child() -> None:
    for core in list(_unreleased):
        core._after_fork()


def _at_exit() -> None:
    # What works through another core's engine comes first.
    for core in sorted(_unreleased, key=lambda core: core.below is None):
        core._at_exit()


os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(_at_exit)

"""The engine: blocking cuFile calls in threads of its own, which release the GIL.

A transfer is cut into tasks (8 MiB by default) at multiples of the task size in the *file*, so two
tasks never share a block of it. The threads take tasks of all transfers in turn. A write's head and
tail that are not aligned do not go through cuFile, which would read the block, change it and write
it back over a neighbour's bytes: they are copied to the host and written through the page cache.

- Memory of a device is touched only once the caller's stream has got there (`Memory.ready`).
- A call that does not come back within `call_limit_s` fails its transfer with ETIMEDOUT. The thread
  is left in it, the memory and the file stay alive until it returns, and the driver is not closed
  below it. Once every thread is lost that way, what is queued fails too: nothing hangs, exits
  included.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from nvmeio._bindings import lib
from nvmeio._memory import holds
from nvmeio._memory.devices import Copier, Copy
from nvmeio._pages import PAGE_BYTES
from nvmeio._threads import shutdown
from nvmeio._threads.closing import members
from nvmeio._threads.threads import Thread
from nvmeio.engines._queued import DeviceRequest, QueuedEngine
from nvmeio.engines.base import CompletionQueue, DeviceTransfer, Opcode, Options, Request, Transfer
from nvmeio.engines.cufile.driver import DRIVER, DriverSettings
from nvmeio.engines.cufile.library import CuFileFailure, Library
from nvmeio.engines.cufile.registry import REGIONS, Files, RegisteredRegion
from nvmeio.errors import TransferError, errno_of

logger = logging.getLogger("nvmeio")

TASK_BYTES = 8 << 20  # the middle of the 4 to 16 MiB that are recommended; not measured on a GPU
CALL_LIMIT_S = 60.0  # a task of 16 MiB at 0.3 MB/s: what takes longer is taken to hang
EXIT_LIMIT_S = 5.0  # the limit for running calls when the interpreter exits

_LOOK_S = (0.0001, 0.001)  # how often a stream that is not there yet is asked: at first, at most
_WATCH_S = 0.25  # how often running calls are looked at, at most


class CuFileRequest(DeviceRequest):
    """A request with its remaining bytes."""

    def __init__(
        self, engine: QueuedEngine[Any], token: int, transfer: Transfer, cq: CompletionQueue
    ) -> None:
        super().__init__(engine, token, transfer, cq)
        span_start, span_end = transfer.span_start, transfer.span_end
        end = transfer.file_offset + transfer.nbytes
        if transfer.opcode == Opcode.READ:  # not the aligned span around it: cuFile takes any
            span_start, span_end = transfer.file_offset, end
        self.next = span_start
        self.end = span_end
        # A write's head and tail, in the file.
        self.edges = [
            (first, last)
            for first, last in ((transfer.file_offset, span_start), (span_end, end))
            if first < last
        ]
        self.region: RegisteredRegion | None = None
        self.lost = False  # given up with a call under way, which keeps memory and file
        self.held: Any = None  # then, on the memory's storage

    @property
    def exhausted(self) -> bool:
        """Whether no further task of it is to be begun."""
        return self.stop or (self.next >= self.end and not self.edges)

    def cut(self, task_bytes: int) -> CuFileTask:
        """The next task of it, with the engine's condition held."""
        if self.edges:
            return CuFileTask(self, *self.edges.pop(), True)
        start = self.next
        end = min((start // task_bytes + 1) * task_bytes, self.end)
        self.next = end
        return CuFileTask(self, start, end, False)


@dataclass(eq=False)
class CuFileTask:
    """File range [start, end) of a request; an edge goes through the host."""

    request: CuFileRequest
    start: int
    end: int
    edge: bool


@dataclass(eq=False)
class TaskMover:
    """Moves tasks, in whatever thread calls it; without the engine's condition held.

    Args:
        library: cuFile, with its driver open.
        files: The files that cuFile knows.
        copier: The device's copies, for the edges of writes and for contexts.
        condition: The engine's, which guards its requests.
        mode: Which way bytes go at best, as `GdsHandle.mode` says it.
    """

    library: Library
    files: Files
    copier: Copier
    condition: threading.Condition
    mode: str

    def run(self, task: CuFileTask) -> None:
        """Move a task's bytes; failures are the request's."""
        request = task.request
        memory = request.transfer.memory
        try:
            if request.stop:
                return
            if memory.device is not None:
                self.copier.enter(memory.device.device)
            if task.edge:
                self._write_edge(task)
            else:
                self._move(task)
        except OSError as failed:
            request.fail(errno_of(failed), failed if isinstance(failed, TransferError) else None)
        except Exception as failed:  # cuFile's have an errno
            request.fail(getattr(failed, "errno", errno.EIO), failed)

    def _move(self, task: CuFileTask) -> None:
        request, transfer = task.request, task.request.transfer
        fd = transfer.direct_fd if transfer.direct_fd >= 0 else transfer.buffered_fd
        handle = self.files.handle(self.library, transfer.opened, fd)
        memory = transfer.address - transfer.file_offset  # plus the offset in the file
        base = self._base(request)
        move = self.library.read if transfer.opcode == Opcode.READ else self.library.write
        at = task.start
        if transfer.opcode == Opcode.READ and transfer.memory.device is None:
            lib.nv_give_up(memory + at, task.end - at)
        while at < task.end and not request.stop:
            address = memory + at
            start = address if base is None else base
            moved = move(handle, start, task.end - at, at, address - start)
            if moved > task.end - at:
                raise CuFileFailure(errno.EIO, f"cuFile moved {moved} bytes of {task.end - at}")
            self._count(task, moved)
            at += moved
            if moved:
                continue
            if transfer.opcode == Opcode.WRITE:
                raise CuFileFailure(errno.EIO, "cuFileWrite moved nothing and reported no error")
            size = os.fstat(fd).st_size
            if at < size:
                # Seen where libcuda is broken: no bytes, and no error either.
                raise CuFileFailure(
                    errno.EIO, f"cuFileRead moved nothing at byte {at} of a file of {size}"
                )
            with self.condition:
                request.next = request.end  # the file ends here: nothing lies behind
            return

    @staticmethod
    def _base(request: CuFileRequest) -> int | None:
        """The address that names memory: its registration's base; None for each call's own.

        Registered memory counts as such only by its base. But of host memory cuFile (1.20) looks
        at the base's alignment alone: with an aligned base and an odd offset it hands the kernel
        a misaligned direct transfer, and answers the kernel's EINVAL with -1 and a stale errno.
        """
        region = request.region
        return None if region is None or request.transfer.memory.device is None else region.base

    def _write_edge(self, task: CuFileTask) -> None:
        transfer = task.request.transfer
        start = task.start - transfer.file_offset
        data = self._host_bytes(transfer, start, task.end - task.start)
        done = 0
        while done < len(data):
            done += os.pwrite(transfer.opened.buffered_fd(), data[done:], task.start + done)
        with self.condition:
            if not task.request.done:
                task.request.buffered += done

    def _host_bytes(self, transfer: DeviceTransfer, start: int, nbytes: int) -> bytes:
        device = transfer.memory.device
        if device is None:
            return transfer.memory.read(start, nbytes)
        chunk = torch.empty(nbytes, dtype=torch.uint8)
        self.copier.download(Copy(device, start, chunk, 0, nbytes)).wait()
        return ctypes.string_at(chunk.data_ptr(), nbytes)

    def _count(self, task: CuFileTask, moved: int) -> None:
        request, transfer = task.request, task.request.transfer
        address = transfer.address + task.start - transfer.file_offset
        aligned = not any(n % PAGE_BYTES for n in (task.start, task.end, address))
        with self.condition:
            if request.done:
                return  # given up; a later result is ignored
            if self.mode in ("gds", "p2p") and transfer.direct_fd >= 0 and aligned:
                request.direct += moved
            elif transfer.direct_fd >= 0:
                request.bounced += moved
            else:
                request.buffered += moved


class CuFileEngine(QueuedEngine[CuFileRequest]):
    """Moves device memory (or host memory, where that is asked for) through cuFile.

    Args:
        copier: The device's copies, for the edges of writes and for contexts.
        settings: The settings that the driver is opened with.
        task_bytes: The most bytes that one call moves; a multiple of 4096.
        call_limit_s: How long a call may take before it counts as hanging.
    """

    name = "cufile"

    def __init__(
        self,
        copier: Copier,
        settings: DriverSettings,
        task_bytes: int = TASK_BYTES,
        call_limit_s: float = CALL_LIMIT_S,
    ) -> None:
        super().__init__()
        self._copier = copier
        self.settings = settings
        self.task_bytes = task_bytes
        self.call_limit_s = call_limit_s
        self._driver = DRIVER
        self._library: Library | None = None
        self._turns: deque[CuFileRequest] = deque()
        self._workers: list[_Worker] = []
        self._watch: Thread | None = None
        self._looking = False
        self._busy = threading.Event()  # the watch has something to look at
        self._over = threading.Event()
        self._pid = os.getpid()
        self.mode = ""

    # --- the contract ---------------------------------------------------------------------

    def start(self, options: Options) -> None:
        """Open the driver if this is its first user, and start the threads.

        Raises:
            BackendUnavailableError: cuFile cannot be used here.
        """
        if self._library is not None:
            raise RuntimeError("this engine was started before: one engine serves one handle")
        self._library = self._driver.acquire(self.settings)
        self.mode = self._driver.mode(self.settings)
        files = self._driver.files
        mover = TaskMover(self._library, files, self._copier, self.condition, self.mode)
        watch = Thread(self._watch_calls, "nvmeio-cufile-watch")
        try:
            for index in range(options.intra_op_parallelism):
                worker = _Worker(self, mover, index)
                worker.thread.start()
                self._workers.append(worker)
            watch.start()
        except BaseException:  # no more threads in this process
            self.stop()
            for worker in self._workers:
                worker.thread.join()
            self._driver.release()
            raise
        self._watch = watch
        _running.add(self)

    def prepare(self, cq: CompletionQueue, token: int, transfer: Transfer) -> Request:
        """A request; from its start on, its memory cannot be unregistered."""
        return CuFileRequest(self, token, transfer, cq)

    def enqueue(self, request: CuFileRequest) -> None:
        if not request.begun:
            request.region = REGIONS.use(request.transfer.address, request.transfer.nbytes)
        super().enqueue(request)
        self._busy.set()

    def _admit(self) -> None:
        """With the condition held: queue arrived requests."""
        for request in self.admitted():
            if self._all_lost():
                request.fail(errno.ETIMEDOUT, _hanging("an earlier call"))
            if request.exhausted:
                self._end(request)
            else:
                self._turns.append(request)

    def join(self) -> None:
        """Wait for the threads, but for those whose call hangs, and for the driver's close."""
        if self._watch is not None:
            self._watch.join()

    def _is_over(self) -> bool:
        """With the condition held: nothing is left to do, but for calls that hang."""
        if not self.stopping or self.in_flight or self.arrivals:
            return False
        return all(worker.ended or worker.lost for worker in self._workers)

    def ended(self, worker: _Worker) -> None:
        """A thread has nothing left to do."""
        with self.condition:
            worker.ended = True
            over = self._is_over()
        if over:
            self._over.set()
            self._busy.set()

    def _give_back(self) -> None:
        assert self._library is not None
        REGIONS.disown(self._library, self, any(worker.lost for worker in self._workers))
        self._driver.release()
        _running.discard(self)

    # --- registered memory ------------------------------------------------------------------

    def register(self, address: int, nbytes: int, keep: Any) -> None:
        """Register memory; it is kept alive until it is unregistered.

        Raises:
            ValueError: Part of it is registered already.
            CuFileError: cuFile refused.
        """
        assert self._library is not None
        with _naming(f"{nbytes} bytes of memory"):
            REGIONS.add(self._library, RegisteredRegion(address, nbytes, self, keep))

    def unregister(self, address: int) -> None:
        """Undo `register`.

        Raises:
            ValueError: It is not registered by this engine, or in use.
            CuFileError: cuFile refused.
        """
        assert self._library is not None
        with _naming(f"memory at {address:#x}"):
            REGIONS.remove(self._library, self, address)

    # --- the queue: called with the condition held ------------------------------------------

    def take(self, worker: _Worker) -> CuFileTask | None:
        """The next task for a thread; None when it is to end."""
        look = _LOOK_S[0]
        with self.condition:
            while True:
                self._admit()
                task = self._next_task()
                if task is not None:
                    worker.begin(task)
                    if self._turns:
                        self.condition.notify()
                    return task
                if self.stopping and not self.in_flight:
                    self.condition.notify_all()
                    return None
                if self._turns and not self._looking:
                    # One thread asks the streams that others are waiting for.
                    self._looking = True
                    self.condition.wait(look)
                    self._looking = False
                    look = min(2 * look, _LOOK_S[1])
                else:
                    self.condition.wait()
                    look = _LOOK_S[0]

    def _next_task(self) -> CuFileTask | None:
        for _ in range(len(self._turns)):
            request = self._turns.popleft()
            if not request.exhausted and not request.reached(request.transfer.memory.ready):
                self._turns.append(request)
                continue
            if request.exhausted:  # cancelled, or failed meanwhile
                if not request.parts_out and not request.done:
                    self._end(request)
                continue
            task = request.cut(self.task_bytes)
            request.parts_out += 1
            if not request.exhausted:
                self._turns.append(request)
            return task
        return None

    def done(self, worker: _Worker, task: CuFileTask) -> None:
        """A thread is through with a task."""
        request = task.request
        with self.condition:
            request.parts_out -= 1
            if worker.end():
                self._driver.returned()
            if request.parts_out or not request.exhausted:
                return
            if not request.lost:
                if not request.done:
                    if request in self._turns:
                        self._turns.remove(request)
                    self._end(request)
                return
        # It was told long ago; now nobody touches memory and file any more.
        self._release_region(request)
        opened = request.transfer.opened
        holds.end(request.held)
        request.let_go()
        opened.let_go(request)

    def _end(self, request: CuFileRequest) -> None:
        if not request.lost:
            self._release_region(request)
        self.conclude(request)

    def _release_region(self, request: CuFileRequest) -> None:
        assert self._library is not None
        region, request.region = request.region, None
        REGIONS.release(self._library, region)

    # --- calls that hang ----------------------------------------------------------------------

    def hurry(self) -> None:
        """The interpreter exits: what runs now has little time left."""
        with self.condition:
            self.call_limit_s = min(self.call_limit_s, EXIT_LIMIT_S)

    def _watch_calls(self) -> None:
        """Run until the engine is stopped and all is done; then give everything back."""
        while True:
            self._busy.wait()
            if self._over.wait(min(_WATCH_S, self.call_limit_s / 4)):
                break
            with self.condition:
                if self._all_lost():
                    self._admit()
                if self._is_over():
                    break
                if not (self.in_flight or self.arrivals) and not any(
                    worker.lost for worker in self._workers
                ):
                    self._busy.clear()
                    continue
                now = time.monotonic()
                for worker in self._workers:
                    if worker.overdue(now - self.call_limit_s):
                        self._give_up(worker)
                if self._all_lost():
                    self._fail_queued()
        self._give_back()

    def _give_up(self, worker: _Worker) -> None:
        task = worker.task
        assert task is not None
        request = task.request
        worker.lost = True
        self._driver.hangs(f"a cuFile call has not returned within {self.call_limit_s} s")
        logger.error(
            "a cuFile call on %s has not returned within %s s: its thread is given up",
            request.transfer.opened.path,
            self.call_limit_s,
        )
        request.fail(errno.ETIMEDOUT, _hanging("the call", self.call_limit_s))
        if not request.lost:
            request.lost = True
            # The operation ends its hold on the memory, which the call may still change.
            request.held = holds.hold(request.transfer.memory.keep)
            # The file stays open until the last of its calls is back, if ever.
            request.transfer.opened.share(request)
            if request in self._turns:
                self._turns.remove(request)
            self._end(request)

    def _all_lost(self) -> bool:
        return bool(self._workers) and all(worker.lost for worker in self._workers)

    def _fail_queued(self) -> None:
        while self._turns:
            request = self._turns.popleft()
            request.fail(errno.ETIMEDOUT, _hanging("an earlier call"))
            if not request.done:
                self._end(request)


class _Worker:
    """A thread that calls cuFile, and since when it does."""

    def __init__(self, engine: CuFileEngine, mover: TaskMover, index: int) -> None:
        self.task: CuFileTask | None = None
        self.lost = False
        self.ended = False
        self._since = 0.0
        self._engine = engine
        self._mover = mover
        self.thread = Thread(self._run, f"nvmeio-cufile-{index}")

    def begin(self, task: CuFileTask) -> None:
        """Begin a call; with the condition held."""
        self.task = task
        self._since = time.monotonic()

    def end(self) -> bool:
        """End a call, with the condition held; whether the task had been given up."""
        lost, self.lost, self.task = self.lost, False, None
        return lost

    def overdue(self, since: float) -> bool:
        return self.task is not None and not self.lost and self._since < since

    def _run(self) -> None:
        while (task := self._engine.take(self)) is not None:
            self._mover.run(task)
            self._engine.done(self, task)
            del task  # waiting for the next one, it would keep this one's memory alive
        self._engine.ended(self)


@contextlib.contextmanager
def _naming(memory: str) -> Iterator[None]:
    try:
        yield
    except CuFileFailure as failed:
        raise failed.with_context(operation="register", path=memory) from None


def _hanging(what: str, limit_s: float | None = None) -> CuFileFailure:
    within = "" if limit_s is None else f" within {limit_s} s"
    return CuFileFailure(
        errno.ETIMEDOUT,
        f"{what} of cuFile has not returned{within}; it may still change the memory or the file, "
        "which are kept for it. Look at dmesg and cufile.log, and start a new process",
    )


# Engines in use, so that none keeps the interpreter from exiting.
_running: weakref.WeakSet[CuFileEngine] = weakref.WeakSet()


def _at_exit() -> None:
    for engine in members(_running):
        if engine._pid == os.getpid():  # in a forked child, its locks may be held forever
            engine.hurry()


shutdown.at_exit_first(_at_exit)  # before those steps of owners and cores that wait

"""The portable reference engine: preadv(2) and pwritev(2) in threads, Python only.

It works wherever the system calls do, keeps every promise of the engine contract, and is meant to
be read: a request is cut into blocks, blocks of all requests take turns in a bounded queue, workers
move them. Gathers and scatters are cut by the shim (native_shim/pump/rows.c), and moved here.
`nvmeio.testing.FakeEngine` overrides the steps marked "hook" to inject faults.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from nvmeio._bindings import copy_foreign, ffi, lib, memory_at
from nvmeio._threads.closing import on_error
from nvmeio._threads.threads import Thread
from nvmeio.engines import base
from nvmeio.engines._queued import QueuedEngine, QueuedRequest
from nvmeio.errors import counted, errno_of

WORKERS_PER_LANE = 4
# A queue that refuses everything and has nothing in flight is asked again after this long,
# and given up after this many seconds, as the native lanes do it.
RETRY_S = 0.001
REFUSED_LIMIT_S = 10.0


@dataclass(eq=False)
class Block:
    """A part of a request's span: file range [offset, offset + nbytes)."""

    request: ThreadsRequest
    offset: int
    nbytes: int
    rows: Any = None
    """The shim's `nv_block`, of a gather or scatter."""


class ThreadsRequest(QueuedRequest):
    """A transfer on its way: blocks of [next, end) are still to be issued."""

    engine: ThreadsEngine

    def __init__(
        self, engine: ThreadsEngine, token: int, transfer: base.Transfer, cq: base.CompletionQueue
    ) -> None:
        super().__init__(engine, token, transfer, cq)
        self.next = transfer.span_start
        self.end = transfer.span_end
        self.issued = False


class RowsRequest(ThreadsRequest):
    """A gather or scatter.

    Its first block, of no bytes, is for the worker that sorts the rows; [next, end) is [0, 1) then,
    while the shim has more blocks.
    """

    def __init__(
        self,
        engine: ThreadsEngine,
        token: int,
        transfer: base.Transfer,
        cq: base.CompletionQueue,
        rows: base.Rows,
        raw: Any,
    ) -> None:
        super().__init__(engine, token, transfer, cq)
        self.next, self.end = 0, 1
        self.rows = rows
        self.raw = raw
        self.planned = False
        self.guard = threading.Lock()  # of the shim's account

    def cancel(self) -> None:
        self.cancelled = self.stop = True
        lib.nv_rows_stop(self.raw)  # sorting takes long
        super().cancel()

    def outcome(self) -> base.Outcome:
        return base.with_cause(super().outcome(), self.raw, self.rows)

    def plan(self) -> None:
        """Sort the rows."""
        transfer = self.transfer
        failure = lib.nv_rows_plan(self.raw)
        if failure:
            self.fail(-failure)
        else:
            fd = transfer.direct_fd if transfer.direct_fd >= 0 else transfer.buffered_fd
            lib.nv_rows_preallocate(self.raw, fd)
            self.next = not lib.nv_rows_more(self.raw, 0)
        self.planned = True

    def next_block(self) -> Block:
        """The next one; one of no bytes if there is none."""
        found = ffi.new("nv_block *")
        with self.guard:
            some = lib.nv_rows_next(self.raw, 0, found)
            self.next = not lib.nv_rows_more(self.raw, 0)
        return Block(self, found.offset, found.nbytes, found) if some else Block(self, 0, 0)

    def move_block(self, block: Block, bounce: mmap.mmap) -> None:
        """For a worker: what `ThreadsEngine._move_block` does for others."""
        transfer, found = self.transfer, block.rows
        own = ffi.from_buffer("char[]", bounce, require_writable=True)
        memory = memoryview(bounce)[: block.nbytes]
        if found.address:
            memory = memory_at(found.address, block.nbytes)
        elif transfer.opcode == base.Opcode.WRITE:
            failure = lib.nv_rows_collect(self.raw, found, own)
            if failure:
                self.fail(-failure)
                return
        wanted = lib.nv_rows_wanted(self.raw, found) - block.offset
        done, failure = self.engine.move_all(block, memory, wanted)
        # EINVAL is a file that refuses direct I/O: all of it is done again, without.
        if failure == errno.EINVAL and transfer.direct_fd >= 0:
            self.fail(failure)
        if self.cancelled and transfer.opcode == base.Opcode.READ and not found.address:
            return  # the caller's memory is left alone
        copied_from = ffi.NULL if found.address else own
        with self.guard:
            through = lib.nv_rows_landed(self.raw, 0, found, copied_from, done, failure)
        with self.engine.lock:
            if transfer.direct_fd < 0:
                self.buffered += through
            elif found.address:
                self.direct += through
            else:
                self.bounced += through

    def conclude(self) -> Any:
        """The outcome, from the shim."""
        result = lib.nv_rows_conclude(self.raw, self.error)
        self.error = result.error
        return result


class ThreadsEngine(QueuedEngine[ThreadsRequest]):
    """Blocks moved by `WORKERS_PER_LANE` threads a lane."""

    name = "threads"
    capabilities = base.Capabilities(rows=True, batches=True)

    def __init__(self) -> None:
        super().__init__()
        self._options: base.Options | None = None
        self._turns: deque[ThreadsRequest] = deque()  # requests with blocks to issue, in turn
        self._pending: list[Block] = []  # prepared, not yet accepted by the queue
        self._queue: deque[Block] = deque()  # accepted, waiting for a worker
        self._in_kernel = 0
        self._refused_since = 0.0
        self._workers: list[Thread] = []

    # --- the contract ---------------------------------------------------------------------

    def start(self, options: base.Options) -> None:
        """Start the workers."""
        if self._options is not None:
            raise RuntimeError("this engine was started before: one engine serves one handle")
        self._options = options
        self._depth = options.queue_depth * options.intra_op_parallelism
        with on_error(base.end, self):  # there are no more threads in this process
            for index in range(min(self._depth, WORKERS_PER_LANE * options.intra_op_parallelism)):
                worker = Thread(self._work, f"nvmeio-worker-{index}")
                worker.start()
                self._workers.append(worker)

    def prepare(
        self, cq: base.CompletionQueue, token: int, transfer: base.Transfer
    ) -> base.Request:
        """A request that `start` puts behind the others."""
        return ThreadsRequest(self, token, transfer, cq)

    def prepare_rows(
        self, cq: base.CompletionQueue, token: int, transfer: base.Transfer, rows: base.Rows
    ) -> base.Request:
        """The same for rows."""
        assert self._options is not None
        raw = lib.nv_rows_new(
            transfer.opcode,
            transfer.address,
            *rows,
            self._options.block_size,
            transfer.offset_alignment,
            transfer.memory_alignment,
            transfer.direct_fd >= 0,
            transfer.foreign,
            1,
        )
        if raw == ffi.NULL:
            raise MemoryError(f"no memory to sort {counted(rows.number, 'row')} in")
        raw = ffi.gc(raw, lib.nv_rows_free)
        return RowsRequest(self, token, transfer, cq, rows, raw)

    def nudge(self) -> None:
        """Have a worker look again: one is enough, and if none sleeps, all will look."""
        with self.lock:
            self.condition.notify()

    def join(self) -> None:
        """Wait for the workers."""
        for worker in self._workers:
            worker.join()
        self._workers.clear()

    # --- hooks for fault injection --------------------------------------------------------

    def _accept(self, blocks: list[Block]) -> int:
        """Hook: how many of these the kernel's queue takes now (io_submit's return value)."""
        return len(blocks)

    def _choose(self, queue: deque[Block]) -> Block:
        """Hook: the block that the drive serves next."""
        return queue.popleft()

    def _move(self, block: Block, fd: int, memory: memoryview, offset: int) -> int:
        """Hook: one system call; bytes moved, or an OSError."""
        if block.request.transfer.opcode == base.Opcode.READ:
            lib.nv_give_up(int(ffi.cast("uintptr_t", ffi.from_buffer(memory))), len(memory))
            return os.preadv(fd, [memory], offset)
        return os.pwritev(fd, [memory], offset)

    # --- queue: called with the condition held ----------------------------------------------

    def _refill(self) -> None:
        assert self._options is not None
        self._turns.extend(self.admitted())
        if self._options.overlap_events or not (self._in_kernel or self._pending):
            while self._turns and self._in_kernel + len(self._pending) < self._depth:
                self._prepare(self._turns.popleft())
        for block in [b for b in self._pending if b.request.stop]:
            self._pending.remove(block)
            if self._retire(block):
                self._finish(block.request)
        while self._pending:
            batch = self._pending[:1] if self._options.single_submit else self._pending
            accepted = self._accept(batch)
            self._queue.extend(batch[:accepted])
            self._in_kernel += accepted
            self._pending = self._pending[accepted:]
            self.condition.notify(accepted)
            if accepted:
                self._refused_since = 0.0
            else:
                self._give_up_after_a_while()
                return
        if not self._turns and not self._in_kernel:
            self._refused_since = 0.0  # the next stall has a clock of its own

    def _prepare(self, request: ThreadsRequest) -> None:
        assert self._options is not None
        if request.stop:
            request.next = request.end
        nbytes = min(self._options.block_size, request.end - request.next)
        if request.stop or (request.issued and not nbytes):
            if not request.parts_out:
                self._finish(request)
            return
        if isinstance(request, RowsRequest):
            self._pending.append(request.next_block() if request.planned else Block(request, 0, 0))
            request.issued = True
            request.parts_out += 1
            if request.planned and request.next < request.end:
                self._turns.append(request)
            return
        # An empty span gets one empty block: some worker must write the edges, or call fsync.
        self._pending.append(Block(request, request.next, nbytes))
        request.issued = True
        request.next += nbytes
        request.parts_out += 1
        if request.next < request.end:
            self._turns.append(request)

    def _give_up_after_a_while(self) -> None:
        now = time.monotonic()
        self._refused_since = self._refused_since or now
        if not self._in_kernel and now - self._refused_since > REFUSED_LIMIT_S:
            self._pending[0].request.fail(errno.EAGAIN)

    def _retire(self, block: Block) -> bool:
        """Count a block less; whether it was the request's last."""
        request = block.request
        request.parts_out -= 1
        if request.parts_out or (request.next < request.end and not request.stop):
            return False
        with suppress(ValueError):
            self._turns.remove(request)
        return True

    def _finish(self, request: ThreadsRequest) -> None:
        if isinstance(request, RowsRequest):
            result = request.conclude()
            # Refused as direct I/O, it is done again; the others are counted.
            if request.outcome().error != errno.EINVAL:
                self._counters = self._counters.plus(
                    rows=result.whole, row_blocks=result.blocks, row_bytes_saved=result.saved_bytes
                )
        self.conclude(request)

    # --- workers ----------------------------------------------------------------------------

    def _work(self) -> None:
        assert self._options is not None
        bounce = mmap.mmap(-1, self._options.block_size)  # untouched until used
        while True:
            with self.lock:
                self._refill()
                while not self._queue:
                    if self.stopping and not self.in_flight:
                        return
                    self.condition.wait(RETRY_S if self._pending else None)
                    self._refill()
                block = self._choose(self._queue)
            self._run(block, bounce)
            with self.lock:
                self._in_kernel -= 1
                if isinstance(block.request, RowsRequest):
                    self._go_on(block)
                last = self._retire(block)
            if last:
                self._write_edges(block.request)
                with self.lock:
                    self._finish(block.request)

    def _go_on(self, block: Block) -> None:
        """Queue the blocks of sorted rows, which take turns with others."""
        request = block.request
        if block.rows is None and request.next < request.end and not request.stop:
            self._turns.append(request)
            self.condition.notify()

    def _run(self, block: Block, bounce: mmap.mmap) -> None:
        request, transfer = block.request, block.request.transfer
        try:
            if isinstance(request, RowsRequest):
                if block.rows is not None:
                    request.move_block(block, bounce)
                elif not request.planned:
                    request.plan()
            elif transfer.opcode >= base.Opcode.FSYNC:
                fd = transfer.direct_fd if transfer.direct_fd >= 0 else transfer.buffered_fd
                (os.fsync if transfer.opcode == base.Opcode.FSYNC else os.fdatasync)(fd)
            elif block.nbytes:
                self._move_block(block, bounce)
        except OSError as failed:
            request.fail(errno_of(failed))

    def _move_block(self, block: Block, bounce: mmap.mmap) -> None:
        request, transfer = block.request, block.request.transfer
        user_end = transfer.file_offset + transfer.nbytes
        # [first, last) is the caller's share of the block, the rest is padding to the alignment.
        first = max(block.offset, transfer.file_offset)
        last = min(block.offset + block.nbytes, user_end)
        mine = memory_at(transfer.address + first - transfer.file_offset, last - first)
        direct = transfer.direct_fd >= 0
        bounced = direct and (
            transfer.bounce
            or last - first < block.nbytes
            or (transfer.address + first - transfer.file_offset) % transfer.memory_alignment != 0
        )
        memory = memoryview(bounce)[: block.nbytes] if bounced else mine
        if bounced and transfer.opcode == base.Opcode.WRITE:
            self._copy(transfer, memory, mine)
        done, failure = self.move_all(block, memory, last - block.offset)
        if failure == errno.ENODATA:
            request.end = request.next  # end of file: nothing lies behind
        elif failure:
            request.fail(failure)
        useful = max(0, min(block.offset + done, last) - first)
        if bounced and transfer.opcode == base.Opcode.READ:
            if request.cancelled:
                return  # the caller's memory is left alone
            self._copy(transfer, memory[first - block.offset :][:useful], mine[:useful])
        with self.lock:
            if bounced:
                request.bounced += useful
            elif direct:
                request.direct += useful
            else:
                request.buffered += useful

    @staticmethod
    def _copy(transfer: base.Transfer, bounce: memoryview, mine: memoryview) -> None:
        """Copy between a bounce block and the caller's memory; EFAULT if that is not there."""
        into = transfer.opcode == base.Opcode.READ
        if transfer.foreign:
            address = ctypes.addressof(ctypes.c_char.from_buffer(mine)) if len(mine) else 0
            copy_foreign(bounce, address, len(mine), into)
        elif into:
            mine[:] = bounce
        else:
            bounce[:] = mine

    def move_all(self, block: Block, memory: memoryview, wanted: int) -> tuple[int, int]:
        """Move a block, going on after short transfers.

        Returns:
            Bytes moved, and what kept it from moving all: an errno, ENODATA for the end of a file.
        """
        request, transfer = block.request, block.request.transfer
        fd, unit = transfer.buffered_fd, 1
        if transfer.direct_fd >= 0:
            fd, unit = transfer.direct_fd, transfer.offset_alignment
        done = 0
        while True:
            try:
                moved = self._move(block, fd, memory[done:], block.offset + done)
            except OSError as failed:
                if failed.errno not in (errno.EINTR, errno.EAGAIN):
                    return done, errno_of(failed)
                if not request.stop:
                    continue
                return done, 0
            whole = moved - moved % unit
            if done + moved >= wanted:
                return done + moved, 0
            if not whole or request.stop:
                if transfer.opcode == base.Opcode.WRITE and not request.stop:
                    return done + moved, errno.EIO
                return done + moved, 0 if whole else errno.ENODATA
            done += whole

    def _write_edges(self, request: ThreadsRequest) -> None:
        """A write's head and tail, before and behind its direct span, through the page cache."""
        transfer = request.transfer
        if transfer.opcode != base.Opcode.WRITE:
            return
        if isinstance(request, RowsRequest):
            if not request.stop and lib.nv_rows_has_edges(request.raw):
                written = lib.nv_rows_write_edges(request.raw, transfer.buffered_fd)
                request.buffered += written
            return
        start, end = transfer.file_offset, transfer.file_offset + transfer.nbytes
        for offset, stop in ((start, transfer.span_start), (transfer.span_end, end)):
            while offset < stop and not request.stop:
                memory = memory_at(transfer.address + offset - start, stop - offset)
                try:
                    moved = os.pwritev(transfer.buffered_fd, [memory], offset)
                except OSError as failed:
                    request.fail(errno_of(failed))
                    return
                offset += moved
                request.buffered += moved

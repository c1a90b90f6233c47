"""Read i+1 beside computing i beside writing i-1, over a few slots of memory.

Two threads: one computes and starts the writes, the other reads ahead, so the drive never waits for
the computation to look up. One read is under way at a time, and any number of writes: reads that
share the drive would all end together, late. The next read begins before the last one is verified.
The slots go round through two queues. A single turn has nothing to read ahead of, and takes one
thread. If a device computes, the first thread only starts its work, and a third one begins the
writes as results arrive. Between two runs the slots are filled for the next one, if it is known.

No thread is the main one, so no interrupt comes here (see `Transactions`).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch

from nvmeio import buffers
from nvmeio._io.drives import DriveHandles, FileSpan
from nvmeio._memory import devices
from nvmeio._memory.devices import Mark
from nvmeio._pages import PAGE_BYTES
from nvmeio._threads.closing import on_error
from nvmeio._threads.future import Future
from nvmeio._threads.owner import OwnerThread
from nvmeio.errors import ClosedError, NvmeioError
from nvmeio.handle import AioHandle
from nvmeio.offload._swap_files.subgroups import SlotRun, joined
from nvmeio.operation import Operation
from nvmeio.pool import PinnedPool

# From so many transfers with one handle on they are one operation: a third of the Python.
_BATCH_FROM = 4
BUFFERS = 2  # one is computed in, one comes up or goes down


@dataclass
class Times:
    """The times of a run's parts in seconds, and its bytes.

    On a device `compute_s` is the time that asking for the work took, and waiting for its results
    is a part of `write_wait_s`.
    """

    total_s: float = 0.0
    compute_s: float = 0.0
    read_wait_s: float = 0.0
    write_wait_s: float = 0.0
    read_bytes: int = 0
    written_bytes: int = 0


class SlotTurn(NamedTuple):
    """One turn over a slot: it is read, then `compute` works in it and returns what to write.

    `verify` checks read bytes, beside the computing of the turn before; `seal` sums those being
    being written.
    """

    reads: Sequence[FileSpan]
    compute: Callable[[torch.Tensor], Sequence[FileSpan]]
    verify: Callable[[torch.Tensor], None] | None = None
    seal: Callable[[torch.Tensor], None] | None = None


class Pipeline:
    """Takes turns in order over slots; made once for all runs, with the threads that help it.

    Args:
        handles: Move the bytes.
        read_ahead: Read while computing; False reads when the turn has come.
        write_behind: Write while computing; False waits for each turn's writes.
        helper: Reads ahead; None for none.
        device: Computes the turns of a step in its own memory, with a slot more on the way there
            and back; None for the CPU, in the slots.

    Attributes:
        slots: 1-D uint8 tensors, each large enough for every turn.
    """

    def __init__(
        self,
        handles: DriveHandles,
        read_ahead: bool,
        write_behind: bool,
        helper: OwnerThread | None = None,
        device: DeviceTurns | None = None,
    ) -> None:
        self.slots: list[torch.Tensor] = []
        self.read_bytes = 0
        self.written_bytes = 0
        self._handles = handles
        self._read_ahead = read_ahead
        self._write_behind = write_behind
        self._helper = helper
        self._device = device
        self._writer = None if device is None else new_helper("nvmeio-offload-write")
        self._pool: PinnedPool | None = None
        self._leases = contextlib.ExitStack()
        self._ahead: deque[_Read] = deque()  # for the first turns of the next run
        self._page: torch.Tensor | None = None  # to try the drives with

    # The slots

    def make(self, nbytes: int, most: int) -> None:
        """Have a slot of `nbytes` for each stage, at most `most`; those long enough stay."""
        stages = 1 + self._read_ahead + self._write_behind + (self._device is not None)
        count = min(stages, max(1, most))
        if not nbytes or (len(self.slots) >= count and self.slots[0].nbytes >= nbytes):
            return
        self.free()
        self._pool, self.slots = leased(self._leases, count, nbytes)

    def free(self) -> None:
        self.forget_ahead()
        self.slots, self._pool = [], None
        self._leases.close()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self.free()

    @property
    def pinned(self) -> bool:
        """Whether the slots are page-locked, or there are none."""
        return self._pool is None or self._pool.locked

    # Between runs

    def fill_ahead(self, turns: Iterable[Sequence[FileSpan]]) -> None:
        """Begin the expected reads of the next run's first turns, a slot for each.

        Nothing but runs may change these bytes before then. A run whose turns read something else
        drops what was read. After a failure the run reads again, and raises if that fails too.
        """
        self.forget_ahead()
        if not self._read_ahead:
            return
        with contextlib.suppress(NvmeioError, OSError, MemoryError):
            for slot, reads in zip(self.slots, turns, strict=False):
                operations = started(self._handles, slot, reads, writing=False)
                self._ahead.append(_Read(slot, reads, operations))
                for operation in operations:  # not a failure for the owner of the handle
                    operation._speak_for()

    def forget_ahead(self) -> None:
        """Drop the reads that were begun for the next run; nothing is in flight after."""
        dropped = [*self._ahead]
        self._ahead.clear()
        for each in dropped:
            for operation in each.operations:
                operation.cancel()
        for each in dropped:
            _waited(each.operations)
            self.read_bytes += sum(move.nbytes for move in each.reads)

    def _take_ahead(self, turns: Sequence[SlotTurn]) -> list[_Read]:
        """The reads that were begun for the first of these turns; the rest is dropped."""
        taken: list[_Read] = []
        for turn in turns:
            if not self._ahead:
                break
            reads = self._ahead[0].reads
            if list(turn.reads[: len(reads)]) != list(reads):
                break
            taken.append(self._ahead.popleft())
        self.forget_ahead()
        return taken

    def _try_drives(self, turn: SlotTurn) -> None:
        """Read a page of each file of a turn; raises its error if a drive does not answer.

        Turns whose reads came before the run would be computed although the drive has failed
        since, and what they wrote could not be brought back.
        """
        if self._page is None:
            self._page = buffers.empty_aligned(PAGE_BYTES, dtype=torch.uint8)
        first = {read.file: read for read in reversed(turn.reads)}
        pages = [
            FileSpan(file, read.file_offset, 0, min(read.nbytes, PAGE_BYTES))
            for file, read in first.items()
        ]
        for page in pages:  # they share the memory
            finish(started(self._handles, self._page, [page], writing=False))

    # A run

    def run(
        self,
        turns: Sequence[SlotTurn],
        check: Callable[[], None] | None = None,
        on_device: bool = False,
    ) -> Times:
        """Take all turns in order, each once. After an error nothing is in flight any more.

        `check` is called before each turn is computed, and ends the run by raising. After a
        transfer that failed no turn is computed, and the first such error is raised.
        """
        times, began = Times(), time.perf_counter()
        if not turns:
            self.forget_ahead()
            return times
        if self._device is not None:  # it may still write to the slots
            devices.check_answers(self._device.device)
        ahead = self._take_ahead(turns)
        if ahead:
            with on_error(_wait_for, ahead):
                self._try_drives(turns[min(len(ahead), len(turns) - 1)])
        device = self._device if on_device else None
        helper = self._helper if self._read_ahead and len(turns) > 1 else None
        filled = _Filled(self._handles, self.slots, turns, helper, ahead)
        writer = None if device is None else self._writer
        written: deque[Future[None]] = deque()  # by the writer
        failure: BaseException | None = None
        try:
            for turn in turns:
                start = time.perf_counter()
                slot = filled.next(turn)
                times.read_wait_s += time.perf_counter() - start
                for move in turn.reads:
                    times.read_bytes += move.nbytes
                if check is not None:
                    check()
                start = time.perf_counter()
                if device is None:
                    computed = _Computed(turn, slot, turn.compute(slot))
                else:
                    computed = _asked(device, turn, slot)
                times.compute_s += time.perf_counter() - start
                if writer is None:
                    self._write(computed, filled, times)
                else:
                    written.append(writer.begin(self._write, computed, filled, times))
        except _Stopped:
            pass  # writing failed, which is raised below
        except BaseException:
            filled.stop()
            raise
        finally:
            start = time.perf_counter()
            if writer is not None:
                writer.drain()
            if device is not None:
                device.settle()
            failure = filled.end()
            times.write_wait_s += time.perf_counter() - start
        while writer is not None and written:
            writer.answer(written.popleft())
        if failure is not None:
            try:
                raise failure
            finally:
                del failure  # it and its traceback would keep each other, and the slots
        self.read_bytes += times.read_bytes
        self.written_bytes += times.written_bytes
        times.total_s = time.perf_counter() - began
        return times

    def _write(self, computed: _Computed, filled: _Filled, times: Times) -> None:
        """Begin a turn's writes, and seal the bytes meanwhile; nothing once stopped."""
        if filled.stopped:
            return
        turn, slot, moves, mark = computed
        with on_error(filled.stop):
            if mark is not None:
                mark.wait()
            writes = started(self._handles, slot, moves, writing=True)
            for move in moves:
                times.written_bytes += move.nbytes
            try:
                if turn.seal is not None:
                    turn.seal(slot)
            finally:
                filled.written.put((slot, writes))
        if not self._write_behind:
            times.write_wait_s += _waited(writes)


def leased(
    leases: contextlib.ExitStack, count: int, nbytes: int
) -> tuple[PinnedPool, list[torch.Tensor]]:
    """A pool, and slots of one length that are all of it; closed with `leases`."""
    pool = PinnedPool(count * nbytes)
    leases.callback(pool.close)
    return pool, [leases.enter_context(pool.take(nbytes)) for _ in range(count)]


def new_helper(name: str) -> OwnerThread | None:
    """Start a helper thread; None if no thread can be had."""
    helper = OwnerThread(name)
    try:
        helper.wait_for_start()
    except ClosedError:
        return None
    return helper


class _Computed(NamedTuple):
    """A turn that was computed, or asked of a device, which is done when `mark` is."""

    turn: SlotTurn
    slot: torch.Tensor
    moves: Sequence[FileSpan]
    mark: Mark | None = None


def _asked(device: DeviceTurns, turn: SlotTurn, slot: torch.Tensor) -> _Computed:
    """Ask a device to compute a turn."""
    moves: list[FileSpan] = []

    def compute(memory: torch.Tensor) -> list[SlotRun]:
        moves.extend(turn.compute(memory))
        return [SlotRun(move.start, move.nbytes) for move in moves]

    reads = (SlotRun(move.start, move.nbytes) for move in turn.reads)
    return _Computed(turn, slot, moves, device.begin(slot, reads, compute))


class _Stopped(Exception):
    """A write failed, so no more slots come."""


class _Read(NamedTuple):
    """Reads that have begun, into a slot."""

    slot: torch.Tensor
    reads: Sequence[FileSpan]
    operations: list[Operation]


def _wait_for(reads: Sequence[_Read]) -> None:
    for each in reads:
        _waited(each.operations)


class _Filled:
    """Fills slots with the turns' reads, one after the other; ahead of time with a helper.

    `ahead` has begun for the first turns. `written` are slots whose turn is over, with the writes
    under way in them. Once `stopped`, nothing more is read, and results are not written.
    """

    def __init__(
        self,
        handles: DriveHandles,
        slots: Sequence[torch.Tensor],
        turns: Sequence[SlotTurn],
        helper: OwnerThread | None,
        ahead: Sequence[_Read] = (),
    ) -> None:
        self._handles = handles
        self._begun = deque(ahead)
        taken = {id(each.slot) for each in ahead}
        self._free = deque(slot for slot in slots if id(slot) not in taken)
        self._later = deque(turns[len(ahead) :])  # nothing of them has begun
        self._ended: deque[tuple[torch.Tensor, list[Operation]]] = deque()  # of `written`
        self.written: SimpleQueue[tuple[torch.Tensor, list[Operation]] | None] = SimpleQueue()
        self.stopped = False
        self._helper = helper
        self._ahead: deque[Future[torch.Tensor | None]] = deque()
        if helper is not None:
            with on_error(self.end):  # begun reads would wait forever for a slot
                self._ahead.extend(helper.begin(self._read, turn) for turn in turns)

    def next(self, turn: SlotTurn) -> torch.Tensor:
        """The slot of the next turn, once it is read."""
        if self._helper is None:
            slot = self._read(turn)
        else:
            slot = self._helper.answer(self._ahead.popleft())
        if slot is None:
            raise _Stopped
        return slot

    def stop(self) -> None:
        """Stop reading; from any thread."""
        self.stopped = True
        self.written.put(None)

    def end(self) -> BaseException | None:
        """Wait until nothing is in flight; returns the first failure that nobody was told of."""
        self.stop()
        if self._helper is not None:
            self._helper.drain()
        for unused in self._begun:
            _waited(unused.operations)
        self._begun.clear()
        left = [writes for _, writes in self._ended]
        self._ended.clear()
        while not self.written.empty():
            ended = self.written.get()
            if ended is not None:
                left.append(ended[1])
        failure: BaseException | None = None
        for operation in (each for writes in left for each in writes):
            failed = failure_of(operation)
            failure = failure or failed
        return failure

    def _read(self, turn: SlotTurn) -> torch.Tensor | None:
        """A slot with what the turn reads; None if the run ends."""
        if self.stopped:
            return None
        try:
            if not self._begun and not self._begin_next():
                return None
            slot, begun, operations = self._begun.popleft()
            self._finish(slot, begun, operations, turn)
            if self.stopped:
                return None
            if self._helper is not None and not self._begun and self._has_free():
                self._begin_next()
            if turn.verify is not None:
                turn.verify(slot)
        except BaseException:
            self.stopped = True
            raise
        return slot

    def _finish(
        self,
        slot: torch.Tensor,
        begun: Sequence[FileSpan],
        operations: list[Operation],
        turn: SlotTurn,
    ) -> None:
        """Wait for a turn's read; what was begun before the run may lack some of it, or fail."""
        if begun is turn.reads:
            finish(operations)
            return
        failures = [failed for failed in map(failure_of, operations) if failed is not None]
        rest = turn.reads if failures else turn.reads[len(begun) :]
        finish(started(self._handles, slot, rest, writing=False))

    def _begin_next(self) -> bool:
        """Begin the next read, in the slot whose turn was over first; False if none comes."""
        if not self._later:
            return False
        if self._free:
            slot = self._free.popleft()
        else:
            ended = self._ended.popleft() if self._ended else self.written.get()
            if ended is None:
                return False
            slot = ended[0]
            finish(ended[1])
        if self.stopped:
            return False
        turn = self._later.popleft()
        operations = started(self._handles, slot, turn.reads, writing=False)
        self._begun.append(_Read(slot, turn.reads, operations))
        return True

    def _has_free(self) -> bool:
        """Whether the next read can begin without waiting for a write."""
        if not self._free and not self._ended and not self.written.empty():
            ended = self.written.get()
            if ended is None:
                return False  # stopped
            self._ended.append(ended)
        return bool(self._free) or (
            bool(self._ended) and all(write.done() for write in self._ended[0][1])
        )


class DeviceTurns:
    """Computes on a device with state in host memory: it goes up before, and down after.

    Only streams wait for copies, by events: the caller's stream, on which the optimizer computes,
    for what comes up; copies down for it; and a copy up for the copy down from the same memory.
    There is a stream for each direction, as the bus has two. One thread begins turns; `BUFFERS` of
    them may be on the device at once.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._up = devices.Beside(device, "step up")
        self._down = devices.Beside(device, "step down")
        self._buffers: list[torch.Tensor] = []
        self._used: list[Mark | None] = []
        self._next = 0

    def make(self, nbytes: int, most: int) -> None:
        """Have up to `most` buffers of `nbytes`; those there are stay if they are long enough.

        MemoryError if the device has no room; the memory that it had is given back.
        """
        count = min(BUFFERS, most)
        if not nbytes or (len(self._buffers) >= count and self._buffers[0].nbytes >= nbytes):
            return
        self.free()
        try:
            self._buffers = [self._up.empty(nbytes) for _ in range(count)]
        except torch.OutOfMemoryError as refused:
            self.free()
            raise MemoryError(
                f"{self.device} has no room for {count} buffers of {nbytes} bytes: give a smaller "
                "subgroup_bytes or device_bytes, or make the optimizer before what fills the device"
            ) from refused
        self._used = [None] * count

    def begin(
        self,
        slot: torch.Tensor,
        reads: Iterable[SlotRun],
        compute: Callable[[torch.Tensor], Sequence[SlotRun]],
    ) -> Mark:
        """Ask for a turn over a slot of host memory, which is the device's until the returned mark.

        `compute` needs the bytes `reads`. It is called at once with device memory in the slot's
        place, to queue its work on the calling thread's stream; it returns what goes back.
        """
        number = self._next
        memory, before = self._buffers[number], self._used[number]
        self._next = (number + 1) % len(self._buffers)
        if before is not None:
            self._up.after(before)
        for start, nbytes in joined(reads):  # a copy costs microseconds to ask for
            self._up.copy(memory[start : start + nbytes], slot[start : start + nbytes])
        stream = devices.stream_here(self.device)
        devices.record_use(memory, stream)
        devices.come_after(stream, self._up.mark())
        results = compute(memory)
        self._down.follow()
        for start, nbytes in joined(results):
            self._down.copy(slot[start : start + nbytes], memory[start : start + nbytes])
        mark = self._down.mark()
        self._used[number] = mark
        return mark

    def settle(self) -> None:
        """Wait until no copy is under way; never raises.

        A failed turn's work may still be computed in a buffer: copies into it come after that.
        """
        with contextlib.suppress(RuntimeError):  # a device that failed stops copying
            self._up.follow()
            self._up.mark().wait()
            self._down.mark().wait()

    def free(self) -> None:
        """Give the memory back; nothing is under way."""
        self._buffers, self._used, self._next = [], [], 0

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers)


def started(
    handles: DriveHandles, slot: torch.Tensor, moves: Sequence[FileSpan], writing: bool
) -> list[Operation]:
    """Begin transfers of a slot; where one cannot begin, the others have ended."""
    if len(moves) == 1:
        only = moves[0]
        handle = handles.of(only.file)
        begin: Any = handle.async_pwrite if writing else handle.async_pread
        return [begin(only.part(slot), only.file, only.file_offset)]
    by_handle: dict[AioHandle, list[FileSpan]] = {}
    for move in moves:
        by_handle.setdefault(handles.of(move.file), []).append(move)
    operations: list[Operation] = []
    with on_error(_waited, operations):
        for handle, mine in by_handle.items():
            memory = [each.part(slot) for each in mine]
            if len(mine) >= _BATCH_FROM:
                begin = handle.async_pwrite_batch if writing else handle.async_pread_batch
                files, offsets = [m.file for m in mine], [m.file_offset for m in mine]
                operations.append(begin(memory, files, offsets))
                continue
            begin = handle.async_pwrite if writing else handle.async_pread
            for part, move in zip(memory, mine, strict=True):
                operations.append(begin(part, move.file, move.file_offset))
    return operations


def failure_of(operation: Operation) -> BaseException | None:
    """Wait for an operation; returns its error, or None."""
    try:
        return operation.exception()
    except concurrent.futures.CancelledError as cancelled:
        return RuntimeError(str(cancelled))


def finish(operations: list[Operation]) -> None:
    """Wait for all of them, then raise the first failure.

    The list is empty after: an operation keeps its error, whose traceback would keep the operation.
    """
    failures = [failed for failed in map(failure_of, operations) if failed is not None]
    operations.clear()
    if failures:
        raise failures.pop(0)


def _waited(operations: Sequence[Operation]) -> float:
    start = time.perf_counter()
    for operation in operations:
        failure_of(operation)  # the slot's next user gets the error
    return time.perf_counter() - start


def move_all(
    handles: DriveHandles, slot: torch.Tensor, moves: Sequence[FileSpan], writing: bool
) -> None:
    """Move bytes outside of a pipeline, and wait; the first failure is raised when all are done."""
    finish(started(handles, slot, moves, writing))

"""Read i+1 beside computing i beside writing i-1, over a few slots of memory.

Two threads: one computes and starts the writes, the other reads ahead, so the drive never waits for
the computation to look up. One read is under way at a time, and any number of writes: reads that
share the drive would all end together, late. The slots go round through two queues. Where a device
computes, the first thread only asks it to, and a third one begins the writes as results arrive.

No thread is the main one, so no interrupt comes here (see `_transactions`).
"""

from __future__ import annotations

import concurrent.futures
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch

from nvmeio._io.drives import DriveHandles
from nvmeio._memory.devices import Mark
from nvmeio._threads import jobs
from nvmeio.files import File
from nvmeio.handle import AioHandle
from nvmeio.offload._step.device_turns import DeviceTurns
from nvmeio.offload._swap_files.subgroups import SlotRun
from nvmeio.operation import Operation

# From so many transfers with one handle on they are one operation: a third of the Python.
_BATCH_FROM = 4


class Move(NamedTuple):
    """One transfer between a slot and a file; all in bytes."""

    file: File
    file_offset: int
    slot_offset: int
    nbytes: int


@dataclass
class Times:
    """Where the time of a run went, in seconds; bytes beside it.

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
    """What is done with a slot: read, then compute, which says what to write.

    Attributes:
        reads: What is read into it.
        compute: Works in it, and tells what is written then.
        verify: Looks at what was read, beside the computing of the turn before.
        seal: Looks at what is being written.
    """

    reads: Sequence[Move]
    compute: Callable[[torch.Tensor], Sequence[Move]]
    verify: Callable[[torch.Tensor], None] | None = None
    seal: Callable[[torch.Tensor], None] | None = None


class Pipeline:
    """Takes turns in order over slots.

    Args:
        handles: Move the bytes.
        slots: 1-D uint8 tensors, each large enough for every turn.
        read_ahead: Read while computing; False reads when the turn has come.
        write_behind: Write while computing; False waits for each turn's writes.
        device: Where turns compute, in memory of its own; None for the CPU, in the slots.
    """

    def __init__(
        self,
        handles: DriveHandles,
        slots: Sequence[torch.Tensor],
        read_ahead: bool = True,
        write_behind: bool = True,
        device: DeviceTurns | None = None,
    ) -> None:
        self._handles = handles
        self._slots = slots
        self._read_ahead = read_ahead
        self._write_behind = write_behind
        self._device = device

    def run(self, turns: Sequence[SlotTurn], check: Callable[[], None] | None = None) -> Times:
        """Take all turns, each once.

        Args:
            turns: In order.
            check: Called before each of them is computed; what it raises ends the run.

        Raises:
            TransferError: A transfer failed, the first one; no turn after it was computed.
            BaseException: What `check` or a turn's `compute` raised.

        After an error: nothing is in flight any more.
        """
        times, began = Times(), time.perf_counter()
        ahead = _Ahead(self._handles, self._slots, turns, self._read_ahead)
        behind = None if self._device is None else _Behind(self._write, ahead, times)
        failure: BaseException | None = None
        is_whole = False
        ahead.start()
        try:
            if behind is not None:
                behind.start()
            for turn in turns:
                start = time.perf_counter()
                slot = ahead.next()
                times.read_wait_s += time.perf_counter() - start
                times.read_bytes += sum(move.nbytes for move in turn.reads)
                if check is not None:
                    check()
                start = time.perf_counter()
                if behind is None or self._device is None:
                    moves = turn.compute(slot)
                    times.compute_s += time.perf_counter() - start
                    self._write(_Computed(turn, slot, moves), ahead, times)
                else:
                    behind.results.put(_asked(self._device, turn, slot))
                    times.compute_s += time.perf_counter() - start
            is_whole = True
        except _Stopped:
            pass  # writing failed, which is raised below
        finally:
            start = time.perf_counter()
            if behind is not None and self._device is not None:
                failure = behind.end(is_whole)
                self._device.settle()
            failed = ahead.end()
            failure = failure or failed
            times.write_wait_s += time.perf_counter() - start
        if failure is not None:
            raise failure
        times.total_s = time.perf_counter() - began
        return times

    def _write(self, computed: _Computed, ahead: _Ahead, times: Times) -> None:
        """Begin a turn's writes, and look at what is written meanwhile."""
        turn, slot, moves, _ = computed
        writes = started(self._handles, slot, moves, writing=True)
        times.written_bytes += sum(move.nbytes for move in moves)
        try:
            if turn.seal is not None:
                turn.seal(slot)
        finally:
            ahead.written.put((slot, writes))
        if not self._write_behind:
            times.write_wait_s += _waited(writes)


class _Computed(NamedTuple):
    """A turn that was computed; on a device when its results have arrived (`mark`)."""

    turn: SlotTurn
    slot: torch.Tensor
    moves: Sequence[Move]
    mark: Mark | None = None


def _asked(device: DeviceTurns, turn: SlotTurn, slot: torch.Tensor) -> _Computed:
    """A turn that a device was asked to compute."""
    moves: list[Move] = []

    def compute(memory: torch.Tensor) -> list[SlotRun]:
        moves.extend(turn.compute(memory))
        return [SlotRun(move.slot_offset, move.nbytes) for move in moves]

    reads = (SlotRun(move.slot_offset, move.nbytes) for move in turn.reads)
    return _Computed(turn, slot, moves, device.begin(slot, reads, compute))


class _Stopped(Exception):
    """There are no more slots, since writing what was computed failed."""


class _Behind:
    """Takes what a device computed to the drive as it arrives, in a thread of its own.

    Attributes:
        results: What comes, in order; None at the end.
    """

    def __init__(
        self,
        write: Callable[[_Computed, _Ahead, Times], None],
        ahead: _Ahead,
        times: Times,
    ) -> None:
        self.results: SimpleQueue[_Computed | None] = SimpleQueue()
        self._write = write
        self._ahead = ahead
        self._times = times
        self._stopping = False
        self._job = jobs.Job(self._write_all, "nvmeio-offload-write")
        self._job.then(self._over)

    def start(self) -> None:
        self._job.start()

    def end(self, is_whole: bool) -> BaseException | None:
        """Wait until all that came is being written, or, of a run that failed, nothing more is.

        Returns:
            Why it was not.
        """
        self._stopping = not is_whole
        self.results.put(None)
        self._job.wait()
        return self._job.error

    def _write_all(self) -> None:
        while (computed := self.results.get()) is not None and not self._stopping:
            assert computed.mark is not None
            computed.mark.wait()
            self._write(computed, self._ahead, self._times)

    def _over(self) -> None:
        if self._job.error is not None:
            self._ahead.stop()


class _Ahead:
    """Reads the turns' slots one after the other, in a thread of its own.

    Attributes:
        written: Slots whose turn is over, with the writes that are under way in them.
    """

    def __init__(
        self,
        handles: DriveHandles,
        slots: Sequence[torch.Tensor],
        turns: Sequence[SlotTurn],
        read_ahead: bool,
    ) -> None:
        self._handles = handles
        self._free = deque(slots)
        self._turns = turns
        self._read_ahead = read_ahead
        self._wanted: SimpleQueue[None] = SimpleQueue()  # one for each turn, if not read ahead
        self._ready: SimpleQueue[torch.Tensor | None] = SimpleQueue()
        self.written: SimpleQueue[tuple[torch.Tensor, list[Operation]] | None] = SimpleQueue()
        self._stopping = False
        self._job = jobs.Job(self._read_all, "nvmeio-offload-read")
        self._job.then(self._over)

    def start(self) -> None:
        self._job.start()

    def next(self) -> torch.Tensor:
        """The slot of the next turn, once it is read."""
        self._wanted.put(None)
        slot = self._ready.get()
        if slot is None:
            self._job.result()
            raise _Stopped
        return slot

    def stop(self) -> None:
        """Read no more; from another thread."""
        self._stopping = True
        self._wanted.put(None)
        self.written.put(None)

    def end(self) -> BaseException | None:
        """Wait until nothing is in flight; the first failure of a write that nobody was told of."""
        self.stop()
        self._job.wait()
        failure: BaseException | None = None
        while not self.written.empty():
            left = self.written.get()
            for operation in left[1] if left else ():
                failed = failure_of(operation)
                failure = failure or failed
        return failure

    def _read_all(self) -> None:
        for turn in self._turns:
            if not self._read_ahead:
                self._wanted.get()
            slot = self._free.popleft() if self._free else self._next_free()
            if slot is None or self._stopping:
                return
            finish(started(self._handles, slot, turn.reads, writing=False))
            if turn.verify is not None:
                turn.verify(slot)
            self._ready.put(slot)

    def _next_free(self) -> torch.Tensor | None:
        """The slot whose turn was over first; None if the run ends."""
        found = self.written.get()
        if found is None:
            return None
        slot, writes = found
        finish(writes)
        return slot

    def _over(self) -> None:
        self._ready.put(None)


def started(
    handles: DriveHandles, slot: torch.Tensor, moves: Sequence[Move], writing: bool
) -> list[Operation]:
    """Begin transfers of a slot; where one cannot begin, the others have ended."""
    by_handle: dict[AioHandle, list[Move]] = {}
    for move in moves:
        by_handle.setdefault(handles.of(move.file), []).append(move)
    operations: list[Operation] = []
    try:
        for handle, mine in by_handle.items():
            memory = [slot[each.slot_offset : each.slot_offset + each.nbytes] for each in mine]
            if len(mine) >= _BATCH_FROM:
                begin: Any = handle.async_pwrite_batch if writing else handle.async_pread_batch
                files, offsets = [m.file for m in mine], [m.file_offset for m in mine]
                operations.append(begin(memory, files, offsets))
                continue
            begin = handle.async_pwrite if writing else handle.async_pread
            for part, move in zip(memory, mine, strict=True):
                operations.append(begin(part, move.file, move.file_offset))
    except BaseException:
        for operation in operations:
            failure_of(operation)
        raise
    return operations


def failure_of(operation: Operation) -> BaseException | None:
    """Wait for an operation; why it did not do what it should, or None."""
    try:
        return operation.exception()
    except concurrent.futures.CancelledError as cancelled:
        return RuntimeError(str(cancelled))


def finish(operations: Sequence[Operation]) -> None:
    """Wait for all of them; the first failure is raised then."""
    failures = [failed for each in operations if (failed := failure_of(each)) is not None]
    if failures:
        raise failures[0]


def _waited(operations: Sequence[Operation]) -> float:
    start = time.perf_counter()
    for operation in operations:
        failure_of(operation)  # whoever wants the slot is told what became of it
    return time.perf_counter() - start


def move_all(
    handles: DriveHandles, slot: torch.Tensor, moves: Sequence[Move], writing: bool
) -> None:
    """Transfers outside of a pipeline, awaited; the first failure is raised when all are done."""
    finish(started(handles, slot, moves, writing))

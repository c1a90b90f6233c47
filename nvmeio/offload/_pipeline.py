"""Read i+1 beside computing i beside writing i-1, over a few slots of memory.

One thread computes. What follows a finished transfer (the next read, a slot that is free again) is
done in the callback of that transfer, so the drive never waits for the computing thread to look.
One read is under way at a time, and any number of writes: reads that share the drive would all end
together, late.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from nvmeio.files import File
from nvmeio.handle import AioHandle
from nvmeio.operation import Operation

_SLICE_S = 0.1  # a blocked thread looks up this often, so that Ctrl-C is served


class Move(NamedTuple):
    """One transfer between a slot and a file; all in bytes."""

    file: File
    file_offset: int
    slot_offset: int
    nbytes: int


@dataclass
class Times:
    """Where the time of a run went, in seconds; bytes beside it."""

    total_s: float = 0.0
    compute_s: float = 0.0
    read_wait_s: float = 0.0
    write_wait_s: float = 0.0
    read_bytes: int = 0
    written_bytes: int = 0


@dataclass(eq=False)
class Job:
    """What one turn does: read, then compute, which says what to write."""

    reads: Sequence[Move]
    compute: Callable[[torch.Tensor], Sequence[Move]]


@dataclass(eq=False)
class _Turn:
    job: Job
    slot: torch.Tensor | None = None
    pending: int = 0
    ready: bool = False
    operations: list[Operation] = field(default_factory=list)


class Pipeline:
    """Runs jobs in order over slots.

    Args:
        handle: Moves the bytes.
        slots: 1-D uint8 tensors, each large enough for every job.
        read_ahead: Read while computing; False reads when the job's turn has come.
        write_behind: Write while computing; False waits for each job's writes.
    """

    def __init__(
        self,
        handle: AioHandle,
        slots: Sequence[torch.Tensor],
        read_ahead: bool = True,
        write_behind: bool = True,
    ) -> None:
        self._handle = handle
        self._slots = list(slots)
        self._read_ahead = read_ahead
        self._write_behind = write_behind

    def run(self, jobs: Sequence[Job]) -> Times:
        """Do all jobs.

        Raises:
            TransferError: A transfer failed, the first one; no job after it was computed.
            BaseException: What a job's `compute` raised.

        After an error: nothing is in flight any more.
        """
        return _Run(self._handle, self._slots, self._read_ahead, self._write_behind, jobs).run()


class _Run:
    def __init__(
        self,
        handle: AioHandle,
        slots: Sequence[torch.Tensor],
        read_ahead: bool,
        write_behind: bool,
        jobs: Sequence[Job],
    ) -> None:
        self._handle = handle
        self._free = deque(slots)
        self._read_ahead = read_ahead
        self._write_behind = write_behind
        self._turns = [_Turn(job) for job in jobs]
        self._next = 0  # the turn whose read is the next to start
        self._wanted = -1  # the turn that the computing thread waits for
        self._reading = False
        self._in_flight = 0
        self._failure: BaseException | None = None
        self._changed = threading.Condition()
        self.times = Times()

    def run(self) -> Times:
        began = time.perf_counter()
        try:
            for number, turn in enumerate(self._turns):
                slot = self._await_read(number)
                start = time.perf_counter()
                moves = turn.job.compute(slot)
                self.times.compute_s += time.perf_counter() - start
                self._write(turn, moves)
                if not self._write_behind:
                    self._await_writes()
        except BaseException as failed:
            self._fail(failed)
        self._await_writes()
        self.times.total_s = time.perf_counter() - began
        if self._failure is not None:
            raise self._failure
        return self.times

    # Reading

    def _await_read(self, number: int) -> torch.Tensor:
        turn = self._turns[number]
        self._wanted = number
        self._fill()
        start = time.perf_counter()
        with self._changed:
            while not turn.ready and self._failure is None:
                self._changed.wait(_SLICE_S)
            if self._failure is not None:
                raise self._failure
        self.times.read_wait_s += time.perf_counter() - start
        if turn.slot is None:
            raise RuntimeError("a turn is ready without a slot")
        return turn.slot

    def _fill(self) -> None:
        """Start the next read, if there is one, a slot is free, and none is under way."""
        while True:
            with self._changed:
                if (
                    self._reading
                    or self._failure is not None
                    or self._next >= len(self._turns)
                    or not self._free
                    or (not self._read_ahead and self._next > self._wanted)
                ):
                    return
                turn = self._turns[self._next]
                self._next += 1
                turn.slot = slot = self._free.popleft()
                self._reading = bool(turn.job.reads)
                turn.pending = len(turn.job.reads)
                self._in_flight += turn.pending
                if not turn.job.reads:
                    turn.ready = True
                    self._changed.notify_all()
                    continue
            self._start(turn, slot, turn.job.reads, self._handle.async_pread, self._read_done)
            return

    def _read_done(self, turn: _Turn, operation: Operation) -> None:
        with self._changed:
            self.times.read_bytes += operation.nbytes
            over = self._count_off(turn, operation)
            if over:
                self._reading = False
                turn.ready = True
            self._changed.notify_all()
        if over:
            self._fill()

    # Writing

    def _write(self, turn: _Turn, moves: Sequence[Move]) -> None:
        slot, turn.slot = turn.slot, None
        if slot is None:
            raise RuntimeError("a turn writes without a slot")
        with self._changed:
            if self._failure is not None:
                raise self._failure
            turn.pending = len(moves)
            self._in_flight += len(moves)
            if not moves:
                self._free.append(slot)
        if not moves:
            self._fill()
            return

        def done(turn: _Turn, operation: Operation) -> None:
            self._write_done(turn, slot, operation)

        self._start(turn, slot, moves, self._handle.async_pwrite, done)

    def _write_done(self, turn: _Turn, slot: torch.Tensor, operation: Operation) -> None:
        with self._changed:
            self.times.written_bytes += operation.nbytes
            over = self._count_off(turn, operation)
            if over:
                self._free.append(slot)
            self._changed.notify_all()
        if over:
            self._fill()

    def _await_writes(self) -> None:
        """Until nothing is in flight; an interrupt waits as well, and is raised afterwards."""
        start = time.perf_counter()
        while True:
            try:
                with self._changed:
                    while self._in_flight:
                        self._changed.wait(_SLICE_S)
                break
            except BaseException as interrupt:
                self._fail(interrupt)
        self.times.write_wait_s += time.perf_counter() - start

    # Both

    def _count_off(self, turn: _Turn, operation: Operation) -> bool:
        """Under the lock: a transfer is done. Whether it was the last of its turn's that fly."""
        failure = _failure_of(operation)
        self._in_flight -= 1
        turn.pending -= 1
        if failure is not None and self._failure is None:
            self._failure = failure
        return not turn.pending

    def _start(
        self,
        turn: _Turn,
        slot: torch.Tensor,
        moves: Sequence[Move],
        begin: Callable[..., Operation],
        done: Callable[[_Turn, Operation], None],
    ) -> None:
        """Start transfers that are counted already; what does not start is counted off."""
        left = len(moves)
        try:
            for move in moves:
                memory = slot[move.slot_offset : move.slot_offset + move.nbytes]
                operation = begin(memory, move.file, move.file_offset)
                left -= 1
                operation.add_done_callback(functools.partial(done, turn))
        except BaseException as failed:
            with self._changed:
                self._in_flight -= left
                turn.pending -= left
                if self._failure is None:
                    self._failure = failed
                self._changed.notify_all()

    def _fail(self, failure: BaseException) -> None:
        with self._changed:
            if self._failure is None:
                self._failure = failure
            self._changed.notify_all()


def _failure_of(operation: Operation) -> BaseException | None:
    if operation.cancelled():
        return RuntimeError(f"{operation!r} was cancelled")
    return operation.exception()


def move_all(handle: AioHandle, slot: torch.Tensor, moves: Sequence[Move], writing: bool) -> None:
    """Transfers outside of a pipeline, awaited; the first failure is raised when all are done."""
    begin: Any = handle.async_pwrite if writing else handle.async_pread
    started: list[Operation] = []
    try:
        for move in moves:
            memory = slot[move.slot_offset : move.slot_offset + move.nbytes]
            started.append(begin(memory, move.file, move.file_offset))
    finally:
        failures = [failed for op in started if (failed := op.exception()) is not None]
    if failures:
        raise failures[0]

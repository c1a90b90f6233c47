"""A batch of blocks between memory and slots: few operations, each of many blocks; who does it.

One operation would do, but blocks are checked while others are on their way. Blocks that follow one
another in the file and in memory go as one *run*.

A few slots in a row need no operation at all: the thread that asks moves them by one system call
(`InPlace`). Handing them to a lane and waiting for that costs two switches of thread, which is more
than the drive takes.

Waking a thread takes 0.2 ms where its core sleeps, as long as a drive takes for a small block. So a
caller that no interrupt can reach, and who waits anyway, does the work itself (`StoreWorker`). What
the main thread asks for, and what is done in the background, a thread does.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from nvmeio import buffers
from nvmeio._bindings import memory_at
from nvmeio._io.inflight import MOST_BYTES, in_groups
from nvmeio._memory import tensors
from nvmeio._pages import PAGE_BYTES
from nvmeio._threads.future import may_be_interrupted
from nvmeio._threads.owner import OwnerThread
from nvmeio._threads.threads import log_failure
from nvmeio.errors import BatchError
from nvmeio.files import File
from nvmeio.handle import AioHandle
from nvmeio.operation import Operation

IN_PLACE_BYTES = 1 << 20
_MOST_SLOTS = 64


class InPlace:
    """Moves blocks of one file of slots, whole pages each; of one thread at a time."""

    def __init__(self, file: File, slot_bytes: int) -> None:
        self._file = file
        self._slot_bytes = slot_bytes
        self._room: torch.Tensor | None = None  # for memory that is not aligned

    def move(self, blocks: Sequence[torch.Tensor], first: int, writing: bool) -> bool:
        """Move contiguous CPU memory to or from slots in a row; False: the engine has to."""
        slot_bytes = self._slot_bytes
        if len(blocks) > _MOST_SLOTS:
            return False
        ends = [*itertools.accumulate(-(-block.nbytes // slot_bytes) for block in blocks)]
        slots = ends[-1]
        if slots > _MOST_SLOTS or slots * slot_bytes > IN_PLACE_BYTES:
            return False
        opened = self._file.acquire(user := object(), writing)
        try:
            unit, memory_unit = opened.alignment
            if opened.direct_fd < 0 or not unit or PAGE_BYTES % unit:
                return False
            given = [memory_at(block.data_ptr(), block.nbytes) for block in blocks]
            memory = [
                view if self._fits(block, memory_unit or 1) else self._staged(begin, end)
                for block, view, begin, end in zip(blocks, given, [0, *ends], ends, strict=False)
            ]
            if writing:
                _copy(given, memory)
            call = os.pwritev if writing else os.preadv
            moved = call(opened.direct_fd, memory, first * self._slot_bytes)
            if moved != slots * slot_bytes:
                return False
        except OSError:
            return False
        finally:
            opened.let_go(user)
        if not writing:
            _copy(memory, given)
            for block in blocks:
                tensors.touch(block)
        return True

    def _fits(self, block: torch.Tensor, unit: int) -> bool:
        return not block.nbytes % self._slot_bytes and not block.data_ptr() % unit

    def _staged(self, begin: int, end: int) -> memoryview:
        """Memory of so many slots' length, for a block that cannot be moved where it lies."""
        slot_bytes = self._slot_bytes
        if self._room is None:
            shape = (min(IN_PLACE_BYTES // slot_bytes, _MOST_SLOTS), slot_bytes)
            self._room = buffers.empty_aligned(shape, dtype=torch.uint8)
        return memory_at(self._room.data_ptr() + begin * slot_bytes, (end - begin) * slot_bytes)


def _copy(source: Sequence[memoryview], target: Sequence[memoryview]) -> None:
    # By this thread alone. torch's copy is several threads' from 32 KiB on, and waits until each
    # has had a core: on a busy machine 15 ms for what takes 10 us.
    for one, other in zip(source, target, strict=True):
        if one is not other:
            nbytes = min(one.nbytes, other.nbytes)
            other[:nbytes] = one[:nbytes]


GROUP_BYTES = 8 << 20
_GROUP_RUNS = 1024


class SlotPiece(NamedTuple):
    """Block `number` of a batch, its memory, and its first slot."""

    number: int
    block: torch.Tensor
    slot: int


class Transfers:
    """Moves batches; a block may fail by itself, and all others are moved.

    `in_place` moves a few slots in a row, if anybody else than the handle may.
    """

    def __init__(
        self, handle: AioHandle, file: File, slot_bytes: int, in_place: InPlace | None
    ) -> None:
        self._handle = handle
        self._file = file
        self._slot_bytes = slot_bytes
        self._in_place = in_place

    def move(
        self, pieces: Sequence[SlotPiece], writing: bool, note: Callable[[SlotPiece], object]
    ) -> dict[int, BaseException]:
        """Write or read blocks; returns what failed, by number.

        `note` is called with each: while it is being written, or when it has been read, while
        others are moved.
        """
        if self._moved_in_place(pieces, writing):
            for piece in pieces:
                note(piece)
            return {}
        runs = list(_runs(pieces, self._slot_bytes))
        failed = self._move_runs(runs, writing, note)
        # Which blocks of a run that failed?
        again = [piece for run in runs if len(run) > 1 for piece in run if piece.number in failed]
        for piece in again:
            del failed[piece.number]
        return failed | self._move_runs([[piece] for piece in again], writing, note)

    def _moved_in_place(self, pieces: Sequence[SlotPiece], writing: bool) -> bool:
        if self._in_place is None:
            return False
        behind = first = pieces[0].slot
        for piece in pieces:
            if piece.slot != behind:
                return False
            behind -= -piece.block.nbytes // self._slot_bytes
        return self._in_place.move([piece.block for piece in pieces], first, writing)

    def _move_runs(
        self, runs: Iterable[list[SlotPiece]], writing: bool, note: Callable[[SlotPiece], object]
    ) -> dict[int, BaseException]:
        begin = self._handle.async_pwrite_batch if writing else self._handle.async_pread_batch
        failed: dict[int, BaseException] = {}
        flying: deque[tuple[Operation, list[list[SlotPiece]]]] = deque()
        nbytes = 0

        def finish_first() -> int:
            operation, group = flying[0]
            errors = _errors(operation, len(group))
            flying.popleft()
            for item, run in enumerate(group):
                for piece in run:
                    if item in errors:
                        failed[piece.number] = errors[item]
                    elif not writing:
                        note(piece)
            return operation.nbytes

        try:
            for group in in_groups(runs, _nbytes_of, GROUP_BYTES, _GROUP_RUNS):
                memory = [_memory_of(run) for run in group]
                wanted = sum(each.nbytes for each in memory)
                while flying and nbytes + wanted > MOST_BYTES:
                    nbytes -= finish_first()
                offsets = [run[0].slot * self._slot_bytes for run in group]
                flying.append((begin(memory, self._file, offsets), group))
                nbytes += wanted
                for piece in itertools.chain(*group) if writing else ():
                    note(piece)
            while flying:
                finish_first()
        finally:
            for operation, _ in flying:  # after an error: nobody's memory is touched any more
                with contextlib.suppress(concurrent.futures.CancelledError):
                    operation.exception()
        return failed


def _runs(pieces: Iterable[SlotPiece], slot_bytes: int) -> Iterator[list[SlotPiece]]:
    """Pieces that are one: each begins where the one before ends, in the file and in memory."""
    run: list[SlotPiece] = []
    nbytes = 0
    for piece in pieces:
        nbytes += piece.block.nbytes
        if run and not (nbytes <= GROUP_BYTES and _follows(run[-1], piece, slot_bytes)):
            yield run
            run, nbytes = [], piece.block.nbytes
        run.append(piece)
    if run:
        yield run


def _follows(one: SlotPiece, other: SlotPiece, slot_bytes: int) -> bool:
    nbytes = one.block.nbytes
    return (
        (other.slot - one.slot) * slot_bytes == nbytes
        and other.block.data_ptr() == one.block.data_ptr() + nbytes
        and one.block.untyped_storage().data_ptr() == other.block.untyped_storage().data_ptr()
        and not (one.block.is_inference() or other.block.is_inference())
    )


def _memory_of(run: list[SlotPiece]) -> torch.Tensor:
    """The memory of a run's blocks as one tensor, of the same storage."""
    first = run[0].block
    if len(run) == 1:
        return first
    storage = first.untyped_storage()
    nbytes = _nbytes_of(run)
    whole = torch.empty(0, dtype=torch.uint8, device=first.device)
    return whole.set_(storage, first.data_ptr() - storage.data_ptr(), (nbytes,), (1,))


def _nbytes_of(run: list[SlotPiece]) -> int:
    return sum(piece.block.nbytes for piece in run)


def _errors(operation: Operation, items: int) -> dict[int, BaseException]:
    try:
        error = operation.exception()
    except concurrent.futures.CancelledError as cancelled:
        error = cancelled
    if isinstance(error, BatchError):
        return dict(error.failures)
    return {} if error is None else dict.fromkeys(range(items), error)


Value = TypeVar("Value")


class Batch(NamedTuple):
    """Blocks to move.

    Attributes:
        digests: The digests of their names.
        blocks: Their memory.
        kinds: The kind of each, besides its name.
        names: Their whole names; empty if those are not kept.
    """

    digests: list[bytes]
    blocks: list[torch.Tensor]
    kinds: list[int]
    names: list[bytes]

    @classmethod
    def joined(cls, batches: Sequence[Batch]) -> Batch:
        """Several batches as one."""
        if len(batches) == 1:
            return batches[0]
        columns = zip(*batches, strict=True)
        return cls(*(list(itertools.chain.from_iterable(column)) for column in columns))


class StoreJob(NamedTuple):
    """Blocks to move in the background.

    Attributes:
        batch: The blocks.
        slots: How many slots they take.
        done: Called with the answer for each, by the worker's thread.
    """

    batch: Batch
    slots: int
    done: Callable[[list[bool]], object]


class Move(Protocol):
    """Moves blocks of several jobs."""

    def __call__(self, batch: Batch, ended: Callable[[int], object]) -> list[bool]:
        """Return the answer for each; `ended` may be called earlier for a moved block."""


class StoreWorker:
    """Does one thing after the other, for all callers; waiting jobs are moved together.

    Servers ask for a few blocks at a time, for each request. Moved one job after the other they
    leave the drive idle between two: 256 blocks took four times as long as all at once.

    It must not refer to what owns it: it ends when that is dropped. A call after its `owner`
    was closed raises ClosedError with the text `closed`.
    """

    def __init__(self, name: str, closed: str) -> None:
        self.owner = OwnerThread(name, closed)
        self._turn = threading.Lock()  # the main thread never takes it
        self._lock = threading.Lock()
        self._asked = self._ended = 0  # requests to its thread, on the memory of others
        self._open: deque[StoreJob] | None = None  # which its thread will look into

    def call(self, check: Callable[[], object], work: Callable[..., Value], *args: Any) -> Value:
        """Do `work(*args)`, here or in the thread; an interrupt is raised when it has ended.

        `check` raises if the store was closed meanwhile.
        """
        if may_be_interrupted():
            self._count()
            value: Value = self.owner.call(self._in_turn, work, args, to_end=True)
            return value
        with self._turn:
            check()
            return work(*args)

    def post(self, move: Move, job: StoreJob, most_slots: int) -> None:
        """Move a job's blocks in the background, then call its `done`; False for all if it failed.

        Jobs of `most_slots` slots in all are moved together. A job whose blocks have all been moved
        is answered while others are.
        """
        with self._lock:
            # An interrupt here only costs each later `drain` an extra round trip.
            self._asked += 1
            waiting = self._open
            if waiting is None:
                waiting = deque()
                # First, so that an interrupt leaves no job that nobody looks for.
                self.owner.post(self._work_off, move, waiting, most_slots)
                self._open = waiting
            waiting.append(job)

    def _work_off(self, move: Move, waiting: deque[StoreJob], most_slots: int) -> None:
        """Move the jobs that wait now; those that come meanwhile wait behind other requests."""
        with self._lock:
            if self._open is waiting:
                self._open = None
        while waiting:
            jobs, slots = [waiting.popleft()], 0
            while waiting:
                slots += jobs[-1].slots
                if slots + waiting[0].slots > most_slots:
                    break
                jobs.append(waiting.popleft())
            self._move(move, jobs)

    def _move(self, move: Move, jobs: list[StoreJob]) -> None:
        batch = Batch.joined([job.batch for job in jobs])
        job_of = [at for at, job in enumerate(jobs) for _ in job.batch.digests]
        left = [len(job.batch.digests) for job in jobs]
        found = [False] * len(job_of)
        firsts = [0, *itertools.accumulate(left)]
        unanswered = dict(enumerate(jobs))

        def ended(number: int) -> None:
            found[number] = True
            at = job_of[number]
            left[at] -= 1
            if not left[at]:
                # The callback may ask for another turn; any thread may have the turn meanwhile.
                self._turn.release()
                try:
                    self._answer(unanswered.pop(at), found[firsts[at] : firsts[at + 1]])
                finally:
                    self._turn.acquire()

        try:
            with self._turn:
                found = move(batch, ended)
        except BaseException as failed:
            if len(jobs) > 1:  # of one of them, maybe
                for job in unanswered.values():
                    self._move(move, [job])
                return
            log_failure(failed, "unexpected error in %s", threading.current_thread().name)
            found = [False] * len(job_of)
        for at, job in unanswered.items():
            self._answer(job, found[firsts[at] : firsts[at + 1]])

    def _answer(self, job: StoreJob, found: list[bool]) -> None:
        try:
            job.done(found)  # which may ask for another turn
        except BaseException as failed:
            log_failure(failed, "unexpected error in %s", threading.current_thread().name)
        finally:
            self._ended += 1

    def _count(self) -> None:
        with self._lock:
            self._asked += 1
            self._open = None  # what is begun from now on comes after this

    def _in_turn(self, work: Callable[..., Value], args: tuple[Any, ...]) -> Value:
        try:
            with self._turn:
                return work(*args)
        finally:
            self._ended += 1

    def drain(self) -> None:
        """Wait until its thread has done what it was asked before."""
        if self._asked != self._ended:
            self.owner.drain()

    def finish(self) -> None:
        """Wait until all has ended that was asked before, or is being done by its caller."""
        self.owner.call(self.rest)

    def rest(self) -> None:
        """Do `finish`, in its thread."""
        with self._turn:
            pass

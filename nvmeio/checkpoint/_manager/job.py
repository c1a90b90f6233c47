"""One save of a Checkpointer: the snapshot while the caller waits, all else in the background.

    the caller's thread, or one that a coroutine awaits   the save's own thread
    ───────────────────────────────────────────────────   ─────────────────────────────────────────
    plan the layout of the pickle    torch_layout
    the ranks agree             agreement, messages
    protect or copy the storages  state_snapshot ───────▶ take the oldest file, or a new one
    return: the state may change                          write it, with checksums  torch_writing
                                                          make it durable, name it        replace
                                                          then move `latest`             retention

If the copies do not fit into their memory, the right side begins when the copying does.
The right side is in `job_files`.
"""

from __future__ import annotations

import _thread
import io
import logging
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from nvmeio._distributed.messages import Messages
from nvmeio._distributed.rank_store import RankStore
from nvmeio._formats.torch_archives.torch_layout import (
    FileLayout,
    KnownBytes,
    UnknownWriterError,
    pickled,
)
from nvmeio._formats.torch_archives.torch_writing import Crc, padded_nbytes, write_part
from nvmeio._io.inflight import InFlight
from nvmeio._io.long_call import LongCall
from nvmeio._pages import PAGE_BYTES
from nvmeio._threads.future import Future
from nvmeio._threads.interruptible import Cancelled
from nvmeio._threads.threads import Thread, unlist
from nvmeio.checkpoint._directory.retention import Lineage
from nvmeio.checkpoint._multi_rank import agreement
from nvmeio.checkpoint._multi_rank.agreement import Disagreement, agree, with_pieces_of_first
from nvmeio.checkpoint._multi_rank.drives import OwnDrives
from nvmeio.checkpoint._snapshot.copies import SnapshotPart
from nvmeio.checkpoint._snapshot.state_snapshot import Snapshots, StateSnapshot
from nvmeio.errors import TransferError
from nvmeio.files import File
from nvmeio.handle import AioHandle
from nvmeio.operation import Operation
from nvmeio.progress import Progress

logger = logging.getLogger("nvmeio")

# The rank with the store may end its process once all know that the save is over: they ask for it
# every 20 ms. One that died meanwhile is not waited for any longer than this.
PARTING_S = 5.0

# `save` returns first: the writing would keep the GIL for 5 ms (`sys.getswitchinterval`) while the
# caller learns that the snapshot is taken. Its return took 1 ms at the median, where it was 3.
_HEAD_START_S = 0.001


class SaveReport(NamedTuple):
    """The result of a save, and its times.

    Attributes:
        step: The number it was given.
        path: The path that the checkpoint has, or will have.
        nbytes: Bytes of the file; with ``layout="per_rank"`` of this rank's own file.
        copied_bytes: Bytes that this rank copied into the snapshot.
        snapshot_bytes: Memory of the snapshot. If it is less than the part to save, the snapshot
            went through it piece by piece.
        held_s: How long `save` took, in seconds: the next four, and the copying.
        waited_s: Seconds of that spent waiting for the save before to become durable.
        planned_s: Seconds of that spent pickling, and waiting for the other ranks.
        memory_s: Seconds of that spent on new memory: in the first save, and if the state grew.
        stalled_s: Seconds of that spent waiting for memory to become free.
        durable: Whether all of it is durable. `recycled` and `written_s` are None until then.
        recycled: Whether the oldest checkpoint's blocks were overwritten, and no new ones
            allocated. Rank 0 knows it; with ``layout="per_rank"`` each for its own file.
        guarded_bytes: Bytes that were not copied before `save` returned: `protected_bytes`, and
            those on devices.
        moved_bytes: Bytes of `protected_bytes` that were copied aside, because the program wrote
            there before they were read. 0 until all is durable, as `step_held_s` is.
        step_held_s: How long the program's writes were stopped for that, in seconds.
        protected_bytes: Bytes that were left in protected host memory; 0 if all were copied.
        written_s: Seconds from the end of `save` until all was durable.
    """

    step: int
    path: str
    nbytes: int
    copied_bytes: int
    snapshot_bytes: int
    held_s: float
    waited_s: float
    planned_s: float
    memory_s: float
    stalled_s: float
    durable: bool = False
    recycled: bool | None = None
    written_s: float | None = None
    guarded_bytes: int = 0
    moved_bytes: int = 0
    step_held_s: float = 0.0
    protected_bytes: int = 0

    @property
    def snapshot(self) -> str:
        """The way it was taken: "protect" if memory was protected, else "copy"."""
        return "protect" if self.protected_bytes else "copy"


class Setup(NamedTuple):
    """The settings and resources that all saves of a Checkpointer share.

    Attributes:
        directory: The directory of the saves.
        keep: How many checkpoints stay whole at every moment.
        recycle: Whether the oldest one beyond those may be overwritten.
        checksum: Whether CRC-32s are computed.
        snapshots: Keep the state as it was when `save` was called.
        store: The store of the ranks that save together.
        timeout_s: How long one of them may make no progress, in seconds.
        get_handle: Gives the handle that moves the bytes.
        claim: Makes the directory, and takes its lock; for the rank that gives names in it.
        writers: Which ranks write a file that all have; see `agreement.chosen_writers`.
        drives: This rank's own, if the ranks share no directory.
        lineage: Whether saves go on from existing ones; None if the caller says what to replace.
    """

    directory: str
    keep: int
    recycle: bool
    checksum: bool
    snapshots: Snapshots
    store: RankStore
    timeout_s: float
    get_handle: Callable[[], AioHandle]
    claim: Callable[[], None]
    writers: str | int = "all"
    drives: OwnDrives | None = None
    lineage: Lineage | None = None

    def messages(self, number: int) -> Messages:
        """The messages of one save; `number` is the same on all ranks."""
        return Messages(self.store, number, self.timeout_s)


Plan = Callable[[], FileLayout]
"""Makes a layout; called once, in any thread."""


def pickled_state(state: object) -> Plan:
    """Pickle a state, in the thread whose modes its own code must see."""
    try:
        pickling = pickled(state)
    except UnknownWriterError as unknown:
        layout = _saved_by_torch(state, unknown)
        return lambda: layout

    def plan() -> FileLayout:
        try:
            return pickling.layout()
        except UnknownWriterError as unknown:
            return _saved_by_torch(state, unknown)

    return plan


def _saved_by_torch(state: object, unknown: UnknownWriterError) -> FileLayout:
    logger.warning("saving through torch.save, which is slower: %s", unknown)
    whole = io.BytesIO()
    torch.save(state, whole)
    data = whole.getvalue()
    return FileLayout(len(data), [KnownBytes(0, data)], [])


class SaveJob(ABC):
    """One save; `number` is the same on all ranks. `progress` is called as writing goes on."""

    LAYOUT = ""
    COMMENT_BYTES = 0  # bytes of the file behind its layout

    def __init__(
        self, setup: Setup, step: int, number: int, progress: Progress | None = None
    ) -> None:
        self.setup = setup
        self.step = step
        self.messages = setup.messages(number)
        self._call = LongCall("save", self.path, progress)
        self.snapshot: StateSnapshot | None = None
        self._aside_bytes, self._writers_held_s = 0, 0.0
        self.flight = InFlight()
        self.number = number
        self.going_on = False  # in the background
        self._cancelled = False
        self.over: Future[None] = Future()
        self._writer = 0  # the thread that writes
        self._ended_at = 0.0
        self._report: SaveReport | None = None
        self._began = self._taken_at = 0.0
        self._recycled: bool | None = None
        self.writing = list(range(self.messages.size))  # the ranks that do, once all have agreed
        self.shift = 0  # from offsets of the layout to those in the file

    @property
    @abstractmethod
    def path(self) -> str:
        """The path that the checkpoint will have."""

    def parts(self, layout: FileLayout) -> list[tuple[int, int]]:
        """The [start, end) of the file that each rank writes: all of it, if each has its own.

        With one file, ranks that write have equal parts of whole pages; the others have nothing.
        """
        nbytes = padded_nbytes(layout)
        if self.LAYOUT != "one":
            return [(0, nbytes)] * self.messages.size
        shares = agreement.shares_of_writers(nbytes // PAGE_BYTES, self.messages.size, self.writing)
        return [(start * PAGE_BYTES, end * PAGE_BYTES) for start, end in shares]

    def pages_beside(self, layout: FileLayout) -> list[int]:
        """Offsets of the pages outside of this rank's part that it needs as well."""
        return []

    @abstractmethod
    def write(self) -> bool | None:
        """Write, make durable, name; whether something was recycled. In the background."""

    def claim(self) -> None:
        """Become the one that saves there; before the ranks agree."""
        if self.messages.rank == 0:
            self.setup.claim()

    def plan(self) -> dict[str, Any]:
        """The message of this kind of save to the other ranks, beside its layout."""
        lineage, directory = self.setup.lineage, self.setup.directory
        return {"shared": True, **({} if lineage is None else lineage.plan(directory))}

    def settle(self, plans: Sequence[dict[str, Any]]) -> None:
        """Check the plans of all ranks, which save the same."""
        if self.setup.lineage is not None:
            self.setup.lineage.check(plans, plans[0]["latest"], self.step, self.path)

    def wait_until_agreed(self) -> None:
        """Wait until all ranks have agreed; in the background, before anything is written.

        Else one that is still agreeing would hear of a write that has failed, and its `save` would
        raise, where the next one does on all others. They wait for rank 0's first message.
        """
        if self.messages.size > 1 and self.messages.rank == 0:
            self.messages.gather("agreed")

    # In the foreground

    def take(self, plan: Plan, began: float, pickled_s: float = 0.0) -> SaveReport:
        """Take the snapshot, and let the background go on with it.

        `began` is when the caller called (`time.perf_counter`); the pickling took `pickled_s`
        before. After an error nothing is in flight, and no checkpoint has changed.

        Raises:
            ValueError: The ranks do not save the same.
            TransferError: Another rank failed; or writing did, while the snapshot streamed.
            MemoryError: There is no room for the snapshot.
            Cancelled: `cancel` was called.
        """
        times = [time.perf_counter()]
        self._began = times[0]
        try:
            self.claim()
            source = self._agreed(plan())
            times.append(time.perf_counter())
            snapshot = self._new_snapshot(source)
            times.append(time.perf_counter())
            if not snapshot.fits:
                self._start_writing()
            snapshot.take(self.messages.beat)
            self.check_cancelled()
            self._taken_at = time.perf_counter()
            self._report = report = SaveReport(
                step=self.step,
                path=self.path,
                nbytes=source.nbytes + self.COMMENT_BYTES,
                copied_bytes=snapshot.copied_bytes,
                guarded_bytes=snapshot.left_bytes,
                protected_bytes=snapshot.protected_bytes,
                snapshot_bytes=self.setup.snapshots.copies.nbytes,
                held_s=self._taken_at - began,
                waited_s=times[0] - began - pickled_s,
                planned_s=times[1] - times[0] + pickled_s,
                memory_s=times[2] - times[1],
                stalled_s=snapshot.stalled_s,
            )
            if not self.going_on:
                self._start_writing()
        except BaseException as failed:
            raise self._abandon(failed) from None
        if not snapshot.fits:
            _warn_of_waiting(report)
        return report

    def _agreed(self, layout: FileLayout) -> FileLayout:
        """The layout that all ranks write, with this rank's storages."""
        self.check_cancelled()
        if self.messages.size == 1:
            self.settle([self.plan()])
            return layout
        plan = {"step": self.step, "layout": self.LAYOUT, "checksum": self.setup.checksum}
        plan |= {"writers": self.setup.writers, "node": agreement.this_node(), **self.plan()}
        before = self.setup.messages(self.number - 1)
        plans, same_pieces = agree(self.messages, before, self.path, plan, layout)
        self.writing = agreement.chosen_writers(
            self.setup.writers, [each["node"] for each in plans]
        )
        self.settle(plans)
        self.messages.put("agreed", b"")
        if same_pieces or self.LAYOUT != "one":
            return layout
        return with_pieces_of_first(self.messages, layout)

    def _new_snapshot(self, source: FileLayout) -> StateSnapshot:
        start, end = self.parts(source)[self.messages.rank]
        part = SnapshotPart(source, start, end, self.pages_beside(source))
        self.snapshot = snapshot = StateSnapshot(part, self.setup.snapshots)
        self.flight = InFlight(snapshot.most_in_flight_bytes, self._finished)
        self.check_cancelled()  # `cancel` may have come before either
        return snapshot

    def layout(self) -> FileLayout:
        """The layout that is written: the pieces, and the storages as they were."""
        assert self.snapshot is not None  # until the background is over
        return self.snapshot.layout

    def write_bytes(self, file: File, start: int, end: int) -> list[Crc]:
        """Write [start, end) of the state; another handle goes on if this one is closed."""
        self._call.expect(end - start)
        return write_part(
            self.setup.get_handle(),
            file,
            self.layout(),
            start,
            end,
            checksum=self.setup.checksum,
            flight=self.flight,
            shift=self.shift,
            another=self.setup.get_handle,
            kept=self.setup.snapshots.on_the_way,
        )

    def _finished(self, operation: Operation) -> None:
        if self.snapshot is not None:
            self.snapshot.written(operation.file_offset + operation.nbytes - self.shift)
        self.messages.beat()
        self._call.moved(operation.nbytes)

    def _abandon(self, failed: BaseException) -> BaseException:
        """End all of it, and return what is to be raised."""
        self.cancel()
        if not self.going_on:
            if not isinstance(failed, Disagreement):
                self.messages.fail(failed)
        else:
            self.over.wait()
            cause = self.over.error
            if isinstance(failed, Cancelled) and cause and not isinstance(cause, Cancelled):
                failed = cause  # it was the writing that failed, and stopped the copying
            self.going_on = False
        self._forget()
        return failed

    def check_cancelled(self) -> None:
        if self._cancelled:
            raise Cancelled

    def cancel(self) -> None:
        """Stop soon, and leave nothing behind; from any thread."""
        self._cancelled = True
        self.messages.stop()
        self.flight.cancel()
        snapshot = self.snapshot
        if snapshot is not None:
            snapshot.stop()

    # In the background

    def _start_writing(self) -> None:
        # No daemon: a program that ends without waiting ends with a whole checkpoint.
        thread = Thread(self._run, "nvmeio-checkpointer", daemon=False)
        self.going_on = True  # before Ctrl-C can come
        try:
            thread.start()
        except Exception:  # the process may have no more threads
            self.going_on = False
            raise

    def _run(self) -> None:
        self._writer = _thread.get_ident()
        time.sleep(_HEAD_START_S)
        try:
            self.wait_until_agreed()
            recycled = self.write()
        except BaseException as failed:
            failed = self._cause_of(failed)
            self.messages.fail(failed)
            if self.snapshot is not None:
                self.snapshot.stop()  # the copies have no reader left
            self._forget()
            self._end(failed)
        else:
            self._forget()
            self._recycled = recycled
            self._log()
            self._end(None)
            self.setup.snapshots.staging.lock()

    def _end(self, failed: BaseException | None) -> None:
        unlist()
        self._ended_at = time.perf_counter()
        if failed is None:
            self.over.set(None)
        else:
            self.over.fail(failed)

    def _log(self) -> None:
        """Log one line; a log handler that raises does not undo what is complete."""
        try:
            why = self.setup.snapshots.why_copied
            how = "protected" if why is None else f"copied ({why})"
            self._call.log(
                time.perf_counter() - self._began, f"step {self.step} is durable; was {how}"
            )
        except Exception:
            if logging.raiseExceptions:  # as logging itself tells of it
                traceback.print_exc()

    def _cause_of(self, failed: BaseException) -> BaseException:
        """Find what went wrong: not a file that is gone because rank 0 has given up."""
        if isinstance(failed, FileNotFoundError):
            try:
                self.messages.check()
            except TransferError as first:
                first.__cause__ = failed
                return first
        return failed

    def _forget(self) -> None:
        snapshot, self.snapshot = self.snapshot, None
        if snapshot is not None:
            self._aside_bytes, self._writers_held_s = snapshot.over()
        self.flight = InFlight()

    # Outcome

    def done(self) -> bool:
        return self.over.done

    def failed(self) -> bool:
        """Whether it is over, and failed; not if it was cancelled."""
        failed = self.over.error
        return failed is not None and not isinstance(failed, Cancelled)

    @property
    def is_here(self) -> bool:
        """Whether this thread is the one that writes it, as that of `progress` is."""
        return self._writer == _thread.get_ident() and not self.done()

    def wait(self, timeout: float | None) -> bool:
        return self.over.wait(timeout)

    def result(self) -> SaveReport | None:
        """Block until it is over; its report, or None if it was cancelled. Raises why it failed."""
        self.over.wait()
        failed = self.over.error
        if isinstance(failed, Cancelled):
            return None
        if failed is not None:
            try:
                raise failed
            finally:
                del failed  # no cycle with the traceback
        report = self._report
        if report is None:
            return None
        return report._replace(
            durable=True,
            recycled=self._recycled,
            written_s=max(self._ended_at - self._taken_at, 0.0),
            moved_bytes=self._aside_bytes,
            step_held_s=self._writers_held_s,
        )

    def part_from_others(self) -> None:
        """Wait a limited time until the others know what this rank has committed; never raises."""
        if self.messages.rank == 0 and self.done() and self.over.error is None:
            self.messages.wait_for_others("seen", PARTING_S)


def _warn_of_waiting(report: SaveReport) -> None:
    logger.warning(
        "step %d: %.1f MiB are more than the snapshot memory of %.1f MiB: save took %.3f s, and "
        "waited %.3f s of them for the drive; memory_bytes (64 MiB or more) sets this memory",
        report.step,
        report.copied_bytes / (1 << 20),
        report.snapshot_bytes / (1 << 20),
        report.held_s,
        report.stalled_s,
    )

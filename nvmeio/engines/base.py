"""The contract of an engine: it moves planned transfers, and reports each once.

The handle above knows tensors, files, loops and tasks; an engine knows blocks. Between them lie
three small things: a `Transfer` goes in, a `Request` stands for it, and a `CompletionQueue` hands
out the tokens of finished transfers behind a pollable descriptor.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple, Protocol, cast

from nvmeio._bindings import ffi, lib
from nvmeio._files.descriptors import Descriptors
from nvmeio._memory.tensors import Memory
from nvmeio.errors import BackendUnavailableError, RowsError, TransferError


class Opcode(IntEnum):
    """The kind of a transfer. The numbers are the shim's."""

    READ = 0
    WRITE = 1
    FSYNC = 2
    FDATASYNC = 3


class Options(NamedTuple):
    """The settings of an engine; the parameters of `AioHandle`."""

    block_size: int = 1 << 20
    queue_depth: int = 128
    single_submit: bool = False
    overlap_events: bool = True
    intra_op_parallelism: int = 1


class Transfer(NamedTuple):
    """One planned transfer, as numbers (in the order of the shim's nv_prepare).

    Memory and descriptors are the caller's to keep alive until the request is done.
    """

    opcode: int
    direct_fd: int
    """O_DIRECT descriptor for the span, or -1: then the span goes through `buffered_fd`."""
    buffered_fd: int
    """Plain descriptor, or -1 where the plan needs none."""
    address: int
    nbytes: int
    file_offset: int
    span_start: int
    span_end: int
    offset_alignment: int
    memory_alignment: int
    bounce: bool
    """Move every block through the engine's own huge-page memory."""
    preallocate: bool
    """Allocate the file's blocks before writing past its end."""
    foreign: bool = False
    """Memory that neither nvmeio nor torch allocated: it may be read-only, or end early, so that
    only the kernel may touch it."""


class DeviceTransfer(Transfer):
    """A transfer of device memory, which engines of host memory cannot reach.

    Attributes:
        memory: The address, and what lies behind it on the device.
        opened: The file. `Transfer`'s descriptors are its own; engines that open more, or that
            outlive a transfer which timed out, need it whole.
    """

    memory: Memory
    opened: Descriptors

    @classmethod
    def make(cls, transfer: Transfer, memory: Memory, opened: Descriptors) -> DeviceTransfer:
        """The planned numbers, with their meaning."""
        made = cls(*transfer)
        made.memory = memory
        made.opened = opened
        return made


class Rows(NamedTuple):
    """The places of a gather's or scatter's rows, beside the `Transfer` that tells of their memory.

    The offsets are the caller's to keep alive, like the memory.
    """

    number: int
    """1 or more, and less than 2**32."""
    row_bytes: int
    """1 or more."""
    offsets: int
    """Address of `number` integers of 64 bits: where in the file each row begins."""


class Counters(NamedTuple):
    """The work of an engine since it was started; bytes are the caller's, not padding.

    `direct_bytes` went between the drive and the tensor, `bounced_bytes` through an aligned block
    of the engine, `buffered_bytes` through the page cache. For gathers and scatters: `rows` that
    were moved whole, the `row_blocks` that this took, and the bytes that were not read once more
    because rows lie in the same units of the file (`row_bytes_saved`).
    """

    bytes_read: int = 0
    bytes_written: int = 0
    operations: int = 0
    direct_bytes: int = 0
    bounced_bytes: int = 0
    buffered_bytes: int = 0
    errors: int = 0
    cancelled: int = 0
    in_flight: int = 0
    rows: int = 0
    row_blocks: int = 0
    row_bytes_saved: int = 0

    def plus(self, **more: int) -> Counters:
        """With some of them raised."""
        return self._replace(**{name: getattr(self, name) + n for name, n in more.items()})

    def since(self, earlier: Counters) -> Counters:
        """The counts since `earlier` was read; `in_flight` stays as it is now."""
        pairs = zip(self, earlier, strict=True)
        return Counters(*(now - then for now, then in pairs))._replace(in_flight=self.in_flight)


class Outcome(NamedTuple):
    """The outcome of a transfer.

    A read that met the end of the file has error 0 and `transferred` < what was asked.
    """

    error: int
    """errno, 0, or ECANCELED: dropped before it was complete."""
    transferred: int
    direct_bytes: int
    bounced_bytes: int
    buffered_bytes: int
    cause: BaseException | None = None
    """The error itself, where an errno cannot say it (a device's, cuFile's); None elsewhere."""


class EngineError(Exception):
    """A failure in an engine's own words; the operation adds which file and span it was."""

    def __init__(self, errno: int, detail: str) -> None:
        super().__init__(errno, detail)
        self.errno = errno
        self.detail = detail

    def with_context(self, **about: Any) -> TransferError:
        """The error for the user; `about` is what `TransferError` takes beside the errno."""
        return TransferError(self.errno, detail=self.detail, **about)


class Request(Protocol):
    """A transfer in an engine's hands.

    Made first and started then, so that the owner of its memory can record it in between: an
    interrupt (Ctrl-C) may come after any step.
    """

    def start(self) -> None:
        """Begin; never blocks. The token is reported once, at the completion queue.

        Idempotent; a second call also completes an interrupted start.
        """

    def started(self) -> bool:
        """Whether `start` was called."""

    def cancel(self) -> None:
        """Issue no further block. Those in the kernel finish before the request is done."""

    def wait(self, timeout_s: float) -> bool:
        """Block (without the GIL) until it is done; False after `timeout_s`."""

    def move(self, cq: CompletionQueue) -> None:
        """Report at this completion queue instead; at once if it is done and was not yet reaped."""

    def moved(self) -> int:
        """Bytes moved, or -errno; only once it is done."""

    def outcome(self) -> Outcome:
        """Its full outcome; only once it is done."""


class ShortRequest(Request, Protocol):
    """A short transfer: one block at most, whose memory it holds."""

    held: bool
    """Whether torch refuses to resize the storage until then: nobody else's memory."""

    def start_at(self, address: int, nbytes: int, file_offset: int) -> None:
        """`start`, with the memory to move. Memory that is not held is taken for foreign."""

    def let_go(self) -> None:
        """End the hold, where the engine has not: it was not started, or refused (EINVAL)."""


class BatchRequest(Request, Protocol):
    """Many transfers as one request; its outcome is their sum, and the first error of theirs."""

    def outcomes(self) -> list[Outcome]:
        """The outcome of each of them, in their order; only once it is done."""


class CompletionQueue(Protocol):
    """The queue in which finished transfers wait for one consumer."""

    def fileno(self) -> int:
        """An eventfd, readable while there is something to reap."""

    def peek(self) -> list[int]:
        """Tokens of finished transfers, or some of them; they stay until they are acknowledged."""

    def peek_ends(self) -> tuple[list[int], Sequence[int]]:
        """The same tokens, and what `Request.moved` says of each."""

    def acknowledge(self, tokens: list[int]) -> None:
        """Take these off, if they are there; `fileno` is readable for as long as others are."""

    def reap(self) -> list[int]:
        """Take all that is there; never blocks."""

    def wake(self) -> None:
        """Make `fileno` readable with nothing to reap."""

    def close(self) -> None:
        """Transfers still in flight for this completion queue will report nowhere."""


class Capabilities(NamedTuple):
    """Abilities of an engine beside moving single transfers. The handle asks before it uses any."""

    rows: bool = False
    """It moves many rows as one request: `RowsEngine`."""
    batches: bool = False
    """It moves many transfers as one request: `BatchEngine`."""
    short_transfers: bool = False
    """It has cheaper requests for short transfers: `ShortEngine`."""
    keeps_gil: bool = False
    """It serves threads that keep the GIL: `GilKeepingEngine`."""
    works_through_another: bool = False
    """Another engine moves and counts its transfers as well: `LayeredEngine`."""


class Engine(Protocol):
    """Moves transfers between memory and files. Made by its user, started by one handle."""

    @property
    def name(self) -> str:
        """One word, such as "libaio" or "threads"."""

    @property
    def capabilities(self) -> Capabilities:
        """Its abilities beside this protocol; constant."""

    def start(self, options: Options) -> None:
        """Take up the kernel's resources and begin.

        Raises:
            BackendUnavailableError: The kernel does not give them.
            RuntimeError: It was started before.
        """

    def open_completion_queue(self) -> CompletionQueue:
        """A new completion queue."""

    def prepare(self, cq: CompletionQueue, token: int, transfer: Transfer) -> Request:
        """A transfer that is ready to start; its token will be reported at `cq`."""

    def counters(self) -> Counters:
        """The work so far."""

    def stop(self) -> None:
        """Finish submitted requests, then give everything back. Does not wait; idempotent."""

    def join(self) -> None:
        """Wait until `stop` has taken effect."""


def end(engine: Engine) -> None:
    """Stop an engine that nothing was asked of, and wait for its threads."""
    engine.stop()
    engine.join()


class RowsEngine(Engine, Protocol):
    """An engine that moves many rows at once as well."""

    def prepare_rows(
        self, cq: CompletionQueue, token: int, transfer: Transfer, rows: Rows
    ) -> Request:
        """As `prepare`, for rows: `transfer` tells of memory and file, its span says nothing."""


class BatchEngine(Engine, Protocol):
    """An engine that moves many transfers as one request as well."""

    def prepare_batch(
        self, cq: CompletionQueue, token: int, transfers: Sequence[Transfer]
    ) -> BatchRequest:
        """As `prepare`; the token is reported once all of them are done."""


class ShortEngine(Engine, Protocol):
    """An engine that has cheaper requests for the short transfers of one file."""

    def short_place(
        self, opcode: int, fd: int, direct: bool, unit: int, memory: int
    ) -> Callable[[CompletionQueue, int, int], ShortRequest]:
        """Their maker, called with a queue, a token, and the flag of a storage to be held.

        `unit` and `memory` are the alignments of direct I/O, or 1. Keep the engine for as long.
        """


class GilKeepingEngine(Engine, Protocol):
    """An engine that serves a thread which keeps the GIL in its calls."""

    def open_gil_keeping_queue(self) -> CompletionQueue:
        """A completion queue; requests for it are prepared, started and reaped with the GIL."""


class LayeredEngine(Engine, Protocol):
    """An engine that moves its transfers through another one, which counts their pieces."""

    def inside(self) -> Counters:
        """The other engine's counts of this one's transfers."""


def open_gil_keeping_queue(engine: Engine) -> CompletionQueue:
    """A queue for a thread that is to keep the GIL; an ordinary one if the engine has no other."""
    if engine.capabilities.keeps_gil:
        return cast("GilKeepingEngine", engine).open_gil_keeping_queue()
    return engine.open_completion_queue()


def own_counters(engine: Engine) -> Counters:
    """An engine's counters without what another engine has counted as well."""
    if not engine.capabilities.works_through_another:
        return engine.counters()
    return engine.counters().since(cast("LayeredEngine", engine).inside())


def prepare_batch(
    engine: Engine, cq: CompletionQueue, token: int, transfers: Sequence[Transfer]
) -> BatchRequest:
    """A batch that is ready to start.

    Raises:
        BackendUnavailableError: The engine moves no batches.
    """
    if not engine.capabilities.batches:
        raise _lacking(engine, "prepare_batch", "batches", "BatchEngine")
    return cast("BatchEngine", engine).prepare_batch(cq, token, transfers)


def total(outcomes: Sequence[Outcome]) -> Outcome:
    """The outcome of several transfers: the first error, or that some were cancelled."""
    failed = [each for each in outcomes if each.error]
    first = next((each for each in failed if each.error != errno.ECANCELED), None)
    first = first or (failed[0] if failed else None)
    return Outcome(
        first.error if first else 0,
        sum(each.transferred for each in outcomes),
        sum(each.direct_bytes for each in outcomes),
        sum(each.bounced_bytes for each in outcomes),
        sum(each.buffered_bytes for each in outcomes),
        first.cause if first else None,
    )


def prepare(
    engine: Engine, cq: CompletionQueue, token: int, transfer: Transfer, rows: Rows | None
) -> Request:
    """A transfer, or one of rows, that is ready to start.

    Raises:
        BackendUnavailableError: The engine moves no rows.
    """
    if rows is None:
        return engine.prepare(cq, token, transfer)
    check_rows(engine)
    return cast("RowsEngine", engine).prepare_rows(cq, token, transfer, rows)


def check_rows(engine: Engine) -> None:
    """Whether an engine moves rows.

    Raises:
        BackendUnavailableError: It does not.
    """
    if not engine.capabilities.rows:
        raise _lacking(engine, "prepare_rows", "rows", "RowsEngine")


def _lacking(engine: Engine, method: str, moved: str, protocol: str) -> BackendUnavailableError:
    return BackendUnavailableError(
        f"the engine {engine.name!r} moves no {moved}",
        remedy=f"give it a {method} (nvmeio.engines.base.{protocol}) and name {moved!r} in its "
        "capabilities, or use 'libaio'",
    )


class RowsFailure(EngineError):
    """Some rows could not be moved; the operation adds which file it was.

    Args:
        errno: The errno of the first of them.
        row: Its number.
        file_offset: Its offset in the file.
        rows: How many there are, of what length.
        whole: How many of them are whole.
        mask: Tells which.
    """

    def __init__(
        self,
        errno: int,
        row: int,
        file_offset: int,
        rows: Rows,
        whole: int,
        mask: Callable[[], bytes],
    ) -> None:
        super().__init__(errno, "")
        self.row = row
        self.file_offset = file_offset
        self.rows = rows
        self.whole = whole
        self.mask = mask

    def with_context(self, **about: Any) -> RowsError:
        about = {**about, "file_offset": self.file_offset, "nbytes": self.rows.row_bytes}
        return RowsError(
            self.errno,
            row=self.row,
            rows=self.rows.number,
            whole=self.whole,
            _whole_rows=self.mask(),
            **about,
        )


def with_cause(outcome: Outcome, raw: Any, rows: Rows) -> Outcome:
    """An outcome with the error that it stands for, given the shim's rows."""
    if outcome.error in (0, errno.ECANCELED):
        return outcome
    return outcome._replace(cause=_cause(outcome.error, raw, rows))


def planning_failure(code: int, raw: Any) -> BaseException | None:
    """Why rows may not be moved at all, given what sorting them told; None for other errors."""
    if code == errno.EEXIST:
        pair = ffi.new("uint64_t[2]")
        lib.nv_rows_overlap(raw, pair, pair + 1)
        return ValueError(
            f"rows {pair[0]} and {pair[1]} of a scatter overlap in the file, so the result would "
            "depend on their order; nothing was written"
        )
    if code == errno.ERANGE:
        return ValueError("file_offsets changed while they were read: keep them until then")
    return None


def _cause(code: int, raw: Any, rows: Rows) -> BaseException:
    failure = planning_failure(code, raw)
    if failure is not None:
        return failure
    result = lib.nv_rows_outcome(raw)

    def mask() -> bytes:
        whole = bytearray(rows.number)
        lib.nv_rows_mask(raw, ffi.from_buffer("uint8_t[]", whole, require_writable=True))
        return bytes(whole)

    row = min(int(result.failed_row), rows.number - 1)
    return RowsFailure(code, row, int(result.failed_offset), rows, int(result.whole), mask)

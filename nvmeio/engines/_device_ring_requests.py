"""Requests of the ring: transfers of device memory, cut into parts of a chunk at most.

A plain transfer is cut where it comes to a chunk's end. A gather or scatter is cut into as many
rows as a chunk holds, in the caller's order: the host engine moves them as rows between the file
and the chunk, where they lie as they lie on the device, so that one copy takes them all there. So
rows are sorted, and read together, within a chunk. A row larger than a chunk goes in pieces, as
plain transfers do.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import Any

import torch

from nvmeio._bindings import ffi, lib
from nvmeio._checks import OFFSET_MAX
from nvmeio._pages import PAGE_BYTES
from nvmeio._threads.threads import start
from nvmeio.engines._queued import DeviceRequest, QueuedEngine
from nvmeio.engines.base import (
    CompletionQueue,
    Opcode,
    Outcome,
    Request,
    Rows,
    RowsFailure,
    Transfer,
    planning_failure,
)
from nvmeio.engines.transfers import Plan
from nvmeio.errors import counted

_FEW_ROWS = 2048  # sorted in less time than a thread needs to begin
_OFFSET_BYTES = 8


# Copies of at least so many bytes begin without releasing the GIL. There may be thousands of
# smaller ones, and CUDA's work at the beginning of each is better done beside Python.
PROMPT_BYTES = 1 << 20


class Chunks:
    """The ring's memory, in chunks, some of them cut into cells; 0 `cell_bytes` cut none."""

    def __init__(self, ring: torch.Tensor, chunk_bytes: int, cell_bytes: int) -> None:
        self._base = ring.data_ptr()
        self._chunk_bytes = chunk_bytes
        self._cell_bytes = cell_bytes
        self.storage = ring.untyped_storage()
        # Not where it was locked before CUDA was in use. And a stream that was asked for a thousand
        # things that it has not done lets nobody ask for more: not with the GIL.
        self.are_prompt = ring.is_pinned() and ring.numel() <= 256 * PROMPT_BYTES
        self._whole = [ring[at : at + chunk_bytes] for at in range(0, ring.numel(), chunk_bytes)]
        # By number, of those that are cut: the chunk, its free cells, and how many it has.
        self._cut: dict[int, tuple[torch.Tensor, list[torch.Tensor], int]] = {}

    def take(self, nbytes: int) -> torch.Tensor | None:
        """Memory for so many bytes, or a chunk for a part of them; None if none is free."""
        if nbytes > self._cell_bytes:
            if not self._whole:
                self._join()
            return self._whole.pop() if self._whole else None
        with_cells = [cells for _, cells, _ in self._cut.values() if cells]
        if with_cells:
            return min(with_cells, key=len).pop()  # the others are the sooner whole again
        if not self._whole:
            return None
        chunk, each = self._whole.pop(), self._cell_bytes
        cells = [chunk[at : at + each] for at in range(0, self._chunk_bytes - each + 1, each)]
        self._cut[self._number(chunk)] = chunk, cells, len(cells)
        return cells.pop()

    def give_back(self, memory: torch.Tensor) -> None:
        if memory.nbytes == self._chunk_bytes:
            self._whole.append(memory)
        else:
            self._cut[self._number(memory)][1].append(memory)

    def _join(self) -> None:
        for number, (chunk, cells, most) in list(self._cut.items()):
            if len(cells) == most:
                del self._cut[number]
                self._whole.append(chunk)

    def _number(self, memory: torch.Tensor) -> int:
        return (memory.data_ptr() - self._base) // self._chunk_bytes


@dataclass(eq=False)
class RingPart:
    """A part of a transfer in a chunk."""

    request: RingRequest
    start: int  # in the tensor
    nbytes: int
    chunk: torch.Tensor
    shift: int  # where in the chunk it begins
    file_offset: int
    rows: Rows | None = None  # of which it consists
    host: Request | None = None
    plan: Plan | None = None
    cancelled: bool = False
    token: int = 0  # of its transfer between drive and memory

    @property
    def bytes(self) -> torch.Tensor:
        return self.chunk[self.shift : self.shift + self.nbytes]

    @property
    def device(self) -> torch.device:
        memory = self.request.transfer.memory.device
        assert memory is not None
        return memory.device


class RingRequest(DeviceRequest):
    """A transfer, and how far it got."""

    next = 0  # the first byte of the tensor that no part has

    @property
    def exhausted(self) -> bool:
        """Whether no further part of it is to be begun."""
        return self.stop or self.next >= self.transfer.nbytes

    def checked(self) -> bool:
        """Whether it may begin, or end, as far as the host has to look at it before."""
        return True

    @property
    def wanted_bytes(self) -> int:
        """Memory for all that is left of it."""
        file_offset = self.transfer.file_offset + self.next
        return file_offset % PAGE_BYTES + self.transfer.nbytes - self.next

    def cut(self, chunk: torch.Tensor) -> RingPart:
        """The next part. In chunks, bytes lie as they lie in the file's pages: no bounce."""
        file_offset = self.transfer.file_offset + self.next
        return self._piece(chunk, file_offset, self.transfer.nbytes - self.next)

    def landed(self, part: RingPart, outcome: Outcome) -> None:
        """Note how the host engine's part of it ended; the part's bytes are those to go on."""
        if outcome.error:
            if outcome.error != errno.ECANCELED:
                self.fail(outcome.error)
            part.nbytes = 0
        elif self.transfer.opcode == Opcode.READ and outcome.transferred < part.nbytes:
            # The file ends here: nothing lies behind. Parts before it may still be on their way.
            self.next = self.transfer.nbytes
            part.nbytes = outcome.transferred

    def _piece(self, chunk: torch.Tensor, file_offset: int, most: int) -> RingPart:
        shift = file_offset % PAGE_BYTES
        nbytes = min(chunk.numel() - shift, most)
        part = RingPart(self, self.next, nbytes, chunk, shift, file_offset)
        self.next += nbytes
        return part


class RingRowsRequest(RingRequest):
    """A gather or scatter of device memory; MemoryError if a scatter's rows cannot be sorted."""

    def __init__(
        self,
        engine: QueuedEngine[Any],
        token: int,
        transfer: Transfer,
        cq: CompletionQueue,
        rows: Rows,
    ) -> None:
        super().__init__(engine, token, transfer, cq)
        self.rows = rows
        self._sorting: _Sorting | None = None
        if transfer.opcode == Opcode.WRITE and rows.number > 1:
            self._sorting = _Sorting(rows)
        self.pieces = 0  # of rows larger than a chunk
        self._left: dict[int, int] = {}  # bytes of such rows that are still to come
        self._ends: list[tuple[int, int, bytes | None]] = []  # first row, how many, which are whole
        self._first: tuple[int, int, int] | None = None  # that failed: row, file_offset, errno

    def cancel(self) -> None:
        sorting = self._sorting
        if sorting is not None:
            sorting.stop()  # it takes long
        super().cancel()

    def outcome(self) -> Outcome:
        plain = super().outcome()
        if self._first is None or plain.error:
            return plain
        row, file_offset, code = self._first
        whole = sum(number if mask is None else sum(mask) for _, number, mask in self._ends)
        failure = RowsFailure(code, row, file_offset, self.rows, whole, self._mask)
        return plain._replace(error=code, cause=failure)

    def _mask(self) -> bytes:
        whole = bytearray(self.rows.number)
        for first, number, mask in self._ends:
            whole[first : first + number] = b"\x01" * number if mask is None else mask
        return bytes(whole)

    @property
    def large_rows(self) -> int:
        """Rows moved whole that the host engine knows only pieces of."""
        return len(self._ends) if self.pieces else 0

    # --- for the pump ---------------------------------------------------------------------

    def checked(self) -> bool:
        sorting = self._sorting
        if sorting is None:
            return True
        if not sorting.begun:
            sorting.begin()
        if not sorting.done:
            return False
        if sorting.code and sorting.code != errno.ECANCELED:
            self.fail(sorting.code, sorting.failure())
        self._sorting = None
        return True

    @property
    def wanted_bytes(self) -> int:
        """Memory for the rest; a piece of a row begins somewhere in a page."""
        return PAGE_BYTES + self.transfer.nbytes - self.next

    def cut(self, chunk: torch.Tensor) -> RingPart:
        rows = self.rows
        row, within = divmod(self.next, rows.row_bytes)
        if rows.row_bytes > chunk.numel():
            return self._piece(chunk, self._offset_of(row) + within, rows.row_bytes - within)
        number = min(chunk.numel() // rows.row_bytes, rows.number - row)
        some = Rows(number, rows.row_bytes, rows.offsets + _OFFSET_BYTES * row)
        nbytes = number * rows.row_bytes
        part = RingPart(self, self.next, nbytes, chunk, 0, self.transfer.file_offset, some)
        self.next += nbytes
        return part

    def _offset_of(self, row: int) -> int:
        offset = int(ffi.cast("int64_t *", self.rows.offsets)[row])
        if not 0 <= offset <= OFFSET_MAX - self.rows.row_bytes:
            raise ValueError("file_offsets changed while they were read: keep them until then")
        return offset

    def landed(self, part: RingPart, outcome: Outcome) -> None:
        first = part.start // self.rows.row_bytes
        if part.rows is None:
            self._piece_landed(part, outcome, first)
        elif not outcome.error:
            self._ends.append((first, part.rows.number, None))
        elif isinstance(outcome.cause, RowsFailure):
            failed, mask = outcome.cause, outcome.cause.mask()
            self._row_failed(first + failed.row, failed.file_offset, failed.errno)
            self._ends.append((first, part.rows.number, mask))
            if self.transfer.opcode == Opcode.READ:  # what the chunk held before is nobody's row
                whole = torch.frombuffer(bytearray(mask), dtype=torch.uint8)
                part.bytes.view(part.rows.number, -1).mul_(whole.unsqueeze(1))
        else:
            if outcome.error != errno.ECANCELED:
                self.fail(outcome.error, outcome.cause)
            part.nbytes = 0

    def _piece_landed(self, part: RingPart, outcome: Outcome, row: int) -> None:
        """Note a piece of a row that is larger than a chunk."""
        row_bytes = self.rows.row_bytes
        if not outcome.error and outcome.transferred == part.nbytes:
            self.pieces += 1
            left = self._left[row] = self._left.get(row, row_bytes) - part.nbytes
            if not left:
                del self._left[row]
                self._ends.append((row, 1, None))
            return
        if outcome.error != errno.ECANCELED:
            at = part.file_offset - part.start % row_bytes
            self._row_failed(row, at, outcome.error or errno.ENODATA)
        part.nbytes = 0

    def _row_failed(self, row: int, file_offset: int, code: int) -> None:
        if self._first is None or row < self._first[0]:  # the first counts
            self._first = row, file_offset, code


class _Sorting:
    """Whether rows of a scatter overlap: found out before any is written, and beside the ring.

    Their offsets have to be kept until it is done.
    """

    def __init__(self, rows: Rows) -> None:
        raw = lib.nv_rows_new(Opcode.WRITE, 0, *rows, PAGE_BYTES, 1, 1, False, False, 1)
        if raw == ffi.NULL:
            raise MemoryError(f"no memory to sort {counted(rows.number, 'row')} in")
        self._raw = ffi.gc(raw, lib.nv_rows_free)
        self._few = rows.number <= _FEW_ROWS
        self.begun = self.done = False
        self.code = 0

    def begin(self) -> None:
        self.begun = True
        if self._few:
            self._sort()
            return
        try:
            start(self._sort, "nvmeio-rows", lambda _: self._sort())
        except (RuntimeError, MemoryError):  # no thread can be had
            self._sort()

    def _sort(self) -> None:
        self.code = -lib.nv_rows_plan(self._raw)
        self.done = True

    def stop(self) -> None:
        lib.nv_rows_stop(self._raw)

    def failure(self) -> BaseException | None:
        return planning_failure(self.code, self._raw)

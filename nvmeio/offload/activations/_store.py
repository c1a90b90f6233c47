"""The storages that autograd has saved: in memory, being written, or on the drive alone.

All that changes belongs to one thread (`OwnerThread`). A caller holds a claim, which dies
with the graph that saved the tensor, however that ends.

*What is written.* Only what nobody else has: once every tensor over a storage is gone but those
that autograd has saved, its bytes cannot change any more. So they are written from where they are,
and its memory is free when they are. A tensor that is still referenced (a parameter, a buffer, the
input) keeps its memory, and stays. The oldest go first: those saved last are needed first.

*What is read*: see `_reads`.

One half of the budget is for tensors that forward has saved, the other for reads.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from nvmeio import _checks
from nvmeio._checks import Paths
from nvmeio._io.drives import DriveHandles, ScratchFile
from nvmeio._io.inflight import MOST_BYTES
from nvmeio._io.long_call import profiled
from nvmeio._storage import crc32, durable, untrusted
from nvmeio._threads.closing import on_error
from nvmeio._threads.owner import Claim, OwnerThread
from nvmeio._threads.shutdown import Ending, open_owned
from nvmeio.errors import ClosedError, TransferError, with_context
from nvmeio.handle import AioHandle
from nvmeio.offload.activations._reads import ActivationReads, SavedStorage, bytes_over
from nvmeio.operation import Operation

logger = logging.getLogger("nvmeio")


_CLOSED = "the swapped activations are closed"


class ActivationStore:
    """Keeps what autograd saved within a budget, `resident_bytes`."""

    def __init__(self, resident_bytes: int, checksum: bool) -> None:
        self.resident_bytes = resident_bytes
        self._checksum = checksum
        self.saving_bytes = resident_bytes // 2  # in memory as forward has saved it
        self.reading_bytes = resident_bytes - self.saving_bytes
        self._enough = self.saving_bytes // 2  # from here on, the oldest are written
        self.closed = False
        self.written_bytes = 0
        self._numbers = 0
        self._in_memory: dict[int, SavedStorage] = {}  # by storage, the last saved last
        self._memory_bytes = 0
        self.writing: dict[SavedStorage, None] = {}
        self._writing_bytes = 0
        self._round = 0  # of `_make_room`
        self._failed: BaseException | None = None  # a write of this round; its bytes are in memory
        self._said = False  # that there is no room
        self._resources = contextlib.ExitStack()
        self.owner = OwnerThread("nvmeio-activations", _CLOSED)
        self._above: list[Callable[[], None]] = []

    def open(self, swap_dir: Paths, handle: AioHandle | None) -> Ending:
        """Make the files; returns what closes them."""
        return open_owned(self.owner, self._open, swap_dir, handle)

    def _open(self, swap_dir: Paths, handle: AioHandle | None) -> Ending:
        ending = Ending(self.owner, self._close)
        paths = _checks.directory_paths("swap_dir", swap_dir)
        for path in paths:
            durable.make_directory(path, mode=untrusted.DIRECTORY_MODE, durable=False)
        self.file = ScratchFile(paths)
        self._resources.callback(self.file.close)
        self._handles = DriveHandles(handle, paths)
        self._resources.callback(self._handles.close)
        self._reads = ActivationReads(self.file, self._handles, self.reading_bytes)
        self._resources.callback(self._reads.close)
        return ending

    # For callers

    def save(self, storage: torch.UntypedStorage) -> tuple[SavedStorage, Claim]:
        """Keep a storage's bytes for as long as the claim lives.

        TransferError if they do not fit into memory, and could not be written (ENOSPC, EIO).
        """
        return self.owner.call(self.keep, storage)

    def bytes_of(self, saved: SavedStorage) -> torch.UntypedStorage:
        """A storage with the same bytes, in memory; raises as `ActivationReads.bring`."""
        with profiled("wait", "saved activations"):
            return self.owner.call(self.bring, saved)

    # For a level above, in the owner's thread

    def above(self, close: Callable[[], None]) -> None:
        """Have the level above closed before this."""
        self._above.append(close)

    def next_number(self) -> int:
        """A number for the storage that is saved now, higher than all before."""
        self._numbers += 1
        return self._numbers

    def arrived(self, saved: SavedStorage) -> bool:
        """Whether `bring` would find its bytes in memory."""
        return saved.storage is not None or self._reads.arrived(saved)

    def write_until(self, fits: Callable[[], bool]) -> None:
        """Write the oldest until something fits, or nothing is left to write."""
        self._round += 1
        self._failed = None
        while not fits() and self._await_write(self._begin_writes(0), 0):
            pass

    # Saving

    def keep(
        self, storage: torch.UntypedStorage, number: int | None = None
    ) -> tuple[SavedStorage, Claim]:
        """`save`, in the owner's thread; `number` is from an earlier `next_number`, or None."""
        key = storage._cdata
        saved = self._in_memory.pop(key, None)
        number = self.next_number() if number is None else number
        if saved is None:
            saved = SavedStorage(number, storage, storage.nbytes())
            self._memory_bytes += saved.nbytes
        elif saved.writing is not None:
            saved.wanted = True
        else:
            saved.number = number
        self._in_memory[key] = saved
        saved.holds += 1
        claim = self.owner.claim(self._let_go, saved)
        del storage
        self._make_room()
        return saved, claim

    def _make_room(self) -> None:
        """Begin to write bytes above `_enough`, and wait while there are more than `saving_bytes`.

        Storages that cannot be written stay in memory, and the next call tries again. That is an
        error only if they do not fit.
        """
        self._round += 1
        self._failed = None
        # The error has no name here: its frames end in this one, and would keep all that they know.
        while self._await_write(self._begin_writes(self._enough), self.saving_bytes):
            pass

    def _await_write(self, full: TransferError | None, most: int) -> bool:
        """Wait for the oldest write; False if there is none, or `most` bytes are in memory.

        Raises if there is none since one has failed, or the drive has no room (`full`).
        """
        if self._memory_bytes <= most:
            return False
        if not self.writing:
            failed, self._failed = self._failed or full, None
            if failed is not None:
                raise failed
            return False
        oldest = next(iter(self.writing))
        for operation in oldest.writing or ():
            _ended(operation)
        self._written(oldest)
        return True

    def _begin_writes(self, enough: int) -> TransferError | None:
        """Begin to write the oldest; returns the error where the drive has no room."""
        for saved in self._in_memory.values():
            if self._memory_bytes - self._writing_bytes <= enough:
                return None
            if self._writing_bytes >= MOST_BYTES and len(self.writing) > 1:
                return None
            if saved.writing is None and saved.failed_in != self._round and saved.is_alone():
                try:
                    self._begin_write(saved)
                except TransferError as full:
                    if not self._said:
                        logger.warning("saved activations stay in memory while they fit: %s", full)
                    self._said = True
                    return full
        return None

    def _begin_write(self, saved: SavedStorage) -> None:
        try:
            place = self.file.take(saved.nbytes)
        except TransferError as full:
            raise with_context(
                full,
                f"room for {saved.nbytes} bytes more of saved activations beside "
                f"{self.file.used_bytes} (or raise resident_bytes={self.resident_bytes})",
            ) from full
        memory = bytes_over(saved.storage)
        begun: list[Operation] = []
        with on_error(self.file.give_back, place, saved.nbytes), on_error(_stop, begun):
            for span in self.file.spans(place, saved.nbytes):
                part = span.part(memory)
                begun.append(self._handles.async_pwrite(part, span.file, span.file_offset))
        saved.place, saved.writing, saved.wanted = place, begun, False
        saved.begun_in = self._round
        self.writing[saved] = None
        self._writing_bytes += saved.nbytes
        if self._checksum:  # while it is written
            saved.sum = crc32.of_tensor(memory)
        for operation in begun:
            operation.add_done_callback(partial(_tell, self.owner, self._end_write, saved))

    def _end_write(self, saved: SavedStorage) -> None:
        """A part of it is written: begin the next writes, unless one has failed."""
        self._written(saved)
        if self._failed is None and not self.closed:
            with contextlib.suppress(Exception):  # the next forward meets it, if there is one
                self._begin_writes(self._enough)

    def _written(self, saved: SavedStorage) -> None:
        operations = saved.writing
        if operations is None or not all(operation.done() for operation in operations):
            return
        saved.writing = None
        del self.writing[saved]
        self._writing_bytes -= saved.nbytes
        failures = [_ended(operation) for operation in operations]
        failed = next((each for each in failures if each is not None), None)
        cancelled = any(operation.cancelled() for operation in operations)
        if failed is None and not cancelled:
            self.written_bytes += saved.nbytes
            if saved.holds and not saved.wanted:
                self._forget(saved)
                self._reads.add(saved)
                return
        self.file.give_back(saved.place, saved.nbytes)
        if not saved.holds:
            self._forget(saved)
        elif failed is not None:  # its bytes are still there
            logger.warning("saved activations could not be written: %s", failed)
            if saved.begun_in == self._round:  # else of a pass before: tried again
                saved.failed_in, self._failed = self._round, failed

    def _forget(self, saved: SavedStorage) -> None:
        storage, saved.storage = saved.storage, None
        assert storage is not None
        del self._in_memory[storage._cdata]
        self._memory_bytes -= saved.nbytes

    def _let_go(self, saved: SavedStorage) -> None:
        saved.holds -= 1
        if saved.holds or self.closed:
            return
        if saved.writing is not None:
            for operation in saved.writing:
                operation.cancel()
            self._written(saved)
        elif saved.storage is not None:
            self._forget(saved)
        else:
            self._reads.remove(saved)

    # Reading

    def bring(self, saved: SavedStorage) -> torch.UntypedStorage:
        """`bytes_of`, in the owner's thread."""
        if saved.storage is not None:
            saved.wanted = True  # its user may change it while it is being written
            self.look_ahead(saved.number)
            return saved.storage
        return self._reads.bring(saved)

    def look_ahead(self, number: int) -> None:
        """Begin to read the storages that were saved before this one, the last first."""
        self._reads.look_ahead(number)

    # The end

    def check_open(self) -> None:
        if self.closed:
            raise ClosedError(_CLOSED)
        if self.owner.forked:
            raise ClosedError("this process was forked from the activations' owner: make one here")

    def _close(self) -> None:
        self.closed = True
        for close in self._above:
            close()
        self._above.clear()
        for saved in list(self.writing):
            _stop(saved.writing or [])
            saved.writing = None
        for saved in self._in_memory.values():
            saved.storage = None
        self.writing.clear()
        self._in_memory.clear()
        self._resources.close()

    # State

    @property
    def in_memory_bytes(self) -> int:
        """The bytes that are saved and in memory."""
        return self.owner.call(lambda: self._memory_bytes)

    @property
    def on_drive_bytes(self) -> int:
        """The bytes that are saved and on the drive alone."""
        return self.owner.call(lambda: self._reads.nbytes)

    @property
    def read_bytes(self) -> int:
        return self._reads.read_bytes

    @property
    def file_bytes(self) -> int:
        return self.owner.call(lambda: self.file.nbytes)


def _tell(owner: OwnerThread, work: Callable[..., object], saved: Any, _: Operation) -> None:
    owner.post(work, saved)


def _ended(operation: Operation) -> BaseException | None:
    """Wait for an operation; its error, or None, also where it was cancelled."""
    try:
        return operation.exception()
    except concurrent.futures.CancelledError:
        return None


def _stop(operations: list[Operation]) -> None:
    for operation in operations:
        operation.cancel()
    for operation in operations:
        _ended(operation)

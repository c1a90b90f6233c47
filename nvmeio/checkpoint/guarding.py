"""Tensors that guarded optimizers own, held for a writer that is not a `Checkpointer`'s.

Such a writer is somebody else's until it asks: from when it begins (`Held.take`) it may read the
tensors themselves, and until it says that it does so no longer (`Held.reads`), or has ended, no
step goes on.
"""

from __future__ import annotations

import _thread
import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from nvmeio._formats.torch_layout import FileLayout, StorageRecord
from nvmeio._io.owner import Claim, OwnerThread
from nvmeio._plan import PAGE_BYTES, round_up
from nvmeio.checkpoint import _guard, _guarded_snapshot
from nvmeio.checkpoint._ended import Ended
from nvmeio.checkpoint._guard import Guard
from nvmeio.checkpoint._live import Live
from nvmeio.checkpoint._snapshot import SnapshotMemory
from nvmeio.checkpoint._watched import Told as Told


class Held:
    """Tensors that are left where they lie, for one save.

    Attributes:
        ended: Set when nobody reads them any more.
        error: What was found changed by somebody whom no writer could tell; None if nothing was.
    """

    def __init__(self, guard: Guard, live: Live | None, storages: Sequence[_Storage]) -> None:
        self._guard = guard  # optimizers know it weakly
        self._live = live
        self._storages = sorted(storages)
        self._starts = [storage.address for storage in self._storages]
        self._ending = threading.Lock()
        self._checked = live is None
        self._taken_by = 0
        self.ended = Ended()
        self.error: BaseException | None = None

    @property
    def taken(self) -> bool:
        """Whether a thread has begun to save it."""
        return self._taken_by != 0

    def wait(self) -> None:
        """Until nobody reads it any more, if anybody has begun to."""
        if self._taken_by == _thread.get_ident():
            self.end()  # whoever asks has read it
        elif self.taken:
            self.ended.wait(None)

    @property
    def nbytes(self) -> int:
        """What is not copied."""
        return 0 if self._live is None else self._live.nbytes

    @property
    def most_in_flight_bytes(self) -> int:
        """What may be in flight at once: a step waits for it."""
        return _guarded_snapshot._MOST_IN_FLIGHT_BYTES

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether a contiguous tensor lies in what is held."""
        return self._place(tensor) is not None

    def take(self) -> bool:
        """This thread begins to save; False where a step came before, and all was copied for it."""
        self._taken_by = _thread.get_ident()
        return self._live is None or self._live.begin_unseen()

    def copied(self, tensor: torch.Tensor) -> torch.Tensor:
        """A held tensor as it was, where `take` returned False."""
        read = self.reader(tensor)
        assert read is not None
        return read(0, tensor.nbytes).view(tensor.dtype).view(tensor.shape)

    def reader(self, tensor: torch.Tensor) -> Callable[[int, int], torch.Tensor] | None:
        """Reads (offset, nbytes) of a held tensor, in whatever order; None of one that is not."""
        found, live = self._place(tensor), self._live
        if found is None or live is None:
            return None
        number, base = found
        return lambda offset, nbytes: live.read(number, base + offset, nbytes)

    def position(self, tensor: torch.Tensor) -> int | None:
        """Where a tensor comes among what is held, in bytes, for `written`; None if it is not."""
        found = self._place(tensor)
        if found is None or self._live is None:
            return None
        number, base = found
        return _offset(self._live, number) + base

    def reads(self) -> None:
        """The writer reads through `reader` only, from now on."""
        if self._live is not None:
            self._live.seen()

    def written(self, position: int) -> None:
        """What will be read lies behind a position, or is in the file."""
        if self._live is not None:
            self._live.written(position)

    def check(self) -> None:
        """All was read that ever will be.

        Raises:
            IntegrityError: Something else than a step changed it meanwhile.
        """
        self._checked = True
        if self._live is not None:
            self._live.all_read()

    def end(self, told: bool = False) -> None:
        """Nobody reads it any more. Idempotent, from any thread.

        Args:
            told: Whether what went wrong has been raised to the writer.
        """
        with self._ending:
            if self.ended.done:
                return
            if not (told or self._checked) and self.taken:
                try:
                    self.check()
                except BaseException as changed:
                    self.error = changed
            if self._live is not None:
                self._live.over()
            self.ended.set()

    def _place(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """The number of its storage, and where it begins there."""
        at = tensor.data_ptr()
        index = bisect_right(self._starts, at) - 1
        if index < 0 or not tensor.nbytes:
            return None
        storage = self._storages[index]
        if at + tensor.nbytes > storage.address + storage.nbytes:
            return None
        return storage.number, at - storage.address


class _Storage(NamedTuple):
    """Where one lies, and its number in `Live`."""

    address: int
    nbytes: int
    number: int


class TensorGuard:
    """Holds what optimizers own of the tensors that are to be saved.

    Args:
        memory_bytes: Of what is copied out of a step's way; None for as much as the machine has.
    """

    def __init__(self, memory_bytes: int | None) -> None:
        self._guard = Guard(memory_bytes)
        self._memory_bytes = memory_bytes
        self._owner = OwnerThread("nvmeio-guarding")
        self._last: Held | None = None

    def add(self, *optimizers: torch.optim.Optimizer) -> None:
        """Guard these from now on; see `Checkpointer.guard`."""
        found = _guard.checked(optimizers)
        self._owner.call(self._guard.add, found)

    def hold(self, tensors: Sequence[torch.Tensor], told: Told) -> tuple[Held, OwnedClaim]:
        """Hold what is guarded of these until the claim ends.

        Waits until the save before has ended, if it has begun.

        Args:
            tensors: Contiguous ones, in the order in which they will be read.
            told: Of the save; for errors.

        Raises:
            IntegrityError: What the save before read was changed, and its writer could not be told.
        """
        self.wait()
        return self._owner.call(self._hold, tensors, told)

    def wait(self) -> None:
        """Until the last save that has begun has ended; raises as `hold`."""
        last = self._last
        if last is None:
            return
        last.wait()
        if last.error is not None:
            error, last.error = last.error, None
            raise error

    def release(self) -> None:
        """Give the memory back."""
        self._guard.release()

    def _hold(self, tensors: Sequence[torch.Tensor], told: Told) -> tuple[Held, OwnedClaim]:
        layout = _layout(tensors)
        watched = self._guard.watched(layout, devices=False)
        records = [layout.records[index] for index in watched]
        left = [(record, record.offset, record.end) for record in records]
        memory = self._guard.refuge
        if self._last is not None and not self._last.ended.done:
            memory = SnapshotMemory(self._memory_bytes)  # one that never began has the other
        live = None
        if left:
            of_all = [each for found in watched.values() for each in found]
            live = Live(left, of_all, memory, 0, told)
        storages = [
            _Storage(_address(record), record.nbytes, number)
            for number, record in enumerate(records)
        ]
        held = Held(self._guard, live, storages)
        claim = self._owner.claim(held.end)
        self._guard.hold(*(() if live is None else (live,)))
        self._last = held
        return held, OwnedClaim(self._owner, claim)


class OwnedClaim:
    """A claim, and its owner: who has this keeps both."""

    def __init__(self, owner: OwnerThread, claim: Claim) -> None:
        self._owner = owner
        self._claim = claim


def _layout(tensors: Sequence[torch.Tensor]) -> FileLayout:
    """Their storages, each once, by address; what watches them asks for no more."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    records: list[StorageRecord] = []
    end = 0
    for number, storage in enumerate(storages.values()):
        data = torch.empty(0, dtype=torch.uint8).set_(storage)
        records.append(StorageRecord(f"storage {number}", end, data.nbytes, data, ()))
        end = round_up(end + data.nbytes, PAGE_BYTES)
    return FileLayout(end, [], records)


def _address(record: StorageRecord) -> int:
    assert isinstance(record.data, torch.Tensor)  # a layout of `_layout`
    return record.data.data_ptr()


def _offset(live: Live, number: int) -> int:
    return live.spans.spans[number][0]

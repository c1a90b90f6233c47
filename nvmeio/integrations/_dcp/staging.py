"""A staged state dict of which a part is not copied: what guarded optimizers own.

torch gives it to the thread that saves, and that thread's first step is to ask for its items: from
then on the thread has it, until it ends, or the writer has read all.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.staging import AsyncStager, BlockingAsyncStager

from nvmeio import _checks
from nvmeio._formats.torch_layout import StorageRecord
from nvmeio.checkpoint.guarding import Held, OwnedClaim, TensorGuard, Told

Value = TypeVar("Value")

_PLAIN = (int, float, complex, str, bytes, bool, type(None))


class GuardingStager(AsyncStager):
    """Stages for `dcp.async_save` without copying what optimizers own.

    ::

        stager = GuardingStager(optimizer)
        future = dcp.async_save(
            state_dict, storage_writer=NvmeStorageWriter(path), async_stager=stager
        )

    Parameters and optimizer state change in ``optimizer.step()`` only, so they are written from
    where they lie while training goes on, and a step waits for them: the rules are those of
    `Checkpointer.guard`. All else is copied before `async_save` returns. With `NvmeStorageWriter`
    a step that comes early has the remainder copied out of its way; with another writer, with
    several files per rank, stream transforms or a planner that makes tensors anew it waits until
    all is written.

    What something else than a step changes meanwhile fails the save: the future raises, and
    ``.metadata`` is not written. With another writer, which cannot be told, the next `stage` or
    `close` raises it.

    Use one for all saves, and `close` it after the last; with ``AsyncCheckpointerType.THREAD``. A
    save waits until the one before has ended.

    Args:
        optimizers: As for `Checkpointer.guard`.
        memory_bytes: What may be copied out of a step's way; None for as much as the machine has.

    Raises:
        TypeError: One is no torch optimizer, or wraps another one.
    """

    _synchronize_after_execute = False

    def __init__(
        self, *optimizers: torch.optim.Optimizer, memory_bytes: int | str | None = None
    ) -> None:
        self._guard = TensorGuard(_checks.size("memory_bytes", memory_bytes))
        self.guarded_bytes = 0
        self.guard(*optimizers)

    def guard(self, *optimizers: torch.optim.Optimizer) -> None:
        """Guard more of them, from the next save on."""
        self._guard.add(*optimizers)

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The state dict for one save, with the guarded tensors themselves and copies of the rest.

        Raises:
            IntegrityError: The save before was written by another writer than nvmeio's, and what
                it read was changed: its checkpoint is a mixture.
        """
        remedy = (
            "Change it once the future of async_save is done, or in optimizer.step(); torch's own "
            "stagers copy it first"
        )
        tensors = [tensor for tensor in tensors_in(state_dict) if may_be_held(tensor)]
        held, claim = self._guard.hold(
            [local_of(tensor) for tensor in tensors], Told("the distributed checkpoint", remedy)
        )
        staging = _Staging(held)
        made = {key: staging.of(value) for key, value in state_dict.items()}
        staged = Staged(held, claim, staging.aliases)
        staged.update(made)
        self.guarded_bytes = held.nbytes
        return staged

    def synchronize_staging(self) -> None:
        """Nothing is to be waited for: `stage` has copied what it copies."""

    def close(self) -> None:
        """Wait until nothing is read any more, and give the memory back; raises as `stage`.

        Whether a checkpoint is there says the future of `async_save`.
        """
        try:
            self._guard.wait()
        finally:
            self._guard.release()

    def __reduce__(self) -> NoReturn:
        _checks.refuse_pickling(
            self,
            "make one in each process, of the optimizers there; a save by another process "
            "(AsyncCheckpointerType.PROCESS) needs torch's own stager",
        )


class Staged(dict[str, Any]):
    """A state dict for one save; see the module."""

    def __init__(self, held: Held, claim: OwnedClaim, aliases: list[torch.Tensor]) -> None:
        super().__init__()
        self._held = held
        self._claim: OwnedClaim | None = claim
        self._aliases = aliases

    def items(self) -> Any:
        """Torch asks for them in the thread that saves."""
        claim, self._claim = self._claim, None
        if claim is not None:
            _here.taken = _Taken(self._held, claim)  # dies with the thread
            if not self._held.take():
                for alias in self._aliases:
                    local = local_of(alias)
                    local.data = self._held.copied(local)
        return super().items()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "what optimizers own is not copied, so no other process can save it: use "
            "AsyncCheckpointerType.THREAD, or torch's own stager"
        )


class _Taken(NamedTuple):
    held: Held
    claim: OwnedClaim


_here = threading.local()


def taken_here() -> Held | None:
    """What the save of this thread reads where it lies; None where all of it is its own."""
    taken = getattr(_here, "taken", None)
    return None if taken is None or taken.held.ended.done else taken.held


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of it: a DTensor's shard."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def may_be_held(tensor: Any) -> bool:
    """Whether a tensor's bytes are its own memory, in order."""
    local = local_of(tensor) if isinstance(tensor, torch.Tensor) else None
    return (
        local is not None
        and type(local) in (torch.Tensor, torch.nn.Parameter)
        and local.is_cpu
        and local.layout is torch.strided
        and local.is_contiguous()
        and not local.is_conj()
        and not local.is_neg()
        and local.numel() > 0
    )


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors of a state dict, in the order in which torch writes them."""
    if isinstance(value, torch.Tensor):
        return [value]
    parts: Sequence[Any] = ()
    if isinstance(value, Mapping):
        parts = list(value.values())
    elif isinstance(value, (list, tuple)):
        parts = value
    return [tensor for part in parts for tensor in tensors_in(part)]


class _Staging:
    """Makes a `Staged` of a state dict: aliases of what is held, copies of all else."""

    def __init__(self, held: Held) -> None:
        self._held = held
        self._made: dict[int, Any] = {}
        self._copier = BlockingAsyncStager()
        self.aliases: list[torch.Tensor] = []

    def of(self, value: Any) -> Any:
        """What stands for a value."""
        if isinstance(value, _PLAIN):
            return value
        if id(value) not in self._made:
            self._made[id(value)] = self._new(value)
        return self._made[id(value)]

    def _new(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: self.of(part) for key, part in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self.of(part) for part in value)
        if isinstance(value, torch.Tensor):
            return self._of_tensor(value)
        if hasattr(value, "__torch_function__"):  # a ShardedTensor
            return self._copier.stage({"it": value})["it"]
        return copy.deepcopy(value)

    def _of_tensor(self, tensor: torch.Tensor) -> Any:
        if may_be_held(tensor) and self._held.has(local_of(tensor)):
            alias = tensor.detach()
            self.aliases.append(alias)
            return alias
        if type(tensor) in (torch.Tensor, torch.nn.Parameter):
            return tensor.detach().to("cpu", copy=True)
        return self._copier.stage({"it": tensor})["it"]


def is_default(planner: Any) -> bool:
    """Whether a planner gives the tensors themselves, and makes none anew."""
    kind = type(planner)
    names = ("resolve_data", "lookup_object", "transform_object")
    return all(getattr(kind, name, 0) is getattr(DefaultSavePlanner, name, 1) for name in names)


class Reads:
    """The records of one file that are read where they lie, and how far the file has come."""

    def __init__(self, held: Held) -> None:
        self._held = held
        self._behind: list[int | None] = []  # by item: what is read later lies behind this
        self._items = 0
        self._noted: list[_Noted] = []
        self._next = 0

    def begin(self, resolve: Sequence[Callable[[], Value]]) -> list[Callable[[], Value]]:
        """From now on what is held is read through this only.

        Args:
            resolve: The items of the file, in its order: each gives its data.

        Returns:
            What gives the same data.
        """
        data = [each() for each in resolve]
        behind: list[int | None] = [None]
        for each in reversed(data):
            start = None
            if isinstance(each, torch.Tensor) and may_be_held(each):
                start = self._held.position(each)
            after = behind[-1]
            behind.append(after if start is None else start if after is None else min(start, after))
        self._behind = behind[-2::-1]
        self._held.reads()
        return [partial(_itself, each) for each in data]

    def watch(self, records: Sequence[StorageRecord]) -> list[StorageRecord]:
        """The records of the next item, read through what holds them."""
        number, self._items = self._items, self._items + 1
        made: list[StorageRecord] = []
        for record in records:
            data = record.data
            reader = self._held.reader(data) if isinstance(data, torch.Tensor) else None
            if isinstance(data, torch.Tensor) and reader is not None:
                start = self._held.position(data)
                assert start is not None
                self._noted.append(_Noted(record.offset, record.end, start, self._behind[number]))
                record = record._replace(data=reader)
            made.append(record)
        return made

    def check(self) -> None:
        """All of the file is written; raises `IntegrityError` if what was read was changed."""
        self._held.check()

    def finished(self, operation: Any) -> None:
        """A part of the file is written, and all before it."""
        end = operation.file_offset + operation.nbytes
        while self._next < len(self._noted):
            noted = self._noted[self._next]
            if noted.offset >= end:
                return
            reached = noted.start + min(end, noted.end) - noted.offset
            if end >= noted.end:
                self._next += 1
            self._held.written(reached if noted.behind is None else min(reached, noted.behind))
            if end < noted.end:
                return


class _Noted(NamedTuple):
    """A record in the file, where it begins in what is held, and behind what the later ones are."""

    offset: int
    end: int
    start: int
    behind: int | None


def _itself(value: Value) -> Value:
    return value

"""The optimizers of a Checkpointer whose tensors are written from where they lie.

Parameters and optimizer state do not change between two steps. So they need not be copied to be
saved, if a step waits until they are written, or copied after all (`_live`).
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from nvmeio import _device
from nvmeio._formats.torch_layout import FileLayout
from nvmeio._plan import PAGE_BYTES
from nvmeio.checkpoint._device_live import DeviceLive
from nvmeio.checkpoint._guarded_snapshot import GuardedSnapshot, Memories
from nvmeio.checkpoint._live import Live
from nvmeio.checkpoint._snapshot import Snapshot, SnapshotMemory, SnapshotPart
from nvmeio.checkpoint._watched import Told, Watched, local_of, state_of

# Smaller storages in host memory are copied: to watch one costs more. Those of a device never are,
# for a copy first waits for all that the device was asked before.
_LEAST_BYTES = PAGE_BYTES


class _Owned(NamedTuple):
    """A tensor of a guarded optimizer; `key`: of the state, None for the parameter."""

    name: str
    optimizer: torch.optim.Optimizer
    parameter: torch.Tensor
    key: str | None
    local: torch.Tensor


class Guard:
    """What one Checkpointer guards.

    Args:
        memory_bytes: As for `Checkpointer`; what is copied out of a step's way counts, too.
    """

    def __init__(self, memory_bytes: int | None) -> None:
        self.refuge = SnapshotMemory(memory_bytes)
        self._staging = SnapshotMemory(memory_bytes)
        self._optimizers: tuple[weakref.ref[torch.optim.Optimizer], ...] = ()
        self._lives: tuple[Live | DeviceLive, ...] = ()
        self._pid = os.getpid()

    def add(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Guard these from the next save on; not in a main thread, which may be interrupted."""
        for optimizer in optimizers:
            if any(known() is optimizer for known in self._optimizers):
                continue
            _Door.of(optimizer).add(self)
            there = [known for known in self._optimizers if known() is not None]
            self._optimizers = (*there, weakref.ref(optimizer))

    def forget(self) -> None:
        """Guard none of them any more, from the next save on."""
        self._optimizers = ()

    def snapshot(
        self, memory: SnapshotMemory, part: SnapshotPart, told: Told
    ) -> Snapshot | GuardedSnapshot:
        """What is to be saved, as it is now; see `Snapshot`."""
        live = self.watched(part.source) if self._optimizers else {}
        if not live:
            self.release()  # within one budget
            return Snapshot(memory, part)
        return GuardedSnapshot(part, live, Memories(memory, self.refuge, self._staging), told)

    def hold(self, *lives: Live | DeviceLive) -> None:
        """Steps wait for these from now on."""
        held = [each for each in self._lives if not each.free]
        self._lives = (*held, *lives)

    @property
    def held(self) -> tuple[Live | DeviceLive, ...]:
        """What a step waits for; nothing in a forked child."""
        return self._lives if self._pid == os.getpid() else ()

    def release(self) -> None:
        """Give the memory back."""
        self.refuge.release()
        self._staging.release()

    def watched(self, source: FileLayout, devices: bool = True) -> dict[int, list[Watched]]:
        """What watches each record that is all a guarded optimizer's, by the record's index.

        Args:
            source: What is to be saved.
            devices: Also of those in a device's memory.
        """
        by_storage: dict[int, list[_Owned]] = {}
        for known in self._optimizers:
            optimizer = known()
            for owned in () if optimizer is None else _owned(optimizer):
                by_storage.setdefault(owned.local.untyped_storage().data_ptr(), []).append(owned)
        found: dict[int, list[Watched]] = {}
        for index, record in enumerate(source.records):
            data = record.data
            assert isinstance(data, torch.Tensor)  # a layout that was just planned
            there = _device.is_device(data)
            if not devices if there else record.nbytes < _LEAST_BYTES or not data.is_cpu:
                continue
            owners = by_storage.get(data.data_ptr(), [])
            if owners and _cover([owned.local for owned in owners], record.nbytes):
                memory = None if there else data  # a device's is compared by its own stream
                found[index] = [Watched(*owned[:4], memory) for owned in owners]
        return found


class _Door:
    """What all steps of an optimizer go through; it is registered once."""

    def __init__(self) -> None:
        self._guards: tuple[weakref.ref[Guard], ...] = ()

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> _Door:
        with _registering:
            door = _doors.get(optimizer)
            if door is None:
                door = cls()
                # Not traced with a compiled step. torch has imported dynamo for any optimizer.
                untraced: Any = torch.compiler.disable
                optimizer.register_step_pre_hook(untraced(door.pass_through))
                _doors[optimizer] = door
            return door

    def add(self, guard: Guard) -> None:
        with _registering:
            there = [known for known in self._guards if known() is not None]
            self._guards = (*there, weakref.ref(guard))

    def pass_through(self, optimizer: object, args: object, kwargs: object) -> None:
        """Block until nothing is read any more that a step changes."""
        guards = [guard for known in self._guards if (guard := known()) is not None]
        held = [live for guard in guards for live in guard.held]
        for live in held:
            live.ask()
        for live in held:
            live.leave()


_registering = threading.Lock()
_doors: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Door] = weakref.WeakKeyDictionary()


def checked(optimizers: Sequence[object]) -> list[torch.optim.Optimizer]:
    """The optimizers, whose steps can be made to wait.

    Raises:
        TypeError: One is no `torch.optim.Optimizer`, or only looks like one.
    """
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"guard needs optimizers of torch.optim, not {optimizer!r:.80}; of one that wraps "
                "another, pass the one within"
            )
        if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
            raise TypeError(
                f"{type(optimizer).__name__} takes no step hooks: it wraps another optimizer; pass "
                "the one within"
            )
    return [each for each in optimizers if isinstance(each, torch.optim.Optimizer)]


def _owned(optimizer: torch.optim.Optimizer) -> Iterator[_Owned]:
    """The tensors of an optimizer that change in its steps only."""
    number = 0
    for group in optimizer.param_groups:
        names = group.get("param_names", ())
        for place, parameter in enumerate(group["params"]):
            name = f"parameter {number}"
            if place < len(names):
                name += f" ({names[place]!r})"
            number += 1
            if _can_be_left(parameter):
                yield _Owned(name, optimizer, parameter, None, local_of(parameter))
            for key, value in state_of(optimizer, parameter).items():
                if isinstance(value, torch.Tensor) and _can_be_left(value):
                    what = f"state {key!r} of {name}"
                    yield _Owned(what, optimizer, parameter, key, local_of(value))


def _can_be_left(tensor: torch.Tensor) -> bool:
    """Whether it is plain memory, here or on a device, whose changes are counted."""
    local = local_of(tensor)
    return (
        (local.is_cpu or _device.is_device(local))
        and local.layout == torch.strided
        and type(local).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        and not local.is_inference()
        and local.numel() > 0
    )


def _cover(tensors: Sequence[torch.Tensor], nbytes: int) -> bool:
    """Whether these, of one storage, are all of it: something else in it may change at any time."""
    if len(tensors) == 1 and tensors[0].nbytes == nbytes and tensors[0].is_contiguous():
        return True  # as nearly all are
    reached = 0
    dense = [tensor for tensor in tensors if _dense(tensor)]
    for tensor in sorted(dense, key=lambda tensor: int(tensor.storage_offset())):
        start = int(tensor.storage_offset()) * tensor.itemsize
        if start > reached:
            return False
        reached = max(reached, start + tensor.nbytes)
    return reached == nbytes


def _dense(tensor: torch.Tensor) -> bool:
    """Whether its elements lie side by side, in whatever order of the dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    sizes = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted(each for each in sizes if each[1] != 1):
        if stride != expected:
            return False
        expected *= size
    return True

"""Experts on a GPU: page-locked memory that the drive fills, and the device's, where they compute.

    page-locked slots      experts that are kept, over all layers: the cache's own
    the device's slots     those of them that were used last, as many as fit
    the room of a call     [experts, ...] of one layer, in which kernels find those of the call

A call has its experts copied into the room: from the device's slots where they are there, else from
host memory, and then into a slot as well. The room is one for all layers, and each copy into it
follows what was computed there before. Only the stream that computes waits for a copy. Weights that
a hook keeps past their call become another layer's, as all weights that stream to a GPU do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from nvmeio._memory import devices
from nvmeio._memory.devices import Mark
from nvmeio._residency.window import lease_now
from nvmeio._threads.closing import on_error
from nvmeio.inference._experts.places import Lent, lay
from nvmeio.inference._experts.recency import Recency
from nvmeio.inference._experts.sets import ExpertSet
from nvmeio.pool import PinnedPool

Key = tuple[int, int]  # the number of a set, and of its expert


def level(sets: Sequence[ExpertSet]) -> None:
    """Give the experts of all sets regions of one length, so that each slot takes any of them."""
    nbytes = max((each.nbytes for each in sets), default=0)
    for each in sets:
        each.nbytes = nbytes


class HostSlots:
    """Page-locked memory in slots, each of which holds any expert."""

    def __init__(self, nbytes: int, number: int) -> None:
        self._nbytes = nbytes
        self._pool = PinnedPool(number * nbytes)
        with on_error(self._pool.close):
            leased = lease_now(self._pool, number * nbytes)
            assert leased is not None  # it is all of the pool
            self._lease, self._memory = leased
        self._free = list(range(number))[::-1]
        self._copied: dict[int, Mark] = {}  # when copies out of a slot are made

    def take(self) -> int:
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        self._free.append(slot)

    def to_fill(self, slot: int) -> None:
        """Wait until nothing is copied out of a slot, which is read into next."""
        mark = self._copied.pop(slot, None)
        if mark is not None:
            mark.wait()

    def copied_by(self, slots: Sequence[int], mark: Mark) -> None:
        """Note until when slots are copied from."""
        self._copied.update(dict.fromkeys(slots, mark))

    def memory(self, slot: int, nbytes: int) -> torch.Tensor:
        return self._memory[slot * self._nbytes : slot * self._nbytes + nbytes]

    @property
    def locked(self) -> bool:
        return self._pool.locked

    def close(self) -> None:
        """Give the memory back, once nothing is copied out of it."""
        with contextlib.suppress(RuntimeError):  # a device that failed stops copying
            for mark in self._copied.values():
                mark.wait()
        self._copied.clear()
        self._lease.__exit__(None, None, None)
        self._pool.close()


class DevicePlaces:
    """The experts of one set on their way to a device; the counterpart of `Places` for a CPU."""

    def __init__(self, experts: ExpertSet, number: int, device: DeviceExperts) -> None:
        self.experts = experts
        self.number = number
        self.nbytes = experts.nbytes
        self._device = device
        self.slots: dict[int, int] = {}  # of experts, in host memory

    def region(self, expert: int) -> torch.Tensor:
        """The host memory of one expert."""
        return self._device.host.memory(self.slots[expert], self.nbytes)

    def take(self, expert: int) -> None:
        """Have memory for an expert, which is read into it next."""
        slot = self._device.host.take()
        self.slots[expert] = slot
        self._device.host.to_fill(slot)

    def release(self, expert: int) -> None:
        self._device.host.give_back(self.slots.pop(expert))

    def take_pages(self, expert: int, other: Any, victim: int) -> bool:
        """Have a victim's slot."""
        slot = self.slots[expert] = other.slots.pop(victim)
        self._device.host.to_fill(slot)
        return True

    def lend(self, hit: Sequence[int]) -> Lent:
        """Tensors over the room, for a call of some experts; see `DeviceExperts`."""
        return Lent(lay(self.experts, self._device.room, hit), _kept_by_nobody)


def _kept_by_nobody() -> None:
    """The mark of what others may not keep."""


class DeviceExperts:
    """The experts of a stream on its device.

    One thread owns it, that of the cache.

    Args:
        device: A GPU.
        sets: All sets, whose regions have one length (`level`).
        host_bytes, there_bytes: On the host, and on the device: at least those of all experts of
            any set.

    Attributes:
        number: How many experts stay on the device.
        expected: Those of a call that are expected to be asked for again soon: others go first, and
            push none of them out.
        room: The memory of a call's experts.
        uploads: Copies of experts from host memory.
    """

    def __init__(
        self, device: torch.device, sets: Sequence[ExpertSet], host_bytes: int, there_bytes: int
    ) -> None:
        nbytes = sets[0].nbytes
        room = max(each.all_nbytes for each in sets)
        total = sum(each.number for each in sets)
        self.number = number = min((there_bytes - room) // nbytes, total)
        self.expected: set[Key] = set()
        self._nbytes = nbytes
        self._copies = devices.Beside(device, "weights")
        self.host = HostSlots(nbytes, min(host_bytes // nbytes, total))
        with on_error(self.host.close):
            try:
                self.room = self._copies.empty(room)
                self._memory = self._copies.empty(number * nbytes)
            except torch.OutOfMemoryError as refused:
                raise MemoryError(
                    f"{device} has no {room + number * nbytes} bytes for experts, which "
                    f"resident_bytes would allow: lower resident_bytes (not below {room} for "
                    "them), or free other memory there"
                ) from refused
        self._free = list(range(number))[::-1]
        self._slots: dict[Key, int] = {}
        self._recency: Recency[Key] = Recency()  # of these
        self._in_room: set[Key] = set()
        self._set = -1  # whose room it is
        self._streams: list[Any] = []  # that compute in the room
        self._known: list[Any] = []  # that have
        self.uploads = 0

    def has(self, key: Key) -> bool:
        """Whether an expert is on the device."""
        return key in self._slots

    def bring(self, places: DevicePlaces, hit: Sequence[int]) -> None:
        """Begin the copies into the room of experts that are here, or in host memory."""
        number = places.number
        if number != self._set:
            self._in_room.clear()
            self._set = number
        streams, self._streams = self._streams, []
        for stream in streams:
            self._copies.follow(stream)
        keys = {(number, expert) for expert in hit}
        uploaded: list[int] = []
        try:
            for expert in hit:
                self._bring((number, expert), places, keys, uploaded)
        finally:  # those copies that have begun go on after an error
            if uploaded:
                self.uploads += len(uploaded)
                self.host.copied_by(uploaded, self._copies.mark())

    def _bring(self, key: Key, places: DevicePlaces, held: set[Key], uploaded: list[int]) -> None:
        """Begin the copies of one expert; a host slot that is copied from is `uploaded`."""
        if key in self._in_room:
            return
        expert = key[1]
        target = self.room[expert * self._nbytes : (expert + 1) * self._nbytes]
        slot = self._slots.get(key)
        if slot is not None:
            self._copies.copy(target, self._slot(slot))
        else:
            uploaded.append(places.slots[expert])
            self._copies.copy(target, places.region(expert))
            slot = self._take(key, held)
            if slot is not None:
                with on_error(self._free.append, slot):
                    self._copies.copy(self._slot(slot), target)
                self._slots[key] = slot
                self._recency.pass_by(key)
        if key in self.expected and slot is not None:
            self._recency.use(key)
        self._in_room.add(key)

    def _slot(self, slot: int) -> torch.Tensor:
        return self._memory[slot * self._nbytes : (slot + 1) * self._nbytes]

    def _take(self, key: Key, held: set[Key]) -> int | None:
        """A slot for an expert, of one that goes if it must; None if none may go for it."""
        if self._free:
            return self._free.pop()
        victims = self._recency.victims(held, passing_only=key not in self.expected)
        victim = next(victims, None)
        if victim is None:
            return None
        self._recency.forget(victim)
        return self._slots.pop(victim)

    def let_compute(self, stream: Any) -> None:
        """Order a stream's later work after the copies; it computes in the room."""
        devices.come_after(stream, self._copies.mark())
        if stream not in self._streams:
            self._streams.append(stream)
        if stream not in self._known:  # the allocator is told for the room's whole life
            self._known.append(stream)

    def forget_room(self) -> None:
        """Copy everything into the room anew: its bytes were changed."""
        self._in_room.clear()

    def close(self) -> None:
        """Let go of all memory, once nothing is copied out of the host's."""
        for stream in self._known:
            devices.record_use(self.room, stream)
        self.host.close()
        self.room = self._memory = self.room.new_empty(0)
        self._slots.clear()

"""Saved activations of devices: a level above the store of those in host memory.

In the store's thread as well. A storage is on its device as forward has left it, on its way down,
or below: in page-locked memory or on the drive, where the store has it as one of its own. It goes
down, the oldest first, once nobody else has it, and its memory there is kept until the copy is
made. Backward gets it in new memory of its own stream's, the next ones are brought ahead.

The host waits for copies only where there is too much on the device. Streams wait for each other:
copies down for what made the bytes, copies up for whoever had the memory, backward for these.

There are `device_bytes` for this, of all devices together, half for each direction.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch

from nvmeio._memory import devices
from nvmeio._memory.devices import Beside, Mark
from nvmeio._residency.window import LentPool
from nvmeio._threads.owner import Claim
from nvmeio.errors import NvmeioError, TransferError
from nvmeio.offload.activations._reads import (
    LastSavedFirst,
    SavedStorage,
    bytes_over,
    locked,
    mark_of,
)
from nvmeio.offload.activations._store import ActivationStore

_AHEAD = 2  # brought to the device before they are asked for


@dataclass(eq=False, slots=True)
class DeviceStorage(SavedStorage):
    """A device's storage that autograd has saved.

    On the device (`storage`), going down (`storage` and `copied`), or below (`below` alone).
    """

    device: torch.device = field(kw_only=True)
    streams: list[Any] = field(default_factory=list)  # that were current when it was saved
    copied: Mark | None = None
    host: torch.Tensor | None = None  # where it goes
    below: SavedStorage | None = None
    claim: Claim | None = None  # of that
    ahead: torch.Tensor | None = None  # brought to the device, and not handed out yet
    to: Any = None  # for which stream it was brought last
    up: Mark | None = None  # when that copy is made


class DeviceActivations:
    """Keeps what autograd saved on devices within a budget, above the store of host memory."""

    def __init__(self, store: ActivationStore, device_bytes: int) -> None:
        self.device_bytes = device_bytes
        self._store = store
        self._most = device_bytes // 2
        self._enough = self._most // 2  # from here on, the oldest go down
        self._there: dict[int, DeviceStorage] = {}  # by storage, the last saved last
        self._there_bytes = self._down_bytes = self._ahead_bytes = 0
        self._down: deque[DeviceStorage] = deque()
        self._below: LastSavedFirst[DeviceStorage] = LastSavedFirst()
        self._under_way: deque[tuple[Mark, torch.Tensor]] = deque()  # memory of copies up
        self._under_way_bytes = 0
        self._lanes: dict[torch.device, tuple[Beside, Beside]] = {}
        self._pool: LentPool | None = None
        self._round = 0
        self._failed: BaseException | None = None  # of this round: it stays on the device
        store.above(self.close)

    # For callers

    def save(self, tensor: torch.Tensor) -> tuple[DeviceStorage, Claim]:
        """Keep the bytes of a tensor's storage; see `ActivationStore.save`."""
        device = devices.device_of(tensor)
        stream = devices.stream_here(device)
        return self._store.owner.call(self._save, tensor.untyped_storage(), device, stream)

    def bytes_of(self, saved: DeviceStorage) -> torch.UntypedStorage:
        """A storage with the same bytes on its device, for the calling thread's stream.

        Raises as `ActivationStore.bytes_of`, or torch.OutOfMemoryError.
        """
        return self._store.owner.call(self._bytes_of, saved, devices.stream_here(saved.device))

    @property
    def nbytes(self) -> int:
        return self._store.owner.call(self._settled_bytes)

    def _settled_bytes(self) -> int:
        self._settle()
        return self._there_bytes

    # Down

    def _save(
        self, storage: torch.UntypedStorage, device: torch.device, stream: Any
    ) -> tuple[DeviceStorage, Claim]:
        key = storage._cdata
        saved = self._there.pop(key, None)
        number = self._store.next_number()
        if saved is None:
            saved = DeviceStorage(number, storage, storage.nbytes(), device=device)
            self._there_bytes += saved.nbytes
        elif saved.copied is not None:
            saved.wanted = True
        else:
            saved.number = number
        if stream not in saved.streams:
            saved.streams.append(stream)
        self._there[key] = saved
        saved.holds += 1
        claim = self._store.owner.claim(self._let_go, saved)
        del storage
        self._make_room()
        return saved, claim

    def _make_room(self) -> None:
        """Begin to copy down bytes above `_enough`, and wait while there are more than `_most`."""
        self._round += 1
        self._failed = None
        self._settle()
        while True:
            self._begin_copies()
            if self._there_bytes <= self._most:
                return
            if not self._down:
                failed, self._failed = self._failed, None
                if failed is not None:
                    raise failed
                return
            copied = self._down[0].copied
            assert copied is not None
            copied.wait()
            self._settle()

    def _begin_copies(self) -> None:
        for saved in self._there.values():
            if self._there_bytes - self._down_bytes <= self._enough:
                return
            if saved.copied is None and saved.failed_in != self._round and saved.is_alone():
                try:
                    host = self._host(saved.nbytes)
                except TransferError as failed:
                    self._failed = failed
                    return
                if host is None:
                    return
                self._begin_copy(saved, host)

    def _host(self, nbytes: int) -> torch.Tensor | None:
        """Page-locked memory; None if something under way has to end first."""
        if self._pool is None:
            self._pool = LentPool(self._store.saving_bytes)
        pool = self._pool
        if nbytes > pool.budget_bytes:
            return torch.empty(nbytes, dtype=torch.uint8)
        found: list[torch.Tensor] = []

        def fits() -> bool:
            slot = pool.take(None, nbytes)
            if slot is not None:
                found.append(slot.memory)
            return bool(found)

        if not fits() and self._there_bytes > self._most and not self._down:
            self._store.write_until(fits)
        return found[0] if found else None

    def _begin_copy(self, saved: DeviceStorage, host: torch.Tensor) -> None:
        down, _ = self._lane(saved.device)
        for stream in saved.streams:
            down.follow(stream)
        down.copy(host, bytes_over(saved.storage))
        saved.copied, saved.host, saved.wanted = down.mark(), host, False
        self._down.append(saved)
        self._down_bytes += saved.nbytes

    def _settle(self) -> None:
        """Hand storages that came down to the store, and release sources of copies up."""
        while self._under_way and self._under_way[0][0].done():
            self._end_copy_up()
        while self._down and self._down[0].copied is not None and self._down[0].copied.done():
            saved = self._down.popleft()
            self._down_bytes -= saved.nbytes
            host, saved.host, saved.copied = saved.host, None, None
            if not saved.holds:
                self._forget(saved)
            elif not saved.wanted:
                assert host is not None
                self._hand_over(saved, host.untyped_storage())
            del host

    def _hand_over(self, saved: DeviceStorage, storage: torch.UntypedStorage) -> None:
        try:
            saved.below, saved.claim = self._store.keep(storage, saved.number)
        except TransferError as failed:
            # Without its frames, which hold the copy.
            saved.failed_in, self._failed = self._round, failed.with_traceback(None)
            return
        self._forget(saved)
        self._below.add(saved)

    def _forget(self, saved: DeviceStorage) -> None:
        storage, saved.storage = saved.storage, None
        assert storage is not None
        del self._there[storage._cdata]
        self._there_bytes -= saved.nbytes

    def _let_go(self, saved: DeviceStorage) -> None:
        saved.holds -= 1
        if saved.holds or self._store.closed or saved.copied is not None:
            return  # storages being copied go when that is done: see `_settle`
        if saved.storage is not None:
            self._forget(saved)
            return
        self._drop_ahead(saved)
        self._below.remove(saved)
        saved.below = saved.claim = None

    # Up

    def _bytes_of(self, saved: DeviceStorage, stream: Any) -> torch.UntypedStorage:
        self._settle()
        if saved.storage is not None:
            saved.wanted = True  # its user may change it while it is copied
            found = saved.storage
        else:
            alive = None
            if saved.out is not None and saved.to == stream:
                alive = locked(saved.out)
            found = self._brought(saved, stream) if alive is None else alive
            assert saved.up is not None
            devices.come_after(stream, saved.up)
        self._look_ahead(saved.number, stream)
        return found

    def _brought(self, saved: DeviceStorage, stream: Any) -> torch.UntypedStorage:
        if saved.ahead is not None and saved.to != stream:
            self._drop_ahead(saved)
        if saved.ahead is None:
            try:
                self._bring(saved, stream)
            except torch.OutOfMemoryError:
                if not self._ahead_bytes and not self._under_way:
                    raise
                for each in self._below.saved:
                    self._drop_ahead(each)
                self._wait_for(0)
                self._bring(saved, stream)
        memory = saved.ahead
        assert memory is not None
        saved.ahead = None
        self._ahead_bytes -= saved.nbytes
        storage = memory.untyped_storage()
        saved.out = mark_of(storage)
        return storage

    def _bring(self, saved: DeviceStorage, stream: Any) -> None:
        assert saved.below is not None
        self._wait_for(self._store.reading_bytes)
        with devices.on_stream(stream):
            memory = devices.empty(saved.nbytes, saved.device)
        host = bytes_over(self._store.bring(saved.below))
        _, up = self._lane(saved.device)
        up.follow(stream)  # its former user may still be at work there
        up.copy(memory, host)
        saved.up, saved.to, saved.ahead = up.mark(), stream, memory
        self._begin_copy_up(saved.up, host)
        self._ahead_bytes += saved.nbytes

    def _look_ahead(self, number: int, stream: Any) -> None:
        self._store.look_ahead(number)
        self._below.here = number
        for saved in itertools.islice(self._below.upcoming(), _AHEAD):
            if saved.ahead is not None:
                continue
            assert saved.below is not None
            if self._ahead_bytes + saved.nbytes > self.device_bytes - self._most:
                return
            if self._under_way_bytes + saved.nbytes > self._store.reading_bytes:
                return
            if not self._store.arrived(saved.below):
                return
            try:
                self._bring(saved, stream)
            except (NvmeioError, torch.OutOfMemoryError):
                return  # told when it is needed

    def _drop_ahead(self, saved: DeviceStorage) -> None:
        if saved.ahead is not None and saved.up is not None:
            self._begin_copy_up(saved.up, saved.ahead)
            saved.ahead = None
            self._ahead_bytes -= saved.nbytes

    def _begin_copy_up(self, mark: Mark, memory: torch.Tensor) -> None:
        """Keep memory until a copy is made."""
        self._under_way.append((mark, memory))
        self._under_way_bytes += memory.nbytes

    def _end_copy_up(self) -> None:
        _, memory = self._under_way.popleft()
        self._under_way_bytes -= memory.nbytes

    def _wait_for(self, most: int) -> None:
        """Wait until no more than `most` bytes are kept for copies up."""
        while self._under_way_bytes > most:
            self._under_way[0][0].wait()
            self._end_copy_up()

    def _lane(self, device: torch.device) -> tuple[Beside, Beside]:
        """Streams for copies down and up: the bus has two directions."""
        if device not in self._lanes:
            self._lanes[device] = (
                devices.Beside(device, "activations down"),
                devices.Beside(device, "activations up"),
            )
        return self._lanes[device]

    # The end

    def close(self) -> None:
        """Wait for copies, and let go of everything."""
        with contextlib.suppress(RuntimeError):  # a device that failed stops copying
            for down, up in self._lanes.values():
                down.mark().wait()
                up.mark().wait()
        for saved in [*self._there.values(), *self._below.saved]:
            saved.storage = saved.host = saved.copied = saved.ahead = None
            saved.below = saved.claim = None
        self._under_way_bytes = 0
        for kept in (self._there, self._below.saved, self._down, self._under_way):
            kept.clear()
        if self._pool is not None:
            self._pool.close()

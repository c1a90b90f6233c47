"""A handle's cores as one: host memory's, and device memory's once the handle has met any.

Each core has an engine, and operations of its own; to the handle's user there is one handle. The
device's core is closed first, for its engine may work through the host's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from nvmeio._core import transfers, unreleased
from nvmeio._core.core import Core
from nvmeio._core.record import Record
from nvmeio._memory import holds
from nvmeio._memory.devices import Copier
from nvmeio._threads.jobs import run_interruptible, start
from nvmeio._threads.running_loop import running_loop
from nvmeio.engines.base import Counters, Options
from nvmeio.engines.ring import RingEngine


class Cores:
    """One core, and up to two more for device memory.

    Args:
        host: Moves host memory, and syncs files.
        make_device: Makes the core for device memory from the host's, at the first such transfer.
        make_rows: The same for gathers and scatters of device memory; None where that core moves
            them as well.
    """

    def __init__(
        self,
        host: Core,
        make_device: Callable[[Core], Core],
        make_rows: Callable[[Core], Core] | None = None,
    ) -> None:
        self.host = host
        self._make_device = make_device
        self._make_rows = make_rows
        self._device: Core | None = None
        self._device_rows: Core | None = None
        self._lock = threading.Lock()

    @property
    def device(self) -> Core:
        """The core for device memory; made now if there is none yet.

        Raises:
            ClosedError: The handle is closed.
        """
        return self._device or self.make_device()

    def make_device(self) -> Core:
        """The same, for the sake of making it."""
        return run_interruptible(self._device_made)

    def _device_made(self) -> Core:
        with self._lock:
            self.host.live.check_open()
            if self._device is None:
                self._device = self._make_device(self.host)
            return self._device

    @property
    def device_rows(self) -> Core:
        """The core for rows in device memory; made now if there is none yet.

        Raises:
            ClosedError: The handle is closed.
        """
        if self._make_rows is None:
            return self.device
        return self._device_rows or run_interruptible(self._device_rows_made)

    def _device_rows_made(self) -> Core:
        with self._lock:
            self.host.live.check_open()
            if self._device_rows is None:
                assert self._make_rows is not None
                self._device_rows = self._make_rows(self.host)
            return self._device_rows

    def _all(self) -> list[Core]:
        above = (self._device_rows, self._device)
        return [*(core for core in above if core is not None), self.host]

    def check_open(self) -> None:
        """Raise `ClosedError` once operations are refused."""
        self.host.live.check_open()

    # --- waiting --------------------------------------------------------------------------

    def wait_all(self, timeout: float | None) -> int:
        """See `AioHandle.wait`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        for core in self._all():
            core.watchers.wait_for_live(deadline)
        return self._collect()

    async def drain(self) -> int:
        """See `AioHandle.drain`."""
        for core in self._all():
            await core.watchers.settle_live()
        return self._collect()

    def _collect(self) -> int:
        """How many have finished; raises the first error that nobody has seen, with the others."""
        finished: int = 0
        errors: list[BaseException] = []
        for core in self._all():
            more, failed = core.live.take()
            finished += more
            errors += failed
        if errors:
            first: Any = errors[0]
            first.others = tuple(errors[1:])  # torch's errors take attributes as ours do
            raise first
        return finished

    async def writes_to(self, inode: tuple[int, int]) -> None:
        """Await the writes to a file that have been started up to now."""
        loop = running_loop()
        for core in self._all():
            for record in core.live.writes_to(inode):
                await core.watchers.watch(record, loop)

    def wait_for_writes_to(self, inode: tuple[int, int]) -> None:
        """`writes_to`, blocking."""
        for core in self._all():
            for record in core.live.writes_to(inode):
                core.watchers.wait_settled(record, None)

    # --- closing --------------------------------------------------------------------------

    def close(self) -> None:
        """Refuse, drain, release; then raise the first failure that nobody has seen."""
        for core in self._refusing():
            core.close()
        self._collect()

    async def aclose(self) -> None:
        """`close` without blocking the loop."""
        running_loop()  # before anything is refused
        for core in self._refusing():
            await core.aclose()
        self._collect()

    def _refusing(self) -> list[Core]:
        with self._lock:  # no device core is made any more
            for core in self._all():
                core.live.refuse()
        return self._all()

    def abandon(self) -> None:
        """The handle was dropped: finish what is in flight in the background."""
        cores = self._all()
        for core in cores:
            core.live.refuse()
        if not self.in_flight:
            for core in cores:
                core.release()
            return

        def close() -> None:  # nothing of the handle: in a cycle, it would live on
            for core in cores:
                core.close_quietly()

        start(close, "nvmeio-close", lambda _: close())

    # --- what is going on -------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether operations are refused."""
        return bool(self.host.live.refusal)

    @property
    def released(self) -> bool:
        """Whether nothing is left to be given back; an interrupted `close` leaves something."""
        return all(core.released for core in self._all())

    @property
    def in_flight(self) -> int:
        """Operations that have been started and are not over."""
        return sum(len(core.live) for core in self._all())

    def counters(self) -> Counters:
        """Both engines' counters, each transfer counted once."""
        return unreleased.of(self._all())


def ring_core(copier: Copier, ring_bytes: int, options: Options, host: Core) -> Core:
    """The core of CUDA tensors that go through host memory."""
    engine = RingEngine(host.engine, copier, ring_bytes)
    engine.start(options)
    return Core(engine, transfers.plan_device, below=host)


def _user_of(storage: int) -> Record | None:
    """What is in flight in a storage, given its `_cdata`."""
    cores: list[Core] = list(unreleased.cores)
    for core in cores:
        if (record := core.live.user_of(storage)) is not None:
            return record
    return None


holds.refuse_sharing(_user_of)

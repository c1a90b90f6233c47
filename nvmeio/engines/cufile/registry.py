"""The registry of cuFile: memory (base → length) and files (descriptor → handle).

Both are process-wide, because addresses and descriptors are. Memory is always named by the base of
its registration plus an offset: cuFile takes an address in the middle for unregistered memory, and
bounces it. Each region belongs to the engine that made it; a file's handle is everybody's, for
cuFile refuses to register a descriptor twice.
"""

from __future__ import annotations

import logging
import os
import threading
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nvmeio._files.descriptors import Descriptors
from nvmeio._memory import devices
from nvmeio.engines.cufile.library import CuFileFailure, Library
from nvmeio.errors import counted

logger = logging.getLogger("nvmeio")


@dataclass(eq=False)
class RegisteredRegion:
    """Registered memory.

    Attributes:
        base: First byte.
        nbytes: Length.
        owner: The engine that registered it; None once that is gone, and the last transfer in it
            is to unregister it.
        keep: The memory itself, a tensor; while it is registered it may not be freed.
        users: Transfers in flight in it.
    """

    base: int
    nbytes: int
    owner: object
    keep: Any
    users: int = 0


class Regions:
    """The registered regions of this process; they are disjoint."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bases: list[int] = []
        self._regions: dict[int, RegisteredRegion] = {}

    def add(self, library: Library, region: RegisteredRegion) -> None:
        """Register.

        Raises:
            ValueError: Part of it is registered already.
            CuFileFailure: cuFile refused.
        """
        with self._lock:
            other = self._overlapping(region.base, region.nbytes)
            if other is not None:
                raise ValueError(
                    f"memory [{region.base:#x}, +{region.nbytes}) is registered already, as part "
                    f"of [{other.base:#x}, +{other.nbytes}): views of it need no registration of "
                    "their own; unpin that tensor to register another span"
                )
            with devices.current(region.keep):
                library.register_memory(region.base, region.nbytes)
            self._regions[region.base] = region
            self._bases = sorted(self._regions)

    def remove(self, library: Library, owner: object, address: int) -> None:
        """Undo `add`.

        Raises:
            ValueError: Nothing of this owner's is registered there, or transfers use it.
            CuFileFailure: cuFile refused; it counts as unregistered anyway.
        """
        with self._lock:
            region = self._regions.get(address)
            if region is None or region.owner is not owner:
                raise ValueError(
                    f"no memory that begins at {address:#x} was registered by this handle: it was "
                    "never pinned, is unpinned already, or is a view into the middle"
                )
            if region.users:
                raise ValueError(
                    f"the memory at {address:#x} has {counted(region.users, 'operation')} in "
                    "flight: wait for them before it is unpinned"
                )
            self._strike(library, region)

    def use(self, address: int, nbytes: int) -> RegisteredRegion | None:
        """The region that holds a span, with one more user; None where it is not registered."""
        with self._lock:
            region = self._holding(address, nbytes)
            if region is not None:
                region.users += 1
            return region

    def release(self, library: Library, region: RegisteredRegion | None) -> None:
        """Undo `use`."""
        if region is None:
            return
        with self._lock:
            region.users -= 1
            if region.owner is None and not region.users:
                self._strike_quietly(library, region)

    def disown(self, library: Library, owner: object, hanging: bool) -> None:
        """An engine is gone: its registered memory goes now, or with the last transfer in it.

        Args:
            library: To unregister with.
            owner: The engine.
            hanging: One of its calls has not come back: cuFile is left alone now.
        """
        with self._lock:
            for region in [each for each in self._regions.values() if each.owner is owner]:
                region.owner = None
                if not region.users and not hanging:
                    self._strike_quietly(library, region)

    def _strike(self, library: Library, region: RegisteredRegion) -> None:
        del self._regions[region.base]
        self._bases = sorted(self._regions)
        with devices.current(region.keep):
            library.unregister_memory(region.base)

    def _strike_quietly(self, library: Library, region: RegisteredRegion) -> None:
        try:
            self._strike(library, region)
        except CuFileFailure as failed:
            logger.warning("memory at %#x: %s", region.base, failed.detail)

    def forget(self) -> None:
        """In a forked child: nothing here is registered."""
        self.__init__()  # type: ignore[misc]

    def _holding(self, address: int, nbytes: int) -> RegisteredRegion | None:
        index = bisect_right(self._bases, address) - 1
        if index < 0:
            return None
        region = self._regions[self._bases[index]]
        return region if address + nbytes <= region.base + region.nbytes else None

    def _overlapping(self, address: int, nbytes: int) -> RegisteredRegion | None:
        end, known = address + nbytes, self._regions.values()
        return next((r for r in known if address < r.base + r.nbytes and r.base < end), None)


class Files:
    """cuFile's handles of open files: one for each descriptor, while the driver and it are open.

    Files that are kept open (`nvmeio.open`) are registered once; a path is opened and registered
    for every transfer (8 to 9 us).
    """

    def __init__(self) -> None:
        # Never held in a call of cuFile's, which may hang. Taken again within itself where the
        # collector runs meanwhile, and lets go of a file.
        self._lock = threading.RLock()
        self._files: dict[int, _File] = {}
        self._pid = os.getpid()

    def handle(self, library: Library, opened: Descriptors, fd: int) -> Any:
        """The handle for one of a file's descriptors.

        Raises:
            CuFileFailure: cuFile refused it.
        """
        with self._lock:
            file = self._files.get(fd)
            if file is None:
                file = self._files[fd] = _File()
                opened.before_close(self._forgetting(library, fd))
        with file.lock:
            if file.handle is None:
                file.handle = library.register_file(fd)
            return file.handle

    def _forgetting(self, library: Library, fd: int) -> Callable[[], None]:
        def forget() -> None:
            if self._pid != os.getpid():
                return
            with self._lock:
                file = self._files.pop(fd)
            file.unregister(library)

        return forget

    def unregister_all(self, library: Library) -> None:
        """Before the driver is closed, which would leave their handles dangling."""
        with self._lock:
            files = list(self._files.values())
        for file in files:
            file.unregister(library)


class _File:
    """A descriptor's handle; None where it is not registered (any more)."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.handle: Any = None

    def unregister(self, library: Library) -> None:
        """Unregister it; nobody uses it, and nobody will meanwhile."""
        handle, self.handle = self.handle, None
        if handle is not None:
            library.unregister_file(handle)


REGIONS = Regions()
os.register_at_fork(after_in_child=REGIONS.forget)

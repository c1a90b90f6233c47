"""What is registered with cuFile: memory (base → length) and files (descriptor → handle).

Memory is always named by the base of its registration plus an offset: cuFile takes an address in
the middle for unregistered memory, and bounces it. The registry is process-wide because addresses
are; each entry belongs to the engine that made it.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nvmeio.engines.cufile.library import Library
from nvmeio.files import Descriptors


@dataclass(eq=False)
class Region:
    """Registered memory.

    Attributes:
        base: First byte.
        nbytes: Length.
        owner: The engine that registered it.
        keep: The memory itself; while it is registered it may not be freed.
        users: Transfers in flight in it.
    """

    base: int
    nbytes: int
    owner: object
    keep: Any
    users: int = 0


class Memory:
    """The registered regions of this process; they are disjoint."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bases: list[int] = []
        self._regions: dict[int, Region] = {}

    def add(self, library: Library, region: Region) -> None:
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
            library.register_memory(region.base, region.nbytes)
            self._regions[region.base] = region
            self._bases = sorted(self._regions)

    def remove(self, library: Library, owner: object, address: int) -> Region:
        """Undo `add`.

        Raises:
            ValueError: Nothing of this owner's is registered there, or transfers use it.
            CuFileFailure: cuFile refused; it counts as unregistered all the same.
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
                    f"{region.users} operations are in flight in the memory at {address:#x}: "
                    "wait for them before it is unpinned"
                )
            del self._regions[address]
            self._bases = sorted(self._regions)
            library.unregister_memory(address)
            return region

    def use(self, address: int, nbytes: int) -> Region | None:
        """The region that holds a span, with one more user; None where it is not registered."""
        with self._lock:
            region = self._holding(address, nbytes)
            if region is not None:
                region.users += 1
            return region

    def release(self, region: Region | None) -> None:
        """Undo `use`."""
        if region is not None:
            with self._lock:
                region.users -= 1

    def of(self, owner: object) -> list[Region]:
        """What an engine has registered and no transfer uses."""
        with self._lock:
            return [
                region
                for region in self._regions.values()
                if region.owner is owner and not region.users
            ]

    def forget(self) -> None:
        """In a forked child: nothing here is registered."""
        self.__init__()  # type: ignore[misc]

    def _holding(self, address: int, nbytes: int) -> Region | None:
        index = bisect_right(self._bases, address) - 1
        if index < 0:
            return None
        region = self._regions[self._bases[index]]
        return region if address + nbytes <= region.base + region.nbytes else None

    def _overlapping(self, address: int, nbytes: int) -> Region | None:
        for region in self._regions.values():
            if address < region.base + region.nbytes and region.base < address + nbytes:
                return region
        return None


class Files:
    """cuFile's handles of open files: one for each descriptor, as long as that is open.

    Files that are kept open (`nvmeio.open`) are registered once; a path is opened and registered
    for every transfer (8 to 9 us).
    """

    def __init__(self, library: Library) -> None:
        self._library = library
        self._lock = threading.Lock()
        self._handles: dict[int, Any] = {}
        self._pid = os.getpid()

    def handle(self, opened: Descriptors, fd: int) -> Any:
        """The handle for one of a file's descriptors.

        Raises:
            CuFileFailure: cuFile refused it.
        """
        with self._lock:
            if fd not in self._handles:
                self._handles[fd] = self._library.register_file(fd)
                opened.before_close(self._forgetting(fd))
            return self._handles[fd]

    def _forgetting(self, fd: int) -> Callable[[], None]:
        def forget() -> None:
            if self._pid != os.getpid():
                return
            with self._lock:
                handle = self._handles.pop(fd, None)
                if handle is not None:
                    self._library.unregister_file(handle)

        return forget


MEMORY = Memory()
os.register_at_fork(after_in_child=MEMORY.forget)

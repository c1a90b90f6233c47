"""What is open in each process: a fork's child has the parent's in memory, and must not use it."""

from __future__ import annotations

import os
import weakref

from nvmeio.files import File
from nvmeio.handle import AioHandle


class Opened:
    """What is open in a process.

    Args:
        file: The file.
        handle: What moves its bytes.
        own: Whether the handle is closed with the file.
    """

    def __init__(self, file: File, handle: AioHandle, own: bool) -> None:
        self.file = file
        self.handle = handle
        self.own = own
        _open_here.add(self)

    def close(self) -> None:
        """Close what is ours; once more where that was interrupted."""
        self.file.close()
        if self.own:
            self.handle.close()

    async def aclose(self) -> None:
        """The same, awaited."""
        self.file.close()
        if self.own:
            await self.handle.aclose()


_generation = 0
_open_here: weakref.WeakSet[Opened] = weakref.WeakSet()
_inherited: list[Opened] = []


def generation() -> int:
    """How many forks lie between this process and the first one."""
    return _generation


def _forked() -> None:
    """In the child: what the parent has open is not for use, and not to be closed here either.

    Another thread of the parent may have held its locks, and nobody here would let go of them.
    """
    global _generation
    _generation += 1
    _inherited.extend(_open_here)
    _open_here.clear()


os.register_at_fork(after_in_child=_forked)

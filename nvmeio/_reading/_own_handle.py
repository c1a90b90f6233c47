"""The handle of one load or save: the caller's, or one that lives as long as the call."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from nvmeio.handle import AioHandle

# Below this a call without a handle takes the portable engine. Linux waits 25 to 50 ms when an AIO
# context is destroyed, and a handle does that twice (once to try it out): loading 4, 64, 256 and
# 1024 MiB took 74, 95, 159 and 513 ms with a new AIO handle, 11, 29, 108 and 512 with threads.
# Whoever loads or saves often keeps a handle.
SMALL_BYTES = 256 << 20


@contextlib.contextmanager
def handle_for(
    given: AioHandle | None, path: str | os.PathLike[str], nbytes: int
) -> Iterator[AioHandle]:
    """The handle that was given, or one with the setting stored for a file system.

    Args:
        given: The caller's handle, which stays open; or None.
        path: Where the bytes are.
        nbytes: How many will be moved, about.
    """
    if given is not None:
        yield given
        return
    with AioHandle.tuned(path, engine="threads" if nbytes < SMALL_BYTES else "auto") as own:
        yield own

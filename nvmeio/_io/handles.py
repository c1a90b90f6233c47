"""The handle that ``handle=None`` stands for, in every function and class that takes one.

One rule: a handle of its own, with the setting that `nvmeio tune --save` stored for the file system
of the files it is for, else with the defaults. Settings that cannot be read or used are no reason
to lose a checkpoint: they are warned of once, and the defaults taken. It lives as long as the call
or the object that made it. A caller's handle is used as it is, and stays open.

`new_handle` is for objects that keep theirs, `CallHandle` and `handle_for` for single calls. A
call's handle is made beside its first work, for the kernel takes 30 ms at times to make an AIO
context, and closed beside the last; its threads have ended when the call returns. Loading 1 and
64 MiB takes 2.5 and 27 ms that way, 3.3 and 28 with the portable engine's threads.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from functools import partial

from nvmeio import tuned
from nvmeio._threads.closing import Closing
from nvmeio._threads.interruptible import Job
from nvmeio.errors import ClosedError
from nvmeio.handle import AioHandle

logger = logging.getLogger("nvmeio")

_warned: set[str] = set()


def new_handle(path: str | os.PathLike[str]) -> AioHandle:
    """A handle for files on the file system of `path`, which need not exist yet."""
    try:
        found = tuned.find(path)
        if found is not None:
            return AioHandle(*found.aio)
    except (ValueError, TypeError, OSError) as unusable:  # unreadable, or of another machine
        text = str(unusable)
        if text not in _warned:
            _warned.add(text)
            logger.warning("not using the stored settings: %s", text)
    return AioHandle()


@contextlib.contextmanager
def handle_for(given: AioHandle | None, path: str | os.PathLike[str]) -> Iterator[AioHandle]:
    """`CallHandle.get` for a call that has nothing else to do while a handle is made."""
    with CallHandle(given, path) as handle:
        yield handle.get()


class CallHandle(Closing):
    """The handle that one save or load works with.

    The caller's handle stays open; None begins to make one now, for the file system of `path`. Used
    with ``with``, after which its own is closed; `get` raises what goes wrong in making one.
    Interrupted at any moment, it is closed by a thread.
    """

    def __init__(self, handle: AioHandle | None, path: str | os.PathLike[str]) -> None:
        self._given = handle
        self._making: Job[AioHandle] | None = None
        self._closing: Job[None] | None = None
        self._begun = False
        if handle is None:
            self._making = Job(partial(new_handle, path), "nvmeio-handle")
            self._making.start()

    def get(self) -> AioHandle:
        """Wait for the handle; raises what making it raised, or ClosedError."""
        if self._given is not None:
            return self._given
        if self._making is None or self._closing is not None:
            raise ClosedError("the handle of this call is closed")
        self._making.wait()
        return self._making.result()

    def done(self) -> None:
        """Begin to close the handle, if it is this call's own. Idempotent."""
        if self._making is not None:
            if self._closing is None:
                self._closing = Job(partial(_close, self._making), "nvmeio-handle", closes=True)
            if not self._begun:
                self._closing.start()  # a second time, after an interrupt, it does nothing
                self._begun = True

    def close(self) -> None:
        """Do as `done`, and wait for it: no thread of its own handle is left.

        Not at the interpreter's end, which may drop a call that was never finished: threads do not
        run any more, and to wait for one would be forever.
        """
        self.done()
        if self._closing is not None and not sys.is_finalizing():
            self._closing.wait()


def _close(making: Job[AioHandle]) -> None:
    if making.withdraw():
        return
    making.wait()
    if making.error is None:
        making.result().close()

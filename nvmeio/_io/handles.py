"""A handle for one call: the caller's, or one that is made and closed beside other work.

To give an AIO context back takes the kernel about 30 ms (io_destroy waits for an RCU grace period),
to make one at times as well. So it is made beside the pickling, and closed beside the last fsync
and whatever the caller does next: nothing is in flight then, and nobody need wait for it. Loading
1 and 64 MiB takes 2.5 and 27 ms that way, and 3.3 and 28 with the portable engine's threads.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from types import TracebackType

from nvmeio.errors import BackendUnavailableError
from nvmeio.handle import AioHandle

logger = logging.getLogger("nvmeio")


@contextlib.contextmanager
def handle_for(given: AioHandle | None, path: str | os.PathLike[str]) -> Iterator[AioHandle]:
    """The handle of one call that has nothing else to do while one is made.

    Args:
        given: The caller's handle, which stays open; or None.
        path: As for `CallHandle`.

    Raises:
        BackendUnavailableError: None can be made; says why.
    """
    with CallHandle(given, path) as handle:
        yield handle.get()


class CallHandle:
    """The handle that one save or load works with.

    Args:
        handle: The caller's, which stays open; None to make one, beginning now.
        path: A file or directory on the file system whose stored setting is to be used
            (`AioHandle.tuned`).

    Used with ``with``, after which its own is closed, or is being closed; what goes wrong in making
    one is raised by `get`.
    """

    def __init__(self, handle: AioHandle | None, path: str | os.PathLike[str]) -> None:
        self._handle = handle
        self._path = path
        self._own = handle is None
        self._failed: BaseException | None = None
        self._thread: threading.Thread | None = None
        if self._own:
            self._beside(self._make)

    def get(self) -> AioHandle:
        """The handle.

        Raises:
            BackendUnavailableError: None can be made; says why.
        """
        self._join()
        if self._failed is not None:
            raise self._failed
        if self._handle is None:
            raise RuntimeError("the handle of this call is closed")
        return self._handle

    def done(self) -> None:
        """It is not needed any more: begin to close it, if it is this call's own."""
        self._join()
        if self._own and self._handle is not None:
            self._beside(self._handle.close)
            self._handle = None

    def wait(self) -> None:
        """Behind the block: until its own handle is closed, and its memory given back."""
        self._join()

    def _make(self) -> None:
        try:
            try:
                # "auto" makes and destroys a context to see whether there are any: 30 ms.
                self._handle = self._new("libaio")
            except BackendUnavailableError:
                self._handle = self._new("auto")
        except BaseException as failed:
            self._failed = failed

    def _new(self, engine: str) -> AioHandle:
        try:
            return AioHandle.tuned(self._path, engine=engine)
        except ValueError as damaged:  # no reason to lose a checkpoint
            logger.warning("not using the stored settings: %s", damaged)
            return AioHandle(engine=engine)

    def _beside(self, work: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=work, name="nvmeio-handle", daemon=True)
        self._thread.start()

    def _join(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    def __enter__(self) -> CallHandle:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.done()

"""Closing: every step even if one fails; at the end of a with statement; undone after an error."""

from __future__ import annotations

import contextlib
import gc
import os
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from nvmeio._threads.running_loop import running_loop

Me = TypeVar("Me")
Item = TypeVar("Item")
Args = ParamSpec("Args")


def do_all(
    steps: Iterable[Callable[[], object]], caught: type[BaseException] = BaseException
) -> None:
    """Do each step even if others fail with what is `caught`, and raise the first failure."""
    failure: BaseException | None = None
    for step in steps:
        try:
            step()
        except caught as failed:
            failure = failure or failed
    if failure is not None:
        raise failure


def collect() -> None:
    """Collect garbage: `gc.collect` does nothing while another thread collects, so wait for that.

    For a second at most: what that thread finalizes may wait for the caller, or be the caller.
    """
    patience = time.monotonic() + 1.0
    while True:
        garbage = weakref.ref(type("Garbage", (), {}))  # every class is in a cycle
        gc.collect()
        if garbage() is None or time.monotonic() > patience:
            return
        time.sleep(0.001)


def members(objects: Iterable[Item]) -> list[Item]:
    """The members of a WeakSet at one moment, even if some are made or dropped meanwhile."""
    while True:
        with contextlib.suppress(RuntimeError):  # another thread has made one just now
            return list(objects)


@contextlib.contextmanager
def opened(path: str | os.PathLike[str], flags: int, mode: int = 0o777) -> Iterator[int]:
    """A descriptor of a file or directory, open for as long as the body runs."""
    fd = os.open(path, flags | os.O_CLOEXEC, mode)
    try:
        yield fd
    finally:
        os.close(fd)


def unlink(path: str | os.PathLike[str]) -> None:
    """Remove a file if that is possible."""
    with contextlib.suppress(OSError):
        os.unlink(path)


class on_error:
    """Calls `undo` if the body raises, whatever it raises, and lets the error pass.

    For jobs and owners, which no Ctrl-C reaches: one that comes as the body ends would undo
    nothing. Elsewhere only where what is left then is found and removed by the next call, as the
    temporary file of a `Replacement` is.
    """

    __slots__ = ("_args", "_kwargs", "_undo")

    def __init__(
        self, undo: Callable[Args, object], *args: Args.args, **kwargs: Args.kwargs
    ) -> None:
        self._undo, self._args, self._kwargs = undo, args, kwargs

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, _: object, __: object) -> None:
        if kind is not None:
            self._undo(*self._args, **self._kwargs)


class Closing:
    """Closed at the end of a with statement, however it ends; `close` is the class's own."""

    if TYPE_CHECKING:  # or `super().close()` would find it before that of another base

        def close(self) -> None: ...

    def __enter__(self: Me) -> Me:
        return self

    def __exit__(self, _: object, exc: BaseException | None, __: object) -> None:
        self.close()


class Discarding(Closing):
    """Closed at the end of a with statement, and given up if an error ends it."""

    def discard(self) -> None: ...

    def __exit__(self, _: object, exc: BaseException | None, __: object) -> None:
        if exc is None:
            self.close()
        else:
            self.discard()


class ClosingWork(Closing):
    """Closed likewise, also by `async with`; what closing raises is of work that failed before.

    It does not hide the error that ended the with statement: it is a warning then.
    """

    _work = "an operation"  # what may have failed

    async def aclose(self) -> None: ...

    def __exit__(self, _: object, exc: BaseException | None, __: object) -> None:
        try:
            self.close()
        except Exception as failed:
            _tell(exc, failed, self._work)

    async def __aenter__(self: Me) -> Me:
        running_loop()  # its end takes one
        return self

    async def __aexit__(self, _: object, exc: BaseException | None, __: object) -> None:
        try:
            await self.aclose()
        except Exception as failed:
            _tell(exc, failed, self._work)


def _tell(exc: BaseException | None, failed: Exception, work: str) -> None:
    if exc is None:
        raise failed
    warnings.warn(f"{work} failed too: {failed}", ResourceWarning, stacklevel=3)

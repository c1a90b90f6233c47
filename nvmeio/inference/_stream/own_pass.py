"""The forward pass that a thread makes: how far it is, whether it is to stop, what it would spoil.

A pass that fails leaves a cache of past keys and values that some layers have updated and others
not. It is refused from then on.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from typing import Any

from nvmeio.inference._plan.units import Unit
from nvmeio.progress import Progress


class PassCancelled(Exception):
    """A pass was told to stop; raised in it at the next layer."""


class PassMark:
    """A pass that is under way, for as long as its frame has this."""

    __slots__ = ("__weakref__",)


class OwnPass:
    """The pass of whichever thread asks.

    Args:
        total_bytes: Of the weights that a pass streams.

    Attributes:
        progress: Told, in each pass, of the layers that are used.
    """

    def __init__(self, total_bytes: int) -> None:
        self.progress: Progress | None = None
        self._total_bytes = total_bytes
        self._here = threading.local()
        self._marks: dict[int, weakref.ref[PassMark]] = {}  # by the number of the thread
        self._spoilt: weakref.WeakSet[Any] = weakref.WeakSet()

    def begin(self, cache: Any) -> None:
        """It begins; `ready` has to follow.

        Args:
            cache: Of past keys and values, or None.

        Raises:
            RuntimeError: The cache is one that a pass left behind which failed.
        """
        self.spoil()  # a pass that was interrupted did not reach its `end`
        if cache is not None and cache in self._spoilt:
            raise RuntimeError(
                "this cache of past keys and values was left by a pass that failed, with some "
                "layers updated and others not: start again with a new one"
            )

    def ready(self, cache: Any) -> None:
        """Nothing is in its way: from now on its failure spoils the cache."""
        self._here.cache = None
        self._here.done_bytes = 0
        if self.progress is not None:
            self.progress("pass", 0, self._total_bytes)
        if cache is not None:
            with contextlib.suppress(TypeError):  # tuples, as old models have them
                self._here.cache = weakref.ref(cache)

    def mark(self) -> PassMark:
        """To hold for as long as a pass goes on."""
        mark = PassMark()
        self._marks[threading.get_ident()] = weakref.ref(mark)
        return mark

    @property
    def under_way(self) -> bool:
        """Whether this thread is within a pass that has a mark."""
        reference = self._marks.get(threading.get_ident())
        return reference is not None and reference() is not None

    def any_under_way(self) -> bool:
        """Whether any thread is."""
        return any(mark() is not None for mark in list(self._marks.values()))

    def end(self) -> bool:
        """It is over, and not interrupted; whether it has waited for anything."""
        self._here.cache = None
        asked = getattr(self._here, "asked", False)
        self._here.asked = False
        return asked

    def waits(self) -> None:
        """It is about to wait for a unit."""
        self._here.asked = True

    def stop_with(self, stop: threading.Event) -> None:
        """Passes of this thread stop at their next layer once this is set."""
        self._here.stop = stop

    def check(self) -> None:
        """Raise PassCancelled if it is to stop."""
        stop = getattr(self._here, "stop", None)
        if stop is not None and stop.is_set():
            self.spoil()
            raise PassCancelled

    def note(self, unit: Unit) -> None:
        """It has a unit's weights: tell how far it is."""
        progress = self.progress
        if progress is None:
            return
        done = getattr(self._here, "done_bytes", 0) + unit.streamed_bytes
        self._here.done_bytes = done = min(done, self._total_bytes)
        try:
            progress(unit.name, done, self._total_bytes)
        except BaseException:
            self.spoil()
            raise

    def spoil(self) -> None:
        """It has failed: its cache is refused from now on."""
        reference = getattr(self._here, "cache", None)
        cache = None if reference is None else reference()
        if cache is not None:
            self._spoilt.add(cache)

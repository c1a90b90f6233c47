"""The progress of a load, a save or the like: the functions for ``progress=``, and two bars.

    nvmeio.load("model.pt", progress=nvmeio.progress.tqdm_bar())

    with nvmeio.progress.rich_bar() as bar:
        state = nvmeio.load("model.pt", progress=bar)
        nvmeio.save(state, "copy.pt", progress=bar)

Any callable with the parameters of `Progress` will do.

The thread that moves the bytes calls it. It is another thread than yours if yours is the main
thread or runs an event loop. Two threads never call it at once. Keep it short; to reach an event
loop use ``loop.call_soon_threadsafe``.

If it raises, the call fails with that error. As after any failure nothing is in flight then, a file
that was to be written is the old one or does not exist, and nothing that was read is kept. It is
not called any more once the new file has its name.
"""

from __future__ import annotations

import importlib
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from rich.console import Console

Progress: TypeAlias = Callable[[str, int, int], object]
"""``progress(what, done_bytes, total_bytes)``.

`what` says what is being done ("load model.pt", "save step-00000012.pt"; of `nvmeio pack` the layer
that was written). The first call has 0 bytes done, the last one all. In between it is called as
reads and writes end: every 16 to 64 MiB, and of a load after each tensor that is larger. The total
grows where more files turn out to be read.
"""


class Bar(ABC):
    """A progress bar: pass it as ``progress=`` to one call after another.

    It appears with the first bytes and ends with the last ones. A ``with`` statement ends it
    whatever happens; so does dropping it. Several calls may share one, also at the same time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shown: dict[int, Any] = {}  # by the thread that tells

    def __call__(self, what: str, done_bytes: int, total_bytes: int) -> None:
        """Show how far it is."""
        here = threading.get_ident()
        with self._lock:
            if here not in self._shown:
                self._shown[here] = self._begin(what, total_bytes)
            self._show(self._shown[here], what, done_bytes, total_bytes)
            if done_bytes >= total_bytes:
                self._end(self._shown.pop(here))

    def close(self) -> None:
        """End the bar. Idempotent. It appears again if a call reports to it."""
        with self._lock:
            while self._shown:
                self._end(self._shown.popitem()[1])

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def _begin(self, what: str, total_bytes: int) -> Any:
        """Begin another bar."""

    @abstractmethod
    def _show(self, bar: Any, what: str, done_bytes: int, total_bytes: int) -> None:
        """Show the progress."""

    @abstractmethod
    def _end(self, bar: Any) -> None:
        """End the bar."""


class _RichBar(Bar):
    def __init__(self, console: Console | None, transient: bool) -> None:
        super().__init__()
        from rich import progress

        self._bars = progress.Progress(
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(),
            progress.DownloadColumn(binary_units=True),
            progress.TransferSpeedColumn(),
            progress.TimeRemainingColumn(compact=True),
            console=console,
            transient=transient,
            refresh_per_second=4,  # each one takes the GIL for a millisecond or so
        )
        weakref.finalize(self, self._bars.live.stop)  # `stop` prints a line, begun or not

    def _begin(self, what: str, total_bytes: int) -> Any:
        self._bars.start()
        return self._bars.add_task(what, total=total_bytes)

    def _show(self, bar: Any, what: str, done_bytes: int, total_bytes: int) -> None:
        self._bars.update(bar, description=what, completed=done_bytes, total=total_bytes)

    def _end(self, bar: Any) -> None:
        self._bars.stop_task(bar)
        if not self._shown:
            self._bars.stop()


class _TqdmBar(Bar):
    def __init__(self, arguments: dict[str, Any]) -> None:
        super().__init__()
        try:
            self._new: Any = importlib.import_module("tqdm.auto").tqdm
        except ImportError as missing:
            text = "tqdm_bar needs tqdm: pip install tqdm, or take rich_bar()"
            raise ImportError(text) from missing
        self._arguments = arguments

    def _begin(self, what: str, total_bytes: int) -> Any:
        given = {"unit": "B", "unit_scale": True, "unit_divisor": 1024, **self._arguments}
        return self._new(desc=what, total=total_bytes, **given)

    def _show(self, bar: Any, what: str, done_bytes: int, total_bytes: int) -> None:
        bar.total = total_bytes
        bar.set_description(what, refresh=False)
        bar.update(done_bytes - bar.n)

    def _end(self, bar: Any) -> None:
        bar.close()


def rich_bar(console: Console | None = None, *, transient: bool = False) -> Bar:
    """A bar drawn by rich: bytes, rate and the remaining time.

    Args:
        console: Where; by default standard output.
        transient: Leave nothing of it on the screen.
    """
    return _RichBar(console, transient)


def tqdm_bar(**arguments: Any) -> Bar:
    """A bar drawn by tqdm, in notebooks too.

    Args:
        arguments: As for ``tqdm``, such as ``disable`` or ``file``.

    Raises:
        ImportError: tqdm is not installed.
    """
    return _TqdmBar(arguments)

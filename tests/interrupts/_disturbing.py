"""What disturbs a call: a signal after a time or at an opcode, a raising hook, a cancelled task.

KeyboardInterrupt is raised where CPython looks for signals: after calls, at the start of functions
and at the ends of loops. A timer hits long waits; rare places it hits once in a million. So
`Opcodes` counts the opcodes that the main thread executes in nvmeio (and in what nvmeio waits
with), and trips the interpreter's own signal flag before the one that was asked for: the
interpreter then raises at the next place where a real Ctrl-C could have been raised, and a sweep
over all opcodes leaves no such place out.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import ctypes
import faulthandler
import itertools
import queue
import signal
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from support import HeldEngine

import nvmeio

# Whose opcodes are counted: ours, and those of the locks and futures that we wait with.
_OURS = str(Path(nvmeio.__file__).parent)
_TESTS = str(Path(__file__).parent)
_ASYNCIO = str(Path(asyncio.__file__).parent)
_WAITED_WITH = {
    module.__file__ for module in (threading, contextlib, queue, weakref) if module.__file__
} | {str(Path(concurrent.futures.__file__).parent / name) for name in ("_base.py", "thread.py")}


class HookError(Exception):
    """What a user's hook raises."""


class Disturbance:
    """Around one call: `fired` tells whether it came to that."""

    raises: type[BaseException] = KeyboardInterrupt

    def __init__(self) -> None:
        self.fired = False

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """Armed within the block."""
        yield

    def poke(self) -> None:
        """A hook of the user was called."""

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run the work of a scenario that is a coroutine: `asyncio.run`."""
        if sys.version_info < (3, 11):
            return asyncio.run(self.drive(work))
        with asyncio.Runner(loop_factory=self._new_loop) as runner:
            return runner.run(self.drive(work))

    def _new_loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.new_event_loop()

    async def drive(self, work: Coroutine[Any, Any, Any]) -> Any:
        return await work


class _Signal(Disturbance):
    def __init__(self) -> None:
        super().__init__()
        self._armed = False

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self._armed:
            self._armed = False
            self.fired = True
            raise KeyboardInterrupt

    def _arm(self) -> None:
        raise NotImplementedError

    def _disarm(self) -> None:
        raise NotImplementedError

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        before = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        self._armed = True
        self._arm()
        try:
            yield
        finally:
            self._armed = False  # one that comes now comes too late, and does nothing
            self._disarm()
            for number, handler in before.items():
                signal.signal(number, handler)


_SIGNALS = (signal.SIGALRM, signal.SIGINT)


class _CtrlC(_Signal):
    """Meets an event loop as Ctrl-C does: `asyncio.run` takes the signal, and cancels its task.

    A KeyboardInterrupt raised within the loop's own Python can lose what is to be called next, and
    `asyncio.run` then waits for ever for a task that it cancels, whatever that task does.
    """

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            return super().run(work)
        except KeyboardInterrupt:
            self.fired = True
            raise
        except asyncio.CancelledError:
            # The runner takes the signal before it sets its count of them to 0, and forgets it.
            if self.fired:
                raise KeyboardInterrupt from None
            raise
        finally:
            signal.signal(signal.SIGINT, before)

    def _new_loop(self) -> asyncio.AbstractEventLoop:
        """Undisturbed: `socket.socketpair`, which loops are made with, loses a descriptor."""
        armed, self._armed = self._armed, False
        made = super()._new_loop()
        self._armed = armed
        return made

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self._armed and signal.getsignal(signal.SIGINT) != self._handle:
            self._armed = False
            self.fired = True
            signal.raise_signal(signal.SIGINT)
        else:
            super()._handle(signum, frame)


class Timer(_CtrlC):
    """A signal after so many seconds, and more, each so much later, where they are asked for."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = max(seconds, 1e-6)

    def _arm(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, self._seconds)

    def _disarm(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)


class Opcodes(_Signal):
    """A signal before the n-th opcode of ours; with None all are counted, and nothing is raised."""

    def __init__(self, at: int | None = None) -> None:
        super().__init__()
        self.count = 0
        self._at = at
        self._before: Any = None
        # Kept: a bound method that only the interpreter has is freed when tracing ends within it.
        self._tracers = self._called, self._opcode

    def _arm(self) -> None:
        self._before = sys.gettrace()
        sys.settrace(self._tracers[0])

    def _disarm(self) -> None:
        sys.settrace(self._before)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        """Not within asyncio's own Python, which a KeyboardInterrupt breaks: at our next opcode.

        It could lose what is to be called next, as when `_CtrlC` came there; asyncio.run keeps real
        ones away from it.
        """
        if self._armed and _in_asyncio(frame):
            self._at = self.count + 1
            sys.settrace(self._tracers[0])
        else:
            super()._handle(signum, frame)

    def _called(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not _counts(frame.f_code.co_filename):
            return None
        frame.f_trace_lines = False
        frame.f_trace_opcodes = True
        return self._tracers[1]

    def _opcode(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event != "opcode" or not self._armed:
            return self._tracers[1]
        self.count += 1
        if self.count != self._at:
            return self._tracers[1]
        sys.settrace(None)
        frame.f_trace = None
        # Tripped by the loop's own instruction, after which the interpreter looks for no signals
        # before this function has returned: it is raised in the frame that is traced.
        for _ in itertools.starmap(ctypes.pythonapi.PyErr_SetInterrupt, [()]):
            break
        return None


def _in_asyncio(frame: FrameType | None) -> bool:
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith((_OURS, _TESTS)):
            return False
        if name.startswith(_ASYNCIO):
            return True
        frame = frame.f_back
    return False


_known: dict[str, bool] = {}


def _counts(name: str) -> bool:
    try:
        return _known[name]
    except KeyError:
        return _known.setdefault(name, name.startswith(_OURS) or name in _WAITED_WITH)


class Twice(_CtrlC):
    """Two signals while the drive answers nothing: the second one gets through, if not the first.

    Under `asyncio.run` there are three: the second ends the run, which then waits for its tasks.
    Some more are sent there: a busy machine makes one of two, or has not begun to wait for them.

    Raises:
        AssertionError: It took longer than `limit_s`, with what the threads were doing.
    """

    def __init__(self, engine: HeldEngine, limit_s: float) -> None:
        super().__init__()
        self._engine = engine
        self._limit_s = limit_s
        self._on_loop = False
        self._taken = 0  # of the signals, by our handler
        self._over = threading.Event()
        self._late = ""

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        self._on_loop = True
        return super().run(work)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self._taken += 1
        if self._armed:
            self.fired = True
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        self._engine.gate.clear()
        thread = threading.Thread(target=self._interrupt, name="interrupts")
        try:
            with super().around():  # before the first signal: what is under way may ask the drive
                try:
                    try:
                        thread.start()
                        yield
                    finally:
                        self._armed = False
                finally:  # while a late signal still meets our handler, which does nothing now
                    self._over.set()
                    self._engine.gate.set()
                    thread.join()
        finally:
            assert not self._late, self._late

    def _arm(self) -> None:
        pass

    def _disarm(self) -> None:
        pass

    def _interrupt(self) -> None:
        """In a thread: twice, some time after the drive was asked for something."""
        begun = self._engine.begun
        until = time.monotonic() + 1.0  # what it was asked for before may be held up as well
        while self._engine.begun == begun and time.monotonic() < until:
            if self._over.wait(0.001):
                return
        patiences_s = [0.3, 0.3, 1.0, 1.0] if self._on_loop else [0.3]
        for number, patience_s in enumerate([*patiences_s, self._limit_s]):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            until = time.monotonic() + self._limit_s
            while not self._on_loop and self._taken <= number and time.monotonic() < until:
                if self._over.wait(0.001):
                    return
            if self._over.wait(patience_s):
                return
        with tempfile.TemporaryFile("w+") as stacks:
            faulthandler.dump_traceback(stacks)
            stacks.seek(0)
            self._late = f"the last Ctrl-C did not get through:\n{stacks.read()}"
        self._engine.gate.set()


class Hook(Disturbance):
    """The n-th call of a user's hook raises; with None all are counted."""

    raises = HookError

    def __init__(self, at: int | None = None) -> None:
        super().__init__()
        self.count = 0
        self._at = at
        self._armed = False

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        self._armed = True
        try:
            yield
        finally:
            self._armed = False

    def poke(self) -> None:
        if not self._armed:
            return
        self.count += 1
        if self.count == self._at:
            self.fired = True
            raise HookError(f"call {self.count} of the hooks")


class Cancel(Disturbance):
    """The task is cancelled when it waits for the n-th time; with None all are counted."""

    raises = asyncio.CancelledError

    def __init__(self, at: int | None = None) -> None:
        super().__init__()
        self.count = 0
        self._at = at

    async def drive(self, work: Coroutine[Any, Any, Any]) -> Any:
        return await asyncio.ensure_future(_Stepped(work, self._waits).run())

    def _waits(self) -> None:
        self.count += 1
        if self.count == self._at:
            self.fired = True
            task = asyncio.current_task()
            assert task is not None
            task.cancel()


class CancelLater(Disturbance):
    """The task is cancelled after so many seconds."""

    raises = asyncio.CancelledError

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    async def drive(self, work: Coroutine[Any, Any, Any]) -> Any:
        task = asyncio.ensure_future(work)

        def cancel() -> None:
            self.fired = task.cancel()

        timer = asyncio.get_running_loop().call_later(self._seconds, cancel)
        try:
            return await task
        finally:
            timer.cancel()


class _Stepped:
    """An awaitable that tells each time it is about to wait."""

    def __init__(self, work: Coroutine[Any, Any, Any], waits: Callable[[], None]) -> None:
        self._work = work
        self._waits = waits

    async def run(self) -> Any:
        return await self

    def __await__(self) -> Any:
        inner = self._work.__await__()
        send: Callable[[], Any] = lambda: inner.send(None)  # noqa: E731
        while True:
            try:
                waited_for = send()
            except StopIteration as ended:
                return ended.value
            self._waits()
            try:
                value = yield waited_for
            except BaseException as thrown:
                failed = thrown
                send = lambda: inner.throw(failed)  # noqa: E731, B023
            else:
                send = lambda: inner.send(value)  # noqa: E731, B023

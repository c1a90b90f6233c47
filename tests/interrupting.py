"""KeyboardInterrupt at every place of nvmeio's code, in this thread, where Python can raise it.

That is not between any two bytecodes. CPython looks for signals when a function begins, when a loop
jumps back, and when a call returns; not, for one, between a lock's ``__enter__`` and the body of
its ``with``, nor between that body and ``__exit__``. (Source: CHECK_EVAL_BREAKER in
Python/bytecodes.c.) In destructors Python swallows it, so that none is raised there. What blocks in
C is left to real signals: `at_random_times`, and `interrupts`, where they come in other processes.
"""

from __future__ import annotations

import dis
import functools
import gc
import random
import signal
import sys
import time
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import nvmeio

_ROOT = str(Path(nvmeio.__file__).parent)
_known: dict[int, tuple[frozenset[int], CodeType]] = {}  # by id: to hash a code object takes long


def _handler(code: CodeType, offset: int) -> int:
    """Where an exception in this instruction is caught, or -1; -1 before Python 3.11."""
    found = -1
    parse: Callable[[CodeType], Any] = getattr(dis, "_parse_exception_table", lambda _: ())
    for entry in parse(code):
        if entry.start <= offset < entry.end:
            found = entry.target
    return found


def _places(code: CodeType) -> frozenset[int]:
    """Offsets of instructions before which the interpreter looks for signals."""
    if id(code) in _known:
        return _known[id(code)][0]
    found: set[int] = set()
    call: int | None = None
    for instruction in dis.get_instructions(code):
        name, offset = instruction.opname, instruction.offset
        if name in ("PRECALL", "CACHE"):
            continue
        # What a signal raises there is raised by the call, and caught by what surrounds that.
        if call is not None and _handler(code, call) == _handler(code, offset):
            found.add(offset)
        looks = name == "RESUME" or name.startswith("CALL")
        call = offset if looks and not name.startswith("CALL_INTRINSIC") else None
        if name.startswith(("JUMP_BACKWARD", "JUMP_ABSOLUTE")):
            # And so by the jump, not by where it leads: that may be the NOP of a ``try`` within
            # another, which no exception table covers.
            target = int(instruction.argval)
            if _handler(code, offset) == _handler(code, target):
                found.add(target)
    _known[id(code)] = frozenset(found), code
    return _known[id(code)][0]


class _Interrupting:
    """Counts such places in this thread, and raises at one of them."""

    def __init__(self, at: int) -> None:
        self.seen = 0
        self.where = ""
        self._at = at

    def __enter__(self) -> _Interrupting:
        self._before = sys.gettrace()
        # From Python 3.12 on `settrace` looks whether any frame wants opcodes; one that says so in
        # its trace function, as below, is heard at the next `settrace` only.
        sys._getframe().f_trace_opcodes = True
        sys.settrace(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _called(self, frame: FrameType, event: str, _: object) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(_ROOT):
            return None
        above: FrameType | None = frame
        while above is not None:
            if above.f_code.co_name == "__del__":
                return None
            above = above.f_back
        places = _places(code)

        def step(frame: FrameType, event: str, _: object) -> Any:
            if event == "opcode" and frame.f_lasti in places and not self.where:
                self.seen += 1
                if self.seen == self._at:
                    name = code.co_filename.removeprefix(_ROOT)
                    self.where = f"{name}:{frame.f_lineno} ({code.co_name})"
                    sys.settrace(None)
                    raise KeyboardInterrupt(self.where)
            return step

        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        return step


@functools.cache
def opcodes_told() -> tuple[bool, bool]:
    """Whether this Python tells of opcodes the first time, and again after an untraced run."""
    namespace: dict[str, Any] = {}
    exec("def work():\n    return len(())\n", namespace)
    work = namespace["work"]
    events: set[str] = set()

    def step(frame: FrameType, event: str, _: object) -> Any:
        events.add(event)
        return step

    def called(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code is not work.__code__:
            return None
        frame.f_trace_opcodes = True
        return step

    def traced() -> bool:
        events.clear()
        before = sys.gettrace()
        sys._getframe().f_trace_opcodes = True
        sys.settrace(called)
        try:
            work()
        finally:
            sys.settrace(before)
        return "opcode" in events

    first = traced()
    traced()
    work()
    return first, traced()


def skip_without_opcodes() -> None:
    """Skip the test that is running where a trace function is not told of opcodes reliably."""
    if not opcodes_told()[1]:
        raise unittest.SkipTest(
            "this Python (3.13.0 is one) tells a trace function of no opcodes once a function has "
            "run untraced"
        )


def _trace_once(work: Callable[[], object]) -> None:
    """Trace a run that is not counted, where opcodes are told of from the second one on."""
    skip_without_opcodes()
    if not opcodes_told()[0]:
        with _Interrupting(0):
            work()


def everywhere(work: Callable[[], object], most: int = 5000, step: int = 1) -> Iterator[str]:
    """Run work over and over, each time with an interrupt one place later; yields where it was.

    The work may catch the interrupt, or let it through. Ends once it gets through undisturbed.
    """
    _trace_once(work)
    for at in range(1, most, step):
        interrupting = _Interrupting(at)
        try:
            with interrupting:
                work()
        except KeyboardInterrupt:
            pass  # and not a yield here, where the traceback holds the frames
        if not interrupting.where:
            return
        yield interrupting.where
    raise AssertionError(f"the work has more than {most} places")


def at_places(work: Callable[[], object], most: int, seed: int = 0) -> Iterator[str]:
    """`everywhere`, where there are too many: at so many of them, spread over all of the work."""
    _trace_once(work)
    with _Interrupting(0) as counting:
        work()
    chance = random.Random(seed)
    step = -(-counting.seen // most)
    for first in range(1, counting.seen + 1, step):
        interrupting = _Interrupting(first + chance.randrange(step))
        try:
            with interrupting:
                work()
        except KeyboardInterrupt:
            pass
        if interrupting.where:  # there may be fewer in one run than in another
            gc.collect()
            yield interrupting.where


def at_random_times(work: Callable[[], object], most: int, seed: int = 0) -> Iterator[str]:
    """Run work with a real signal at so many random moments of it."""
    began = time.perf_counter()
    work()
    took = time.perf_counter() - began
    chance = random.Random(seed)
    armed = False

    def interrupt(*_: object) -> None:
        nonlocal armed
        if armed:  # one that comes later comes too late, and does nothing
            armed = False
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(most):
            after = chance.uniform(1e-4, 1.2 * took)
            try:
                armed = True
                signal.setitimer(signal.ITIMER_REAL, after)
                work()
                armed = False
            except KeyboardInterrupt:
                pass
            finally:
                armed = False
                signal.setitimer(signal.ITIMER_REAL, 0)
            yield f"after {after} s"
    finally:
        signal.signal(signal.SIGALRM, before)

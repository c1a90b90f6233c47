"""Interrupts at chosen bytecodes and at random times, as `KeyboardInterrupt` comes."""

from __future__ import annotations

import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import nvmeio

_PACKAGE = str(Path(nvmeio.__file__).parent)


class _Tracing:
    """Counts the bytecodes of the package in this thread; raises at one of them."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.seen = 0

    def __enter__(self) -> _Tracing:
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, _: object) -> Any:
        if not frame.f_code.co_filename.startswith(_PACKAGE):
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        return self._opcode

    def _opcode(self, frame: FrameType, event: str, _: object) -> Any:
        if event == "opcode":
            self.seen += 1
            if self.seen == self.at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._opcode


def at_bytecodes(work: Callable[[], object], trials: int, seed: int = 0) -> Iterator[int]:
    """Runs `work` with an interrupt at so many of its bytecodes, spread over all of it."""
    with _Tracing(0) as counted:
        work()
    rng = random.Random(seed)
    step = max(1, counted.seen // trials)
    for first in range(1, counted.seen, step):
        at = first + rng.randrange(step)
        try:
            with _Tracing(at):
                work()
        except KeyboardInterrupt:
            pass
        yield at


def at_random_times(work: Callable[[], object], trials: int, seed: int = 0) -> Iterator[float]:
    """Runs `work` with a real signal at so many random moments of it."""
    began = time.perf_counter()
    work()
    took = time.perf_counter() - began
    rng = random.Random(seed)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(trials):
            after = rng.uniform(1e-4, 1.2 * took)
            try:
                signal.setitimer(signal.ITIMER_REAL, after)
                work()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                pass
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            yield after
    finally:
        signal.signal(signal.SIGALRM, before)

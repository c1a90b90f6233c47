"""Ctrl-C at every point of a call where Python would notice it, one after the other.

A signal's handler runs where the interpreter looks for it: after a call, at a function's start, at
a loop's jump back. `everywhere` raises `KeyboardInterrupt` at the first such point that a piece of
work comes by in nvmeio's own code, then at the second, and so on until the work gets through, so
that no window is too small to be hit. What blocks in C is left to tests with real signals.
"""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import nvmeio

_ROOT = str(Path(nvmeio.__file__).parent)


def _handler(code: CodeType, offset: int) -> int:
    """Where an exception in this instruction is caught, or -1."""
    found = -1
    for entry in dis._parse_exception_table(code):  # type: ignore[attr-defined]
        if entry.start <= offset < entry.end:
            found = entry.target
    return found


@functools.cache
def _points(code: CodeType) -> frozenset[int]:
    """Offsets of instructions before which the interpreter looks for signals."""
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
        if name.startswith("JUMP_BACKWARD"):
            found.add(int(instruction.argval))
    return frozenset(found)


class _Interrupt:
    def __init__(self, after: int) -> None:
        self.left = after
        self.where = ""

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(_ROOT):
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        return self.step

    def step(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "opcode" and not self.where and frame.f_lasti in _points(frame.f_code):
            self.left -= 1
            if self.left < 0:
                name = frame.f_code.co_filename.removeprefix(_ROOT)
                self.where = f"{name}:{frame.f_lineno} ({frame.f_code.co_name})"
                raise KeyboardInterrupt(self.where)
        return self.step


def everywhere(work: Callable[[], object], most: int = 5000, step: int = 1) -> Iterator[str]:
    """Run work over and over, each time with an interrupt one point later; yields where it was.

    The work may catch the interrupt, or let it through. Ends once it gets through undisturbed.
    """
    for after in range(0, most, step):
        interrupt = _Interrupt(after)
        before = sys.gettrace()
        sys.settrace(interrupt)
        try:
            work()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        if not interrupt.where:
            return
        yield interrupt.where
    raise AssertionError(f"the work has more than {most} points")

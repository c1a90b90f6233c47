"""KeyboardInterrupt at each place of the package, in this thread, where Python can raise it.

That is not between any two bytecodes. CPython looks for signals when a function begins, when a loop
jumps back, and when a call returns; not, for one, between a lock's ``__enter__`` and the body of
its ``with``, nor between that body and ``__exit__``. (Source: CHECK_EVAL_BREAKER in
Python/bytecodes.c.) In destructors Python swallows it, so that none is raised there.
"""

from __future__ import annotations

import dis
import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import nvmeio

_LOOKS = ("RESUME", "JUMP_BACKWARD", "JUMP_ABSOLUTE")
_PACKAGE = str(Path(nvmeio.__file__).parent)


class Interrupting:
    """Raises KeyboardInterrupt at the n-th such place in this thread; once."""

    def __init__(self, at: int) -> None:
        self.left = at
        self._last: dict[FrameType, str] = {}

    def __enter__(self) -> None:
        sys.settrace(self._call)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, _: object) -> Any:
        if not frame.f_code.co_filename.startswith(_PACKAGE):
            return None
        above: FrameType | None = frame
        while above is not None:
            if above.f_code.co_name == "__del__":
                return None
            above = above.f_back
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        return self._opcode

    def _opcode(self, frame: FrameType, event: str, _: object) -> Any:
        if event == "return":
            self._last.pop(frame, None)
        if event != "opcode":
            return self._opcode
        name = dis.opname[frame.f_code.co_code[frame.f_lasti]]
        last, self._last[frame] = self._last.get(frame, ""), name
        if name in _LOOKS or last.startswith("CALL"):
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                self._last.clear()
                raise KeyboardInterrupt
        return self._opcode


def count_places(work: Callable[[], object]) -> int:
    """How many such places `work` comes by; about as many every time."""
    counting = Interrupting(1 << 60)
    with counting:
        work()
    return (1 << 60) - counting.left


def interrupted(work: Callable[[], object], most: int = 200) -> Iterator[int]:
    """Runs `work` with an interrupt at each of its places, or at `most` spread over them."""
    count = count_places(work)
    for at in range(1, count + 1, -(-count // most)):
        raised = False
        try:
            with Interrupting(at):
                work()
        except KeyboardInterrupt:
            raised = True  # and not a yield here, where the traceback holds the frames
        if raised:
            gc.collect()
            yield at

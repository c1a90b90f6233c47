"""Asking the store of torch.distributed, for a limited time.

torch reads the answer of a TCPStore without a time limit of its own: a rank that serves it, and is
stopped as a whole (SIGSTOP, swapping, a machine that is cut off), would hold up everybody. So a
thread asks, and the callers wait for it.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, NamedTuple

from nvmeio._threads.future import Future
from nvmeio._threads.threads import Thread


class _Question(NamedTuple):
    call: Callable[..., Any]
    arguments: tuple[Any, ...]
    answer: Future[Any]


class Asker:
    """A thread that makes calls, one after the other, for as long as this object lives.

    It is started by the first call. If no thread can be started (in a forked child, at the end of
    the interpreter), the caller makes its call itself. A call that does not return holds up those
    behind it, which then take no longer than their own limits; once it does return, all goes on.
    """

    def __init__(self) -> None:
        self._questions: SimpleQueue[_Question | None] = SimpleQueue()
        self._since: list[float] = []  # when the call began that is being made
        self._pid = 0  # of the process that has the thread

    def ask(self, call: Callable[..., Any], arguments: tuple[Any, ...], limit_s: float) -> Any:
        """Make a call, and return what it returns, or raise what it raises.

        Raises TimeoutError if that takes longer than `limit_s`, or if the call before has.
        """
        if not self._is_running():
            return call(*arguments)
        since = list(self._since)
        if since and time.perf_counter() - since[0] > limit_s:
            raise TimeoutError
        question = _Question(call, arguments, Future())
        self._questions.put(question)
        if not question.answer.wait(limit_s):
            raise TimeoutError
        return question.answer.result()

    def _is_running(self) -> bool:
        if not self._pid:
            self._pid = os.getpid()
            try:
                Thread(_answer, "nvmeio-store", (self._questions, self._since)).start()
            except (RuntimeError, MemoryError):
                self._pid = -1
            else:
                weakref.finalize(self, self._questions.put, None).atexit = False
        return self._pid == os.getpid()


def _answer(questions: SimpleQueue[_Question | None], since: list[float]) -> None:
    while (question := questions.get()) is not None:
        since.append(time.perf_counter())
        try:
            value = question.call(*question.arguments)
        except BaseException as failed:
            since.clear()
            question.answer.fail(failed)
        else:
            since.clear()
            question.answer.set(value)
        del question

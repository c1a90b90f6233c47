"""Calls that may never return, given up after a time.

A thread cannot be ended from outside, so one that hangs is left behind: a daemon thread in a
foreign call, which does not keep the interpreter from exiting.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nvmeio._threads.threads import Thread


class HangsError(Exception):
    """The call has not returned in time; it may be running still."""


def call(step: Callable[[], Any], limit_s: float, name: str) -> Any:
    """Call in a thread of its own; what it returns or raises.

    Raises:
        HangsError: Not back after `limit_s` seconds.
    """
    answers: list[Any] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            answers.append(step())
        except BaseException as failed:
            failures.append(failed)

    runner = Thread(run, name)
    runner.start()
    runner.join(limit_s)
    if runner.is_alive():
        raise HangsError(f"not back after {limit_s} s")
    if failures:
        raise failures[0]
    return answers[0]

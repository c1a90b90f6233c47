"""Cores that have not given back what the kernel gave: kept, ended at exit, refused in a fork.

So these are all that move bytes in this process, and what they and those before them have counted
is what it has moved: `totals`.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Iterable
from typing import Any

from nvmeio.engines.base import Counters
from nvmeio.engines.ring import RingEngine

# Strong references. In a cycle, the collector finalises the shim's objects together with the handle
# whose `__del__` hands them on; what is reachable from here it leaves alone until it is released.
cores: set[Any] = set()  # of `_core.core.Core`, which stands on this

# The collector may release a core while it is held, or while some core's own lock is: whoever holds
# this one waits for no core.
_lock = threading.RLock()
_inherited: set[Any] = set()  # those of the process that this one was forked from
_gone: list[Counters] = []  # of cores that are not there any more
_MOST_GONE = 256  # then they are added up


def let_go(core: Any) -> None:
    """It has given everything back."""
    counted = _counted(core)._replace(in_flight=0)
    with _lock:
        if core not in cores:
            return
        # An interrupt in between loses one handle's part of the totals, and nothing else.
        cores.discard(core)
        _gone.append(counted)
        number = len(_gone)
        if number > _MOST_GONE:
            _gone[:number] = [added_up(_gone[:number])]


def totals() -> tuple[Counters, int]:
    """What all handles of this process have counted, closed ones too; how many are open."""
    with _lock:
        while True:
            here, gone = list(cores), list(_gone)
            if len(here) == len(cores):  # else the collector has released one in between
                break
    here = [core for core in here if core not in _inherited]
    return added_up([*gone, *map(_counted, here)]), sum(core.below is None for core in here)


def added_up(counters: Iterable[Counters]) -> Counters:
    """The sum of each."""
    return Counters(*map(sum, zip(Counters(), *counters, strict=True)))


def _counted(core: Any) -> Counters:
    """A core's own: what a ring's pieces were is counted by the host's engine."""
    counters: Counters = core.counters()
    if not isinstance(core.engine, RingEngine):
        return counters
    inside = core.engine.inside()._replace(in_flight=0)
    return Counters(*(both - once for both, once in zip(counters, inside, strict=True)))


def of(cores: Iterable[Any]) -> Counters:
    """What some cores have counted, each transfer once."""
    return added_up(map(_counted, cores))


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.RLock()  # it may have been copied while held
    _gone.clear()  # the parent's
    _inherited.update(cores)
    for core in list(cores):
        core.after_fork()


def _at_exit() -> None:
    # What works through another core's engine comes first.
    for core in sorted(cores, key=lambda core: core.below is None):
        core.at_exit()


os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(_at_exit)

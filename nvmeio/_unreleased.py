"""Cores that have not given back what the kernel gave: kept, ended at exit, refused in a fork."""

from __future__ import annotations

import atexit
import os
from typing import Any

# Strong references. In a cycle, the collector finalises the shim's objects together with the handle
# whose `__del__` hands them on; what is reachable from here it leaves alone until it is released.
cores: set[Any] = set()  # of `_core.Core`, which stands on this


def _after_fork_in_child() -> None:
    for core in list(cores):
        core.after_fork()


def _at_exit() -> None:
    # What works through another core's engine comes first.
    for core in sorted(cores, key=lambda core: core.below is None):
        core.at_exit()


os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(_at_exit)

"""Into a whole process tree: the environment in which every Python installs nvmeio into DeepSpeed.

A directory with a `sitecustomize` goes first on PYTHONPATH. Every Python below reads it at start,
however it was started: by the shell, DeepSpeed's launcher (which hands PYTHON* variables to other
hosts too), torchrun, or multiprocessing's ``spawn`` and ``forkserver``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

STARTUP = Path(__file__).parent / "startup"


def environment(base: Mapping[str, str]) -> dict[str, str]:
    """A copy of these environment variables, for a process tree that uses nvmeio."""
    rest = base.get("PYTHONPATH", "")
    if rest.split(os.pathsep)[0] == str(STARTUP):
        return dict(base)
    # What follows stays as it is: an empty entry in it means the current directory.
    return {**base, "PYTHONPATH": f"{STARTUP}{os.pathsep}{rest}" if rest else str(STARTUP)}

"""Room on the drive for the tests: how much they take, and what runs that were killed have left.

What a test that passed has written goes at once (see pyproject.toml); but what a run has left that
was killed pytest keeps for three days.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

import pytest

# Example 13 takes 3 GB at once, checkpoint/test_load.py 1.2, every other test less than 0.6; four
# run side by side.
NEEDED_BYTES = 6 << 30
_MARK = ".nvmeio-tests"


def check(config: pytest.Config) -> None:
    """Whole folders of tests are not begun on a drive that they would fill."""
    given = config.option.basetemp
    place = Path(given).absolute().parent if given else Path(tempfile.gettempdir())
    if not any(Path(each).is_dir() for each in config.args) or not place.is_dir():
        return
    free = shutil.disk_usage(place).free
    if free < NEEDED_BYTES:
        raise pytest.UsageError(
            f"the tests need {NEEDED_BYTES / 2**30:.0f} GiB, and {place} has {free / 2**30:.1f} GiB"
            " free: make room, or choose another place with TMPDIR or --basetemp"
        )


def claim(directory: Path) -> int:
    """`directory` is that of a run of ours as long as the descriptor stays open.

    What runs of ours that were killed left beside it is removed; of those that ended, pytest keeps
    what it is told to.
    """
    for mark in directory.parent.glob(f"*/{_MARK}"):
        left = mark.parent
        if left.is_symlink() or not (left / ".lock").exists():
            continue
        with contextlib.suppress(OSError):  # it still runs, or somebody else removes it
            os.close(_locked(left, fcntl.LOCK_EX))
            shutil.rmtree(left, ignore_errors=True)
    claimed = _locked(directory, fcntl.LOCK_SH)
    (directory / _MARK).touch()
    return claimed


def _locked(directory: Path, kind: int) -> int:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor

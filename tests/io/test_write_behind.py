"""A file that is written while what comes next is being made."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from support import random_bytes, spin_until_collected

import nvmeio
from nvmeio._io.inflight import WriteBehind


def test_the_staging_may_be_of_any_size(path: Path, new_handle: Any) -> None:
    """The bench's buffer is the user's choice."""
    handle = new_handle("threads")
    for nbytes in (2, 8192, 100_000):
        staging = torch.empty(nbytes, dtype=torch.uint8)
        with nvmeio.open(path, "w") as file:
            stream = WriteBehind(handle, file, staging)
            stream.write(random_bytes(500))
            stream.finish()
        assert path.read_bytes() == random_bytes(500)


def test_memory_that_is_being_written_to_outlives_its_release(path: Path, new_handle: Any) -> None:
    """A daemon thread wrote while the end of the program released it: a segmentation fault."""
    staging = nvmeio.empty_aligned(1 << 20, dtype=torch.uint8)
    kept = weakref.ref(staging.untyped_storage())
    with nvmeio.open(path, "w") as file:
        stream = WriteBehind(new_handle("threads"), file, staging)
        room = stream._view  # as `write` has it in the middle of a copy
        del staging
        stream.release()
        gc.collect()
        assert kept() is not None
        room[:3] = b"new"
        with pytest.raises(nvmeio.ClosedError, match="closed by another thread"):
            stream.write(b"more")
        del room
        spin_until_collected(lambda: kept() is None)

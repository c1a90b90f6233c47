"""A file that is written while what comes next is being made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from support import random_bytes

import nvmeio
from nvmeio._io.write_behind import WriteBehind


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

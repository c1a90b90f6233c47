"""A swapped optimizer with subgroups so small that parameters are split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from nvmeio.offload import SwappedOptimizer

# Small subgroups, so that parameters are split and there are several of each.
SMALL: dict[str, Any] = {"subgroup_bytes": 64 << 10, "durable": False}


def swapped(made: Any, folder: Path, cls: Any = torch.optim.Adam, **options: Any) -> Any:
    return SwappedOptimizer(cls, made.parameters(), swap_dir=folder, **{**SMALL, **options})

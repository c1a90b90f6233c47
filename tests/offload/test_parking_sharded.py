"""Parking of what FSDP2 shards: each rank's shards go to its own directory, and come back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist
from support import run_ranks

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("torch is built without gloo", allow_module_level=True)
if not hasattr(pytest.importorskip("torch.distributed.fsdp"), "fully_shard"):
    pytest.skip("torch has no FSDP2", allow_module_level=True)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("world", [1, 2])
def test_shards_come_back(world: int, tmp_path: Path) -> None:
    """Losses are those of a training that was never parked, with and without resharding."""
    for status, output in run_ranks(Path(__file__).parent / "_parking_rank.py", world, tmp_path):
        assert status == 0, output

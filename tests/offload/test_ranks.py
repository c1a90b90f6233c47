"""Several ranks, each with its own shard on the drive: real processes over gloo."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist
from support import run_ranks

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("torch is built without gloo", allow_module_level=True)


@pytest.mark.parametrize("kind", ["fsdp", "fsdp_gradients", "resume", "earlier", "ddp"])
def test_two_ranks_equal_those_in_memory(kind: str, tmp_path: Path) -> None:
    (tmp_path / "swap").mkdir()
    ended = run_ranks(Path(__file__).parent / "_rank.py", 2, tmp_path, kind)
    assert [status for status, _ in ended] == [0, 0], "\n".join(output for _, output in ended)
    assert all((tmp_path / f"done-{rank}").exists() for rank in range(2))

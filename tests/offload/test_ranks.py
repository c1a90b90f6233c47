"""Several ranks, each with its own shard on the drive: real processes over gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from programs import Program

import nvmeio

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("torch is built without gloo", allow_module_level=True)


@pytest.mark.parametrize("kind", ["fsdp", "fsdp_gradients", "resume", "ddp"])
def test_two_ranks_equal_those_in_memory(kind: str, tmp_path: Path) -> None:
    (tmp_path / "swap").mkdir()
    root = str(Path(nvmeio.__file__).parent.parent)
    script = str(Path(__file__).parent / "_rank.py")
    ranks = [
        Program[str](
            [sys.executable, script, str(rank), "2", str(tmp_path), kind],
            env={**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=550)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
            if rank.stdout is not None:
                rank.stdout.close()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs)
    assert all((tmp_path / f"done-{rank}").exists() for rank in range(2))

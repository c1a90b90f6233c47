"""One rank of tests/integrations/test_dcp_stager.py: `_dcp_rank`, with saves by `SnapshotStager`.

python _dcp_stager_rank.py RANK WORLD FOLDER STEP…
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import _dcp_rank
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _dcp_rank import fsdp_state, model, train

from nvmeio.checkpoint import frozen
from nvmeio.integrations.dcp import NvmeStorageWriter, SnapshotStager


def save_staged(folder: Path, world: int) -> None:
    """Training goes on before anything that is protected has been copied."""
    made, optimizer = model(world)
    train(made, optimizer)
    gate = threading.Event()
    fill: Any = frozen.fill

    def late(*arguments: Any) -> None:
        assert gate.wait(500)
        fill(*arguments)

    frozen.fill = late  # type: ignore[assignment]
    try:
        future = dcp.async_save(
            fsdp_state(made, optimizer),
            storage_writer=NvmeStorageWriter(folder / "fsdp"),
            async_stager=SnapshotStager(),
            process_group=dist.new_group(),
        )
        losses = [train(made, optimizer) for _ in range(2)]
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.zero_()
    finally:
        gate.set()
    future.result(timeout=500)
    if dist.get_rank() == 0:
        (folder / "losses").write_text(json.dumps(losses))


_dcp_rank.STEPS["save_staged"] = save_staged

if __name__ == "__main__":
    _dcp_rank.main()

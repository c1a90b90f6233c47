"""A torch archive, and what another rank is told of it."""

from __future__ import annotations

import json
from pathlib import Path

import torch

import nvmeio
from nvmeio._formats.torch_archives.torch_file import TorchFile
from nvmeio._io.spans import Load


def test_archive_description_holds_all_but_storages(tmp_path: Path) -> None:
    """It was a pickle, which came over the network and was unpickled."""
    path = tmp_path / "state.pt"
    state = {f"layer.{n}.\u00e9": torch.arange(n) for n in range(1, 20)}
    torch.save({"state": state, "long": list(range(5000))}, path)
    with nvmeio.AioHandle() as handle, nvmeio.open(path) as file:
        first = TorchFile(file, lambda: handle, Load())
        told = first.told()
        places = int.from_bytes(told[:8], "little")
        assert len(json.loads(told[8 : 8 + places])) == 4
        second = TorchFile(file, lambda: handle, Load(), told)
        assert second.archive == first.archive
        assert second.texts() == first.texts() != {}
        assert second.read("data.pkl") == first.read("data.pkl")
        assert len(told) < path.stat().st_size

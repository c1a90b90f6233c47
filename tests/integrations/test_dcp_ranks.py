"""Distributed checkpoints of several ranks: real processes over gloo, resharded on load."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _dcp_rank import wanted
from support import run_ranks
from torch.distributed.checkpoint.metadata import Metadata

from nvmeio.integrations.dcp import NvmeStorageReader, NvmeStorageWriter

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("torch is built without gloo", allow_module_level=True)

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
]


def run_steps(world: int, folder: Path, *steps: str) -> None:
    """Run steps on so many ranks; each must end well."""
    ended = run_ranks(Path(__file__).parent / "_dcp_rank.py", world, folder, *steps)
    assert [status for status, _ in ended] == [0] * world, "\n".join(out for _, out in ended)


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with what two ranks have saved, after they loaded what one had."""
    folder = tmp_path_factory.mktemp("two")
    whole = wanted(1) | {"plain": torch.ones(50, 3), "seed": 1}
    dcp.save(whole, storage_writer=NvmeStorageWriter(folder / "one-nvmeio"))
    dcp.save(whole, storage_writer=dcp.FileSystemWriter(folder / "one-torch"))
    run_steps(2, folder, "load_one", "save", "load", "fail", "load", "replace", "save_fsdp")
    yield folder


def blank() -> dict[str, Any]:
    found: dict[str, Any] = {name: torch.zeros_like(t) for name, t in wanted(0).items()}
    return found | {"plain": torch.zeros(50, 3), "seed": 0}


def check(found: dict[str, Any], seed: int) -> None:
    for name, tensor in wanted(seed).items():
        assert torch.equal(found[name], tensor), name
    assert torch.equal(found["plain"], torch.full((50, 3), float(seed)))
    assert found["seed"] == seed


@pytest.mark.parametrize("reader", [NvmeStorageReader, dcp.FileSystemReader])
@pytest.mark.parametrize("saved", ["nvmeio", "torch"])
def test_one_rank_loads_what_two_have_saved(saved: str, reader: Any, of_two: Path) -> None:
    """After a save that failed on one of them, too."""
    found = blank()
    dcp.load(found, storage_reader=reader(of_two / saved))
    check(found, 1)


def test_each_rank_has_written_its_own_file(of_two: Path) -> None:
    assert {"__0_0.distcp", "__1_0.distcp"} <= {p.name for p in (of_two / "nvmeio").iterdir()}
    metadata: Metadata = NvmeStorageReader(of_two / "nvmeio").read_metadata()
    rows = {i.relative_path for k, i in metadata.storage_data.items() if k.fqn == "rows"}
    assert rows == {"__0_0.distcp", "__1_0.distcp"}


def test_a_replaced_checkpoint_leaves_nothing(of_two: Path) -> None:
    metadata = NvmeStorageReader(of_two / "replaced").read_metadata()
    used = {info.relative_path for info in metadata.storage_data.values()}
    assert {path.name for path in (of_two / "replaced").iterdir()} == used | {".metadata"}
    found = blank()
    dcp.load(found, storage_reader=NvmeStorageReader(of_two / "replaced"))
    check(found, 4)


def test_four_ranks_load_what_two_have_saved(of_two: Path) -> None:
    run_steps(4, of_two, "load", "load_fsdp")

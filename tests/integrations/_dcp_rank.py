"""One rank of tests/integrations/test_dcp_ranks.py: what it does is named by its arguments.

    python _dcp_rank.py RANK WORLD FOLDER STEP…

Every rank knows the whole state, so it can tell whether its shards are right.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from nvmeio.integrations.dcp import NvmeStorageReader, NvmeStorageWriter

# Sizes that no number of ranks divides; the larger ones are read in place or by rows and columns.
SHAPES = {"rows": (1031, 517), "columns": (517, 1031), "whole": (600, 601), "flat": (300_001,)}
PLACEMENTS = {"rows": Shard(0), "columns": Shard(1), "whole": Replicate(), "flat": Shard(0)}


def wanted(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def state(world: int, seed: int | None) -> dict[str, Any]:
    """Sharded tensors, with the wanted values or none."""
    mesh = init_device_mesh("cpu", (world,))
    found: dict[str, Any] = {
        name: distribute_tensor(
            torch.zeros_like(tensor) if seed is None else tensor, mesh, [PLACEMENTS[name]]
        )
        for name, tensor in wanted(seed or 0).items()
    }
    found["plain"] = torch.full((50, 3), float(seed or 0))
    found["seed"] = seed
    return found


def check(found: dict[str, Any], seed: int) -> None:
    for name, tensor in wanted(seed).items():
        assert isinstance(found[name], DTensor), name
        assert torch.equal(found[name].full_tensor(), tensor), name
    assert torch.equal(found["plain"], torch.full((50, 3), float(seed)))
    assert found["seed"] == seed


class Failing(DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        if dist.get_rank() == 1:
            raise ArithmeticError("rank 1 has none")
        return super().resolve_data(write_item)


# FSDP2


def model(world: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    made = torch.nn.Sequential(torch.nn.Linear(301, 700), torch.nn.Linear(700, 33))
    mesh = init_device_mesh("cpu", (world,))
    for layer in made:
        fully_shard(layer, mesh=mesh)
    fully_shard(made, mesh=mesh)
    return made, torch.optim.AdamW(made.parameters(), lr=1e-2)


def train(made: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    torch.manual_seed(1)
    loss = made(torch.randn(8, 301)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss)


def fsdp_state(made: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    weights, moments = get_state_dict(made, optimizer)
    return {"model": weights, "optimizer": moments}


# Steps


def save(folder: Path, world: int) -> None:
    dcp.save(state(world, 1), storage_writer=NvmeStorageWriter(folder / "nvmeio"))
    dcp.save(state(world, 1), storage_writer=dcp.FileSystemWriter(folder / "torch"))


def load_one(folder: Path, world: int) -> None:
    """What one process has saved, without a process group."""
    _load(folder, world, ("one-nvmeio", "one-torch"))


def load(folder: Path, world: int) -> None:
    _load(folder, world, ("nvmeio", "torch"))


def _load(folder: Path, world: int, names: tuple[str, ...]) -> None:
    for name in names:
        found = state(world, None)
        dcp.load(found, storage_reader=NvmeStorageReader(folder / name))
        check(found, 1)


def fail(folder: Path, world: int) -> None:
    """A rank that fails leaves the checkpoint that is there."""
    try:
        dcp.save(
            state(world, 2),
            storage_writer=NvmeStorageWriter(folder / "nvmeio"),
            planner=Failing(),
        )
    except dcp.CheckpointException as told:
        assert list(told.failures) == [1], told
    else:
        raise AssertionError("saved")


def replace(folder: Path, world: int) -> None:
    """A save over another one, in the background."""
    future = dcp.async_save(
        state(world, 3), storage_writer=NvmeStorageWriter(folder / "replaced", thread_count=2)
    )
    future.result(timeout=500)
    future = dcp.async_save(state(world, 4), storage_writer=NvmeStorageWriter(folder / "replaced"))
    future.result(timeout=500)
    found = state(world, None)
    dcp.load(found, storage_reader=NvmeStorageReader(folder / "replaced"))
    check(found, 4)


def save_fsdp(folder: Path, world: int) -> None:
    made, optimizer = model(world)
    train(made, optimizer)
    dcp.save(fsdp_state(made, optimizer), storage_writer=NvmeStorageWriter(folder / "fsdp"))
    losses = [train(made, optimizer) for _ in range(2)]
    if dist.get_rank() == 0:
        (folder / "losses").write_text(json.dumps(losses))


def load_fsdp(folder: Path, world: int) -> None:
    """Training goes on where it was, on another number of ranks."""
    made, optimizer = model(world)
    train(made, optimizer)  # so that the moments are there to be filled
    found = fsdp_state(made, optimizer)
    dcp.load(found, storage_reader=NvmeStorageReader(folder / "fsdp"))
    set_state_dict(
        made, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"]
    )
    losses = [train(made, optimizer) for _ in range(2)]
    before = json.loads((folder / "losses").read_text())
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(before))


STEPS = {
    step.__name__: step for step in (save, load, load_one, fail, replace, save_fsdp, load_fsdp)
}


def main() -> None:
    rank, world, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo"}
    store = dist.FileStore(str(folder / f"store-{world}-{'-'.join(sys.argv[4:])}"), world)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=500)
    )
    for step in sys.argv[4:]:
        STEPS[step](folder, world)
        dist.barrier()
    dist.destroy_process_group()
    # gloo's threads abort a busy process at its very end now and then.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()

"""One rank of tests/offload/test_parking_sharded.py.

python _parking_rank.py RANK WORLD FOLDER
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from nvmeio.offload import park, resume_parked

WIDTH = 256


def made(world: int, reshard: bool = True) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    module: Any = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH + 1) for _ in range(1)))
    module.extend([torch.nn.Tanh(), torch.nn.Linear(WIDTH + 1, WIDTH)])
    mesh = init_device_mesh("cpu", (world,))
    for layer in (module[0], module[2]):
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(module, mesh=mesh, reshard_after_forward=reshard)
    return module, torch.optim.AdamW(module.parameters(), lr=1e-2)


def train(module: Any, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        optimizer.zero_grad()
        loss = module(torch.randn(4, WIDTH, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    rank, world, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=120)
    )
    drive = folder / "swap"
    drive.mkdir(exist_ok=True)
    wanted = train(*made(world), range(6))
    for reshard in (True, False):
        module, optimizer = made(world, reshard)
        losses = train(module, optimizer, range(2))
        with torch.no_grad():
            module(torch.ones(1, WIDTH))  # leaves the last part gathered, or all
        with park(module, optimizer, swap_dir=drive) as parked:
            shards = [p.to_local() for p in module.parameters() if p.dim() == 2]
            assert all(bool(each.isnan().all()) for each in shards)
            assert parked.freed_bytes >= 4 * sum(each.nbytes for each in shards)
            name = f"parked-{rank:05d}-of-{world:05d}" if world > 1 else "parked"
            assert parked.swap_dir == str(drive / name)
            try:
                module[2](torch.ones(1, WIDTH + 1))
            except RuntimeError as refused:
                assert "it is parked" in str(refused)
            else:
                raise AssertionError("a parked module was called")
            dist.barrier()
        losses += train(module, optimizer, range(2, 4))
        park(module, optimizer, swap_dir=drive).close()
        again, stepping = made(world, reshard)
        resume_parked(again, stepping, swap_dir=drive)
        losses += train(again, stepping, range(4, 6))
        assert losses == wanted, (losses, wanted)
        dist.barrier()
        assert list(drive.iterdir()) == []
        dist.barrier()
    dist.destroy_process_group()


main()

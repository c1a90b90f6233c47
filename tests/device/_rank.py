"""A rank of test_orders.py: RANK WORLD FOLDER; each has a device of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fake_accelerator import Pace, accelerator
from inference.test_training import data, empty, saved, unit_bytes

import nvmeio


def main(rank: int, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    path = folder / "base.safetensors"
    if not rank:
        saved(path, 4)
    dist.barrier()
    device = f"cuda:{rank}"
    whole = saved(folder / f"own-{rank}.safetensors", 4)  # of the same seed
    with (
        pytest.MonkeyPatch.context() as patch,
        accelerator(patch, Pace.RANDOM, Pace.RANDOM, seed=rank) as cuda,
    ):
        streamed = nvmeio.stream_model(
            empty(4),
            path,
            device=device,
            resident_bytes=3 * unit_bytes(),
            process_group=dist.group.WORLD,
            timeout_s=120.0,
        )
        with torch.cuda.device(device), torch.no_grad():
            for number in range(3):
                found = streamed(cuda.tensor(data(rank + number)))
                assert found.device == torch.device(device)
                assert torch.equal(cuda.value(found), whole(data(rank + number)))
        streamed.weight_stream.close()
        assert cuda.contexts == {rank}
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))

"""torch.distributed.checkpoint on nvmeio: two processes save, one process loads.

    python examples/08_distributed_checkpoint.py --dir /mnt/nvme --width 2048

Two ranks train a model that FSDP2 shards over them. Each saves its shards through nvmeio, once
while it waits and once while it trains on. Then one process, this one, loads the same files into
the whole model: shards are put together as they are read.

There are two ways in:

    dcp.save(state, storage_writer=NvmeStorageWriter(path))     the fast one
    dcp.save(state, checkpoint_id="nvmeio:///path")             where only a name can be changed
"""

import json
import os
import time
import warnings
from pathlib import Path
from typing import Any

import _common
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from _common import say, verify
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from nvmeio.integrations.dcp import NvmeStorageReader, NvmeStorageWriter

RANKS = 2
LAYERS = 4


def make_model(width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, width: int, step: int) -> None:
    torch.manual_seed(step)
    loss: torch.Tensor = model(torch.randn(4, width)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


def sums(model: nn.Module) -> dict[str, float]:
    """A figure of each weight, the same whether it is sharded or not."""
    found = {}
    for name, tensor in model.state_dict().items():
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        found[name] = float(whole.double().sum())
    return found


def rank_main(rank: int, folder: Path, width: int) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(str(folder / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)

    model = make_model(width)
    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(fully_shard(model, mesh=mesh).parameters())
    train(model, optimizer, width, step=1)

    began = time.perf_counter()
    dcp.save(state_of(model, optimizer), storage_writer=NvmeStorageWriter(folder / "first"))
    facts: dict[str, Any] = {"save_s": time.perf_counter() - began, "first": sums(model)}

    # async_save copies the shards first; training goes on while the copy is written. The saving
    # has its own group, so that its collectives do not meet those of the training.
    saving = dcp.async_save(
        state_of(model, optimizer),
        storage_writer=NvmeStorageWriter(folder / "second"),
        process_group=dist.new_group(backend="gloo"),
    )
    train(model, optimizer, width, step=2)
    saving.result(timeout=500)

    dcp.save(state_of(model, optimizer), checkpoint_id=f"nvmeio://{folder / 'third'}")
    facts["third"] = sums(model)
    if rank == 0:
        (folder / "facts").write_text(json.dumps(facts))
    dist.destroy_process_group()


def load(folder: Path, width: int) -> tuple[dict[str, float], float]:
    """Load into a whole model, in one process that knows nothing of ranks: sums, seconds."""
    model = make_model(width)
    optimizer = torch.optim.AdamW(model.parameters())
    state = state_of(model, optimizer)
    began = time.perf_counter()
    with warnings.catch_warnings():  # torch says that this process is the only one
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(state, storage_reader=NvmeStorageReader(folder))
    took = time.perf_counter() - began
    model.load_state_dict(state["model"])
    return sums(model), took


def main(folder: Path, width: int) -> None:
    mp.spawn(rank_main, (folder, width), RANKS)
    facts = json.loads((folder / "facts").read_text())
    files = sorted(path for path in (folder / "first").iterdir() if path.suffix == ".distcp")
    nbytes = sum(path.stat().st_size for path in files)
    say("saved", f"{nbytes / 1e9:.2f} GB by {RANKS} ranks in {facts['save_s']:.2f} s, durable:")
    for path in files:
        say("", f"{path.name}, {path.stat().st_size / 1e9:.2f} GB")

    found, took = load(folder / "first", width)
    verify(found == facts["first"], "the first checkpoint")
    say("loaded", f"into one process in {took:.2f} s")
    # The second is the state from before the step that ran while it was written.
    found, _ = load(folder / "second", width)
    verify(found == facts["first"], "the asynchronous checkpoint")
    found, _ = load(folder / "third", width)
    verify(found == facts["third"], "the one through nvmeio://")
    _common.verified("three checkpoints of two ranks, each loaded whole by one process")


if __name__ == "__main__":
    parser = _common.arguments(__doc__)
    parser.add_argument("--width", type=int, default=1024, help="of the four layers (1024)")
    options = parser.parse_args()
    with _common.scratch(options.dir, 3 * 3 * 4 * LAYERS * options.width**2) as scratch:
        main(scratch, options.width)

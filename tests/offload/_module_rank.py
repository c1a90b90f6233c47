"""One rank of tests/offload/test_sharded.py: FSDP2 modules, on the drive and in memory.

python _module_rank.py RANK WORLD FOLDER KIND
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _rank import OPTIONS, plain, sharded, train
from inside import window_in_use
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from nvmeio.errors import ClosedError, TransferError
from nvmeio.integrations.dcp import NvmeStorageReader, NvmeStorageWriter
from nvmeio.offload import SwappedModule, SwappedOptimizer

WINDOW = 1 << 17
STEPS = 3


def adamw(made: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(made.parameters(), lr=1e-2, **options)


def swapped(made: Any, folder: Path, **options: Any) -> tuple[SwappedModule, SwappedOptimizer]:
    folder.mkdir(exist_ok=True)
    module = SwappedModule(made, swap_dir=folder, resident_bytes=WINDOW)
    return module, SwappedOptimizer(
        torch.optim.AdamW, module.parameters(), swap_dir=folder, **OPTIONS, **options
    )


def equal(folder: Path, world: int) -> None:
    """Losses, what is read and kept, and both of what state is saved by."""
    ours, optimizer = swapped(sharded(world), folder / "swap")
    theirs = sharded(world)
    reference = adamw(theirs)
    nothing_in_memory(ours)
    before = ours.bytes_read
    x = torch.ones(3, 37)
    with torch.no_grad():
        assert torch.equal(ours(x), theirs(x))
    mine = sum(shard(p).nbytes for p in theirs.parameters())
    assert mine < 0.6 * sum(p.nbytes for p in plain().parameters())
    # And what fills the pages of three parts.
    assert mine <= ours.bytes_read - before <= mine + 3 * 4096
    assert train(ours, optimizer, STEPS) == train(theirs, reference, STEPS)
    assert window_in_use(ours) <= WINDOW
    same(ours.state_dict(), theirs.state_dict())

    saved = {"model": ours.state_dict(), "optimizer": optimizer_state(ours, optimizer)}
    dcp.save(saved, storage_writer=NvmeStorageWriter(folder / "checkpoint"))
    losses = train(theirs, reference, 1, STEPS)
    again, stepped = swapped(sharded(world), folder / "again")
    found = {"model": again.state_dict(), "optimizer": optimizer_state(again, stepped)}
    dcp.load(found, storage_reader=NvmeStorageReader(folder / "checkpoint"))
    again.load_state_dict(found["model"])
    set_optimizer_state_dict(again.module, stepped, found["optimizer"])
    assert train(again, stepped, 1, STEPS) == losses

    doubled = {name: value * 2 for name, value in theirs.state_dict().items()}
    with torch.no_grad():
        again(x)  # what FSDP keeps gathered of the root must not outlive it
    again.load_state_dict(doubled)
    theirs.load_state_dict(doubled)
    with torch.no_grad():
        assert torch.equal(again(x), theirs(x))
        with again.gather():
            for parameter in again.parameters():
                parameter.add_(1)
        same(again.state_dict(), {name: value + 1 for name, value in doubled.items()})
    try:
        again.load_state_dict({n: v.full_tensor() for n, v in doubled.items()})
    except ValueError as told:
        assert "sharded otherwise" in str(told)
    else:
        raise AssertionError("whole tensors were taken for shards")
    for each in (ours, optimizer, again, stepped):
        each.close()


def shard(parameter: Any) -> torch.Tensor:
    local: torch.Tensor = parameter.to_local()
    return local


def optimizer_state(module: SwappedModule, optimizer: SwappedOptimizer) -> dict[str, Any]:
    """By the names that FSDP2's own have."""
    return get_optimizer_state_dict(module.module, optimizer)


def same(found: Any, wanted: Any) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name].full_tensor(), value.full_tensor()), name


def nothing_in_memory(module: SwappedModule) -> None:
    """Of what lies on the drive neither FSDP nor the parameter keeps memory."""
    module.evict()
    for each in module.module.modules():
        state = getattr(each, "_get_fsdp_state", lambda: None)()
        alone = [getattr(state, "_fsdp_param_group", None)]  # before torch 2.12
        for group in filter(None, getattr(state, "_fsdp_param_groups", alone)):
            for shard in group.fsdp_params:
                for tensor in (shard._sharded_param_data, shard.sharded_param._local_tensor):
                    assert tensor.untyped_storage().nbytes() <= 2 * tensor.itemsize


class Checkpointed(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=False)


def checkpointed(world: int) -> Any:
    made: Any = torch.nn.Sequential(*(Checkpointed(layer) for layer in plain()))
    mesh = init_device_mesh("cpu", (world,))
    for layer in made[::2]:
        fully_shard(layer, mesh=mesh)
    return fully_shard(made, mesh=mesh)


def mixed(world: int) -> Any:
    made = plain()
    mesh = init_device_mesh("cpu", (world,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for number, layer in enumerate((made[0], made[2])):
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=not number)
    fully_shard(made, mesh=mesh, mp_policy=policy)
    made[0].set_modules_to_forward_prefetch([made[2]])
    return made


def tensor_parallel(world: int) -> Any:
    made = torch.nn.Sequential(torch.nn.Linear(37, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("data", "tensor"))
    styles = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(made, mesh["tensor"], styles)
    fully_shard(made[0], mesh=mesh["data"])
    return fully_shard(made, mesh=mesh["data"])


def replicated(world: int) -> Any:
    """As hybrid sharding is: whole on each of these ranks, gradients reduced over both."""
    made = plain()
    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("replicas", "shards"))
    fully_shard(made[2], mesh=mesh)
    return fully_shard(made, mesh=mesh)


def tied(world: int) -> Any:
    made = torch.nn.Sequential(*(torch.nn.Linear(37, 37) for _ in range(3)), torch.nn.Linear(37, 1))
    made[2].weight = made[0].weight
    mesh = init_device_mesh("cpu", (world,))
    fully_shard(made[1], mesh=mesh)
    return fully_shard(made, mesh=mesh)


def ways(folder: Path, world: int) -> None:
    """What FSDP2 does beside sharding; gradients of two micro-batches reduced at once."""
    makers: list[Callable[[int], Any]]
    makers = [checkpointed, mixed, tensor_parallel, replicated, tied]
    for number, make in enumerate(makers):
        torch.manual_seed(1)
        ours, optimizer = swapped(make(world), folder / str(number), gradients="disk")
        torch.manual_seed(1)
        theirs = make(world)
        reference = adamw(theirs)
        found = train(ours, optimizer, 2, clip=False)
        assert found == train(theirs, reference, 2, clip=False), make
        optimizer.close()
        ours.close()
    ours, optimizer = swapped(sharded(world), folder / "sync")
    theirs = sharded(world)
    reference = adamw(theirs)
    for made, stepped in ((ours.module, optimizer), (theirs, reference)):
        for last in (False, True):
            made.set_requires_gradient_sync(last)
            made(torch.ones(2, 37) * (1 + dist.get_rank())).sum().backward()
        stepped.step()
    same(ours.state_dict(), theirs.state_dict())
    optimizer.close()
    ours.close()


def killed(folder: Path, world: int) -> None:
    """One rank is killed in the middle of a pass; the other one's collective fails."""
    equal(folder, world)
    ours, optimizer = swapped(sharded(world), folder / "resumed", resume=True)
    train(ours, optimizer, STEPS)
    dist.barrier()
    if dist.get_rank():
        made: Any = ours.module
        made[3].register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    try:
        train(ours, optimizer, 1, STEPS)
    except RuntimeError:
        return
    raise AssertionError("a pass without the other rank")


def resumed(folder: Path, world: int) -> None:
    """All go on from the last step that all have; then one rank's drive fails."""
    theirs = sharded(world)
    wanted = train(theirs, adamw(theirs), STEPS + 2)
    ours, optimizer = swapped(sharded(world), folder / "resumed", resume=True)
    assert optimizer.resumed
    done = optimizer.generation - 1
    assert STEPS - 1 <= done <= STEPS
    assert train(ours, optimizer, STEPS + 2 - done, done) == wanted[2 * done :]
    ways(folder, world)

    failing = SwappedModule(sharded(world), swap_dir=folder / "again", resident_bytes=WINDOW)
    x = torch.ones(3, 37)
    failing(x)
    failing.evict()
    dist.barrier()
    if not dist.get_rank():
        try:
            failing(x)
        except RuntimeError:
            return
        raise AssertionError("a pass without the other rank")
    for file in (folder / "again").glob("parameters-00001-*/weights*"):
        os.truncate(file, 0)
    for wanted_error, why in ((TransferError, ""), (ClosedError, "other ranks may be")):
        try:
            failing(x)
        except wanted_error as told:
            assert why in str(told), told
        else:
            raise AssertionError(wanted_error)


def main() -> None:
    rank, world, folder, kind = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo"}
    store = dist.FileStore(str(folder / f"store-{kind}"), world)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=500)
    )
    {"killed": killed, "resumed": resumed}[kind](folder, world)
    (folder / f"done-{kind}-{rank}").write_text("")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # of two ranks one has failed: nothing can be taken down together


if __name__ == "__main__":
    main()

"""One rank of tests/offload/test_ranks.py: trains twice, with the optimizer swapped and without.

python _rank.py RANK WORLD FOLDER KIND
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from inside import swapper_of
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

from nvmeio.errors import IntegrityError
from nvmeio.integrations.dcp import NvmeStorageReader, NvmeStorageWriter
from nvmeio.offload import SwappedOptimizer

OPTIONS: dict[str, Any] = {"subgroup_bytes": 32768, "lr": 1e-2}


def plain() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(37, 101), torch.nn.GELU(), torch.nn.Linear(101, 53), torch.nn.Linear(53, 1)
    )


def sharded(world: int) -> Any:
    """Sizes that two does not divide; the last bias has a rank without any of it."""
    from torch.distributed.fsdp import fully_shard

    made = plain()
    mesh = init_device_mesh("cpu", (world,))
    for layer in made:
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(made, mesh=mesh)
    return made


def train(made: Any, optimizer: Any, steps: int, first: int = 0, clip: bool = True) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        for micro in range(2):
            generator = torch.Generator().manual_seed(97 * step + 13 * micro + dist.get_rank())
            x = torch.randn(5, 37, generator=generator)
            loss = (made(x).squeeze() - x.sum(1)).square().mean()
            loss.backward()
            losses.append(loss.item())
        if clip:
            torch.nn.utils.clip_grad_norm_(made.parameters(), 5.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def fsdp(folder: Path, world: int) -> None:
    ours, theirs = sharded(world), sharded(world)
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    optimizer = SwappedOptimizer(
        torch.optim.AdamW, ours.parameters(), swap_dir=folder / "swap", **OPTIONS
    )
    assert train(ours, optimizer, 5) == train(theirs, reference, 5)
    assert f"-{dist.get_rank():05d}-of-{world:05d}" in optimizer.swap_dir
    # What DCP saves of it is that of the reference, and either goes on from either.
    weights, state = get_state_dict(ours, optimizer)
    dcp.save(
        {"model": weights, "optimizer": state},
        storage_writer=NvmeStorageWriter(folder / "checkpoint"),
    )
    losses = train(theirs, reference, 3, 5)
    for kind in ("plain", "swapped"):
        made = sharded(world)
        again: Any
        if kind == "plain":
            again = torch.optim.AdamW(made.parameters(), lr=1e-2)
        else:
            (folder / "swap-again").mkdir(exist_ok=True)
            dist.barrier()
            again = SwappedOptimizer(
                torch.optim.AdamW, made.parameters(), swap_dir=folder / "swap-again", **OPTIONS
            )
        weights, state = get_state_dict(made, again)
        found = {"model": weights, "optimizer": state}
        dcp.load(found, storage_reader=NvmeStorageReader(folder / "checkpoint"))
        set_state_dict(
            made,
            again,
            model_state_dict=found["model"],
            optim_state_dict=found["optimizer"],
        )
        assert train(made, again, 3, 5) == losses, kind
        if kind == "swapped":
            again.close()
    optimizer.close()


def fsdp_gradients(folder: Path, world: int) -> None:
    """Sharded gradients on the drive as well; the clipped norm goes over all ranks."""
    ours, theirs = sharded(world), sharded(world)
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    with SwappedOptimizer(
        torch.optim.AdamW,
        ours.parameters(),
        swap_dir=folder / "swap",
        gradients="disk",
        **OPTIONS,
    ) as optimizer:
        assert train(ours, optimizer, 4, clip=False) == train(theirs, reference, 4, clip=False)
        for made in (ours, theirs):
            made(torch.ones(2, 37)).sum().backward()
        norm = optimizer.clip_grad_norm_(0.5)
        whole: Any = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        torch.testing.assert_close(norm, whole.full_tensor())
        optimizer.step()
        reference.step()
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(p.full_tensor(), q.full_tensor())


def resume(folder: Path, world: int) -> None:
    """Killed on either side of the end of a step: all go on from the last that all have."""
    swap = folder / "swap"
    options = {**OPTIONS, "swap_dir": swap, "resume": True}

    def made() -> tuple[Any, SwappedOptimizer]:
        module = sharded(world)
        return module, SwappedOptimizer(torch.optim.AdamW, module.parameters(), **options)

    theirs = sharded(world)
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    wanted = train(theirs, reference, 6)
    ours, optimizer = made()
    own = Path(optimizer.swap_dir)
    assert not optimizer.resumed
    train(ours, optimizer, 3)
    engine: Any = swapper_of(optimizer)
    engine.store.settle()
    if dist.get_rank():
        shutil.copytree(own, folder / "before")
    train(ours, optimizer, 1, 3)
    optimizer.close()
    if dist.get_rank():  # it was killed before its fourth step was complete
        shutil.rmtree(own)
        shutil.copytree(folder / "before", own)
    dist.barrier()
    ours, optimizer = made()
    assert optimizer.generation == 4
    found = train(ours, optimizer, 1, 3)
    assert found == wanted[6:8], (found, wanted)
    train(ours, optimizer, 1, 4)
    optimizer.close()
    if dist.get_rank():  # from long ago: nothing in common
        shutil.rmtree(own)
        shutil.copytree(folder / "before", own)
    dist.barrier()
    for why in ("no step in common", "cannot resume|no manifest"):
        try:
            made()
        except IntegrityError as told:
            assert re.search(why, str(told)), told
        else:
            raise AssertionError(why)
        dist.barrier()
        if dist.get_rank():
            for name in ("manifest.0", "manifest.1"):
                (own / name).write_text("torn")
        dist.barrier()


def earlier(folder: Path, world: int) -> None:
    """What another run has left is refused by all, and so is what is missing; nobody waits."""
    swap = folder / "swap"

    def made(**options: Any) -> tuple[Any, SwappedOptimizer]:
        module = sharded(world)
        given = {**OPTIONS, "swap_dir": swap, **options}
        return module, SwappedOptimizer(torch.optim.AdamW, module.parameters(), **given)

    def refused(error: type[Exception], words: str, **options: Any) -> None:
        try:
            made(**options)
        except error as told:
            assert re.search(words, str(told)), told
        else:
            raise AssertionError(words)
        dist.barrier()

    rank = dist.get_rank()
    refused(FileNotFoundError, "nothing to go on from", resume="must")
    assert list(swap.iterdir()) == []
    dist.barrier()
    module, optimizer = made(resume=True)
    own = Path(optimizer.swap_dir)
    train(module, optimizer, 2)
    optimizer.close()
    refused(FileExistsError, r"its state, generation 3 .step 2.*overwrite=True")
    module, optimizer = made(resume="must")
    assert optimizer.generation == 3
    optimizer.close()
    dist.barrier()
    if rank:
        (own / "manifest.0").rename(folder / "manifest.0")
        (own / "manifest.1").rename(folder / "manifest.1")
    for resume_word in (True, "must"):
        refused(IntegrityError, "no step in common", resume=resume_word)
    if rank:
        shutil.rmtree(own)
        own.write_text("no directory")
    dist.barrier()
    if rank:
        refused(OSError, "ENOTDIR", resume=True)
    else:
        refused(IntegrityError, "rank 1 cannot resume: .*ENOTDIR", resume=True)
    if rank:
        own.unlink()
    module, optimizer = made(overwrite=True)
    assert optimizer.generation == 1
    train(module, optimizer, 1)
    optimizer.close()
    # A rank has a drive of another run, which went as far: the ranks mixed the two, in silence.
    for each in ("one", "other"):
        (folder / each).mkdir(exist_ok=True)
        dist.barrier()
        module, optimizer = made(swap_dir=folder / each, resume=True)
        train(module, optimizer, 2)
        optimizer.close()
    one, other = (folder / each / own.name for each in ("one", "other"))
    if rank:
        one.rename(folder / "kept")
        other.rename(one)
    dist.barrier()
    refused(IntegrityError, "no step in common.*of another run", swap_dir=one.parent, resume=True)
    if rank:
        one.rename(other)
        (folder / "kept").rename(one)
    dist.barrier()
    module, optimizer = made(swap_dir=one.parent, resume="must")
    assert optimizer.generation == 3
    optimizer.close()


def ddp(folder: Path, world: int) -> None:
    ours = torch.nn.parallel.DistributedDataParallel(plain())
    theirs = torch.nn.parallel.DistributedDataParallel(plain())
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    with SwappedOptimizer(
        torch.optim.AdamW, ours.parameters(), swap_dir=folder / "swap", **OPTIONS
    ) as optimizer:
        assert train(ours, optimizer, 5) == train(theirs, reference, 5)
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(p, q)
    try:
        SwappedOptimizer(
            torch.optim.AdamW, ours.parameters(), swap_dir=folder / "swap", gradients="disk"
        )
    except ValueError as told:
        assert "DistributedDataParallel reduces" in str(told)
    else:
        raise AssertionError("gradients of DDP were taken before they were reduced")


def main() -> None:
    rank, world, folder, kind = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo"}
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=500)
    )
    kinds = (fsdp, fsdp_gradients, resume, earlier, ddp)
    {each.__name__: each for each in kinds}[kind](folder, world)
    (folder / f"done-{rank}").write_text(json.dumps(kind))
    dist.barrier()
    dist.destroy_process_group()
    # gloo's threads abort a busy process at its very end now and then.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()

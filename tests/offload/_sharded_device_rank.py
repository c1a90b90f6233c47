"""A rank of test_sharded_on_device.py, with a device of its own: FSDP2 there and in memory.

python _sharded_device_rank.py RANK WORLD FOLDER PACE

Every kind of work, one after the other, each on a stand-in of its own: what a rank imports, and
what FSDP2 does once in a process, takes longer than the work. After each kind a line says that it
was right.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from _rank import OPTIONS
from fake_accelerator import Accelerator, Pace, accelerator
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

import nvmeio
from nvmeio.offload import SwappedModule, SwappedOptimizer
from nvmeio.offload._module import sharded as sharded_module

WINDOW = 1 << 17
LEAST = 4 << 12  # not all parts at once
STEPS = 3
SEEDS = {"alone": 3, "state": 3}  # of a random order
NORM = 0.5  # less than that of the gradients


def plain() -> torch.nn.Sequential:
    """Sizes that two does not divide; each rank has some of every parameter."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(37, 101), torch.nn.GELU(), torch.nn.Linear(101, 53), torch.nn.Linear(53, 2)
    )


def sharded(world: int, device: str, **options: Any) -> Any:
    made = plain()
    options["mesh"] = init_device_mesh(device, (world,))
    for layer in made:
        if list(layer.parameters()):
            fully_shard(layer, **options)
    return fully_shard(made, **options)


def train(made: Any, optimizer: Any, device: str) -> list[float]:
    """Losses of this rank's own rows; gradients are summed over two passes."""
    losses = []
    for step in range(STEPS):
        for micro in range(2):
            generator = torch.Generator().manual_seed(97 * step + 13 * micro + dist.get_rank())
            rows = torch.randn(5, 37, generator=generator)
            x, wanted = rows.to(device), rows.sum(1).to(device)
            loss = (made(x).sum(1) - wanted).square().mean()
            loss.backward()
            losses.append(loss.detach())
        if isinstance(optimizer, SwappedOptimizer):
            optimizer.clip_grad_norm_(NORM)
        else:
            torch.nn.utils.clip_grad_norm_(made.parameters(), NORM)
        optimizer.step()
        optimizer.zero_grad()
    return [loss.item() for loss in losses]


@functools.cache
def in_memory(world: int) -> tuple[list[float], list[torch.Tensor]]:
    theirs = sharded(world, "cpu")
    adamw = torch.optim.AdamW(theirs.parameters(), lr=OPTIONS["lr"])
    losses = train(theirs, adamw, "cpu")
    return losses, [p.to_local().detach() for p in theirs.parameters()]


def optimizer_of(made: Any, folder: Path, **options: Any) -> SwappedOptimizer:
    return SwappedOptimizer(
        torch.optim.AdamW, made.parameters(), swap_dir=folder, **OPTIONS, **options
    )


def assert_trained(cuda: Accelerator, made: Any, wanted: list[torch.Tensor]) -> None:
    for mine, other in zip(made.parameters(), wanted, strict=True):
        torch.testing.assert_close(cuda.value(mine.to_local()), other)


def state(world: int, folder: Path) -> Callable[[Accelerator], None]:
    """The shards are on the devices, and the optimizer's state on the drive."""
    losses, weights = in_memory(world)

    def there(cuda: Accelerator) -> None:
        ways: list[dict[str, Any]] = [{}, {"device": "cuda"}]
        for number, options in enumerate(ways):
            place = folder / str(number)
            place.mkdir(exist_ok=True)
            ours = sharded(world, "cuda")
            with optimizer_of(ours, place, **options) as optimizer:
                found = train(ours, optimizer, "cuda")
            assert found == pytest.approx(losses, rel=1e-5), (options, found, losses)
            assert_trained(cuda, ours, weights)

    return there


def alone(world: int, folder: Path) -> Callable[[Accelerator], None]:
    """Nothing of nvmeio: what the others rest on."""
    losses, weights = in_memory(world)

    def there(cuda: Accelerator) -> None:
        ours = sharded(world, "cuda")
        adamw = torch.optim.AdamW(ours.parameters(), lr=OPTIONS["lr"], foreach=False)
        assert train(ours, adamw, "cuda") == pytest.approx(losses, rel=1e-5)
        assert_trained(cuda, ours, weights)

    return there


def swapped(
    world: int, folder: Path, gradients: str, window: int = WINDOW
) -> Callable[[Accelerator], None]:
    """The shards are on the drive too, and the devices gather them."""
    losses, _ = in_memory(world)

    def there(cuda: Accelerator) -> None:
        made = sharded(world, "cuda", offload_policy=CPUOffloadPolicy())
        with (
            SwappedModule(made, swap_dir=folder, resident_bytes=window) as ours,
            optimizer_of(ours, folder, gradients=gradients) as optimizer,
        ):
            assert ours.pinned
            assert train(ours, optimizer, "cuda") == pytest.approx(losses, rel=1e-5)

    return there


def saved(world: int, folder: Path) -> Callable[[Accelerator], None]:
    """What the shards are when `save` is called comes back, whatever is done to them then."""

    def there(cuda: Accelerator) -> None:
        made = sharded(world, "cuda")
        wanted = [cuda.value(p.to_local()) for p in made.parameters()]
        with nvmeio.Checkpointer(
            folder / "steps", process_group=dist.group.WORLD, layout="per_rank"
        ) as saver:
            saver.save_sync({"model": made.state_dict()}, 0)
            for parameter in made.parameters():
                parameter.to_local().detach().zero_()
            saver.wait_sync()
            found = saver.restore(0)["model"]
        for (name, mine), other in zip(found.items(), wanted, strict=True):
            assert torch.equal(cuda.value(mine.to_local()), other), name

    return there


def planted(world: int, folder: Path) -> Callable[[Accelerator], None]:
    """Shards that nobody waits for: the drive reads the next one into the same memory."""
    train_swapped = swapped(world, folder, "memory", LEAST)

    def there(cuda: Accelerator) -> None:
        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(AssertionError):
            patch.setattr(sharded_module.Gathering, "wait_for_copies", lambda gathering: None)
            train_swapped(cuda)  # losses may be others
        told = cuda.forgive()
        assert any("write by the drive" in each for each in told), told

    return there


WORK: dict[str, Callable[[int, Path], Callable[[Accelerator], None]]] = {
    "alone": alone,
    "state": state,
    "memory": functools.partial(swapped, gradients="memory"),
    "disk": functools.partial(swapped, gradients="disk"),
    "saved": saved,
    "planted": planted,
}


def right(kind: str) -> str:
    return f"{kind}: right"


def main(rank: int, world: int, folder: Path, pace: Pace) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    for kind, make in WORK.items():
        for seed in range(SEEDS.get(kind, 1) if pace is Pace.RANDOM else 1):
            swap = folder / f"{kind}{seed}"
            swap.mkdir(exist_ok=True)
            work = make(world, swap)
            with (
                pytest.MonkeyPatch.context() as patch,
                accelerator(patch, pace, pace, seed=seed * world + rank) as cuda,
                torch.cuda.device(rank),
            ):
                work(cuda)
                torch.cuda.synchronize()
                assert cuda.contexts == {rank}
        print(right(kind), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Pace[sys.argv[4].upper()])

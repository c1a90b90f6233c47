"""FSDP2 on the stand-in: an optimizer's state on the drive, and checkpoints, of its shards.

One rank in this process; several in others, with gloo beside the stand-in's memory
(`fake_collectives`).
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from _sharded_device_rank import WORK, right
from fake_accelerator import DEVICE, Accelerator, Event, Pace, accelerator
from support import run_ranks
from test_sharded import fsdp, plain
from torch.distributed.device_mesh import init_device_mesh

import nvmeio
from nvmeio.offload import SwappedModule, SwappedOptimizer
from nvmeio.offload._module import sharded as sharded_module

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    fake_pg = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(params=[Pace.EAGER, Pace.LAZY, Pace.RANDOM], ids=lambda pace: pace.name.lower())
def cuda(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Accelerator]:
    with accelerator(monkeypatch, request.param, request.param) as made:
        torch.cuda.set_device(0)
        yield made


def sharded() -> Any:
    made = plain()
    mesh = init_device_mesh("cuda", (1,))
    fsdp.fully_shard(made[2], mesh=mesh)
    return fsdp.fully_shard(made, mesh=mesh)


def offloaded(pin_memory: bool = False) -> Any:
    made = plain()
    mesh, policy = init_device_mesh("cuda", (1,)), fsdp.CPUOffloadPolicy(pin_memory=pin_memory)
    fsdp.fully_shard(made[2], mesh=mesh, offload_policy=policy)
    return fsdp.fully_shard(made, mesh=mesh, offload_policy=policy)


def losses(module: Any, optimizer: Any, device: str) -> list[float]:
    found = []
    for step in range(3):
        loss = module((torch.ones(2, 7) * step).to(device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("steps", ["on the device", "on the CPU"])
def test_shards_train_as_the_module_in_memory(
    steps: str, cuda: Accelerator, tmp_path: Path
) -> None:
    theirs, ours = plain(), sharded()
    assert all(p.to_local().device == DEVICE for p in ours.parameters())
    wanted = losses(theirs, torch.optim.AdamW(theirs.parameters(), lr=1e-2, foreach=False), "cpu")
    there: dict[str, Any] = {"device": "cuda"} if steps == "on the device" else {}
    with SwappedOptimizer(
        torch.optim.AdamW, ours.parameters(), swap_dir=tmp_path, lr=1e-2, **there
    ) as optimizer:
        found = losses(ours, optimizer, "cuda")
    assert found == pytest.approx(wanted, rel=1e-6)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(cuda.value(mine.to_local()), other.detach())


@pytest.mark.parametrize("pin_memory", [False, True], ids=["pageable", "pinned"])
@pytest.mark.parametrize("gradients", ["memory", "disk"])
def test_shards_on_the_drive_are_gathered_by_the_device(
    gradients: str, pin_memory: bool, cuda: Accelerator, tmp_path: Path
) -> None:
    """SwappedModule refused each mesh of devices."""
    theirs = plain()
    wanted = losses(theirs, torch.optim.AdamW(theirs.parameters(), lr=1e-2, foreach=False), "cpu")
    with (
        SwappedModule(offloaded(pin_memory), swap_dir=tmp_path, resident_bytes=4096) as ours,
        SwappedOptimizer(
            torch.optim.AdamW,
            ours.parameters(),
            swap_dir=tmp_path,
            lr=1e-2,
            gradients=gradients,
        ) as optimizer,
    ):
        found = losses(ours, optimizer, "cuda")
    assert found == pytest.approx(wanted, rel=1e-6)


def test_a_shard_whose_copy_is_not_waited_for_shows(
    cuda: Accelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the test above rests on: the drive reads the next shard into the same memory."""
    monkeypatch.setattr(sharded_module.Gathering, "wait_for_copies", lambda gathering: None)
    with (
        SwappedModule(offloaded(), swap_dir=tmp_path, resident_bytes=4096) as ours,
        SwappedOptimizer(torch.optim.AdamW, ours.parameters(), swap_dir=tmp_path) as optimizer,
    ):
        losses(ours, optimizer, "cuda")
    told = cuda.forgive()
    assert told and any("write by the drive" in each for each in told), told


@pytest.mark.parametrize("pin_memory", [False, True], ids=["pageable", "pinned"])
def test_copies_both_ways_go_on_beside_where_fsdp_is_to_pin(
    pin_memory: bool, cuda: Accelerator, tmp_path: Path
) -> None:
    """Shards lie in a window that is page-locked in any case, and gradients as FSDP is told."""
    with SwappedModule(offloaded(pin_memory), swap_dir=tmp_path, resident_bytes=4096) as ours:
        assert ours.pinned
        ours(torch.ones(2, 7).to("cuda")).square().mean().backward()
        for parameter in ours.parameters():
            gradient: Any = parameter.grad
            assert gradient.to_local().is_pinned() == pin_memory


def test_gradients_on_their_way_to_the_host_that_are_not_waited_for_show(
    cuda: Accelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the tests with pin_memory rest on: FSDP waits for these at the end of backward."""
    own = Event.synchronize

    def synchronize(event: Event) -> None:
        if not sys._getframe(1).f_code.co_filename.endswith("_fsdp_param_group.py"):
            own(event)

    with (
        SwappedModule(offloaded(True), swap_dir=tmp_path, resident_bytes=4096) as ours,
        SwappedOptimizer(torch.optim.AdamW, ours.parameters(), swap_dir=tmp_path) as optimizer,
    ):
        monkeypatch.setattr(Event, "synchronize", synchronize)
        ours(torch.ones(2, 7).to("cuda")).square().mean().backward()
        optimizer.step()
    told = cuda.forgive()
    assert told and any("of the host" in each for each in told), told


def test_shards_that_devices_have_are_refused(cuda: Accelerator, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"offload_policy=CPUOffloadPolicy\(\)"):
        SwappedModule(sharded(), swap_dir=tmp_path, resident_bytes=16384)


def test_shards_are_saved_as_they_were_when_save_was_called(
    cuda: Accelerator, tmp_path: Path
) -> None:
    module = sharded()
    wanted = [cuda.value(p.to_local()) for p in module.parameters()]
    with nvmeio.Checkpointer(tmp_path / "steps") as saver:
        saver.save_sync({"model": module.state_dict()}, 0)
        for parameter in module.parameters():
            parameter.to_local().detach().zero_()
        saver.wait_sync()
        found = saver.restore(0)["model"]
    for (name, mine), other in zip(found.items(), wanted, strict=True):
        local = mine.to_local() if hasattr(mine, "to_local") else mine
        assert torch.equal(cuda.value(local), other), name


PACES = [Pace.EAGER, Pace.LAZY, Pace.RANDOM]


@pytest.fixture(scope="module", params=PACES, ids=lambda pace: pace.name.lower())
def two_ranks(
    request: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[tuple[int, str]]]:
    """Two ranks that have done every kind of work: the status and the output of each."""
    pace, folder = request.param.name.lower(), tmp_path_factory.mktemp("ranks")
    yield run_ranks(HERE / "_sharded_device_rank.py", 2, folder, pace)
    shutil.rmtree(folder)


@pytest.mark.parametrize("kind", WORK)
def test_ranks_with_a_device_each(kind: str, two_ranks: list[tuple[int, str]]) -> None:
    """Losses are FSDP2's own in memory, and nothing of a rank is on another's device.

    "alone": without nvmeio, whose faults are then the stand-in's.
    "planted": shards that nobody waits for are told of by both.
    """
    for _, told in two_ranks:
        assert right(kind) in told.splitlines(), told


def test_ranks_come_to_their_end(two_ranks: list[tuple[int, str]]) -> None:
    for status, told in two_ranks:
        assert status == 0, told

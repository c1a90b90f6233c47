"""Collectives on the stand-in are work of a stream: whoever does not wait for one is told.

One rank, whose collectives are copies; offload/test_sharded_on_device.py has several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_accelerator import DEVICE, Accelerator, Pace, accelerator
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

if not dist.is_gloo_available():
    pytest.skip("torch is built without gloo", allow_module_level=True)


@pytest.fixture(scope="module", autouse=True)
def mesh() -> Iterator[Any]:
    """This process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> Iterator[Accelerator]:
    with accelerator(monkeypatch, Pace.EAGER, Pace.EAGER) as cuda:
        yield cuda


def named(name: str, before: str) -> Any:
    """Of torch.distributed, as it is called now, or was before torch 2.13."""
    return getattr(dist, name, None) or getattr(dist, before)


def gathered(target: torch.Tensor, source: torch.Tensor) -> None:
    named("all_gather_single", "all_gather_into_tensor")(target, source)


def scattered(target: torch.Tensor, source: torch.Tensor) -> None:
    named("reduce_scatter_single", "reduce_scatter_tensor")(target, source)


def summed(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)
    dist.all_reduce(target)


def sent(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)
    dist.broadcast(target, 0)


EVERY: list[Callable[[torch.Tensor, torch.Tensor], None]] = [gathered, scattered, summed, sent]


@pytest.mark.parametrize("waits", [True, False], ids=["in order", "without an order"])
@pytest.mark.parametrize("collective", EVERY)
def test_what_a_collective_writes_is_read_after_it(
    collective: Callable[..., None], waits: bool, eager: Accelerator
) -> None:
    target, source = eager.tensor(torch.zeros(8)), eager.tensor(torch.ones(8))
    side: Any = torch.cuda.Stream(DEVICE)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        collective(target, source)
    if waits:
        torch.cuda.current_stream().wait_stream(side)
    target.sum()
    told = eager.forgive()
    assert bool(told) != waits, told
    assert waits or all(each.count(Path(__file__).name) >= 2 for each in told)
    assert torch.equal(eager.value(target), torch.ones(8))


@pytest.mark.parametrize("waits", [True, False], ids=["in order", "without an order"])
@pytest.mark.parametrize("collective", [gathered, scattered])
def test_what_a_collective_reads_is_changed_after_it(
    collective: Callable[..., None], waits: bool, eager: Accelerator
) -> None:
    target, source = eager.tensor(torch.zeros(8)), eager.tensor(torch.ones(8))
    side: Any = torch.cuda.Stream(DEVICE)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        collective(target, source)
        over = torch.cuda.current_stream().record_event()
    if waits:
        over.synchronize()
    source.zero_()
    told = eager.forgive()
    assert bool(told) != waits, told


@pytest.mark.parametrize("collective", EVERY)
def test_a_collective_is_done_when_its_stream_gets_there(
    collective: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with accelerator(monkeypatch, Pace.LAZY, Pace.LAZY) as cuda:
        target, source = cuda.tensor(torch.zeros(8)), cuda.tensor(torch.ones(8))
        torch.cuda.synchronize()
        inside = cuda.inside(target)
        collective(target, source)
        assert not inside.any()
        torch.cuda.synchronize()
        assert inside.eq(1).all()


def test_collectives_of_several_streams_are_done_in_the_order_in_which_they_were_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """gloo knows by it which of another rank's belongs to which of this one's."""
    done: list[float] = []
    own = dist.all_reduce
    monkeypatch.setattr(
        dist, "all_reduce", lambda tensor: (done.append(tensor[0].item()), own(tensor))
    )
    with accelerator(monkeypatch, Pace.LAZY, Pace.LAZY) as cuda:
        streams: list[Any] = [torch.cuda.Stream(DEVICE) for _ in range(3)]
        for number in range(6):
            with torch.cuda.stream(streams[number % 3]):
                dist.all_reduce(cuda.tensor(torch.full((2,), float(number))))
        streams[2].synchronize()
        assert done == [0, 1, 2, 3, 4, 5]
        torch.cuda.synchronize()
        assert len(done) == 6


def test_the_collectives_of_dtensors_come_to_the_device_too(mesh: Any, eager: Accelerator) -> None:
    whole = torch.arange(6.0)
    there = DTensor.from_local(eager.tensor(whole), mesh, [Shard(0)], run_check=False)
    assert torch.equal(eager.value(there.full_tensor()), whole)
    norm: Any = torch.linalg.vector_norm(there)
    assert eager.value(norm.full_tensor()).item() == pytest.approx(whole.norm().item())


def test_host_memory_goes_by_gloo_as_ever(eager: Accelerator) -> None:
    target, source = torch.zeros(8), torch.ones(8)
    for collective in EVERY:
        target.zero_()
        collective(target, source)
        assert target.eq(1).all()

"""`nvmeio.snapshot`: what deepcopy makes of a state, whoever looks at it while it is copied."""

from __future__ import annotations

import asyncio
import copy
import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint._objects import assert_same, noise
from support import PATIENCE_S, needs_protection, spin_until

import nvmeio
from nvmeio._threads import interruptible
from nvmeio.checkpoint import frozen

pytestmark = needs_protection

NUMEL = 1 << 20


@pytest.mark.parametrize("view", [torch.conj, lambda each: each.conj().imag], ids=["conj", "neg"])
@pytest.mark.parametrize("beside", [False, True])
def test_a_view_that_deepcopy_computes(view: Any, beside: bool) -> None:
    """deepcopy computed it of the copy's memory, which was empty yet: it was zeros."""
    whole = torch.randn(NUMEL, dtype=torch.complex64)
    state = {"view": view(whole), **({"whole": whole} if beside else {})}
    wanted = {name: tensor.clone() for name, tensor in state.items()}
    taken = nvmeio.snapshot(state)
    whole.zero_()
    found = taken.result()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


class Summed:
    """Looks at the bytes of its copy."""

    def __init__(self, numbers: torch.Tensor) -> None:
        self.numbers = numbers
        self.sum = float(numbers.sum())

    def __deepcopy__(self, memo: dict[Any, Any]) -> Summed:
        return Summed(copy.deepcopy(self.numbers, memo))


@pytest.mark.parametrize("first", [False, True])
def test_an_object_that_looks_at_its_copy(first: bool) -> None:
    """It saw zeros, where its tensor was in the state by itself, too."""
    numbers = torch.ones(NUMEL)
    other = torch.full((NUMEL,), 2.0)
    objects = {"object": Summed(numbers)}
    tensors = {"numbers": numbers, "other": other}
    state: dict[str, Any] = {**objects, **tensors} if first else {**tensors, **objects}
    taken = nvmeio.snapshot(state)
    numbers.zero_()
    other.zero_()
    found = taken.result()
    assert found["object"].sum == NUMEL
    assert (found["numbers"] == 1).all() and (found["other"] == 2).all()
    assert found["object"].numbers is found["numbers"]
    assert taken.protected_bytes == other.nbytes


def test_parameters_are_copied_once() -> None:
    """deepcopy clones them, whatever it is told: they were protected and copied again beside."""
    parameter = torch.nn.Parameter(torch.ones(NUMEL))
    taken = nvmeio.snapshot([parameter])
    parameter.data.zero_()
    [found] = taken.result()
    assert taken.protected_bytes == 0
    assert isinstance(found, torch.nn.Parameter) and (found == 1).all()


class Named(torch.Tensor):
    """A subclass that can be copied."""

    def new_empty(self, *sizes: Any, **options: Any) -> Any:
        return super().new_empty(*sizes, **options).as_subclass(Named)


def test_nested_tensors_and_subclasses() -> None:
    rows = [torch.ones(300, 500), torch.ones(200, 500)]
    state = {
        "jagged": torch.nested.nested_tensor(rows, layout=torch.jagged),
        "named": torch.ones(NUMEL).as_subclass(Named),
        "plain": torch.ones(NUMEL),
    }
    taken = nvmeio.snapshot(state)
    state["jagged"].values().zero_()
    state["named"].zero_()
    state["plain"].zero_()
    found = taken.result()
    assert all(torch.equal(*each) for each in zip(found["jagged"].unbind(), rows, strict=True))
    assert type(found["named"]) is Named and (found["named"] == 1).all()
    assert (found["plain"] == 1).all() and taken.protected_bytes == found["plain"].nbytes


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("transposed", [False, True])
def test_nested_tensors_of_the_strided_layout(transposed: bool) -> None:
    """deepcopy cannot copy them: it failed of a NotImplementedError."""
    rows = [torch.randn(300, 500), torch.randn(200, 500)]
    made = torch.nested.nested_tensor(rows, layout=torch.strided)
    nested = made.transpose(1, 2) if transposed else made
    wanted = [row.T if transposed else row for row in rows]
    taken = nvmeio.snapshot({"nested": nested, "again": [nested], "plain": torch.ones(NUMEL)})
    made.values().zero_()
    found = taken.result()
    assert found["again"][0] is found["nested"]
    copied = found["nested"]
    assert copied.is_nested and copied.layout is torch.strided
    assert all(torch.equal(*each) for each in zip(copied.unbind(), wanted, strict=True))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_nested_tensor_with_a_gradient() -> None:
    rows = [torch.ones(3, 5), torch.ones(2, 5)]
    nested = torch.nested.nested_tensor(rows, layout=torch.strided, requires_grad=True)
    sum(row.sum() for row in nested.unbind()).backward()  # type: ignore[union-attr]
    with pytest.raises(TypeError, match=r"put its detach\(\) into the state"):
        nvmeio.snapshot([nested])
    found = nvmeio.snapshot([nested.detach().requires_grad_()]).result()[0]
    assert found.requires_grad and found.is_leaf


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_tensor_that_torch_cannot_copy_leaves_nothing_protected() -> None:
    rows = [torch.ones(300, 500), torch.ones(200, 500)]
    plain = torch.ones(NUMEL)
    nested = torch.nested.nested_tensor(rows, layout=torch.strided, requires_grad=True)
    with pytest.raises(RuntimeError, match="graph leaves"):
        nvmeio.snapshot({"plain": plain, "nested": nested * 2})
    assert plain.untyped_storage().resizable()


# Shards


@pytest.fixture
def mesh() -> Iterator[Any]:
    """Of this process alone."""
    fake_pg = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_shards_are_protected_and_not_copied(mesh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """deepcopy copied each of them twice, before `snapshot` returned, and their mesh."""
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    whole = torch.randn(NUMEL).view(1024, -1)
    shard = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
    small = distribute_tensor(torch.ones(3, 5), mesh, [Shard(1)], src_data_rank=None)
    wanted = whole.clone()
    gate, fill = threading.Event(), frozen.fill

    def late(*given: Any) -> None:
        assert gate.wait(PATIENCE_S)
        fill(*given)

    monkeypatch.setattr(frozen, "fill", late)
    state: dict[str, Any] = {
        "shard": shard,
        "view": shard.to_local()[:7],
        "again": [shard],
        "small": small,
    }
    taken = nvmeio.snapshot(state)
    assert taken.protected_bytes == whole.nbytes
    shard.to_local().zero_()
    small.to_local().zero_()
    gate.set()
    found = taken.result()
    copied = found["shard"]
    assert isinstance(copied, DTensor) and copied is found["again"][0]
    assert (copied.device_mesh, copied.placements) == (mesh, shard.placements)
    assert torch.equal(copied.to_local(), wanted) and torch.equal(found["view"], wanted[:7])
    assert found["view"].untyped_storage().data_ptr() == copied.to_local().data_ptr()
    assert (found["small"].to_local() == 1).all()


def test_shards_of_fsdp_are_protected(mesh: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Linear(600, 600)
    fully_shard(model, mesh=mesh)
    wanted = {name: value.to_local().clone() for name, value in model.state_dict().items()}
    taken = nvmeio.snapshot(model.state_dict())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert taken.protected_bytes == wanted["weight"].nbytes
    found = taken.result()
    assert all(torch.equal(found[name].to_local(), wanted[name]) for name in wanted)


def test_shards_that_have_more_to_copy(mesh: Any) -> None:
    """Gradients and Parameters are deepcopy's affair, as of tensors that are no shards."""
    from torch.distributed.tensor import Shard, distribute_tensor

    shard = distribute_tensor(torch.ones(NUMEL), mesh, [Shard(0)], src_data_rank=None)
    shard.requires_grad_()
    (shard * 3).sum().backward()
    parameter = torch.nn.Parameter(
        distribute_tensor(torch.ones(NUMEL), mesh, [Shard(0)], src_data_rank=None)
    )
    taken = nvmeio.snapshot([shard, parameter])
    with torch.no_grad():
        shard.zero_()
        parameter.zero_()
    found: list[Any] = taken.result()
    assert taken.protected_bytes == 0
    assert all((each.to_local() == 1).all() for each in found)
    assert (found[0].grad.to_local() == 3).all()
    assert isinstance(found[1], torch.nn.Parameter)


def test_no_thread_for_the_copying(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory stayed protected for ever, and torch refused to resize it."""
    tensor = torch.ones(NUMEL)
    start = interruptible.start

    def refuse(work: Any, name: str, refused: Any) -> None:
        if name == "nvmeio-snapshot":
            refused(RuntimeError("can't start new thread"))
        else:
            start(work, name, refused)

    with monkeypatch.context() as patched:
        patched.setattr(interruptible, "start", refuse)
        taken = nvmeio.snapshot({"tensor": tensor})
        with pytest.raises(RuntimeError, match="can't start new thread"):
            taken.result()
    assert tensor.untyped_storage().resizable()
    assert nvmeio.snapshot({"tensor": tensor}).protected_bytes == tensor.nbytes


def test_a_thread_that_cannot_even_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, where the constructor fails."""
    tensor = torch.ones(NUMEL)

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(frozen, "begun", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            nvmeio.snapshot({"tensor": tensor})
    assert tensor.untyped_storage().resizable()


def test_a_copy_that_is_dropped_at_once() -> None:
    tensor = torch.ones(NUMEL)
    taken = nvmeio.snapshot({"tensor": tensor})
    del taken
    gc.collect()
    spin_until(tensor.untyped_storage().resizable)
    tensor.zero_()


async def test_async_save_of_a_snapshot_is_of_its_moment(tmp_path: Path) -> None:
    """By itself, `async_save` takes none: its object must not change before it returns."""
    state: dict[str, Any] = {"large": noise(3_000_000), "small": noise(7), "step": [1]}
    wanted = copy.deepcopy(state)
    taken = nvmeio.snapshot(state)
    saving = asyncio.create_task(save_of(taken, tmp_path / "a.pt"))
    state["large"].zero_()
    state["small"].zero_()
    state["step"][0] = 2
    await saving
    assert_same(nvmeio.load(tmp_path / "a.pt"), wanted)


async def save_of(taken: nvmeio.FrozenState[Any], path: Path) -> None:
    await nvmeio.async_save(await taken, path)


def test_a_snapshot_that_is_saved_without_await_is_told(tmp_path: Path) -> None:
    frozen = nvmeio.snapshot({"w": torch.ones(3)})
    with pytest.raises(TypeError, match=r"save what `await`, or its result\(\), gives"):
        nvmeio.save(frozen, tmp_path / "state.pt")
    assert not list(tmp_path.iterdir())
    nvmeio.save(frozen.result(), tmp_path / "state.pt")
    assert torch.equal(nvmeio.load(tmp_path / "state.pt")["w"], torch.ones(3))

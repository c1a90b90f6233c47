"""`nvmeio.snapshot`: what deepcopy makes of a state, whoever looks at it while it is copied."""

from __future__ import annotations

import asyncio
import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint._objects import assert_same, noise
from support import needs_protection

import nvmeio
from nvmeio._threads import jobs
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
def test_a_nested_tensor_that_torch_cannot_copy_leaves_nothing_protected() -> None:
    rows = [torch.ones(300, 500), torch.ones(200, 500)]
    plain = torch.ones(NUMEL)
    nested = torch.nested.nested_tensor(rows, layout=torch.strided)
    with pytest.raises(NotImplementedError, match="new_empty"):
        nvmeio.snapshot({"plain": plain, "nested": nested})
    assert plain.untyped_storage().resizable()


def test_no_thread_for_the_copying(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory stayed protected for ever, and torch refused to resize it."""
    tensor = torch.ones(NUMEL)
    start = jobs.Job.start

    def refuse(job: jobs.Job[Any]) -> None:
        if job._name == "nvmeio-snapshot":
            job._refused(RuntimeError("can't start new thread"))
        else:
            start(job)

    with monkeypatch.context() as patched:
        patched.setattr(jobs.Job, "start", refuse)
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
    copying = taken._copying
    del taken
    gc.collect()
    copying.wait()
    tensor.zero_()
    assert tensor.untyped_storage().resizable()


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

"""`Checkpointer.resume`: a training goes on where it was, or says which part is not as it was."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import nvmeio
from nvmeio.checkpoint import training


class Loader:
    """Keeps its place, as torchdata's StatefulDataLoader does."""

    def __init__(self) -> None:
        self.place = 0

    def next(self) -> torch.Tensor:
        self.place += 1
        return torch.full((4, 8), float(self.place))

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


def new_parts() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "data": Loader()}


def step_of(parts: dict[str, Any]) -> float:
    numpy = pytest.importorskip("numpy")
    noise = random.random() + float(numpy.random.rand()) + torch.rand(())
    loss: torch.Tensor = parts["model"](parts["data"].next() * noise).square().mean()
    parts["optimizer"].zero_grad()
    loss.backward()
    parts["optimizer"].step()
    parts["scheduler"].step()
    return loss.item()


def train(directory: Path, until: int, **options: Any) -> list[float]:
    parts = new_parts()
    with nvmeio.Checkpointer(directory, **options) as checkpointer:
        losses = []
        for step in range(checkpointer.resume(**parts), until):
            losses.append(step_of(parts))
            checkpointer.save_sync(checkpointer.training_state(), step)
        return losses


@pytest.mark.parametrize("layout", ["one", "per_rank"])
def test_a_training_goes_on_bit_for_bit(layout: str, tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    runs = []
    for stops in ([6], [3, 6], [1, 2, 5, 6]):
        random.seed(5)
        numpy.random.seed(5)
        directory = tmp_path / str(len(stops))
        losses: list[float] = []
        for until in stops:
            losses += train(directory, until, layout=layout)
            random.seed(len(losses))  # whatever else draws in between
            numpy.random.seed(len(losses))
        runs.append(losses)
    assert runs[0] == runs[1] == runs[2]


def test_it_is_awaited(tmp_path: Path) -> None:
    async def go_on() -> int:
        parts = new_parts()
        async with nvmeio.Checkpointer(tmp_path) as checkpointer:
            first = await checkpointer.async_resume(**parts)
            step_of(parts)
            await checkpointer.save(checkpointer.training_state(), first)
            return first

    assert [asyncio.run(go_on()) for _ in range(3)] == [0, 1, 2]


def test_parts_that_are_missing_or_extra_are_named(tmp_path: Path) -> None:
    train(tmp_path, 1)
    parts = new_parts()
    with nvmeio.Checkpointer(tmp_path) as checkpointer:
        weight = parts["model"][0].weight.clone()
        fewer = {name: part for name, part in parts.items() if name != "scheduler"}
        with pytest.raises(
            ValueError, match=r"step 0 of .* holds 'scheduler', which was not given"
        ):
            checkpointer.resume(**fewer)
        with pytest.raises(ValueError, match=r"holds no 'sheduler' \(did you mean 'scheduler'\?\)"):
            checkpointer.resume(sheduler=parts["scheduler"], **fewer)
        assert parts["model"][0].weight.equal(weight)  # nothing was brought back
        assert checkpointer.resume(**fewer, strict=False) == 1
        assert not parts["model"][0].weight.equal(weight)
        with pytest.raises(TypeError, match=r"count is an int, which has no state_dict"):
            checkpointer.resume(count=3)
        loader: Any = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(2)))
        with pytest.raises(TypeError, match=r"StatefulDataLoader\), or leave it out"):
            checkpointer.resume(**parts, loader=loader)
        other = {**parts, "model": nn.Linear(3, 3)}
        with pytest.raises(ValueError, match=r"step 0 of .*: model does not take its state"):
            checkpointer.resume(**other)


def test_what_was_saved_otherwise_is_not_taken_for_a_training(tmp_path: Path) -> None:
    with nvmeio.Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(ValueError, match=r"call resume\(\) first"):
            checkpointer.training_state()
        checkpointer.save_sync({"model": {}}, 4)
        checkpointer.wait_sync()
        with pytest.raises(ValueError, match=r"was not made from training_state\(\)"):
            checkpointer.resume(model=nn.Linear(2, 2))


def test_the_error_of_a_damaged_checkpoint_names_the_steps_to_go_back_to(tmp_path: Path) -> None:
    """It named none, and `resume` had no `step=` to go back to one."""
    with nvmeio.Checkpointer(tmp_path, keep=3) as checkpointer:
        checkpointer.resume(data=(loader := Loader()))
        for step in (1, 2, 3):
            loader.place = step
            checkpointer.save_sync(checkpointer.training_state(), step)
    path = tmp_path / "step-00000003.pt"
    for cut, error in ((900, nvmeio.IntegrityError), (0, EOFError)):
        with path.open("r+b") as file:
            file.truncate(cut)
        with nvmeio.Checkpointer(tmp_path) as checkpointer:
            other = r"Other steps are there: 2, 1\. resume\(step=2\)"
            with pytest.raises(error, match=other):
                checkpointer.resume(data=loader)
            with pytest.raises(error, match=other):
                asyncio.run(checkpointer.async_restore())
            assert checkpointer.resume(step=2, data=loader) == 3 and loader.place == 2
            assert asyncio.run(checkpointer.async_resume(step=1, data=loader)) == 2
            assert loader.place == 1
            with pytest.raises(
                FileNotFoundError, match=r"there is no step 7; existing steps: 1, 2, 3"
            ):
                checkpointer.resume(step=7, data=loader)
            with pytest.raises(TypeError, match="step"):
                checkpointer.resume(step="2", data=loader)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["PCG64", "Philox", "SFC64", "MT19937"])
def test_any_generator_of_numpys_comes_back(kind: str, tmp_path: Path) -> None:
    """`training_state` raised AttributeError where numpy.random had another bit generator."""
    numpy = pytest.importorskip("numpy")
    before = numpy.random.get_bit_generator()
    try:
        numpy.random.set_bit_generator(getattr(numpy.random, kind)(1))
        with nvmeio.Checkpointer(tmp_path) as checkpointer:
            checkpointer.resume(data=(loader := Loader()))
            numpy.random.rand(3)
            numpy.random.standard_normal()
            checkpointer.save_sync(checkpointer.training_state(), 1)
            wanted = numpy.random.rand(5).tolist(), numpy.random.standard_normal()
            checkpointer.resume(data=loader)
            assert (numpy.random.rand(5).tolist(), numpy.random.standard_normal()) == wanted
    finally:
        numpy.random.set_bit_generator(before)


def test_a_state_of_another_generator_of_numpys_is_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    numpy = pytest.importorskip("numpy")
    before = numpy.random.get_bit_generator()
    with nvmeio.Checkpointer(tmp_path) as checkpointer:
        checkpointer.resume(data=(loader := Loader()))
        try:
            numpy.random.set_bit_generator(numpy.random.PCG64(1))
            checkpointer.save_sync(checkpointer.training_state(), 1)
        finally:
            numpy.random.set_bit_generator(before)
        assert checkpointer.resume(data=loader) == 2
    assert "has the state of numpy's PCG64, and numpy.random uses MT19937" in caplog.text


@pytest.mark.parametrize(
    "damage",
    [
        lambda states: states.pop("python"),
        lambda states: states.update(torch=torch.ones(3)),
        lambda states: states.update(torch=None),
        lambda states: states.update(numpy=("MT19937", torch.ones(5).long(), 3, 0, 0.0)),
        lambda states: states.update(python=(3, torch.ones(2, dtype=torch.int64), None)),
        lambda states: states.update(numpy={"state": 1}),
    ],
)
def test_damaged_random_states_name_the_file(damage: Any, tmp_path: Path) -> None:
    """A bare KeyError or TypeError came out of `resume`."""
    pytest.importorskip("numpy")
    with nvmeio.Checkpointer(tmp_path) as checkpointer:
        checkpointer.resume(data=(loader := Loader()))
        state = checkpointer.training_state()
        damage(state["random_states"])
        checkpointer.save_sync(state, 3)
        with pytest.raises(nvmeio.IntegrityError, match=r"step-00000003\.pt.*random states"):
            checkpointer.resume(data=loader)


class TorchWithDevices:
    """torch, as `nvmeio.checkpoint.training` sees it, with generators of so many CUDA devices."""

    def __init__(self, count: int, value: int) -> None:
        self.states = [torch.full((16,), value + n, dtype=torch.uint8) for n in range(count)]
        self.cuda = SimpleNamespace(
            is_initialized=lambda: count > 0,
            is_available=lambda: count > 0,
            device_count=lambda: count,
            get_rng_state_all=lambda: [state.clone() for state in self.states],
            set_rng_state_all=lambda states: setattr(self, "states", states),
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@pytest.mark.parametrize("count", [2, 0, 1])
def test_generators_of_devices_come_back(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With another number of devices theirs begin anew, and a warning says so."""
    monkeypatch.setattr(training, "torch", TorchWithDevices(2, 10))
    train(tmp_path, 1)
    devices = TorchWithDevices(count, 0)
    monkeypatch.setattr(training, "torch", devices)
    with nvmeio.Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.resume(**new_parts()) == 1
    values = [int(state[0]) for state in devices.states]
    warned = [r.getMessage() for r in caplog.records if "CUDA devices" in r.getMessage()]
    if count == 2:
        assert values == [10, 11] and not warned
    else:
        assert values == list(range(count))
        assert f"states of 2 CUDA devices, but there are {count}" in warned[0]

"""A step's plan is kept, and made anew where what it depends on has changed."""

from __future__ import annotations

import copy
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from _offload_models import assert_same_state, assert_same_weights, loss_of, model
from offload._swapping import swapped

from nvmeio.offload._generations.state_files import StateFiles
from nvmeio.offload._optimizer.arithmetic import Stepper
from nvmeio.offload._optimizer.turn_plans import TurnPlans


class _Pair:
    """A swapped model, and the same in memory; what is done to one is done to the other."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder, self.options = folder, {"lr": 1e-2, **options}
        self.models = [model(), model()]
        self.ours = swapped(self.models[0], folder, torch.optim.AdamW, **self.options)
        self.theirs: Any = torch.optim.AdamW(self.models[1].parameters(), lr=1e-2)
        self.steps = 0

    def backward(self, without: set[int]) -> None:
        """Gradients for all parameters but those with these numbers."""
        for made in self.models:
            for number, parameter in enumerate(made.parameters()):
                parameter.requires_grad_(number not in without)
            loss = loss_of(made, self.steps)
            for name, parameter in made.named_parameters():
                if name == "more" and parameter.requires_grad:
                    loss = loss + parameter.square().sum()
            loss.backward()  # type: ignore[no-untyped-call]
        self.steps += 1

    def step(self, without: set[int] | None = None) -> None:
        self.backward(without or set())
        for optimizer in (self.ours, self.theirs):
            optimizer.step()
            optimizer.zero_grad()

    def assert_same(self) -> None:
        assert_same_weights(*self.models)
        assert_same_state(self.ours.state_dict(), self.theirs.state_dict())


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often moves of state were worked out."""
    counted: Counter[str] = Counter()
    moves = StateFiles._moves

    def count(self: StateFiles, *args: Any) -> Any:
        counted["moves"] += 1
        return moves(self, *args)

    monkeypatch.setattr(StateFiles, "_moves", count)
    return counted


def test_a_step_like_the_last_ones_plans_nothing(tmp_path: Path, planned: Counter[str]) -> None:
    pair = _Pair(tmp_path)
    with pair.ours:
        for _ in range(3):  # the first one makes the state, and the others begin at either place
            pair.step()
        planned.clear()
        for _ in range(3):
            pair.step()
        assert not planned["moves"]
        pair.step({0, 3})
        assert planned["moves"]
        pair.assert_same()


def test_few_plans_are_kept(tmp_path: Path) -> None:
    """Gradients that are there by chance must not fill memory with plans."""
    pair = _Pair(tmp_path, subgroup_bytes=64 << 20)
    draw = random.Random(0)
    with pair.ours:
        for _ in range(20):
            pair.step({number for number in range(8) if draw.random() < 0.5})
        plans: TurnPlans = pair.ours._opened().plans
        assert all(len(of_one) <= 4 for of_one in plans._plans.values())
        pair.assert_same()


@pytest.mark.parametrize("gradients", ["memory", "disk"])
@pytest.mark.parametrize("checksum", [True, False])
def test_a_plan_follows_what_it_depends_on(gradients: str, checksum: bool, tmp_path: Path) -> None:
    """Gradients that come and go, options, groups, state dicts and a resumed directory."""
    options = {"gradients": gradients, "checksum": checksum}
    pair, draw = _Pair(tmp_path, resume=True, **options), random.Random(1)

    def steps(number: int) -> None:
        for _ in range(number):
            pair.step({n for n in range(8) if draw.random() < 0.3})
        pair.assert_same()

    steps(4)
    for optimizer in (pair.ours, pair.theirs):
        optimizer.param_groups[0].update(lr=3e-3, weight_decay=0.3)
    steps(3)
    states = [copy.deepcopy(each.state_dict()) for each in (pair.ours, pair.theirs)]
    weights = [copy.deepcopy(made.state_dict()) for made in pair.models]
    steps(3)
    for made, optimizer, weight, state in zip(
        pair.models, (pair.ours, pair.theirs), weights, states, strict=True
    ):
        made.load_state_dict(weight)
        optimizer.load_state_dict(state)
    steps(3)
    for made, optimizer in zip(pair.models, (pair.ours, pair.theirs), strict=True):
        made.register_parameter("more", torch.nn.Parameter(torch.linspace(-1, 1, 5000)))
        optimizer.add_param_group({"params": [made.more], "lr": 1e-1})
    steps(4)
    pair.ours.close()


def test_a_step_that_failed_leaves_the_plans_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some turns were computed and written; the next step begins at the same places again."""
    pair = _Pair(tmp_path)
    step, fails = Stepper.step, [3, 1]

    def failing(self: Stepper, *args: Any) -> Any:
        if fails:
            fails[0] -= 1
            if fails[0] == 0:
                fails.pop(0)
                raise ArithmeticError("planted")
        return step(self, *args)

    with pair.ours:
        for _ in range(4):
            pair.step()
        monkeypatch.setattr(Stepper, "step", failing)
        pair.backward(set())
        for _ in range(2):
            with pytest.raises(ArithmeticError, match="planted"):
                pair.ours.step()
        for optimizer in (pair.ours, pair.theirs):
            optimizer.step()
            optimizer.zero_grad()
        for _ in range(3):
            pair.step()
        pair.assert_same()


def test_a_directory_that_is_resumed_is_planned_from_its_places(tmp_path: Path) -> None:
    pair = _Pair(tmp_path, resume=True)
    with pair.ours:
        for _ in range(3):
            pair.step()
    with swapped(pair.models[0], tmp_path, torch.optim.AdamW, lr=1e-2, resume=True) as pair.ours:
        for _ in range(4):
            pair.step()
        pair.assert_same()

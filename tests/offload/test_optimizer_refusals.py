"""SwappedOptimizer: what is refused, and what is left of one that is closed or dropped."""

from __future__ import annotations

import copy
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from _offload_models import (
    assert_same_weights,
    loss_of,
    model,
    train,
)
from offload._swapping import swapped
from support import (
    spin_until_collected,
)

import nvmeio
from nvmeio.offload import SwappedModule, SwappedOptimizer

# Bad input


def test_closures_are_refused(tmp_path: Path) -> None:
    made = model()
    refused = pytest.raises(TypeError, match="takes no closure")
    with swapped(made, tmp_path) as optimizer, refused:
        optimizer.step(lambda: 0.0)


def test_an_optimizer_that_was_made_before_the_module_is_refused(tmp_path: Path) -> None:
    """It stepped what the window held: the module's state dict, and so checkpoints, had none."""
    made = model()
    with swapped(made, tmp_path / "optimizer") as optimizer:
        module = SwappedModule(made, swap_dir=tmp_path / "module", resident_bytes="1M")
        before = {name: value.clone() for name, value in module.state_dict().items()}
        loss_of(module, 0).backward()
        with pytest.raises(
            RuntimeError, match=r"place was memory and is a SwappedModule.*make a n"
        ):
            optimizer.step()
        assert_same(before, module.state_dict())
        module.close()


def test_a_plain_optimizer_over_swapped_parameters_is_refused(tmp_path: Path) -> None:
    """It stepped the window, and what `state_dict` and the drive had stayed as it was."""
    module = SwappedModule(
        torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4))),
        swap_dir=tmp_path,
        resident_bytes="1M",
    )
    plain = torch.optim.AdamW(module.parameters(), lr=0.1)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    module(torch.ones(1, 16)).sum().backward()
    with pytest.raises(RuntimeError, match=r"AdamW cannot step .* Make a SwappedOptimizer"):
        plain.step()
    assert_same(before, module.state_dict())
    with module.gather():  # where parameters are changed by hand
        plain.step()
    changed = module.state_dict()
    assert not any(torch.equal(before[name], changed[name]) for name in before)
    module.close()
    plain.zero_grad()
    plain.step()  # over nothing that is swapped


def test_parameters_that_were_made_for_inference_are_refused(tmp_path: Path) -> None:
    """The first step failed in torch's words: "Setting requires_grad=True on inference tensor"."""
    with torch.inference_mode():
        made = torch.nn.Linear(4, 4)
    match = r"parameter {} was made in torch.inference_mode\(\).*copy.deepcopy\(model\)"
    with pytest.raises(ValueError, match=match.format(0)):
        SwappedOptimizer(torch.optim.AdamW, made.parameters(), swap_dir=tmp_path)
    usable = copy.deepcopy(made)  # as the message says
    with SwappedOptimizer(torch.optim.AdamW, usable.parameters(), swap_dir=tmp_path) as optimizer:
        with pytest.raises(ValueError, match=match.format(2)):
            optimizer.add_param_group({"params": [made.weight]})
        for parameter in usable.parameters():
            with torch.inference_mode():  # such gradients are taken
                parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        with torch.inference_mode():
            state = copy.deepcopy(optimizer.state_dict())
        optimizer.load_state_dict(state)
        optimizer.step()
    assert not torch.equal(usable.weight, made.weight)


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("cls", [torch.optim.LBFGS, torch.optim.SparseAdam, torch.nn.Linear, 3])
def test_classes_that_cannot_be_swapped(cls: Any, tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        SwappedOptimizer(cls, model().parameters(), swap_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


class Momentum(torch.optim.Optimizer):
    """Momentum over steps that are scaled in some way."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "count": 0})
        self.count = 0

    def scale(self, group: dict[str, Any]) -> float:
        return 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += isinstance(self, CountsByItself)
        for group in self.param_groups:
            scale = self.scale(group)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    momentum = state.setdefault("momentum", torch.zeros_like(parameter))
                    momentum.mul_(0.9).add_(parameter.grad)
                    parameter.sub_(momentum * (group["lr"] * scale))


class CountsInGroups(Momentum):
    def scale(self, group: dict[str, Any]) -> float:
        group["count"] += 1
        return float(1 / group["count"])


class CountsByItself(Momentum):
    def scale(self, group: dict[str, Any]) -> float:
        return 1 / self.count


class ClipsAll(Momentum):
    def scale(self, group: dict[str, Any]) -> float:
        norms = [p.grad.norm() for p in group["params"] if p.grad is not None]
        return 1 / max(1.0, float(torch.stack(norms).norm()))


class Noisy(Momentum):
    def scale(self, group: dict[str, Any]) -> float:
        return float(torch.rand(()))


class DrawsByItself(Noisy):
    """From a generator that its state knows nothing of, as timm's Kron does."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.generator: Any = random.Random(3)

    def scale(self, group: dict[str, Any]) -> float:
        return super().scale(group) * (self.draw() < 0.01)

    def draw(self) -> float:
        return float(self.generator.random())


class DrawsByTorch(DrawsByItself):
    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.generator = torch.Generator().manual_seed(3)

    def draw(self) -> float:
        return float(torch.rand((), generator=self.generator))


class DrawsByNumpy(DrawsByItself):
    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.generator = pytest.importorskip("numpy").random.default_rng(3)


@pytest.mark.parametrize(
    "cls",
    [CountsInGroups, CountsByItself, ClipsAll, DrawsByItself, DrawsByTorch, DrawsByNumpy],
)
def test_classes_that_need_all_parameters_at_once(cls: Any, tmp_path: Path) -> None:
    """They were stepped some parameters at a time, by an optimizer of its own: other results."""
    match = f"{cls.__name__} changes its own options or draws from a generator of its own in a step"
    with pytest.raises(TypeError, match=match):
        SwappedOptimizer(cls, model().parameters(), swap_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("cls", [Momentum, Noisy])
def test_classes_that_step_each_parameter_alone(cls: Any, tmp_path: Path) -> None:
    """Noise is no sign of others, and trying a class takes none of the program's."""
    ours, theirs = model(), model()
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with SwappedOptimizer(cls, ours.parameters(), swap_dir=tmp_path) as optimizer:
        if cls is Momentum:
            assert torch.get_rng_state().equal(before)
            assert train(ours, optimizer, 3) == train(theirs, Momentum(theirs.parameters()), 3)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"subgroup_bytes": 10}, ValueError),
        ({"subgroup_bytes": 1.5}, TypeError),
        ({"buffer_bytes": 0}, ValueError),
        ({"master_dtype": 32}, TypeError),
        ({"master_dtype": "float33"}, ValueError),
        ({"master_dtype": torch.int32}, ValueError),
        ({"gradients": "nvme"}, ValueError),
        ({"ratio": 1.5}, ValueError),
        ({"ratio": "all"}, TypeError),
        ({"ratio": 0.5, "resume": True}, ValueError),
        ({"swap_dir": None}, ValueError),
        ({"swap_dir": None, "ratio": 0.0, "gradients": "disk"}, ValueError),
        ({"handle": 3}, TypeError),
        ({"lr": -1.0}, ValueError),
        ({"learning_rate": 1.0}, TypeError),
    ],
)
def test_bad_arguments(options: dict[str, Any], error: type[Exception], tmp_path: Path) -> None:
    with pytest.raises(error):
        SwappedOptimizer(
            torch.optim.Adam, model().parameters(), **{"swap_dir": tmp_path, **options}
        )
    assert list(tmp_path.iterdir()) == []


def test_an_optimizer_in_the_place_of_its_class_is_refused(tmp_path: Path) -> None:
    made = model()
    with pytest.raises(TypeError, match=r"pass the class, AdamW, .* swapped_like"):
        SwappedOptimizer(torch.optim.AdamW(made.parameters()), made.parameters(), swap_dir=tmp_path)
    with pytest.raises(TypeError, match=r"pass the class, AdamW, .* swapped_like"):
        SwappedOptimizer(torch.optim.AdamW(made.parameters()), swap_dir=tmp_path)
    with pytest.raises(TypeError, match="params is missing: pass parameters"):
        SwappedOptimizer(torch.optim.AdamW, swap_dir=tmp_path)
    with pytest.raises(TypeError, match=r"params is a module.*: pass .* model\.parameters\(\)"):
        SwappedOptimizer(torch.optim.AdamW, made, swap_dir=tmp_path)


@pytest.mark.parametrize(
    "name", ["durable", "checksum", "resume", "recoverable", "pipeline_read", "pipeline_write"]
)
def test_switches_are_what_they_say(name: str, tmp_path: Path) -> None:
    """The string "false", as tuners print it, was taken for True."""
    made = model()
    with swapped(made, tmp_path, **{name: "false"}) as optimizer:
        train(made, optimizer, 1)
        assert (optimizer.plan.buffers == 2) == name.startswith("pipeline")
    with pytest.raises(TypeError, match=f"{name} must be true or false.* not 'off'"):
        swapped(made, tmp_path, **{name: "off"})


def test_parameters_that_changed_are_refused_before_anything_happens(tmp_path: Path) -> None:
    made = model()
    with swapped(made, tmp_path) as optimizer:
        train(made, optimizer, 1)
        weights = [p.detach().clone() for p in made.parameters()]
        last = made[5].weight
        kept = last.data
        for changed, says in (
            (torch.zeros(1, 7), "shape"),
            (kept.double(), "dtype"),
        ):
            for p in made.parameters():
                p.grad = torch.ones_like(p)
            last.grad = None
            last.data = changed
            with pytest.raises(RuntimeError, match=f"its {says} was"):
                optimizer.step()
            last.data = kept
            assert all(map(torch.equal, made.parameters(), weights))


def test_sparse_gradients_are_refused(tmp_path: Path) -> None:
    made = torch.nn.Embedding(10, 4, sparse=True)
    with swapped(made, tmp_path) as optimizer:
        made(torch.tensor([1])).sum().backward()
        before = made.weight.detach().clone()
        with pytest.raises(TypeError, match="sparse"):
            optimizer.step()
        assert torch.equal(made.weight, before)
        assert not optimizer.broken
    with swapped(made, tmp_path, gradients="disk"):
        made.weight.grad = None
        # The only parameter keeps its gradient in memory; a second one would be refused.


def test_zeroed_gradients_on_the_drive_are_gone(tmp_path: Path) -> None:
    made = model()
    with swapped(made, tmp_path, gradients="disk") as optimizer:
        loss_of(made, 0).backward()
        assert sum(p.grad is not None for p in made.parameters()) == 1
        optimizer.zero_grad()
        before = optimizer.generation
        optimizer.step()
        assert optimizer.generation == before
        with pytest.raises(ValueError, match="set_to_none"):
            optimizer.zero_grad(set_to_none=False)


def test_the_models_zero_grad_is_noticed(tmp_path: Path) -> None:
    """Many loops (that of transformers, for one) call the model's and not the optimizer's."""
    ours, theirs = model(), model()
    reference = torch.optim.Adam(theirs.parameters())
    with swapped(ours, tmp_path, gradients="disk") as optimizer:
        for step in range(4):
            for made, stepping in ((ours, optimizer), (theirs, reference)):
                loss_of(made, step).backward()
                stepping.step()
                made.zero_grad()
        assert_same_weights(ours, theirs)
        loss_of(ours, 9).backward()
        ours.zero_grad()
        before = optimizer.generation
        optimizer.step()
        assert optimizer.generation == before


def test_it_is_neither_copied_nor_pickled(tmp_path: Path) -> None:
    with swapped(model(), tmp_path) as optimizer:
        with pytest.raises(TypeError, match="state_dict"):
            pickle.dumps(optimizer)
        with pytest.raises(TypeError, match="another swap_dir"):
            copy.deepcopy(optimizer)


def test_closed_is_closed(tmp_path: Path) -> None:
    optimizer = swapped(model(), tmp_path)
    optimizer.close()
    optimizer.close()
    assert "closed" in repr(optimizer)
    for call in (optimizer.step, optimizer.state_dict, optimizer.reload_weights):
        with pytest.raises(nvmeio.ClosedError):
            call()
    assert list(tmp_path.iterdir()) == []


def test_dropped_is_closed(tmp_path: Path) -> None:
    """Nobody closes an optimizer: its files go when it does."""
    made = model()
    optimizer = swapped(made, tmp_path, gradients="disk")
    train(made, optimizer, 1)
    del optimizer
    spin_until_collected(lambda: list(tmp_path.iterdir()) == [])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_fused_step_that_changes_no_weights_is_refused(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    """torch 2.13's fused SGD on the CPU leaves weights of these dtypes as they are: so did we."""
    theirs = torch.nn.Parameter(torch.ones(256, dtype=dtype))
    theirs.grad = torch.ones_like(theirs)
    torch.optim.SGD([theirs], lr=0.5, fused=True).step()
    if bool((theirs == 0.5).all()):
        pytest.skip("this torch steps them")
    ours = torch.nn.Parameter(torch.ones(256, dtype=dtype))
    options: dict[str, Any] = {"swap_dir": tmp_path, "lr": 0.5, "durable": False}
    with pytest.raises(ValueError, match=r"fused=True of SGD leaves .* leave out fused, or step"):
        SwappedOptimizer(torch.optim.SGD, [ours], fused=True, **options)
    with SwappedOptimizer(torch.optim.SGD, [ours], **options) as optimizer:
        ours.grad = torch.ones_like(ours)
        optimizer.step()
        assert bool((ours == 0.5).all())
        optimizer.param_groups[0]["fused"] = True
        with pytest.raises(ValueError, match="fused=True of SGD leaves"):
            optimizer.step()
    masters = {"fused": True, "master_dtype": torch.float32}
    with SwappedOptimizer(torch.optim.SGD, [ours], **masters, **options) as optimizer:
        optimizer.step()
        assert bool((ours == 0).all())

"""Weights that a program changes in memory outside of `gather`: refused, and nothing is lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from inside import store_of
from torch.nn.utils import parametrize

from nvmeio.offload import SwappedModule, SwappedOptimizer

WIDTH, LAYERS = 64, 6
LAYER_BYTES = WIDTH * WIDTH * 4 + 4096
REFUSED = r"the parameter 1\.weight was changed in place outside of gather\(\)"


def layers() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def swapped(made: Any, folder: Path, held: int = 3, **options: Any) -> SwappedModule:
    most = {"stage_bytes": LAYER_BYTES}
    return SwappedModule(
        made, swap_dir=folder, resident_bytes=held * (LAYER_BYTES + 4096), **{**most, **options}
    )


def halve(parameter: torch.Tensor) -> None:
    with torch.no_grad():
        parameter.mul_(0.5)


@pytest.mark.parametrize("held", [3, 2 * LAYERS])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("grad", [True, False])
def test_a_hook_that_changes_a_weight_is_refused(
    held: int, when: str, grad: bool, tmp_path: Path
) -> None:
    """It changed what is in memory, and the next pass had the weights of before without a word."""
    made = layers()
    x = torch.randn(2, WIDTH)
    with swapped(made, tmp_path, held) as module:
        before = module(x).detach()
        if when == "before":
            hook = made[1].register_forward_pre_hook(lambda layer, _: halve(layer.weight))
        else:
            hook = made[1].register_forward_hook(lambda layer, *_: halve(layer.weight))
        with torch.set_grad_enabled(grad), pytest.raises(RuntimeError, match=REFUSED):
            module(x)
        hook.remove()
        with pytest.raises(RuntimeError, match=REFUSED):  # until it is told what is to be
            module(x)
        with pytest.raises(RuntimeError, match=REFUSED):
            module.state_dict()
        with pytest.raises(RuntimeError, match=REFUSED):
            module.evict()
        with module.gather(made[1].weight):
            pass
        module.evict()
        expected = layers()
        halve(expected[1].weight)
        torch.testing.assert_close(module(x), expected(x), rtol=0, atol=0)
        assert not torch.equal(module(x), before)
        assert torch.equal(module.state_dict()["1.weight"], expected[1].weight)


def test_a_change_between_passes_is_refused_before_its_memory_is_taken(tmp_path: Path) -> None:
    """Other parts that needed the room dropped it."""
    made = layers()
    x = torch.randn(2, WIDTH)
    with swapped(made, tmp_path, held=2) as module:
        module.evict()
        made[1](x)
        halve(made[1].weight)
        with pytest.raises(RuntimeError, match=REFUSED):
            for each in (3, 4, 5, 3):
                made[each](x)
        with module.gather(made[1].weight):
            pass
        expected = layers()
        halve(expected[1].weight)
        torch.testing.assert_close(module(x), expected(x), rtol=0, atol=0)


def test_a_step_after_such_a_change_is_refused_and_has_not_happened(tmp_path: Path) -> None:
    """It stepped from the drive's weights, and the change was gone."""
    made = layers()
    x = torch.randn(2, WIDTH)
    with (
        swapped(made, tmp_path / "m", 2 * LAYERS) as module,
        SwappedOptimizer(
            torch.optim.SGD, module.parameters(), swap_dir=tmp_path / "o", lr=0.1
        ) as optimizer,
    ):
        module(x).square().mean().backward()
        halve(made[1].weight)
        with pytest.raises(RuntimeError, match=REFUSED):
            optimizer.step()
        with pytest.raises(ZeroDivisionError), module.gather():  # the values of before
            1 / 0  # noqa: B018
        optimizer.step()
        module(x).square().mean().backward()  # a step of ours is no such change
        optimizer.step()
        module(x)


def test_a_change_through_data_is_counted(tmp_path: Path) -> None:
    """It changed what is in memory, and was gone when that went: as WGAN clips its weights."""
    made: Any = layers()
    expected: Any = layers()
    x = torch.randn(2, WIDTH)
    with swapped(made, tmp_path, 2 * LAYERS) as module:
        module(x)
        made[1].weight.data.clamp_(-0.01, 0.01)
        for look in (lambda: module(x), module.state_dict, module.evict):
            with pytest.raises(RuntimeError, match=REFUSED):
                look()
        with module.gather():  # which keeps it
            made[2].weight.data *= 2
        module.evict()
        expected[1].weight.data.clamp_(-0.01, 0.01)
        expected[2].weight.data *= 2
        assert torch.equal(module(x), expected(x))
        assert torch.equal(module.state_dict()["2.weight"], expected[2].weight)
    made[1].weight.data = torch.ones(WIDTH, WIDTH)  # nobody's but the caller's
    assert made[1].weight.sum() == WIDTH * WIDTH


def set_data(parameter: Any, value: torch.Tensor) -> None:
    parameter.data = value


@torch.no_grad()
@pytest.mark.parametrize("held", [2, 2 * LAYERS])
@pytest.mark.parametrize("change", [set_data, lambda p, value: p.set_(value)])
def test_other_data_is_taken_over_within_gather_and_else_refused(
    change: Callable[[torch.Tensor, torch.Tensor], object], held: int, tmp_path: Path
) -> None:
    """It was dropped with the window, without a word, within gather too."""
    made, x, ones = layers(), torch.randn(2, WIDTH), torch.ones(WIDTH, WIDTH)
    with swapped(made, tmp_path, held) as module:
        before = module(x)
        change(made[0].weight, made[0].weight.data)  # it has that
        with pytest.raises(RuntimeError, match="other data was set for a parameter"):
            change(made[1].weight, ones)
        assert torch.equal(module(x), before)
        with module.gather(made[1].weight):
            for other in (ones.double(), ones[:1]):
                with pytest.raises(RuntimeError, match="of its shape and dtype"):
                    change(made[1].weight, other)
            change(made[1].weight, ones)
        module.evict()
        expected = layers()
        expected[1].weight.fill_(1)
        assert torch.equal(module(x), expected(x))
        assert torch.equal(module.state_dict()["1.weight"], ones)


class Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(2.0))
        self.inner = layers()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(x) * self.scale
        return result


@pytest.mark.parametrize("change", [lambda p: p.clamp_(0, 1), lambda p: p.fill_(1)])
def test_a_single_element_that_is_not_in_memory_cannot_be_written_to(
    change: Callable[[torch.Tensor], object], tmp_path: Path
) -> None:
    """As programs clamp a `logit_scale` after each step: torch lets that be, and it was lost."""
    made, x = Scaled(), torch.randn(2, WIDTH)
    with swapped(made, tmp_path) as module:
        before = module(x).detach()
        module.evict()
        with torch.no_grad():
            change(made.scale)
        with pytest.raises(RuntimeError, match=r"the parameter scale was changed"):
            module(x)
        assert bool(made.scale.isnan())
        assert torch.equal(module(x), before)


def test_max_norm_is_refused_outside_of_gather(tmp_path: Path) -> None:
    """An embedding with `max_norm` changes its weight in forward."""
    torch.manual_seed(0)
    made = torch.nn.Sequential(torch.nn.Embedding(32, WIDTH, max_norm=1.0), *layers())
    ids = torch.tensor([[1, 2, 3]])
    with swapped(made, tmp_path) as module:
        with pytest.raises(RuntimeError, match=r"the parameter 0\.weight was changed"):
            module(ids)
        with module.gather(made[0].weight):
            module(ids)
        module.evict()
        assert bool((module.state_dict()["0.weight"][ids].norm(dim=-1) <= 1.001).all())


def test_what_nvmeio_changes_is_no_such_change(tmp_path: Path) -> None:
    """Steps, gather, its undoing and loading, while all of it is held in memory."""
    made = layers()
    x = torch.randn(2, WIDTH)
    with (
        swapped(made, tmp_path / "m", 2 * LAYERS) as module,
        SwappedOptimizer(
            torch.optim.AdamW, module.parameters(), swap_dir=tmp_path / "o"
        ) as optimizer,
    ):
        held = store_of(module).hold(store_of(module).units)
        for _ in range(2):
            module(x).square().mean().backward()
            optimizer.step()
        with module.gather():
            halve(made[1].weight)
            module(x)
        module(x)
        with pytest.raises(ZeroDivisionError), module.gather():
            halve(made[1].weight)
            1 / 0  # noqa: B018
        module(x)
        optimizer.reload_weights()
        module.load_state_dict(layers().state_dict())
        module(x)
        del held
        module.evict()


class Doubled(torch.nn.Linear):
    """Parametrised for the time of a call, as PEFT does it for `target_parameters`."""

    class Twice(torch.nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight * 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parametrize.register_parametrization(self, "weight", self.Twice())
        try:
            return super().forward(x)
        finally:
            parametrize.remove_parametrizations(self, "weight", leave_parametrized=False)


def test_a_parametrisation_is_no_change(tmp_path: Path) -> None:
    """torch begins one by setting a parameter to itself, and counts that."""
    made = torch.nn.Sequential(*(Doubled(WIDTH, WIDTH) for _ in range(2)))
    x = torch.randn(2, WIDTH)
    expected = made(x)
    expected.sum().backward()
    wanted = [p.grad for p in made.parameters()]
    made.zero_grad()
    with swapped(made, tmp_path) as module:
        found = module(x)
        assert torch.equal(found, expected)
        found.sum().backward()
        assert all(map(torch.equal, [p.grad for p in made.parameters()], wanted))


def test_parameters_that_torch_counts_together_are_not_watched(tmp_path: Path) -> None:
    """Views of one tensor have one count: a step of one would look like a change of the others."""
    whole = torch.randn(LAYERS, WIDTH, WIDTH)
    made = layers()
    for layer, rows in zip(made, whole, strict=True):
        layer.weight = torch.nn.Parameter(rows)
    with (
        swapped(made, tmp_path / "m", 2 * LAYERS) as module,
        SwappedOptimizer(
            torch.optim.SGD, module.parameters(), swap_dir=tmp_path / "o", lr=0.1
        ) as optimizer,
    ):
        for _ in range(2):
            module(torch.randn(2, WIDTH)).square().mean().backward()
            optimizer.step()
        with module.gather(made[1].weight):
            halve(made[1].weight)
        module(torch.randn(2, WIDTH))
        halve(made[1].bias)
        with pytest.raises(RuntimeError, match=r"the parameter 1\.bias was changed"):
            module(torch.randn(2, WIDTH))

"""Functions that a module checkpoints within its own forward, which backward runs again."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from inside import held_of, window_in_use
from support import PATIENCE_S, thread
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from nvmeio.errors import ClosedError
from nvmeio.offload import SwappedModule

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")

WIDTH = 32


@pytest.fixture(params=[False, True], ids=["checkpoint", "reentrant"])
def reentrant(request: pytest.FixtureRequest) -> Any:
    return request.param


class Layer(nn.Module):
    """Computes with its own parameters in a function that it checkpoints."""

    def __init__(self, reentrant: bool, width: int = WIDTH) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4 * width, width) / width)
        self.down = nn.Parameter(torch.randn(width, 4 * width) / width)
        self.reentrant = reentrant

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.gelu(nn.functional.linear(x, self.up))
        return x + nn.functional.linear(hidden, self.down)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = checkpoint(self._inner, x, use_reentrant=self.reentrant)
        return found


class Segments(Layer):
    """Checkpoints a list of functions."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        functions = [self._inner, torch.tanh, self._inner, self._inner]
        found: torch.Tensor = checkpoint_sequential(functions, 2, x, use_reentrant=self.reentrant)
        return found


class Twice(Layer):
    """A checkpointed function checkpoints another."""

    def _outer(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = checkpoint(self._inner, x * 2, use_reentrant=self.reentrant)
        return torch.tanh(found) * self.down[0, 0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = checkpoint(self._outer, x, use_reentrant=self.reentrant)
        return found


class Around(Layer):
    """Too large to come as one: the checkpointed function calls parts, and uses its own matrix."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__(reentrant)
        self.parts = nn.ModuleList(Layer(reentrant) for _ in range(4))

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
            x = super()._inner(x)
        return x


class Cast(Layer):
    """Computes under autocast."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


def model(kind: Callable[[bool], nn.Module], reentrant: bool) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(kind(reentrant) for _ in range(8)))


def swapped(made: nn.Module, folder: Path) -> SwappedModule:
    """With a window that has room for three of the largest parts of eight."""
    largest = max(sum(p.nbytes for p in child.parameters()) for child in made.children())
    return SwappedModule(
        made,
        swap_dir=folder,
        resident_bytes=3 * (largest + 16384),
        stage_bytes=2 * 4 * WIDTH**2 * 4,
    )


def data(seed: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(5, WIDTH, generator=generator).requires_grad_()


def gradients(made: nn.Module, module: nn.Module) -> list[torch.Tensor]:
    x = data()
    module(x).square().sum().backward()
    grads = [x.grad, *(p.grad for p in made.parameters())]
    assert all(grad is not None for grad in grads)
    return [grad for grad in grads if grad is not None]


@pytest.mark.parametrize("kind", [Layer, Segments, Twice, Around, Cast])
def test_gradients_are_those_in_memory(
    kind: Callable[[bool], nn.Module], reentrant: bool, tmp_path: Path
) -> None:
    """Backward computed with absent parameters: gradients were NaN, and nothing said so."""
    theirs = model(kind, reentrant)
    ours = copy.deepcopy(theirs)
    wanted = gradients(theirs, theirs)
    with swapped(ours, tmp_path) as module:
        found = gradients(ours, module)
        assert all(map(torch.equal, found, wanted))
        assert held_of(module) == []
        assert window_in_use(module) <= module.resident_bytes


def test_parts_are_read_again_for_backward(reentrant: bool, tmp_path: Path) -> None:
    theirs = model(Layer, reentrant)
    ours = copy.deepcopy(theirs)
    wanted = gradients(theirs, theirs)
    with swapped(ours, tmp_path) as module:
        x = data()
        loss = module(x).square().sum()
        module.evict()
        loss.backward()
        found = [x.grad, *(p.grad for p in ours.parameters())]
        assert all(map(torch.equal, found, wanted))


def test_a_forward_that_fails_leaves_nothing_held(reentrant: bool, tmp_path: Path) -> None:
    """And what is checkpointed afterwards, outside of any call, is as it is without us."""
    theirs = model(Layer, reentrant)
    ours = copy.deepcopy(theirs)
    wanted = gradients(theirs, theirs)
    with swapped(ours, tmp_path) as module:
        inner = ours[4]._inner

        def fails(x: torch.Tensor) -> torch.Tensor:
            inner(x)
            raise KeyError("in the middle")

        ours[4]._inner = fails  # type: ignore[assignment]
        with pytest.raises(KeyError, match="in the middle"):
            module(data())
        assert held_of(module) == []
        runs: list[int] = []

        def outside(x: torch.Tensor) -> torch.Tensor:
            runs.append(len(held_of(module)))
            return x.sin()

        checkpoint(outside, data(), use_reentrant=reentrant).sum().backward()
        assert runs == [0, 0]
        ours[4]._inner = inner  # type: ignore[assignment]
        assert all(map(torch.equal, gradients(ours, module), wanted))


def test_a_function_that_fails_when_it_runs_again(reentrant: bool, tmp_path: Path) -> None:
    ours = model(Layer, reentrant)
    with swapped(ours, tmp_path) as module:
        loss = module(data()).sum()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.nn.functional, "gelu", lambda _: {}["again"])
            with pytest.raises(KeyError, match="again"):
                loss.backward()
        assert held_of(module) == []
        for parameter in ours.parameters():
            parameter.grad = None
        assert not any(grad.isnan().any() for grad in gradients(ours, module))


def test_threads_hold_their_own(reentrant: bool, tmp_path: Path) -> None:
    """What one checkpoints while another computes does not take the other's parameters again."""
    ours, beside = model(Layer, reentrant), model(Layer, reentrant)
    wanted = gradients(*(copy.deepcopy(ours),) * 2)
    inner, inside, gate = ours[4]._inner, threading.Event(), threading.Event()
    held: list[int] = []

    def waits(x: torch.Tensor) -> torch.Tensor:
        inside.set()
        assert gate.wait(PATIENCE_S)
        found: torch.Tensor = inner(x)
        return found

    def compute(module: nn.Module) -> list[torch.Tensor]:
        torch.set_num_threads(1)  # of this thread; sums have other last bits with two
        return gradients(ours, module)

    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with swapped(ours, tmp_path / "a") as first, swapped(beside, tmp_path / "b") as second:

        def outside(x: torch.Tensor) -> torch.Tensor:
            held.append(len(held_of(first)))
            return x.sin()

        ours[4]._inner = waits  # type: ignore[assignment]
        with thread(compute, first) as found:
            assert inside.wait(PATIENCE_S)
            assert all(map(torch.equal, gradients(beside, second), wanted))
            checkpointed = checkpoint(outside, data(), use_reentrant=reentrant)
            gate.set()
        assert all(map(torch.equal, found[0], wanted))
        checkpointed.sum().backward()
        assert held == [1, 0]


def test_a_closed_module_is_not_computed_with(reentrant: bool, tmp_path: Path) -> None:
    ours = model(Layer, reentrant)
    with swapped(ours, tmp_path) as module:
        loss = module(data()).sum()
    with pytest.raises(ClosedError, match="closed"):
        loss.backward()

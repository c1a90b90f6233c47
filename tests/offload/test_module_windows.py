"""Windows of memory that a swapped module is refused, and the least one that it trains in."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from _gpt import Gpt, loss_of
from torch.utils.checkpoint import checkpoint

from nvmeio.offload import SwappedModule

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")


def gpt(reentrant: bool | None = None) -> Any:
    torch.manual_seed(0)
    return Gpt(reentrant=reentrant)


def test_a_window_that_cannot_hold_a_part_says_what_can(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Give resident_bytes=") as told:
        SwappedModule(gpt(), swap_dir=tmp_path, resident_bytes=8192)
    assert "resident_bytes=8192 is too small" in str(told.value)
    assert list(tmp_path.iterdir()) == []


class _Scaled(torch.nn.Module):
    """Layers of which one region is checkpointed, called from within a module with parameters."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = torch.nn.Parameter(torch.rand(90))
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(90, 90, bias=False) for _ in range(4)))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        if self.reentrant is None:
            return torch.tanh(self.layers(x)) * self.scale
        out = checkpoint(self.layers, x, use_reentrant=self.reentrant)
        return torch.tanh(out) * self.scale


@pytest.mark.parametrize("reentrant", [None, False, True], ids=["plain", "checkpoint", "reentrant"])
@pytest.mark.parametrize("kind", [_Scaled, gpt])
def test_a_window_that_is_not_refused_trains(kind: Any, reentrant: Any, tmp_path: Path) -> None:
    """One of the largest part was taken, and the first pass ended in MemoryError.

    The modules around a part have their own parameters in memory; backward may have a weight while
    a checkpointed region runs again; and what was free lay in pieces.
    """
    options: dict[str, Any] = {"swap_dir": tmp_path, "stage_bytes": 16 << 10}
    with pytest.raises(ValueError, match="is too small") as refused:
        SwappedModule(kind(reentrant), resident_bytes=4096, **options)
    (enough,) = re.findall(r"Give resident_bytes=(\d+) or more", str(refused.value))
    with pytest.raises(ValueError, match=f"Give resident_bytes={enough} or more"):
        SwappedModule(kind(reentrant), resident_bytes=int(enough) - 4096, **options)
    theirs = kind(reentrant)
    with SwappedModule(kind(reentrant), resident_bytes=int(enough), **options) as module:
        for step in range(3):
            losses = [
                loss_of(made, step) if kind is gpt else made(torch.ones(2, 3, 90)).square().mean()
                for made in (module, theirs)
            ]
            torch.testing.assert_close(*losses)  # in tiles, of which last bits may differ
            for loss in losses:
                loss.backward()
    ours = torch.cat([p.grad.flatten() for p in module.module.parameters()])
    torch.testing.assert_close(ours, torch.cat([p.grad.flatten() for p in theirs.parameters()]))


def test_the_number_in_the_refusal_is_enough_and_so_is_any_above(tmp_path: Path) -> None:
    """Parts of a quarter of the window grow with it: twice the number could be refused."""

    def wide() -> Any:
        return torch.nn.Sequential(_Scaled(None), torch.nn.Linear(90, 300), _Scaled(None))

    found = set()
    for window in (4096, 8192, 20480):
        with pytest.raises(ValueError, match="is too small") as refused:
            SwappedModule(wide(), swap_dir=tmp_path, resident_bytes=window)
        found.update(re.findall(r"Give resident_bytes=(\d+) or more", str(refused.value)))
    (enough,) = map(int, found)
    for window in range(enough, 4 * enough, 8192):
        SwappedModule(wide(), swap_dir=tmp_path, resident_bytes=window).close()


def test_a_gradient_penalty_names_the_window_that_it_needs(tmp_path: Path) -> None:
    """It said to raise resident_bytes, and not to what."""
    torch.manual_seed(0)
    theirs = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(5)))
    x = torch.randn(4, 32, requires_grad=True)

    def penalised(module: torch.nn.Module) -> None:
        (gradient,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
        gradient.square().sum().backward()

    penalised(theirs)
    window, sizes = 3 * 8192, []
    while True:
        ours = copy.deepcopy(theirs)
        ours.zero_grad()
        with SwappedModule(ours, swap_dir=tmp_path, resident_bytes=window) as module:
            try:
                penalised(module)
            except MemoryError as small:
                told = re.search(r"create_graph=True\): give resident_bytes=(\d+)", str(small))
                assert told is not None
                assert int(told[1]) > window
                window = int(told[1])
                sizes.append(window)
                continue
            for mine, wanted in zip(ours.parameters(), theirs.parameters(), strict=True):
                if wanted.grad is not None:
                    assert mine.grad is not None
                    assert torch.equal(mine.grad, wanted.grad)
        break
    assert sizes
    assert window <= 5 * 8192

"""What autograd keeps while our hooks are in force: as much, and as carefully, as without them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import spin_until_collected
from torch.multiprocessing.reductions import StorageWeakRef

from nvmeio._residency.calls import saving


def nothing_of_ours(address: int, offset: int, nbytes: int) -> None:
    return None


def test_a_graph_that_is_dropped_gives_its_outputs_back() -> None:
    """An output was kept with its history, which kept it: a circle that nobody could free."""
    hooks = saving(nothing_of_ours)
    found = torch.randn(100, requires_grad=True).exp()
    del hooks
    storage = StorageWeakRef(found.untyped_storage())
    del found
    spin_until_collected(storage.expired)


@pytest.mark.parametrize("hooked", [False, True])
def test_what_was_changed_in_place_is_refused(hooked: bool) -> None:
    """torch looks for that only where there are no hooks, and computed wrong gradients."""
    hooks: Any = saving(nothing_of_ours) if hooked else None
    start = torch.randn(3, 5, requires_grad=True)
    middle = start * 2
    found = (middle * middle).sum()
    del hooks
    middle.add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: .*\[3, 5\].*is at"):
        found.backward()


def test_a_history_goes_on_through_what_was_kept() -> None:
    """For derivatives of derivatives; of outputs as well, whose history is left out."""

    def second() -> torch.Tensor:
        start = torch.linspace(0.1, 1, 7, dtype=torch.float64).requires_grad_()
        (first,) = torch.autograd.grad(start.exp().square().sum(), start, create_graph=True)
        first.sum().backward()
        assert start.grad is not None
        return start.grad

    wanted = second()
    hooks = saving(nothing_of_ours)
    found = second()
    del hooks
    assert torch.equal(found, wanted)

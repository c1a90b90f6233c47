"""A copy to or from the device fails within a step that the CPU makes of CUDA parameters.

The step is undone, and made again by the next call; or, where the weights are nowhere else, the
optimizer says that it is broken. Nothing is silently wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_accelerator import Accelerator, Pace, accelerator
from test_optimizer_on_device import gradients_of, plain

import nvmeio
from nvmeio.offload import SwappedOptimizer

pytestmark = pytest.mark.slow


@pytest.fixture(params=[Pace.EAGER, Pace.LAZY], ids=lambda pace: pace.name.lower())
def cuda(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Accelerator]:
    with accelerator(monkeypatch, request.param, request.param) as made:
        yield made


class Training:
    """Two steps of a small module in bfloat16, on the device."""

    def __init__(self, cuda: Accelerator, folder: Path, **options: Any) -> None:
        self._cuda = cuda
        self.module = plain(cuda, torch.bfloat16)
        self.optimizer = SwappedOptimizer(
            torch.optim.AdamW,
            self.module.parameters(),
            swap_dir=folder,
            lr=1e-2,
            subgroup_bytes=32 << 10,
            durable=False,
            **options,
        )
        self.backward(0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.backward(1)

    def backward(self, step: int) -> None:
        gradients_of(self.module, self._cuda.tensor, step)

    def weights(self) -> list[torch.Tensor]:
        return [self._cuda.value(p) for p in self.module.parameters()]


class Failing:
    """Copies fail from the one with this number on, counted from now: that one, or all."""

    def __init__(self, cuda: Accelerator, first: int, all_: bool) -> None:
        self.copies = 0
        self._first, self._last = first, None if all_ else first
        cuda.before_begin = self.begin

    def begin(self, number: int) -> None:
        self.copies += 1
        if self._first < self.copies and (self._last is None or self.copies == self._last + 1):
            raise RuntimeError("CUDA error: planted")


def same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return all(torch.equal(mine, theirs) for mine, theirs in zip(found, wanted, strict=True))


OPTIONS: dict[str, dict[str, Any]] = {
    "masters": {"master_dtype": torch.float32},
    "weights": {"recoverable": False},  # on their way through the buffers they come to the drive
    "half of the state": {"ratio": 0.5},
}


@pytest.mark.parametrize("later", ["works", "fails"])
@pytest.mark.parametrize("on_drive", OPTIONS)
def test_a_copy_that_fails_undoes_the_step_or_breaks_the_optimizer(
    on_drive: str, later: str, cuda: Accelerator, tmp_path: Path
) -> None:
    """State that stays in memory is stepped last, and cannot be undone."""
    options, outcomes = OPTIONS[on_drive], []
    with Training(cuda, tmp_path / "whole", **options).optimizer as optimizer:
        whole = Failing(cuda, 1 << 30, False)
        optimizer.step()
        wanted = [cuda.value(p) for group in optimizer.param_groups for p in group["params"]]
    assert whole.copies >= 16
    for first in (0, whole.copies // 4, whole.copies // 2, whole.copies - 1):
        cuda.before_begin = lambda number: None
        training = Training(cuda, tmp_path / str(first), **options)
        with training.optimizer as optimizer:
            before = training.weights()
            failing = Failing(cuda, first, later == "fails")
            with pytest.raises(RuntimeError, match="planted"):
                optimizer.step()
            assert failing.copies > first
            cuda.before_begin = lambda number: None
            try:
                optimizer.step()
            except nvmeio.NvmeioError as broken:
                assert "could not be undone" in str(broken)
                with pytest.raises(nvmeio.NvmeioError, match="could not be undone"):
                    optimizer.step()
                outcomes.append("broken")
                continue
            # The gradients were kept: it is the same step.
            assert same(training.weights(), wanted)
            assert not same(before, wanted)
            outcomes.append("undone")
    if on_drive == "half of the state":
        assert outcomes[-1] == "broken"
    elif later == "works":
        assert outcomes == ["undone"] * 4

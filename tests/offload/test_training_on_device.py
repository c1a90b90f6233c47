"""SwappedOptimizer over a module on a device: the weights of training in memory, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fake_accelerator import EVERY_PACE, Pace, accelerator
from test_module_on_device import WIDTH, model, swapped

from nvmeio.offload import SwappedOptimizer


def train(made: Any, optimizer: Any, place: Any, micro_batches: int, clips: bool) -> list[Any]:
    losses = []
    for step in range(3):
        for number in range(micro_batches):
            generator = torch.Generator().manual_seed(10 * step + number)
            dtype = next(made.parameters()).dtype
            x = torch.randn(3, WIDTH, generator=generator).to(dtype)
            loss = made(place(x)).float().square().mean()
            loss.backward()
            losses.append(loss.detach())
        if clips:
            optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("masters", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("gradients", "clips"),
    [("memory", False), ("disk", False), ("disk", True)],
    ids=["memory", "disk", "disk-clipped"],
)
def test_training_equals_that_in_memory(
    gradients: str, masters: bool, clips: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With micro-batches, whose gradients are added where they go."""
    dtype = torch.bfloat16 if masters else torch.float32
    options: dict[str, Any] = {
        "master_dtype": torch.float32 if masters else None,
        "gradients": gradients,
        "subgroup_bytes": 64 << 10,
        "durable": False,
        "lr": 1e-2,
    }
    ours, theirs = model(3, dtype), model(3, dtype)
    (tmp_path / "theirs").mkdir()
    with SwappedOptimizer(
        torch.optim.AdamW, theirs.parameters(), swap_dir=tmp_path / "theirs", **options
    ) as reference:
        wanted = train(theirs, reference, lambda x: x, 2, clips)
    for compute, copies in [EVERY_PACE[3], (Pace.LAZY, Pace.EAGER)]:
        ours = model(3, dtype)
        with (
            monkeypatch.context() as patch,
            accelerator(patch, compute, copies) as cuda,
            swapped(ours, tmp_path) as module,
            SwappedOptimizer(
                torch.optim.AdamW, module.parameters(), swap_dir=tmp_path, **options
            ) as optimizer,
        ):
            found = train(module, optimizer, cuda.tensor, 2, clips)
            for mine, other in zip(found, wanted, strict=True):
                assert torch.equal(cuda.value(mine), other)
            for name, tensor in module.state_dict().items():
                assert torch.equal(cuda.value(tensor), theirs.state_dict()[name]), name


def test_gradients_on_the_drive_leave_the_device_in_backward(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ours = model()
    with (
        accelerator(monkeypatch) as cuda,
        swapped(ours, tmp_path) as module,
        SwappedOptimizer(
            torch.optim.SGD, module.parameters(), swap_dir=tmp_path, gradients="disk", lr=0.1
        ) as optimizer,
    ):
        x = cuda.tensor(torch.randn(3, WIDTH))
        module(x).square().mean().backward()
        left = [p.grad for p in ours.parameters() if p.grad is not None]
        assert len(left) == 1
        assert left[0].numel() == WIDTH
        assert cuda.has(left[0])
        optimizer.zero_grad()


@pytest.mark.parametrize("pace", EVERY_PACE)
def test_gradients_whose_elements_are_not_in_order_come_down(
    pace: tuple[Pace, Pace], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Set by hand, of parameters in several pieces: each piece is copied, by the right stream."""
    weights, gradients = torch.randn(192, 256), torch.randn(3, 256, 192)
    known = torch.nn.Parameter(weights.clone())
    reference = torch.optim.AdamW([known], lr=1e-2)
    with accelerator(monkeypatch, *pace) as cuda:
        weight = torch.nn.Parameter(cuda.tensor(weights))
        with SwappedOptimizer(
            torch.optim.AdamW,
            [weight],
            swap_dir=tmp_path,
            lr=1e-2,
            subgroup_bytes=64 << 10,
            durable=False,
        ) as optimizer:
            for gradient in gradients:
                weight.grad = cuda.tensor(gradient).T
                known.grad = gradient.T.contiguous()
                optimizer.step()
                reference.step()
                assert torch.equal(cuda.value(weight), known)

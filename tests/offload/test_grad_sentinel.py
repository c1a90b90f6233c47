"""What works on `.grad` while gradients are on the drive: it is noticed, or it is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from _offload_models import assert_same_weights, loss_of, model, train

from nvmeio.offload import SwappedOptimizer


def swapped(made: Any, folder: Path, **options: Any) -> Any:
    return SwappedOptimizer(
        torch.optim.Adam,
        made.parameters(),
        swap_dir=folder,
        gradients="disk",
        durable=False,
        **options,
    )


def bias_first() -> Any:
    """Its smallest parameter is the one that backward reaches first."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(48, 96), torch.nn.ReLU(), torch.nn.Linear(96, 1))


def small_one_frozen() -> Any:
    made = model()
    made[4].weight.requires_grad_(False)
    made[5].bias.requires_grad_(False)
    return made


def small_one_frozen_later() -> Any:
    return model()


@pytest.mark.parametrize("make", [bias_first, small_one_frozen, small_one_frozen_later])
def test_the_models_zero_grad_is_noticed(make: Any, tmp_path: Path) -> None:
    """Gradients of the step before were added to those of the next, without a word."""
    ours, theirs = make(), make()
    reference = torch.optim.Adam(theirs.parameters())
    with swapped(ours, tmp_path) as optimizer:
        if make is small_one_frozen_later:
            ours[4].weight.requires_grad_(False)
            theirs[4].weight.requires_grad_(False)
        for step in range(5):
            for made, stepping in ((ours, optimizer), (theirs, reference)):
                for micro in range(2):
                    loss_of(made, 2 * step + micro).backward()
                stepping.step()
                made.zero_grad()
            assert_same_weights(ours, theirs)


def test_a_scaler_learns_of_what_is_not_finite_though_the_small_one_is_frozen(
    tmp_path: Path,
) -> None:
    """It found no gradient at all, and failed with an AssertionError of torch."""
    results = []
    for ours in (True, False):
        made = model()
        optimizer: Any = swapped(made, tmp_path) if ours else torch.optim.Adam(made.parameters())
        made[4].weight.requires_grad_(False)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
        told = []
        for step in range(6):
            scaler.scale(loss_of(made, step)).backward()
            if step == 2:
                (made[0].weight.sum() * float("inf")).backward()
            scaler.step(optimizer)
            scaler.update()
            made.zero_grad()
            told.append(scaler.get_scale())
        results.append((told, [p.detach().clone() for p in made.parameters()]))
        if ours:
            optimizer.close()
            assert all(p.grad is None for p in made.parameters())
    assert results[0][0] == results[1][0]
    assert all(map(torch.equal, results[0][1], results[1][1]))


def torch_clips(made: Any) -> None:
    torch.nn.utils.clip_grad_norm_(made.parameters(), 0.5)


def torch_clips_nothing(made: Any) -> None:
    torch.nn.utils.clip_grad_norm_(made.parameters(), 1e9)


def torch_clips_values(made: Any) -> None:
    torch.nn.utils.clip_grad_value_(made.parameters(), 0.5)


def zeroes_in_place(made: Any) -> None:
    made.zero_grad(set_to_none=False)


def scales_by_hand(made: Any) -> None:
    for parameter in made.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad * 0.5


def clips_between_micro_batches(made: Any) -> None:
    torch_clips(made)
    loss_of(made, 7).backward()


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        torch_clips,
        torch_clips_nothing,
        torch_clips_values,
        zeroes_in_place,
        scales_by_hand,
        clips_between_micro_batches,
    ],
)
def test_what_reaches_one_gradient_only_is_refused(
    change: Any, frozen: bool, tmp_path: Path
) -> None:
    """torch clipped the one gradient that is in memory, and the others were stepped as they are."""
    ours, theirs = model(), model()
    with swapped(ours, tmp_path) as optimizer:
        for made in (ours, theirs):
            made[4].weight.requires_grad_(not frozen)
        loss_of(ours, 0).backward()
        change(ours)
        for call in (optimizer.step, lambda: optimizer.clip_grad_norm_(1.0)):
            with pytest.raises(RuntimeError, match="clip_grad_norm_ of the optimizer"):
                call()
        assert_same_weights(ours, theirs)
        assert optimizer.generation == 1
        optimizer.zero_grad()
        train(ours, optimizer, 2)
        train(theirs, torch.optim.Adam(theirs.parameters()), 2)
        assert_same_weights(ours, theirs)


def test_a_scaler_beside_torchs_clipping_is_refused(tmp_path: Path) -> None:
    made = model()
    with swapped(made, tmp_path) as optimizer:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        scaler.scale(loss_of(made, 0)).backward()
        torch_clips(made)
        with pytest.raises(RuntimeError, match="clip_grad_norm_ of the optimizer"):
            scaler.step(optimizer)


def test_gradients_that_are_set_by_hand_are_refused(tmp_path: Path) -> None:
    """The one on the drive was stepped in their place."""
    made = model()
    with swapped(made, tmp_path) as optimizer:
        loss_of(made, 0).backward()
        made[0].weight.grad = torch.ones_like(made[0].weight)
        with pytest.raises(RuntimeError, match="parameter 0 has a gradient on the drive, and"):
            optimizer.step()
        optimizer.zero_grad()
        made[0].weight.grad = torch.ones_like(made[0].weight)
        before = made[0].weight.detach().clone()
        optimizer.step()  # there is no other now
        assert not torch.equal(made[0].weight, before)


def test_clipping_twice_is_as_in_memory_and_accumulating_after_it_is_refused(
    tmp_path: Path,
) -> None:
    ours, theirs = model(), model()
    reference = torch.optim.SGD(theirs.parameters(), lr=1e-3)
    with SwappedOptimizer(
        torch.optim.SGD, ours.parameters(), swap_dir=tmp_path, gradients="disk", lr=1e-3
    ) as optimizer:
        for made in (ours, theirs):
            loss_of(made, 0).backward()
        for most in (0.5, 0.25, 4.0):
            norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), most)
            torch.testing.assert_close(optimizer.clip_grad_norm_(most), norm)
        with pytest.raises(RuntimeError, match="after clip_grad_norm_"):
            loss_of(ours, 1).backward()
        optimizer.zero_grad()
        for made, stepping in ((ours, optimizer), (theirs, reference)):
            stepping.zero_grad()
            loss_of(made, 1).backward()
            stepping.step()
        assert_same_weights(ours, theirs)  # and nothing of the clipping is left


def test_a_skipped_step_forgets_its_clipping(tmp_path: Path) -> None:
    """A factor of NaN met the gradients of the next step, if those were not clipped."""
    ours, theirs = model(), model()
    with swapped(ours, tmp_path) as optimizer:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        scaler.scale(loss_of(ours, 0)).backward()
        (ours[0].weight.sum() * float("inf")).backward()
        optimizer.clip_grad_norm_(1.0, scaler=scaler)
        scaler.step(optimizer)
        scaler.update()
        ours.zero_grad()
        train(ours, optimizer, 1)
        train(theirs, torch.optim.Adam(theirs.parameters()), 1)
        assert_same_weights(ours, theirs)


def test_a_step_without_gradients_ends_their_clipping(tmp_path: Path) -> None:
    """Backward refused to add to gradients that nobody had."""
    made = model()
    with swapped(made, tmp_path) as optimizer:
        assert optimizer.clip_grad_norm_(1.0) == 0
        optimizer.step()
        assert not optimizer.gradients_clipped
        train(made, optimizer, 1)
        assert optimizer.generation == 2

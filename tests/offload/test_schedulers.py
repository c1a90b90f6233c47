"""Learning-rate schedulers over an optimizer that resumed go on, bit for bit, or are refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from _offload_models import assert_same_weights, model, train
from offload._swapping import swapped

import nvmeio

lrs = torch.optim.lr_scheduler
SCHEDULERS: dict[str, Any] = {
    "lambda": lambda o: lrs.LambdaLR(o, lambda step: 1 / (step + 1)),
    "cosine": lambda o: lrs.CosineAnnealingLR(o, 20),
    "linear": lambda o: lrs.LinearLR(o, 0.1, 1.0, 8),
    "one-cycle": lambda o: lrs.OneCycleLR(o, 1e-2, total_steps=20),
    "step": lambda o: lrs.StepLR(o, 2),
    "multi-step": lambda o: lrs.MultiStepLR(o, [2, 5, 5]),
    "restarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 3),
    "cyclic": lambda o: lrs.CyclicLR(o, 1e-3, 1e-2, step_size_up=3),
    "one after another": lambda o: lrs.SequentialLR(
        o, [lrs.LinearLR(o, 0.1, 1.0, 4), lrs.CosineAnnealingLR(o, 6)], [4]
    ),
    "chained": lambda o: lrs.ChainedScheduler([lrs.LinearLR(o, 0.1, 1.0, 4), lrs.StepLR(o, 2)]),
}
STEPS = 8


def in_memory(kind: Any) -> tuple[Any, list[Any]]:
    made = model()
    optimizer = torch.optim.Adam(made.parameters(), lr=1e-3)
    scheduler = kind(optimizer)
    told = []
    for step in range(STEPS):
        told.append(rates(optimizer) + train(made, optimizer, 1, step))
        scheduler.step()
    return made, told


def rates(optimizer: Any) -> list[Any]:
    return [optimizer.param_groups[0]["lr"], *optimizer.param_groups[0]["betas"]]


def as_documented(kind: Any, folder: Path, stop: int) -> tuple[Any, list[Any]]:
    """One run of the loop in docs/offload.md, up to a step."""
    made = model()
    with swapped(made, folder, lr=1e-3, resume=True) as optimizer:
        scheduler = kind(optimizer)
        optimizer.keep_scheduler(scheduler)
        told = []
        for step in range(optimizer.generation - 1, stop):
            told.append(rates(optimizer) + train(made, optimizer, 1, step))
            scheduler.step()
        return made, told


@pytest.mark.parametrize(
    "stop", [pytest.param(0, marks=pytest.mark.slow), 1, pytest.param(4, marks=pytest.mark.slow), 5]
)
@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.filterwarnings("ignore:The epoch parameter:UserWarning")  # SequentialLR gives it
def test_a_scheduler_goes_on_as_documented(name: str, stop: int, tmp_path: Path) -> None:
    kind = SCHEDULERS[name]
    wanted, told = in_memory(kind)
    _, before = as_documented(kind, tmp_path, stop)
    found, after = as_documented(kind, tmp_path, STEPS)
    assert before + after == told
    assert_same_weights(found, wanted)


def through_a_checkpoint(
    kind: Any, folder: Path, is_kept: bool, **options: Any
) -> tuple[Any, list[Any]]:
    """Two runs, of which the second begins with a checkpoint of model, optimizer and scheduler."""
    told: list[Any] = []
    for stop in (4, STEPS):
        made = model()
        with (
            swapped(made, folder, lr=1e-3, **options) as optimizer,
            nvmeio.Checkpointer(folder / "checkpoints") as checkpointer,
        ):
            scheduler = kind(optimizer)
            first = checkpointer.resume(model=made, optimizer=optimizer, scheduler=scheduler)
            if is_kept:
                optimizer.keep_scheduler(scheduler)
            for step in range(first, stop):
                told.append(rates(optimizer) + train(made, optimizer, 1, step))
                scheduler.step()
            checkpointer.save_sync(checkpointer.training_state(), stop - 1)
    return made, told


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.filterwarnings("ignore:The epoch parameter:UserWarning")
def test_a_checkpointer_resumes_a_scheduler(name: str, tmp_path: Path) -> None:
    """It loads the optimizer's state after the scheduler was made, as torch's users do."""
    kind = SCHEDULERS[name]
    wanted, told = in_memory(kind)
    found, after = through_a_checkpoint(kind, tmp_path, is_kept=False, overwrite=True)
    assert after == told
    assert_same_weights(found, wanted)


def half_done(folder: Path) -> None:
    as_documented(SCHEDULERS["linear"], folder, 4)


def test_a_scheduler_over_an_optimizer_that_resumed_is_refused(tmp_path: Path) -> None:
    """Making it set lr back to its beginning, and training went on with a tenth of the rate."""
    half_done(tmp_path)
    made = model()
    with swapped(made, tmp_path, lr=1e-3, resume=True) as optimizer:
        generation = optimizer.generation
        optimizer.restore_groups()  # too early: there is no scheduler yet
        scheduler = SCHEDULERS["linear"](optimizer)
        scheduler.load_state_dict(optimizer.param_groups[0]["scheduler"])
        with pytest.raises(RuntimeError, match="restore_groups"):
            train(made, optimizer, 1)
        assert optimizer.generation == generation
        optimizer.restore_groups()
        train(made, optimizer, 1)


def test_a_state_that_is_loaded_needs_no_groups_restored(tmp_path: Path) -> None:
    half_done(tmp_path)
    made = model()
    with swapped(made, tmp_path, lr=1e-3, resume=True) as optimizer:
        state = torch.optim.Adam(model().parameters(), lr=0.5).state_dict()
        SCHEDULERS["linear"](optimizer)
        optimizer.load_state_dict(state)
        optimizer.restore_groups()
        assert optimizer.param_groups[0]["lr"] == 0.5
        train(made, optimizer, 1)


def test_rates_that_are_tensors_come_back(tmp_path: Path) -> None:
    """Schedulers fill such a rate in place."""
    rate = torch.tensor(1e-3)
    with swapped(model(), tmp_path, lr=rate, resume=True) as optimizer:
        made = SCHEDULERS["step"](optimizer)
        for param in optimizer.param_groups[0]["params"]:
            param.grad = torch.ones_like(param)
        for _ in range(3):
            rate = optimizer.param_groups[0]["lr"].clone()
            optimizer.step()
            made.step()
    with swapped(model(), tmp_path, lr=rate, resume=True) as optimizer:
        SCHEDULERS["one-cycle"](optimizer)
        optimizer.restore_groups()
        assert optimizer.param_groups[0]["lr"] == rate


@pytest.mark.parametrize("stops", [(1, 2, 3, 4, 5, 6, 7), (3,), (2, 6)])
def test_a_scheduler_that_steps_once_an_epoch_goes_on(
    stops: tuple[int, ...], tmp_path: Path
) -> None:
    """Epochs of three steps, with restarts at their ends and between."""
    wanted = model()
    optimizer = torch.optim.Adam(wanted.parameters(), lr=1e-3)
    scheduler = lrs.StepLR(optimizer, 1, gamma=0.5)
    told = []
    for step in range(STEPS):
        told.append(rates(optimizer) + train(wanted, optimizer, 1, step))
        if (step + 1) % 3 == 0:
            scheduler.step()
    found = []
    for stop in (*stops, STEPS):
        made = model()
        with swapped(made, tmp_path, lr=1e-3, resume=True) as swapping:
            scheduler = lrs.StepLR(swapping, 1, gamma=0.5)
            swapping.keep_scheduler(scheduler, every=3)
            for step in range(swapping.generation - 1, stop):
                found.append(rates(swapping) + train(made, swapping, 1, step))
                if (step + 1) % 3 == 0:
                    scheduler.step()
    assert found == told
    assert_same_weights(made, wanted)


def test_a_step_that_failed_is_not_counted(tmp_path: Path) -> None:
    with swapped(model(), tmp_path, lr=1e-3) as optimizer:
        scheduler = lrs.StepLR(optimizer, 1)
        optimizer.keep_scheduler(scheduler, every=2)
        group = optimizer.param_groups[0]
        for param in group["params"]:
            param.grad = torch.ones_like(param)
        optimizer.step()
        with pytest.raises(TypeError, match="closure"):
            optimizer.step(lambda: None)
        optimizer.step()
        assert group["scheduler_after"] == 2


def test_schedulers_that_cannot_be_kept_are_refused(tmp_path: Path) -> None:
    with swapped(model(), tmp_path, lr=1e-3) as optimizer:
        with pytest.raises(TypeError, match=r"Checkpointer.resume"):
            optimizer.keep_scheduler(lrs.ReduceLROnPlateau(optimizer))
        with pytest.raises(TypeError, match=r"torch.optim.lr_scheduler, not 3"):
            optimizer.keep_scheduler(3)
        other = torch.optim.SGD(model().parameters(), lr=1.0)
        with pytest.raises(ValueError, match="another optimizer"):
            optimizer.keep_scheduler(lrs.StepLR(other, 1))
        scheduler = lrs.StepLR(optimizer, 1)
        with pytest.raises(ValueError, match="every"):
            optimizer.keep_scheduler(scheduler, every=0)
        optimizer.keep_scheduler(scheduler)
        with pytest.raises(ValueError, match="SequentialLR"):
            optimizer.keep_scheduler(scheduler)


def test_a_loaded_checkpoint_is_not_brought_back_twice(tmp_path: Path) -> None:
    """The scheduler stepped once more, over rates that the checkpoint had stepped already."""
    wanted, told = in_memory(SCHEDULERS["cosine"])
    found, after = through_a_checkpoint(SCHEDULERS["cosine"], tmp_path, is_kept=True, resume=True)
    assert after == told
    assert_same_weights(found, wanted)


@pytest.mark.parametrize("loaded_first", [False, True])
def test_steps_of_a_state_dict_are_counted_on(loaded_first: bool, tmp_path: Path) -> None:
    """They were counted from 0, and an epoch ended elsewhere after the next restart."""
    made = model()
    with swapped(made, tmp_path / "first", lr=1e-3) as optimizer:
        scheduler = lrs.StepLR(optimizer, 1)
        optimizer.keep_scheduler(scheduler, every=3)
        train(made, optimizer, 5)
        state = copy.deepcopy(optimizer.state_dict())
    with swapped(made, tmp_path / "then", lr=1e-3) as optimizer:
        scheduler = lrs.StepLR(optimizer, 1)
        if loaded_first:
            optimizer.load_state_dict(state)
        optimizer.keep_scheduler(scheduler, every=3)
        if not loaded_first:
            train(made, optimizer, 1)
            optimizer.load_state_dict(state)
        train(made, optimizer, 1)
        assert optimizer.param_groups[0]["scheduler_after"] == 6


@pytest.mark.parametrize("gradients", ["memory", "disk"])
def test_a_step_that_a_scaler_leaves_out_is_not_counted(gradients: str, tmp_path: Path) -> None:
    """With gradients on the drive it was counted: the scaler calls `step`, which leaves it out."""
    made = model()
    with swapped(made, tmp_path, lr=1e-3, gradients=gradients) as optimizer:
        scheduler = lrs.StepLR(optimizer, 1)
        optimizer.keep_scheduler(scheduler, every=3)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(4):
            loss = scaler.scale(made(torch.ones(2, 48)).square().mean())
            (loss * (float("inf") if step == 1 else 1)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert optimizer.generation == 4
        assert optimizer.param_groups[0]["scheduler_after"] == 3


def test_a_step_whose_caller_was_interrupted_at_its_end_is_counted(tmp_path: Path) -> None:
    made = model()
    with swapped(made, tmp_path, lr=1e-3) as optimizer:
        scheduler = lrs.StepLR(optimizer, 1)
        optimizer.keep_scheduler(scheduler, every=2)

        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        hook = optimizer.register_step_post_hook(interrupted)
        optimizer._optimizer_step_post_hooks.move_to_end(hook.id, last=False)
        with pytest.raises(KeyboardInterrupt):
            train(made, optimizer, 1)
        hook.remove()
        assert optimizer.generation == 2
        train(made, optimizer, 1)
        assert optimizer.param_groups[0]["scheduler_after"] == 2

"""Whoever asks an optimizer for something while it is at work waits for his turn."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from _offload_models import assert_same_state, assert_same_weights, loss_of, model, train

import nvmeio
from nvmeio.offload import SwappedOptimizer

GRADIENTS = pytest.mark.parametrize("gradients", ["memory", "disk"])


def swapped(made: Any, folder: Path, **options: Any) -> SwappedOptimizer:
    given: dict[str, Any] = {"subgroup_bytes": 64 << 10, **options}
    return SwappedOptimizer(torch.optim.Adam, made.parameters(), swap_dir=folder, **given)


def in_memory(steps: int, batch: int = 0) -> tuple[Any, Any]:
    """A model and its optimizer after so many steps on the same gradients."""
    made = model()
    optimizer = torch.optim.Adam(made.parameters())
    loss_of(made, batch).backward()
    for _ in range(steps):
        optimizer.step()
    return made, optimizer


def together(*works: Callable[[], object]) -> None:
    """Each in a thread of its own, begun at the same moment."""
    failures: list[BaseException] = []
    barrier = threading.Barrier(len(works))

    def run(work: Callable[[], object]) -> None:
        barrier.wait(60)
        try:
            work()
        except BaseException as failed:
            failures.append(failed)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    if failures:
        raise failures[0]


@GRADIENTS
async def test_gathered_steps_are_made_one_after_the_other(gradients: str, tmp_path: Path) -> None:
    """Six at once all said that they had stepped, and the weights were wrong."""
    ours = model()
    theirs, reference = in_memory(6)
    with swapped(ours, tmp_path, gradients=gradients) as optimizer:
        loss_of(ours, 0).backward()
        await asyncio.gather(*(optimizer.async_step() for _ in range(6)))
        assert optimizer.generation == 7
        assert_same_weights(ours, theirs)
        assert_same_state(optimizer.state_dict(), reference.state_dict())


async def test_gathered_steps_are_made_in_order(tmp_path: Path) -> None:
    """Each has the options that were set when it was asked for."""
    ours, theirs = model(), model()
    reference = torch.optim.Adam(theirs.parameters())
    with swapped(ours, tmp_path) as optimizer:
        loss_of(ours, 0).backward()
        loss_of(theirs, 0).backward()
        tasks = []
        for lr in (1e-1, 1e-2, 1e-3):
            optimizer.param_groups[0]["lr"] = reference.param_groups[0]["lr"] = lr
            tasks.append(asyncio.ensure_future(optimizer.async_step()))
            await asyncio.sleep(0)
            reference.step()
        await asyncio.gather(*tasks)
        assert_same_weights(ours, theirs)


@GRADIENTS
def test_threads_step_one_after_the_other(gradients: str, tmp_path: Path) -> None:
    """Two threads in `step` ended in KeyError: 'step', or in wrong weights."""
    ours = model()
    theirs, reference = in_memory(8)
    with swapped(ours, tmp_path, gradients=gradients) as optimizer:
        loss_of(ours, 0).backward()

        def twice() -> None:
            optimizer.step()
            optimizer.step()

        together(twice, twice, twice, twice)
        assert optimizer.generation == 9
        assert_same_weights(ours, theirs)
        assert_same_state(optimizer.state_dict(), reference.state_dict())


@GRADIENTS
async def test_gradients_are_forgotten_after_the_step_that_is_under_way(
    gradients: str, tmp_path: Path
) -> None:
    ours = model()
    theirs, _ = in_memory(1)
    with swapped(ours, tmp_path, gradients=gradients) as optimizer:
        loss_of(ours, 0).backward()
        step = asyncio.ensure_future(optimizer.async_step())
        await asyncio.sleep(0)
        optimizer.zero_grad()
        await step
        assert_same_weights(ours, theirs)
        assert all(p.grad is None for p in ours.parameters())
        await optimizer.async_step()  # there is nothing to step with
        assert_same_weights(ours, theirs)


def weighed(made: Any, by: float) -> torch.Tensor:
    """A loss whose gradient does not depend on the parameters."""
    return torch.stack([(p * by).sum() for p in made.parameters()]).sum()


async def test_backward_waits_for_the_step_with_gradients_on_the_drive(tmp_path: Path) -> None:
    """What it makes is of the next step, and not of this one."""
    ours, theirs = model(), model()
    reference = torch.optim.Adam(theirs.parameters())
    for by in (1.0, 2.0):
        reference.zero_grad()
        weighed(theirs, by).backward()
        reference.step()
    with swapped(ours, tmp_path, gradients="disk") as optimizer:
        weighed(ours, 1.0).backward()
        second = weighed(ours, 2.0)
        step = asyncio.ensure_future(optimizer.async_step())
        await asyncio.sleep(0)
        optimizer.zero_grad()
        second.backward()
        await step
        optimizer.step()
        assert_same_weights(ours, theirs)


def test_whoever_looks_during_a_step_sees_all_of_it_or_nothing(tmp_path: Path) -> None:
    """state_dict, snapshot and reload_weights beside steps of another thread."""
    ours = model()
    with swapped(ours, tmp_path, resume=True) as optimizer:
        loss_of(ours, 0).backward()
        optimizer.step()
        counts: list[set[float]] = []

        def steps() -> None:
            for _ in range(10):
                optimizer.step()

        def look() -> None:
            for number in range(5):
                entries = optimizer.state_dict()["state"].values()
                counts.append({float(entry["step"]) for entry in entries})
                optimizer.snapshot(tmp_path / f"copy{number}")
                optimizer.reload_weights()

        together(steps, look)
        assert all(len(each) == 1 for each in counts)
        assert optimizer.generation == 2 + 10 + 5
    for number in range(5):
        again = model()
        with swapped(again, tmp_path / f"copy{number}", resume=True) as copied:
            steps_made = {float(entry["step"]) for entry in copied.state_dict()["state"].values()}
            assert len(steps_made) == 1
            theirs, _ = in_memory(int(steps_made.pop()))
            assert_same_weights(again, theirs)


async def test_a_cancelled_step_has_not_happened(tmp_path: Path) -> None:
    """And may be made again; those behind it are made."""
    ours, theirs = model(), model()
    with swapped(ours, tmp_path) as optimizer:
        loss_of(ours, 0).backward()
        for _ in range(3):
            before = [p.detach().clone() for p in ours.parameters()]
            task = asyncio.ensure_future(optimizer.async_step())
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert optimizer.generation == 1
            assert all(map(torch.equal, ours.parameters(), before))
        tasks = [asyncio.ensure_future(optimizer.async_step()) for _ in range(3)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        await asyncio.wait(tasks)
        assert tasks[1].cancelled()
        assert optimizer.generation == 3
    theirs, _ = in_memory(2)
    assert_same_weights(ours, theirs)


def test_closing_waits_for_the_step(tmp_path: Path) -> None:
    ours = model()
    optimizer = swapped(ours, tmp_path, resume=True)
    train(ours, optimizer, 1)
    loss_of(ours, 1).backward()
    begun = threading.Event()

    def steps() -> None:
        optimizer.step()
        begun.set()
        while not optimizer.closed:
            try:
                optimizer.step()
            except RuntimeError:
                return

    def close() -> None:
        assert begun.wait(60)
        optimizer.close()

    with contextlib.suppress(nvmeio.ClosedError):
        together(steps, close)
    again = model()
    with swapped(again, tmp_path, resume=True):
        assert_same_weights(again, ours)

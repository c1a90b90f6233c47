"""Work on a device in random orders that it may choose, and on a device that is not the first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_accelerator import Accelerator, Pace, accelerator
from inference.test_training import data, empty, saved, unit_bytes
from offload.test_activations_on_device import gradients_in_memory, step, window
from offload.test_module_on_device import in_memory, losses_of, model, swapped

import nvmeio


def streams(cuda: Accelerator, folder: Path, device: str = "cuda") -> None:
    path = folder / "base.safetensors"
    whole = saved(path, 4)
    streamed = nvmeio.stream_model(empty(4), path, device=device, resident_bytes=3 * unit_bytes())
    try:
        with torch.cuda.device(device), torch.no_grad():
            found = [streamed(cuda.tensor(data(number))) for number in range(2)]
            assert [
                torch.equal(cuda.value(each), whole(data(number)))
                for number, each in enumerate(found)
            ] == [True, True]
    finally:
        streamed.weight_stream.close()


def trains(cuda: Accelerator, folder: Path, device: str = "cuda") -> None:
    losses, gradients = in_memory()
    made = model()
    with swapped(made, folder, device=device) as module, torch.cuda.device(device):
        found = losses_of(module, cuda.tensor)
        pairs = [*zip(found, losses, strict=True)]
        pairs += zip([p.grad for p in made.parameters()], gradients, strict=True)
        assert all(torch.equal(cuda.value(mine), theirs) for mine, theirs in pairs)


def saves_activations(cuda: Accelerator, folder: Path, device: str = "cuda") -> None:
    with window(folder) as kept, torch.cuda.device(device):
        assert not step(cuda, kept, gradients_in_memory())


WORKS: list[Callable[..., None]] = [streams, trains, saves_activations]


@pytest.mark.parametrize("work", WORKS)
def test_work_on_another_device_makes_no_context_on_the_first(
    work: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Some 400 MB of each rank's on GPU 0."""
    with accelerator(monkeypatch) as cuda:
        work(cuda, tmp_path, "cuda:1")
        assert cuda.contexts == {1}


def in_random_order(
    work: Callable[..., None], seed: int, monkeypatch: pytest.MonkeyPatch, folder: Any
) -> None:
    folder.mkdir()
    with (
        monkeypatch.context() as patch,
        accelerator(patch, Pace.RANDOM, Pace.RANDOM, seed) as cuda,
    ):
        work(cuda, folder)


@pytest.mark.parametrize("work", WORKS)
def test_work_in_some_random_orders(
    work: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for seed in range(3):
        in_random_order(work, seed, monkeypatch, tmp_path / str(seed))


@pytest.mark.stress
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("work", WORKS)
def test_work_in_hundreds_of_random_orders(
    work: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for seed in range(1000, 1300):
        in_random_order(work, seed, monkeypatch, tmp_path / str(seed))

"""Work on a device in random orders that it may choose, and on a device that is not the first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from device.works import WORKS, WORKS_OF_A_MESH, saves_activations, streams, trains
from fake_accelerator import Pace, accelerator
from support import run_ranks

HERE = Path(__file__).parent


@pytest.mark.parametrize("work", [streams, trains, saves_activations])  # told "cuda" alone
def test_the_current_device_is_the_caller_s(
    work: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A model that was streamed to "cuda" went to the first device, whose owner's thread is there.

    So did its contexts.
    """
    with accelerator(monkeypatch) as cuda:
        cuda.set_device(1)
        work(cuda, tmp_path)
        assert cuda.contexts == {1}


@pytest.mark.parametrize("work", WORKS)
def test_work_on_another_device_makes_no_context_on_the_first(
    work: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Some 400 MB of each rank's on GPU 0."""
    with accelerator(monkeypatch, Pace.RANDOM, Pace.RANDOM, 1) as cuda:
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


@pytest.mark.slow
@pytest.mark.parametrize("work", WORKS + WORKS_OF_A_MESH)
def test_work_in_some_random_orders(
    work: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for seed in range(3):
        in_random_order(work, seed, monkeypatch, tmp_path / str(seed))


@pytest.mark.stress
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("work", WORKS + WORKS_OF_A_MESH)
def test_work_in_hundreds_of_random_orders(
    work: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for seed in range(1000, 1300):
        in_random_order(work, seed, monkeypatch, tmp_path / str(seed))


@pytest.mark.skipif(not dist.is_gloo_available(), reason="torch is built without gloo")
def test_ranks_stream_to_a_device_each(tmp_path: Path) -> None:
    """Each byte is read by one rank; no rank makes a context on another's device."""
    for status, told in run_ranks(HERE / "_rank.py", 2, tmp_path):
        assert status == 0, told

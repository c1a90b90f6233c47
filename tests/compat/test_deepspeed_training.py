"""DeepSpeed's ZeRO-3 with optimizer and parameters on disk, unchanged, on nvmeio."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from _deepspeed_support import (
    COMPILE_LIMIT_S,
    TIME_LIMIT_S,
    Training,
    free_port,
    needs_deepspeed,
    needs_its_own_op,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
]  # several runs of minutes each, on a busy machine

STEPS = 5
BF16 = {"config": {"bf16": {"enabled": True}}}


@pytest.fixture(scope="module")
def in_memory(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """The result of a training with nothing on disk; each is run once.

    In half precision, and over several ranks at odd sizes, DeepSpeed's offloading computes with
    other roundings; the standard is then a training that offloads to memory (``device="cpu"``).
    """
    known: dict[str, dict[str, Any]] = {}

    def train(**options: Any) -> dict[str, Any]:
        if repr(options) not in known:
            directory = tmp_path_factory.mktemp("memory") / "run"
            defaults = {"device": None, "last": STEPS}
            known[repr(options)] = Training(directory, **(defaults | options)).result()
        return known[repr(options)]

    return train


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "pipelined": {"pipelined": True},
    "pipelined over three lanes": {
        "pipelined": True,
        "aio": {"intra_op_parallelism": 3, "overlap_events": False, "single_submit": True},
    },
}


@needs_deepspeed
@pytest.mark.parametrize("way", WAYS)
def test_same_losses_and_parameters_as_in_memory(
    way: str, tmp_path: Path, in_memory: Callable[..., dict[str, Any]]
) -> None:
    on_disk = Training(tmp_path / "run", last=STEPS, **WAYS[way])
    expected = in_memory()
    assert on_disk.result() == expected


@needs_its_own_op
@pytest.mark.timeout(3 * COMPILE_LIMIT_S)
@pytest.mark.parametrize("pipelined", [False, True])
def test_same_losses_and_parameters_as_on_deepspeeds_own_op(
    pipelined: bool, tmp_path: Path
) -> None:
    """With DeepSpeed's own Adam, whose arithmetic is not quite the same in memory and on disk."""
    options = {"optimizer": "cpu_adam", "sizes": "even", "pipelined": pipelined, "last": STEPS}
    own = Training(tmp_path / "own", on_nvmeio=False, **options)
    ours = Training(tmp_path / "ours", **options)
    assert ours.result(COMPILE_LIMIT_S) == own.result(COMPILE_LIMIT_S)


@needs_its_own_op
@pytest.mark.timeout(2 * COMPILE_LIMIT_S)
def test_deepspeeds_own_op_trains_with_wrong_gradients_at_odd_sizes(
    tmp_path: Path, in_memory: Callable[..., dict[str, Any]]
) -> None:
    """What docs/deepspeed.md says of it, and the reason for "even" sizes in the test above."""
    own = Training(tmp_path / "own", on_nvmeio=False, last=STEPS).result(COMPILE_LIMIT_S)
    expected = in_memory()
    assert own["losses"][0] == expected["losses"][0]
    assert abs(own["losses"][1] / expected["losses"][1] - 1) > 1e-3


@needs_deepspeed
def test_checkpoint_continues_bit_by_bit(tmp_path: Path) -> None:
    saved = {"save": str(tmp_path / "checkpoint"), "save_after": 3}
    whole = Training(tmp_path / "whole", last=STEPS, **saved).result()
    rest = Training(
        tmp_path / "rest", first=3, last=STEPS, load=str(tmp_path / "checkpoint")
    ).result()
    assert rest["losses"] == whole["losses"][3:]
    assert rest["parameters"] == whole["parameters"]


@needs_deepspeed
def test_two_trainings_at_once(tmp_path: Path, in_memory: Callable[..., dict[str, Any]]) -> None:
    both = [
        Training(tmp_path / "one", last=STEPS, pipelined=True),
        Training(tmp_path / "two", last=STEPS, **BF16),
    ]
    results = [training.result() for training in both]
    assert results == [in_memory(), in_memory(device="cpu", **BF16)]


@needs_deepspeed
def test_two_ranks(tmp_path: Path, in_memory: Callable[..., dict[str, Any]]) -> None:
    """Started by DeepSpeed's own launcher, itself started by `nvmeio deepspeed`."""
    port = str(free_port())
    launcher = ("-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--master_port", port)
    on_disk = Training(tmp_path / "run", launcher=launcher, pipelined=True, last=STEPS).result()
    assert on_disk == in_memory(device="cpu", ranks=2)
    assert {path.name for path in tmp_path.rglob("rank*")} == {"rank0", "rank1"}


@needs_deepspeed
def test_fast_checkpoints_from_a_spawned_process(tmp_path: Path) -> None:
    """DeepSpeed's decoupled writer saves in a child, from memory that is pinned natively."""
    writer = {"type": "fast", "io_buffer_size": 1 << 22, "decoupled": True}
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    Training(
        tmp_path / "run",
        last=2,
        save=str(checkpoint),
        save_after=1,
        config={"checkpoint": {"writer": {**writer, "show_statistics": True}}},
        environment={
            "DS_PIN_MEMORY_BACKEND": "native",
            # As DeepSpeed's launcher sets them.
            **{"CROSS_RANK": "0", "CROSS_SIZE": "1", "LOCAL_SIZE": "1"},
        },
    ).result(TIME_LIMIT_S)
    files = sorted(checkpoint.rglob("*_states.pt"))
    assert len(files) == 2
    for file in files:
        assert torch.load(file, weights_only=False)
    assert os.path.getsize(next(checkpoint.rglob("exp_avg-*.swp"))) > 1 << 20

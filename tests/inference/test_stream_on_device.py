"""A model that streams to a device computes what it computes in memory (`fake_accelerator`)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fake_accelerator import Accelerator, Pace, accelerator
from test_training import data, empty, saved, unit_bytes

import nvmeio
from nvmeio import _device

LAYERS = 5
EVERY_PACE = [(compute, copies) for compute in Pace for copies in Pace]


def computed(path: Path, cuda: Accelerator, dtype: torch.dtype, units: int) -> list[torch.Tensor]:
    """Three passes, of which nothing is looked at before the end."""
    model = nvmeio.stream_model(
        empty(LAYERS), path, device="cuda", dtype=dtype, resident_bytes=units * unit_bytes()
    )
    try:
        with torch.no_grad():
            found = [model(cuda.tensor(data(n)).to(dtype)) for n in range(3)]
        return [cuda.value(each) for each in found]
    finally:
        model.weight_stream.close()


@pytest.mark.parametrize(
    ("dtype", "pace"),
    [
        *((torch.float32, pace) for pace in EVERY_PACE),
        (torch.bfloat16, (Pace.LAZY, Pace.EAGER)),
        (torch.bfloat16, (Pace.EAGER, Pace.LAZY)),
    ],
)
def test_passes_equal_those_in_memory(
    pace: tuple[Pace, Pace], dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two layers stream through memory for two, beside what stays."""
    whole = saved(tmp_path / "base.safetensors", LAYERS).to(dtype)
    with torch.no_grad():
        wanted = [whole(data(number).to(dtype)) for number in range(3)]
    with accelerator(monkeypatch, *pace) as cuda:
        found = computed(tmp_path / "base.safetensors", cuda, dtype, 4)
    assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize(
    ("missing", "compute", "copies"),
    [
        ("compute does not wait for copies", Pace.EAGER, Pace.LAZY),
        ("copies do not wait for compute", Pace.LAZY, Pace.EAGER),
        ("memory is read into before it was copied on", Pace.LAZY, Pace.LAZY),
    ],
)
def test_a_missing_wait_shows(
    missing: str, compute: Pace, copies: Pace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = saved(tmp_path / "base.safetensors", LAYERS)
    with torch.no_grad():
        wanted = [whole(data(number)) for number in range(3)]
    with monkeypatch.context() as patch, accelerator(patch, compute, copies) as cuda:
        if missing == "compute does not wait for copies":
            patch.setattr(_device, "come_after", lambda stream, mark: None)
        elif missing == "copies do not wait for compute":
            patch.setattr(_device._SideStream, "after", lambda self, mark: None)
        else:
            patch.setattr(_device._CudaMark, "wait", lambda self: None)
        found = computed(tmp_path / "base.safetensors", cuda, torch.float32, 2)
    assert not all(map(torch.equal, found, wanted))

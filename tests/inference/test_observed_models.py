"""A streamed model and a pack as they are seen: progress, log, ranges."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from inference._models import llama, saved
from inference.test_models import empty_net, saved_net
from torch.profiler import profile

from nvmeio.inference.packing import pack

Make = Callable[..., Any]
Told = list[tuple[str, int, int]]


@torch.no_grad()
def test_each_pass_goes_from_nothing_to_all_layers(tmp_path: Path, stream: Make) -> None:
    told: Told = []
    saved_net(tmp_path / "net.safetensors")
    net = stream(
        empty_net(),
        tmp_path / "net.safetensors",
        resident_bytes=150_000,
        progress=lambda *event: told.append(event),
    )
    assert told == []
    total = sum(unit.streamed_bytes for unit in net.weight_stream.units)
    for _ in range(2):
        told.clear()
        net(torch.randn(5, 16))
        assert told[0] == ("pass", 0, total)
        assert told[-1][1:] == (total, total)
        assert [name for name, *_ in told[1:]] == [unit.name for unit in net.weight_stream.units]


@torch.no_grad()
@pytest.mark.parametrize("call", [1, 3])
def test_a_progress_that_raises_goes_through_the_forward(
    call: int, tmp_path: Path, stream: Make
) -> None:
    """And the model can be used again, with the same result."""
    saved_net(tmp_path / "net.safetensors")
    net = stream(empty_net(), tmp_path / "net.safetensors", resident_bytes=150_000)
    x = torch.randn(5, 16)
    wanted = net(x)
    told: Told = []

    def progress(*event: Any) -> None:
        told.append(event)
        if len(told) == call:
            raise KeyError("mine")

    net.weight_stream.progress = progress
    with pytest.raises(KeyError, match="mine"):
        net(x)
    assert torch.equal(net(x), wanted)


@torch.no_grad()
def test_opening_is_logged_and_a_range_and_so_are_the_waits(
    tmp_path: Path, stream: Make, caplog: pytest.LogCaptureFixture
) -> None:
    saved_net(tmp_path / "net.safetensors")
    with caplog.at_level(logging.INFO, "nvmeio"), profile() as found:
        net = stream(empty_net(), tmp_path / "net.safetensors", resident_bytes=150_000)
        net(torch.randn(5, 16))
    [line] = [r.getMessage() for r in caplog.records if r.levelno == logging.INFO]
    assert line.startswith(f"opened a stream of {tmp_path}/net.safetensors: ")
    names = {event.name for event in found.events()}
    waits = {f"nvmeio::wait {unit.name}" for unit in net.weight_stream.units}
    assert {"nvmeio::stream_model plan", "nvmeio::stream_model open", *waits} <= names


def test_a_pack_tells_of_its_layers_and_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told: Told = []
    source = saved(partial(llama, layers=2), tmp_path / "model")
    with caplog.at_level(logging.INFO, "nvmeio"):
        report = pack(source, tmp_path / "packed", progress=lambda *event: told.append(event))
    assert told[0] == ("pack packed", 0, report.bytes_written)
    assert told[-1][1:] == (report.bytes_written, report.bytes_written)
    assert any("layers.1" in name for name, *_ in told)
    [line] = [r.getMessage() for r in caplog.records if r.levelno == logging.INFO]
    assert line.startswith(f"packed {tmp_path}/packed: {report.bytes_written} bytes in ")


def test_a_progress_that_raises_leaves_nothing_of_a_pack(tmp_path: Path) -> None:
    def progress(what: str, done: int, total: int) -> None:
        if done == total:
            raise KeyError("mine")

    source = saved(partial(llama, layers=2), tmp_path / "model")
    with pytest.raises(KeyError, match="mine"):
        pack(source, tmp_path / "packed", progress=progress)
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]

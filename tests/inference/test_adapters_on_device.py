"""Adapters trained on a device over a base that streams to it: losses and gradients of memory.

A pass is asked of the device whole before anybody looks at its loss (`fake_accelerator`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_accelerator import EVERY_PACE, Accelerator, Pace, accelerator
from test_training import adapted, by_three, by_unit, data, empty, plain, saved, unit_bytes
from torch import nn

import nvmeio
from nvmeio._memory import devices
from nvmeio._residency.on_device import DevicePool
from nvmeio.checkpoint.safetensors import save_safetensors
from nvmeio.errors import ClosedError
from nvmeio.inference._plan.quantization import Quantised, dequantise, quantise
from nvmeio.inference._stream import slots

LAYERS = 5
Place = Callable[[torch.Tensor], torch.Tensor]


def adapters(model: nn.Module, place: Place) -> list[nn.Parameter]:
    """As `adapted` makes them, on a device; returns what is trained."""
    trained = {id(parameter) for parameter in adapted(model)}
    found = []
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if id(parameter) in trained and parameter is not None:
                there = nn.Parameter(place(parameter.detach()))
                module._parameters[name] = there
                found.append(there)
    return found


def trained(model: nn.Module, place: Place, forward: Any, steps: int) -> tuple[list[Any], Any]:
    """Losses, and the gradients of the last step."""
    parameters = adapters(model, place)
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = forward(model, place(data(step))).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, [parameter.grad for parameter in parameters]


def streamed(path: Path, **options: Any) -> Any:
    options.setdefault("resident_bytes", 2 * unit_bytes())
    return nvmeio.stream_model(empty(LAYERS), path, trainable=True, device="cuda", **options)


def same(cuda: Accelerator, found: Any, wanted: Any) -> bool:
    return all(
        torch.equal(cuda.value(mine), theirs)
        for mine, theirs in zip([*found[0], *found[1]], [*wanted[0], *wanted[1]], strict=True)
    )


@pytest.fixture
def base(tmp_path: Path) -> tuple[nn.Module, Path]:
    path = tmp_path / "base.safetensors"
    return saved(path, LAYERS), path


@pytest.mark.parametrize(
    ("forward", "pace"),
    [*((plain, pace) for pace in EVERY_PACE), (by_unit, (Pace.LAZY, Pace.LAZY))],
)
def test_losses_and_gradients_equal_those_in_memory(
    forward: Any, pace: tuple[Pace, Pace], base: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, path = base
    wanted = trained(whole, lambda x: x, forward, 2)
    with accelerator(monkeypatch, *pace) as cuda:
        model = streamed(path)
        try:
            found = trained(model, cuda.tensor, forward, 2)
            assert same(cuda, found, wanted)
            stats = model.weight_stream.stats
            assert stats.bytes_read > stats.streamed_bytes
        finally:
            model.weight_stream.close()


@pytest.mark.parametrize("layers", [3, LAYERS])
def test_what_stays_and_what_streams_are_computed_with_alike(
    layers: int, base: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, path = base
    wanted = trained(whole, lambda x: x, by_three, 2)
    with accelerator(monkeypatch) as cuda:
        model = streamed(path, resident_bytes=(layers + 2) * unit_bytes())
        try:
            assert same(cuda, trained(model, cuda.tensor, by_three, 2), wanted)
        finally:
            model.weight_stream.close()


@pytest.mark.parametrize(
    ("missing", "compute", "copies"),
    [
        ("compute does not wait for copies", Pace.EAGER, Pace.LAZY),
        ("copies do not wait for compute", Pace.LAZY, Pace.EAGER),
        ("memory is read into before it was copied on", Pace.LAZY, Pace.LAZY),
    ],
)
def test_a_missing_wait_shows(
    missing: str, compute: Pace, copies: Pace, base: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, path = base
    wanted = trained(whole, lambda x: x, plain, 2)
    with monkeypatch.context() as patch, accelerator(patch, compute, copies) as cuda:
        if missing == "compute does not wait for copies":
            patch.setattr(devices, "come_after", lambda stream, mark: None)
        elif missing == "copies do not wait for compute":
            patch.setattr(devices.Beside, "follow", lambda self, stream=None: None)
        else:
            patch.setattr(devices.CudaMark, "wait", lambda self: None)
        model = streamed(path)
        try:
            assert not same(cuda, trained(model, cuda.tensor, plain, 2), wanted)
        finally:
            model.weight_stream.close()
        assert cuda.forgive()


def test_the_device_holds_a_window_of_the_base_at_a_time(
    base: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is used again when the last tensor over it is gone; a full device says so."""
    whole, path = base
    wanted = trained(whole, lambda x: x, plain, 1)
    pools: list[DevicePool] = []

    def new(*given: Any) -> DevicePool:
        pools.append(DevicePool(*given))
        return pools[-1]

    monkeypatch.setattr(slots, "DevicePool", new)
    with accelerator(monkeypatch) as cuda:
        model = streamed(path)
        try:
            assert same(cuda, trained(model, cuda.tensor, plain, 1), wanted)
            assert pools and all(pool.in_use_bytes <= pool.budget_bytes for pool in pools)
            assert sum(pool.budget_bytes for pool in pools) < sum(
                p.nbytes for p in whole.parameters()
            )
        finally:
            model.weight_stream.close()


@pytest.mark.parametrize("pace", [(Pace.LAZY, Pace.EAGER), (Pace.EAGER, Pace.LAZY)])
def test_weights_that_are_converted_are_so_on_the_device(
    pace: tuple[Pace, Pace], base: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose memory is lent too, and computed in after whoever had it."""
    whole, path = base
    whole = whole.to(torch.bfloat16)
    save_safetensors(whole.state_dict(), path)
    wanted = trained(whole.float(), lambda x: x, plain, 2)
    with accelerator(monkeypatch, *pace) as cuda:
        model = streamed(path, dtype=torch.float32, resident_bytes=4 * unit_bytes())
        try:
            assert same(cuda, trained(model, cuda.tensor, plain, 2), wanted)
            assert model.weight_stream.stats.work_bytes
        finally:
            model.weight_stream.close()


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantised_weight_is_widened_on_the_device(
    bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = Quantised(bits, 32)
    parts = quantise(torch.randn(8, 64), setting)
    wanted = torch.empty(8, 64)
    dequantise(parts, setting, wanted)
    with accelerator(monkeypatch) as cuda:
        out = cuda.tensor(torch.empty(8, 64))
        there = [cuda.tensor(part) for part in parts]
        dequantise(there, setting, out)
        assert torch.equal(cuda.value(out), wanted)


def test_a_graph_outlives_a_close_and_a_reopening(
    base: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, path = base
    theirs = adapters(whole, lambda x: x)
    whole(data(0)).square().mean().backward()
    with accelerator(monkeypatch) as cuda:
        model = streamed(path)
        try:
            parameters = adapters(model, cuda.tensor)
            loss = model(cuda.tensor(data(0))).square().mean()
            model.weight_stream.close()
            with pytest.raises(ClosedError, match="reopen"):
                loss.backward()
            model.weight_stream.reopen()
            for parameter in parameters:
                parameter.grad = None
            loss = model(cuda.tensor(data(0))).square().mean()
            model.weight_stream.close()
            model.weight_stream.reopen()
            loss.backward()
            for mine, other in zip(parameters, theirs, strict=True):
                assert mine.grad is not None and other.grad is not None
                # Some processors multiply otherwise where memory is aligned otherwise.
                torch.testing.assert_close(cuda.value(mine.grad), other.grad)
        finally:
            model.weight_stream.close()


def test_a_full_device_is_told_and_used_when_it_is_not(
    base: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, path = base
    wanted = trained(whole, lambda x: x, plain, 1)
    with accelerator(monkeypatch) as cuda:
        model = streamed(path)
        try:
            cuda.limit_bytes = cuda.in_use_bytes + unit_bytes() // 2
            with pytest.raises(MemoryError, match=r"there is no room for .* in the window") as told:
                model(cuda.tensor(data(0)))
            assert isinstance(told.value.__cause__, torch.OutOfMemoryError)
            cuda.limit_bytes = 1 << 28
            assert same(cuda, trained(model, cuda.tensor, plain, 1), wanted)
        finally:
            model.weight_stream.close()


def test_several_streams_of_the_caller_s_compute_with_converted_weights(
    base: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, path = base
    whole = whole.to(torch.bfloat16)
    save_safetensors(whole.state_dict(), path)
    with torch.no_grad():
        wanted = [whole.float()(data(number)) for number in range(3)]
    with accelerator(monkeypatch, Pace.LAZY, Pace.EAGER) as cuda:
        model = streamed(path, dtype=torch.float32, resident_bytes=4 * unit_bytes())
        try:
            found = []
            other: Any = cuda.Stream(torch.device("cuda", 0))
            with torch.no_grad():
                found.append(model(cuda.tensor(data(0))))
                with cuda.stream(other):
                    found.append(model(cuda.tensor(data(1))))
                found.append(model(cuda.tensor(data(2))))
            equal = [torch.equal(cuda.value(a), b) for a, b in zip(found, wanted, strict=True)]
            assert all(equal)
        finally:
            model.weight_stream.close()


@pytest.mark.parametrize("pace", EVERY_PACE)
def test_a_weight_that_is_looked_at_comes_to_the_device(
    pace: tuple[Pace, Pace], base: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, path = base
    with accelerator(monkeypatch, *pace) as cuda:
        model = streamed(path)
        try:
            for _ in range(2):
                for layer, known in zip(model, whole, strict=True):
                    found = torch.linalg.norm(layer.wide.weight, dim=1)
                    assert torch.equal(
                        cuda.value(found), torch.linalg.norm(known.wide.weight, dim=1)
                    )
        finally:
            model.weight_stream.close()

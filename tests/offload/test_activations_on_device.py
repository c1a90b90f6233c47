"""Saved tensors of a device: gradients of memory, bit for bit, whatever its streams do when.

A step is asked of the device whole before anybody looks at it (`fake_accelerator`).
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import interrupting
import pytest
import torch
from fake_accelerator import DEVICE, EVERY_PACE, Accelerator, Pace, accelerator
from offload._saved_activations import Doubles, made, small
from support import spin_until, spin_until_collected
from torch import nn

import nvmeio
from nvmeio._memory import devices
from nvmeio.offload import SwappedActivations
from nvmeio.offload.activations._on_device import DeviceActivations
from nvmeio.testing import FakeEngine


def gradients_in_memory(name: str = "mlp") -> list[torch.Tensor]:
    module, x = made(name)
    module(x).square().mean().backward()
    return [p.grad for p in module.parameters() if p.grad is not None]


def moved(cuda: Accelerator, name: str = "mlp") -> tuple[nn.Module, torch.Tensor]:
    module, x = made(name)
    for each in module.modules():
        for key, parameter in each._parameters.items():
            if parameter is not None:
                each._parameters[key] = nn.Parameter(cuda.tensor(parameter.detach()))
    return module, cuda.tensor(x)


def loss_of(swapped: SwappedActivations, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with swapped.saving():
        loss: torch.Tensor = module(x).square().mean()
        return loss


def differing(cuda: Accelerator, module: nn.Module, wanted: list[torch.Tensor]) -> list[int]:
    found = [cuda.value(p.grad) for p in module.parameters() if p.grad is not None]
    pairs = enumerate(zip(found, wanted, strict=True))
    module.zero_grad()
    return [number for number, (a, b) in pairs if not torch.equal(a, b)]


def step(cuda: Accelerator, swapped: SwappedActivations, wanted: list[torch.Tensor]) -> list[int]:
    module, x = moved(cuda)
    loss_of(swapped, module, x).backward()
    return differing(cuda, module, wanted)


def window(folder: Path, handle: nvmeio.AioHandle | None = None, **options: Any) -> Any:
    return small(folder, handle, **{"resident_bytes": 65536, "device_bytes": 65536, **options})


@pytest.mark.parametrize(
    ("name", "pace"),
    [*(("mlp", pace) for pace in EVERY_PACE), ("attention", (Pace.LAZY, Pace.LAZY))],
)
def test_gradients_are_those_in_memory(
    name: str, pace: tuple[Pace, Pace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = gradients_in_memory(name)
    resident = 8192 if name == "attention" else 65536  # less than one of them
    with (
        accelerator(monkeypatch, *pace) as cuda,
        window(tmp_path, resident_bytes=resident) as swapped,
    ):
        module, x = moved(cuda, name)
        for _ in range(2):
            read = swapped.bytes_read
            loss = loss_of(swapped, module, x)
            assert swapped.on_device_bytes <= 32768
            loss.backward()
            assert not differing(cuda, module, wanted)
            assert swapped.bytes_read > read, "nothing was on the drive"
        del loss
        spin_until_collected(
            lambda: swapped.on_drive_bytes + swapped.in_memory_bytes + swapped.on_device_bytes == 0
        )


@pytest.mark.parametrize(
    ("missing", "compute", "copies"),
    [
        ("compute does not wait for copies", Pace.EAGER, Pace.LAZY),
        ("copies do not wait for compute", Pace.LAZY, Pace.EAGER),
        ("memory is let go before it was copied", Pace.EAGER, Pace.LAZY),
    ],
)
def test_a_missing_wait_shows(
    missing: str,
    compute: Pace,
    copies: Pace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = gradients_in_memory()
    with monkeypatch.context() as patch, accelerator(patch, compute, copies) as cuda:
        if missing == "compute does not wait for copies":
            patch.setattr(devices, "come_after", lambda stream, mark: None)
        elif missing == "copies do not wait for compute":
            patch.setattr(devices.Beside, "follow", lambda self, stream=None: None)
        else:
            patch.setattr(devices.CudaMark, "done", lambda self: True)
        with window(tmp_path, checksum=False) as swapped:
            assert step(cuda, swapped, wanted)
        assert cuda.forgive()


def test_the_device_holds_a_window_of_what_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most: list[int] = []
    for device_bytes in (1 << 20, 32768):
        with (
            monkeypatch.context() as patch,
            accelerator(patch) as cuda,
            window(tmp_path, device_bytes=device_bytes) as swapped,
        ):
            module, x = moved(cuda)
            x = cuda.tensor(cuda.value(x).repeat(4, 1))
            cuda.most_bytes = cuda.in_use_bytes
            before = cuda.in_use_bytes
            loss_of(swapped, module, x).backward()
            most.append(cuda.most_bytes - before)
            assert swapped.device_bytes == device_bytes
            assert (swapped.bytes_written > 0) == (device_bytes == 32768)
            nbytes = x.nbytes
    assert most[1] < most[0] - 6 * nbytes


def test_what_somebody_holds_stays_and_what_was_changed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with accelerator(monkeypatch) as cuda, window(tmp_path) as swapped:
        module, x = moved(cuda)
        start = nn.Parameter(cuda.tensor(torch.ones(64, 64)))
        with swapped.saving():
            held = start * 2
            loss = (held.t() * held[::1]).sum()
            fills = module(x).square().mean()
        found = torch.autograd.grad(loss, start, retain_graph=True)[0]
        assert torch.equal(cuda.value(found), torch.full((64, 64), 8.0))
        held.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        with swapped.saving():
            doubled: Any = Doubles.apply(start * 1)  # type: ignore[no-untyped-call]
            doubled = doubled.sum()
            module(x)
        doubled.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            doubled.backward()
        del fills


def test_a_graph_may_be_gone_through_twice_and_from_another_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = [2 * each for each in gradients_in_memory()]
    with accelerator(monkeypatch, Pace.LAZY, Pace.LAZY) as cuda, window(tmp_path) as swapped:
        module, x = moved(cuda)
        other: Any = cuda.Stream(DEVICE)
        other.pace = Pace.EAGER
        loss = loss_of(swapped, module, x)
        loss.backward(retain_graph=True)
        other.wait_stream(cuda.current_stream())
        with cuda.stream(other):
            loss.backward()
            assert not differing(cuda, module, wanted)


def test_a_full_device_is_told_by_backward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = gradients_in_memory()
    with accelerator(monkeypatch) as cuda, window(tmp_path) as swapped:
        module, x = moved(cuda)
        loss = loss_of(swapped, module, x)
        spin_until(lambda: swapped.on_drive_bytes > 0)
        limit, cuda.limit_bytes = cuda.limit_bytes, cuda.in_use_bytes
        with pytest.raises(torch.OutOfMemoryError):
            loss.backward()
        cuda.limit_bytes = limit
        del loss
        assert not step(cuda, swapped, wanted)


@pytest.mark.parametrize("fits", [True, False])
def test_what_cannot_be_written_stays_while_it_fits(
    fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is an error of forward where it does not; the next pass is right."""
    wanted = gradients_in_memory()
    fails = {"pwrite": errno.EIO}
    engine = FakeEngine(fail=lambda kind, *_: fails.get(kind, 0))
    options = {"device_bytes": 1 << 20} if fits else {"resident_bytes": 16384}
    with (
        accelerator(monkeypatch) as cuda,
        nvmeio.AioHandle(engine=engine) as handle,
        window(tmp_path, handle, **options) as swapped,
    ):
        if fits:
            assert not step(cuda, swapped, wanted)
            assert swapped.bytes_written == 0
        else:
            with pytest.raises(nvmeio.TransferError) as told:
                step(cuda, swapped, wanted)
            assert told.value.errno == errno.EIO
            del told
        fails.clear()
        assert not step(cuda, swapped, wanted)


def test_what_cannot_be_read_is_told_by_backward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = gradients_in_memory()
    fails = {"pread": errno.EIO}
    engine = FakeEngine(fail=lambda kind, *_: fails.get(kind, 0))
    with (
        accelerator(monkeypatch) as cuda,
        nvmeio.AioHandle(engine=engine) as handle,
        window(tmp_path, handle, resident_bytes=16384) as swapped,
    ):
        with pytest.raises(nvmeio.TransferError) as told:
            step(cuda, swapped, wanted)
        assert told.value.errno == errno.EIO
        del told
        fails.clear()
        assert not step(cuda, swapped, wanted)


def test_an_interrupted_pass_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = gradients_in_memory()
    with accelerator(monkeypatch) as cuda, window(tmp_path) as swapped:
        for where in interrupting.at_places(lambda: step(cuda, swapped, wanted), 4):
            assert not step(cuda, swapped, wanted), where
        spin_until_collected(lambda: swapped.on_drive_bytes + swapped.on_device_bytes == 0)


def test_backward_finds_the_next_ones_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is written where host memory has room."""
    wanted = gradients_in_memory()
    ahead: list[bool] = []
    brought = DeviceActivations._brought

    def told(self: DeviceActivations, saved: Any, stream: Any) -> Any:
        ahead.append(saved.ahead is not None)
        return brought(self, saved, stream)

    monkeypatch.setattr(DeviceActivations, "_brought", told)
    with accelerator(monkeypatch) as cuda, window(tmp_path, resident_bytes="1M") as swapped:
        assert not step(cuda, swapped, wanted)
        assert (swapped.bytes_written, swapped.bytes_read) == (0, 0)
    assert ahead.count(True) >= len(ahead) - 1 > 0


def test_views_of_every_kind_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    square = torch.randn(64, 64)
    shown: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda t: t,
        lambda t: t.t(),
        lambda t: t[3::5, ::7],
        lambda t: t[5].expand(3, 64),
        lambda t: t.view(torch.bfloat16),
        lambda t: t.view(torch.complex64),
        lambda t: t.view(torch.uint8) > 7,
    ]
    found: list[torch.Tensor] = []

    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(*(show(base) for show in shown))
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            found.extend(ctx.saved_tensors)
            return grads[0], None

    with accelerator(monkeypatch) as cuda, window(tmp_path, resident_bytes=8192) as swapped:
        module, x = moved(cuda)
        with swapped.saving():
            one: Any = nn.Parameter(cuda.tensor(torch.ones(1)))
            loss: Any = Keeps.apply(one, cuda.tensor(square))  # type: ignore[no-untyped-call]
            module(x)
        spin_until(lambda: swapped.on_drive_bytes >= square.nbytes)
        loss.backward()
        assert len(found) == len(shown)
        for each, show in zip(found, shown, strict=True):
            wanted = show(square)
            assert (each.dtype, each.shape, each.stride()) == (
                wanted.dtype,
                wanted.shape,
                wanted.stride(),
            )
            both = [t.contiguous().view(torch.uint8) for t in (cuda.value(each), wanted)]
            same = torch.equal(*both)  # bits: some of these are no numbers
            assert same


def test_a_close_with_copies_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with accelerator(monkeypatch) as cuda:
        swapped = window(tmp_path)
        module, x = moved(cuda)
        loss = loss_of(swapped, module, x)
        swapped.close()
        with pytest.raises(nvmeio.ClosedError, match="swapped activations are closed"):
            loss.backward()

"""Experts on a device: kept there, in page-locked memory below it, or read (`fake_accelerator`)."""

from __future__ import annotations

import contextlib
import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_accelerator import DEVICE, EVERY_PACE, Accelerator, Kernels, Pace, accelerator
from support import thread
from torch import nn

import nvmeio
from nvmeio._memory import devices
from nvmeio.checkpoint.safetensors import save_safetensors
from nvmeio.errors import TransferError
from nvmeio.inference._experts.cache import ExpertCache
from nvmeio.inference._experts.on_device import DeviceExperts, HostSlots
from nvmeio.testing import FakeEngine

WIDTH, LAYERS, EXPERTS, TOP = 32, 3, 8, 2
INNER = 96
REGION = 4 * (2 * INNER * WIDTH + INNER * WIDTH)  # bytes of an expert: whole pages


def routed(top_k_index: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    """Each expert that tokens go to, and a column that is 1 for these; no shape depends on data."""
    experts = sorted({expert for row in top_k_index.tolist() for expert in row})
    return [(e, (top_k_index == e).any(-1, keepdim=True).float()) for e in experts]


class Experts(nn.Module):
    """As transformers fuses them, one product after the other; `routed` is looked at before.

    So nothing here waits for the device.
    """

    routed = threading.local()

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 2 * INNER, WIDTH) / 6)
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) / 6)

    def forward(self, hidden: torch.Tensor, top_k_index: torch.Tensor) -> torch.Tensor:
        found = torch.zeros_like(hidden)
        for expert, is_its in self.routed.here:
            gate, up = (hidden @ self.gate_up_proj[expert].mT).chunk(2, -1)
            part = (nn.functional.silu(gate) * up) @ self.down_proj[expert].mT
            found = found + part * is_its
        return found


class OneExpert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 3 * INNER // 2, bias=False)
        self.down = nn.Linear(3 * INNER // 2, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.down(nn.functional.silu(self.up(x)))
        return found


class Layer(nn.Module):
    """A router, and its experts; `fused`, or modules in a list."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts: Any = (
            Experts() if fused else nn.ModuleList(OneExpert() for _ in range(EXPERTS))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        routing = self.router(x).topk(TOP, -1).indices
        if isinstance(self.experts, Experts):
            self.experts.routed.here = routed(routing)
            found: torch.Tensor = x + self.experts(x, routing)
            return found
        out = torch.zeros_like(x)
        for expert, is_its in routed(routing):
            out = out + self.experts[expert](x) * is_its
        return x + out


def made(fused: bool = True) -> nn.Sequential:
    return nn.Sequential(*(Layer(fused) for _ in range(LAYERS)))


def saved(path: Path, fused: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    model = made(fused)
    save_safetensors(model.state_dict(), path)
    return model.requires_grad_(False)


def data(seed: int, tokens: int = 1) -> torch.Tensor:
    return torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(seed))


INPUTS = [(seed, 9 if seed in (2, 3, 7) else 1) for seed in range(12)]  # three are prompts


def streamed(path: Path, experts: int, fused: bool = True, **options: Any) -> Any:
    """A stream whose budget has room for so many experts, those of a call included."""
    with torch.device("meta"):
        model = made(fused)
    layers: Any = model
    others = sum(p.nbytes for layer in layers for p in layer.router.parameters())
    budget = 48 * 1024 + others + experts * REGION
    return nvmeio.stream_model(model, path, device="cuda", resident_bytes=budget, **options)


def passed(cuda: Accelerator, model: Any, on: list[Any] | None = None) -> list[torch.Tensor]:
    """All passes, of which nothing but the routing is looked at before the end.

    Each on another one of the streams, if these are given: to look at the routing waits for the
    experts of the layers before only on their own.
    """
    found = []
    with torch.no_grad():
        for number, each in enumerate(INPUTS):
            with cuda.stream(on[number % len(on)]) if on else contextlib.nullcontext():
                found.append(model(cuda.tensor(data(*each))))
    return [cuda.value(each) for each in found]


def two_streams(cuda: Accelerator, pace: Pace) -> list[Any]:
    found: list[Any] = [cuda.Stream(DEVICE) for _ in range(2)]
    for each in found:
        each.pace = pace
    return found


def in_memory(whole: nn.Module) -> list[torch.Tensor]:
    with torch.no_grad():
        return [whole(data(*each)) for each in INPUTS]


@pytest.mark.parametrize("pace", EVERY_PACE)
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(
    "experts",
    [
        EXPERTS,
        pytest.param(EXPERTS + 5, marks=pytest.mark.slow),
        pytest.param(3 * EXPERTS, marks=pytest.mark.slow),
        pytest.param(4 * EXPERTS, marks=pytest.mark.slow),
    ],
)
def test_passes_equal_those_in_memory(
    experts: int,
    fused: bool,
    pace: tuple[Pace, Pace],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With no slot on the device, with some, and with one for every expert."""
    wanted = in_memory(saved(tmp_path / "m.safetensors", fused))
    with accelerator(monkeypatch, *pace) as cuda:
        model = streamed(tmp_path / "m.safetensors", experts, fused)
        try:
            found = passed(cuda, model)
            stats = model.weight_stream.stats
        finally:
            model.weight_stream.close()
    assert all(map(torch.equal, found, wanted))
    assert stats.experts.misses + stats.experts.read_ahead >= LAYERS * TOP
    assert bool(stats.experts.evictions) == (experts < 3 * EXPERTS)


@pytest.mark.parametrize("pace", EVERY_PACE)
def test_streams_in_turn_compute_in_one_room(
    pace: tuple[Pace, Pace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = in_memory(saved(tmp_path / "m.safetensors"))
    with accelerator(monkeypatch, *pace) as cuda:
        model = streamed(tmp_path / "m.safetensors", EXPERTS + 2)
        try:
            found = passed(cuda, model, two_streams(cuda, pace[0]))
        finally:
            model.weight_stream.close()
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
    wanted = in_memory(saved(tmp_path / "m.safetensors"))
    with monkeypatch.context() as patch, accelerator(patch, compute, copies) as cuda:
        model = streamed(tmp_path / "m.safetensors", EXPERTS + 2)
        with torch.no_grad():
            cuda.value(model(cuda.tensor(data(0))))
        assert not cuda.forgive()
        if missing == "compute does not wait for copies":
            patch.setattr(DeviceExperts, "let_compute", lambda self, stream: None)
        elif missing == "copies do not wait for compute":
            patch.setattr(devices.Beside, "follow", lambda self, stream=None: None)
        else:
            patch.setattr(HostSlots, "to_fill", lambda self, slot: None)
        try:
            found = passed(cuda, model, two_streams(cuda, compute))
            assert cuda.forgive() or not all(map(torch.equal, found, wanted))
        finally:
            model.weight_stream.close()
        cuda.forgive()


def test_what_the_device_keeps_is_neither_read_nor_copied_to_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path / "m.safetensors")
    with torch.no_grad(), accelerator(monkeypatch) as cuda:
        model = streamed(tmp_path / "m.safetensors", 4 * EXPERTS)
        try:
            stream, x = model.weight_stream, cuda.tensor(data(0))
            model(x)
            before = stream.stats.experts
            assert before.uploads == before.misses == LAYERS * TOP
            for _ in range(3):
                model(x)
            after = stream.stats.experts
            assert (after.misses, after.uploads) == (before.misses, before.uploads)
            assert after.hits == before.hits + 3 * LAYERS * TOP
        finally:
            stream.close()


def test_what_the_device_has_is_not_read_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts read it again where host memory had it no longer, and the next layer waited."""
    saved(tmp_path / "m.safetensors")
    begin = ExpertCache._begin
    on_device: list[bool] = []

    def noting(cache: ExpertCache, key: tuple[int, int], held: Any) -> Any:
        on_device.append(cache._device is not None and cache._device.has(key))
        return begin(cache, key, held)

    monkeypatch.setattr(ExpertCache, "_begin", noting)
    chosen = random.Random(3)
    with torch.no_grad(), accelerator(monkeypatch) as cuda:
        model = streamed(tmp_path / "m.safetensors", EXPERTS + 6)
        try:
            for _ in range(40):
                seed, tokens = chosen.randrange(6), chosen.choice([1, 1, 1, 2, 9, 40])
                cuda.value(model(cuda.tensor(data(seed, tokens))))
        finally:
            model.weight_stream.close()
    assert on_device
    assert not any(on_device)


def test_a_prompt_leaves_what_decoding_asks_for_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It touches every expert, and would push all others out."""
    saved(tmp_path / "m.safetensors")
    with torch.no_grad(), accelerator(monkeypatch) as cuda:
        model = streamed(tmp_path / "m.safetensors", EXPERTS + 2 * LAYERS * TOP)
        try:
            stream, x = model.weight_stream, cuda.tensor(data(0))
            model(x)
            model(x)
            before = stream.stats.experts
            model(cuda.tensor(data(1, tokens=60)))
            prompt = stream.stats.experts
            assert prompt.uploads - before.uploads >= LAYERS * (EXPERTS - TOP)
            model(x)
            assert stream.stats.experts.uploads - prompt.uploads < LAYERS * TOP
        finally:
            stream.close()


def test_host_memory_beyond_that_of_the_device_keeps_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What does not fit on the device is copied to it, and not read again."""
    wanted = in_memory(saved(tmp_path / "m.safetensors"))
    with accelerator(monkeypatch, Pace.LAZY, Pace.EAGER) as cuda:
        model = streamed(tmp_path / "m.safetensors", EXPERTS + 2, host_bytes="16M")
        try:
            stream = model.weight_stream
            assert stream.locked
            assert stream.stats.expert_host_bytes >= LAYERS * EXPERTS * REGION
            assert stream.stats.streamed_bytes == 0
            assert all(map(torch.equal, passed(cuda, model), wanted))
            before = stream.stats
            assert all(map(torch.equal, passed(cuda, model), wanted))
            after = stream.stats
            assert after.bytes_read == before.bytes_read
            assert after.experts.uploads > before.experts.uploads
        finally:
            model.weight_stream.close()


def test_a_device_without_room_says_what_to_lower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path / "m.safetensors")
    with accelerator(monkeypatch) as cuda:
        cuda.limit_bytes = cuda.in_use_bytes + EXPERTS * REGION // 2
        with pytest.raises(MemoryError, match=r"cuda:0 has no .* lower resident_bytes"):
            streamed(tmp_path / "m.safetensors", 2 * EXPERTS)


def test_by_default_it_takes_half_of_what_either_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took half of the host's memory on the device too, whatever that had."""
    wanted = in_memory(saved(tmp_path / "m.safetensors"))
    with accelerator(monkeypatch) as cuda:
        with torch.device("meta"):
            model = made()
        cuda.limit_bytes = cuda.in_use_bytes + 3 * EXPERTS * REGION
        path = tmp_path / "m.safetensors"
        streaming = nvmeio.stream_model(model, path, device="cuda")
        try:
            stats = streaming.weight_stream.stats
            assert EXPERTS * REGION <= stats.expert_bytes <= 1.5 * EXPERTS * REGION
            assert stats.expert_host_bytes >= LAYERS * EXPERTS * REGION
            assert all(map(torch.equal, passed(cuda, streaming), wanted))
        finally:
            streaming.weight_stream.close()


def test_host_bytes_that_make_no_sense_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path / "m.safetensors")
    dense = nn.Sequential(nn.Linear(8, 8))
    save_safetensors(dense.state_dict(), tmp_path / "dense.safetensors")
    with torch.device("meta"):
        mixture, plain = made(), nn.Sequential(nn.Linear(8, 8))
    with pytest.raises(ValueError, match="host_bytes is for a GPU"):
        nvmeio.stream_model(mixture, tmp_path / "m.safetensors", host_bytes="1G")
    with accelerator(monkeypatch):
        with pytest.raises(ValueError, match="host_bytes=4096 is less than the"):
            streamed(tmp_path / "m.safetensors", EXPERTS, host_bytes=4096)
        with pytest.raises(ValueError, match="host_bytes keeps more experts"):
            nvmeio.stream_model(
                plain, tmp_path / "dense.safetensors", device="cuda", host_bytes="1G"
            )
        with pytest.raises(TypeError, match="host_bytes"):
            streamed(tmp_path / "m.safetensors", EXPERTS, host_bytes=1.5)


@pytest.mark.parametrize("experts", [EXPERTS, EXPERTS + 5])
def test_no_more_of_the_device_is_used_than_was_given(
    experts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path / "m.safetensors")
    with torch.no_grad(), accelerator(monkeypatch) as cuda:
        before = cuda.in_use_bytes
        model = streamed(tmp_path / "m.safetensors", experts)
        try:
            for each in INPUTS:
                cuda.value(model(cuda.tensor(data(*each))))
            given = model.weight_stream.stats
            weights = given.resident_bytes + given.window_bytes + given.expert_bytes
            assert cuda.in_use_bytes - before <= weights + 16 * 1024  # and what computed last
        finally:
            model.weight_stream.close()


def test_an_expert_that_cannot_be_read_fails_its_pass_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = in_memory(saved(tmp_path / "m.safetensors"))
    failing = [False]

    def fail(kind: str, offset: int, nbytes: int) -> int:
        return 5 if failing[0] and kind == "pread" and nbytes > 4096 else 0

    with accelerator(monkeypatch) as cuda, nvmeio.AioHandle(engine=FakeEngine(fail=fail)) as handle:
        model = streamed(tmp_path / "m.safetensors", EXPERTS + 2, handle=handle)
        try:
            with torch.no_grad():
                model(cuda.tensor(data(0)))
                failing[0] = True
                with pytest.raises(TransferError, match=r"expert \d of \d\.experts"):
                    passed(cuda, model)
            failing[0] = False
            assert all(map(torch.equal, passed(cuda, model), wanted))
        finally:
            model.weight_stream.close()


def test_streams_of_several_threads_take_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each computes in the one room, behind what the others were asked there."""
    wanted = in_memory(saved(tmp_path / "m.safetensors"))
    found: dict[int, list[torch.Tensor]] = {}
    with accelerator(monkeypatch, Pace.RANDOM, Pace.RANDOM) as cuda:
        model = streamed(tmp_path / "m.safetensors", EXPERTS + 3)

        def work(number: int) -> None:
            torch.set_num_threads(1)
            on: Any = cuda.Stream(DEVICE)
            with cuda.stream(on), Kernels(cuda), torch.no_grad():
                found[number] = [model(cuda.tensor(data(*each))) for each in INPUTS]

        try:
            with thread(work, 0), thread(work, 1):
                pass
            assert sorted(found) == [0, 1]
            for outputs in found.values():
                assert all(map(torch.equal, map(cuda.value, outputs), wanted))
        finally:
            model.weight_stream.close()


def test_it_is_opened_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = in_memory(saved(tmp_path / "m.safetensors"))
    with accelerator(monkeypatch, Pace.LAZY, Pace.LAZY) as cuda:
        model = streamed(tmp_path / "m.safetensors", EXPERTS + 3)
        try:
            for _ in range(2):
                assert all(map(torch.equal, passed(cuda, model), wanted))
                model.weight_stream.close()
                model.weight_stream.reopen()
        finally:
            model.weight_stream.close()


@pytest.mark.parametrize("fails", range(6))
def test_a_copy_that_raises_leaves_no_expert_that_is_not_there(
    fails: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its slot on the device counted as filled: the next pass computed with what lay there."""
    wanted = in_memory(saved(tmp_path / "m.safetensors"))
    copy, left = devices.Beside.copy, [-1]

    def failing(beside: devices.Beside, target: torch.Tensor, source: torch.Tensor) -> None:
        left[0] -= 1
        if left[0] == -1:
            raise RuntimeError("no copy")
        copy(beside, target, source)

    with accelerator(monkeypatch) as cuda:
        model = streamed(tmp_path / "m.safetensors", EXPERTS + 5)
        try:
            monkeypatch.setattr(devices.Beside, "copy", failing)
            left[0] = fails + 1
            with pytest.raises(RuntimeError, match="no copy"):
                passed(cuda, model)
            assert all(map(torch.equal, passed(cuda, model), wanted))
        finally:
            model.weight_stream.close()

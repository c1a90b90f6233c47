"""Interrupted anywhere: the same call again gives the same bits, nothing hangs, nothing is left."""

from __future__ import annotations

import _thread
import errno
import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from faults._support import wait_until_asleep
from inside import held_of
from interrupting import at_places, at_random_times
from support import (
    PATIENCE_S,
    HeldEngine,
    spin_until,
    spin_until_collected,
    thread,
    threads_but_finishers,
)
from torch import nn

import nvmeio
from nvmeio._residency import calls
from nvmeio.checkpoint.safetensors import save_safetensors
from nvmeio.errors import TransferError
from nvmeio.inference import run_in_blocks
from nvmeio.inference._plan import units
from nvmeio.inference._stream.turns import OwnPass
from nvmeio.inference.weight_stream import WeightStream
from nvmeio.offload import SwappedModule
from nvmeio.testing import FakeEngine

Interrupts = Callable[[Callable[[], object], int], Iterator[object]]
# A real signal may come in a destructor, where Python swallows what it raises.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
# At random moments tests/interrupts does the same in a process of its own.
HOW = pytest.mark.parametrize(
    "interrupts", [at_places, pytest.param(at_random_times, marks=pytest.mark.stress)]
)
WIDTH = 48


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(units, "SMALL_BYTES", 256)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def handle() -> Iterator[nvmeio.AioHandle]:
    with nvmeio.AioHandle(engine="threads") as made:
        yield made


def net() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(6)]
    return nn.Sequential(*blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8))


def hooks_in_force() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


# Streamed


@pytest.fixture
def streamed(tmp_path: Path, handle: nvmeio.AioHandle) -> Iterator[nn.Module]:
    whole = net()
    save_safetensors({name: p.data for name, p in whole.named_parameters()}, tmp_path / "net")
    with torch.device("meta"):
        empty = net()
    model = nvmeio.stream_model(
        empty, tmp_path / "net", resident_bytes=40_000, window=2, handle=handle
    )
    yield model
    model.weight_stream.close()


@HOW
def test_a_streamed_pass(streamed: nn.Module, interrupts: Interrupts) -> None:
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = net()(x)
    for _ in interrupts(lambda: streamed(x), 100):
        assert torch.is_grad_enabled()
        assert streamed(x).equal(expected)


@HOW
def test_micro_batches(streamed: nn.Module, interrupts: Interrupts) -> None:
    inputs = [torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(n)) for n in range(3)]
    works = [lambda x=x: streamed(x) for x in inputs]
    expected = run_in_blocks(streamed, works)
    for _ in interrupts(lambda: run_in_blocks(streamed, works), 60):
        found = run_in_blocks(streamed, works)
        assert all(a.equal(b) for a, b in zip(found, expected, strict=True))


@HOW
def test_closing_and_opening_again(streamed: nn.Module, interrupts: Interrupts) -> None:
    x = torch.randn(3, WIDTH)
    expected = streamed(x)
    stream = streamed.weight_stream

    def again() -> None:
        stream.close()
        stream.reopen()

    again()
    threads = threading.active_count()
    for _ in interrupts(again, 60):
        stream.reopen()
        assert streamed(x).equal(expected)
    again()
    spin_until(lambda: threading.active_count() <= threads)


def test_an_interrupt_during_a_read_that_hangs_is_told_at_once(tmp_path: Path) -> None:
    whole = net()
    save_safetensors({name: p.data for name, p in whole.named_parameters()}, tmp_path / "net")
    with torch.device("meta"):
        empty = net()
    engine = HeldEngine()
    engine.gate.set()
    x = torch.randn(3, WIDTH)
    with torch.no_grad():
        expected = whole(x)
    with nvmeio.AioHandle(engine=engine) as handle:
        model = nvmeio.stream_model(
            empty, tmp_path / "net", resident_bytes=40_000, window=1, handle=handle
        )
        assert model(x).equal(expected)
        engine.gate.clear()

        def interrupt() -> None:
            wait_until_asleep(os.getpid())  # the read is waited for
            _thread.interrupt_main()

        for _ in range(2):  # the second comes while the first one's read is still waited for
            with pytest.raises(KeyboardInterrupt), thread(interrupt):
                model(x)  # which does not return while the gate is closed
        engine.gate.set()
        assert model(x).equal(expected)
        model.weight_stream.close()


def test_another_thread_goes_on_while_the_error_is_kept(streamed: nn.Module) -> None:
    """The frames of a traceback keep what their locals hold: a turn must not be among it."""
    x = torch.randn(3, WIDTH)
    expected = streamed(x)
    kept: list[BaseException] = []

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = streamed[2][1].register_forward_hook(interrupt)
    try:
        streamed(x)
    except KeyboardInterrupt as error:
        kept.append(error)
    hook.remove()
    found: list[torch.Tensor] = []

    def go_on() -> None:
        torch.set_num_threads(1)  # as in this thread: others compute in other portions
        found.append(streamed(x))

    other = threading.Thread(target=go_on, daemon=True)
    other.start()
    other.join(PATIENCE_S)
    assert found[0].equal(expected)


def test_autograd_is_on_while_the_error_of_a_pass_that_did_not_begin_is_kept(
    streamed: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt before the first layer left autograd off while a session kept its traceback."""

    def interrupt(_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(WeightStream, "pass_mark", interrupt)
        with pytest.raises(KeyboardInterrupt) as kept:
            streamed(torch.randn(3, WIDTH))
    assert torch.is_grad_enabled()
    del kept


def test_a_pass_is_over_while_the_error_that_ended_its_beginning_is_kept() -> None:
    """The traceback kept the mark of a pass that never ran, and the stream counted it."""

    class Marks(dict[Any, Any]):
        def __setitem__(self, key: Any, value: Any) -> None:
            super().__setitem__(key, value)
            raise KeyboardInterrupt

    passes = OwnPass(0)
    passes._marks = Marks()
    with pytest.raises(KeyboardInterrupt) as kept:
        passes.mark()
    assert not passes.any_under_way()
    del kept


# Swapped


@pytest.fixture
def swapped(tmp_path: Path, handle: nvmeio.AioHandle) -> Iterator[SwappedModule]:
    made = net()
    with SwappedModule(
        made, swap_dir=tmp_path, resident_bytes=96 << 10, stage_bytes=10_000, handle=handle
    ) as module:
        yield module


def gradients(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    module.zero_grad()
    module(x).square().sum().backward()
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(a.equal(b) for a, b in zip(found, expected, strict=True))


@HOW
def test_forward_and_backward(swapped: SwappedModule, interrupts: Interrupts) -> None:
    """Pins and saved-tensor hooks stayed, and half-read units counted as there."""
    x = torch.randn(3, WIDTH)
    expected = gradients(net(), x)
    for _ in interrupts(lambda: gradients(swapped, x), 100):
        assert hooks_in_force() is None
        assert same(gradients(swapped, x), expected)
    spin_until_collected(lambda: held_of(swapped) == [])


@HOW
def test_forward_and_backward_from_the_drive(
    swapped: SwappedModule, interrupts: Interrupts
) -> None:
    """What an interrupted pass left in the window is right, too."""
    x = torch.randn(3, WIDTH)
    expected = gradients(net(), x)

    def cold() -> None:
        swapped.evict()
        gradients(swapped, x)

    for _ in interrupts(cold, 100):
        assert same(gradients(swapped, x), expected)


@HOW
def test_gather_is_whole_or_has_not_happened(
    swapped: SwappedModule, interrupts: Interrupts
) -> None:
    weights = [p for p in swapped.parameters() if p.dim() == 2 and p.shape[0] == WIDTH]

    def change() -> None:
        with swapped.gather(*weights), torch.no_grad():
            for weight in weights:
                weight.add_(1)

    def value() -> torch.Tensor:
        with swapped.gather(*weights):
            return torch.stack([w.detach().clone() for w in weights])

    with swapped.gather(*weights), torch.no_grad():
        for weight in weights:
            weight.zero_()
    before = value()
    for _ in interrupts(change, 60):
        torch.set_grad_enabled(True)  # no_grad above is Python, and Ctrl-C may leave it in force
        in_memory = value()
        swapped.evict()
        on_drive = value()
        assert in_memory.equal(on_drive)
        assert any(on_drive.equal(before + n) for n in range(3))  # the first time was whole
        before = on_drive


@HOW
def test_load_state_dict(swapped: SwappedModule, interrupts: Interrupts) -> None:
    x = torch.randn(3, WIDTH)
    torch.manual_seed(7)
    states = [{name: torch.randn_like(p) for name, p in net().named_parameters()} for _ in "ab"]
    reference = net()
    for number, _ in enumerate(interrupts(lambda: swapped.load_state_dict(states[0]), 60)):
        state = states[1 - number % 2]
        swapped.load_state_dict(state)
        reference.load_state_dict(state)
        assert same(gradients(swapped, x), gradients(reference, x))


def test_loading_does_not_switch_the_callers_grad_mode(
    swapped: SwappedModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.no_grad is Python: Ctrl-C as it is entered or left keeps autograd off."""
    enter = torch.no_grad.__enter__

    def checked(self: torch.no_grad) -> None:
        assert threading.current_thread() is not threading.main_thread()
        enter(self)

    state = {name: torch.ones_like(p) for name, p in net().named_parameters()}
    with monkeypatch.context() as patch:
        patch.setattr(torch.no_grad, "__enter__", checked)
        swapped.load_state_dict(state)


def test_units_are_free_while_the_error_of_a_call_that_did_not_begin_is_kept(
    swapped: SwappedModule,
) -> None:
    """The units were held already, by the frame that noted so: its traceback went on holding."""

    def interrupt(frame: Any, *_: Any) -> None:
        if frame.f_code is calls._Running.__init__.__code__:
            sys.settrace(None)
            raise KeyboardInterrupt

    tracing = sys.gettrace()
    sys.settrace(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt) as kept:
            swapped(torch.randn(3, WIDTH))
    finally:
        sys.settrace(tracing)
    assert held_of(swapped) == []
    del kept


def test_an_exception_in_a_users_hook_leaves_nothing(swapped: SwappedModule) -> None:
    class Stop(BaseException):
        pass

    x = torch.randn(3, WIDTH)
    expected = gradients(net(), x)
    for error in (Stop, KeyboardInterrupt, ValueError, GeneratorExit):
        for register in ("register_forward_pre_hook", "register_forward_hook"):

            def fail(*_: Any, error: type[BaseException] = error) -> None:
                raise error

            hook = getattr(swapped.module[3][1], register)(fail)  # type: ignore[index]
            with pytest.raises(error):
                gradients(swapped, x)
            hook.remove()
            assert hooks_in_force() is None
            assert held_of(swapped) == []
            assert same(gradients(swapped, x), expected)


def test_a_module_that_could_not_be_made_is_told(tmp_path: Path, handle: nvmeio.AioHandle) -> None:
    """Its parameters were NaN afterwards, and were swapped as such the next time."""
    left = [3]

    def fail(kind: str, offset: int, nbytes: int) -> int:
        left[0] -= kind == "pwrite"
        return errno.ENOSPC if left[0] < 0 else 0

    made = net()
    with nvmeio.AioHandle(engine=FakeEngine(fail=fail)) as full, pytest.raises(TransferError):
        SwappedModule(made, swap_dir=tmp_path, resident_bytes=48 << 10, handle=full)
    with pytest.raises(ValueError, match="has no values"):
        SwappedModule(made, swap_dir=tmp_path, resident_bytes=48 << 10, handle=handle)
    spin_until(lambda: not list(tmp_path.iterdir()))


@HOW
def test_making_one(tmp_path: Path, handle: nvmeio.AioHandle, interrupts: Interrupts) -> None:
    x = torch.randn(3, WIDTH)
    expected = gradients(net(), x)

    # Made before: after an interrupt the no_grad in which torch fills them may stay in force.
    spare = [net() for _ in range(60)]

    def make() -> None:
        SwappedModule(
            spare.pop(),
            swap_dir=tmp_path,
            resident_bytes=96 << 10,
            stage_bytes=10_000,
            handle=handle,
        ).close()

    make()
    threads = threads_but_finishers()
    for _ in interrupts(make, 40):
        gc.collect()
        spin_until(lambda: not list(tmp_path.iterdir()))
        with SwappedModule(
            net(), swap_dir=tmp_path, resident_bytes=96 << 10, stage_bytes=10_000, handle=handle
        ) as module:
            assert same(gradients(module, x), expected)
    spin_until(lambda: threads_but_finishers() <= threads)

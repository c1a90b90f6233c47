"""`SwappedActivations`: gradients of saved tensors that were on the drive, bit for bit."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from inside import store_of
from offload._saved_activations import (
    MODELS,
    Loss,
    assert_same,
    gradients,
    loss_within,
    made,
    mlp,
    small,
)
from support import spin_until, spin_until_collected, thread
from torch import nn
from torch.utils.checkpoint import checkpoint

import nvmeio
from nvmeio._io import drives
from nvmeio._residency import calls
from nvmeio.offload import SwappedActivations, SwappedModule

# The same bits


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_in_memory(swapped: SwappedActivations, name: str) -> None:
    module, x = made(name)
    wanted = gradients(module, lambda: module(x).square().mean().backward())
    for _ in range(2):
        before = swapped.bytes_read
        found = gradients(
            module, lambda: loss_within(swapped, lambda: module(x).square().mean()).backward()
        )
        assert_same(found, wanted)
        assert swapped.bytes_read > before, "nothing was on the drive"
    spin_until(lambda: swapped.on_drive_bytes == 0)


def test_gradients_of_a_transformers_model(swapped: SwappedActivations) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = transformers.LlamaForCausalLM(config)
    tokens = torch.randint(0, 64, (2, 24))

    def loss() -> torch.Tensor:
        found: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
        return found

    wanted = gradients(model, lambda: loss().backward())
    assert_same(gradients(model, lambda: loss_within(swapped, loss).backward()), wanted)
    assert swapped.bytes_read > 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_of_checkpointed_regions_the_inputs_are_saved(
    tmp_path: Path, handle: nvmeio.AioHandle, reentrant: bool
) -> None:
    torch.manual_seed(0)
    parts = mlp(4)
    x = torch.randn(64, 32, requires_grad=True)

    def loss() -> torch.Tensor:
        y = x
        for part in parts:
            y = checkpoint(part, y, use_reentrant=reentrant)
        return y.square().mean()

    wanted = gradients(parts, lambda: loss().backward())
    with small(tmp_path, handle) as swapped:
        with swapped.saving():
            found = gradients(parts, lambda: loss().backward())  # what it runs again stays
        assert_same(found, wanted)
        assert 0 < swapped.bytes_written <= 4 * 64 * 32 * 4


def test_parameters_on_the_drive_as_well(tmp_path: Path, handle: nvmeio.AioHandle) -> None:
    theirs, x = made("mlp")
    wanted = gradients(theirs, lambda: theirs(x).square().mean().backward())
    ours, x = made("mlp")
    weights = [p.nbytes for p in ours.parameters()]
    with (
        SwappedModule(
            ours, swap_dir=tmp_path, resident_bytes=24576, stage_bytes=4500, handle=handle
        ) as module,
        small(tmp_path, handle, min_bytes=min(weights)) as swapped,
    ):
        found = gradients(
            module, lambda: loss_within(swapped, lambda: module(x).square().mean()).backward()
        )
        assert_same(found, wanted)
        assert swapped.bytes_read > 0
        swapped.attach(ours[3])
        assert_same(gradients(module, lambda: module(x).square().mean().backward()), wanted)


# Graphs


def test_a_graph_may_be_gone_through_twice(swapped: SwappedActivations) -> None:
    module, x = made("mlp")

    def twice(loss: torch.Tensor) -> None:
        loss.backward(retain_graph=True)
        loss.backward()

    wanted = gradients(module, lambda: twice(module(x).square().mean()))
    found = gradients(
        module, lambda: twice(loss_within(swapped, lambda: module(x).square().mean()))
    )
    assert_same(found, wanted)


def test_derivatives_of_derivatives(swapped: SwappedActivations) -> None:
    module, x = made("mlp")
    x.requires_grad_()

    def second(loss: Loss) -> None:
        (first,) = torch.autograd.grad(loss(), x, create_graph=True)
        first.square().sum().backward()

    def loss() -> torch.Tensor:
        return module(x).square().sum()

    wanted = gradients(module, lambda: second(loss))
    assert_same(gradients(module, lambda: second(lambda: loss_within(swapped, loss))), wanted)

    def within() -> None:
        with swapped.saving():
            second(loss)

    assert_same(gradients(module, within), wanted)


def test_several_graphs_at_a_time_and_in_any_order(swapped: SwappedActivations) -> None:
    module, x = made("mlp")
    batches = [x * number for number in range(1, 4)]

    def all_of(loss: Callable[[torch.Tensor], torch.Tensor]) -> None:
        losses = [loss(batch) for batch in batches]
        for each in losses:  # the first one first, which is expected last
            each.backward()

    wanted = gradients(module, lambda: all_of(lambda b: module(b).square().mean()))
    found = gradients(
        module,
        lambda: all_of(lambda b: loss_within(swapped, lambda: module(b).square().mean())),
    )
    assert_same(found, wanted)


def test_a_graph_that_is_dropped_gives_all_back(swapped: SwappedActivations) -> None:
    module, x = made("mlp")
    loss = loss_within(swapped, lambda: module(x).square().mean())
    spin_until(lambda: swapped.on_drive_bytes > 0)
    del loss
    spin_until_collected(lambda: swapped.on_drive_bytes + swapped.in_memory_bytes == 0)
    assert store_of(swapped).file.used_bytes == 0


def test_the_file_does_not_grow_with_steps(
    tmp_path: Path, handle: nvmeio.AioHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drives, "_LEAST_GROWTH_BYTES", 4096)
    module, x = made("mlp")
    x = x.repeat(64, 1)
    with small(tmp_path, handle, resident_bytes="64K") as swapped:
        sizes = []
        for _ in range(4):
            loss_within(swapped, lambda: module(x).square().mean()).backward()
            spin_until(lambda: store_of(swapped).file.used_bytes == 0)
            sizes.append(swapped.file_bytes)
        assert max(sizes) < swapped.bytes_written / 2  # four steps' are written
        assert swapped.bytes_written > 4 * 6 * x.nbytes


def test_a_backward_within_the_block_and_blocks_within_blocks(
    swapped: SwappedActivations, tmp_path: Path, handle: nvmeio.AioHandle
) -> None:
    module, x = made("mlp")
    wanted = gradients(module, lambda: module(x).square().mean().backward())

    def nested() -> None:
        with swapped.saving(), swapped.saving() as again:
            assert again is swapped
            y = module(x)
            with small(tmp_path, handle) as inner, inner.saving():
                y.square().mean().backward()

    assert_same(gradients(module, nested), wanted)


def test_an_interrupt_at_the_end_of_the_block_ends_it(swapped: SwappedActivations) -> None:
    """At the first bytecode of ``__exit__`` it left the hooks in force for as long as it was kept.

    As the last exception is kept by an interactive session: all that autograd saved from then on
    was the block's, and where the exception went at last, somebody else's hooks ended.
    """
    before = calls.saved_tensors_hooks_around()

    def interrupt(frame: Any, event: str, arg: object) -> None:
        if frame.f_code.co_name == "__exit__":
            raise KeyboardInterrupt

    kept: BaseException | None = None
    tracing = sys.gettrace()
    try:
        with swapped.saving():
            assert calls.saved_tensors_hooks_around() != before
            sys.settrace(interrupt)
    except KeyboardInterrupt as met:
        kept = met
    finally:
        sys.settrace(tracing)
    assert calls.saved_tensors_hooks_around() == before
    del kept
    block = swapped.saving()
    for _ in range(2):
        with block:
            assert calls.saved_tensors_hooks_around() != before
            with pytest.raises(RuntimeError, match="within itself"), block:
                pass
        assert calls.saved_tensors_hooks_around() == before
    with contextlib.ExitStack() as stack:
        stack.enter_context(block)
        assert calls.saved_tensors_hooks_around() != before
    assert calls.saved_tensors_hooks_around() == before


def test_hooks_around_get_what_is_not_taken(swapped: SwappedActivations) -> None:
    seen: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor.untyped_storage().nbytes())
        return tensor.detach()

    module, x = made("mlp")
    wanted = gradients(module, lambda: module(x).sum().backward())
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
        found = gradients(module, lambda: loss_within(swapped, lambda: module(x).sum()).backward())
    assert_same(found, wanted)
    assert seen
    assert swapped.bytes_written > 0


def test_each_thread_has_blocks_of_its_own(swapped: SwappedActivations) -> None:
    modules = [made("mlp")[0] for _ in range(3)]
    x = made("mlp")[1]
    wanted = gradients(modules[0], lambda: modules[0](x).square().mean().backward())
    modules[0].zero_grad()

    def train(module: nn.Module) -> list[torch.Tensor]:
        losses = [loss_within(swapped, lambda: module(x).square().mean()) for _ in range(2)]
        with thread(losses[0].backward):
            pass
        return [p.grad for p in module.parameters() if p.grad is not None]

    with thread(train, modules[0]) as a, thread(train, modules[1]) as b:
        found = train(modules[2])
    for each in (a[0], b[0], found):
        assert_same(each, wanted)


def test_a_module_that_it_is_attached_to(swapped: SwappedActivations) -> None:
    module, x = made("mlp")
    wanted = gradients(module, lambda: module(x).square().mean().backward())
    assert swapped.attach(module) is module
    assert_same(gradients(module, lambda: module(x).square().mean().backward()), wanted)
    assert swapped.bytes_written > 0
    swapped.close()
    with torch.no_grad():
        module(x)
    with pytest.raises(nvmeio.ClosedError):
        module(x)


def test_compiled_modules(swapped: SwappedActivations) -> None:
    if not torch._dynamo.is_dynamo_supported():
        pytest.skip("torch.compile does not work with this Python")
    module, x = made("mlp")
    wanted = gradients(module, lambda: module(x).square().mean().backward())
    compiled = torch.compile(module, backend="aot_eager")
    found = gradients(
        module, lambda: loss_within(swapped, lambda: compiled(x).square().mean()).backward()
    )
    assert_same(found, wanted)
    assert swapped.bytes_read > 0

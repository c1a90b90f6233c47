"""Mixtures train as in memory, and what no token needs is neither read nor written."""

from __future__ import annotations

import errno
import functools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from _mixtures import EXPERTS, Model, family, fused, lists, loss_of, train
from inside import held_of
from support import Turns

import nvmeio
from nvmeio.offload import SwappedModule, SwappedOptimizer
from nvmeio.offload._module.unit_windows import UnitWindows
from nvmeio.testing import FakeEngine

pytestmark = [
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad"),
    pytest.mark.timeout(120),
]

Make = Callable[[], Any]
FAMILIES: dict[str, Make] = {
    "lists": lists,
    "lists-checkpoint": functools.partial(lists, False),
    "lists-reentrant": functools.partial(lists, True),
    "fused": fused,
    "fused-checkpoint": functools.partial(fused, False),
    "fused-reentrant": functools.partial(fused, True),
    **{
        f"{name}-{kernel}": functools.partial(family, f"{name}ForCausalLM", kernel)
        for name in ("Mixtral", "Qwen3Moe", "Olmoe")
        for kernel in ("grouped_mm", "batched_mm", "eager")
    },
}


def swapped(made: Any, folder: Path, share: float = 0.75, **options: Any) -> SwappedModule:
    whole = sum(p.nbytes for p in made.parameters())
    window = int(whole * share) + 65536
    return SwappedModule(made, swap_dir=folder, resident_bytes=window, **options)


def grads_of(made: Any) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in made.parameters()]


def assert_alike(
    found: list[torch.Tensor | None], wanted: list[torch.Tensor | None], what: object
) -> None:
    for number, (a, b) in enumerate(zip(found, wanted, strict=True)):
        assert (a is None) == (b is None), (what, number)
        assert a is None or b is None or torch.equal(a, b), (what, number)


@pytest.mark.parametrize("gradients", ["memory", "disk"])
@pytest.mark.parametrize("name", FAMILIES)
def test_training_equals_that_in_memory(name: str, gradients: str, tmp_path: Path) -> None:
    ours, theirs = FAMILIES[name](), FAMILIES[name]()
    seen: list[Any] = []
    with (
        swapped(ours, tmp_path) as module,
        SwappedOptimizer(
            torch.optim.AdamW,
            module.parameters(),
            swap_dir=tmp_path,
            gradients=gradients,
            subgroup_bytes=64 << 10,
            durable=False,
            lr=1e-2,
        ) as optimizer,
    ):
        losses = train(module, optimizer, 4, after=lambda _: seen.append(grads_of(ours)))
        reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
        wanted: list[Any] = []
        assert losses == train(
            theirs, reference, 4, after=lambda _: wanted.append(grads_of(theirs))
        )
        if gradients == "memory":
            for step, (a, b) in enumerate(zip(seen, wanted, strict=True)):
                assert_alike(a, b, step)
        found = module.state_dict()
        for key, tensor in theirs.state_dict().items():
            assert torch.equal(found[key], tensor), key


def rest_bytes(made: Any) -> int:
    """Of all parameters but the experts', each in pages of its own."""
    named = ((n, p.nbytes) for n, p in made.named_parameters() if ".experts." not in n)
    return sum(-(-nbytes // 4096) * 4096 for _, nbytes in named)


def expert_bytes(made: Any) -> int:
    """Of one expert of one layer, each parameter in pages of its own."""
    inside = [p for n, p in made.named_parameters() if "layers.0.mixture.experts." in n]
    if isinstance(made, Model) and len(inside) > EXPERTS:
        inside = inside[: len(inside) // EXPERTS]
        return sum(-(-p.nbytes // 4096) * 4096 for p in inside)
    return sum(p.nbytes // EXPERTS for p in inside)


@pytest.mark.parametrize("make", [lists, fused])
@pytest.mark.parametrize("reentrant", [None, False, True], ids=["plain", "checkpoint", "reentrant"])
def test_experts_without_tokens_are_not_read(
    make: Callable[..., Model], reentrant: bool | None, tmp_path: Path
) -> None:
    """A layer was read whole, forward and backward."""
    made = make(reentrant)
    share = 0.95 if reentrant is None else 1.3  # a region that runs again goes there and back
    with swapped(made, tmp_path, share, stage_bytes=32 << 10) as module:
        for step in range(3):
            module.evict()
            before = module.bytes_read
            loss = loss_of(module, step, number=1)
            module.evict()
            middle = module.bytes_read
            loss.backward()
            routed = sum(len(layer.mixture.hit) for layer in made.layers)
            assert routed == 6
            most = rest_bytes(made) + routed * expert_bytes(made)
            biases = 3 * 4096  # of fused experts: read whole
            assert middle - before <= most + biases
            assert module.bytes_read - middle <= most + biases
            assert module.bytes_read - middle > routed * expert_bytes(made) // 2
            module.zero_grad()


@pytest.mark.parametrize("make", [lists, fused])
def test_what_the_last_pass_used_whole_is_read_ahead(
    make: Callable[..., Model], tmp_path: Path
) -> None:
    """A batch of many tokens needs all experts: they come before they are called."""
    made = make()
    with swapped(made, tmp_path) as module, torch.no_grad():
        for step in range(3):
            module.evict()
            loss_of(module, step, number=64)
            assert all(len(layer.mixture.hit) == EXPERTS for layer in made.layers)
        order = module._store._windows.host._order
        order.note(module._store.units[0], False)
        assert len(list(order.upcoming())) >= len(module._store.units) - 2


@pytest.mark.parametrize("make", [lists, fused])
def test_backward_reads_what_forward_has_used_ahead(
    make: Callable[..., Model], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an eviction only what backward begins with is waited for from its beginning."""
    late: list[int] = []
    bring = UnitWindows.bring

    def counting(self: Any, slot: Any, experts: Any) -> None:
        late.extend(self._memory.missing(slot, experts))
        bring(self, slot, experts)

    monkeypatch.setattr(UnitWindows, "bring", counting)
    made = make()
    with swapped(made, tmp_path, stage_bytes=32 << 10) as module:
        window = module._store._windows.host
        for step in range(3):
            module.evict()
            loss = loss_of(module, step, number=1)
            module.evict()
            late.clear()
            before = window.mispredicted, window.dropped, module.bytes_read
            loss.backward()
            assert late == []
            assert window.mispredicted - before[0] <= 1
            assert window.dropped == before[1]
            assert (
                module.bytes_read - before[2] <= rest_bytes(made) + 6 * expert_bytes(made) + 12288
            )
            module.zero_grad()


@pytest.mark.parametrize("make", [lists, fused])
def test_accumulated_gradients_and_evaluation_in_between(make: Make, tmp_path: Path) -> None:
    ours, theirs = make(), make()
    with swapped(ours, tmp_path, share=0.6) as module:
        for step in range(3):
            losses = []
            for made in (module, theirs):
                first = loss_of(made, step, number=1)
                with torch.no_grad():
                    evaluated = loss_of(made, 90 + step, number=2)
                second = loss_of(made, 50 + step, number=4)
                (first * second).backward()
                losses.append((first.item(), evaluated.item(), second.item()))
            assert losses[0] == losses[1]
            assert_alike(grads_of(ours), grads_of(theirs), step)


@pytest.mark.parametrize("make", [lists, fused])
def test_gathered_and_loaded_weights_are_whole(make: Make, tmp_path: Path) -> None:
    """A block that changes weights has all of them, whatever was routed to before."""
    ours, theirs = make(), make()
    with swapped(ours, tmp_path, share=1.3) as module:
        loss_of(module, 0, number=1).backward()
        loss_of(theirs, 0, number=1).backward()
        with module.gather(), torch.no_grad():
            for parameter, other in zip(ours.parameters(), theirs.parameters(), strict=True):
                assert torch.equal(parameter, other)
                parameter.mul_(0.5)
        with torch.no_grad():
            for other in theirs.parameters():
                other.mul_(0.5)
        assert loss_of(module, 1).item() == loss_of(theirs, 1).item()
        with torch.no_grad():
            loss_of(module, 2, number=1)
        part = {name: t + 1 for name, t in theirs.state_dict().items() if "experts" in name}
        module.load_state_dict(part, strict=False)
        theirs.load_state_dict(part, strict=False)
        found = module.state_dict()
        for key, tensor in theirs.state_dict().items():
            assert torch.equal(found[key], tensor), key
        assert loss_of(module, 3).item() == loss_of(theirs, 3).item()


def test_rows_of_experts_without_tokens_are_nan_in_memory(tmp_path: Path) -> None:
    """Never the bytes of another layer, whose memory it was."""
    made = fused()
    with swapped(made, tmp_path) as module, torch.no_grad():
        loss_of(module, 0, number=1)
        layer = made.layers[-1]
        for expert in range(EXPERTS):
            row = layer.mixture.experts.up.detach()[expert]
            assert bool(row.isnan().all()) == (expert not in layer.mixture.hit)


def test_adapters_over_fused_experts_have_all_of_them(tmp_path: Path) -> None:
    """A parametrisation computes with the whole parameter."""

    class Doubled(torch.nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight * 2

    ours, theirs = fused(), fused()
    for made in (ours, theirs):
        for layer in made.layers:
            torch.nn.utils.parametrize.register_parametrization(
                layer.mixture.experts, "up", Doubled()
            )
    with swapped(ours, tmp_path) as module:
        for step in range(2):
            losses = []
            for made in (module, theirs):
                loss = loss_of(made, step, number=1)
                loss.backward()
                losses.append(loss.item())
            assert losses[0] == losses[1]
            assert_alike(grads_of(ours), grads_of(theirs), step)


@pytest.mark.parametrize("make", [lists, fused])
def test_a_read_of_experts_that_fails_is_raised_and_may_be_tried_again(
    make: Make, tmp_path: Path
) -> None:
    failing = Turns()
    skipped = Turns()

    def fail(kind: str, offset: int, nbytes: int) -> int:
        return errno.EIO if kind == "pread" and not skipped.take() and failing.take() else 0

    ours, theirs = make(), make()
    with (
        nvmeio.AioHandle(engine=FakeEngine(fail=fail)) as handle,
        swapped(ours, tmp_path, handle=handle) as module,
    ):
        wanted = loss_of(theirs, 0, number=2)
        wanted.backward()
        raised = 0
        for number in range(0, 40, 3):
            module.evict()
            module.zero_grad()
            skipped.left, failing.left = number, 1
            try:
                loss_of(module, 0, number=2).backward()
            except nvmeio.TransferError:
                raised += 1
            skipped.left = failing.left = 0
            assert held_of(module) == []
            module.zero_grad()
            loss = loss_of(module, 0, number=2)
            assert torch.equal(loss, wanted)
            loss.backward()
            assert_alike(grads_of(ours), grads_of(theirs), number)
        assert raised > 3


@pytest.mark.parametrize("make", [lists, fused])
def test_a_hook_that_raises_leaves_nothing_held(make: Make, tmp_path: Path) -> None:
    ours, theirs = make(), make()
    raising = Turns()

    def hook(*_: Any) -> None:
        if raising.take():
            raise RuntimeError("from a hook")

    for layer in ours.layers:
        experts = layer.mixture.experts
        for each in experts if isinstance(experts, torch.nn.ModuleList) else [experts]:
            each.register_forward_hook(hook)
    with swapped(ours, tmp_path) as module:
        raising.left = 1
        with pytest.raises(RuntimeError, match="from a hook"):
            loss_of(module, 0)
        assert held_of(module) == []
        loss = loss_of(module, 0)
        wanted = loss_of(theirs, 0)
        assert torch.equal(loss, wanted)
        loss.backward()
        wanted.backward()
        assert_alike(grads_of(ours), grads_of(theirs), 0)


@pytest.mark.parametrize("make", [lists, fused])
def test_a_forked_child_is_refused(make: Make, tmp_path: Path) -> None:
    with swapped(make(), tmp_path) as module:
        loss_of(module, 0)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                loss_of(module, 0)
            except nvmeio.ClosedError:
                status = 0
            os._exit(status)
        signal.alarm(30)
        assert os.waitpid(child, 0)[1] == 0
        signal.alarm(0)
        loss_of(module, 1).backward()


# Optimizers


def moved_by_steps(
    module: SwappedModule, optimizer: SwappedOptimizer, steps: int, number: int
) -> list[tuple[int, int]]:
    """Bytes that the optimizer reads and writes for each step, gradients included."""
    found = []
    for step in range(steps):
        before = optimizer.bytes_read, optimizer.bytes_written
        loss_of(module, step, number).backward()
        optimizer.step()
        found.append((optimizer.bytes_read - before[0], optimizer.bytes_written - before[1]))
        optimizer.zero_grad()
    return found


CLASSES: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 1e-2}),
    "Adam": (torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1}),
    "SGD": (torch.optim.SGD, {"lr": 1e-2}),
    "SGD-momentum": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 1e-2, "lr_decay": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 1e-3}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 1e-2}),
}


@pytest.mark.parametrize("gradients", ["memory", "disk"])
@pytest.mark.parametrize("name", CLASSES)
def test_state_of_listed_experts_without_tokens_is_neither_read_nor_written(
    name: str, gradients: str, tmp_path: Path
) -> None:
    """Any class: torch leaves out what has no gradient, and its state stays where it is."""
    kind, options = CLASSES[name]
    ours, theirs = lists(), lists()
    with (
        swapped(ours, tmp_path) as module,
        SwappedOptimizer(
            kind, module.parameters(), swap_dir=tmp_path, gradients=gradients, **options
        ) as optimizer,
    ):
        all_of_it = moved_by_steps(module, optimizer, 2, number=64)[1]
        for made in (ours, theirs):
            made.zero_grad()
        reference = kind(theirs.parameters(), **options)
        for step in range(2):
            loss_of(theirs, step, 64).backward()
            reference.step()
            reference.zero_grad()
        few = moved_by_steps(module, optimizer, 3, number=1)
        for step in range(3):
            loss_of(theirs, step, 1).backward()
            reference.step()
            reference.zero_grad()
        experts = sum(p.nbytes for n, p in ours.named_parameters() if ".experts." in n)
        whole = sum(p.nbytes for p in ours.parameters())
        for read, written in few:  # 2 of 8 experts
            share = 1 - 0.7 * experts / whole
            assert read < share * all_of_it[0] and written < share * all_of_it[1]
        found = module.state_dict()
        for key, tensor in theirs.state_dict().items():
            assert torch.equal(found[key], tensor), key
        state, wanted = optimizer.state_dict()["state"], reference.state_dict()["state"]
        assert state.keys() == wanted.keys()
        for number, entry in wanted.items():
            for each, value in entry.items():
                same = torch.equal if isinstance(value, torch.Tensor) else lambda a, b: a == b
                assert same(state[number][each], value), (number, each)


ALONE = {"SGD", "Adagrad"}  # a gradient of zeros changes nothing


@pytest.mark.parametrize("name", CLASSES)
def test_rows_of_fused_experts_are_left_alone_where_a_step_leaves_them(
    name: str, tmp_path: Path
) -> None:
    kind, options = CLASSES[name]
    ours, theirs = fused(), fused()
    reference = kind(theirs.parameters(), **options)
    with (
        swapped(ours, tmp_path) as module,
        SwappedOptimizer(
            kind,
            module.parameters(),
            swap_dir=tmp_path,
            subgroup_bytes=64 << 10,
            durable=False,
            **options,
        ) as optimizer,
    ):
        moved = moved_by_steps(module, optimizer, 4, number=1)
        for step in range(4):
            loss_of(theirs, step, 1).backward()
            reference.step()
            reference.zero_grad()
        first, rest = moved[0], moved[1:]
        for read, written in rest:
            assert (written < first[1] * 0.6) == (name in ALONE)
            assert read < first[0] or name not in ALONE
        found = module.state_dict()
        for key, tensor in theirs.state_dict().items():
            assert torch.equal(found[key], tensor), key
        state, wanted = optimizer.state_dict()["state"], reference.state_dict()["state"]
        for number, entry in wanted.items():
            for each, value in entry.items():
                same = torch.equal if isinstance(value, torch.Tensor) else lambda a, b: a == b
                assert same(state[number][each], value), (number, each)


def test_rows_whose_zeros_have_a_sign_are_stepped(tmp_path: Path) -> None:
    """SGD makes +0 of a weight of -0 where the gradient is -0, and leaves it where that is +0."""
    ours, theirs = fused(), fused()
    for made in (ours, theirs):
        with torch.no_grad():
            for layer in made.layers:
                layer.mixture.experts.up[:4] = -0.0
    reference = torch.optim.SGD(theirs.parameters(), lr=0.1)
    with (
        swapped(ours, tmp_path) as module,
        SwappedOptimizer(
            torch.optim.SGD, module.parameters(), swap_dir=tmp_path, lr=0.1
        ) as optimizer,
    ):
        for step in range(3):
            for made, steps in ((ours, optimizer), (theirs, reference)):
                for parameter in made.parameters():
                    parameter.grad = torch.zeros_like(parameter)
                if step == 2:
                    for layer in made.layers:
                        layer.mixture.experts.up.grad[2] = -0.0
                steps.step()
        for key, tensor in theirs.state_dict().items():
            found = module.state_dict()[key]
            assert torch.equal(found.view(torch.int32), tensor.view(torch.int32)), key


def test_steps_that_leave_rows_alone_are_resumed(tmp_path: Path) -> None:
    made = fused()
    options: dict[str, Any] = {"swap_dir": tmp_path, "resume": True, "lr": 0.1}
    with (
        swapped(made, tmp_path) as module,
        SwappedOptimizer(torch.optim.Adagrad, module.parameters(), **options) as optimizer,
    ):
        moved_by_steps(module, optimizer, 3, number=1)
        wanted = {name: t.clone() for name, t in module.state_dict().items()}
        state = optimizer.state_dict()["state"]
        sums = {n: (e["step"].clone(), e["sum"].clone()) for n, e in state.items()}
    again = fused()
    with (
        swapped(again, tmp_path) as module,
        SwappedOptimizer(torch.optim.Adagrad, module.parameters(), **options) as optimizer,
    ):
        assert optimizer.generation == 4
        for name, tensor in module.state_dict().items():
            assert torch.equal(tensor, wanted[name]), name
        for number, entry in optimizer.state_dict()["state"].items():
            assert torch.equal(entry["step"], sums[number][0])
            assert torch.equal(entry["sum"], sums[number][1])

"""Adapters trained over a streamed base: the losses and gradients of the model in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import thread
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import nvmeio
from nvmeio.checkpoint.safetensors import save_safetensors
from nvmeio.errors import ClosedError, TransferError
from nvmeio.testing import FakeEngine

Make = Callable[..., Any]

WIDTH = 64
LAYERS = 8


class Block(nn.Module):
    """Matrices that are multiplied with, a vector that is, and a bias."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.wide = nn.Linear(width, 2 * width)
        self.norm = nn.LayerNorm(2 * width)
        self.back = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x + self.back(nn.functional.gelu(self.norm(self.wide(x))))
        return found


class Adapted(nn.Module):
    """A linear layer with a matrix of low rank beside it, as PEFT makes it."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.base(x) + self.up(self.down(x))
        return found


def made(layers: int = LAYERS) -> nn.Sequential:
    return nn.Sequential(*(Block() for _ in range(layers)))


def saved(path: Path, layers: int = LAYERS) -> nn.Sequential:
    torch.manual_seed(0)
    model = made(layers)
    save_safetensors(model.state_dict(), path)
    return model.requires_grad_(False)


def empty(layers: int = LAYERS) -> nn.Sequential:
    with torch.device("meta"):
        return made(layers)


def adapted(model: nn.Module) -> list[nn.Parameter]:
    """Put adapters into a model, the same each time; returns what is trained."""
    torch.manual_seed(1)
    for block in model:  # type: ignore[attr-defined]
        block.wide, block.back = Adapted(block.wide), Adapted(block.back)
    return [p for p in model.parameters() if p.requires_grad]


def data(seed: int) -> torch.Tensor:
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(seed))


def plain(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(x)
    return found


def by_unit(model: Any, x: torch.Tensor) -> torch.Tensor:
    for block in model:
        x = checkpoint(block, x, use_reentrant=False)
    return x


def by_unit_reentrant(model: Any, x: torch.Tensor) -> torch.Tensor:
    x.requires_grad_()
    for block in model:
        x = checkpoint(block, x, use_reentrant=True)
    return x


def by_three(model: Any, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = checkpoint_sequential(model, 3, x, use_reentrant=False)
    return found


class Checkpointed(Block):
    """Checkpoints a function of its own, which computes with its weights and calls its parts."""

    reentrant = False

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        wide = nn.functional.linear(x, self.wide.base.weight) * self.norm.weight
        found: torch.Tensor = super().forward(x) + self.back(wide)
        return found

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = checkpoint(self._inner, x, use_reentrant=self.reentrant)
        return found


def by_function(model: Any, x: torch.Tensor) -> torch.Tensor:
    for block in model:
        block.__class__ = Checkpointed
    return plain(model, x)


def by_function_reentrant(model: Any, x: torch.Tensor) -> torch.Tensor:
    for block in model:
        block.__class__ = type("Reentrant", (Checkpointed,), {"reentrant": True})
    return plain(model, x.requires_grad_())


def trained(
    model: nn.Module, forward: Callable[..., torch.Tensor] = plain, steps: int = 3
) -> tuple[list[torch.Tensor], list[nn.Parameter]]:
    parameters = adapted(model)
    optimizer = torch.optim.AdamW(parameters, lr=0.01)
    losses = []
    for step in range(steps):
        loss = forward(model, data(step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, parameters


def assert_same(one: Any, other: Any) -> None:
    for mine, theirs in zip(one, other, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert a.equal(b)


def unit_bytes() -> int:
    """In pages of the file, at most."""
    return sum(p.nbytes for p in Block().parameters()) + 4 * 4096


@pytest.fixture
def base(tmp_path: Path, stream: Make) -> Make:
    """A model in memory, and one that streams."""

    def make(**options: Any) -> tuple[nn.Sequential, Any]:
        whole = saved(tmp_path / "base.safetensors")
        options.setdefault("resident_bytes", 2 * unit_bytes())
        return whole, stream(empty(), tmp_path / "base.safetensors", trainable=True, **options)

    return make


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize(
    "forward", [plain, by_unit, by_unit_reentrant, by_three, by_function, by_function_reentrant]
)
def test_losses_and_adapters_are_those_of_the_model_in_memory(
    base: Make, forward: Any, window: int
) -> None:
    whole, model = base(window=window)
    assert_same(trained(model, forward), trained(whole, forward))


@pytest.mark.parametrize(("forward", "most"), [(plain, 2), (by_unit, 2), (by_three, 3)])
def test_a_layer_is_read_twice_a_step(base: Make, forward: Any, most: int) -> None:
    """With a region of several layers that is computed again within backward, three times."""
    _, model = base(window=2)
    stream = model.weight_stream
    total = sum(unit.layout.nbytes for unit in stream.units)
    trained(model, forward, steps=2)
    before = stream.stats
    steps = 4
    for step in range(steps):
        forward(model, data(step)).sum().backward()
    after = stream.stats
    assert after.mispredicted == before.mispredicted
    assert total < (after.bytes_read - before.bytes_read) / steps <= most * total


def test_what_is_predicted_is_right_from_the_first_step_on(base: Make) -> None:
    _, model = base(window=2)
    trained(model, plain, steps=2)
    assert model.weight_stream.stats.mispredicted == 0


def test_evaluation_in_between_unlearns_nothing(base: Make) -> None:
    _, model = base(window=2)
    stream = model.weight_stream
    trained(model, by_three, steps=2)

    def both() -> None:
        model.eval()
        with torch.no_grad():
            model(data(7))
            model(data(8))
        model.train()
        by_three(model, data(0)).sum().backward()

    both()
    before = stream.stats.mispredicted
    both()
    assert stream.stats.mispredicted <= before + 1  # evaluation does not say that it is over


def test_gradients_accumulate_and_a_graph_is_gone_through_twice(base: Make) -> None:
    both = []
    for model in base(window=1):
        parameters = adapted(model)
        for seed in range(3):
            (model(data(seed)).square().mean() / 3).backward()
        loss = model(data(9)).square().mean()
        first = torch.autograd.grad(loss, parameters, retain_graph=True)
        second = torch.autograd.grad(loss, parameters)
        assert_same([first], [second])
        both.append([[p.grad for p in parameters], first])
    assert_same(*both)


def test_create_graph_raises_memory_error_and_leaves_the_model_usable(base: Make) -> None:
    """Backward through backward: torch keeps what the first one used, which nobody can replace."""
    whole, model = base(window=2)
    adapted(model)
    x = data(0).requires_grad_()
    with pytest.raises(MemoryError, match="by references to weights"):
        torch.autograd.grad(model(x).square().mean(), x, create_graph=True)
    adapted(whole)
    assert model(x).equal(whole(x))


@pytest.mark.parametrize("resident", [1, 3, LAYERS])
def test_layers_that_stay_are_not_read_again(base: Make, resident: int) -> None:
    size = unit_bytes()
    whole, model = base(window=1, resident_bytes=(resident + 1) * size)
    stream = model.weight_stream
    assert sum(unit.resident for unit in stream.units) >= resident
    assert_same(trained(model), trained(whole))
    before = stream.stats.bytes_read
    model(data(0)).sum().backward()
    assert stream.stats.bytes_read - before <= 2 * stream.stats.streamed_bytes


# What goes wrong


def test_a_closed_stream_ends_backward_plainly_and_goes_on_once_reopened(base: Make) -> None:
    whole, model = base(window=1)
    both = [adapted(whole), adapted(model)]
    loss = model(data(0)).square().mean()
    model.weight_stream.close()
    with pytest.raises(ClosedError, match="reopen"):
        loss.backward()
    model.weight_stream.reopen()
    model.zero_grad()
    model(data(0)).square().mean().backward()
    whole(data(0)).square().mean().backward()
    assert_same(*[[[p.grad for p in parameters]] for parameters in both])


def test_a_graph_outlives_a_close_and_a_reopening(base: Make) -> None:
    whole, model = base(window=1)
    both = [adapted(whole), adapted(model)]
    loss = model(data(0)).square().mean()
    model.weight_stream.close()
    model.weight_stream.reopen()
    loss.backward()
    whole(data(0)).square().mean().backward()
    assert_same(*[[[p.grad for p in parameters]] for parameters in both])


@pytest.mark.parametrize("forward", [plain, by_unit])
def test_an_error_of_a_users_hook_leaves_the_model_usable(base: Make, forward: Any) -> None:
    whole, model = base(window=1)
    both = [adapted(whole), adapted(model)]

    def fail(*_: Any) -> None:
        raise RuntimeError("of the user")

    for hooked in (model[4].wide.base, model[4]):
        for register in (hooked.register_forward_hook, hooked.register_full_backward_hook):
            hook = register(fail)
            with pytest.raises(RuntimeError, match="of the user"):
                forward(model, data(0)).square().mean().backward()
            hook.remove()
    model.zero_grad()
    forward(model, data(0)).square().mean().backward()
    forward(whole, data(0)).square().mean().backward()
    assert_same(*[[[p.grad for p in parameters]] for parameters in both])


def test_a_read_that_fails_in_backward_is_raised_there(tmp_path: Path, stream: Make) -> None:
    whole = saved(tmp_path / "base.safetensors")
    broken = threading.Event()

    def fail(kind: str, offset: int, nbytes: int) -> int:
        return 5 if broken.is_set() else 0

    with nvmeio.AioHandle(engine=FakeEngine(fail=fail)) as handle:
        path = tmp_path / "base.safetensors"
        model = stream(empty(), path, trainable=True, window=1, resident_bytes=2 * unit_bytes(),
                       handle=handle)  # fmt: skip
        both = [adapted(whole), adapted(model)]
        loss = model(data(0)).square().mean()
        broken.set()
        with pytest.raises(TransferError):
            loss.backward()
        broken.clear()
        model.zero_grad()
        model(data(0)).square().mean().backward()
        whole(data(0)).square().mean().backward()
        assert_same(*[[[p.grad for p in parameters]] for parameters in both])
        model.weight_stream.close()


def test_two_threads_train_over_one_base(base: Make) -> None:
    """Each its own inputs: the gradients of both, computed side by side.

    Backward may keep a layer's memory while it asks for the same layer again, which the other
    thread has put out meanwhile: two for each.
    """
    whole, model = base(window=4, resident_bytes=4 * unit_bytes())
    both = [adapted(whole), adapted(model)]
    barrier = threading.Barrier(2, timeout=60)

    def grads(model: Any, seed: int, wait: bool) -> tuple[torch.Tensor, ...]:
        torch.set_num_threads(1)  # of this thread, too
        parameters = both[0] if model is whole else both[1]
        if wait:
            barrier.wait()
        loss = model(data(seed)).square().mean()
        return torch.autograd.grad(loss, parameters)

    with thread(grads, model, 1, True) as beside:
        mine = grads(model, 2, True)
    assert_same([mine, beside[0]], [grads(whole, 2, False), grads(whole, 1, False)])


def test_gradients_of_the_base_are_refused(base: Make) -> None:
    _, model = base()
    model[2].wide.weight.requires_grad_()
    with pytest.raises(RuntimeError, match="requires gradients"):
        model(data(0))
    model[2].wide.weight.requires_grad_(False)
    model(data(0))


@pytest.mark.parametrize("resident", [False, True])
def test_a_weight_cannot_be_changed(base: Make, resident: bool) -> None:
    """As adapters are merged: in memory it would be lost, or reach one layer and not another."""
    options = {"resident_bytes": 20 * unit_bytes()} if resident else {}
    whole, model = base(**options)
    model(data(0))
    weight = model[0].wide.weight
    with pytest.raises(RuntimeError, match="cannot be merged"):
        weight.data += torch.ones_like(whole[0].wide.weight)
    with pytest.raises(RuntimeError, match="cannot be merged"):
        weight.data = torch.ones_like(whole[0].wide.weight)
    assert model(data(0)).equal(whole(data(0)))


def test_a_state_dict_is_that_of_what_is_trained(base: Make) -> None:
    _, model = base()
    adapted(model)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    assert set(state) == {name for name, p in model.named_parameters() if p.requires_grad}
    before = model(data(0))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.zero_()
    assert not model(data(0)).equal(before)
    assert model.load_state_dict(state).missing_keys == []
    assert model(data(0)).equal(before)
    with pytest.raises(RuntimeError, match=r"Missing key.*up\.weight"):
        model.load_state_dict({})
    with pytest.raises(RuntimeError, match="reads its weights from its checkpoint"):
        model.load_state_dict(whole_state())


def whole_state() -> dict[str, torch.Tensor]:
    model = made()
    adapted(model)
    return model.state_dict()


@pytest.mark.parametrize(
    ("options", "message"),
    [({"device": "meta"}, "not on meta"), ({"kv_offload": True}, "kv_offload")],
)
def test_trainable_refuses_options_that_exclude_it(
    options: dict[str, Any], message: str, tmp_path: Path, stream: Make
) -> None:
    saved(tmp_path / "base.safetensors")
    with pytest.raises(ValueError, match=message):
        stream(empty(), tmp_path / "base.safetensors", trainable=True, **options)

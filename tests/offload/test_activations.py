"""`SwappedActivations`: gradients of saved tensors that were on the drive, bit for bit."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from support import run_python, spin_until, spin_until_collected, thread
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import nvmeio
from nvmeio._io import drives
from nvmeio._residency import calls
from nvmeio._storage import durable
from nvmeio.offload import SwappedActivations, SwappedModule
from nvmeio.testing import FakeEngine

Loss = Callable[[], torch.Tensor]


@pytest.fixture
def handle() -> Iterator[nvmeio.AioHandle]:
    with nvmeio.AioHandle() as made:
        yield made


@pytest.fixture
def swapped(tmp_path: Path, handle: nvmeio.AioHandle) -> Iterator[SwappedActivations]:
    """With a window that holds next to nothing."""
    with small(tmp_path, handle) as made:
        yield made


def small(folder: Any, handle: nvmeio.AioHandle | None = None, **options: Any) -> Any:
    options = {"resident_bytes": 8192, "min_bytes": 1024, **options}
    return SwappedActivations(swap_dir=folder, handle=handle, **options)


class Scaled(torch.autograd.Function):
    """A user's own, which saves an input and an output."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x.sin() * x
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        x, y = ctx.saved_tensors
        found: torch.Tensor = grads[0] * (x.cos() * x + y)
        return found


class Custom(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = Scaled.apply(x)  # type: ignore[no-untyped-call]
        return found


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        found: torch.Tensor = x + self.out(mixed.transpose(1, 2).flatten(2))
        return found


def mlp(layers: int = 6) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(layers)))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (64, 32)),
    "dropout": (lambda: nn.Sequential(mlp(2), nn.Dropout(0.5), mlp(2)), (64, 32)),
    "custom": (lambda: nn.Sequential(mlp(1), Custom(), mlp(1), Custom()), (64, 32)),
    "attention": (lambda: nn.Sequential(*(Attention(32, 4) for _ in range(3))), (2, 24, 32)),
    "convolutions": (
        lambda: nn.Sequential(
            *(m for _ in range(3) for m in (nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU())),
            nn.MaxPool2d(2),
        ),
        (3, 4, 16, 16),
    ),
    "recurrent": (lambda: First(nn.LSTM(32, 32, 2)), (12, 4, 32)),
}


class First(nn.Module):
    """What a module gives first."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(x)[0]
        return found


def made(name: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    make, shape = MODELS[name]
    return make(), torch.randn(shape)


def gradients(module: nn.Module, backward: Callable[[], object]) -> list[torch.Tensor]:
    module.zero_grad()
    torch.manual_seed(1)
    backward()
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


def assert_same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    assert wanted
    for number, (a, b) in enumerate(zip(found, wanted, strict=True)):
        assert torch.equal(a, b), f"gradient {number} differs"


def loss_within(swapped: SwappedActivations, loss: Loss) -> torch.Tensor:
    with swapped.saving():
        return loss()


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
    assert swapped._store._file.used_bytes == 0


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
            spin_until(lambda: swapped._store._file.used_bytes == 0)
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


# What is written, and what is not


def test_the_window_holds_what_was_saved_last(tmp_path: Path, handle: nvmeio.AioHandle) -> None:
    module, x = made("mlp")
    x = x.repeat(16, 1)
    with small(tmp_path, handle, resident_bytes=8 * x.nbytes) as swapped:
        loss = loss_within(swapped, lambda: module(x).square().mean())
        assert swapped.in_memory_bytes <= 4 * x.nbytes
        spin_until(lambda: swapped.on_drive_bytes >= 6 * x.nbytes)
        loss.backward()
        assert swapped.bytes_read <= swapped.bytes_written


def test_nothing_is_written_where_all_fits(tmp_path: Path, handle: nvmeio.AioHandle) -> None:
    module, x = made("mlp")
    with small(tmp_path, handle, resident_bytes="1M") as swapped:
        loss_within(swapped, lambda: module(x).square().mean()).backward()
        assert (swapped.bytes_written, swapped.file_bytes) == (0, 0)


def filler(swapped: SwappedActivations) -> torch.Tensor:
    """A graph that alone is more than the window holds."""
    module, x = made("mlp")
    with swapped.saving():
        found: torch.Tensor = module(x)
        return found


def test_what_somebody_holds_is_not_written_nor_held_twice(swapped: SwappedActivations) -> None:
    seen: list[int] = []

    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            seen.append(ctx.saved_tensors[0].data_ptr())
            return grads[0]

    weight = nn.Parameter(torch.randn(64, 64))
    held = torch.randn(64, 64) * weight
    with swapped.saving():
        loss: Any = Looks.apply(held)  # type: ignore[no-untyped-call]
        loss = loss + Looks.apply(weight.t())  # type: ignore[no-untyped-call]
    filler(swapped)
    loss.sum().backward()
    assert sorted(seen) == sorted([held.data_ptr(), weight.data_ptr()])


def test_a_storage_is_written_once_however_often_it_is_saved(
    swapped: SwappedActivations,
) -> None:
    start = torch.randn(64, 64, requires_grad=True)
    base = start * 1
    wanted = torch.autograd.grad((base.t() * base[::2].sum(0)).square().sum(), start)[0]
    with swapped.saving():
        again = start * 1
        loss = (again.t() * again[::2].sum(0)).square().sum()
    del again
    filler(swapped)
    spin_until(lambda: swapped.on_drive_bytes == 2 * start.nbytes)  # `again`, and the product
    loss.backward()
    assert start.grad is not None
    assert torch.equal(start.grad, wanted)


def test_what_was_changed_in_place_is_refused(swapped: SwappedActivations) -> None:
    start = torch.randn(64, 64, requires_grad=True)
    with swapped.saving():
        middle = start * 2
        loss = (middle * middle).sum()
    middle.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Doubles(torch.autograd.Function):
    """Its backward changes what was saved."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        x.mul_(2)
        return grads[0] * x


def test_a_change_by_backward_is_refused_in_the_next_one(swapped: SwappedActivations) -> None:
    start = torch.ones(64, 64, requires_grad=True)
    with swapped.saving():
        loss: Any = Doubles.apply(start * 1)  # type: ignore[no-untyped-call]
        loss = loss.sum()
    filler(swapped)
    loss.backward(retain_graph=True)
    assert start.grad is not None
    assert bool((start.grad == 2).all())
    for _ in range(2):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward(retain_graph=True)


class Odd(torch.Tensor):
    """Of a user."""


def odd_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    square = torch.randn(64, 64)
    return {
        "complex": torch.randn(64, 64, dtype=torch.complex64),
        "conjugated": torch.randn(64, 64, dtype=torch.complex64).conj(),
        "negated": torch.randn(64, 64, dtype=torch.complex64).conj().imag,
        "bool": square > 0,
        "bfloat16": square.bfloat16(),
        "float8": square.to(torch.float8_e4m3fn),
        "transposed": square.clone().t(),
        "strided": square.clone()[3::5, ::7],
        "expanded": torch.randn(1024).expand(8, 1024),
        "empty": torch.empty(0, 5),
        "scalar": torch.tensor(1.5),
        "int64": torch.arange(4096),
        "sparse": square.relu().to_sparse(),
        "subclass": square.clone().as_subclass(Odd),
        "meta": torch.empty(64, 64, device="meta"),
        "numpy": torch.from_numpy(numpy.arange(4096)),
        "channels": torch.randn(2, 8, 8, 8).to(memory_format=torch.channels_last),
    }


@pytest.mark.parametrize("name", odd_tensors())
def test_tensors_of_every_kind_come_back_as_they_were(
    swapped: SwappedActivations, name: str
) -> None:
    found: list[torch.Tensor] = []

    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, name: str) -> torch.Tensor:
            kept = odd_tensors()[name]
            ctx.save_for_backward(kept)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            found.extend(ctx.saved_tensors)
            return grads[0], None

    with swapped.saving():
        loss = Keeps.apply(torch.ones(1, requires_grad=True), name)  # type: ignore[no-untyped-call]
    filler(swapped)
    loss.backward()
    wanted = odd_tensors()[name]
    assert type(found[0]) is type(wanted)
    assert (found[0].dtype, found[0].shape) == (wanted.dtype, wanted.shape)
    assert found[0].layout == wanted.layout
    if name != "meta":
        values = [t.to_dense().to(torch.complex128) for t in (found[0], wanted)]
        assert torch.equal(*values)
    if wanted.layout is torch.strided:
        assert found[0].stride() == wanted.stride()


def test_memory_of_others_is_left_where_it_is(swapped: SwappedActivations) -> None:
    """numpy still has it, and what numpy does to it counts, as without this."""
    start = torch.ones(4096, dtype=torch.float64, requires_grad=True)
    theirs = numpy.ones(4096)
    with swapped.saving():
        loss = (start * torch.from_numpy(theirs)).sum()
    filler(swapped)
    theirs[:] = 3
    loss.backward()
    assert start.grad is not None
    assert bool((start.grad == 3).all())


# Drives


def test_several_drives_share_the_bytes(tmp_path: Path, handle: nvmeio.AioHandle) -> None:
    module, x = made("mlp")
    x = x.repeat(64, 1)
    wanted = gradients(module, lambda: module(x).square().mean().backward())
    folders = [tmp_path / "a", tmp_path / "b"]
    with small(folders, handle, resident_bytes="16K") as swapped:
        found = gradients(
            module, lambda: loss_within(swapped, lambda: module(x).square().mean()).backward()
        )
        assert_same(found, wanted)
        sizes = [os.stat(f"/proc/self/fd/{fd_of(file)}").st_size for file in files_of(swapped)]
        assert min(sizes) > 0
        assert sum(sizes) == swapped.file_bytes
    assert [list(folder.iterdir()) for folder in folders] == [[], []]


def files_of(swapped: SwappedActivations) -> list[nvmeio.File]:
    return swapped._store._file._files


def fd_of(file: nvmeio.File) -> int:
    opened = file.acquire(False)
    try:
        return opened.any_fd()
    finally:
        opened.release()


def test_a_full_drive_is_told_by_forward(
    swapped: SwappedActivations, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, x = made("mlp")
    wanted = gradients(module, lambda: module(x).square().mean().backward())

    def full(fd: int, nbytes: int, path: str) -> None:
        raise nvmeio.TransferError(errno.ENOSPC, operation="fallocate", path=path, nbytes=nbytes)

    with monkeypatch.context() as patch:
        patch.setattr(durable, "reserve", full)
        with pytest.raises(nvmeio.TransferError, match="or raise resident_bytes=8192") as told:
            loss_within(swapped, lambda: module(x).square().mean())
        assert told.value.errno == errno.ENOSPC
    del told
    found = gradients(
        module, lambda: loss_within(swapped, lambda: module(x).square().mean()).backward()
    )
    assert_same(found, wanted)


def test_a_drive_that_takes_nothing_is_told_by_forward(tmp_path: Path) -> None:
    module, x = made("mlp")
    wanted = gradients(module, lambda: module(x).square().mean().backward())
    fails = {"pwrite": errno.EIO, "pread": 0}
    engine = FakeEngine(fail=lambda kind, *_: fails[kind])
    with nvmeio.AioHandle(engine=engine) as handle, small(tmp_path, handle) as swapped:
        with pytest.raises(nvmeio.TransferError) as told:
            loss_within(swapped, lambda: module(x).square().mean())
        assert told.value.errno == errno.EIO
        del told
        fails["pwrite"] = 0
        found = gradients(
            module, lambda: loss_within(swapped, lambda: module(x).square().mean()).backward()
        )
        assert_same(found, wanted)


@pytest.mark.parametrize("of", ["room", "writes"])
def test_what_cannot_be_written_stays_in_memory_while_it_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of: str
) -> None:
    """Neither this pass nor the next one has lost anything."""
    module, x = made("mlp")
    wanted = gradients(module, lambda: module(x).square().mean().backward())

    def full(fd: int, nbytes: int, path: str) -> None:
        raise nvmeio.TransferError(errno.ENOSPC, operation="fallocate", path=path, nbytes=nbytes)

    tried: list[str] = []

    def fail(kind: str, *_: object) -> int:
        tried.append(kind)
        return errno.EIO

    if of == "room":
        monkeypatch.setattr(durable, "reserve", full)
    with (
        nvmeio.AioHandle(engine=FakeEngine(fail=fail)) as handle,
        small(tmp_path, handle, resident_bytes=32 * x.nbytes) as swapped,
    ):
        for _ in range(2):
            loss = loss_within(swapped, lambda: module(x).square().mean())
            assert swapped.in_memory_bytes > 8 * x.nbytes  # so some of it should have gone
            spin_until(lambda: not swapped._store._writing)
            if of == "writes":
                assert "pwrite" in tried
            assert_same(gradients(module, loss.backward), wanted)
            assert swapped.bytes_written == 0


def test_what_cannot_be_read_is_told_by_backward(tmp_path: Path) -> None:
    module, x = made("mlp")
    engine = FakeEngine(fail=lambda kind, *_: errno.EIO if kind == "pread" else 0)
    with nvmeio.AioHandle(engine=engine) as handle, small(tmp_path, handle) as swapped:
        loss = loss_within(swapped, lambda: module(x).square().mean())
        spin_until(lambda: swapped.on_drive_bytes > 0)
        with pytest.raises(nvmeio.TransferError) as told:
            loss.backward()
        assert told.value.errno == errno.EIO
        assert next(module.parameters()).grad is None


@pytest.mark.parametrize("checksum", [True, False])
def test_bits_that_flip_are_told_by_backward(
    tmp_path: Path, handle: nvmeio.AioHandle, checksum: bool
) -> None:
    module, x = made("mlp")
    wanted = gradients(module, lambda: module(x).square().mean().backward())
    with small(tmp_path, handle, checksum=checksum) as swapped:
        loss = loss_within(swapped, lambda: module(x).square().mean())
        spin_until(lambda: swapped.on_drive_bytes > 0)
        spin_until(lambda: not swapped._store._writing)
        for file in files_of(swapped):
            opened = file.acquire(True)
            try:
                os.pwrite(opened.buffered_fd(), b"\x01" * 65536, 0)
                os.fsync(opened.buffered_fd())
            finally:
                opened.release()
        if checksum:
            with pytest.raises(nvmeio.IntegrityError, match="saved activations are not what"):
                loss.backward()
        else:  # so it was these bytes that backward took
            assert any(
                not torch.equal(each, right)
                for each, right in zip(gradients(module, loss.backward), wanted, strict=True)
            )


# Ends


def test_what_is_closed_says_so(swapped: SwappedActivations) -> None:
    module, x = made("mlp")
    loss = loss_within(swapped, lambda: module(x).square().mean())
    swapped.close()
    swapped.close()
    with pytest.raises(nvmeio.ClosedError, match="swapped activations are closed"):
        loss.backward()
    with pytest.raises(nvmeio.ClosedError), swapped.saving():
        pass
    assert "closed" in repr(swapped)


def test_it_lives_as_long_as_its_graphs(tmp_path: Path, handle: nvmeio.AioHandle) -> None:
    module, x = made("mlp")
    wanted = gradients(module, lambda: module(x).square().mean().backward())

    def backward() -> None:
        loss = loss_within(small(tmp_path, handle), lambda: module(x).square().mean())
        loss.backward()

    assert_same(gradients(module, backward), wanted)
    spin_until_collected(
        lambda: not any(t.name == "nvmeio-activations" for t in threading.enumerate())
    )


def test_a_forward_that_raises_leaves_nothing(swapped: SwappedActivations) -> None:
    module, x = made("mlp")
    wanted = gradients(module, lambda: module(x).square().mean().backward())

    def broken() -> torch.Tensor:
        module(x)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        loss_within(swapped, broken)
    found = gradients(
        module, lambda: loss_within(swapped, lambda: module(x).square().mean()).backward()
    )
    assert_same(found, wanted)
    spin_until_collected(lambda: swapped.on_drive_bytes + swapped.in_memory_bytes == 0)


def test_a_program_may_end_in_the_middle_and_a_child_is_refused(tmp_path: Path) -> None:
    done = run_python(
        f"""
        import os, torch, nvmeio, warnings
        from nvmeio.offload import SwappedActivations

        warnings.simplefilter("ignore")  # of a fork beside threads

        torch.set_num_threads(1)
        activations = SwappedActivations(
            swap_dir={str(tmp_path)!r}, resident_bytes=8192, min_bytes=1024)
        module = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(6)))
        with activations.saving():
            loss = module(torch.randn(64, 32)).square().mean()
        child = os.fork()
        if not child:
            try:
                loss.backward()
            except nvmeio.ClosedError as told:
                os._exit(7 if "forked" in str(told) else 8)
            os._exit(9)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), activations.on_drive_bytes > 0)
        """
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "7 True\n", "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"resident_bytes": 100}, "resident_bytes must be 8192 or more"),
        ({"resident_bytes": "much"}, "is not a size"),
        ({"device_bytes": 100}, "device_bytes must be 8192 or more"),
        ({"min_bytes": 0}, "min_bytes must be 1 or more"),
        ({"checksum": 3}, "checksum must be true or false"),
        ({"handle": 3}, "handle must be an nvmeio.AioHandle"),
        ({"swap_dir": []}, "swap_dir is empty"),
    ],
)
def test_arguments_that_cannot_be_are_refused(
    tmp_path: Path, options: dict[str, Any], says: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=says):
        SwappedActivations(**{"swap_dir": tmp_path, **options})


def test_a_directory_that_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        SwappedActivations(swap_dir=tmp_path / "no" / "where")
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        SwappedActivations(swap_dir=tmp_path / "file")

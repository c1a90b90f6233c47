"""What is changed behind the optimizer's back, and what fails half way: told of, or undone."""

from __future__ import annotations

import contextlib
import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from _offload_models import assert_same_weights, loss_of, model, train

import nvmeio
from nvmeio.offload import SwappedModule, SwappedOptimizer
from nvmeio.offload._optimizer import turns
from nvmeio.offload._swap_files import pipeline
from nvmeio.offload._swap_files.swap_dirs import SwapDir

SMALL: dict[str, Any] = {"subgroup_bytes": 64 << 10, "durable": False}


def swapped(made: Any, folder: Path, **options: Any) -> SwappedOptimizer:
    return SwappedOptimizer(
        torch.optim.Adam, made.parameters(), swap_dir=folder, **{**SMALL, **options}
    )


# Groups and parameters


def append(groups: Any) -> None:
    groups[0]["params"].append(torch.nn.Parameter(torch.ones(3)))


def pop(groups: Any) -> None:
    groups[0]["params"].pop()


def replace(groups: Any) -> None:
    groups[0]["params"][0] = torch.nn.Parameter(torch.ones(3))


def take_out(groups: Any) -> None:
    del groups[0]


@pytest.mark.parametrize("change", [append, pop, replace, take_out])
def test_groups_that_are_changed_by_hand_are_refused(change: Any, tmp_path: Path) -> None:
    """A parameter that was appended was never stepped, one that was taken out still was."""
    ours, theirs = model(), model()
    with swapped(ours, tmp_path) as optimizer:
        loss_of(ours, 0).backward()
        kept = list(optimizer.param_groups)
        change(optimizer.param_groups)
        with pytest.raises(RuntimeError, match="by hand"):
            optimizer.step()
        assert_same_weights(ours, theirs)
        assert optimizer.generation == 1
        optimizer.param_groups[:] = kept
        optimizer.param_groups[0]["params"] = list(ours.parameters())
        optimizer.step()
    train(theirs, torch.optim.Adam(theirs.parameters()), 1)
    assert_same_weights(ours, theirs)


def test_a_split_parameter_that_is_laid_out_otherwise_is_refused(tmp_path: Path) -> None:
    """Its pieces were copies then, which were stepped in its place."""
    weight = torch.nn.Parameter(torch.randn(200, 300))
    with SwappedOptimizer(torch.optim.Adam, [weight], swap_dir=tmp_path, **SMALL) as optimizer:
        assert optimizer.plan.subgroups > 1
        weight.data = weight.data.t().contiguous().t()
        weight.grad = torch.ones_like(weight)
        with pytest.raises(RuntimeError, match="contiguity"):
            optimizer.step()


@pytest.mark.parametrize("where", ["gradients", "state", "buffers"])
def test_a_group_that_cannot_be_added_changes_nothing(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine kept the group: later numbers meant other parameters; without buffers it hung."""
    ours, theirs = model(), model()
    more, others = (torch.nn.Linear(200, 300) for _ in range(2))
    others.load_state_dict(more.state_dict())
    reference = torch.optim.Adam(theirs.parameters())
    options: dict[str, Any] = {"gradients": "disk", "subgroup_bytes": 1 << 20}
    with swapped(ours, tmp_path, **options) as optimizer:
        train(ours, optimizer, 2)
        train(theirs, reference, 2)
        with monkeypatch.context() as patch:
            left = [1]

            def full(self: SwapDir, name: str, nbytes: int) -> Any:
                if name == ("gradients" if where == "gradients" else "state.1"):
                    raise nvmeio.TransferError(errno.ENOSPC, operation="fallocate", path=name)
                return allocate(self, name, nbytes)

            def no_memory(nbytes: int) -> Any:
                if left.pop():
                    left.append(0)
                    raise MemoryError(nbytes)
                left.append(0)
                return pool(nbytes)

            allocate, pool = SwapDir.allocate, pipeline.PinnedPool
            if where == "buffers":
                patch.setattr(pipeline, "PinnedPool", no_memory)
            else:
                patch.setattr(SwapDir, "allocate", full)
            with pytest.raises((nvmeio.TransferError, MemoryError)):
                optimizer.add_param_group({"params": list(more.parameters())})
        assert len(optimizer.param_groups) == 1
        assert optimizer.broken == ""
        assert train(ours, optimizer, 2, 2) == train(theirs, reference, 2, 2)
        optimizer.add_param_group({"params": list(more.parameters()), "lr": 0.5})
        reference.add_param_group({"params": list(others.parameters()), "lr": 0.5})
        for extra, made, stepping in ((more, ours, optimizer), (others, theirs, reference)):
            extra(torch.ones(1, 200)).sum().backward()
            train(made, stepping, 2, 4)
        assert_same_weights(ours, theirs)
        assert_same_weights(more, others)


# Loading


@pytest.mark.parametrize("ratio", [0.0, 0.5])
def test_masters_that_stay_in_memory_reach_the_parameters(ratio: float, tmp_path: Path) -> None:
    """Those on the drive did, those in memory only with the next step."""
    first, second = model(torch.bfloat16), model(torch.bfloat16)
    options: dict[str, Any] = {"master_dtype": torch.float32, "lr": 1e-2, "ratio": ratio}
    for name in "ab":
        (tmp_path / name).mkdir()
    with (
        swapped(first, tmp_path / "a", **options) as one,
        swapped(second, tmp_path / "b", **options) as two,
    ):
        train(first, one, 3)
        two.load_state_dict(one.state_dict())
        assert_same_weights(second, first)


def test_masters_that_cannot_be_brought_back_break_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state was that of the state dict, the weights were partly those of before."""
    first, second = model(torch.bfloat16), model(torch.bfloat16)
    options: dict[str, Any] = {"master_dtype": torch.float32}
    for name in "ab":
        (tmp_path / name).mkdir()
    with (
        swapped(first, tmp_path / "a", **options) as one,
        swapped(second, tmp_path / "b", **options) as two,
    ):
        train(first, one, 1)

        def fail(*args: Any) -> None:
            raise nvmeio.TransferError(errno.EIO, operation="read", path="state.0")

        monkeypatch.setattr(turns.Swapped, "give_back", fail)
        with pytest.raises(nvmeio.TransferError):
            two.load_state_dict(one.state_dict())
        with pytest.raises(nvmeio.NvmeioError, match="load again"):
            two.step()


# Parameters on the drive


def linears() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))


@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("on_disk", [False, True])
def test_backward_through_weights_that_have_changed_is_refused(
    on_disk: bool, masters: bool, tmp_path: Path
) -> None:
    """torch refuses it in memory; from the drive it went through the new weights, silently."""
    dtype = torch.bfloat16 if masters else torch.float32
    made: Any = linears().to(dtype)
    module = SwappedModule(made, swap_dir=tmp_path, resident_bytes=1 << 20) if on_disk else made
    options: dict[str, Any] = {"master_dtype": torch.float32 if masters else None}
    with swapped(module, tmp_path, **options) as optimizer:
        x = torch.randn(2, 64, dtype=dtype)
        first, second = module(x).sum(), module(x).sum()
        first.backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match=r"forward again|modified by an inplace operation"):
            second.backward()
        optimizer.zero_grad()
        made[0].requires_grad_(False)
        third, fourth = module(x).sum(), module(x).sum()
        third.backward()
        fourth.backward()  # nothing has changed meanwhile
    if on_disk:
        module.close()


def test_what_is_frozen_may_be_gone_through_after_a_step(tmp_path: Path) -> None:
    ours, theirs = linears(), linears()
    with SwappedModule(ours, swap_dir=tmp_path, resident_bytes=1 << 20) as module:
        for made in (ours, theirs):
            made[1:].requires_grad_(False)
        reference = torch.optim.SGD(theirs[0].parameters(), lr=0.1)
        with SwappedOptimizer(
            torch.optim.SGD, ours[0].parameters(), swap_dir=tmp_path, lr=0.1
        ) as optimizer:
            x = torch.randn(2, 64)
            pairs: tuple[tuple[Any, Any], ...] = ((module, optimizer), (theirs, reference))
            for made, stepping in pairs:
                first, second = made(x).sum(), made(x).square().sum()
                first.backward()
                stepping.step()
                second.backward()  # through weights that are frozen, and so the same
            for p, q in zip(ours[0].parameters(), theirs[0].parameters(), strict=True):
                assert torch.equal(p.grad, q.grad)


def test_a_gather_that_raises_has_not_happened(tmp_path: Path) -> None:
    """The changes were there until the parameter left memory, and then no more."""
    made = linears()
    with SwappedModule(made, swap_dir=tmp_path, resident_bytes=1 << 20) as module:
        x = torch.randn(2, 64)
        before = module(x)
        with pytest.raises(ZeroDivisionError), module.gather(made[0].weight), torch.no_grad():
            made[0].weight.zero_()
            raise ZeroDivisionError
        assert torch.equal(module(x), before)
        module.evict()
        assert torch.equal(module(x), before)


def test_loaded_masters_are_seen_by_the_next_forward(tmp_path: Path) -> None:
    """The window still had the weights of before."""
    options: dict[str, Any] = {"master_dtype": torch.float32, "lr": 1e-2}
    first, second = (linears().bfloat16() for _ in range(2))
    for name in "ab":
        (tmp_path / name).mkdir()
    with (
        SwappedModule(second, swap_dir=tmp_path / "b", resident_bytes=1 << 20) as module,
        swapped(first, tmp_path / "a", **options) as one,
        swapped(module, tmp_path / "b", **options) as two,
    ):
        x = torch.randn(2, 64).bfloat16()
        for _ in range(2):
            first(x).square().sum().backward()
            one.step()
            one.zero_grad()
        module(x)
        two.load_state_dict(one.state_dict())
        assert torch.equal(module(x), first(x))


@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("on_drive", [False, True])
def test_masters_begin_with_weights_that_were_trained_in_memory(
    on_drive: bool, before: bool, ratio: float, tmp_path: Path
) -> None:
    """They were those of a run `before`, or of the module before it was loaded, without a word."""
    options: dict[str, Any] = {"master_dtype": torch.float32, "lr": 1e-2, "ratio": ratio}
    x = torch.randn(2, 64).bfloat16()

    def step(made: Any, optimizer: Any) -> None:
        made(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    plain = linears().bfloat16()
    in_memory = torch.optim.Adam(plain.parameters(), lr=1e-2)
    if before:
        with swapped(plain, tmp_path / "before", **options) as one:
            step(plain, one)
            in_memory.load_state_dict(one.state_dict())
    for _ in range(5):
        step(plain, in_memory)
    state = in_memory.state_dict()
    assert before == ("master" in state["state"][0])
    with contextlib.ExitStack() as opened:
        made: Any = linears().bfloat16()
        if on_drive:
            made = SwappedModule(made, swap_dir=tmp_path, resident_bytes=1 << 20)
            opened.enter_context(made)
        two = opened.enter_context(swapped(made, tmp_path, **options))
        made.load_state_dict(plain.state_dict())
        two.load_state_dict(state)
        assert torch.equal(made(x), plain(x))
        step(made, two)
        step(plain, in_memory)
        torch.testing.assert_close(made(x), plain(x), rtol=0.02, atol=0.02)
        masters = [each["master"] for each in two.state_dict()["state"].values()]
        for master, weight in zip(masters, plain.parameters(), strict=True):
            assert (master - weight).abs().max() < 1e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_of_before_a_run_in_half_precision_are_left_behind(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    """Those of another dtype than the swapped weights' were taken, and all its steps were gone."""
    options: dict[str, Any] = {"master_dtype": torch.float32, "lr": 1e-2}
    before, plain, after = (linears() for _ in range(3))
    in_memory = torch.optim.Adam(plain.to(dtype).parameters(), lr=1e-2)
    with swapped(before.bfloat16(), tmp_path / "before", **options) as one:
        before(torch.randn(2, 64).bfloat16()).square().sum().backward()
        one.step()
        plain.load_state_dict(before.state_dict())
        in_memory.load_state_dict(one.state_dict())
    for _ in range(5):
        for weight in plain.parameters():
            weight.grad = torch.ones_like(weight)
        in_memory.step()
    after.bfloat16().load_state_dict(plain.state_dict())
    with swapped(after, tmp_path / "after", **options) as two:
        two.load_state_dict(in_memory.state_dict())
        masters = [each["master"] for each in two.state_dict()["state"].values()]
        for master, weight in zip(masters, plain.parameters(), strict=True):
            assert master.equal(weight.bfloat16().float())


def test_a_ratio_that_cannot_be_is_refused(tmp_path: Path) -> None:
    """All state was on the drive whatever it said: the parameters live in those files."""
    made = linears()
    with SwappedModule(made, swap_dir=tmp_path, resident_bytes=1 << 20) as module:
        with pytest.raises(ValueError, match=r"ratio=0\.5 is impossible.*master_dtype"):
            swapped(module, tmp_path, ratio=0.5)
        swapped(module, tmp_path).close()

"""SwappedOptimizer equals its class in memory, bit for bit, whatever goes with it."""

from __future__ import annotations

import asyncio
import copy
import gc
import io
import logging
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from _offload_models import (
    WithMasters,
    assert_same_state,
    assert_same_weights,
    loss_of,
    model,
    train,
)
from offload._swapping import SMALL, swapped
from support import (
    PATIENCE_S,
    assert_levels_off,
    on_every_loop,
    resident_bytes,
)

from nvmeio.offload import SwappedOptimizer, swapped_like
from nvmeio.offload._optimizer.turns import Step

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adam": (torch.optim.Adam, {"lr": 1e-2}),
    "adam-fused": (torch.optim.Adam, {"lr": 1e-2, "fused": True}),
    "adamw-foreach": (torch.optim.AdamW, {"lr": 1e-2, "foreach": True, "amsgrad": True}),
    "adamw-fused": (torch.optim.AdamW, {"lr": 1e-2, "fused": True}),
    "sgd-momentum": (torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9, "weight_decay": 0.01}),
    "sgd-fused": (torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9, "fused": True}),
    "sgd-plain": (torch.optim.SGD, {"lr": 1e-3}),
    "adagrad": (torch.optim.Adagrad, {"lr": 1e-2}),
    "adagrad-fused": (torch.optim.Adagrad, {"lr": 1e-2, "fused": True}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 1e-3, "momentum": 0.9, "centered": True}),
    "nadam": (torch.optim.NAdam, {"lr": 1e-3}),
    "adamax": (torch.optim.Adamax, {"lr": 1e-2, "weight_decay": 0.01}),
    "adamax-foreach": (torch.optim.Adamax, {"lr": 1e-2, "foreach": True}),
    "radam": (torch.optim.RAdam, {"lr": 1e-2, "decoupled_weight_decay": True}),
    "radam-foreach": (torch.optim.RAdam, {"lr": 1e-2, "foreach": True}),
}
# One that differs by a bit differs in all that follow.
STEPS = [12, pytest.param(200, marks=pytest.mark.stress)]


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_equal_those_in_memory(name: str, steps: int, tmp_path: Path) -> None:
    cls, arguments = OPTIMIZERS[name]
    ours, theirs = model(), model()
    reference = cls(theirs.parameters(), **arguments)
    with swapped(ours, tmp_path, cls, **arguments) as optimizer:
        assert train(ours, optimizer, steps) == train(theirs, reference, steps)
        assert_same_weights(ours, theirs)
        assert_same_state(optimizer.state_dict(), reference.state_dict())


@pytest.mark.parametrize(("subgroup_bytes", "told"), [(64 << 10, False), (64 << 20, True)])
def test_a_state_that_the_buffers_hold_is_told(
    subgroup_bytes: int, told: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="nvmeio")
    with swapped(model(), tmp_path, subgroup_bytes=subgroup_bytes):
        assert ("without swapping it would need no more memory" in caplog.text) is told


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("name", ["adam", "adamw-fused", "sgd-momentum", "adagrad", "sgd-plain"])
@pytest.mark.parametrize("gradients", ["memory", "disk"])
def test_bf16_with_fp32_masters_equals_masters_in_memory(
    name: str, gradients: str, steps: int, tmp_path: Path
) -> None:
    cls, arguments = OPTIMIZERS[name]
    ours, theirs = model(torch.bfloat16), model(torch.bfloat16)
    reference = WithMasters(theirs.parameters(), cls, **arguments)
    options = {**arguments, "master_dtype": torch.float32, "gradients": gradients}
    with swapped(ours, tmp_path, cls, **options) as optimizer:
        assert train(ours, optimizer, steps) == train(theirs, reference, steps)
        assert_same_weights(ours, theirs)
        masters = [optimizer.state[p].get("master") for p in ours.parameters()]
        for found, wanted in zip(masters, reference.masters, strict=True):
            assert torch.equal(found, wanted)


@pytest.mark.parametrize("name", ["adam", "sgd-momentum"])
def test_bf16_without_masters_equals_torch(name: str, tmp_path: Path) -> None:
    cls, arguments = OPTIMIZERS[name]
    ours, theirs = model(torch.bfloat16), model(torch.bfloat16)
    with swapped(ours, tmp_path, cls, **arguments) as optimizer:
        reference = cls(theirs.parameters(), **arguments)
        assert train(ours, optimizer, 50) == train(theirs, reference, 50)
        assert_same_weights(ours, theirs)


@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("gradients", ["memory", "disk"])
def test_ratio_splits_the_state_and_changes_nothing(
    ratio: float, gradients: str, tmp_path: Path
) -> None:
    ours, theirs = model(), model()
    reference = torch.optim.Adam(theirs.parameters())
    with swapped(ours, tmp_path, ratio=ratio, gradients=gradients) as optimizer:
        whole = sum(p.numel() for p in ours.parameters()) * 12
        assert optimizer.plan.state_bytes == pytest.approx(ratio * whole, rel=0.25)
        assert train(ours, optimizer, 10) == train(theirs, reference, 10)
        assert_same_state(optimizer.state_dict(), reference.state_dict())


def test_state_that_an_option_brings_later_is_whole_in_state_dicts(tmp_path: Path) -> None:
    ours, theirs, again = model(), model(), model()
    reference = torch.optim.SGD(theirs.parameters(), lr=0.1)
    with (
        swapped(ours, tmp_path / "one", torch.optim.SGD, lr=0.1) as optimizer,
        swapped(again, tmp_path / "two", torch.optim.SGD, lr=0.1) as fresh,
    ):
        for made, steps in ((ours, optimizer), (theirs, reference)):
            train(made, steps, 1)
            steps.param_groups[0]["momentum"] = 0.9
            train(made, steps, 2)
        assert_same_state(optimizer.state_dict(), reference.state_dict())
        again.load_state_dict(theirs.state_dict())
        fresh.load_state_dict(reference.state_dict())
        assert_same_state(fresh.state_dict(), reference.state_dict())
        assert train(again, fresh, 2) == train(theirs, reference, 2)
        assert_same_weights(again, theirs)


def test_swapped_like_takes_over_the_hooks(tmp_path: Path) -> None:
    ours, theirs = model(), model()
    reference = torch.optim.Adam(theirs.parameters())
    stepped: list[Any] = []
    inner = torch.optim.Adam(ours.parameters())
    handles = [
        inner.register_step_pre_hook(lambda optimizer, *_: stepped.append(optimizer)),
        inner.register_state_dict_post_hook(lambda _, state: {**state, "mine": 1}),
    ]
    with swapped_like(inner, tmp_path, **SMALL) as optimizer:
        assert train(ours, optimizer, 2) == train(theirs, reference, 2)
        assert stepped == [optimizer] * 2
        assert optimizer.state_dict()["mine"] == 1
        for handle in handles:
            handle.remove()
        train(ours, optimizer, 1)
        assert len(stepped) == 2
        assert "mine" not in optimizer.state_dict()


def groups_of(made: Any) -> list[dict[str, Any]]:
    parameters = list(made.parameters())
    return [
        {"params": parameters[:2], "lr": 5e-3},
        {"params": parameters[2:], "weight_decay": 0.1, "amsgrad": True},
    ]


def test_groups_schedulers_clipping_and_accumulation(tmp_path: Path) -> None:
    results = []
    for ours in (True, False):
        made = model()
        optimizer: Any = (
            SwappedOptimizer(torch.optim.AdamW, groups_of(made), swap_dir=tmp_path, **SMALL)
            if ours
            else torch.optim.AdamW(groups_of(made))
        )
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=12)
        losses = []
        for step in range(12):
            for micro in range(3):
                loss = loss_of(made, 3 * step + micro) / 3
                loss.backward()
                losses.append(loss.item())
            losses.append(torch.nn.utils.clip_grad_norm_(made.parameters(), 0.5).item())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        results.append((losses, [p.detach().clone() for p in made.parameters()]))
        if ours:
            optimizer.close()
    assert results[0][0] == results[1][0]
    assert all(map(torch.equal, results[0][1], results[1][1]))


@pytest.mark.parametrize("gradients", ["memory", "disk"])
def test_accumulated_and_clipped_gradients(gradients: str, tmp_path: Path) -> None:
    """The norm of gradients on the drive is that of torch, and so is what it does to them."""
    ours, theirs = model(), model()
    reference = torch.optim.Adam(theirs.parameters())
    with swapped(ours, tmp_path, gradients=gradients) as optimizer:
        for step in range(8):
            for micro in range(3):
                a, b = loss_of(ours, 3 * step + micro), loss_of(theirs, 3 * step + micro)
                assert a.item() == b.item()
                a.backward()
                b.backward()
            norm = optimizer.clip_grad_norm_(0.3)
            assert norm == torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.3)
            optimizer.step()
            reference.step()
            optimizer.zero_grad()
            reference.zero_grad()
        assert_same_weights(ours, theirs)


@pytest.mark.parametrize("gradients", ["memory", "disk"])
def test_grad_scaler_skips_what_is_not_finite(gradients: str, tmp_path: Path) -> None:
    """With all gradients but one on the drive, the scaler still learns of a NaN in any of them."""
    results = []
    for ours in (True, False):
        made = model()
        optimizer: Any = (
            swapped(made, tmp_path, gradients=gradients)
            if ours
            else torch.optim.Adam(made.parameters())
        )
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
        told: list[Any] = []
        for step in range(9):
            loss = loss_of(made, step)
            scaler.scale(loss).backward()
            if step == 4:  # once more, and this time it overflows
                weight = made[0].weight
                (weight.sum() * float("inf")).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            told += [loss.item(), scaler.get_scale()]
        results.append((told, [p.detach().clone() for p in made.parameters()]))
        if ours:
            assert optimizer.generation == 1 + 8
            optimizer.close()
    assert results[0][0] == results[1][0]
    assert all(map(torch.equal, results[0][1], results[1][1]))


def test_unscaled_and_clipped_with_gradients_on_the_drive(tmp_path: Path) -> None:
    ours, theirs = model(), model()
    reference = torch.optim.Adam(theirs.parameters())
    a, b = (torch.amp.GradScaler("cpu", init_scale=256.0) for _ in range(2))
    with swapped(ours, tmp_path, gradients="disk") as optimizer:
        for step in range(5):
            a.scale(loss_of(ours, step)).backward()
            b.scale(loss_of(theirs, step)).backward()
            b.unscale_(reference)
            norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.1)
            assert optimizer.clip_grad_norm_(0.1, scaler=a) == norm
            a.step(optimizer)
            b.step(reference)
            a.update()
            b.update()
            optimizer.zero_grad()
            reference.zero_grad()
        assert_same_weights(ours, theirs)
        a.scale(loss_of(ours, 9)).backward()
        a.unscale_(optimizer)
        with pytest.raises(RuntimeError, match="cannot reach gradients on the drive"):
            a.step(optimizer)


def test_nan_without_a_scaler_is_stepped_as_in_memory(tmp_path: Path) -> None:
    ours, theirs = model(), model()
    reference = torch.optim.Adam(theirs.parameters())
    with swapped(ours, tmp_path, gradients="disk") as optimizer:
        for made, stepping in ((ours, optimizer), (theirs, reference)):
            loss_of(made, 0).backward()
            (made[0].weight.sum() * float("nan")).backward()
            stepping.step()
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(p.isnan(), q.isnan())
            assert torch.equal(p.nan_to_num(), q.nan_to_num())


def test_gradients_and_state_dicts_go_without_the_collector(tmp_path: Path) -> None:
    """Each step kept its gradients until the collector ran, beside those of the next one."""
    made = model()
    with swapped(made, tmp_path) as optimizer:
        gc.disable()
        try:
            train(made, optimizer, 1)
            state = copy.deepcopy(optimizer.state_dict())
            for parameter in made.parameters():
                parameter.grad = torch.ones_like(parameter)
            kept = [weakref.ref(parameter.grad) for parameter in made.parameters()]
            optimizer.step()
            optimizer.zero_grad()
            assert not any(each() is not None for each in kept)
            kept = [weakref.ref(entry["exp_avg"]) for entry in state["state"].values()]
            assert kept
            optimizer.load_state_dict(state)
            del state
            assert optimizer.generation
            assert not any(each() is not None for each in kept)
        finally:
            gc.enable()


def test_parameters_without_gradients_are_neither_read_nor_written(tmp_path: Path) -> None:
    ours, theirs = model(), model()
    reference = torch.optim.Adam(theirs.parameters())
    with swapped(ours, tmp_path) as optimizer:
        train(ours, optimizer, 2)
        train(theirs, reference, 2)
        for made in (ours, theirs):
            made[0].requires_grad_(False)  # frozen
        whole = optimizer.last_step.written_bytes
        assert train(ours, optimizer, 3, 2) == train(theirs, reference, 3, 2)
        frozen = sum(p.numel() for p in ours[0].parameters()) * 12
        assert optimizer.last_step.written_bytes < whole - frozen * 0.9
        for made in (ours, theirs):
            made[0].requires_grad_(True)
        assert train(ours, optimizer, 3, 5) == train(theirs, reference, 3, 5)
        assert_same_state(optimizer.state_dict(), reference.state_dict())


@pytest.mark.parametrize("gradients", ["memory", "disk"])
def test_a_group_that_is_added_later(gradients: str, tmp_path: Path) -> None:
    ours, theirs = model(), model()
    more = [model(), model()]
    reference = torch.optim.Adam(theirs.parameters())
    with swapped(ours, tmp_path, gradients=gradients) as optimizer:
        train(ours, optimizer, 3)
        train(theirs, reference, 3)
        optimizer.add_param_group({"params": list(more[0].parameters()), "lr": 0.1})
        reference.add_param_group({"params": list(more[1].parameters()), "lr": 0.1})
        both = [torch.nn.Sequential(m, torch.nn.Linear(1, 48), e) for m, e in
                zip((ours, theirs), more, strict=True)]  # fmt: skip
        both[1][1].load_state_dict(both[0][1].state_dict())
        assert train(both[0], optimizer, 4) == train(both[1], reference, 4)
        assert_same_state(optimizer.state_dict(), reference.state_dict())


# State dicts


@pytest.mark.parametrize("name", ["adam", "sgd-momentum", "adagrad"])
def test_state_dicts_go_both_ways(name: str, tmp_path: Path) -> None:
    cls, arguments = OPTIMIZERS[name]
    first, second = model(), model()
    with swapped(first, tmp_path, cls, **arguments) as optimizer:
        train(first, optimizer, 3)
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        plain = cls(second.parameters(), lr=9.0)
        plain.load_state_dict(torch.load(file))
        second.load_state_dict(first.state_dict())
        assert train(first, optimizer, 3, 3) == train(second, plain, 3, 3)
        # And back, into an optimizer that has stepped already.
        train(first, optimizer, 5)
        first.load_state_dict(second.state_dict())
        optimizer.load_state_dict(plain.state_dict())
        assert optimizer.param_groups[0]["lr"] == arguments["lr"]
        assert train(first, optimizer, 3, 6) == train(second, plain, 3, 6)
        assert_same_state(optimizer.state_dict(), plain.state_dict())


def test_masters_travel_in_the_state_dict(tmp_path: Path) -> None:
    first, second = model(torch.bfloat16), model(torch.bfloat16)
    options: dict[str, Any] = {"master_dtype": torch.float32, "lr": 1e-2}
    for name in "ab":
        (tmp_path / name).mkdir()
    with (
        swapped(first, tmp_path / "a", **options) as one,
        swapped(second, tmp_path / "b", **options) as two,
    ):
        train(first, one, 4)
        two.load_state_dict(one.state_dict())
        assert_same_weights(second, first)
        assert train(first, one, 4, 4) == train(second, two, 4, 4)


def test_a_state_dict_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    ours = model()
    with swapped(ours, tmp_path) as optimizer:
        train(ours, optimizer, 2)
        before = copy.deepcopy(optimizer.state_dict())
        other = torch.optim.Adam(model(torch.float64).parameters())
        wrong = copy.deepcopy(before)
        wrong["state"][0]["exp_avg"] = torch.zeros(3)
        short = {"state": {}, "param_groups": [{"params": [0, 1]}]}
        missing = copy.deepcopy(before)
        del missing["state"][2]["exp_avg_sq"]
        for bad, says in (
            (wrong, "exp_avg"),
            (short, "sizes of param_groups"),
            (missing, "exp_avg_sq"),
            ({"lr": 1}, "param_groups"),
        ):
            with pytest.raises(ValueError, match=says):
                optimizer.load_state_dict(bad)
        assert_same_state(optimizer.state_dict(), before)
        optimizer.load_state_dict(other.state_dict())  # one that has not stepped
        assert len(optimizer.state) == 0


def test_state_is_not_in_memory_before_somebody_looks(tmp_path: Path) -> None:
    """The tensors of a state dict lie over the files, whatever the size of the state."""
    made = torch.nn.Linear(2048, 2048, bias=False)
    with SwappedOptimizer(
        torch.optim.Adam, made.parameters(), swap_dir=tmp_path, subgroup_bytes=8 << 20
    ) as optimizer:
        made(torch.ones(1, 2048)).sum().backward()
        optimizer.step()
        kept = []  # or their memory would be used again

        def look() -> None:
            kept.append(optimizer.state_dict()["state"][0])
            assert kept[-1]["exp_avg"].nbytes == 16 << 20

        assert_levels_off(lambda: resident_bytes("RssAnon"), look, 4 << 20)
        assert kept[-1]["exp_avg"].sum() > 0


# Awaiting


@on_every_loop
async def test_a_step_is_awaited(tmp_path: Path) -> None:
    ours, theirs = model(), model()
    reference = torch.optim.Adam(theirs.parameters())
    optimizer = swapped(ours, tmp_path)
    for step in range(5):
        loss_of(ours, step).backward()
        await optimizer.async_step()
        optimizer.zero_grad()
    train(theirs, reference, 5)
    assert_same_weights(ours, theirs)
    optimizer.close()


async def test_what_hooks_change_counts_in_a_step_that_is_awaited(tmp_path: Path) -> None:
    """Gradients and options were taken before hooks ran: what these changed was ignored."""

    def hook(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
            for number, parameter in enumerate(group["params"]):
                parameter.grad = parameter.grad * 2 if number else None

    ours, theirs = model(), model()
    optimizer, reference = swapped(ours, tmp_path), torch.optim.Adam(theirs.parameters())
    for each in (optimizer, reference):
        each.register_step_pre_hook(hook)
    for step in range(3):
        loss_of(ours, step).backward()
        await optimizer.async_step()
        optimizer.zero_grad()
    train(theirs, reference, 3)
    assert_same_weights(ours, theirs)
    optimizer.close()


async def test_a_blocking_step_works_inside_a_loop(tmp_path: Path) -> None:
    """Its transfers would report to the loop that it blocks."""
    ours, theirs = model(), model()
    with swapped(ours, tmp_path, gradients="disk") as optimizer:
        train(ours, optimizer, 3)
    train(theirs, torch.optim.Adam(theirs.parameters()), 3)
    assert_same_weights(ours, theirs)


async def test_the_loop_goes_on_during_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = torch.nn.Linear(256, 128)
    with SwappedOptimizer(
        torch.optim.Adam, made.parameters(), swap_dir=tmp_path, subgroup_bytes=64 << 10
    ) as optimizer:
        made(torch.ones(1, 256)).sum().backward()
        await optimizer.async_step()
        compute, ran, waited = Step._compute, threading.Event(), []

        def held_up(*given: Any) -> None:
            """It computes only once the loop has run."""
            waited.append(ran.wait(PATIENCE_S))
            compute(*given)

        monkeypatch.setattr(Step, "_compute", held_up)
        step = asyncio.create_task(optimizer.async_step())
        for _ in range(10):
            await asyncio.sleep(0.001)
        ran.set()
        await step
        assert waited and all(waited)


# Sizes


def test_the_plan_is_what_happens(tmp_path: Path) -> None:
    made = torch.nn.Linear(1024, 1024)
    with SwappedOptimizer(
        torch.optim.Adam, made.parameters(), swap_dir=tmp_path, subgroup_bytes=2 << 20
    ) as optimizer:
        for _ in range(2):
            made(torch.ones(1, 1024)).sum().backward()
            optimizer.step()
        plan = optimizer.plan
        assert plan.parameters == 1024 * 1025
        assert plan.buffers == 3
        assert plan.read_bytes == plan.parameters * 8
        assert plan.written_bytes == plan.parameters * 12
        assert optimizer.last_step.read_bytes == pytest.approx(plan.read_bytes, rel=0.02)
        assert optimizer.last_step.written_bytes == pytest.approx(plan.written_bytes, rel=0.02)
        assert plan.buffer_bytes <= (2 << 20) + 65536  # and alignment
        assert "2 subgroups; 3 buffers of " in str(plan._replace(subgroups=2))
        assert "1 buffer of 24 KiB" in str(plan._replace(buffers=1, buffer_bytes=24 << 10))
        files = {p.name: p.stat().st_size for p in Path(optimizer.swap_dir).glob("state.*")}
        assert sum(files.values()) == plan.disk_bytes


def test_buffers_stay_within_their_budget(tmp_path: Path) -> None:
    ours, theirs = model(torch.bfloat16), model(torch.bfloat16)
    reference = WithMasters(theirs.parameters(), torch.optim.Adam)
    options = {"master_dtype": torch.float32, "gradients": "disk", "subgroup_bytes": 1 << 30}
    with swapped(ours, tmp_path, buffer_bytes=300 << 10, **options) as optimizer:
        assert optimizer.plan.buffers * optimizer.plan.buffer_bytes <= 300 << 10
        assert optimizer.plan.subgroups > 3
        assert train(ours, optimizer, 5) == train(theirs, reference, 5)


def test_a_budget_that_cannot_do_says_what_can(tmp_path: Path) -> None:
    made = model(torch.bfloat16)  # stepped in bf16, and so as a whole
    with pytest.raises(ValueError, match="give buffer_bytes=") as told:
        swapped(made, tmp_path, buffer_bytes=64 << 10)
    enough = int(str(told.value).split("give buffer_bytes=")[1].split()[0])
    swapped(made, tmp_path, buffer_bytes=enough).close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("read", "write", "buffers"), [(False, False, 1), (True, False, 2)])
def test_without_a_pipeline_there_are_fewer_buffers(
    read: bool, write: bool, buffers: int, tmp_path: Path
) -> None:
    ours, theirs = model(), model()
    with swapped(ours, tmp_path, pipeline_read=read, pipeline_write=write) as optimizer:
        assert optimizer.plan.buffers == buffers
        train(ours, optimizer, 4)
    train(theirs, torch.optim.Adam(theirs.parameters()), 4)
    assert_same_weights(ours, theirs)


# Odd parameters


def test_strided_and_empty_parameters(tmp_path: Path) -> None:
    def make() -> Any:
        torch.manual_seed(0)
        return torch.nn.ParameterList(
            [
                torch.nn.Parameter(torch.randn(70, 90).t()),
                torch.nn.Parameter(torch.randn(0, 3)),
                torch.nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)),
                torch.nn.Parameter(torch.randn(())),
                torch.nn.Parameter(torch.randn(33, dtype=torch.float64)),
                torch.nn.Parameter(torch.randn(17, dtype=torch.complex64)),
            ]
        )

    ours, theirs = make(), make()
    reference = torch.optim.Adam(theirs)
    with SwappedOptimizer(torch.optim.Adam, ours, swap_dir=tmp_path, **SMALL) as optimizer:
        for _ in range(5):
            for made, stepping in ((ours, optimizer), (theirs, reference)):
                sum(p.abs().square().sum() for p in made).backward()
                stepping.step()
                stepping.zero_grad()
        for p, q in zip(ours, theirs, strict=True):
            assert torch.equal(p, q)
            assert p.stride() == q.stride()


def test_an_optimizer_that_is_not_elementwise(tmp_path: Path) -> None:
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    torch.manual_seed(0)
    first = [torch.nn.Parameter(torch.randn(40, 60)), torch.nn.Parameter(torch.randn(30, 20))]
    second = copy.deepcopy(first)
    reference = torch.optim.Muon(second)
    with SwappedOptimizer(torch.optim.Muon, first, swap_dir=tmp_path, **SMALL) as optimizer:
        for _ in range(5):
            for made, stepping in ((first, optimizer), (second, reference)):
                sum(p.square().sum() for p in made).backward()
                stepping.step()
                stepping.zero_grad()
        assert all(map(torch.equal, first, second))


def test_hooks_see_a_gradient_that_goes_to_the_drive_if_they_are_older(tmp_path: Path) -> None:
    """As docs/offload.md says; an older hook may change it, a newer one finds None."""
    torch.manual_seed(0)
    ours = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
    theirs = copy.deepcopy(ours)
    seen: list[bool] = []

    def halve(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    for module in (ours, theirs):
        module[0].weight.register_post_accumulate_grad_hook(halve)
    optimizer = SwappedOptimizer(
        torch.optim.SGD, ours.parameters(), swap_dir=tmp_path, gradients="disk", lr=0.1
    )
    reference = torch.optim.SGD(theirs.parameters(), lr=0.1)
    ours[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad is None))
    for module, stepping in ((ours, optimizer), (theirs, reference)):
        module(torch.ones(2, 8)).square().sum().backward()
        stepping.step()
    assert seen == [True]
    for mine, wanted in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, wanted)
    optimizer.close()

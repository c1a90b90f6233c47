"""Tensors that do not lie in row-major order are stepped, kept and handed out as torch does it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from _offload_models import WithMasters, assert_same_state

from nvmeio.errors import IntegrityError
from nvmeio.offload import SwappedModule, SwappedOptimizer

FUSED = ("Adam", "AdamW", "SGD", "Adagrad")
ARGUMENTS: dict[str, dict[str, Any]] = {
    "ASGD": {"t0": 1.0},
    "Adadelta": {"lr": 0.1},
    "Adafactor": {},
    "Adagrad": {},
    "Adam": {"amsgrad": True},
    "AdamW": {},
    "Adamax": {},
    "Muon": {},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Rprop": {},
    "SGD": {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.01},
}
KINDS = [
    (name, kind)
    for name in ARGUMENTS
    for kind in ("plain", "foreach", "fused")
    if (kind != "fused" or name in FUSED) and (kind != "foreach" or name != "Muon")
    if hasattr(torch.optim, name)
]
OPTIONS: dict[str, dict[str, Any]] = {
    "on-drive": {},
    "partly-in-memory": {"ratio": 0.5, "recoverable": False},
    "masters": {"master_dtype": torch.float32},
    "gradients-on-drive": {"gradients": "disk"},
    "all-on-drive": {"master_dtype": torch.float32, "gradients": "disk"},
}
QUICK: dict[str, Any] = {"subgroup_bytes": 32 << 10, "durable": False}
Lay = Callable[[torch.Tensor], torch.Tensor]


def row_major(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous()


def column_major(values: torch.Tensor) -> torch.Tensor:
    """The transposed weight, or channels_last."""
    if values.dim() == 4:
        return values.contiguous(memory_format=torch.channels_last)
    return values.mT.contiguous().mT if values.dim() > 1 else values


def with_gaps(values: torch.Tensor) -> torch.Tensor:
    """A view of every other column of something larger."""
    room = torch.zeros(*values.shape[:-1], 2 * values.shape[-1] + 3, dtype=values.dtype)
    view = room[..., : 2 * values.shape[-1] : 2]
    view.copy_(values)
    return view


def transposed_with_gaps(values: torch.Tensor) -> torch.Tensor:
    return with_gaps(values.mT).mT if values.dim() > 1 else with_gaps(values)


def expanded(values: torch.Tensor) -> torch.Tensor:
    """One row for all."""
    return values[:1].expand(values.shape)


WEIGHTS: list[Lay] = [row_major, column_major, with_gaps, transposed_with_gaps]
GRADIENTS: list[Lay] = [*WEIGHTS, expanded]


def dense(values: torch.Tensor) -> torch.Tensor:
    """As torch lays what is like it: its fused kernels take a tensor's memory for its elements."""
    return torch.empty_like(values).copy_(values)


def parameters(name: str, dtype: torch.dtype, lay: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """One of each layout, and for each of these one for each layout of its gradient."""
    generator = torch.Generator().manual_seed(0)
    made = torch.nn.ParameterList()
    for shape, layouts in ((13, 37), WEIGHTS), ((7, 6, 3, 3), [column_major]):
        if name == "Muon" and len(shape) != 2:
            continue
        for as_weight in layouts:
            for _ in GRADIENTS:
                values = torch.randn(shape, generator=generator).to(dtype)
                made.append(torch.nn.Parameter(lay(as_weight(values))))
    return made


def set_gradients(parameters: Any, step: int, on_disk: bool, lay_alike: bool) -> None:
    generator = torch.Generator().manual_seed(step + 1)
    loss = torch.zeros(())
    for number, parameter in enumerate(parameters):
        values = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        values = GRADIENTS[number % len(GRADIENTS)](values)
        if on_disk:
            loss = loss + (parameter * values).float().sum()
        elif lay_alike:
            parameter.grad = torch.empty_like(parameter).copy_(values).detach()
        else:
            parameter.grad = values
    if on_disk:
        loss.backward()


def strides_in(optimizer: Any) -> list[tuple[int, ...]]:
    entries = optimizer.state_dict()["state"].values()
    tensors = (value for entry in entries for value in entry.values())
    return [value.stride() for value in tensors if isinstance(value, torch.Tensor)]


def assert_same_parameters(ours: Any, theirs: Any) -> None:
    for number, (p, q) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.equal(p, q), (number, (p - q).abs().max())


@pytest.mark.slow
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_every_layout_is_stepped_as_in_memory(
    name: str, kind: str, option: str, tmp_path: Path
) -> None:
    """A fused step took memory in one order for that in another: silently other weights.

    And bf16 kernels round otherwise where a layout keeps them from their vector code.
    """
    cls, options = getattr(torch.optim, name), OPTIONS[option]
    arguments = {**ARGUMENTS[name], **({} if kind == "plain" else {kind: True})}
    fused, on_disk = kind == "fused", options.get("gradients") == "disk"
    whole = name in ("Adafactor", "Muon")  # sums over a tensor, which depend on its layout
    for dtype in (torch.float32, torch.bfloat16) if fused or whole else (torch.bfloat16,):
        if name == "SGD" and fused and dtype != torch.float32 and "master_dtype" not in options:
            continue  # torch 2.13 leaves the weights as they are, and we refuse it
        ours = parameters(name, dtype, lambda values: values)
        theirs = parameters(name, dtype, dense if fused else lambda values: values)
        masters = "master_dtype" in options
        reference = WithMasters(theirs, cls, **arguments) if masters else cls(theirs, **arguments)
        layouts = [parameter.stride() for parameter in ours]
        folder = tmp_path / str(dtype)
        with SwappedOptimizer(
            cls, ours, swap_dir=folder, **QUICK, **options, **arguments
        ) as optimizer:
            for step in range(3):
                set_gradients(ours, step, on_disk, False)
                set_gradients(theirs, step, on_disk, fused)
                optimizer.step()
                reference.step()
                optimizer.zero_grad()
                reference.zero_grad()
                assert_same_parameters(ours, theirs)
            if not masters:
                assert_same_state(optimizer.state_dict(), reference.state_dict())
                assert strides_in(optimizer) == strides_in(reference)
        assert [parameter.stride() for parameter in ours] == layouts


def conv_net(lay: Lay = column_major, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    made = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 5, 3), torch.nn.Flatten()
    )
    made.append(torch.nn.Linear(5 * 16, 6))
    for parameter in made.parameters():
        if parameter.dim() > 1:
            parameter.data = lay(parameter.detach().to(dtype))
        else:
            parameter.data = parameter.detach().to(dtype)
    return made


def train(made: Any, optimizer: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        images = torch.randn(2, 3, 8, 8, generator=generator)
        loss = made(images.to(next(made.parameters()).dtype)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize(
    ("before", "after"), [(column_major, row_major), (row_major, column_major)]
)
def test_a_run_goes_on_in_another_layout(
    before: Lay, after: Lay, masters: bool, fused: bool, tmp_path: Path
) -> None:
    """The files hold elements in the order that the parameters had, and say which that is."""
    options: dict[str, Any] = {"master_dtype": torch.float64} if masters else {}
    options |= {"swap_dir": tmp_path, "resume": True, "lr": 1e-2, "fused": fused, **QUICK}
    made = conv_net(before)
    with SwappedOptimizer(torch.optim.Adam, made.parameters(), **options) as optimizer:
        set_gradients(made.parameters(), 0, False, True)
        optimizer.step()
    wanted = [parameter.detach().clone() for parameter in made.parameters()]
    state = torch.optim.Adam(conv_net(before).parameters(), lr=1e-2, fused=fused)
    set_gradients(state.param_groups[0]["params"], 0, False, True)
    state.step()

    resumed = conv_net(after)
    with SwappedOptimizer(torch.optim.Adam, resumed.parameters(), **options) as optimizer:
        assert optimizer.resumed
        assert all(torch.equal(p, q) for p, q in zip(resumed.parameters(), wanted, strict=True))
        for _ in range(2):
            set_gradients(resumed.parameters(), 1, False, True)
            optimizer.step()
    for step in (1, 1):
        set_gradients(state.param_groups[0]["params"], step, False, True)
        state.step()
    for p, q in zip(resumed.parameters(), state.param_groups[0]["params"], strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_a_fused_step_takes_state_that_was_loaded_in_another_layout(tmp_path: Path) -> None:
    """Its kernel takes memory element by element: torch itself steps wrong ones then."""
    theirs = conv_net(row_major)
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2, fused=True)
    ours = conv_net(column_major)
    with SwappedOptimizer(
        torch.optim.AdamW, ours.parameters(), swap_dir=tmp_path, lr=1e-2, fused=True, **QUICK
    ) as optimizer:
        set_gradients(theirs.parameters(), 0, False, True)
        reference.step()
        with torch.no_grad():
            for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
                p.copy_(q)
        optimizer.load_state_dict(reference.state_dict())
        assert_same_state(optimizer.state_dict(), reference.state_dict())
        for step in (1, 2):
            for made in (ours, theirs):
                set_gradients(made.parameters(), step, False, True)
            optimizer.step()
            reference.step()
        for parameter in ours.parameters():  # a model may be converted at any time
            parameter.data = row_major(parameter.detach())
        for made in (ours, theirs):
            set_gradients(made.parameters(), 3, False, True)
        optimizer.step()
        reference.step()
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("gradients", ["memory", "disk"])
def test_a_swapped_module_keeps_the_layout_of_its_parameters(
    gradients: str, masters: bool, fused: bool, tmp_path: Path
) -> None:
    """They came back in row-major order: other kernels, other last bits, another output layout."""
    dtype = torch.bfloat16 if masters else torch.float32
    ours, theirs = conv_net(dtype=dtype), conv_net(dtype=dtype)
    strides = [parameter.stride() for parameter in theirs.parameters()]
    made = SwappedModule(ours, swap_dir=tmp_path, resident_bytes=1 << 20, stage_bytes=4096)
    arguments: dict[str, Any] = {"lr": 1e-2, "fused": fused}
    reference: Any = torch.optim.AdamW(theirs.parameters(), **arguments)
    if masters:
        reference = WithMasters(theirs.parameters(), torch.optim.AdamW, **arguments)
        arguments["master_dtype"] = torch.float32
    with (
        made,
        SwappedOptimizer(
            torch.optim.AdamW,
            made.parameters(),
            swap_dir=tmp_path,
            gradients=gradients,
            **QUICK,
            **arguments,
        ) as optimizer,
    ):
        assert train(made, optimizer, range(4)) == train(theirs, reference, range(4))
        assert [value.stride() for value in made.state_dict().values()] == strides
        with made.gather():
            assert [parameter.stride() for parameter in made.parameters()] == strides
            for p, q in zip(made.parameters(), theirs.parameters(), strict=True):
                assert torch.equal(p, q)
        for name, value in made.state_dict().items():
            assert torch.equal(value, theirs.state_dict()[name]), name
        made.load_state_dict(conv_net(row_major, dtype).state_dict())
        for name, value in made.state_dict().items():
            assert torch.equal(value, conv_net(dtype=dtype).state_dict()[name]), name


def test_a_swapped_module_is_made_in_the_layout_that_it_has_on_the_meta_device(
    tmp_path: Path,
) -> None:
    with torch.device("meta"):
        made: Any = torch.nn.Conv2d(3, 8, 3)
        made = made.to(memory_format=torch.channels_last)
    with SwappedModule(made, swap_dir=tmp_path, resident_bytes=65536) as swapped:
        assert swapped.state_dict()["weight"].is_contiguous(memory_format=torch.channels_last)


def test_a_module_of_another_layout_than_its_files_is_refused(tmp_path: Path) -> None:
    """Parameters that live in the state files are read as they lie there."""
    options: dict[str, Any] = {"swap_dir": tmp_path, "resume": True, **QUICK}
    with (
        SwappedModule(conv_net(), swap_dir=tmp_path, resident_bytes=1 << 20) as made,
        SwappedOptimizer(torch.optim.Adam, made.parameters(), **options) as optimizer,
    ):
        losses = train(made, optimizer, range(2))
    with (
        SwappedModule(conv_net(row_major), swap_dir=tmp_path, resident_bytes=1 << 20) as made,
        pytest.raises(IntegrityError, match="memory format"),
    ):
        SwappedOptimizer(torch.optim.Adam, made.parameters(), **options)
    theirs = conv_net()
    reference = torch.optim.Adam(theirs.parameters())
    assert losses == train(theirs, reference, range(2))
    with (
        SwappedModule(conv_net(), swap_dir=tmp_path, resident_bytes=1 << 20) as made,
        SwappedOptimizer(torch.optim.Adam, made.parameters(), **options) as optimizer,
    ):
        assert train(made, optimizer, range(2, 4)) == train(theirs, reference, range(2, 4))


def test_a_transposed_layer_in_tiles_has_its_rows(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(64, 512)
    layer.weight.data = column_major(layer.weight.detach())
    wanted = layer.weight.detach().clone()
    with SwappedModule(
        torch.nn.Sequential(layer), swap_dir=tmp_path, resident_bytes=64 << 10
    ) as made:
        assert torch.equal(made.state_dict()["0.weight"], wanted)
        assert len(list(made.parameters())) > 2


def test_empty_parameters_of_two_dtypes_lie_at_the_same_byte(tmp_path: Path) -> None:
    """Transfers were put in order by whole spans, and dtypes have none: TypeError when made."""
    empty = [torch.nn.Parameter(torch.empty(0, dtype=t)) for t in (torch.float32, torch.float64)]
    params, alone = [*empty, torch.nn.Parameter(torch.ones(3))], torch.nn.Parameter(torch.ones(3))
    for each in (*params, alone):
        each.grad = torch.ones_like(each)
    torch.optim.Adam([alone]).step()
    with SwappedOptimizer(torch.optim.Adam, params, swap_dir=tmp_path) as optimizer:
        optimizer.step()
        assert torch.equal(params[-1], alone)

"""A linear layer that is too large for the window trains in tiles, and is itself in state dicts."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_accelerator import Pace, accelerator
from in_rows import InRows
from inside import window_in_use
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
)

import nvmeio
from nvmeio.offload import SwappedModule, SwappedOptimizer
from nvmeio.offload._swap_files.tensors import is_absent

INPUTS, OUTPUTS = 64, 1000
WINDOW = INPUTS * OUTPUTS * 4 // 2  # half of the matrix


def net(bias: bool = True, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(32, INPUTS), nn.Tanh(), nn.Linear(INPUTS, OUTPUTS, bias=bias))
    return made.to(dtype)


def split(made: Any) -> Any:
    """The same model, with its last layer as the tiles of `swapped` are."""
    return nn.Sequential(made[0], made[1], InRows(made[2], 64))


def swapped(made: Any, folder: Path, **options: Any) -> SwappedModule:
    return SwappedModule(
        made, swap_dir=folder, **{"resident_bytes": WINDOW, "stage_bytes": 20480, **options}
    )


def batch(seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(seed)).to(dtype)


def step(made: Any, optimizer: Any, seed: int) -> float:
    loss = made(batch(seed)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    found: float = loss.item()
    return found


@pytest.mark.parametrize("gradients", ["memory", "disk"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_training_equals_that_of_its_rows_in_memory(
    bias: bool, gradients: str, tmp_path: Path
) -> None:
    ours = net(bias)
    theirs, plain = split(copy.deepcopy(ours)), copy.deepcopy(ours)
    with (
        swapped(ours, tmp_path) as module,
        SwappedOptimizer(
            torch.optim.AdamW,
            module.parameters(),
            swap_dir=tmp_path,
            gradients=gradients,
            durable=False,
            lr=1e-2,
        ) as optimizer,
    ):
        in_rows = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
        whole = torch.optim.AdamW(plain.parameters(), lr=1e-2)
        assert len(ours[2].tiles) == len(theirs[2].parts) > 8
        for seed in range(3):
            loss = step(module, optimizer, seed)
            assert loss == step(theirs, in_rows, seed)
            assert loss == pytest.approx(step(plain, whole, seed), rel=1e-4)
        found = module.state_dict()
        assert list(found) == list(plain.state_dict())
        rows = [part.weight for part in theirs[2].parts]
        assert found["2.weight"].equal(torch.cat(rows))
        if bias:
            assert found["2.bias"].equal(torch.cat([part.bias for part in theirs[2].parts]))
        assert window_in_use(module) <= module.resident_bytes
        assert get_model_state_dict(module.module)["2.weight"].equal(found["2.weight"])
        kept = get_optimizer_state_dict(module.module, optimizer)
        assert "2.tiles.0.weight" in kept["state"]


def test_gradients_of_the_input_are_added_in_float32(tmp_path: Path) -> None:
    """In bfloat16 256 and 1 are 256 again, however often 1 is added."""
    made = nn.Sequential(nn.Linear(64, 1024, bias=False, dtype=torch.bfloat16))
    nn.init.ones_(made[0].weight)
    x = torch.ones(1, 64, dtype=torch.bfloat16, requires_grad=True)
    given = torch.zeros(1, 1024, dtype=torch.bfloat16)
    given[0, ::64] = 1
    given[0, -64] = 256  # of the tile that backward comes to first
    with swapped(made, tmp_path, resident_bytes=32768, stage_bytes=8192) as module:
        assert len(made[0].tiles) == 16
        module(x).backward(given)
        gradients = [tile.weight.grad for tile in made[0].tiles]
    assert x.grad is not None
    assert bool((x.grad == 256 + 16).all())
    assert torch.cat(gradients).equal(given.T @ x.detach())


def test_autocast_converts_the_input_once(tmp_path: Path) -> None:
    ours = net()
    theirs = split(copy.deepcopy(ours))
    saved: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    losses = []
    with swapped(ours, tmp_path) as module:
        for made in (module, theirs):
            hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
            with torch.autocast("cpu", torch.bfloat16), hooks:
                loss = made(batch(0)).float().square().mean()
            losses.append(loss.item())
            if made is module:
                inputs = {t.data_ptr() for t in saved if t.shape == (8, INPUTS)}
            loss.backward()
        tiles = [tile.weight.grad for tile in ours[2].tiles]
    assert losses[0] == losses[1]
    assert len(inputs) <= 3  # of tanh, and what it gave, in both dtypes
    for tile, part in zip(tiles, theirs[2].parts, strict=True):
        assert tile.equal(part.weight.grad)


def test_state_dicts_are_taken_as_they_are_given(tmp_path: Path) -> None:
    other, wrong = net(), net()
    nn.init.normal_(other[2].weight)
    with swapped(net(), tmp_path) as module:
        module.load_state_dict(other.state_dict())
        for name, tensor in other.state_dict().items():
            assert module.state_dict()[name].equal(tensor), name
        wrong[2] = nn.Linear(INPUTS, OUTPUTS + 8)
        with pytest.raises(ValueError, match=r"2\.weight must have shape \(1000, 64\)"):
            module.load_state_dict(wrong.state_dict())
        with pytest.raises(RuntimeError, match="missing"):
            module.load_state_dict({"2.tiles.0.weight": other[2].weight[:64]})
        x = batch(1)
        assert module(x).allclose(other(x), atol=1e-5)


def test_a_layer_that_has_room_is_not_cut(tmp_path: Path) -> None:
    made = net()
    with swapped(made, tmp_path, resident_bytes=2 * WINDOW + 65536):
        assert not hasattr(made[2], "tiles")


def test_tiles_are_changed_within_a_block(tmp_path: Path) -> None:
    made, other = net(), net()
    nn.init.normal_(other[2].weight)
    with swapped(made, tmp_path) as module:
        tiles = made[2].tiles
        with module.gather(*tiles[0].parameters(), *tiles[1].parameters()), torch.no_grad():
            tiles[0].weight.copy_(other[2].weight[:64])
            assert module.state_dict()["2.weight"][:64].equal(other[2].weight[:64])
        found = module.state_dict()["2.weight"]
        assert found[:64].equal(other[2].weight[:64])
        assert found[64:].equal(net()[2].weight[64:])
        with (
            pytest.raises(ValueError, match=r"layer\.tiles\.parameters"),
            module.gather(made[2].weight),
        ):
            pass
        with pytest.raises(TypeError, match="is on the drive"):
            made.load_state_dict(other.state_dict())


def test_what_the_module_within_is_given_must_fit(tmp_path: Path) -> None:
    made = nn.Sequential(nn.Linear(INPUTS, OUTPUTS))
    with swapped(made, tmp_path):
        for rows in (OUTPUTS - 1, OUTPUTS + 1):
            with pytest.raises(RuntimeError, match=r"size mismatch for 0\.weight"):
                made.load_state_dict({"0.weight": torch.zeros(rows, INPUTS)}, strict=False)


def test_a_layer_shows_its_shape_and_no_values(tmp_path: Path) -> None:
    made = net()
    with swapped(made, tmp_path) as module:
        shown = made[2].weight
        assert (shown.shape, shown.dtype) == ((OUTPUTS, INPUTS), torch.float32)
        assert is_absent(shown)
        assert bool(shown.isnan().all())
        made[2].weight = nn.Parameter(torch.zeros(OUTPUTS, INPUTS))
        with pytest.raises(RuntimeError, match="was given another 'weight'"):
            module(batch(0))


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.weight.requires_grad_(False),
        lambda layer: nn.init.zeros_(layer.weight),
        lambda layer: setattr(layer.weight, "data", torch.zeros(OUTPUTS, INPUTS)),
        lambda layer: setattr(layer, "weight", torch.zeros(OUTPUTS, INPUTS)),
        lambda layer: torch.func.functional_call(
            layer, {"weight": torch.zeros(OUTPUTS, INPUTS)}, torch.zeros(1, INPUTS)
        ),
    ],
    ids=["freeze", "write", "data", "assign", "functional_call"],
)
def test_a_change_of_what_a_layer_shows_is_refused(change: Any, tmp_path: Path) -> None:
    """Its tiles do not see it. What reaches them is free."""
    ours = net()
    with swapped(ours, tmp_path) as module:
        ours[2].requires_grad_(False)
        module(batch(0)).sum().backward()
        assert all(p.grad is None for p in ours[2].parameters())
        with pytest.raises(RuntimeError, match="was given another 'weight', or its own was"):
            change(ours[2])
            module(batch(0))


def test_an_optimizer_takes_no_parameters_from_before(tmp_path: Path) -> None:
    """Nor those of a module that is closed."""
    made = net()
    before = list(made.parameters())
    with swapped(made, tmp_path) as module:
        tiles = list(module.parameters())
        with pytest.raises(ValueError, match="parameter 2 has no values"):
            SwappedOptimizer(torch.optim.AdamW, before, swap_dir=tmp_path)
    with pytest.raises(ValueError, match="parameter 0 has no values"):
        SwappedOptimizer(torch.optim.AdamW, tiles, swap_dir=tmp_path)


def test_training_resumes_with_the_same_tiles(tmp_path: Path) -> None:
    losses: dict[str, list[float]] = {"at once": [], "resumed": []}
    for way, parts in (("at once", [4]), ("resumed", [2, 2])):
        folder, seed = tmp_path / way, 0
        folder.mkdir()
        for steps in parts:
            with (
                swapped(net(), folder) as module,
                SwappedOptimizer(
                    torch.optim.AdamW, module.parameters(), swap_dir=folder, resume=True, lr=1e-2
                ) as optimizer,
            ):
                for _ in range(steps):
                    losses[way].append(step(module, optimizer, seed))
                    seed += 1
    assert losses["at once"] == losses["resumed"]
    with (
        swapped(net(), folder, resident_bytes=2 * WINDOW + 65536) as module,
        pytest.raises(nvmeio.IntegrityError, match="these differ: parameters"),
    ):
        SwappedOptimizer(torch.optim.AdamW, module.parameters(), swap_dir=folder, resume=True)


def test_hooks_of_the_layer_run_once_around_all(tmp_path: Path) -> None:
    made, seen = net(), []
    made[2].register_forward_hook(lambda _, __, output: seen.append(output.shape))
    with swapped(made, tmp_path) as module, torch.no_grad():
        module(batch(0))
    assert seen == [(8, OUTPUTS)]


def test_parameters_on_the_meta_device_are_made_tile_by_tile(tmp_path: Path) -> None:
    with torch.device("meta"):
        made = nn.Sequential(nn.Linear(32, INPUTS), nn.Tanh(), nn.Linear(INPUTS, OUTPUTS))
    drawn = []

    def init(module: nn.Module) -> None:
        assert isinstance(module, nn.Linear)
        drawn.append(module.out_features)
        nn.init.constant_(module.weight, len(drawn))
        nn.init.zeros_(module.bias)

    with swapped(made, tmp_path, init=init) as module:
        assert sum(drawn) == INPUTS + OUTPUTS
        rows = module.state_dict()["2.weight"][:, 0]
        assert rows.unique().tolist() == list(range(2, len(drawn) + 1))
        assert bool((rows[1:] >= rows[:-1]).all())


@pytest.mark.parametrize("failure", ["no directory", "a window for nothing"])
def test_a_failure_leaves_the_layer_whole(failure: str, tmp_path: Path) -> None:
    made = net()
    parameters, hooks = dict(made.named_parameters()), len(made[2]._state_dict_hooks)
    with pytest.raises((ValueError, OSError)):
        if failure == "no directory":
            swapped(made, tmp_path / "missing" / "too")
        else:
            swapped(made, tmp_path, resident_bytes=4096, stage_bytes=4096)
    assert dict(made.named_parameters()) == parameters  # the same objects
    assert len(made[2]._state_dict_hooks) == hooks
    assert made(batch(0)).equal(net()(batch(0)))
    assert list(made.state_dict()) == list(parameters)
    with swapped(made, tmp_path) as module:
        assert module(batch(0)).allclose(net()(batch(0)), atol=1e-6)


class Other(nn.Linear):
    """It may compute anything."""


def kept_whole() -> Iterator[tuple[str, Any]]:
    tied = nn.Sequential(nn.Embedding(OUTPUTS, INPUTS), nn.Linear(INPUTS, OUTPUTS, bias=False))
    tied[1].weight = tied[0].weight
    yield "tied", tied
    yield "a subclass", nn.Sequential(Other(INPUTS, OUTPUTS))
    hooked = nn.Sequential(nn.Linear(INPUTS, OUTPUTS))
    hooked[0].weight.register_hook(lambda grad: grad * 2)
    yield "a hook of its weight", hooked
    inside = nn.TransformerEncoderLayer(INPUTS, 4, dim_feedforward=OUTPUTS)
    yield "used by its parent", inside


@pytest.mark.parametrize("made", [pytest.param(made, id=name) for name, made in kept_whole()])
def test_what_cannot_be_cut_is_refused(made: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="make smaller modules of it"):
        swapped(made, tmp_path)
    assert not any(hasattr(module, "tiles") for module in made.modules())


@pytest.mark.parametrize("pace", list(Pace), ids=lambda pace: pace.name.lower())
def test_training_on_a_device(pace: Pace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = net()
    theirs = split(copy.deepcopy(made))
    wanted = theirs(batch(0)).square().mean()
    wanted.backward()
    with (
        accelerator(monkeypatch, pace, pace) as cuda,
        swapped(made, tmp_path, device="cuda", device_bytes=WINDOW) as module,
    ):
        there = cuda.has(made[2].weight)
        assert there
        loss = module(cuda.tensor(batch(0))).square().mean()
        loss.backward()
        same = [torch.equal(cuda.value(loss.detach()), wanted.detach())]
        for tile, part in zip(made[2].tiles, theirs[2].parts, strict=True):
            for mine, other in zip(tile.parameters(), part.parameters(), strict=True):
                same.append(torch.equal(cuda.value(mine.grad), other.grad))
        assert all(same), same  # pytest must not look at what is on the device

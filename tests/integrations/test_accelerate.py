"""accelerate's disk offload through nvmeio: the same tokens, read ahead."""

from __future__ import annotations

import errno
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from inference._models import MODELS, loaded, logits, prompt, saved, tokens, transformers
from support import open_descriptors, spin_until_collected

import nvmeio
from nvmeio.errors import ClosedError, IntegrityError, TransferError
from nvmeio.testing import FakeEngine

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    from accelerate.utils import offload_state_dict

    from nvmeio.integrations import accelerate as ours

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture
def installed() -> Iterator[None]:
    ours.install()
    ours.install()
    yield
    ours.uninstall()
    assert accelerate.big_modeling.OffloadedWeightsLoader is not ours.NvmeWeights


def device_map(model: Any) -> dict[str, str]:
    """Everything outside of the layers in memory, the layers on disk."""
    places = {}
    for name, module in model.named_modules():
        if type(module).__name__ in (model._no_split_modules or ()):
            places[name] = "disk"
    for name, _ in model.named_parameters(remove_duplicate=False):
        if not any(name.startswith(f"{place}.") for place in places):
            places[name.rpartition(".")[0]] = "cpu"
    return places


def weights_of(model: Any) -> list[ours.NvmeWeights]:
    found = {}
    for module in model.modules():
        hooks = getattr(getattr(module, "_hf_hook", None), "hooks", [])
        for hook in [*hooks, getattr(module, "_hf_hook", None)]:
            weights = getattr(getattr(hook, "weights_map", None), "dataset", None)
            if isinstance(weights, ours.NvmeWeights):
                found[id(weights)] = weights
    return list(found.values())


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "bloom"])
def test_one_line_is_changed(name: str, tmp_path: Path) -> None:
    saved(MODELS[name], tmp_path / "m")
    whole, model = loaded(tmp_path / "m"), loaded(tmp_path / "m")
    model = ours.dispatch_model(
        model, device_map(model), main_device="cpu", offload_dir=tmp_path / "o"
    )
    (weights,) = weights_of(model)
    ids = prompt()
    assert logits(model, ids).equal(logits(whole, ids))
    assert tokens(model, ids).equal(tokens(whole, ids))
    before = weights.mispredicted
    assert tokens(model, ids).equal(tokens(whole, ids))
    assert weights.mispredicted == before
    weights.close()


def test_from_pretrained_with_an_offload_folder(tmp_path: Path, installed: None) -> None:
    saved(MODELS["llama"], tmp_path / "m")
    whole = loaded(tmp_path / "m")
    places = device_map(whole)
    model = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path / "m", device_map=places, offload_folder=tmp_path / "o"
    )
    (weights,) = weights_of(model)
    assert tokens(model, prompt()).equal(tokens(whole, prompt()))
    weights.close()
    with pytest.raises(ClosedError):
        tokens(model, prompt())


def test_a_map_holds_what_accelerates_own_holds(tmp_path: Path) -> None:
    """Offloaded files and safetensors, several dtypes, scalars; more than the window."""
    state = {
        "a": torch.randn(300, 70),
        "b": torch.randn(5, dtype=torch.bfloat16),
        "c": torch.tensor(3),
        "d": torch.randn(64, 64).half(),
    }
    offload_state_dict(tmp_path, state)
    stock = accelerate.utils.OffloadedWeightsLoader(save_folder=tmp_path)
    with nvmeio.AioHandle(engine="threads") as handle:
        mine = ours.NvmeWeights(save_folder=tmp_path, window_bytes=4096, handle=handle)
        assert list(mine) == list(stock)
        assert len(mine) == 4
        kept = {name: mine[name] for name in mine}  # all in use at once: beyond the window
        for name in [*stock, *reversed(list(stock))]:
            assert mine[name].equal(stock[name])
            assert mine[name].dtype == stock[name].dtype
            assert kept[name].equal(stock[name])
        mine.close()
        assert kept["a"].equal(stock["a"])
        del kept


def test_memory_is_used_again(tmp_path: Path) -> None:
    offload_state_dict(tmp_path, {f"w{n}": torch.full((64, 64), float(n)) for n in range(8)})
    with nvmeio.AioHandle(engine="threads") as handle:
        mine = ours.NvmeWeights(save_folder=tmp_path, window_bytes=3 * 16384, handle=handle)
        addresses = set()
        for _ in range(3):
            for n in range(8):
                weight = mine[f"w{n}"]
                assert weight.eq(n).all()
                addresses.add(weight.data_ptr())
                del weight
        assert len(addresses) <= 3
        mine.close()


def test_errors_name_the_weight(tmp_path: Path) -> None:
    offload_state_dict(tmp_path, {"w": torch.ones(64, 64), "v": torch.ones(64, 64)})
    engine = FakeEngine(fail=lambda kind, offset, nbytes: errno.EIO)
    with nvmeio.AioHandle(engine=engine) as handle:
        mine = ours.NvmeWeights(save_folder=tmp_path, handle=handle)
        with pytest.raises(TransferError, match="weight 'w'"):
            mine["w"]
        mine.close()
    with nvmeio.AioHandle(engine="threads") as handle:
        mine = ours.NvmeWeights(save_folder=tmp_path, handle=handle)
        assert mine["w"].sum() == 64 * 64
        with open(tmp_path / "v.dat", "ab") as file:  # never shorter: it may be read right now
            file.write(b"more")
        with pytest.raises(IntegrityError, match="changed while"):
            mine["v"]
        mine.close()
        with pytest.raises(KeyError):
            mine["x"]


def test_a_drive_that_failed_and_is_well_again_is_told_of_once(tmp_path: Path) -> None:
    """What had been read ahead meanwhile told its error when it was asked for, long after."""
    offload_state_dict(tmp_path, {f"w{n}": torch.full((64, 64), float(n)) for n in range(6)})
    failing = [0]
    engine = FakeEngine(fail=lambda kind, offset, nbytes: failing[0])
    with nvmeio.AioHandle(engine=engine) as handle:
        mine = ours.NvmeWeights(save_folder=tmp_path, handle=handle)

        def walk() -> None:
            assert all(mine[f"w{n}"].eq(n).all() for n in range(6))

        walk()
        walk()  # from now on the order is known
        failing[0] = errno.EIO
        with pytest.raises(TransferError):
            walk()
        failing[0] = 0
        walk()
        mine.close()


@pytest.mark.parametrize(
    ("text", "error"),
    [("[", IntegrityError), ('{"w": {"dtype": "float32", "shape": [1000]}}', IntegrityError)],
)
def test_a_damaged_folder_is_refused(text: str, error: Any, tmp_path: Path) -> None:
    offload_state_dict(tmp_path, {"w": torch.ones(4)})
    (tmp_path / "index.json").write_text(text)
    with pytest.raises(error):
        ours.NvmeWeights(save_folder=tmp_path)
    with pytest.raises(ValueError, match="give a state_dict"):
        ours.NvmeWeights()


def test_weights_that_are_dropped_give_everything_back(tmp_path: Path) -> None:
    offload_state_dict(tmp_path, {"w": torch.ones(64, 64)})
    before = open_descriptors()
    mine = ours.NvmeWeights(save_folder=tmp_path)
    weight = mine["w"]
    del mine
    spin_until_collected(lambda: open_descriptors().items() <= before.items())
    assert weight.eq(1).all()

"""The adapter for SGLang: what runs without it, and against it where it is."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import nvmeio
from nvmeio.errors import BackendUnavailableError, ClosedError, TransferError
from nvmeio.inference.spilling import spill
from nvmeio.integrations import sglang as for_sglang

pytestmark = pytest.mark.filterwarnings("default")


def layers(count: int = 5, width: int = 96) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(count)]


def run(modules: list[nn.Module], x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        for module in modules:
            x = module(x)
    return x


# Modules that are in memory already


@pytest.mark.parametrize("resident", [None, 120_000, 1 << 30])
def test_spilled_layers_compute_the_same(resident: int | None, tmp_path: Path) -> None:
    modules: Any = layers()
    whole = layers()
    modules[0][0].weight.weight_loader = "what a server puts there"
    with nvmeio.AioHandle(engine="threads") as handle:
        stream = spill(modules, tmp_path, resident_bytes=resident, handle=handle)
        assert list(tmp_path.iterdir()) == []  # the file has no name
        assert all(p.is_meta for module in modules for p in module.parameters())
        assert modules[0][0].weight.weight_loader == "what a server puts there"
        for seed in range(3):
            x = torch.randn(4, 96, generator=torch.Generator().manual_seed(seed))
            assert run(modules, x).equal(run(whole, x))
        assert (stream.stats.streamed_bytes == 0) == (resident == 1 << 30)
        stream.close()
        with pytest.raises(ClosedError):
            run(modules, x)


def test_spilled_layers_may_share_modules_without_parameters(tmp_path: Path) -> None:
    """SGLang caches its rotary embedding: one object for all layers, which has buffers only."""
    modules, whole, shared = layers(), layers(), nn.BatchNorm1d(96, affine=False).eval()
    shared.running_mean.uniform_(generator=torch.Generator().manual_seed(0))
    for module in (*modules, *whole):
        module.append(shared)
    with nvmeio.AioHandle(engine="threads") as handle, spill(modules, tmp_path, handle=handle):
        x = torch.randn(4, 96)
        for _ in range(3):
            assert run(modules, x).equal(run(whole, x))


def test_what_cannot_be_spilled_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no modules"):
        spill([], tmp_path)
    with pytest.raises(TransferError):
        spill(layers(), tmp_path / "nowhere")
    odd: Any = layers()
    odd[1][0].weight.data = odd[1][0].weight.data.t()
    with pytest.raises(ValueError, match=r"'1\.0\.weight' is not contiguous"):
        spill(odd, tmp_path)
    for options, error in (({"window": 0}, ValueError), ({"resident_bytes": "1G"}, TypeError)):
        with pytest.raises(error):
            spill(layers(), tmp_path, **options)
    assert list(tmp_path.iterdir()) == []


# SGLang


def settings_file(directory: Path, **fields: Any) -> Path:
    path = directory / "zero_inference.json"
    path.write_text(json.dumps({"nvme_path": str(directory), **fields}))
    return path


def test_settings_are_read(tmp_path: Path) -> None:
    found = for_sglang.read_settings(
        settings_file(tmp_path, window=2, aio={"block_size": 1 << 20, "queue_depth": 32})
    )
    assert found == for_sglang.Settings(
        tmp_path, None, 2, {"block_size": 1 << 20, "queue_depth": 32}
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"windows": 2}, "unknown fields: windows"),
        ({"aio": {"depth": 2}}, r"unknown fields: aio\.depth"),
        ({"aio": 3}, "must be an object"),
        ({"window": "2"}, "must be a number"),
        ({"nvme_path": 3}, "nvme_path"),
    ],
)
def test_settings_that_make_no_sense_are_refused(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        for_sglang.read_settings(settings_file(tmp_path, **fields))


def test_a_missing_drive_is_told(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is no directory"):
        for_sglang.read_settings(settings_file(tmp_path, nvme_path="/does/not/exist"))
    with pytest.raises(FileNotFoundError):
        for_sglang.read_settings(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        for_sglang.read_settings(tmp_path / "bad.json")


def test_an_offloader_streams_what_it_was_given(tmp_path: Path) -> None:
    """As SGLang calls it: layers, then their weights, then `post_init`."""
    whole = layers()
    given = for_sglang.Settings(tmp_path, None, 2, {"queue_depth": 8})
    offloader = for_sglang.Offloader(given)
    modules = offloader.wrap_modules(iter(layers(width=96)), submodule_accessor=None)
    with torch.no_grad():
        for mine, theirs in zip(modules, whole, strict=True):
            mine.load_state_dict(theirs.state_dict())
    offloader.post_init()
    offloader.post_init()
    x = torch.randn(3, 96)
    assert run(modules, x).equal(run(whole, x))
    offloader.close()


def test_without_a_configuration_sglang_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(for_sglang.VARIABLE, raising=False)
    for_sglang.register()


@pytest.fixture
def sglang_hooks() -> Iterator[ModuleType]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hooks = pytest.importorskip(
            "sglang.srt.plugins.hook_registry", reason="sglang (0.5.23 or later) is not installed"
        )
    yield hooks
    hooks.HookRegistry._hooks.pop(for_sglang._TARGET, None)


def test_sglang_takes_the_plugin(
    sglang_hooks: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(for_sglang.VARIABLE, str(settings_file(tmp_path)))
    for_sglang.register()
    ((kind, hook, _),) = sglang_hooks.HookRegistry._hooks[for_sglang._TARGET]
    assert kind is sglang_hooks.HookType.REPLACE
    assert callable(hook)


def test_sglangs_offloader_has_the_methods_that_are_replaced() -> None:
    offloading = pytest.importorskip(
        "sglang.srt.utils.offloader", reason="sglang's own kernels are not installed"
    )
    assert callable(offloading.create_offloader)
    for name in ("wrap_modules", "post_init", "forbid_copy_engine_usage"):
        assert hasattr(offloading.BaseOffloader, name)


def test_sglang_that_is_missing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(for_sglang.VARIABLE, str(settings_file(tmp_path)))
    monkeypatch.setitem(__import__("sys").modules, "sglang.srt.plugins.hook_registry", None)
    with pytest.raises(BackendUnavailableError, match="sglang>="):
        for_sglang.register()

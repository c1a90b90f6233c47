"""The load format for vLLM, without vLLM: beside a module with the names that it plugs into."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from inference._models import llama, loaded, saved
from support import aged, nvmeio_threads, spin_until

import nvmeio
from nvmeio._files import system
from nvmeio._threads.interruptible import Job
from nvmeio.errors import BackendUnavailableError, IntegrityError
from nvmeio.integrations import vllm as for_vllm

pytestmark = pytest.mark.filterwarnings("default")

MODULE = "vllm.model_executor.model_loader"


# Weights, read ahead


def test_all_weights_are_handed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(for_vllm, "GROUP_BYTES", 100_000)
    saved(llama, tmp_path, max_shard_size="300KB")
    whole = loaded(tmp_path).state_dict()
    given = dict(for_vllm.iterate_weights(tmp_path))
    assert given.keys() == whole.keys()
    assert all(given[name].equal(tensor) for name, tensor in whole.items())


def test_reads_run_ahead_and_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is being read and what is being handed over, together."""
    saved(llama, tmp_path)
    monkeypatch.setattr(for_vllm, "GROUP_BYTES", 40_000)
    monkeypatch.setattr(for_vllm, "MEMORY_BYTES", 120_000)
    started: list[int] = []

    class Noting(Job[Any]):
        def __init__(self, read: Any, name: str) -> None:
            super().__init__(read, name)
            self.reading = read.__self__

        def start(self) -> None:
            assert self.reading.nbytes <= for_vllm.GROUP_BYTES
            started.append(self.reading.nbytes)
            super().start()

    monkeypatch.setattr(for_vllm, "Job", Noting)
    ahead, taken = [], 0
    for _, tensor in for_vllm.iterate_weights(tmp_path):
        ahead.append(sum(started) - taken)
        taken += tensor.nbytes
    assert max(ahead) <= for_vllm.MEMORY_BYTES
    assert sum(nbytes > for_vllm.GROUP_BYTES for nbytes in ahead) > len(ahead) // 2


@pytest.mark.parametrize("cached", [False, True])
def test_the_page_cache_is_used_where_it_holds_the_file(
    cached: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(llama, tmp_path)
    monkeypatch.setattr(system, "is_cached", lambda *_: cached)
    read: list[int] = []
    begin, begin_batch = nvmeio.AioHandle.async_pread, nvmeio.AioHandle.async_pread_batch

    def pread(handle: Any, tensor: torch.Tensor, *rest: Any) -> Any:
        read.append(tensor.nbytes)
        return begin(handle, tensor, *rest)

    def pread_batch(handle: Any, tensors: list[torch.Tensor], *rest: Any) -> Any:
        read.extend(tensor.nbytes for tensor in tensors)
        return begin_batch(handle, tensors, *rest)

    monkeypatch.setattr(nvmeio.AioHandle, "async_pread", pread)
    monkeypatch.setattr(nvmeio.AioHandle, "async_pread_batch", pread_batch)
    whole = loaded(tmp_path).state_dict()
    given = dict(for_vllm.iterate_weights(tmp_path))
    assert all(given[name].equal(tensor) for name, tensor in whole.items())
    weights = sum(tensor.nbytes for tensor in whole.values())
    assert (sum(read) >= weights) != cached


def test_a_model_that_stops_taking_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(for_vllm, "GROUP_BYTES", 40_000)
    saved(llama, tmp_path)
    with nvmeio.AioHandle() as handle:
        threads = nvmeio_threads()
        weights = for_vllm.iterate_weights(tmp_path, handle=handle)
        next(weights)
        weights.close()
        handle.wait(timeout=0)
        spin_until(lambda: not nvmeio_threads() - threads)  # what they did is over


def test_a_file_that_is_written_to_while_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(for_vllm, "GROUP_BYTES", 100_000)
    monkeypatch.setattr(for_vllm, "MEMORY_BYTES", 0)
    saved(llama, tmp_path)
    aged(tmp_path / "model.safetensors")
    weights = for_vllm.iterate_weights(tmp_path)
    next(weights)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.seek(-4096, 2)
        file.write(bytes(4096))
    with pytest.raises(IntegrityError, match=r"changed while .*'model\."):
        list(weights)


# The load format


class DefaultModelLoader:
    """As vLLM 0.32.0 has it, as far as nvmeio reaches into it."""

    def __init__(self, load_config: Any) -> None:
        self.load_config = load_config
        self.local_expert_ids: set[int] | None = None

    def _get_weights_iterator(self, source: Any) -> Iterator[tuple[str, torch.Tensor]]:
        use_tqdm = self.load_config.use_tqdm_on_load
        if source.files[0].endswith(".safetensors"):
            found = safetensors_weights_iterator(
                source.files,
                use_tqdm,
                self.load_config.safetensors_load_strategy,
                local_expert_ids=self.local_expert_ids,
                safetensors_prefetch_num_threads=8,
            )
        else:
            found = pt_weights_iterator(source.files, use_tqdm, "cpu")
        return ((source.prefix + name, tensor) for name, tensor in found)


def safetensors_weights_iterator(*arguments: Any, **options: Any) -> Iterator[Any]:
    """vLLM's own."""
    yield "called with", (arguments, options)


def pt_weights_iterator(*_: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """vLLM's own."""
    raise AssertionError("nvmeio's was to be called")


def should_skip_weight(name: str, local_expert_ids: set[int] | None) -> bool:
    return local_expert_ids is not None and "layers.1" in name


def enable_tqdm(_: bool) -> bool:
    return False


def tqdm(paths: list[str], **_: Any) -> list[str]:
    return paths


_BAR_FORMAT = ""
_natural_sort_key = str


@pytest.fixture
def kind(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Makes loaders of the registered kind."""
    known: dict[str, type] = {}
    published = ModuleType(MODULE)
    published.DefaultModelLoader = DefaultModelLoader  # type: ignore[attr-defined]
    published.register_model_loader = (  # type: ignore[attr-defined]
        lambda name: lambda loader: known.setdefault(name, loader)
    )
    monkeypatch.setitem(sys.modules, MODULE, published)
    for_vllm.register()
    for_vllm.register()

    def new(**config: Any) -> Any:
        standard: dict[str, Any] = {
            "load_format": "nvmeio",
            "safetensors_load_strategy": None,
            "model_loader_extra_config": {},
            "use_tqdm_on_load": True,
        }
        return known["nvmeio"](SimpleNamespace(**(standard | config)))

    return new


def source(*files: Path) -> Any:
    return SimpleNamespace(files=[str(file) for file in files], prefix="p.")


def test_the_default_loader_reads_through_nvmeio(kind: Callable[..., Any], tmp_path: Path) -> None:
    saved(llama, tmp_path, max_shard_size="300KB")
    whole = loaded(tmp_path).state_dict()
    loader = kind()
    assert isinstance(loader, DefaultModelLoader)
    assert loader.load_config.load_format == "auto"  # what it looks for is vLLM's to say
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 1
    given = dict(loader._get_weights_iterator(source(*files)))
    assert given.keys() == {f"p.{name}" for name in whole}
    assert all(given[f"p.{name}"].equal(tensor) for name, tensor in whole.items())
    # vLLM's own module is as it was
    plain = DefaultModelLoader(loader.load_config)
    assert len(list(plain._get_weights_iterator(source(*files)))) == 1


def test_weights_that_vllm_filters_are_not_read(kind: Callable[..., Any], tmp_path: Path) -> None:
    saved(llama, tmp_path)
    loader = kind()
    loader.local_expert_ids = {0}
    given = dict(loader._get_weights_iterator(source(tmp_path / "model.safetensors")))
    assert given
    assert not [name for name in given if "layers.1" in name]


def test_pickled_weights_come_through_nvmeio(kind: Callable[..., Any], tmp_path: Path) -> None:
    weight = torch.randn(3)
    torch.save({"weight": weight}, tmp_path / "a.bin")
    ((name, tensor),) = kind()._get_weights_iterator(source(tmp_path / "a.bin"))
    assert name == "p.weight"
    assert tensor.equal(weight)


def test_ranks_share_the_page_cache(
    kind: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Direct, each rank would read every byte."""
    saved(llama, tmp_path)
    monkeypatch.setattr(for_vllm, "_ranks", lambda: 2)
    path = os.fspath(tmp_path / "model.safetensors")
    replaced = kind()._safetensors(safetensors_weights_iterator)
    ((_, ((files, _, strategy, experts), options)),) = replaced([path], True, None, None, threads=8)
    assert (files, strategy, experts, options) == ([path], "prefetch", None, {"threads": 8})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"safetensors_load_strategy": "eager"}, "leave it out"),
        ({"safetensors_load_strategy": "prefetch"}, "leave it out"),
        ({"model_loader_extra_config": {"enable_multithread_load": True}}, "read files itself"),
    ],
)
def test_other_ways_of_reading_are_refused(
    kind: Callable[..., Any], config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**config)


def test_a_torchao_checkpoint_is_refused(kind: Callable[..., Any], tmp_path: Path) -> None:
    loader = kind()
    loader.load_config.safetensors_load_strategy = "torchao"  # vLLM sets it once it knows
    with pytest.raises(ValueError, match="torchao"):
        list(loader._get_weights_iterator(source(tmp_path / "model.safetensors")))


def test_vllm_that_is_missing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, MODULE, None)
    with pytest.raises(BackendUnavailableError, match="vllm>="):
        for_vllm.register()


def test_vllm_that_reads_in_another_way_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own reads must not go on silently under the name of nvmeio."""
    published = ModuleType(MODULE)

    class Other:
        def _get_weights_iterator(self) -> None: ...

    published.DefaultModelLoader = Other  # type: ignore[attr-defined]
    published.register_model_loader = None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, MODULE, published)
    with pytest.raises(BackendUnavailableError, match="calls no safetensors_weights_iterator"):
        for_vllm.register()

"""The load format in vLLM itself; runs where it is installed (`make serve-vllm`)."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import inspect
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("vllm", reason="vllm is not installed: make serve-vllm")
    from inference._models import gpt2, llama, saved
    from integrations._serving_commands import commands
    from safetensors.torch import load_file, save_file
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import (
        cleanup_dist_env_and_memory,
        ensure_model_parallel_initialized,
        init_distributed_environment,
    )
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model, get_model_loader

from nvmeio.integrations import vllm as for_vllm

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(600)]

START_S = 400  # of a server, on a busy machine


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    """One process is the world, as in vLLM's own tests; without a GPU no cache is emptied."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.accelerator, "empty_cache", lambda: None)
        for_vllm.register()
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        with set_current_vllm_config(VllmConfig()):
            init_distributed_environment(1, 0, f"tcp://127.0.0.1:{port}", 0, "gloo")
            ensure_model_parallel_initialized(1, 1)
        yield
        cleanup_dist_env_and_memory()


def built(model: Path | str, load_format: str, **options: Any) -> tuple[Any, Any]:
    """A model as vLLM makes it, and its configuration."""
    config = EngineArgs(
        model=str(model),
        load_format=load_format,
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=32,
        **options,
    ).create_engine_config()
    with set_current_vllm_config(config):
        return get_model(vllm_config=config), config


def hashes(model: Any) -> dict[str, str]:
    return {
        name: hashlib.sha256(
            tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        ).hexdigest()
        for name, tensor in model.state_dict().items()
    }


def mixtral() -> Any:
    import transformers

    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
            vocab_size=128,
        )
    )


MODELS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "whole": (llama, {}),
    "sharded": (llama, {"max_shard_size": "300KB"}),
    "tied": (lambda: llama(tie_word_embeddings=True), {}),
    "transposed and tied": (gpt2, {}),
}


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_of_the_default_loader(name: str, tmp_path: Path) -> None:
    make, options = MODELS[name]
    saved(make, tmp_path, **options)
    expected, _ = built(tmp_path, "auto")
    found, _ = built(tmp_path, "nvmeio")
    assert hashes(found) == hashes(expected)
    assert len(hashes(found)) > 5


def test_a_missing_weight_is_refused_as_by_the_default_loader(tmp_path: Path) -> None:
    """The names that `load_weights` returned were dropped: memory as it happened to be served."""
    saved(llama, tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.norm.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    messages = []
    for load_format in ("auto", "nvmeio"):
        with pytest.raises(ValueError, match=r"not initialized.*model\.norm\.weight") as refused:
            built(tmp_path, load_format)
        messages.append(str(refused.value))
    assert messages[0] == messages[1]


def taken(model: Any, directory: Path, load_format: str, prepare: Any) -> dict[str, torch.Tensor]:
    """What a loader gives for a model, by name: `get_all_weights`, as for a reload."""
    config = EngineArgs(model=str(directory), load_format=load_format).create_engine_config()
    loader = get_model_loader(config.load_config)
    prepare(model, loader)
    pairs = list(loader.get_all_weights(config.model_config, model))
    assert len({name for name, _ in pairs}) == len(pairs)
    return dict(pairs)


def nothing(model: Any, loader: Any) -> None:
    """As it is."""


def secondary(model: Any, loader: Any) -> None:
    """Weights of another directory, and only some files of the model's own."""
    model.secondary_weights = [loader.Source(str(model.other), None, prefix="encoder.")]
    model.allow_patterns_overrides = ["model-00001*.safetensors"]


def filtered(model: Any, loader: Any) -> None:
    """Files of which no weight is used are left out."""
    with model.first.open("rb") as file:
        unused = file.read()
    model.is_unused_checkpoint_weight = lambda name: f'"{name}"'.encode() in unused


@pytest.mark.parametrize("prepare", [nothing, secondary, filtered])
def test_weights_for_a_reload_are_those_of_the_default_loader(prepare: Any, tmp_path: Path) -> None:
    """Sleep level 2 and `reload_weights` failed: there was no `get_all_weights`."""
    saved(llama, tmp_path, max_shard_size="200KB")
    other = tmp_path / "other"
    other.mkdir()
    save_file({"weight": torch.ones(3)}, other / "extra.safetensors")
    given = {}
    for load_format in ("auto", "nvmeio"):
        model = SimpleNamespace(other=other, first=min(tmp_path.glob("*.safetensors")))
        given[load_format] = taken(model, tmp_path, load_format, prepare)
    assert given["nvmeio"].keys() == given["auto"].keys()
    assert all(given["nvmeio"][n].equal(tensor) for n, tensor in given["auto"].items())
    whole = sum(len(load_file(path)) for path in tmp_path.glob("*.safetensors"))
    assert given["auto"]
    assert (len(given["auto"]) == whole) == (prepare is nothing)


def test_experts_of_other_ranks_are_not_read(tmp_path: Path) -> None:
    saved(mixtral, tmp_path)
    names = {}
    for load_format in ("auto", "nvmeio"):
        config = EngineArgs(model=str(tmp_path), load_format=load_format).create_engine_config()
        loader = get_model_loader(config.load_config)
        loader.local_expert_ids = {1, 3}
        source = loader.Source(str(tmp_path), None)
        names[load_format] = {name for name, _ in loader._get_weights_iterator(source)}
    assert names["nvmeio"] == names["auto"]
    assert [name for name in names["auto"] if ".experts.1." in name]
    assert not [name for name in names["auto"] if ".experts.0." in name]


def test_a_name_on_a_hub_that_is_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "models--nvmeio--tiny"
    snapshot = directory / "snapshots" / "0123"
    saved(llama, snapshot)
    (directory / "refs").mkdir()
    (directory / "refs" / "main").write_text("0123")
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    _, config = built(snapshot, "nvmeio")
    loader = get_model_loader(config.load_config)
    loader.load_config.download_dir = str(tmp_path)
    names = [n for n, _ in loader._get_weights_iterator(loader.Source("nvmeio/tiny", None))]
    assert names.count("model.norm.weight") == 1


def test_pickled_weights_are_loaded(tmp_path: Path) -> None:
    saved(llama, tmp_path)
    expected, _ = built(tmp_path, "auto")
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    found, _ = built(tmp_path, "nvmeio")
    assert hashes(found) == hashes(expected)


# A server


def answer(model: Path, *options: str, log: Path, **variables: str) -> list[dict[str, Any]]:
    """What a server of a model says to a few prompts, token by token."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--port", str(port), "--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager"),
        *("--skip-tokenizer-init", "--max-model-len", "64", "--served-model-name", "m"),
        "--enable-scale-out",
        *options,
    ]
    environment = os.environ | {"VLLM_LOGGING_LEVEL": "INFO", "OMP_NUM_THREADS": "1", **variables}
    with log.open("w") as said:
        server = subprocess.Popen(
            command, env=environment, stdout=said, stderr=said, start_new_session=True
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_for(f"{url}/health", server, log)
        return [
            _post(
                f"{url}/inference/v1/generate",
                {
                    "model": "m",
                    "token_ids": [1, *range(seed, seed + 20)],
                    "sampling_params": {"temperature": 0, "max_tokens": 12, "ignore_eos": True},
                },
            )["choices"]
            for seed in (3, 40, 90)
        ]
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def _wait_for(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    patience = time.monotonic() + START_S
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            assert server.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < patience, log.read_text()[-4000:]
            time.sleep(0.2)  # nothing tells that it listens


def _post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        return json.load(reply)


def test_a_server_answers_with_the_same_tokens(tmp_path: Path) -> None:
    """`--load-format nvmeio` on the command line, through vLLM's plugins."""
    model = tmp_path / "model"
    saved(lambda: llama(width=256), model, max_shard_size="2MB")  # heads that its CPU build has
    said = {
        load_format: answer(
            model, "--load-format", load_format, log=tmp_path / f"{load_format}.log"
        )
        for load_format in ("auto", "nvmeio")
    }
    assert said["nvmeio"] == said["auto"]
    assert all(len(choices[0]["token_ids"]) == 12 for choices in said["auto"])
    assert "shards (nvmeio)" in (tmp_path / "nvmeio.log").read_text()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="vLLM wants a core for each rank")
def test_ranks_of_one_server_answer_with_the_same_tokens(tmp_path: Path) -> None:
    """Two processes, each with a shard of every matrix; the files come through the page cache."""
    model = tmp_path / "model"
    saved(lambda: llama(width=256), model, max_shard_size="2MB")
    one = answer(model, "--load-format", "auto", log=tmp_path / "one.log")
    log = tmp_path / "two.log"
    two = answer(
        model,
        *("--load-format", "nvmeio", "--tensor-parallel-size", "2"),
        log=log,
        # A core each: by itself it wants a NUMA node for each rank.
        VLLM_CPU_OMP_THREADS_BIND="|".join(map(str, sorted(os.sched_getaffinity(0))[:2])),
    )
    assert [choices[0]["token_ids"] for choices in two] == [
        choices[0]["token_ids"] for choices in one
    ]
    said = log.read_text()
    assert "load_format=nvmeio" in said
    assert "shards (nvmeio)" not in said  # every rank would have read every byte


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="vLLM wants a core for each rank")
def test_ranks_read_every_byte_of_the_files_once_among_them(tmp_path: Path) -> None:
    """Read direct, every rank read all of them: twice as much for two ranks."""
    model = tmp_path / "model"
    saved(lambda: llama(8, width=256, vocab_size=32000), model, max_shard_size="12MB")
    nbytes = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = str(Path(__file__).with_name("_vllm_rank.py"))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    logs = [tmp_path / f"rank{rank}.log" for rank in range(2)]
    with contextlib.ExitStack() as undo:
        ranks = []
        for rank, log in enumerate(logs):
            said = undo.enter_context(log.open("w"))
            command = [sys.executable, script, str(model), str(port), str(rank), "2"]
            process = subprocess.Popen(command, env=environment, stdout=said, stderr=said)
            undo.callback(process.wait)
            undo.callback(process.kill)
            ranks.append(process)
        codes = [process.wait(START_S) for process in ranks]
    assert codes == [0, 0], [log.read_text()[-4000:] for log in logs]
    found = []
    for log in logs:
        (line,) = (line for line in log.read_text().splitlines() if line.startswith("FOUND "))
        found.append(json.loads(line.removeprefix("FOUND ")))
    for each in found:
        assert each["nvmeio"]["hashes"] == each["auto"]["hashes"]
    read = {name: sum(each[name]["read"] for each in found) for name in ("nvmeio", "auto")}
    if read["auto"] < nbytes:
        pytest.skip("the files stay in memory here: the kernel counts no bytes of a drive")
    assert nbytes <= read["nvmeio"] < 1.25 * nbytes


def test_the_commands_of_the_documentation_are_vllms() -> None:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    loading, caching = (parser.parse_args(each) for each in commands("vllm serve"))
    assert loading.model_tag == caching.model_tag == "MODEL"
    assert loading.load_format == "nvmeio"
    (tier,) = caching.kv_transfer_config.kv_connector_extra_config["secondary_tiers"]
    taken = inspect.signature(getattr(importlib.import_module(tier["module_path"]), tier["type"]))
    assert set(tier) - {"type", "module_path"} <= set(taken.parameters)


def test_an_offloader_that_a_loader_sets_has_nothing_to_move_on_a_cpu(tmp_path: Path) -> None:
    """vLLM's seam for weights that are elsewhere (docs/serving.md): where that changes, layers
    could be streamed."""
    from vllm.model_executor.offloader.base import BaseOffloader, set_offloader

    saved(lambda: llama(width=256), tmp_path)
    wrapped: list[Any] = []

    class Offloader(BaseOffloader):  # type: ignore[misc]
        def wrap_modules(self, modules_generator: Any, prefix: str = "") -> list[Any]:
            wrapped.extend(modules_generator)
            return wrapped

    set_offloader(Offloader())
    try:
        built(tmp_path, "nvmeio")
    finally:
        set_offloader(None)
    matrices = [
        parameter
        for layer in wrapped
        for name, parameter in layer.named_parameters()
        if "norm" not in name
    ]
    assert matrices
    assert not any(matrix.nbytes for matrix in matrices)  # packed, in closures

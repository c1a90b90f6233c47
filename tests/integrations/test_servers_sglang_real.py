"""Layers on the drive in SGLang itself; runs where it is installed (`make serve-sglang`)."""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import itertools
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("sglang") is None:
    pytest.skip("sglang is not installed: make serve-sglang", allow_module_level=True)

import extensions
from inference._models import llama, saved
from integrations._serving_commands import commands
from safetensors.torch import load_file, save_file

from nvmeio.integrations import sglang as for_sglang
from nvmeio.integrations._serving import sglang_settings

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(1800)]

START_S = 420  # of an engine, on a busy machine
COMPILE_S = 420  # 15 s by itself
LAYERS = 4

# For what SGLang compiles when it is first used.
COMPILING = {
    "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
}
HASH = """
from sglang.srt.mem_cache.cpp_utils.native_hash import get_native_hash
assert get_native_hash([1, 2, 3, 4], None, 4)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    make = functools.partial(llama, LAYERS, 128, max_position_embeddings=128)
    return saved(make, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def hashing() -> None:
    """SGLang's `hicache_hash_cpp` is compiled.

    An engine does that in the background when it first needs the name of a page. Until it is there
    no page is stored or found, by any backend.
    """
    compiling = subprocess.Popen(
        [sys.executable, "-c", HASH],
        env=os.environ | COMPILING,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # to end its compiler as well
    )
    try:
        said, _ = compiling.communicate(timeout=COMPILE_S)
    except BaseException as error:
        os.killpg(compiling.pid, signal.SIGKILL)
        compiling.communicate()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        # Where it was killed, a file "lock" stays, which SGLang removes when it compiles again.
        pytest.fail(
            f"SGLang's hicache_hash_cpp was not compiled within {COMPILE_S} s; run the test again "
            f"on a machine with less to do, and if that does not help remove "
            f"{extensions.DIRECTORY}"
        )
    if compiling.returncode:
        pytest.fail(
            "SGLang's hicache_hash_cpp cannot be compiled: it takes a C++ compiler, ninja and "
            f"OpenSSL's headers (apt-get install g++ ninja-build libssl-dev):\n{said[-4000:]}"
        )


def engine(
    model: Path, config: Path | None, prompt: tuple[str, ...] = (), **options: Any
) -> tuple[Any, str]:
    """What an engine found, if it started, and its log."""
    environment = {**os.environ, **COMPILING, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop(for_sglang.VARIABLE, None)
    if config is not None:
        environment[for_sglang.VARIABLE] = str(config)
    script = Path(__file__).with_name("_engine.py")
    done = subprocess.run(
        [sys.executable, str(script), str(model), json.dumps(options), *prompt],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=START_S,
        check=False,
    )
    found = re.search(r"^FOUND (.*)$", done.stdout, re.MULTILINE)
    return (json.loads(found.group(1)) if found else None), done.stdout


def configuration(directory: Path, **more: Any) -> Path:
    path = directory / "ds_offload_nvme_aio.json"
    param = {"device": "nvme", "nvme_path": str(directory), "pin_memory": True}
    zero = {"stage": 3, "stage3_prefetch_bucket_size": "auto", "offload_param": param}
    path.write_text(json.dumps({"zero_optimization": zero, **more}))
    return path


def test_an_engine_answers_the_same_with_its_layers_on_the_drive(
    model: Path, tmp_path: Path
) -> None:
    plain, log = engine(model, None)
    assert plain is not None, log[-4000:]
    given = configuration(tmp_path, window=1)
    found, log = engine(model, given)
    assert found is not None, log[-4000:]
    assert found["tokens"] == plain["tokens"]
    assert f"nvmeio: {LAYERS} layers on {tmp_path}" in log
    # A layer has 7/2 matrices of 128 by 256 and two norms, and is read whole.
    streamed = re.search(r"(\d+) bytes are streamed, 0 stay", log)
    assert streamed is not None
    assert int(streamed.group(1)) >= LAYERS * 128 * 128 * 9 * 4
    assert found["update"][0] is False
    assert "nvmeio" in found["update"][1]
    assert found["weight"] is None
    assert plain["weight"] is not None
    assert list(tmp_path.iterdir()) == [given]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="SGLang wants a core for each rank")
def test_ranks_of_one_engine_answer_the_same_with_their_layers_on_the_drive(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes, each with a shard of every matrix, which it spills for itself."""
    plain, log = engine(model, None)
    assert plain is not None, log[-4000:]
    cores = sorted(os.sched_getaffinity(0))[:2]  # by itself it wants a NUMA node for each rank
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "|".join(map(str, cores)))
    given = configuration(tmp_path, window=1)
    found, log = engine(model, given, tp_size=2)
    assert found is not None, log[-4000:]
    assert found["tokens"] == plain["tokens"]
    assert log.count(f"nvmeio: {LAYERS} layers on {tmp_path}") == 2
    assert list(tmp_path.iterdir()) == [given]


def test_an_engine_with_another_offloader_does_not_start(model: Path, tmp_path: Path) -> None:
    found, log = engine(model, configuration(tmp_path), cpu_offload_gb=1)
    assert found is None
    assert "Start it with no --cpu-offload-gb" in log


@pytest.mark.usefixtures("hashing")
def test_a_prompt_seen_before_is_read_by_the_next_engine(tmp_path: Path) -> None:
    """`NvmeHiCache` below SGLang's hierarchical cache, through its command line's options."""
    make = functools.partial(llama, LAYERS, 128, max_position_embeddings=2048)
    model = saved(make, tmp_path / "model")
    extra = {
        "backend_name": "nvmeio",
        "module_path": "nvmeio.integrations.sglang_hicache",
        "class_name": "NvmeHiCache",
        "interface_v1": 1,
        "directory": str(tmp_path / "kv"),
        "capacity_bytes": "100MB",
    }
    options = {
        "enable_hierarchical_cache": True,
        "hicache_io_backend": "direct",
        "hicache_mem_layout": "layer_first",
        "hicache_write_policy": "write_through",
        "hicache_storage_backend": "dynamic",
        "hicache_storage_backend_extra_config": json.dumps(extra),
        "page_size": 4,
    }
    tokens = json.dumps([number * 37 % 97 + 1 for number in range(1024)])
    prompt = (tokens, str(tmp_path / "kv" / "nvmeio-blocks" / "*.table"))
    computed, log = engine(model, None, prompt, **options)
    assert computed is not None, log[-4000:]
    read, log = engine(model, None, prompt, **options)
    assert read is not None, log[-4000:]
    assert read["tokens"] == computed["tokens"]
    assert (computed["cached"], read["cached"]) == (0, 1020)
    # A flush, as after an update of weights, leaves nothing to be found.
    assert (read["flush"], read["cached_after_flush"]) == (True, 0)
    weights = load_file(model / "model.safetensors")
    for weight in weights.values():
        weight.mul_(1.5)
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    other, log = engine(model, None, prompt, **options)
    assert other is not None, log[-4000:]
    assert "were stored with other weights" in log
    assert other["cached"] == 0


def test_the_commands_of_the_documentation_are_sglangs() -> None:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    caching, streaming = (parser.parse_args(each) for each in commands("sglang.launch_server"))
    assert caching.model_path == streaming.model_path == "MODEL"
    assert caching.enable_hierarchical_cache
    assert caching.hicache_storage_backend == "dynamic"
    extra = json.loads(caching.hicache_storage_backend_extra_config)
    assert hasattr(importlib.import_module(extra["module_path"]), extra["class_name"])
    assert streaming.disable_cuda_graph


def test_what_is_refused_is_where_sglang_has_it() -> None:
    """A name that it does not know is taken for something that this SGLang does not have."""
    from sglang.srt.arg_groups.arg_utils import namespace_of
    from sglang.srt.server_args import ServerArgs

    namespaces = namespace_of(ServerArgs)
    derived = {"backend", "enable_torch_compile", "is_startup_weight_load_overlap"}
    for place in itertools.chain.from_iterable(sglang_settings.REFUSED.values()):
        function, _, attributes = place.partition(" ")
        *between, field = attributes.split(".")
        if field not in derived:
            assert namespaces[field] == ".".join([function.removeprefix("get_"), *between])
    for module in sglang_settings.READ_AHEAD:
        assert importlib.util.find_spec(module) is not None

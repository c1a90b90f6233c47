"""Layers on the drive in SGLang: the adapter, against a stand-in with SGLang's interface.

`test_servers_sglang_real.py` has it in SGLang itself.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from integrations import _sglang_stand_in as stand_in
from support import run_python, spin_until_collected
from torch import nn

import nvmeio
from nvmeio.errors import BackendUnavailableError, ClosedError, TransferError
from nvmeio.integrations import sglang as for_sglang
from nvmeio.integrations._serving import sglang_settings

pytestmark = pytest.mark.filterwarnings("default")


def settings_file(directory: Path, **fields: Any) -> Path:
    path = directory / "zero_inference.json"
    path.write_text(json.dumps({"nvme_path": str(directory), **fields}))
    return path


def zero_file(directory: Path, zero: Any = None, param: Any = None, **fields: Any) -> Path:
    """As the examples of DeepSpeed's fork of SGLang have it."""
    offload = {"device": "nvme", "nvme_path": str(directory), "pin_memory": True}
    offload.update({"buffer_count": 5, "buffer_size": 1e9, **(param or {})})
    found = {
        "zero_optimization": {
            "stage": 3,
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_max_live_parameters": "auto",
            "offload_param": offload,
            **(zero or {}),
        },
        "bf16": {"enabled": "auto"},
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 2000,
        "wall_clock_breakdown": False,
        "aio": {"block_size": 1 << 20, "queue_depth": 32, "thread_count": 2},
        **fields,
    }
    path = directory / "ds_offload_nvme_aio.json"
    path.write_text(json.dumps(found))
    return path


# The configuration


def test_settings_are_read(tmp_path: Path) -> None:
    found = for_sglang.read_settings(
        settings_file(tmp_path, window=2, aio={"block_size": 1 << 20, "queue_depth": 32})
    )
    assert found == for_sglang.Settings(
        tmp_path, None, 2, {"block_size": 1 << 20, "queue_depth": 32}
    )


def test_a_zero_3_configuration_is_read(tmp_path: Path) -> None:
    """The module said that its own format was the one that DeepSpeed's fork takes."""
    aio = {"block_size": 1 << 20, "queue_depth": 32, "intra_op_parallelism": 2}
    assert for_sglang.read_settings(zero_file(tmp_path)) == (tmp_path, None, None, aio)
    given = zero_file(tmp_path, resident_bytes=1 << 30, window=2, aio={"block_size": "auto"})
    assert for_sglang.read_settings(given) == (tmp_path, 1 << 30, 2, {})


@pytest.mark.parametrize("file", [settings_file, zero_file])
@pytest.mark.parametrize("words", [{"num_threads": 2}, {"num_threads": 2, "thread_count": 2}])
def test_what_deepspeeds_tuner_prints_is_taken(
    words: dict[str, Any], file: Any, tmp_path: Path
) -> None:
    """`ds_nvme_tune` prints num_threads, which was refused here, and nowhere else."""
    printed = {"single_submit": "false", "overlap_events": "true", "queue_depth": 32, **words}
    aio = for_sglang.read_settings(file(tmp_path, aio=printed)).aio
    with nvmeio.AioHandle(**aio) as handle, nvmeio.AioHandle(**printed) as expected:
        assert handle.get_intra_op_parallelism() == expected.get_intra_op_parallelism() == 2
        assert handle.get_single_submit() == expected.get_single_submit()
    with pytest.raises(ValueError, match="are one thing, and differ: 2 and 3"):
        file_of_both = file(tmp_path, aio={"num_threads": 2, "thread_count": 3})
        for_sglang.read_settings(file_of_both)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"windows": 2},
            r"windows \(did you mean 'window'\?\)\. Known are nvme_path",
        ),
        ({"aio": {"depth": 2}}, r"unknown fields: aio\.depth"),
        ({"aio": 3}, "must be an object"),
        ({"window": "2"}, "must be a number"),
        ({"nvme_path": 3}, '"nvme_path": a directory'),
    ],
)
def test_settings_that_make_no_sense_are_refused(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        for_sglang.read_settings(settings_file(tmp_path, **fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"zero": {"stage": 2}}, '"stage" must be 3, not 2'),
        ({"zero": {"stage": True}}, '"stage" must be 3, not True'),
        (
            {"zero": {"stage4_live": 1}},
            r"fields: zero_optimization\.stage4_live .*\. Known",
        ),
        ({"zero": {"offload_optimizer": {}}}, r"offload_optimizer: a server has no optimizer"),
        ({"param": {"device": "cpu"}}, "not 'cpu': .* --cpu-offload-gb"),
        ({"param": {"nvme_path": None}}, r"zero_optimization\.offload_param\.nvme_path"),
        ({"param": {"buffers": 5}}, r"zero_optimization\.offload_param\.buffers"),
        ({"zero": {"offload_param": None}}, 'must be "nvme", not None'),
        ({"zero": {"offload_param": "nvme"}}, "must be an object, not 'nvme'"),
        ({"aio": {"use_gds": True}}, '"use_gds" is not for streamed layers'),
        ({"aio": {"thread_count": 1, "intra_op_parallelism": 2}}, "are one thing, and differ"),
        ({"weight_quantization": {}}, "start SGLang with --quantization"),
        ({"kv_offload": True}, "--enable-hierarchical-cache"),
        ({"nvme_path": "/tmp"}, "unknown fields: nvme_path"),
        ({"window": 1.5}, "must be a number"),
    ],
)
def test_a_zero_3_configuration_that_makes_no_sense_is_refused(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        for_sglang.read_settings(zero_file(tmp_path, **fields))


def test_a_missing_drive_is_told(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is not a directory"):
        for_sglang.read_settings(settings_file(tmp_path, nvme_path="/does/not/exist"))
    with pytest.raises(FileNotFoundError):
        for_sglang.read_settings(tmp_path / "none.json")
    for text, message in (("{", "not valid JSON"), ("[1]", "must hold a JSON object")):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            for_sglang.read_settings(tmp_path / "bad.json")


# In a server


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Starts a server with layers on the drive; with "plain" one without."""
    monkeypatch.setenv(for_sglang.VARIABLE, str(zero_file(tmp_path, window=1)))
    with stand_in.installed():
        yield lambda plain=False: stand_in.Server((lambda: None) if plain else for_sglang.register)


def offloader() -> Any:
    return sys.modules["sglang.srt.utils.offloader"].instance  # type: ignore[attr-defined]


def left_in(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir() if path.suffix != ".json"]


def test_a_model_answers_the_same_and_its_layers_are_read(start: Any, tmp_path: Path) -> None:
    weights, x = stand_in.checkpoint(), torch.randn(3, 32)
    expected = start(plain=True).run(weights)(x)
    model = start().run(weights)
    for _ in range(2):
        assert model(x).equal(expected)
    stats = offloader().stream.stats
    assert stats.streamed_bytes >= 5 * 2 * 32 * 32 * 4
    assert stats.bytes_read >= 2 * 4 * 2 * 32 * 32 * 4
    assert left_in(tmp_path) == []
    offloader().close()
    assert all(layer.up.weight.is_meta for layer in model.layers)
    with pytest.raises(ClosedError):
        model(x)


def test_a_layer_is_on_the_drive_before_the_next_one_is_processed(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All layers were post-processed, in memory, before the first one was written."""
    # Two of a layer, and the next layer's first; the head comes last and is nobody's.
    expected = [1, 2] * 6 + [1]
    processed: list[weakref.ref[Any]] = []
    real = stand_in.Method.process_weights_after_loading

    def note(self: Any, layer: Any) -> None:
        real(self, layer)
        processed.append(weakref.ref(layer.weight))
        most = expected[len(processed) - 1]
        spin_until_collected(lambda: sum(each() is not None for each in processed) <= most)

    monkeypatch.setattr(stand_in.Method, "process_weights_after_loading", note)
    start().run(stand_in.checkpoint(layers=6), layers=6)
    assert len(processed) == len(expected)
    offloader().close()


@pytest.mark.stress
def test_loading_and_spilling_need_the_memory_of_a_few_layers(tmp_path: Path) -> None:
    """All of a model was in memory, and all of it once more when it was post-processed."""
    settings = settings_file(tmp_path, window=1, aio={"block_size": 1 << 20, "queue_depth": 8})
    done = run_python(
        f"""
        import os, sys, torch
        os.environ["NVMEIO_SGLANG_CONFIG"] = {str(settings)!r}
        sys.path.insert(0, {str(Path(__file__).parent.parent)!r})
        from integrations import _sglang_stand_in as stand_in
        from nvmeio.integrations import sglang as for_sglang
        torch.set_num_threads(1)
        stand_in.install()
        for_sglang.PARKED_BYTES = 8 << 20
        LAYERS, WIDTH = 16, 1024  # 12 MiB a layer
        def weights():
            for number in reversed(range(LAYERS)):
                for part in ("attention.kv_b_proj", "up", "down"):
                    yield f"layers.{{number}}.{{part}}.weight", torch.full((WIDTH, WIDTH), 0.5)
        stand_in.Layer.ATTENTION = stand_in.PlainAttention  # nothing of a layer stays
        def peak():
            return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) << 10
        x = torch.ones(1, WIDTH)
        server = stand_in.Server(for_sglang.register)
        (x @ torch.ones(WIDTH, WIDTH)).sum().item()  # what torch needs the first time
        before = peak()
        model = server.run(weights(), LAYERS, WIDTH)
        print(peak() - before)
        with torch.no_grad():
            assert model.layers[3](x).isfinite().all()
        """
    )
    assert done.returncode == 0, done.stderr
    layer = 12 << 20
    assert int(done.stdout.split()[-1]) < 12 * layer  # of 16, each twice; it is 3 to 5


def test_what_is_read_outside_of_a_forward_stays(start: Any) -> None:
    model = start().run(stand_in.checkpoint())
    for layer in model.layers:
        projection = layer.attention.kv_b_proj.weight
        assert not projection.is_meta
        assert layer.attention.w_kc.data_ptr() == projection.data_ptr()
        assert layer.norm.weight.is_meta
    offloader().close()


def test_a_parameter_with_a_second_name_stays(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = stand_in.Method.process_weights_after_loading

    def note(self: Any, layer: Any) -> None:
        real(self, layer)
        layer.cached = layer.weight.data

    monkeypatch.setattr(stand_in.Method, "process_weights_after_loading", note)
    model = start().run(stand_in.checkpoint())
    assert all(layer.up.weight.data_ptr() == layer.up.cached.data_ptr() for layer in model.layers)
    assert all(layer.norm.weight.is_meta for layer in model.layers)
    offloader().close()


def test_a_draft_model_stays_as_it_is_made(start: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Its layers were taken to host memory, and never brought back: it has no `post_init`."""
    server, x = start(), torch.randn(3, 32)
    model = server.run(stand_in.checkpoint())
    first, stream = model(x), offloader().stream
    with caplog.at_level(logging.INFO, "nvmeio"):
        draft = server.run(stand_in.checkpoint(2, seed=1), layers=2, is_draft_worker=True)
    assert "the draft model stays on the device" in caplog.text
    assert not any(parameter.is_meta for parameter in draft.parameters())
    assert server.update(draft, [])[0]
    assert draft(x).isfinite().all()
    assert model(x).equal(first)
    stream.close()


def test_updates_of_weights_are_refused_and_change_nothing(start: Any) -> None:
    """They were copied into what has no memory: the server said yes, and served the old ones."""
    server, x = start(), torch.randn(3, 32)
    model = server.run(stand_in.checkpoint())
    before = model(x)
    done, message = server.update(model, stand_in.checkpoint(seed=1))
    assert (done, for_sglang.VARIABLE in message) == (False, True), message
    exporter = sys.modules["sglang.srt.model_executor.model_runner_components.weight_exporter"]
    refused = exporter.WeightExporter(lambda: model)  # type: ignore[attr-defined]
    assert "can be neither replaced nor read" in refused._weight_export_unsupported_reason()
    # What surrounds an update post-processes the model, whether or not anything was loaded.
    loader = sys.modules["sglang.srt.model_loader.loader"]
    found = {module for module, _ in loader._modules_with_quant_method(model)}  # type: ignore[attr-defined]
    assert found == {model.lm_head}
    assert model(x).equal(before)
    offloader().close()


@pytest.mark.parametrize(
    ("name", "value", "flag"),
    [
        ("get_exec.graph.cuda_graph_config.decode.backend", "full", "--disable-cuda-graph"),
        ("get_exec.graph.cuda_graph_config.prefill.backend", "breakable", "--disable-cuda-graph"),
        ("get_flags.capture.enable_torch_compile", True, "no --enable-torch-compile"),
        ("get_exec.offload.cpu_offload_gb", 4, "no --cpu-offload-gb"),
        ("get_exec.offload.offload_group_size", 2, "no --offload-group-size"),
        ("get_exec.overlap.enable_two_batch_overlap", True, "no --enable-two-batch-overlap"),
        ("get_exec.features.enable_memory_saver", True, "no --enable-memory-saver"),
        ("get_disagg.enable_pdmux", True, "no --enable-pdmux"),
        ("get_exec.kernel.enable_nvidia_megakernel", True, "no --enable-nvidia-megakernel"),
        ("get_exec.kernel.enable_amd_monokernel", True, "no --enable-amd-monokernel"),
        ("get_exec.offload.ple_offload_embedding", True, "--no-ple-offload-embedding"),
        ("get_exec.moe.enable_paged_experts", True, "no --enable-paged-experts"),
        ("get_exec.moe.kt_weight_path", "/experts", "no --kt-weight-path"),
        ("get_parallel.dwdp_size", 2, "no --dwdp-size"),
        ("get_spec.uno_lora_path", "/draft", "no --uno-lora-path"),
        (
            "get_model.remote_instance_weight_loader_start_seed_via_transfer_engine",
            True,
            "no --remote-instance-weight-loader-start-seed-via-transfer-engine",
        ),
        (
            "get_model.checkpoint_engine_wait_weights_before_ready",
            True,
            "no --checkpoint-engine-wait-weights-before-ready",
        ),
        ("get_exec.moe.enable_eplb", True, "no --enable-eplb"),
        ("get_exec.moe.elastic_ep_backend", "mooncake", "no --elastic-ep-backend"),
        ("get_lora.enable_lora", True, "no --enable-lora"),
        ("get_lora.lora_paths", ["x"], "no --lora-paths"),
        ("get_model.weight_cache_mode", "daemon", "--weight-cache-mode off"),
        ("get_model.is_startup_weight_load_overlap", True, "no --startup-weight-load-mode overlap"),
    ],
)
def test_what_does_not_work_is_refused_at_start(
    name: str, value: Any, flag: str, start: Any
) -> None:
    """A CUDA graph replayed over the window, for one: other layers' weights, without a word."""
    stand_in.install(**{name: value})
    with pytest.raises(ValueError, match=f"Start it with {flag}$"):
        start().run(stand_in.checkpoint())


def test_a_layer_that_reads_weights_of_the_next_is_refused(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those have no memory then: an error in the middle of the first request, or worse."""
    monkeypatch.setattr(stand_in.Layer, "__module__", "sglang.srt.models.kimi_k3")
    with pytest.raises(ValueError, match="reads weights of the layer behind it"):
        start().run(stand_in.checkpoint())


def test_a_model_that_is_sharded_after_its_loading_is_refused(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stand_in.Model, "supports_torch_tp", True, raising=False)
    start().run(stand_in.checkpoint())
    stand_in.install(**{"get_parallel.tp_size": 2})
    with pytest.raises(ValueError, match="with --tp-size 1"):
        start().run(stand_in.checkpoint())


def test_another_sglang_is_refused_where_it_lacks_what_is_needed(start: Any) -> None:
    loader = "sglang.srt.model_loader.loader"
    updater = "sglang.srt.model_executor.model_runner_components.weight_updater"
    for module, name in (
        (loader, "_modules_with_quant_method"),
        (updater, "_unsupported_derived_weight_cache_error"),
        ("sglang.srt.runtime_context", "get_exec"),
    ):
        stand_in.install()
        delattr(sys.modules[module], name)
        server = start()
        with pytest.raises(BackendUnavailableError, match="sglang==") as refused:
            server.run(stand_in.checkpoint())
        assert name in str(refused.value.attempts)


def test_a_model_whose_layers_nobody_sees_is_refused(start: Any) -> None:
    """It was served from memory as if nothing had been asked for."""
    start()
    made = for_sglang.new_offloader(for_sglang.Settings(Path("/nowhere"), None, None, {}))
    with pytest.raises(ValueError, match="make_layers"):
        made.post_init()
    with pytest.raises(ValueError, match="--load-format"):
        made.wrap_modules(iter([nn.Linear(2, 2, device="meta")]))


def test_a_full_drive_ends_the_start(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, nbytes: int, path: str) -> None:
        raise TransferError(28, operation="fallocate", path=path, nbytes=nbytes)

    monkeypatch.setattr("nvmeio.inference.spilling.reserve", full)
    with pytest.raises(TransferError, match="No space left"):
        start().run(stand_in.checkpoint())


def test_a_bad_configuration_ends_the_start(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang logs what a plugin raises, and went on without it: out of memory, minutes later."""
    monkeypatch.setenv(for_sglang.VARIABLE, str(tmp_path / "none.json"))
    with pytest.raises(FileNotFoundError):
        start().run(stand_in.checkpoint())


def test_a_loader_of_another_kind_is_spilled_at_the_end(start: Any, tmp_path: Path) -> None:
    """Loaders of dummy or sharded weights post-process in their own way, or not at all."""
    start()
    given = for_sglang.Settings(tmp_path, None, 2, {"queue_depth": 8})
    made = for_sglang.new_offloader(given)

    def layers() -> list[nn.Module]:
        torch.manual_seed(0)
        return [nn.Sequential(nn.Linear(96, 96), nn.ReLU()) for _ in range(5)]

    modules = made.wrap_modules(iter(layers()), submodule_accessor=None)
    made.post_init()
    made.post_init()
    x = torch.randn(3, 96)
    with torch.no_grad():
        found = whole = x
        for mine, theirs in zip(modules, layers(), strict=True):
            found, whole = mine(found), theirs(whole)
    assert found.equal(whole)
    made.close()
    made.close()


def test_without_a_configuration_sglang_is_left_alone(start: Any, monkeypatch: Any) -> None:
    monkeypatch.delenv(for_sglang.VARIABLE)
    model = start().run(stand_in.checkpoint())
    assert type(offloader()) is stand_in.NoopOffloader
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_sglang_that_is_missing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(for_sglang.VARIABLE, str(settings_file(tmp_path)))
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", None)
    with pytest.raises(BackendUnavailableError, match="sglang=="):
        for_sglang.register()


def test_every_refusal_says_what_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    for why, places in sglang_settings.REFUSED.items():
        for place in places:
            function, _, attributes = place.partition(" ")
            value: Any = "on"
            for name in reversed(attributes.split(".")):
                value = SimpleNamespace(**{name: value})
            context = SimpleNamespace(
                **{function: partial(getattr, SimpleNamespace(of=value), "of")}
            )
            monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", context)
            with pytest.raises(ValueError, match=rf"{re.escape(why)}\. Start it with .*--\w") as no:
                sglang_settings.check_server(())
            assert f"{attributes} is 'on'" in str(no.value)

"""The settings of an nvmeio offloader in SGLang, and its refusals.

`read_settings` reads a JSON file in either of two formats.

nvmeio's own::

    {"nvme_path": "/mnt/nvme",
     "resident_bytes": 24000000000,
     "window": 3,
     "aio": {"block_size": 8388608, "queue_depth": 32, "intra_op_parallelism": 8}}

DeepSpeed's, as its fork of SGLang takes it with ``--zero-inference-config``: a ZeRO-3 configuration
with ``zero_optimization.offload_param`` on "nvme". nvmeio uses its `nvme_path` and `aio`. Settings
of DeepSpeed's own partitioning and training are known and have no counterpart here; "auto" is taken
for them. nvmeio's `resident_bytes` and `window` may stand beside them. A key that neither knows is
refused by name.

`check_server`, `check_layer` and `check_model` refuse what does not work with layers on the drive;
`mark` has SGLang refuse what would come later.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Collection, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from nvmeio._storage.untrusted import SETTINGS_BYTES, read_small
from nvmeio.errors import BackendUnavailableError, an, nearest
from nvmeio.integrations._clients import resolved

VARIABLE = "NVMEIO_SGLANG_CONFIG"
TRIED = "pip install 'sglang==0.5.23'"

_CONTEXT = "sglang.srt.runtime_context"

# SGLang's modules that look whether weights can be replaced or read; and the attribute.
_MARKS = (
    (
        "sglang.srt.model_executor.model_runner_components.weight_updater",
        "_unsupported_derived_weight_cache_error",
        "_derived_weight_cache_error",
    ),
    (
        "sglang.srt.model_executor.model_runner_components.weight_exporter",
        "WeightExporter._weight_export_unsupported_reason",
        "_weight_export_error",
    ),
)
_MARK = (
    "the weights of this model are on the drive (nvmeio), and can be neither replaced nor read "
    f"while the model is served: start a new server with the other weights, or without {VARIABLE}"
)

# Models of which a layer reads weights of the one behind it.
READ_AHEAD = tuple(
    f"sglang.srt.models.{name}"
    for name in ("beam", "deepseek_v4", "hunyuan_v4", "kimi_k3", "muse_spark", "qwen4_exp")
)

_GRAPHS = "a CUDA graph replays without Python, and would compute with what lies in the window"
# Features that do not work with layers on the drive, and why: the place in SGLang (a function of
# its context, and attributes of what that returns), and as what it is off.
REFUSED: dict[str, dict[str, tuple[Any, ...]]] = {
    _GRAPHS: {
        "get_exec graph.cuda_graph_config.decode.backend": ("disabled",),
        "get_exec graph.cuda_graph_config.prefill.backend": ("disabled",),
    },
    "compiled code skips what brings a layer's weights": {
        "get_flags capture.enable_torch_compile": (False,)
    },
    "it is an offloader too, and a layer has one": {
        "get_exec offload.cpu_offload_gb": (0,),
        "get_exec offload.offload_group_size": (0, -1),
    },
    "it is an offloader too": {"get_exec offload.ple_offload_embedding": (False, None)},
    "it runs parts of two layers in turns, without calling the layers": {
        "get_exec overlap.enable_two_batch_overlap": (False,)
    },
    "it computes two layers at once, on two streams, and the window has one order": {
        "get_disagg enable_pdmux": (False,)
    },
    "its kernels read the weights of many layers without calling them": {
        "get_exec kernel.enable_nvidia_megakernel": (False,),
        "get_exec kernel.enable_amd_monokernel": (False,),
    },
    "it keeps and moves experts of layers itself": {
        "get_exec moe.enable_paged_experts": (False,),
        "get_exec moe.kt_weight_path": (None,),
        "get_parallel dwdp_size": (1, 0, None),
    },
    "it replaces weights of layers while they are served": {
        "get_exec moe.enable_eplb": (False,),
        "get_exec moe.elastic_ep_backend": (None,),
        "get_lora enable_lora": (False, None),
        "get_lora lora_paths": (None, [], {}),
        "get_spec uno_lora_path": (None,),
    },
    "an update would reload the weights that it releases, and updates are refused": {
        "get_exec features.enable_memory_saver": (False,)
    },
    "it waits for an update of weights, which is refused": {
        "get_model checkpoint_engine_wait_weights_before_ready": (False,)
    },
    "other instances would copy weights from addresses that no longer hold them": {
        "get_model remote_instance_weight_loader_start_seed_via_transfer_engine": (False,)
    },
    "other processes share the weights on the device": {"get_model weight_cache_mode": ("off",)},
    "it loads weights after the layers were spilled": {
        "get_model is_startup_weight_load_overlap": (False,)
    },
}
# The flag that helps, by the last attribute; of all others it is to be without theirs.
_FLAGS = {
    "backend": "--disable-cuda-graph",
    "ple_offload_embedding": "--no-ple-offload-embedding",
    "weight_cache_mode": "--weight-cache-mode off",
    "is_startup_weight_load_overlap": "no --startup-weight-load-mode overlap",
}

_OWN = ("nvme_path", "resident_bytes", "window", "aio")
# DeepSpeed's names for intra_op_parallelism; `ds_nvme_tune` prints the first.
_THREADS = ("num_threads", "thread_count")
_AIO = ("block_size", "queue_depth", "single_submit", "overlap_events", "intra_op_parallelism")

# DeepSpeed's keys, of which those without a comment have no meaning for streamed layers.
_TOP = (
    "zero_optimization",  # read below
    "aio",  # read below
    "resident_bytes",  # nvmeio's own
    "window",  # nvmeio's own
    "fp16",
    "bf16",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "steps_per_print",
    "wall_clock_breakdown",
    "prescale_gradients",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
)
_ZERO = (
    "stage",  # must be 3
    "offload_param",  # read below
    "allgather_bucket_size",
    "allgather_partitions",
    "contiguous_gradients",
    "memory_efficient_linear",
    "overlap_comm",
    "reduce_bucket_size",
    "reduce_scatter",
    "round_robin_gradients",
    "stage3_gather_16bit_weights_on_model_save",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_param_persistence_threshold",
    "stage3_prefetch_bucket_size",
    "sub_group_size",
)
_PARAM = (
    "device",  # must be "nvme"
    "nvme_path",  # read below
    "pin_memory",
    "buffer_count",
    "buffer_size",
    "max_in_cpu",
)
# Their values decide what is computed, or on which device: a message says what to do instead.
_REMEDIES = {
    "quantized_weights": "start SGLang with --quantization",
    "zero_quantized_weights": "start SGLang with --quantization",
    "weight_quantization": "start SGLang with --quantization",
    "kv_offload": "start SGLang with --enable-hierarchical-cache, and "
    "nvmeio.integrations.sglang_hicache",
    "offload_optimizer": "a server has no optimizer: leave it out",
    "optimizer": "a server has no optimizer: leave it out",
    "scheduler": "a server has no optimizer: leave it out",
}


class Settings(NamedTuple):
    """The settings of a configuration file.

    `resident_bytes` is memory on the device for layers and window, None keeps no layer; `window`
    counts layers, None takes 3; `aio` are parameters of `AioHandle`, empty takes those stored for
    the file system.
    """

    nvme_path: Path
    resident_bytes: int | None
    window: int | None
    aio: dict[str, Any]


def read_settings(path: str | os.PathLike[str]) -> Settings:
    """Read a configuration file, nvmeio's or a ZeRO-3 configuration of DeepSpeed.

    FileNotFoundError if it or `nvme_path` is missing. ValueError says which field is unknown, of
    the wrong type, or asks for what cannot be, and what to do.
    """
    text = read_small(path, SETTINGS_BYTES)
    try:
        found: Any = json.loads(text)
    except ValueError as failed:
        raise ValueError(f"{path} is not valid JSON: {failed}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold a JSON object, not {found!r:.80}")
    of_deepspeed = "zero_optimization" in found
    if of_deepspeed:
        where, aio = _of_deepspeed(path, found)
    else:
        _known(path, "", found, _OWN)
        where, aio = found.get("nvme_path"), _aio(path, found)
    if not isinstance(where, str):
        name = "zero_optimization.offload_param.nvme_path" if of_deepspeed else "nvme_path"
        raise ValueError(f'{path} must name "{name}": a directory on the drive, not {where!r}')
    for name in ("resident_bytes", "window"):
        value = found.get(name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise ValueError(f"{path}: {name!r} must be a number, not {value!r}")
    directory = Path(where)
    if not directory.is_dir():
        raise FileNotFoundError(f"{path}: nvme_path {directory} is not a directory")
    return Settings(directory, found.get("resident_bytes"), found.get("window"), aio)


def _of_deepspeed(path: Any, found: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    _known(path, "", found, _TOP)
    zero = _section(path, found, "zero_optimization", _ZERO)
    stage = zero.get("stage")
    if isinstance(stage, bool) or stage != 3:
        raise ValueError(f'{path}: zero_optimization: "stage" must be 3, not {stage!r}')
    param = _section(path, zero, "offload_param", _PARAM, "zero_optimization.")
    if param.get("device") != "nvme":
        raise ValueError(
            f'{path}: zero_optimization.offload_param: "device" must be "nvme", not '
            f"{param.get('device')!r}: for host memory start SGLang with --cpu-offload-gb, and "
            "without nvmeio"
        )
    return param.get("nvme_path"), _aio(path, found)


def _aio(path: Any, found: dict[str, Any]) -> dict[str, Any]:
    """The "aio" section, as `AioHandle` takes it; DeepSpeed has further names for threads."""
    section = _section(path, found, "aio", (*_AIO, *_THREADS, "use_gds"))
    aio = {name: value for name, value in section.items() if value != "auto"}
    if aio.pop("use_gds", False):
        raise ValueError(
            f'{path}: aio: "use_gds" is not for streamed layers, which go through page-locked host '
            "memory: leave it out"
        )
    for name in _THREADS:
        threads = aio.pop(name, None)
        if threads is not None and aio.setdefault("intra_op_parallelism", threads) != threads:
            raise ValueError(
                f"{path}: aio: intra_op_parallelism, {' and '.join(_THREADS)} are one thing, and "
                f"differ: {aio['intra_op_parallelism']!r} and {threads!r}. Leave one out"
            )
    return aio


def _section(
    path: Any, found: dict[str, Any], name: str, known: Collection[str], within: str = ""
) -> dict[str, Any]:
    value = found.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f'{path}: "{within}{name}" must be an object, not {value!r:.80}')
    _known(path, f"{within}{name}.", value, known)
    return dict(value)


def _known(path: Any, within: str, found: dict[str, Any], known: Collection[str]) -> None:
    unknown = sorted(set(found) - set(known))
    if not unknown:
        return
    remedies = [f"{name}: {_REMEDIES[name]}" for name in unknown if name in _REMEDIES]
    names = ", ".join(within + name + nearest(name, known) for name in unknown)
    raise ValueError(
        f"{path} has unknown fields: {names}"
        + (f" ({'; '.join(remedies)})" if remedies else f". Known are {', '.join(known)}")
    )


def check_server(hooked: Sequence[str]) -> None:
    """Refuse what does not work with layers on the drive.

    `hooked` names what nvmeio has registered hooks around. ValueError says what SGLang was started
    with, why it is refused, and the flag that helps; BackendUnavailableError that this SGLang lacks
    what nvmeio plugs into.
    """
    missing = [
        (name, "has no hook of nvmeio's")
        for name in hooked
        if not hasattr(resolved(name), "__wrapped__")
    ]
    missing += [
        (f"{module}.{name}", "is not there")
        for module, name, _ in _MARKS
        if resolved(f"{module}.{name}") is None
    ]
    context = importlib.import_module(_CONTEXT)
    for why, places in REFUSED.items():
        for place, off in places.items():
            function, _, at = place.partition(" ")
            try:
                value: Any = attrgetter(at)(getattr(context, function)())
            except AttributeError:
                if why is _GRAPHS:
                    missing.append((f"{_CONTEXT}.{function}().{at}", "is not there"))
                continue  # this SGLang does not have it
            if value not in off:
                name = at.rpartition(".")[2]
                flag = _FLAGS.get(name, f"no --{name.replace('_', '-')}")
                raise ValueError(
                    f"SGLang's {at} is {value!r}, which does not work with layers on the drive "
                    f"({VARIABLE}): {why}. Start it with {flag}"
                )
    if missing:
        raise BackendUnavailableError(
            "this SGLang lacks what nvmeio needs to stream layers", attempts=missing, remedy=TRIED
        )


def check_layer(layer: nn.Module) -> None:
    """Refuse (ValueError) a layer that needs more of the model than itself."""
    for kind in type(layer).__mro__:
        if kind.__module__ in READ_AHEAD:
            raise ValueError(
                f"{an(type(layer).__name__)} ({kind.__module__}) reads weights of the layer behind "
                f"it, which is on the drive then: serve this model without {VARIABLE}"
            )


def check_model(model: Any) -> None:
    """Refuse (ValueError) a model whose weights SGLang changes behind its offloader's back."""
    if not getattr(model, "supports_torch_tp", False):
        return
    size = importlib.import_module(_CONTEXT).get_parallel().tp_size
    if size > 1:
        raise ValueError(
            f"SGLang shards the weights of {an(type(model).__name__)} when they were spilled: "
            f"serve it with --tp-size 1, or without {VARIABLE}"
        )


def mark(layer: nn.Module) -> None:
    """Make SGLang refuse to update or export the weights of a model with this layer."""
    for _, _, attribute in _MARKS:
        setattr(layer, attribute, _MARK)

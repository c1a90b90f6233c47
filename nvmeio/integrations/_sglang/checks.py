"""What of SGLang does not work with layers on the drive, and is refused when a server starts.

And the marks by which SGLang refuses later what would go wrong without a word: weights are copied
into what stands in a layer's place, which has no memory, and nothing happens.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn

from nvmeio.errors import BackendUnavailableError

VARIABLE = "NVMEIO_SGLANG_CONFIG"
TRIED = "pip install 'sglang==0.5.23'"

_CONTEXT = "sglang.srt.runtime_context"

# Where SGLang looks for a module that its weights cannot be replaced, or read; and the attribute.
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
    "the weights of this model are on the drive (nvmeio), where they can be neither replaced nor "
    f"read while it is served: start a server anew with the other weights, or without {VARIABLE}"
)


# Models of which a layer reads weights of the one behind it.
_READ_AHEAD = tuple(
    f"sglang.srt.models.{name}"
    for name in ("beam", "deepseek_v4", "hunyuan_v4", "kimi_k3", "muse_spark", "qwen4_exp")
)


class _Refused(NamedTuple):
    """What does not work with layers on the drive: where SGLang has it, and as what it is off."""

    of: str
    at: str
    off: tuple[Any, ...]
    why: str
    remedy: str


_GRAPHS = "a CUDA graph replays without Python, and would compute with what lies in the window"
_COMPILED = "compiled code skips what brings a layer's weights"
_MOVED = "it replaces weights of layers while they are served"
_EXPERTS = "it keeps and moves experts of layers itself"
_FUSED = "its kernels read the weights of many layers without calling them"
_REFUSED = (
    _Refused(
        "get_exec",
        "graph.cuda_graph_config.decode.backend",
        ("disabled",),
        _GRAPHS,
        "--disable-cuda-graph",
    ),
    _Refused(
        "get_exec",
        "graph.cuda_graph_config.prefill.backend",
        ("disabled",),
        _GRAPHS,
        "--disable-cuda-graph",
    ),
    _Refused(
        "get_flags",
        "capture.enable_torch_compile",
        (False,),
        _COMPILED,
        "no --enable-torch-compile",
    ),
    _Refused(
        "get_exec",
        "offload.cpu_offload_gb",
        (0,),
        "it is an offloader too, and a layer has one",
        "no --cpu-offload-gb",
    ),
    _Refused(
        "get_exec",
        "offload.offload_group_size",
        (0, -1),
        "it is an offloader too, and a layer has one",
        "no --offload-group-size",
    ),
    _Refused(
        "get_exec",
        "overlap.enable_two_batch_overlap",
        (False,),
        "it runs parts of two layers in turns, without calling the layers",
        "no --enable-two-batch-overlap",
    ),
    _Refused(
        "get_exec",
        "features.enable_memory_saver",
        (False,),
        "what it releases of the weights is loaded anew by an update, which is refused",
        "no --enable-memory-saver",
    ),
    _Refused(
        "get_disagg",
        "enable_pdmux",
        (False,),
        "it computes two layers at once, on two streams, and the window has one order",
        "no --enable-pdmux",
    ),
    _Refused(
        "get_exec",
        "kernel.enable_nvidia_megakernel",
        (False,),
        _FUSED,
        "no --enable-nvidia-megakernel",
    ),
    _Refused(
        "get_exec", "kernel.enable_amd_monokernel", (False,), _FUSED, "no --enable-amd-monokernel"
    ),
    _Refused(
        "get_exec",
        "offload.ple_offload_embedding",
        (False, None),
        "it is an offloader too",
        "--no-ple-offload-embedding",
    ),
    _Refused(
        "get_exec", "moe.enable_paged_experts", (False,), _EXPERTS, "no --enable-paged-experts"
    ),
    _Refused("get_exec", "moe.kt_weight_path", (None,), _EXPERTS, "no --kt-weight-path"),
    _Refused("get_parallel", "dwdp_size", (1, 0, None), _EXPERTS, "no --dwdp-size"),
    _Refused("get_exec", "moe.enable_eplb", (False,), _MOVED, "no --enable-eplb"),
    _Refused("get_exec", "moe.elastic_ep_backend", (None,), _MOVED, "no --elastic-ep-backend"),
    _Refused("get_lora", "enable_lora", (False, None), _MOVED, "no --enable-lora"),
    _Refused("get_lora", "lora_paths", (None, [], {}), _MOVED, "no --lora-paths"),
    _Refused("get_spec", "uno_lora_path", (None,), _MOVED, "no --uno-lora-path"),
    _Refused(
        "get_model",
        "remote_instance_weight_loader_start_seed_via_transfer_engine",
        (False,),
        "other instances would copy weights from addresses where they are no more",
        "no --remote-instance-weight-loader-start-seed-via-transfer-engine",
    ),
    _Refused(
        "get_model",
        "checkpoint_engine_wait_weights_before_ready",
        (False,),
        "it waits for an update of weights, which is refused",
        "no --checkpoint-engine-wait-weights-before-ready",
    ),
    _Refused(
        "get_model",
        "weight_cache_mode",
        ("off",),
        "other processes share the weights on the device",
        "--weight-cache-mode off",
    ),
    _Refused(
        "get_model",
        "is_startup_weight_load_overlap",
        (False,),
        "it loads weights after the layers were spilled",
        "no --startup-weight-load-mode overlap",
    ),
)


def check_server(hooked: Sequence[str]) -> None:
    """Refuse what does not work with layers on the drive.

    Args:
        hooked: Names of what nvmeio has registered hooks around.

    Raises:
        ValueError: SGLang is started with such a thing; says which, why, and the flag that helps.
        BackendUnavailableError: This SGLang lacks what nvmeio plugs into.
    """
    missing = [
        (name, "has no hook of nvmeio's")
        for name in hooked
        if not hasattr(_resolved(name), "__wrapped__")
    ]
    missing += [
        (f"{module}.{name}", "is not there")
        for module, name, _ in _MARKS
        if _resolved(f"{module}.{name}") is None
    ]
    context = importlib.import_module(_CONTEXT)
    for each in _REFUSED:
        try:
            value: Any = getattr(context, each.of)()
            for attribute in each.at.split("."):
                value = getattr(value, attribute)
        except AttributeError:
            if each.why is _GRAPHS:
                missing.append((f"{_CONTEXT}.{each.of}().{each.at}", "is not there"))
            continue  # this SGLang does not have it
        if value not in each.off:
            raise ValueError(
                f"SGLang's {each.at} is {value!r}, which does not work with layers on the drive "
                f"({VARIABLE}): {each.why}. Start it with {each.remedy}"
            )
    if missing:
        raise BackendUnavailableError(
            "this SGLang lacks what nvmeio streams layers by", attempts=missing, remedy=TRIED
        )


def check_layer(layer: nn.Module) -> None:
    """Refuse a layer that needs more of the model than itself.

    Raises:
        ValueError: It is of such a model.
    """
    for kind in type(layer).__mro__:
        if kind.__module__ in _READ_AHEAD:
            raise ValueError(
                f"a {type(layer).__name__} ({kind.__module__}) reads weights of the layer behind "
                f"it, which is on the drive then: serve this model without {VARIABLE}"
            )


def check_model(model: Any) -> None:
    """Refuse a model whose weights SGLang changes behind its offloader's back.

    Raises:
        ValueError: It is such a model.
    """
    if not getattr(model, "supports_torch_tp", False):
        return
    size = importlib.import_module(_CONTEXT).get_parallel().tp_size
    if size > 1:
        raise ValueError(
            f"SGLang shards the weights of a {type(model).__name__} when they were spilled: serve "
            f"it with --tp-size 1, or without {VARIABLE}"
        )


def mark(layer: nn.Module) -> None:
    """Have SGLang refuse to update or to export the weights of a model with this layer."""
    for _, _, attribute in _MARKS:
        setattr(layer, attribute, _MARK)


def _resolved(name: str) -> Any:
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return None

"""What an nvmeio offloader in SGLang is told: a JSON file in either of two formats.

nvmeio's own::

    {"nvme_path": "/mnt/nvme",
     "resident_bytes": 24000000000,
     "window": 3,
     "aio": {"block_size": 8388608, "queue_depth": 32, "intra_op_parallelism": 8}}

DeepSpeed's, as its fork of SGLang takes it with ``--zero-inference-config``: a ZeRO-3 configuration
with ``zero_optimization.offload_param`` on "nvme". Of that, `nvme_path` and `aio` are used. What
tunes DeepSpeed's own partitioning and training is known and has no counterpart here; "auto" is
taken for it. nvmeio's `resident_bytes` and `window` may stand beside them. A key that neither knows
is refused by name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

from nvmeio._storage.guarded import SETTINGS_BYTES, read_small

_OWN = ("nvme_path", "resident_bytes", "window", "aio")
_AIO = (
    "block_size",
    "queue_depth",
    "single_submit",
    "overlap_events",
    "intra_op_parallelism",
)

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
# Whose value decides what is computed, or where: what becomes of them is said.
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
    """What a configuration file says.

    Attributes:
        nvme_path: Directory on the drive.
        resident_bytes: Memory on the device for layers and window; None keeps no layer.
        window: Layers in the window; None takes 3.
        aio: Parameters of `AioHandle`; empty takes those stored for the file system.
    """

    nvme_path: Path
    resident_bytes: int | None
    window: int | None
    aio: dict[str, Any]


def read_settings(path: str | os.PathLike[str]) -> Settings:
    """Read a configuration file, nvmeio's or a ZeRO-3 configuration of DeepSpeed.

    Raises:
        FileNotFoundError: It is missing, or `nvme_path` is.
        ValueError: It is not JSON, or has a field that is unknown, of the wrong type, or asks for
            what cannot be; says which, and what to do.
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
        where, aio = found.get("nvme_path"), _section(path, found, "aio", _AIO)
    if not isinstance(where, str):
        name = "zero_optimization.offload_param.nvme_path" if of_deepspeed else "nvme_path"
        raise ValueError(f'{path} must name "{name}": a directory on the drive, not {where!r}')
    for name in ("resident_bytes", "window"):
        value = found.get(name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise ValueError(f"{path}: {name!r} must be a number, not {value!r}")
    directory = Path(where)
    if not directory.is_dir():
        raise FileNotFoundError(f"{path}: nvme_path {directory} is no directory")
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
    aio = _section(path, found, "aio", (*_AIO, "thread_count", "use_gds"))
    if aio.pop("use_gds", False):
        raise ValueError(
            f'{path}: aio: "use_gds" is not for streamed layers, which go through page-locked host '
            "memory: leave it out"
        )
    threads = aio.pop("thread_count", None)
    if threads is not None and aio.setdefault("intra_op_parallelism", threads) != threads:
        raise ValueError(
            f'{path}: aio: "thread_count" and "intra_op_parallelism" are one thing, and differ: '
            "leave one out"
        )
    return param.get("nvme_path"), {k: value for k, value in aio.items() if value != "auto"}


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
    raise ValueError(
        f"{path} has unknown fields: {', '.join(within + name for name in unknown)}"
        + (f" ({'; '.join(remedies)})" if remedies else f". Known are {', '.join(known)}")
    )

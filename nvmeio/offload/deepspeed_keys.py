"""DeepSpeed's words in a config: those that are understood, and why others are not."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from nvmeio._checks import switch
from nvmeio.engines.base import Options
from nvmeio.errors import nearest

# DeepSpeed's words, as its documentation has them: those understood, and why others are not.
DEVICES = ("none", "cpu", "nvme")
TOP = (
    "zero_optimization",
    "offload_optimizer",
    "offload_param",
    "aio",
    "activation_checkpointing",
    "bf16",
    "fp16",
    "resume",
    "overwrite",
)
ZERO = ("stage", "offload_optimizer", "offload_param", "sub_group_size")
_BOTH = ("device", "nvme_path", "pin_memory", "buffer_count", "buffer_size")
OPTIMIZER = (*_BOTH, "pipeline_read", "pipeline_write", "pipeline", "ratio", "fast_init")
PARAM = (*_BOTH, "max_in_cpu")
AIO = (*Options._fields, "num_threads", "thread_count", "use_gds")
# What DeepSpeed has and what becomes of it here; said where somebody asks for it.
_RANKS = (
    "leave it out: FSDP2 (fully_shard) or DistributedDataParallel communicate, with settings of "
    "their own"
)
_WINDOW = "set the window instead: offload_param's max_in_cpu, or buffer_count and buffer_size"
_OLDER = 'an older name: write offload_optimizer or offload_param with its device, "cpu"'
_INSIDE = "leave it out: it is about DeepSpeed's internals"
_ASKS = object()  # whatever its value
# For each word: what to do instead, and the value, DeepSpeed's default, that asks for nothing.
_NOT_OF_OFFLOADING: dict[str, tuple[str, object]] = {
    "checkpoint": ("save with nvmeio.Checkpointer, which has settings of its own", _ASKS),
    "torch_autocast": (
        'run forward within torch.autocast("cpu", torch.bfloat16), or "cuda"',
        {"enabled": False},
    ),
    "steps_per_print": ("print from the training loop", _ASKS),
    "wall_clock_breakdown": (
        "optimizer.last_step has the times of a step, torch.profiler the rest",
        False,
    ),
    "gradient_clipping": ("call optimizer.clip_grad_norm_(max_norm) before each step", _ASKS),
    "optimizer": ("pass the class, and its arguments by name", _ASKS),
    "scheduler": ("make one from torch.optim.lr_scheduler over the optimizer", _ASKS),
    "train_batch_size": ("batches are the training loop's own", _ASKS),
    "gradient_accumulation_steps": ("call backward() as often as you like before step()", 1),
    "super_offload": ("leave it out: reading, computing and writing overlap anyway", False),
    "cpuadam_cores_perc": ("torch.set_num_threads() says how many threads compute", 0.8),
    "zenflow": ("every step takes all gradients, so that results are those in memory", None),
    "elastic_checkpoint": ("optimizer.state_dict() has the form of the class's own", False),
    "load_from_fp32_weights": ("resume=True and load_state_dict bring masters back", True),
    "ignore_unused_parameters": ("parameters without a gradient stay on the drive", True),
    "memory_efficient_linear": (
        "leave it out: no module keeps its weights in memory for backward",
        True,
    ),
    "compute_grad_norm": ("call optimizer.clip_grad_norm_(max_norm), which returns it", True),
    "leaf_module": ("leave it out: what calls no children is read as a whole", _ASKS),
    "save_muon_momentum_buffer_in_memory": ("offload_optimizer's ratio says what stays", False),
    "cpu_offload": (_OLDER, None),
    "cpu_offload_param": (_OLDER, None),
    "cpu_offload_use_pin_memory": (_OLDER, None),
    "legacy_stage1": (_INSIDE, False),
    "parameter_alignment": (_INSIDE, False),
    "pipeline_loading_checkpoint": (_INSIDE, False),
    "override_module_apply": (_INSIDE, True),
    "log_trace_cache_warnings": (_INSIDE, False),
    "enable_sanity_checks": (_INSIDE, False),
    "allgather_partitions": (_RANKS, True),
    "allgather_bucket_size": (_RANKS, 500_000_000),
    "overlap_comm": (_RANKS, None),
    "reduce_scatter": (_RANKS, True),
    "reduce_bucket_size": (_RANKS, 500_000_000),
    "contiguous_gradients": (_RANKS, True),
    "round_robin_gradients": (_RANKS, False),
    "use_multi_rank_bucket_allreduce": (_RANKS, True),
    "zero_hpz_partition_size": (_RANKS, 1),
    "zero_quantized_weights": (_RANKS, False),
    "zero_quantized_nontrainable_weights": (_RANKS, False),
    "zero_quantized_gradients": (_RANKS, False),
    "stage3_use_all_reduce_for_fetch_params": (_RANKS, False),
    "stage3_allgather_sequential": (_RANKS, False),
    "stage3_max_live_parameters": (_WINDOW, 1_000_000_000),
    "stage3_max_reuse_distance": (_WINDOW, 1_000_000_000),
    "stage3_prefetch_bucket_size": (_WINDOW, 50_000_000),
    "stage3_param_persistence_threshold": (_WINDOW, 100_000),
    "stage3_model_persistence_threshold": (_WINDOW, sys.maxsize),
    "stage3_module_granularity_threshold": (_WINDOW, 0),
}
# What only informs, whatever its value, or is always so: state_dict() has all weights.
_INFORMS = (
    "train_micro_batch_size_per_gpu",
    "steps_per_print",
    "stage3_gather_16bit_weights_on_model_save",
    "stage3_gather_fp16_weights_on_model_save",
)
# Of activation checkpointing: what cannot be, where it is asked for.
_NOT_OF_ACTIVATIONS = {
    "partition_activations": "there is no model parallelism to share them out by",
    "contiguous_memory_optimization": "their memory comes from torch's allocator. On the drive "
    "nvmeio.offload.SwappedActivations has them contiguous",
    "synchronize_checkpoint_boundary": "call the device's own synchronize() in the region",
    "profile": "torch.profiler shows each region",
}
_ACTIVATIONS = (*_NOT_OF_ACTIVATIONS, "cpu_checkpointing", "number_checkpoints")


def or_empty(section: Mapping[str, Any], key: str) -> Any:
    """A section's value; {} where it is left out or null."""
    found = section.get(key)
    return {} if found is None else found


def known(name: str, section: Any, among: tuple[str, ...]) -> Mapping[str, Any]:
    """A section, whose keys are all understood or ask for nothing; without those of "auto"."""
    if not isinstance(section, Mapping):
        raise ValueError(f"{name} must be a mapping, not {section!r:.80}")
    for key in section:
        if key in among:
            continue
        if key in _INFORMS or _asks_for_nothing(key, section):
            continue
        if key in _NOT_OF_OFFLOADING:
            instead, _ = _NOT_OF_OFFLOADING[key]
            raise ValueError(f"{name}: {key!r} does not belong to offloading: {instead}")
        words = [*among, *_INFORMS, *_NOT_OF_OFFLOADING]
        raise ValueError(
            f"{name}: unknown key {key!r}{nearest(key, words)}; known are {', '.join(among)}"
        )
    # A device or a stage that is left out is another one: these have to be said.
    return {k: v for k, v in section.items() if v != "auto" or k in ("device", "stage")}


def _asks_for_nothing(key: str, section: Mapping[str, Any]) -> bool:
    value = section[key]
    if key == "train_batch_size":  # without accumulation it says what the loop does anyway
        micro = section.get("train_micro_batch_size_per_gpu", value)
        return bool(section.get("gradient_accumulation_steps", 1) == 1 and micro == value)
    # What DeepSpeed itself makes of its default, null.
    dynamic = key == "overlap_comm" and value is (section.get("stage", 3) == 3)
    return dynamic or value == "auto" or bool(value == _NOT_OF_OFFLOADING.get(key, ("", _ASKS))[1])


def flag(section: Mapping[str, Any], key: str, default: bool) -> bool:
    """A switch, which tuners print as a string."""
    value = section.get(key, default)
    if not isinstance(value, (bool, str)):
        raise ValueError(f"{key} must be true or false, not {value!r}")
    try:
        return switch(key, value)
    except TypeError as refused:
        raise ValueError(str(refused)) from None


def number(name: str, section: Mapping[str, Any], key: str, default: int) -> int:
    """A positive number; 1e9, as JSON files have it, is one too."""
    value = section.get(key, default)
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if isinstance(value, bool) or not whole or (key in section and value < 1):
        raise ValueError(f"{name}: {key} must be a positive number, not {value!r}")
    return int(value)


def check_activations(section: Any, on_device: bool) -> None:
    """The words for activation checkpointing, which the model does by itself.

    Args:
        section: Of the config.
        on_device: Whether the module computes elsewhere than on the CPU.

    Raises:
        ValueError: It asks for what is not done.
    """
    name = "activation_checkpointing"
    for key, why in _NOT_OF_ACTIVATIONS.items():
        if flag(known(name, section, _ACTIVATIONS), key, False):
            raise ValueError(f"{name}: {key} is impossible: {why}")
    if section.get("number_checkpoints") is not None:
        number(name, section, "number_checkpoints", 1)
    if flag(section, "cpu_checkpointing", False) and on_device:
        raise ValueError(
            f"{name}: cpu_checkpointing is not supported here: run forward within "
            "torch.autograd.graph.save_on_cpu(), or nvmeio.offload.SwappedActivations for the drive"
        )

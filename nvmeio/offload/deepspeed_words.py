"""DeepSpeed's words in a config: those that are understood, and why others are not."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from nvmeio._checks import switch
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
OPTIMIZER = (
    "device",
    "nvme_path",
    "pin_memory",
    "buffer_count",
    "buffer_size",
    "pipeline_read",
    "pipeline_write",
    "pipeline",
    "ratio",
    "fast_init",
)
PARAM = ("device", "nvme_path", "pin_memory", "buffer_count", "buffer_size", "max_in_cpu")
AIO = (
    "block_size",
    "queue_depth",
    "single_submit",
    "overlap_events",
    "intra_op_parallelism",
    "num_threads",
    "thread_count",
    "use_gds",
)
_ACTIVATIONS = (
    "partition_activations",
    "cpu_checkpointing",
    "contiguous_memory_optimization",
    "number_checkpoints",
    "synchronize_checkpoint_boundary",
    "profile",
)
# What DeepSpeed has and what becomes of it here; said where somebody asks for it.
_RANKS = (
    "what ranks tell each other is not of this: FSDP2 (fully_shard) or DistributedDataParallel do "
    "it, by their own settings"
)
_WINDOW = (
    "what is in memory and read ahead follows from the window: offload_param's max_in_cpu, or "
    "buffer_count and buffer_size"
)
_OLDER = 'an older name: write offload_optimizer or offload_param with its device, "cpu"'
_INSIDE = "it is about DeepSpeed's own insides: leave it out"
_IMPOSSIBLE = {
    "checkpoint": "save with nvmeio.Checkpointer, which has settings of its own",
    "torch_autocast": 'run forward within torch.autocast("cpu", torch.bfloat16), or "cuda"',
    "steps_per_print": "print from the training loop",
    "wall_clock_breakdown": "optimizer.last_step has the times of a step, torch.profiler the rest",
    "gradient_clipping": "call optimizer.clip_grad_norm_(max_norm) before each step",
    "optimizer": "pass the class, and its arguments by name",
    "scheduler": "make one from torch.optim.lr_scheduler over the optimizer",
    "train_batch_size": "batches are the training loop's own",
    "gradient_accumulation_steps": "call backward() as often as you like before step()",
    "super_offload": "there is one pipeline, and it overlaps by itself",
    "cpuadam_cores_perc": "torch.set_num_threads() says how many threads compute",
    "zenflow": "every step takes all gradients, so that results are those in memory",
    "elastic_checkpoint": "optimizer.state_dict() has the form of the class's own",
    "load_from_fp32_weights": "resume=True and load_state_dict bring masters back as they were",
    "ignore_unused_parameters": "parameters without a gradient are neither read nor written",
    "memory_efficient_linear": "autograd keeps places of parameters, whatever the module",
    "compute_grad_norm": "optimizer.clip_grad_norm_(max_norm) computes it where it is wanted",
    "stage3_gather_16bit_weights_on_model_save": "module.state_dict() has all weights",
    "stage3_gather_fp16_weights_on_model_save": "module.state_dict() has all weights",
    "leaf_module": "layers are units by themselves: see SwappedModule's `units`",
    "save_muon_momentum_buffer_in_memory": "offload_optimizer's ratio says what stays in memory",
    "cpu_offload": _OLDER,
    "cpu_offload_param": _OLDER,
    "cpu_offload_use_pin_memory": _OLDER,
    **dict.fromkeys(
        (
            "legacy_stage1",
            "parameter_alignment",
            "pipeline_loading_checkpoint",
            "override_module_apply",
            "log_trace_cache_warnings",
            "enable_sanity_checks",
        ),
        _INSIDE,
    ),
    **dict.fromkeys(
        (
            "allgather_partitions",
            "allgather_bucket_size",
            "overlap_comm",
            "reduce_scatter",
            "reduce_bucket_size",
            "contiguous_gradients",
            "round_robin_gradients",
            "use_multi_rank_bucket_allreduce",
            "zero_hpz_partition_size",
            "zero_quantized_weights",
            "zero_quantized_nontrainable_weights",
            "zero_quantized_gradients",
            "stage3_use_all_reduce_for_fetch_params",
            "stage3_allgather_sequential",
        ),
        _RANKS,
    ),
    **dict.fromkeys(
        (
            "stage3_max_live_parameters",
            "stage3_max_reuse_distance",
            "stage3_prefetch_bucket_size",
            "stage3_param_persistence_threshold",
            "stage3_model_persistence_threshold",
            "stage3_module_granularity_threshold",
        ),
        _WINDOW,
    ),
}
# What asks for nothing as long as it has this value, which is DeepSpeed's default.
_ASKS_FOR_NOTHING = {
    "allgather_bucket_size": 500_000_000,
    "allgather_partitions": True,
    "compute_grad_norm": True,
    "contiguous_gradients": True,
    "cpu_offload": None,
    "cpu_offload_param": None,
    "cpu_offload_use_pin_memory": None,
    "cpuadam_cores_perc": 0.8,
    "elastic_checkpoint": False,
    "enable_sanity_checks": False,
    "gradient_accumulation_steps": 1,
    "ignore_unused_parameters": True,
    "legacy_stage1": False,
    "load_from_fp32_weights": True,
    "log_trace_cache_warnings": False,
    "memory_efficient_linear": True,
    "overlap_comm": None,
    "override_module_apply": True,
    "parameter_alignment": False,
    "pipeline_loading_checkpoint": False,
    "reduce_bucket_size": 500_000_000,
    "reduce_scatter": True,
    "round_robin_gradients": False,
    "save_muon_momentum_buffer_in_memory": False,
    "stage3_allgather_sequential": False,
    "stage3_gather_16bit_weights_on_model_save": False,
    "stage3_gather_fp16_weights_on_model_save": False,
    "stage3_max_live_parameters": 1_000_000_000,
    "stage3_max_reuse_distance": 1_000_000_000,
    "stage3_model_persistence_threshold": sys.maxsize,
    "stage3_module_granularity_threshold": 0,
    "stage3_param_persistence_threshold": 100_000,
    "stage3_prefetch_bucket_size": 50_000_000,
    "stage3_use_all_reduce_for_fetch_params": False,
    "super_offload": False,
    "torch_autocast": {"enabled": False},
    "use_multi_rank_bucket_allreduce": True,
    "wall_clock_breakdown": False,
    "zenflow": None,
    "zero_hpz_partition_size": 1,
    "zero_quantized_gradients": False,
    "zero_quantized_nontrainable_weights": False,
    "zero_quantized_weights": False,
}
# What only informs, whatever its value.
_INFORMS = ("train_micro_batch_size_per_gpu", "steps_per_print")
# Of activation checkpointing: what cannot be, where it is asked for.
_NOT_OF_ACTIVATIONS = {
    "partition_activations": "there is no model parallelism to share them out by",
    "contiguous_memory_optimization": "their memory comes from torch's allocator. On the drive "
    "nvmeio.offload.SwappedActivations has them contiguous",
    "synchronize_checkpoint_boundary": "call the device's own synchronize() in the region",
    "profile": "torch.profiler shows each region",
}


def or_empty(section: Mapping[str, Any], key: str) -> Any:
    """A section's value; {} where it is left out or null."""
    found = section.get(key)
    return {} if found is None else found


def known(name: str, section: Any, among: tuple[str, ...]) -> Mapping[str, Any]:
    """A section, whose keys are all understood or ask for nothing."""
    if not isinstance(section, Mapping):
        raise ValueError(f"{name} must be a mapping, not {section!r:.80}")
    for key in section:
        if key in among:
            continue
        if key in _INFORMS or _asks_for_nothing(key, section):
            continue
        remedy = _IMPOSSIBLE.get(str(key))
        if remedy is not None:
            raise ValueError(f"{name}: {key!r} is not of offloading: {remedy}")
        words = [*among, *_INFORMS, *_IMPOSSIBLE]
        raise ValueError(
            f"{name}: unknown key {key!r}{nearest(key, words)}; known are {', '.join(among)}"
        )
    return section


def _asks_for_nothing(key: str, section: Mapping[str, Any]) -> bool:
    value = section[key]
    if key == "train_batch_size":  # without accumulation it says what the loop does anyway
        micro = section.get("train_micro_batch_size_per_gpu", value)
        return bool(section.get("gradient_accumulation_steps", 1) == 1 and micro == value)
    return value == "auto" or (key in _ASKS_FOR_NOTHING and value == _ASKS_FOR_NOTHING[key])


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
            f"{name}: cpu_checkpointing is not done here: run forward within "
            "torch.autograd.graph.save_on_cpu(), or nvmeio.offload.SwappedActivations for the drive"
        )

"""DeepSpeed's words, as its documentation has them: those understood, and why others are not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nvmeio._checks import switch

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
    "thread_count",
    "use_gds",
)
ACTIVATIONS = (
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
_IMPOSSIBLE = {
    "gradient_clipping": "call optimizer.clip_grad_norm_(max_norm) before each step",
    "optimizer": "pass the class, and its arguments by name",
    "scheduler": "make one from torch.optim.lr_scheduler over the optimizer",
    "train_batch_size": "batches are the training loop's own",
    "train_micro_batch_size_per_gpu": "batches are the training loop's own",
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
    "cpu_offload": _OLDER,
    "cpu_offload_param": _OLDER,
    "cpu_offload_use_pin_memory": _OLDER,
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
_ASKS_FOR_NOTHING = {"super_offload": False, "elastic_checkpoint": False, "zenflow": None}
# Of activation checkpointing: what cannot be, where it is asked for.
_NOT_OF_ACTIVATIONS = {
    "partition_activations": "there is no model parallelism to share them out by",
    "contiguous_memory_optimization": "their memory comes from torch's allocator. On the drive "
    "nvmeio.offload.SwappedActivations has them contiguous",
    "synchronize_checkpoint_boundary": "call the device's own synchronize() in the region",
    "profile": "torch.profiler shows each region",
}


def known(name: str, section: Any, among: tuple[str, ...]) -> Mapping[str, Any]:
    if not isinstance(section, Mapping):
        raise ValueError(f"{name} must be a mapping, not {section!r:.80}")
    for key in section:
        if key in among:
            continue
        if key in _ASKS_FOR_NOTHING and section[key] == _ASKS_FOR_NOTHING[key]:
            continue
        remedy = _IMPOSSIBLE.get(str(key))
        if remedy is not None:
            raise ValueError(f"{name}: {key!r} is not of offloading: {remedy}")
        raise ValueError(f"{name}: unknown key {key!r}; known are {', '.join(among)}")
    return section


def flag(section: Mapping[str, Any], key: str, default: bool) -> bool:
    value = section.get(key, default)
    if not isinstance(value, (bool, str)):
        raise ValueError(f"{key} must be true or false, not {value!r}")
    try:
        return switch(key, value)  # tuners print them as strings
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
        if flag(known(name, section, ACTIVATIONS), key, False):
            raise ValueError(f"{name}: {key} is impossible: {why}")
    if section.get("number_checkpoints") is not None:
        number(name, section, "number_checkpoints", 1)
    if flag(section, "cpu_checkpointing", False) and on_device:
        raise ValueError(
            f"{name}: cpu_checkpointing is not done here: run forward within "
            "torch.autograd.graph.save_on_cpu(), or nvmeio.offload.SwappedActivations for the drive"
        )

"""DeepSpeed's keys: the supported ones, and replacements for the others."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from nvmeio._checks import switch
from nvmeio.engines.base import Options
from nvmeio.errors import nearest
from nvmeio.offload._deepspeed.refusals import Refusals

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
    "optimizer",
    "scheduler",
    "gradient_clipping",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "compile",
    "resume",
    "overwrite",
)
ZERO = ("stage", "offload_optimizer", "offload_param", "sub_group_size")
_BOTH = ("device", "nvme_path", "pin_memory", "buffer_count", "buffer_size")
OPTIMIZER = (*_BOTH, "pipeline_read", "pipeline_write", "pipeline", "ratio", "fast_init")
PARAM = (*_BOTH, "max_in_cpu")
AIO = (*Options._fields, "num_threads", "thread_count", "use_gds")
# DeepSpeed's settings and their counterparts here, for messages about them.
_RANKS = "leave it out: FSDP2 (fully_shard) and DistributedDataParallel have settings of their own"
_WINDOW = 'set the window instead: "offload_param": {…, "max_in_cpu": elements to keep in memory}'
_OLDER = (
    'an older name: write offload_optimizer or offload_param with its device, "offload_optimizer": '
    '{"device": "cpu"}'
)
_INSIDE = "leave it out: it is about DeepSpeed's internals"
_REPORT = "leave it out: torch.profiler and nvmeio.integrations.metrics report what runs here"
_ASKS = object()  # whatever its value
# For each word: what to do instead, and the value, DeepSpeed's default, that asks for nothing.
_NOT_OF_OFFLOADING: dict[str, tuple[str, object]] = {
    "checkpoint": (
        "save with nvmeio.Checkpointer, which has settings of its own: "
        "nvmeio.Checkpointer(directory).save_sync(state, step)",
        _ASKS,
    ),
    "torch_autocast": (
        'run forward within torch.autocast("cpu", torch.bfloat16), or "cuda"',
        {"enabled": False},
    ),
    "wall_clock_breakdown": (
        "optimizer.last_step has the times of a step, torch.profiler the rest",
        False,
    ),
    "prescale_gradients": (_RANKS, False),
    "gradient_predivide_factor": (_RANKS, 1.0),
    "communication_data_type": (_RANKS, None),
    "disable_allgather": (_RANKS, False),
    "memory_breakdown": (_REPORT, False),
    "flops_profiler": (_REPORT, {"enabled": False}),
    "comms_logger": (_REPORT, {"enabled": False}),
    "tensorboard": (_REPORT, {"enabled": False}),
    "wandb": (_REPORT, {"enabled": False}),
    "csv_monitor": (_REPORT, {"enabled": False}),
    "data_types": ("convert the module: module.to(dtype) before offload()", {}),
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
    "leaf_module": ("leave it out: a module that calls no children is read as a whole", _ASKS),
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
# Settings that only inform, or always hold here: state_dict() has all weights.
_INFORMS = (
    "steps_per_print",
    "dump_state",
    "log_level",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
    "stage3_gather_16bit_weights_on_model_save",
    "stage3_gather_fp16_weights_on_model_save",
)
# Requests that no section can have.
_NOT_OF_ACTIVATIONS = {
    "partition_activations": "there is no model parallelism to divide them by",
    "contiguous_memory_optimization": "their memory comes from torch's allocator. On the drive "
    "nvmeio.offload.SwappedActivations has them contiguous",
    "synchronize_checkpoint_boundary": "call the device's own synchronize() in the region",
    "profile": "torch.profiler shows each region",
}
_ACTIVATIONS = (*_NOT_OF_ACTIVATIONS, "cpu_checkpointing", "number_checkpoints")
_IN_BF16 = (
    "masters are in fp32. Leave bf16 out, and call module.to(torch.bfloat16): weights and state "
    "are in bf16 then"
)
_NOT_OF_BF16 = {
    "check_grad_overflow": "no step is skipped. Write false, and look at the loss "
    "(torch.isfinite(loss)) before each step",
    "bf16_master_weights_and_grads": _IN_BF16,
    "bf16_optimizer_states": _IN_BF16,
}
_BF16 = ("enabled", "immediate_grad_update", *_NOT_OF_BF16)
_FP16 = (
    "enabled",
    "auto_cast",
    "loss_scale",
    "initial_scale_power",
    "loss_scale_window",
    "hysteresis",
    "consecutive_hysteresis",
    "min_loss_scale",
    "fp16_master_weights_and_grads",
)
_NOT_OF_COMPILE = {
    "deepcompile": "its passes are those of DeepSpeed's engine. Write false: a swapped module runs "
    "as it is",
    "autoep_non_moe": "there are no AutoEP layers here. Write false",
}
# The rest says how DeepCompile works, which is off.
_COMPILE = (
    *_NOT_OF_COMPILE,
    "free_activation",
    "free_activation_threshold",
    "offload_activation",
    "offload_activation_pin_memory",
    "offload_opt_states",
    "double_buffer",
    "symmetric_memory",
    "debug_log",
    "offload_parameters",
    "sync_before_reduce",
    "sync_after_reduce",
    "sync_before_allgather",
    "sync_after_allgather",
    "keep_int_input_tensors",
    "keep_all_input_tensors",
    "passes",
)


def or_empty(section: Mapping[str, Any], key: str) -> Any:
    """A section's value; {} where it is left out or null."""
    found = section.get(key)
    return {} if found is None else found


def known(name: str, section: Any, among: tuple[str, ...], refusals: Refusals) -> Mapping[str, Any]:
    """A section without the keys of "auto"; keys that request unsupported features are refused."""
    if not isinstance(section, Mapping):
        refusals.add(f"{name} must be a mapping, not {section!r:.80}")
        return {}
    for key in section:
        if key in among or key in _INFORMS or _asks_for_nothing(key, section):
            continue
        if key in _NOT_OF_OFFLOADING:
            instead, _ = _NOT_OF_OFFLOADING[key]
            refusals.add(f"{name}: {key!r} does not belong to offloading: {instead}")
            continue
        words = [*among, *_INFORMS, *_NOT_OF_OFFLOADING]
        refusals.add(
            f"{name}: unknown key {key!r}{nearest(key, words)}; known are {', '.join(among)}"
        )
    # A device or a stage that is left out is another one: these have to be said.
    said = ("device", "stage", "gradient_clipping")
    return {k: v for k, v in section.items() if v != "auto" or k in said}


def _asks_for_nothing(key: str, section: Mapping[str, Any]) -> bool:
    value = section[key]
    # DeepSpeed's own reading of its default, null.
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


def check_activations(section: Any, on_device: bool, refusals: Refusals) -> None:
    """Refuse unsupported settings of activation checkpointing, which the model does by itself.

    Args:
        section: The section of the config.
        on_device: Whether the module computes elsewhere than on the CPU.
        refusals: Refused settings are added to it.
    """
    name = "activation_checkpointing"
    section = known(name, section, _ACTIVATIONS, refusals)
    _check_off(name, section, _NOT_OF_ACTIVATIONS, refusals)
    with refusals.collect():
        if section.get("number_checkpoints") is not None:
            number(name, section, "number_checkpoints", 1)
    with refusals.collect():
        if flag(section, "cpu_checkpointing", False) and on_device:
            refusals.add(
                f"{name}: cpu_checkpointing is not supported here: run forward within "
                "torch.autograd.graph.save_on_cpu(), or nvmeio.offload.SwappedActivations for the "
                "drive"
            )


def check_compile(section: Any, refusals: Refusals) -> None:
    """Refuse unsupported settings of "compile"."""
    section = known("compile", section, _COMPILE, refusals)
    _check_off("compile", section, _NOT_OF_COMPILE, refusals)


def wants_masters(config: Mapping[str, Any], refusals: Refusals) -> bool:
    """Whether the sections for half precision ask for masters in fp32."""
    half = known("fp16", or_empty(config, "fp16"), _FP16, refusals)
    with refusals.collect():
        if flag(half, "enabled", False):
            refusals.add(
                "fp16: scale losses with torch.amp.GradScaler, which works as always, or write "
                '"bf16": {"enabled": true}'
            )
    bf16 = known("bf16", or_empty(config, "bf16"), _BF16, refusals)
    _check_off("bf16", bf16, _NOT_OF_BF16, refusals)
    with refusals.collect():
        return flag(bf16, "enabled", False)
    return False


def _check_off(
    name: str, section: Mapping[str, Any], impossible: Mapping[str, str], refusals: Refusals
) -> None:
    """Refuse each of some switches that is on."""
    for key, why in impossible.items():
        with refusals.collect():
            if flag(section, key, False):
                refusals.add(f"{name}: {key} is impossible: {why}")

"""`offload`: a module and its optimizer, swapped as a config in DeepSpeed's words says.

A key of DeepSpeed's that is about offloading is understood. Any other is refused by name, with what
to do instead where we know it: one that is silently left out changes a run without a word.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from nvmeio._checks import switch
from nvmeio._memory import devices
from nvmeio.errors import AlignmentError, BackendUnavailableError, nearest
from nvmeio.gds import GdsHandle
from nvmeio.handle import AioHandle
from nvmeio.offload._optimizer import arguments as arguments_module
from nvmeio.offload._step.pipeline import Times
from nvmeio.offload.module import SwappedModule, is_direct
from nvmeio.offload.optimizer import DEFAULT_SUBGROUP_BYTES, SwappedOptimizer

# DeepSpeed's words, as its documentation has them: those understood, and why others are not.
_DEVICES = ("none", "cpu", "nvme")
_TOP = (
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
_ZERO = ("stage", "offload_optimizer", "offload_param", "sub_group_size")
_OPTIMIZER = (
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
_PARAM = ("device", "nvme_path", "pin_memory", "buffer_count", "buffer_size", "max_in_cpu")
_AIO = (
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
_DEFAULT_WINDOW_BUFFERS = 5  # DeepSpeed's buffer_count for parameters
_DEFAULT_WINDOW_SIZE = 100_000_000  # and its buffer_size, in elements


class _Pair(NamedTuple):
    module: torch.nn.Module
    optimizer: torch.optim.Optimizer


class Offloaded(_Pair):
    """What `offload` made; use it as a pair, or close both with `close`.

    Attributes:
        module: A `SwappedModule`, or the module as it was.
        optimizer: A `SwappedOptimizer`, or the class itself where nothing is offloaded.
    """

    _handle: AioHandle | None = None  # that was made as "aio" says

    def close(self) -> None:
        """Close both, the optimizer first, and the handle that was made for them.

        Weights that are on the drive are gone afterwards.
        """
        with contextlib.ExitStack() as closing:
            for each in (self._handle, self.module, self.optimizer):
                if isinstance(each, (SwappedOptimizer, SwappedModule, AioHandle)):
                    closing.callback(each.close)

    @property
    def last_step(self) -> Times | None:
        """Of a swapped optimizer: where the time of the last step went."""
        optimizer = self.optimizer
        return optimizer.last_step if isinstance(optimizer, SwappedOptimizer) else None


def offload(
    module: torch.nn.Module,
    optimizer_class: Any,
    config: Mapping[str, Any],
    *,
    params: Callable[[torch.nn.Module], Any] | None = None,
    init: Callable[[torch.nn.Module], object] | None = None,
    module_device: str | torch.device | None = None,
    handle: AioHandle | None = None,
    **optimizer_args: Any,
) -> Offloaded:
    """Put a module's parameters, gradients and optimizer state where a config says.

    Args:
        module: The module, on the CPU or (with ``offload_param`` to "nvme") the meta device.
        optimizer_class: Such as `torch.optim.AdamW`.
        config: In DeepSpeed's words; under "zero_optimization" or at the top:

            ``offload_optimizer``: device ("none", "cpu" or "nvme"), nvme_path, pin_memory,
            buffer_count (at least what the pipeline needs), buffer_size (elements of a buffer),
            pipeline_read, pipeline_write (both True here), ratio (the part that is on the drive),
            fast_init (which is always so).

            ``offload_param``: device, nvme_path, pin_memory, buffer_count and buffer_size (whose
            product is the window, in elements), max_in_cpu (elements to keep in memory; the window
            is the larger of the two). With the parameters, gradients go to the drive as well. With
            offload_optimizer on the "cpu" these stay in memory; that needs bf16's masters.

            ``sub_group_size``: elements of a subgroup. ``bf16``: ``{"enabled": True}`` steps in
            fp32 on master weights. ``aio``: the parameters of `AioHandle`; num_threads and
            thread_count are intra_op_parallelism; use_gds has parameters go straight between drive
            and device (offload_param on "nvme", a CUDA device, and no compat mode). ``resume``
            (true, false or "must") and ``overwrite``: as for `SwappedOptimizer`. DeepSpeed, which
            has neither word, removes what an earlier run left; this asks.

            ``activation_checkpointing``: cpu_checkpointing (where a module on the CPU has its
            activations anyway; `SwappedActivations` has them on the drive). Which regions are
            checkpointed says the model.
        params: Parameter groups of the (swapped) module; None: all its parameters.
        init: As for `SwappedModule`.
        module_device: Where a module with ``offload_param`` on "nvme" computes: the CPU or a CUDA
            device. None: where its parameters are; the CPU for those on the meta device.
        handle: Moves the bytes; None makes one as "aio" says.
        optimizer_args: Arguments of the class.

    Returns:
        The pair of module and optimizer to train with.

    Raises:
        ValueError: A key is unknown, or asks for what cannot be; says which, and what to do.
        OSError: ``pin_memory`` is True and the process may not lock that much.
        Exception: As for `SwappedModule` and `SwappedOptimizer`.
    """
    if not isinstance(config, Mapping):
        raise TypeError(f"config must be a mapping, not {type(config).__name__}")
    zero = _or_empty(_known("config", config, _TOP), "zero_optimization")
    zero = _known("zero_optimization", zero, _ZERO)
    stage = zero.get("stage", 3)
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        raise ValueError(f"zero_optimization: stage must be 0, 1, 2 or 3, not {stage!r}")
    state = _section("offload_optimizer", config, zero, _OPTIMIZER)
    weights = _section("offload_param", config, zero, _PARAM)
    if weights["device"] != "none" and stage != 3:
        raise ValueError(f"zero_optimization: offload_param needs stage 3, not {stage!r}")
    if state["device"] != "none" and stage == 0:
        raise ValueError("zero_optimization: offload_optimizer needs stage 1, 2 or 3, not 0")
    if weights["device"] != "nvme":
        for key in ("buffer_count", "buffer_size", "max_in_cpu"):
            if key in weights:
                raise ValueError(
                    f'offload_param: {key} is for device "nvme", not {weights["device"]!r}: there '
                    "all parameters are in memory"
                )
    master_dtype = _master_dtype(config)
    _check_places(module, weights, state, master_dtype)
    _check_activations(_or_empty(config, "activation_checkpointing"), _is_on_device(module))
    run = {"resume": _resume(config), "overwrite": _flag(config, "overwrite", False)}
    for key, value in run.items():
        if value and state["device"] != "nvme":
            word = str(value).lower()
            raise ValueError(f'{key}: {word} needs offload_optimizer with device "nvme"')
    aio = _known("aio", _or_empty(config, "aio"), _AIO)
    computes_on = _computes_on(module, weights, module_device)
    gds = _flag(aio, "use_gds", False)
    if gds:
        _check_gds(weights, computes_on)
    own_handle = None
    if handle is None and "nvme" in (state["device"], weights["device"]):
        handle = own_handle = _gds_handle(aio, computes_on) if gds else _handle(aio)
    elif "aio" in config and handle is not None:
        raise ValueError("give either config['aio'] or a handle")
    made: Offloaded | None = None
    swapped = module
    try:
        if weights["device"] == "nvme":
            window_bytes = _window_bytes(module, weights)
            swapped = SwappedModule(
                module,
                swap_dir=weights["nvme_path"],
                resident_bytes=window_bytes,
                device=computes_on,
                device_bytes=window_bytes if gds else None,
                init=init,
                handle=handle,
            )
            # With use_gds no host memory is taken that could be locked.
            if _flag(weights, "pin_memory", False) and not gds and not swapped.pinned:
                raise _not_pinned("offload_param")
        chosen = swapped.parameters() if params is None else params(swapped)
        if state["device"] == "none":
            if master_dtype is not None:
                raise ValueError(
                    'bf16: master weights need offload_optimizer with device "nvme" or "cpu"'
                )
            optimizer = optimizer_class(chosen, **optimizer_args)
        else:
            optimizer = _optimizer(
                optimizer_class,
                chosen,
                state,
                zero,
                handle,
                master_dtype,
                weights["device"] == state["device"] == "nvme",
                run,
                optimizer_args,
            )
        made = Offloaded(swapped, optimizer)
        made._handle = own_handle
        return made
    finally:
        if made is None:
            if isinstance(swapped, SwappedModule):
                swapped.close()
            if own_handle is not None:
                own_handle.close()


def _check_places(
    module: torch.nn.Module,
    weights: Mapping[str, Any],
    state: Mapping[str, Any],
    master_dtype: torch.dtype | None,
) -> None:
    """Raise where parameters and state cannot be where they are wanted, together."""
    # With pin_memory, DeepSpeed's default, or without: on the "cpu" nothing is copied from there.
    if weights["device"] == "cpu" and _is_on_device(module):
        raise ValueError(
            'offload_param: device "cpu" with a module on a device is not done: parameters '
            'would come from memory part by part. Keep them there (device "none"), or on the '
            'drive (device "nvme")'
        )
    if weights["device"] != "nvme" or state["device"] == "nvme":
        return
    if state["device"] == "none":
        raise ValueError(
            'offload_param: device "nvme" needs offload_optimizer with device "nvme" or "cpu": a '
            "plain optimizer finds no parameters in memory to step"
        )
    if master_dtype is None:
        raise ValueError(
            'offload_param: device "nvme" with offload_optimizer on the "cpu" needs master weights '
            '(bf16: {"enabled": true}). Without them the parameters live in the state files, which '
            'device "nvme" has'
        )
    if any(p.dtype == master_dtype for p in module.parameters()):
        raise ValueError(
            f'bf16: {{"enabled": true}} gives parameters masters of {master_dtype}, and some are '
            "of that dtype themselves: call module.to(torch.bfloat16) first, or put "
            'offload_optimizer on device "nvme"'
        )


def _is_on_device(module: torch.nn.Module) -> bool:
    return any(p.device.type not in ("cpu", "meta") for p in module.parameters())


def _optimizer(
    optimizer_class: Any,
    chosen: Any,
    state: Mapping[str, Any],
    zero: Mapping[str, Any],
    handle: AioHandle | None,
    master_dtype: torch.dtype | None,
    with_gradients: bool,
    run: Mapping[str, Any],
    arguments: dict[str, Any],
) -> SwappedOptimizer:
    read, write = _flag(state, "pipeline_read", True), _flag(state, "pipeline_write", True)
    if "pipeline" in state:
        read = write = _flag(state, "pipeline", True)
    needed = 1 + read + write
    count = _number("offload_optimizer", state, "buffer_count", needed)
    if count < needed:
        raise ValueError(
            f"offload_optimizer: buffer_count {count} is impossible: the pipeline needs {needed} "
            "buffers; leave it out (it is computed), or switch pipeline_read or pipeline_write off"
        )
    size = _number("offload_optimizer", state, "buffer_size", 0)
    ratio = state.get("ratio", 1.0)
    in_memory = state["device"] == "cpu"
    if in_memory:
        if state.get("ratio", 0.0) not in (0, 0.0):
            raise ValueError('offload_optimizer: ratio is for device "nvme"')
        ratio = 0.0
    element_bytes = 4
    group = _number("zero_optimization", zero, "sub_group_size", 0)
    optimizer = SwappedOptimizer(
        optimizer_class,
        chosen,
        swap_dir=None if in_memory else state["nvme_path"],
        subgroup_bytes=group * element_bytes if group else DEFAULT_SUBGROUP_BYTES,
        buffer_bytes=needed * size * element_bytes if size else None,
        handle=handle,
        master_dtype=master_dtype,
        gradients="disk" if with_gradients else "memory",
        ratio=ratio,
        pipeline_read=read,
        pipeline_write=write,
        **run,
        **arguments,
    )
    if _flag(state, "pin_memory", False) and not optimizer.pinned:
        optimizer.close()
        raise _not_pinned("offload_optimizer")
    return optimizer


def _not_pinned(section: str) -> OSError:
    return OSError(
        errno.EPERM,
        f"{section}: pin_memory was asked for, and this process may not lock so much memory: raise "
        "RLIMIT_MEMLOCK (ulimit -l), or leave it out; the drive needs it not",
    )


def _or_empty(section: Mapping[str, Any], key: str) -> Any:
    """A section's value; {} where it is left out or null."""
    found = section.get(key)
    return {} if found is None else found


def _window_bytes(module: torch.nn.Module, weights: Mapping[str, Any]) -> int:
    widest = max((p.dtype.itemsize for p in module.parameters()), default=4)
    count = _number("offload_param", weights, "buffer_count", _DEFAULT_WINDOW_BUFFERS)
    size = _number("offload_param", weights, "buffer_size", _DEFAULT_WINDOW_SIZE)
    kept = weights.get("max_in_cpu", 0)
    if isinstance(kept, bool) or not isinstance(kept, (int, float)) or kept < 0:
        raise ValueError(f"offload_param: max_in_cpu must be a number >= 0, not {kept!r}")
    given = "buffer_count" in weights or "buffer_size" in weights
    elements = max(int(kept), count * size if given or not kept else 0)
    return elements * widest


def _section(
    name: str, config: Mapping[str, Any], zero: Mapping[str, Any], words: tuple[str, ...]
) -> dict[str, Any]:
    """A section with its device and path checked; device "none" where there is none."""
    if name in config and name in zero:
        raise ValueError(f"{name} is given twice: at the top and under zero_optimization")
    found = dict(_known(name, _or_empty(config if name in config else zero, name), words))
    device = found.setdefault("device", "none")
    if device not in _DEVICES:
        raise ValueError(f"{name}: device must be one of {_DEVICES}, not {device!r}")
    path = found.get("nvme_path")
    if device == "nvme" and path is None:
        raise ValueError(f'{name}: device "nvme" needs an nvme_path')
    if path is not None and not isinstance(path, (str, os.PathLike)):
        raise ValueError(f"{name}: nvme_path must be a path, not {path!r}")
    _flag(found, "pin_memory", False)
    return found


def _resume(config: Mapping[str, Any]) -> bool | str:
    try:
        return arguments_module.resume(config.get("resume", False))
    except TypeError as refused:
        raise ValueError(str(refused)) from None


def _master_dtype(config: Mapping[str, Any]) -> torch.dtype | None:
    half = _known("fp16", _or_empty(config, "fp16"), ("enabled",))
    if _flag(half, "enabled", False):
        raise ValueError("fp16: scale losses with torch.amp.GradScaler, which works as ever")
    bf16 = _known("bf16", _or_empty(config, "bf16"), ("enabled",))
    return torch.float32 if _flag(bf16, "enabled", False) else None


def _computes_on(
    module: torch.nn.Module,
    weights: Mapping[str, Any],
    given: str | torch.device | None,
) -> torch.device:
    if given is not None:
        if weights["device"] != "nvme":
            raise ValueError(
                'module_device is for offload_param with device "nvme": else the module stays '
                "where it is"
            )
        return devices.usable("module_device", given)
    found = (p.device for p in module.parameters() if p.device.type not in ("cpu", "meta"))
    return next(found, torch.device("cpu"))


def _check_gds(weights: Mapping[str, Any], computes_on: torch.device) -> None:
    if weights["device"] != "nvme":
        raise ValueError(
            'aio: use_gds is for offload_param with device "nvme": the optimizer\'s state passes '
            "through host memory, where its checksums are computed"
        )
    if computes_on.type != "cuda":
        raise ValueError(
            f"aio: use_gds is for a module on a CUDA device, and this one computes on the "
            f'{computes_on.type.upper()}: give module_device="cuda", or leave it out'
        )


def _gds_handle(aio: Mapping[str, Any], computes_on: torch.device) -> GdsHandle:
    try:
        # What goes through host memory after all, on this file system say, is an error.
        handle = GdsHandle(**_handle_words(aio), allow_compat=False)
    except BackendUnavailableError as refused:
        raise ValueError(f"aio: use_gds: {refused}") from refused
    except (TypeError, ValueError, AlignmentError) as refused:
        raise ValueError(f"aio: {refused}") from refused
    if not is_direct(handle, computes_on):
        handle.close()
        raise ValueError(
            f'aio: use_gds: cuFile is in mode "{handle.mode}" here, which goes through host memory '
            "(`nvmeio report` says why): leave it out, and parameters pass through a window there"
        )
    return handle


def _handle_words(aio: Mapping[str, Any]) -> dict[str, Any]:
    words = dict(aio)
    words.pop("use_gds", None)
    names = ("intra_op_parallelism", "num_threads", "thread_count")
    given = {name: words.pop(name) for name in names if name in words}
    if len(set(given.values())) > 1:
        raise ValueError(f"aio: {' and '.join(given)} are the same setting; give one")
    if given:
        words["intra_op_parallelism"] = next(iter(given.values()))
    return words


def _handle(aio: Mapping[str, Any]) -> AioHandle:
    words = _handle_words(aio)
    try:
        return AioHandle(**words)
    except (TypeError, ValueError, AlignmentError) as refused:
        raise ValueError(f"aio: {refused}") from refused


def _known(name: str, section: Any, among: tuple[str, ...]) -> Mapping[str, Any]:
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
        known = [*among, *_INFORMS, *_IMPOSSIBLE]
        raise ValueError(
            f"{name}: unknown key {key!r}{nearest(key, known)}; known are {', '.join(among)}"
        )
    return section


def _asks_for_nothing(key: str, section: Mapping[str, Any]) -> bool:
    value = section[key]
    if key == "train_batch_size":  # without accumulation it says what the loop does anyway
        micro = section.get("train_micro_batch_size_per_gpu", value)
        return bool(section.get("gradient_accumulation_steps", 1) == 1 and micro == value)
    return value == "auto" or (key in _ASKS_FOR_NOTHING and value == _ASKS_FOR_NOTHING[key])


def _flag(section: Mapping[str, Any], key: str, default: bool) -> bool:
    value = section.get(key, default)
    if not isinstance(value, (bool, str)):
        raise ValueError(f"{key} must be true or false, not {value!r}")
    try:
        return switch(key, value)  # tuners print them as strings
    except TypeError as refused:
        raise ValueError(str(refused)) from None


def _number(name: str, section: Mapping[str, Any], key: str, default: int) -> int:
    """A positive number; 1e9, as JSON files have it, is one too."""
    value = section.get(key, default)
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if isinstance(value, bool) or not whole or (key in section and value < 1):
        raise ValueError(f"{name}: {key} must be a positive number, not {value!r}")
    return int(value)


def _check_activations(section: Any, on_device: bool) -> None:
    """The words for activation checkpointing, which the model does by itself.

    Args:
        section: Of the config.
        on_device: Whether the module computes elsewhere than on the CPU.

    Raises:
        ValueError: It asks for what is not done.
    """
    name = "activation_checkpointing"
    for key, why in _NOT_OF_ACTIVATIONS.items():
        if _flag(_known(name, section, _ACTIVATIONS), key, False):
            raise ValueError(f"{name}: {key} is impossible: {why}")
    if section.get("number_checkpoints") is not None:
        _number(name, section, "number_checkpoints", 1)
    if _flag(section, "cpu_checkpointing", False) and on_device:
        raise ValueError(
            f"{name}: cpu_checkpointing is not done here: run forward within "
            "torch.autograd.graph.save_on_cpu(), or nvmeio.offload.SwappedActivations for the drive"
        )

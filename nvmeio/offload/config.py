"""`offload`: a module and its optimizer, swapped as a config in DeepSpeed's words says.

A key of DeepSpeed's that is about offloading is understood. Any other is refused by name, with what
to do instead where we know it: one that is silently left out changes a run without a word.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from nvmeio._checks import switch
from nvmeio.errors import AlignmentError
from nvmeio.handle import AioHandle
from nvmeio.offload._pipeline import Times
from nvmeio.offload.module import SwappedModule
from nvmeio.offload.optimizer import DEFAULT_SUBGROUP_BYTES, SwappedOptimizer

_DEVICES = ("none", "cpu", "nvme")
_TOP = ("zero_optimization", "offload_optimizer", "offload_param", "aio", "bf16", "fp16", "resume")
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
    "thread_count",
    "use_gds",
)
# What DeepSpeed has and what becomes of it here; said where somebody asks for it.
_IMPOSSIBLE = {
    "gradient_clipping": "call optimizer.clip_grad_norm_(max_norm) before each step",
    "optimizer": "pass the class, and its arguments by name",
    "scheduler": "make one from torch.optim.lr_scheduler over the optimizer",
    "train_batch_size": "batches are the training loop's own",
    "train_micro_batch_size_per_gpu": "batches are the training loop's own",
    "gradient_accumulation_steps": "call backward() as often as you like before step()",
    "super_offload": "there is one pipeline, and it overlaps by itself",
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
            is the larger of the two). With the parameters, gradients go to the drive as well.

            ``sub_group_size``: elements of a subgroup. ``bf16``: ``{"enabled": True}`` steps in
            fp32 on master weights. ``aio``: the parameters of `AioHandle`; thread_count is
            intra_op_parallelism. ``resume``: as for `SwappedOptimizer`.
        params: Parameter groups of the (swapped) module; None: all its parameters.
        init: As for `SwappedModule`.
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
    if weights["device"] == "nvme" and state["device"] != "nvme":
        raise ValueError(
            'offload_param: device "nvme" needs offload_optimizer with device "nvme" too, which '
            "writes the new weights there"
        )
    master_dtype = _master_dtype(config)
    resume = _flag(config, "resume", False)
    if resume and state["device"] != "nvme":
        raise ValueError('resume: true needs offload_optimizer with device "nvme"')
    _known("aio", _or_empty(config, "aio"), _AIO)
    own_handle = None
    if handle is None and "nvme" in (state["device"], weights["device"]):
        handle = own_handle = _handle(_or_empty(config, "aio"))
    elif "aio" in config and handle is not None:
        raise ValueError("give either config['aio'] or a handle")
    made: Offloaded | None = None
    swapped = module
    try:
        if weights["device"] == "nvme":
            swapped = SwappedModule(
                module,
                swap_dir=weights["nvme_path"],
                resident_bytes=_window_bytes(module, weights),
                init=init,
                handle=handle,
            )
            if _flag(weights, "pin_memory", False) and not swapped.pinned:
                raise _not_pinned("offload_param")
        chosen = swapped.parameters() if params is None else params(swapped)
        if state["device"] == "none":
            if master_dtype is not None:
                raise ValueError('bf16: master weights need offload_optimizer with device "nvme"')
            optimizer = optimizer_class(chosen, **optimizer_args)
        else:
            optimizer = _optimizer(
                optimizer_class,
                chosen,
                state,
                zero,
                handle,
                master_dtype,
                weights["device"] == "nvme",
                resume,
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


def _optimizer(
    optimizer_class: Any,
    chosen: Any,
    state: Mapping[str, Any],
    zero: Mapping[str, Any],
    handle: AioHandle | None,
    master_dtype: torch.dtype | None,
    with_gradients: bool,
    resume: bool,
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
    if state["device"] == "cpu":
        if state.get("ratio", 0.0) not in (0, 0.0):
            raise ValueError('offload_optimizer: ratio is for device "nvme"')
        ratio = 0.0
    element_bytes = 4
    group = _number("zero_optimization", zero, "sub_group_size", 0)
    in_memory = state["device"] == "cpu"
    path = tempfile.mkdtemp(prefix="nvmeio-offload-") if in_memory else state["nvme_path"]
    optimizer = SwappedOptimizer(
        optimizer_class,
        chosen,
        swap_dir=path,
        subgroup_bytes=group * element_bytes if group else DEFAULT_SUBGROUP_BYTES,
        buffer_bytes=needed * size * element_bytes if size else None,
        handle=handle,
        master_dtype=master_dtype,
        gradients="disk" if with_gradients else "memory",
        ratio=ratio,
        resume=resume,
        pipeline_read=read,
        pipeline_write=write,
        **arguments,
    )
    if in_memory:  # nothing but the manifest is there
        weakref.finalize(optimizer, shutil.rmtree, path, ignore_errors=True)
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
    name: str, config: Mapping[str, Any], zero: Mapping[str, Any], known: tuple[str, ...]
) -> dict[str, Any]:
    """A section with its device and path checked; device "none" where there is none."""
    if name in config and name in zero:
        raise ValueError(f"{name} is given twice: at the top and under zero_optimization")
    found = dict(_known(name, _or_empty(config if name in config else zero, name), known))
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


def _known(name: str, section: Any, known: tuple[str, ...]) -> Mapping[str, Any]:
    if not isinstance(section, Mapping):
        raise ValueError(f"{name} must be a mapping, not {section!r:.80}")
    for key in section:
        if key in known:
            continue
        remedy = _IMPOSSIBLE.get(str(key))
        if remedy is not None:
            raise ValueError(f"{name}: {key!r} is not of offloading: {remedy}")
        raise ValueError(f"{name}: unknown key {key!r}; known are {', '.join(known)}")
    return section


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


def _master_dtype(config: Mapping[str, Any]) -> torch.dtype | None:
    half = _known("fp16", _or_empty(config, "fp16"), ("enabled",))
    if _flag(half, "enabled", False):
        raise ValueError("fp16: scale losses with torch.amp.GradScaler, which works as ever")
    bf16 = _known("bf16", _or_empty(config, "bf16"), ("enabled",))
    return torch.float32 if _flag(bf16, "enabled", False) else None


def _handle(aio: Any) -> AioHandle:
    known = dict(_known("aio", aio, _AIO))
    if _flag(known, "use_gds", False):
        raise ValueError("aio: use_gds is impossible: state passes through host memory here")
    known.pop("use_gds", None)
    threads = known.pop("thread_count", None)
    if threads is not None and known.setdefault("intra_op_parallelism", threads) != threads:
        raise ValueError("aio: thread_count and intra_op_parallelism are the same; give one")
    try:
        return AioHandle(**known)
    except (TypeError, ValueError, AlignmentError) as refused:
        raise ValueError(f"aio: {refused}") from refused

"""`offload`: a module and its optimizer, swapped as a config in DeepSpeed's words says.

A key of DeepSpeed's that is about offloading is understood. Any other is refused by name, with what
to do instead where we know it: one that is silently left out changes a run without a word.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from nvmeio._memory import devices
from nvmeio._threads.closing import do_all
from nvmeio.errors import AlignmentError, BackendUnavailableError
from nvmeio.gds import GdsHandle
from nvmeio.handle import AioHandle
from nvmeio.offload._optimizer import arguments as arguments_module
from nvmeio.offload._swap_files.pipeline import Times
from nvmeio.offload.deepspeed_keys import (
    AIO,
    DEVICES,
    OPTIMIZER,
    PARAM,
    TOP,
    ZERO,
    check_activations,
    flag,
    known,
    number,
    or_empty,
)
from nvmeio.offload.module import SwappedModule, is_direct
from nvmeio.offload.optimizer import DEFAULT_SUBGROUP_BYTES, SwappedOptimizer

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
        closable = (SwappedOptimizer, SwappedModule, AioHandle)
        parts = (self.optimizer, self.module, self._handle)
        do_all(part.close for part in parts if isinstance(part, closable))

    @property
    def last_step(self) -> Times | None:
        """Where the time of the swapped optimizer's last step went."""
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
    """Make a swapped module and optimizer from a configuration in DeepSpeed's words.

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
            (true, false or "must") and ``overwrite``: as for `SwappedOptimizer`. DeepSpeed
            has neither word, and removes what an earlier run left.

            ``activation_checkpointing``: cpu_checkpointing (where a module on the CPU has its
            activations anyway; `SwappedActivations` has them on the drive). The model
            says which regions are checkpointed.
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
        raise TypeError(f"config must be a mapping (json.load of a file), not {config!r:.80}")
    zero = or_empty(known("config", config, TOP), "zero_optimization")
    zero = known("zero_optimization", zero, ZERO)
    stage = zero.get("stage", 3)
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        raise ValueError(f"zero_optimization: stage must be 0, 1, 2 or 3, not {stage!r}")
    state = _section("offload_optimizer", config, zero, OPTIMIZER)
    weights = _section("offload_param", config, zero, PARAM)
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
    check_activations(or_empty(config, "activation_checkpointing"), _is_on_device(module))
    run: dict[str, Any] = {"resume": _resume(config), "overwrite": flag(config, "overwrite", False)}
    for key, value in run.items():
        if value and state["device"] != "nvme":
            word = str(value).lower()
            raise ValueError(f'{key}: {word} needs offload_optimizer with device "nvme"')
    aio = known("aio", or_empty(config, "aio"), AIO)
    computes_on = _computes_on(module, weights, module_device)
    gds = flag(aio, "use_gds", False)
    if gds:
        _check_gds(weights, computes_on)
    own_handle = None
    if handle is None and "nvme" in (state["device"], weights["device"]):
        handle = own_handle = _handle(aio, gds, computes_on)
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
            if flag(weights, "pin_memory", False) and not gds and not swapped.pinned:
                raise _not_pinned("offload_param")
        chosen = swapped.parameters() if params is None else params(swapped)
        if state["device"] == "none":
            if master_dtype is not None:
                raise ValueError(
                    'bf16: master weights need offload_optimizer with device "nvme" or "cpu"'
                )
            optimizer = optimizer_class(chosen, **optimizer_args)
        else:
            on_disk = weights["device"] == state["device"] == "nvme"
            optimizer = SwappedOptimizer(
                optimizer_class,
                chosen,
                handle=handle,
                master_dtype=master_dtype,
                gradients="disk" if on_disk else "memory",
                **_state_options(state, zero),
                **run,
                **optimizer_args,
            )
            if flag(state, "pin_memory", False) and not optimizer.pinned:
                optimizer.close()
                raise _not_pinned("offload_optimizer")
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
            'offload_param: device "cpu" with a module on a device is not supported: parameters '
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


def _state_options(state: Mapping[str, Any], zero: Mapping[str, Any]) -> dict[str, Any]:
    """What two sections say of the optimizer's state, in `SwappedOptimizer`'s words."""
    read, write = flag(state, "pipeline_read", True), flag(state, "pipeline_write", True)
    if "pipeline" in state:
        read = write = flag(state, "pipeline", True)
    needed = 1 + read + write
    count = number("offload_optimizer", state, "buffer_count", needed)
    if count < needed:
        raise ValueError(
            f"offload_optimizer: buffer_count {count} is impossible: the pipeline needs {needed} "
            "buffers; leave it out (it is computed), or switch pipeline_read or pipeline_write off"
        )
    size = number("offload_optimizer", state, "buffer_size", 0)
    in_memory = state["device"] == "cpu"
    if in_memory and state.get("ratio", 0.0) not in (0, 0.0):
        raise ValueError('offload_optimizer: ratio is for device "nvme"')
    element_bytes = 4
    group = number("zero_optimization", zero, "sub_group_size", 0)
    return {
        "swap_dir": None if in_memory else state["nvme_path"],
        "subgroup_bytes": group * element_bytes if group else DEFAULT_SUBGROUP_BYTES,
        "buffer_bytes": needed * size * element_bytes if size else None,
        "ratio": 0.0 if in_memory else state.get("ratio", 1.0),
        "pipeline_read": read,
        "pipeline_write": write,
    }


def _not_pinned(section: str) -> OSError:
    return OSError(
        errno.EPERM,
        f"{section}: pin_memory was asked for, and this process may not lock so much memory: raise "
        "RLIMIT_MEMLOCK (ulimit -l), or leave it out; the drive needs it not",
    )


def _window_bytes(module: torch.nn.Module, weights: Mapping[str, Any]) -> int:
    widest = max((p.dtype.itemsize for p in module.parameters()), default=4)
    count = number("offload_param", weights, "buffer_count", _DEFAULT_WINDOW_BUFFERS)
    size = number("offload_param", weights, "buffer_size", _DEFAULT_WINDOW_SIZE)
    kept = weights.get("max_in_cpu", 0)
    if isinstance(kept, bool) or not isinstance(kept, (int, float)) or kept < 0:
        raise ValueError(f"offload_param: max_in_cpu must be a number >= 0, not {kept!r}")
    given = "buffer_count" in weights or "buffer_size" in weights
    return max(int(kept), count * size if given or not kept else 0) * widest


def _section(
    name: str, config: Mapping[str, Any], zero: Mapping[str, Any], words: tuple[str, ...]
) -> dict[str, Any]:
    """A section with its device and path checked; device "none" where there is none."""
    if name in config and name in zero:
        raise ValueError(f"{name} is given twice: at the top and under zero_optimization")
    found = dict(known(name, or_empty(config if name in config else zero, name), words))
    device = found.setdefault("device", "none")
    if device not in DEVICES:
        raise ValueError(f"{name}: device must be one of {DEVICES}, not {device!r}")
    path = found.get("nvme_path")
    if device == "nvme" and path is None:
        raise ValueError(f'{name}: device "nvme" needs an nvme_path')
    if path is not None and not isinstance(path, (str, os.PathLike)):
        raise ValueError(f"{name}: nvme_path must be a path, not {path!r}")
    flag(found, "pin_memory", False)
    return found


def _resume(config: Mapping[str, Any]) -> bool | str:
    try:
        return arguments_module.resume(config.get("resume", False))
    except TypeError as refused:
        raise ValueError(str(refused)) from None


def _master_dtype(config: Mapping[str, Any]) -> torch.dtype | None:
    half = known("fp16", or_empty(config, "fp16"), ("enabled",))
    if flag(half, "enabled", False):
        raise ValueError("fp16: scale losses with torch.amp.GradScaler, which works as always")
    bf16 = known("bf16", or_empty(config, "bf16"), ("enabled",))
    return torch.float32 if flag(bf16, "enabled", False) else None


def _computes_on(
    module: torch.nn.Module, weights: Mapping[str, Any], given: str | torch.device | None
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


def _handle(aio: Mapping[str, Any], gds: bool, computes_on: torch.device) -> AioHandle:
    words = _handle_words(aio)
    try:
        # What goes through host memory after all, on this file system say, is an error.
        handle = GdsHandle(**words, allow_compat=False) if gds else AioHandle(**words)
    except BackendUnavailableError as refused:
        if not gds:
            raise
        raise ValueError(f"aio: use_gds: {refused}") from refused
    except (TypeError, ValueError, AlignmentError) as refused:
        raise ValueError(f"aio: {refused}") from refused
    if isinstance(handle, GdsHandle) and not is_direct(handle, computes_on):
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

"""`offload`: a module and its optimizer, swapped as a config in DeepSpeed's words says.

A key of DeepSpeed's that is about training is understood. Any other is refused by name, with what
to write instead, all of them in one error: one that is silently left out changes a run without a
word.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch.optim.lr_scheduler import LRScheduler

from nvmeio._memory import devices
from nvmeio._threads.closing import do_all
from nvmeio.errors import AlignmentError, BackendUnavailableError
from nvmeio.gds import GdsHandle
from nvmeio.handle import AioHandle
from nvmeio.offload._deepspeed.batches import BatchSizes, batch_sizes
from nvmeio.offload._deepspeed.keys import (
    AIO,
    DEVICES,
    OPTIMIZER,
    PARAM,
    TOP,
    ZERO,
    check_activations,
    check_compile,
    flag,
    known,
    number,
    or_empty,
    wants_masters,
)
from nvmeio.offload._deepspeed.optimizers import NamedOptimizer, named_optimizer
from nvmeio.offload._deepspeed.refusals import Refusals
from nvmeio.offload._deepspeed.schedules import named_scheduler
from nvmeio.offload._deepspeed.stepping import Clipping
from nvmeio.offload._optimizer import arguments as arguments_module
from nvmeio.offload._swap_files.pipeline import Times
from nvmeio.offload.module import SwappedModule, is_direct
from nvmeio.offload.optimizer import DEFAULT_SUBGROUP_BYTES, SwappedOptimizer

_DEFAULT_WINDOW_BUFFERS = 5  # DeepSpeed's buffer_count for parameters
_DEFAULT_WINDOW_SIZE = 100_000_000  # and its buffer_size, in elements


class _Pair(NamedTuple):
    module: torch.nn.Module
    optimizer: torch.optim.Optimizer


class Offloaded(_Pair):
    """The result of `offload`; use it as a pair, or close both with `close`.

    Attributes:
        module: A `SwappedModule`, or the module as it was.
        optimizer: A `SwappedOptimizer`, or the class itself where nothing is offloaded.
        scheduler: The scheduler that "scheduler" names, over the optimizer: call its `step` after
            each step of the optimizer. None without that section.
        batch_sizes: The configuration's batch sizes; nothing here depends on them.
    """

    scheduler: LRScheduler | None = None
    batch_sizes: BatchSizes = BatchSizes(None, None, 1)
    _handle: AioHandle | None = None  # that was made as "aio" says
    _clipping: Clipping | None = None

    def close(self) -> None:
        """Close both, the optimizer first, and the handle that was made for them.

        Weights that are on the drive are gone afterwards.
        """
        closable = (SwappedOptimizer, SwappedModule, AioHandle)
        parts = (self.optimizer, self.module, self._handle)
        do_all(part.close for part in parts if isinstance(part, closable))

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """The norm of all gradients of the last step, before "gradient_clipping" clipped them."""
        return None if self._clipping is None else self._clipping.norm

    @property
    def last_step(self) -> Times | None:
        """The times of the swapped optimizer's last step."""
        optimizer = self.optimizer
        return optimizer.last_step if isinstance(optimizer, SwappedOptimizer) else None


def offload(
    module: torch.nn.Module,
    optimizer_class: Any = None,
    config: Mapping[str, Any] | None = None,
    *,
    params: Callable[[torch.nn.Module], Any] | None = None,
    init: Callable[[torch.nn.Module], object] | None = None,
    module_device: str | torch.device | None = None,
    handle: AioHandle | None = None,
    **optimizer_args: Any,
) -> Offloaded:
    """Make a swapped module, optimizer and scheduler from a configuration in DeepSpeed's words.

    Args:
        module: The module, on the CPU or (with ``offload_param`` to "nvme") the meta device.
        optimizer_class: Such as `torch.optim.AdamW`; None for the one that "optimizer" names.
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

            ``optimizer``: the class, by DeepSpeed's name or torch's, with DeepSpeed's defaults.
            ``gradient_clipping``: each step clips all gradients to this 2-norm, as
            `torch.nn.utils.clip_grad_norm_` does; nothing is clipped without it. ``scheduler``:
            DeepSpeed's five and those of `torch.optim.lr_scheduler`. With ``resume`` its state is
            stored with each step, and comes back. Batch sizes have to agree with each other and
            with the number of ranks; the training loop makes the batches.

            ``activation_checkpointing``: cpu_checkpointing (where a module on the CPU has its
            activations anyway; `SwappedActivations` has them on the drive). The model
            says which regions are checkpointed.
        params: Parameter groups of the (swapped) module; None: all its parameters.
        init: As for `SwappedModule`.
        module_device: The device on which a module with ``offload_param`` on "nvme" computes: the
            CPU or a CUDA device. None: the device of its parameters; the CPU for those on the meta
            device.
        handle: Moves the bytes; None makes one as "aio" says.
        optimizer_args: Arguments of the class, beside those in the configuration.

    Returns:
        The pair of module and optimizer to train with; its `scheduler` is the scheduler.

    Raises:
        TypeError: There is no configuration, or no optimizer.
        ValueError: Keys are unknown, or ask for what cannot be: says which, all of them, and what
            to write instead.
        OSError: ``pin_memory`` is True and the process may not lock that much.
        Exception: As for `SwappedModule` and `SwappedOptimizer`.
    """
    if not isinstance(config, Mapping):
        given = optimizer_class if config is None and optimizer_class is not None else config
        raise TypeError(
            "config must be a mapping (json.load of a file), such as offload(module, "
            f"config=config), not {given!r:.80}"
        )
    refusals = Refusals()
    wanted = _read(module, optimizer_class, config, optimizer_args, module_device, refusals)
    own_handle = None
    with refusals.collect():
        if wanted.gds:
            _check_gds(wanted.weights, wanted.computes_on)
        if "aio" in config and handle is not None:
            refusals.add("give either config['aio'] or a handle")
        elif handle is None and "nvme" in (wanted.state["device"], wanted.weights["device"]):
            handle = own_handle = _handle(wanted.aio, wanted.gds, wanted.computes_on)
    made: Offloaded | None = None
    try:
        refusals.check()
        made = _make(module, wanted, params, init, handle)
        made._handle = own_handle
        return made
    finally:
        if made is None and own_handle is not None:
            own_handle.close()


class _Wanted(NamedTuple):
    """The requests of a configuration, read and checked."""

    state: dict[str, Any]
    weights: dict[str, Any]
    window_bytes: int
    computes_on: torch.device
    aio: Mapping[str, Any]
    gds: bool
    named: NamedOptimizer | None
    optimizer_options: dict[str, Any]
    make_scheduler: Callable[[torch.optim.Optimizer], LRScheduler] | None
    clipping: Clipping | None
    sizes: BatchSizes


def _read(
    module: torch.nn.Module,
    optimizer_class: Any,
    config: Mapping[str, Any],
    optimizer_args: dict[str, Any],
    module_device: str | torch.device | None,
    refusals: Refusals,
) -> _Wanted:
    """Read a configuration; nothing is made yet. Refused settings are added to `refusals`."""
    config = known("config", config, TOP, refusals)
    zero = known("zero_optimization", or_empty(config, "zero_optimization"), ZERO, refusals)
    before = len(refusals)
    stage = zero.get("stage", 3)
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        refusals.add(f"zero_optimization: stage must be 0, 1, 2 or 3, not {stage!r}")
    state = _section("offload_optimizer", config, zero, OPTIMIZER, refusals)
    weights = _section("offload_param", config, zero, PARAM, refusals)
    master_dtype = torch.float32 if wants_masters(config, refusals) else None
    activations = or_empty(config, "activation_checkpointing")
    check_activations(activations, _is_on_device(module), refusals)
    check_compile(or_empty(config, "compile"), refusals)
    options: dict[str, Any] = {"master_dtype": master_dtype}
    options["gradients"] = "disk" if weights["device"] == state["device"] == "nvme" else "memory"
    with refusals.collect():
        options["resume"] = _resume(config)
    with refusals.collect():
        options["overwrite"] = flag(config, "overwrite", False)
    if len(refusals) == before:  # else this would be said of sections that are not what they seem
        _check_stage(stage, weights, state, refusals)
        _check_places(module, weights, state, master_dtype, refusals)
        for key in ("resume", "overwrite"):
            if options[key] and state["device"] != "nvme":
                word = str(options[key]).lower()
                refusals.add(f'{key}: {word} needs offload_optimizer with device "nvme"')
    with refusals.collect():
        options |= _state_options(state, zero)
    window_bytes = 0
    with refusals.collect():
        window_bytes = _window_bytes(module, weights)
    computes_on, gds = torch.device("cpu"), False
    with refusals.collect():
        computes_on = _computes_on(module, weights, module_device)
    aio = known("aio", or_empty(config, "aio"), AIO, refusals)
    with refusals.collect():
        gds = flag(aio, "use_gds", False)
    named = _optimizer_of(config, optimizer_class, optimizer_args, refusals)
    make_scheduler = named_scheduler(
        or_empty(config, "scheduler"), None if named is None else named.optimizer_class, refusals
    )
    return _Wanted(
        state,
        weights,
        window_bytes,
        computes_on,
        aio,
        gds,
        named,
        options,
        make_scheduler,
        _clipping_of(config, refusals),
        batch_sizes(config, refusals),
    )


def _make(
    module: torch.nn.Module,
    wanted: _Wanted,
    params: Callable[[torch.nn.Module], Any] | None,
    init: Callable[[torch.nn.Module], object] | None,
    handle: AioHandle | None,
) -> Offloaded:
    """Make the configured objects; after an error all are closed again."""
    if wanted.named is None:
        raise TypeError(
            "there is no optimizer: pass its class (torch.optim.AdamW), or write "
            '"optimizer": {"type": "AdamW", "params": {"lr": …}} into the configuration'
        )
    swapped = module
    with contextlib.ExitStack() as undo:
        if wanted.weights["device"] == "nvme":
            swapped = SwappedModule(
                module,
                swap_dir=wanted.weights["nvme_path"],
                resident_bytes=wanted.window_bytes,
                device=wanted.computes_on,
                device_bytes=wanted.window_bytes if wanted.gds else None,
                init=init,
                handle=handle,
            )
            undo.callback(swapped.close)
            # With use_gds no host memory is taken that could be locked.
            pinned = swapped.pinned or wanted.gds
            if flag(wanted.weights, "pin_memory", False) and not pinned:
                raise _not_pinned("offload_param")
        chosen = swapped.parameters() if params is None else params(swapped)
        if wanted.state["device"] == "none":
            optimizer = wanted.named.optimizer_class(chosen, **wanted.named.arguments)
            made = Offloaded(swapped, optimizer)
        else:
            optimizer = SwappedOptimizer(
                wanted.named.optimizer_class,
                chosen,
                handle=handle,
                **wanted.optimizer_options,
                **wanted.named.arguments,
            )
            undo.callback(optimizer.close)
            if flag(wanted.state, "pin_memory", False) and not optimizer.pinned:
                raise _not_pinned("offload_optimizer")
            made = Offloaded(swapped, optimizer)
        made.batch_sizes = wanted.sizes
        if wanted.make_scheduler is not None:
            made.scheduler = wanted.make_scheduler(optimizer)
            if isinstance(optimizer, SwappedOptimizer):
                optimizer.keep_scheduler(made.scheduler)
        if wanted.clipping is not None:
            wanted.clipping.attach(optimizer)
            made._clipping = wanted.clipping
        undo.pop_all()
    return made


def _optimizer_of(
    config: Mapping[str, Any],
    optimizer_class: Any,
    optimizer_args: dict[str, Any],
    refusals: Refusals,
) -> NamedOptimizer | None:
    """The optimizer that the caller passed, or the configuration names."""
    section = config.get("optimizer")
    if section is None:
        return None if optimizer_class is None else NamedOptimizer(optimizer_class, optimizer_args)
    if optimizer_class is None:
        return named_optimizer(section, optimizer_args, refusals)
    name = getattr(optimizer_class, "__name__", optimizer_class)
    refusals.add(
        f"optimizer: offload() was given {name} too: leave out the class, offload(module, "
        'config=config), or "optimizer"'
    )
    return None


def _clipping_of(config: Mapping[str, Any], refusals: Refusals) -> Clipping | None:
    value = config.get("gradient_clipping")
    if value is None:
        return None
    if value == "auto":
        refusals.add(
            'config: gradient_clipping is "auto", which only transformers\' Trainer fills in: '
            'write the norm, "gradient_clipping": 1.0, or leave it out'
        )
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        refusals.add(
            f"config: gradient_clipping must be the largest norm of all gradients, a number >= 0, "
            f'not {value!r:.80}: write "gradient_clipping": 1.0'
        )
        return None
    return Clipping(float(value)) if value else None  # 0 clips nothing


def _check_stage(
    stage: int, weights: Mapping[str, Any], state: Mapping[str, Any], refusals: Refusals
) -> None:
    if weights["device"] != "none" and stage != 3:
        refusals.add(f"zero_optimization: offload_param needs stage 3, not {stage!r}")
    if state["device"] != "none" and stage == 0:
        refusals.add("zero_optimization: offload_optimizer needs stage 1, 2 or 3, not 0")


def _check_places(
    module: torch.nn.Module,
    weights: Mapping[str, Any],
    state: Mapping[str, Any],
    master_dtype: torch.dtype | None,
    refusals: Refusals,
) -> None:
    """Refuse parameters and state that cannot be where they are wanted, together."""
    if state["device"] == "none" and master_dtype is not None:
        refusals.add('bf16: master weights need offload_optimizer with device "nvme" or "cpu"')
    # With pin_memory, DeepSpeed's default, or without: on the "cpu" nothing is copied from there.
    if weights["device"] == "cpu" and _is_on_device(module):
        refusals.add(
            'offload_param: device "cpu" with a module on a device is not supported: parameters '
            'would come from memory part by part. Keep them there (device "none"), or on the '
            'drive (device "nvme")'
        )
    if weights["device"] != "nvme" or state["device"] == "nvme":
        return
    if state["device"] == "none":
        refusals.add(
            'offload_param: device "nvme" needs offload_optimizer with device "nvme" or "cpu": a '
            "plain optimizer finds no parameters in memory to step"
        )
    elif master_dtype is None:
        refusals.add(
            'offload_param: device "nvme" with offload_optimizer on the "cpu" needs master weights '
            '(bf16: {"enabled": true}). Without them the parameters live in the state files, which '
            'device "nvme" has'
        )
    elif any(p.dtype == master_dtype for p in module.parameters()):
        refusals.add(
            f'bf16: {{"enabled": true}} gives parameters masters of {master_dtype}, and some are '
            "of that dtype themselves: call module.to(torch.bfloat16) first, or put "
            'offload_optimizer on device "nvme"'
        )


def _is_on_device(module: torch.nn.Module) -> bool:
    return any(p.device.type not in ("cpu", "meta") for p in module.parameters())


def _state_options(state: Mapping[str, Any], zero: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `SwappedOptimizer` that two sections give for the optimizer's state."""
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
    if state["device"] == "none":
        return {}
    in_memory = state["device"] == "cpu"
    if in_memory and state.get("ratio", 0.0) not in (0, 0.0):
        raise ValueError('offload_optimizer: ratio is for device "nvme"')
    element_bytes = 4
    group = number("zero_optimization", zero, "sub_group_size", 0)
    return {
        "swap_dir": state.get("nvme_path") if state["device"] == "nvme" else None,
        "subgroup_bytes": group * element_bytes if group else DEFAULT_SUBGROUP_BYTES,
        "buffer_bytes": needed * size * element_bytes if size else None,
        "ratio": 0.0 if in_memory else state.get("ratio", 1.0),
        "pipeline_read": read,
        "pipeline_write": write,
    }


def _not_pinned(section: str) -> OSError:
    return OSError(
        errno.EPERM,
        f"{section}: pin_memory was asked for, but this process may not lock so much memory: raise "
        "RLIMIT_MEMLOCK (ulimit -l), or leave it out; direct I/O does not need it",
    )


def _window_bytes(module: torch.nn.Module, weights: Mapping[str, Any]) -> int:
    """The window that a section asks for; 0 where parameters are in memory."""
    if weights["device"] != "nvme":
        for key in ("buffer_count", "buffer_size", "max_in_cpu"):
            if key in weights:
                raise ValueError(
                    f'offload_param: {key} is for device "nvme", not {weights["device"]!r}: there '
                    "all parameters are in memory. Leave it out"
                )
        return 0
    widest = max((p.dtype.itemsize for p in module.parameters()), default=4)
    count = number("offload_param", weights, "buffer_count", _DEFAULT_WINDOW_BUFFERS)
    size = number("offload_param", weights, "buffer_size", _DEFAULT_WINDOW_SIZE)
    kept = weights.get("max_in_cpu", 0)
    if isinstance(kept, bool) or not isinstance(kept, (int, float)) or kept < 0:
        raise ValueError(f"offload_param: max_in_cpu must be a number >= 0, not {kept!r}")
    given = "buffer_count" in weights or "buffer_size" in weights
    return max(int(kept), count * size if given or not kept else 0) * widest


def _section(
    name: str,
    config: Mapping[str, Any],
    zero: Mapping[str, Any],
    words: tuple[str, ...],
    refusals: Refusals,
) -> dict[str, Any]:
    """A section with its device and path checked; device "none" where there is none."""
    if name in config and name in zero:
        refusals.add(f"{name} is given twice: at the top and under zero_optimization")
    section = or_empty(config if name in config else zero, name)
    found = dict(known(name, section, words, refusals))
    device = found.setdefault("device", "none")
    if device not in DEVICES:
        refusals.add(f"{name}: device must be one of {DEVICES}, not {device!r}")
        found["device"] = "none"
    path = found.get("nvme_path")
    if device == "nvme" and path is None:
        refusals.add(
            f'{name}: device "nvme" needs an nvme_path: write "nvme_path": "/path/on/the/drive"'
        )
    if path is not None and not isinstance(path, (str, os.PathLike)):
        refusals.add(f"{name}: nvme_path must be a path, not {path!r}")
    with refusals.collect():
        flag(found, "pin_memory", False)
    return found


def _resume(config: Mapping[str, Any]) -> bool | str:
    try:
        return arguments_module.resume(config.get("resume", False))
    except TypeError as refused:
        raise ValueError(str(refused)) from None


def _computes_on(
    module: torch.nn.Module, weights: Mapping[str, Any], given: str | torch.device | None
) -> torch.device:
    if given is not None:
        if weights["device"] != "nvme":
            raise ValueError(
                'module_device is for offload_param with device "nvme": otherwise the module '
                "stays on its device"
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
        # A transfer that would go through host memory after all, on this file system say, is an
        # error.
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

"""Modules that FSDP2 shards: their shards are on the drive, and there while FSDP gathers them.

FSDP keeps what it does in memory: which ranks have what, when a group of parameters is gathered and
given up again, how gradients are reduced. A group is one part of the module here. All that FSDP
reads of a shard it reads while it gathers, so a shard is in the window for that time and lies
ahead of it otherwise.

    FSDP wants a group      its shard is brought (begun when the one before it was wanted)
    it gathers              from the window
    it computes             with memory of its own; the shard's is free again

This file keeps what FSDP offers no API for: its groups (`FSDPParamGroup`), the flat memory of a
shard that it gathers (`_sharded_param_data`) and the parameter's own view (`_local_tensor`).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from nvmeio._memory import devices
from nvmeio._pages import PAGE_BYTES, round_up
from nvmeio.errors import BackendUnavailableError, ClosedError, an
from nvmeio.offload._module.param_store import ParamStore, store_of
from nvmeio.offload._module.stages import ParamUnit, Stage
from nvmeio.offload._swap_files.subgroups import SlotSpan, aligned
from nvmeio.offload._swap_files.tensors import is_absent, is_sharded, local, nothing, view

_GROUP = ("fsdp_params", "unshard", "wait_for_unshard", "is_sharded", "_all_gather_result")
_SHARD = ("sharded_param", "padded_sharded_param_size", "_sharded_param_data")


class Sharded:
    """A module with parameters that FSDP2 shards; refuses what cannot be swapped.

    `stages` are FSDP's groups, by the module that each is of; each has one of `units`.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._modules = [each for _, each in _fsdp_modules(module)]
        self.reshard()
        self.stages: list[Stage] = []
        self.units: list[ParamUnit] = []
        self._groups: list[Any] = []
        for name, each in _fsdp_modules(module):
            for group in _groups_of(each):
                if any(group is known for known in self._groups):  # of several modules
                    continue
                _check_group(name or type(module).__name__, group)
                stage = Stage(name, each, [one.sharded_param for one in group.fsdp_params])
                self.stages.append(stage)
                self.units.append(_unit(stage, group))
                self._groups.append(group)
        offset = 0
        for unit in self.units:
            unit.file_offset = offset
            offset += unit.nbytes
        _check_parameters(module, self.units)

    def reshard(self) -> None:
        """Have FSDP give up what it gathered: shards are about to change, or to be looked at."""
        for each in self._modules:
            each.reshard()

    def attach(self, store: ParamStore) -> None:
        """Let each shard come before FSDP gathers it. Gives up FSDP's own memory for it."""
        broken: list[str] = []
        for unit, group in zip(self.units, self._groups, strict=True):
            Gathering(store, unit, group, broken)


class Gathering:
    """A group of FSDP's whose shard is brought for the time in which it gathers it."""

    def __init__(self, store: ParamStore, unit: ParamUnit, group: Any, broken: list[str]) -> None:
        self._store, self._unit, self._group, self._broken = store, unit, group, broken
        self._shards: list[Any] = list(group.fsdp_params)
        self._sizes = [_padded_numel(each) for each in self._shards]
        self._nothing = [
            torch.full((), nothing(span.dtype), dtype=span.dtype).expand(numel)
            for span, numel in zip(unit.spans, self._sizes, strict=True)
        ]
        self._alone = _ranks_of(group) == 1
        self._lay(self._nothing)
        for shard in self._shards:
            # It would make memory for the padding, which is the window's here.
            shard.reset_sharded_param = functools.partial(_check_kept, shard)
        self._unshard: Callable[..., Any] = group.unshard
        self._wait: Callable[..., Any] = group.wait_for_unshard
        group.unshard, group.wait_for_unshard = self.unshard, self.wait_for_unshard

    def unshard(self, *args: Any, **kwargs: Any) -> Any:
        if not self._group.is_sharded or self._group._all_gather_result is not None:
            return self._unshard(*args, **kwargs)
        return self._with_shard(self._unshard, *args, **kwargs)

    def wait_for_unshard(self, *args: Any, **kwargs: Any) -> Any:
        """Takes the place of the group's. One rank alone gathers nothing: it copies here."""
        if not self._alone or self._group._all_gather_result is None:
            return self._wait(*args, **kwargs)
        return self._with_shard(self._wait, *args, **kwargs)

    def _with_shard(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._store.check_open()
        if self._broken:
            raise ClosedError(
                "a parameter could not be gathered before this: FSDP is in the middle of that "
                "pass, and other ranks may be elsewhere in theirs. Another gather could mix "
                "different layers, and gradients would be wrong. Make the module again on all "
                f"ranks, and resume. The failure was {self._broken[0]}"
            )
        try:
            memory = self._store.memory_of(self._unit)
            spans = zip(self._unit.spans, self._sizes, strict=True)
            self._lay([_flat(memory, span, numel) for span, numel in spans])
            del memory
            result = call(*args, **kwargs)
            self.wait_for_copies()
            return result
        except BaseException as failed:
            self._broken.append(f"{type(failed).__name__}: {failed}")
            raise
        finally:
            self._lay(self._nothing)

    def wait_for_copies(self) -> None:
        """Wait until the gathering device has copied the shard, whose memory is reused then."""
        device, context = self._group.device, self._group.comm_ctx
        if device.type != "cpu":
            for stream in (None, getattr(context, "all_gather_copy_in_stream", None)):
                with devices.on_stream(stream):
                    devices.now(device).wait()

    def _lay(self, tensors: Sequence[torch.Tensor]) -> None:
        for shard, tensor in zip(self._shards, tensors, strict=True):
            shard._sharded_param_data = tensor


def _check_kept(shard: Any) -> None:
    """Takes the place of `reset_sharded_param`, which would give a shard memory of its own."""
    info = shard._module_info
    if getattr(info.module, info.param_name) is not shard.sharded_param:
        raise RuntimeError(
            f"the parameter {info.param_name} of a swapped {type(info.module).__name__} was "
            "replaced by another one: change its values within gather(), or by "
            "load_state_dict of the SwappedModule"
        )


def is_fsdp(module: torch.nn.Module) -> bool:
    return bool(_fsdp_modules(module))


def _fsdp_modules(module: torch.nn.Module) -> list[tuple[str, Any]]:
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # else nobody has used it
    if fsdp is None or not hasattr(fsdp, "FSDPModule"):
        return []
    return [each for each in module.named_modules() if isinstance(each[1], fsdp.FSDPModule)]


def _groups_of(module: Any) -> list[Any]:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # older ones know one
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    for group in groups:
        for what, names in ((group, _GROUP), *((each, _SHARD) for each in group.fsdp_params)):
            missing = [name for name in names if not hasattr(what, name)]
            if missing:
                raise BackendUnavailableError(
                    f"FSDP2 of torch {torch.__version__} has no {', '.join(missing)}: its modules "
                    "cannot be swapped with it. Swap their optimizer only (SwappedOptimizer)"
                )
    return list(groups)


def _check_group(name: str, group: Any) -> None:
    if group.device.type != "cpu" and not all(each.offload_to_cpu for each in group.fsdp_params):
        raise ValueError(
            f"{name} is sharded over a mesh of {group.device.type} devices, which have the shards: "
            "call fully_shard(..., offload_policy=CPUOffloadPolicy()), or swap the optimizer only"
        )
    for shard in group.fsdp_params:
        tensor = local(shard.sharded_param)
        if tensor.is_meta:
            raise ValueError(
                f"a parameter of {name} is on the meta device: have the shards in memory first "
                "(to_empty(device='cpu'), then init or load), before the module is swapped"
            )
        if type(tensor) is not torch.Tensor:
            raise ValueError(
                f"a parameter of {name} is {an(type(tensor).__name__)}: only plain tensors are "
                "swapped"
            )


def _check_parameters(module: torch.nn.Module, units: Sequence[ParamUnit]) -> None:
    known = {id(parameter) for unit in units for parameter in unit.parameters}
    for name, parameter in module.named_parameters():
        if id(parameter) not in known:
            how = "sharded, but not by fully_shard" if is_sharded(parameter) else "not sharded"
            raise ValueError(
                f"{name} is {how}, and others of the module are sharded by FSDP: call "
                "fully_shard for the whole module, without ignored_params"
            )
        if store_of(parameter) is not None or is_absent(local(parameter)):
            raise ValueError(f"{name} was swapped by another SwappedModule: make a new model")


def _unit(stage: Stage, group: Any) -> ParamUnit:
    """A group's shards one behind the other, each with room for the padding that FSDP sends."""
    unit, at = ParamUnit(list(stage.parameters), stages=[stage]), 0
    for shard in group.fsdp_params:
        tensor = local(shard.sharded_param)
        room = _padded_numel(shard) * tensor.dtype.itemsize
        at = aligned(at, room)
        unit.spans.append(SlotSpan(at, tensor.nbytes, tensor.dtype, tuple(tensor.shape)))
        at += room
    unit.nbytes = round_up(max(at, 1), PAGE_BYTES)
    return unit


def _padded_numel(shard: Any) -> int:
    return int(shard.padded_sharded_param_size.numel())


def _flat(memory: torch.Tensor, span: SlotSpan, numel: int) -> torch.Tensor:
    return view(memory, SlotSpan(span.offset, numel * span.dtype.itemsize, span.dtype, (numel,)))


def _ranks_of(group: Any) -> int:
    return int(getattr(group.mesh_info, "shard_mesh_size", 1))


def shards_of(module: torch.nn.Module) -> list[Any]:
    """FSDP2's own shard of each parameter; gathered ones are sharded again before."""
    shards: list[Any] = []
    for _, each in _fsdp_modules(module):
        each.reshard()
        shards += [shard for group in _groups_of(each) for shard in group.fsdp_params]
    return shards

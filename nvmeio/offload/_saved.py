"""What autograd keeps of a parameter that is on the drive: where to find it, in place of memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from nvmeio._residency import calls
from nvmeio.offload._param_store import ParamStore
from nvmeio.offload._stages import Stage, Unit


class _Saved(NamedTuple):
    """Of a tensor over a parameter."""

    unit: Unit
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    parameter: torch.nn.Parameter | None  # that it is a view of; None where it is empty
    version: int  # of the parameter, then


class _Foreign:
    """What the hooks around ours (of a checkpoint) keep of a tensor."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def attach(store: ParamStore, stage: Stage) -> None:
    """Let a stage's parameters come before its call and be free to go after it."""
    mine = {id(p) for p in stage.parameters}
    units = [unit for unit in store.units if mine & {id(p) for p in unit.parameters}]

    def around(call: Any, *args: Any, **kwargs: Any) -> Any:
        store.check_open()
        held = store.hold(units)
        try:
            saving = _saving(store)
            try:
                return call(*args, **kwargs)
            finally:
                del saving
        finally:
            del held

    calls.wrap(stage.module, around)


def _saving(store: ParamStore) -> calls.Undone:
    others = calls.saved_tensors_hooks_around()
    return calls.saved_tensors_hooks(
        lambda tensor: _pack(store, tensor, others), lambda saved: _unpack(store, saved, others)
    )


def _pack(store: ParamStore, tensor: torch.Tensor, others: Any) -> Any:
    if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.is_cpu:
        unit = store.unit_at(tensor.untyped_storage().data_ptr())
        if unit is not None:
            offset = int(tensor.storage_offset())
            parameter = _parameter_at(unit, offset * tensor.dtype.itemsize)
            return _Saved(
                unit,
                tensor.dtype,
                offset,
                tuple(tensor.shape),
                tuple(tensor.stride()),
                parameter,
                0 if parameter is None else parameter._version,
            )
    return tensor if others is None else _Foreign(others[0](tensor))


def _unpack(store: ParamStore, saved: Any, others: Any) -> torch.Tensor:
    if isinstance(saved, _Saved):
        if saved.parameter is not None and saved.parameter._version != saved.version:
            raise RuntimeError(
                f"a parameter of shape {tuple(saved.parameter.shape)} was changed (by a step, "
                "within gather or by load_state_dict) after the forward pass that this "
                "backward belongs to: run forward again. torch refuses the same in memory"
            )
        memory = store.memory_of(saved.unit)
        found = torch.empty(0, dtype=saved.dtype)
        with torch.no_grad():
            found.set_(memory.untyped_storage(), saved.offset, saved.size, saved.stride)
        return found
    if isinstance(saved, _Foreign):
        theirs: torch.Tensor = others[1](saved.value)
        return theirs
    kept: torch.Tensor = saved
    return kept


def _parameter_at(unit: Unit, offset: int) -> torch.nn.Parameter | None:
    """The parameter that has this byte of a unit's memory."""
    for parameter, span in zip(unit.parameters, unit.spans, strict=True):
        if span.offset <= offset < span.offset + span.nbytes:
            return parameter
    return None

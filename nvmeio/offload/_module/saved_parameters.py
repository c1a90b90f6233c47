"""What autograd keeps of a parameter that is on the drive: where to find it, in place of memory."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from nvmeio._residency import calls
from nvmeio._residency.saved import saving
from nvmeio.offload._module.param_store import ParamStore
from nvmeio.offload._module.stages import Stage, Unit


class _Saved(NamedTuple):
    """A unit's memory."""

    store: ParamStore
    unit: Unit
    parameter: torch.nn.Parameter | None  # that a tensor is a view of; None where it is empty
    version: int  # of the parameter, then

    def memory(self) -> torch.Tensor:
        """It, unless the parameter was changed."""
        if self.parameter is not None and self.parameter._version != self.version:
            raise RuntimeError(
                f"a parameter of shape {tuple(self.parameter.shape)} was changed (by a step, "
                "within gather or by load_state_dict) after the forward pass that this "
                "backward belongs to: run forward again. torch refuses the same in memory"
            )
        return self.store.memory_of(self.unit)


def attach(store: ParamStore, stage: Stage) -> None:
    """Let a stage's parameters come before its call and be free to go after it."""
    mine = {id(p) for p in stage.parameters}
    units = [unit for unit in store.units if mine & {id(p) for p in unit.parameters}]

    def origin_of(address: int, offset: int) -> _Saved | None:
        unit = store.unit_at(address)
        if unit is None:
            return None
        parameter = _parameter_at(unit, offset)
        return _Saved(store, unit, parameter, 0 if parameter is None else parameter._version)

    def again(saves: bool, call: Any, /, *args: Any, **kwargs: Any) -> Any:
        store.check_open()
        running = calls.Running(store.hold(units), again)
        try:
            kept = saving(origin_of) if saves else None
            try:
                return call(*args, **kwargs)
            finally:
                del kept
        finally:
            del running

    calls.wrap(stage.module, functools.partial(again, True))


def _parameter_at(unit: Unit, offset: int) -> torch.nn.Parameter | None:
    """The parameter that has this byte of a unit's memory."""
    for parameter, span in zip(unit.parameters, unit.spans, strict=True):
        if span.offset <= offset < span.offset + span.nbytes:
            return parameter
    return None

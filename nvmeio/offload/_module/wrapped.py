"""The module within a `SwappedModule`: its calls bring parameters, and it answers for itself.

Its parameters are NaN outside of the window. So its `state_dict` has them over the files, and what
would take them from memory, or put others there, is refused: loading outside of a `gather` block,
moving and converting, copying and pickling.

Hooks and parameters outlive the `SwappedModule`: what they refuse then is what has no values.
"""

from __future__ import annotations

import functools
import threading
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from nvmeio._residency import calls, routing
from nvmeio._torch_private import is_tracing
from nvmeio.errors import ClosedError
from nvmeio.offload._module.param_store import ParamStore, store_of
from nvmeio.offload._module.stages import ParamUnit, Stage
from nvmeio.offload._swap_files.tensors import is_absent, lay, local


def watch(module: torch.nn.Module) -> None:
    """Have the module, and those within it, answer for swapped parameters."""
    every: list[Any] = list(module.modules())
    for each in every:
        each._apply = types.MethodType(_applied, each)
        if each._parameters:
            hook = each.register_state_dict_post_hook(_values_of)
            each._state_dict_hooks.move_to_end(hook.id, last=False)  # before those that convert
            each._register_load_state_dict_pre_hook(_check_loading, with_module=True)
    for parameter in module.parameters():
        parameter.__class__ = _on_drive(type(parameter))


def _values_of(
    module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any
) -> None:
    """Put tensors over the files in the place of NaN; what a block gathered has its values."""
    for name, parameter in module._parameters.items():
        if parameter is None or prefix + name not in state_dict:
            continue
        store = store_of(parameter)
        if store is None:
            _check_values(prefix + name, parameter)
        elif not store.is_gathered(parameter):
            store.check_open()
            state_dict[prefix + name] = store.on_file(parameter)


def _check_loading(
    module: torch.nn.Module,
    state_dict: Mapping[str, Any],
    prefix: str,
    metadata: Mapping[str, Any],
    *rest: Any,
) -> None:
    for name, parameter in module._parameters.items():
        store = None if parameter is None else store_of(parameter)
        if parameter is None or store is None or prefix + name not in state_dict:
            continue
        if metadata.get("assign_to_params_buffers") or not store.is_gathered(parameter):
            raise TypeError(
                f"{prefix}{name} is on the drive, and the module within a SwappedModule does not "
                "write there: call load_state_dict of the SwappedModule, or load within a block of "
                "its gather() (without assign=True)"
            )


def _applied(self: torch.nn.Module, fn: Any, recurse: bool = True) -> torch.nn.Module:
    if any(store_of(parameter) is not None for parameter in self.parameters()):
        raise TypeError(
            "the parameters are on the drive, and the module within a SwappedModule cannot be "
            "moved or converted (to, half, cuda, …): do so before it is swapped"
        )
    unswapped: Any = type(self)._apply
    moved: torch.nn.Module = unswapped(self, fn, recurse)
    return moved


class _OnDrive:
    """The methods that a swapped parameter answers itself, before its own class does."""

    def __deepcopy__(self: Any, memo: Any) -> Any:
        return _ordinary(self).__deepcopy__(memo)

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        return _ordinary(self).__reduce_ex__(protocol)

    def _typed_storage(self: Any) -> Any:
        """Torch.multiprocessing sends a tensor by this, and does not ask `__reduce_ex__`."""
        return _ordinary(self)._typed_storage()

    @property
    def data(self: Any) -> Any:
        """A view: a change of it is counted as one of the parameter's, so it is not lost."""
        return self.detach()

    @data.setter
    def data(self: Any, value: Any) -> None:
        store, own = store_of(self), self.detach()
        if store is None:
            lay(self, value)
        elif value.data_ptr() != own.data_ptr() or value.stride() != own.stride():
            if not store.is_gathered(self) or (value.shape, value.dtype) != (own.shape, own.dtype):
                raise RuntimeError(
                    f"other data was set for a parameter of shape {tuple(own.shape)}, which lies "
                    "on the drive: within gather() set such of its shape and dtype, or change "
                    "its own in place"
                )
            own.copy_(value)

    def set_(self: Any, source: Any = None, *rest: Any) -> Any:
        """Torch's parametrisations set a parameter to itself, which is not counted as a change."""
        if rest or not isinstance(source, torch.Tensor):
            _check_copying(self)
            return torch.Tensor.set_(self, source, *rest)
        if source is not self:
            self.data = source
        return self


@functools.cache
def _on_drive(kind: type) -> Any:
    return type(kind.__name__, (_OnDrive, kind), {"__module__": kind.__module__})


def _ordinary(parameter: torch.nn.Parameter) -> Any:
    """The same parameter, given its own class back; raises if it is on the drive."""
    _check_copying(parameter)
    parameter.__class__ = type(parameter).__bases__[1]
    return parameter


def _check_copying(parameter: torch.nn.Parameter) -> None:
    if store_of(parameter) is not None:
        raise TypeError(
            "a parameter on the drive, and the module that has it, cannot be copied or pickled: "
            "take state_dict() of the SwappedModule, or clone the values within its gather()"
        )
    _check_values("a parameter", parameter)


def _check_values(name: str, parameter: torch.nn.Parameter) -> None:
    if is_absent(local(parameter)):
        raise ClosedError(
            f"{name} has no values: the SwappedModule that had them is closed. Save its "
            "state_dict() before that"
        )


# Its calls, and what autograd keeps of them: where a parameter is found, in place of memory


class _SavedParameter(NamedTuple):
    """Autograd's stand-in for a view of a unit's memory."""

    store: ParamStore
    unit: ParamUnit
    parameter: torch.nn.Parameter | None  # that a tensor is a view of; None where it is empty
    version: int  # of the parameter, then
    experts: frozenset[int] | None  # of fused ones that a call has computed with; None: all

    def memory(self) -> torch.Tensor:
        """The unit's memory; raises if the parameter was changed."""
        if self.parameter is not None and self.parameter._version != self.version:
            raise RuntimeError(
                f"a parameter of shape {tuple(self.parameter.shape)} was changed (by a step, "
                "within gather or by load_state_dict) after the forward pass that this "
                "backward belongs to: run forward again. torch refuses the same in memory"
            )
        return self.store.memory_of(self.unit, self.experts)


def attach(store: ParamStore, stage: Stage) -> None:
    """Bring a stage's parameters before its call, and release them after it."""
    units = [unit for unit in store.units if stage in unit.stages]

    def origin_of(address: int, offset: int, _: int) -> _SavedParameter | None:
        unit = store.by_address.get(address)
        if unit is None:
            return None
        parameter = _parameter_at(unit, offset)
        version = 0 if parameter is None else parameter._version
        return _SavedParameter(store, unit, parameter, version, _routed_here(unit))

    def take() -> object:
        store.check_open()
        exports = getattr(torch.compiler, "is_exporting", bool)  # torch 2.7 and newer
        if is_tracing() or exports():
            raise RuntimeError(
                "a swapped module cannot be traced or exported, its parameters would be NaN there: "
                "load its state_dict() into a module in memory, and export that"
            )
        return store.hold(units)

    def finished(result: Any) -> Any:
        store.check_unchanged(units)
        return result

    calls.wrap(stage.module, functools.partial(calls.taking(take, origin_of, finished), True))
    for unit in units:
        if unit.fused and store.device.type == "cpu":
            store.read_by_expert(unit)
            routing.attach(stage.module, functools.partial(_with_experts, store, unit))


class _Call:
    """A call of fused experts, in a local of its frame; `experts` are all that it looks at."""

    __slots__ = ("__weakref__", "experts", "unit")

    def __init__(self, unit: ParamUnit, experts: frozenset[int]) -> None:
        self.unit = unit
        self.experts = experts


_here = threading.local()


def _routed_here(unit: ParamUnit) -> frozenset[int] | None:
    """The experts of a unit that the call on this thread looks at; None: it may look at all."""
    call = getattr(_here, "call", _no_call)()
    return call.experts if call is not None and call.unit is unit else None


def _no_call() -> None:
    return None


def _with_experts(
    store: ParamStore,
    unit: ParamUnit,
    chosen: torch.Tensor,
    call: Callable[..., Any],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call fused experts with those in memory that tokens are routed to."""
    if hasattr(unit.stages[0].module, "parametrizations"):  # adapters compute with all of them
        store.need_experts(unit, frozenset(range(unit.fused)))
        return call(*args, **kwargs)
    hit = frozenset(e for e in torch.unique(chosen).tolist() if 0 <= e < unit.fused)
    store.need_experts(unit, hit)
    running = _Call(unit, hit)
    _here.call = weakref.ref(running)
    try:
        return call(*args, **kwargs)
    finally:
        del running


def _parameter_at(unit: ParamUnit, offset: int) -> torch.nn.Parameter | None:
    for parameter, span in zip(unit.parameters, unit.spans, strict=True):
        if span.offset <= offset < span.offset + span.nbytes:
            return parameter
    return None

"""`optimizer.state` over the swap files, and state dicts on their way in."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from nvmeio.offload._optimizer.params import SwappedParam
from nvmeio.offload._optimizer.turns import MASTER
from nvmeio.offload._swap_files.file_tensors import file_tensor
from nvmeio.offload._swap_files.subgroups import WEIGHTS
from nvmeio.offload._swap_files.tensors import like, local

if TYPE_CHECKING:
    from nvmeio.offload._generations.transactions import Transactions
    from nvmeio.offload._optimizer.swapper import StateSwapper


class StateView(MutableMapping[torch.Tensor, dict[str, Any]]):
    """The state by parameter, read from the files when it is looked at; changes go nowhere.

    It has an entry for each parameter that was stepped, as a torch optimizer's `state`.
    """

    def __init__(self, swapper: StateSwapper, transactions: Transactions) -> None:
        self._swapper = swapper
        self._transactions = transactions
        self._by_id: dict[int, SwappedParam] = {}
        # Tensors that were handed out: putting the same one back (a move to its own device) changes
        # nothing.
        self._handed: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()

    def __getitem__(self, parameter: torch.Tensor) -> dict[str, Any]:
        param = self._param_of(parameter)
        if param is None:
            raise KeyError("no parameter of this optimizer: take one of its param_groups")
        return self._transactions.run(lambda _: self._entry(param) if _begun(param) else {})

    def _param_of(self, parameter: object) -> SwappedParam | None:
        if len(self._by_id) != len(self._swapper.params):  # a group was added
            self._by_id = {id(param.parameter): param for param in self._swapper.params}
        return self._by_id.get(id(parameter))

    def _entry(self, param: SwappedParam) -> dict[str, Any]:
        first = param.pieces[0]
        small = [self._swapper.store.small[piece.number] for piece in param.pieces]
        found = dict(small[0])
        for name, value in found.items():  # tensors of options that were set after the beginning
            if isinstance(value, torch.Tensor) and value.dim() and value.shape == first.shape:
                whole = _joined([row[name] for row in small], param.shape)
                found[name] = like(param.parameter, whole)
        for kind in first.kinds:
            shape = param.shape if kind.shape is None else kind.shape
            found[kind.name] = self._tensor(param, kind.name, kind.dtype, shape)
        if first.stored and first.step_dtype != param.dtype:
            found[MASTER] = self._tensor(param, WEIGHTS, first.step_dtype, param.shape)
        self._handed.update({id(t): t for t in found.values() if isinstance(t, torch.Tensor)})
        return found

    def _tensor(
        self, param: SwappedParam, name: str, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> torch.Tensor:
        held = [self._swapper.resident_view(piece, name) for piece in param.pieces]
        if any(view is not None for view in held):
            there = zip(param.pieces, held, strict=True)
            views = [self._mapped(p, name, dtype) if view is None else view for p, view in there]
            whole = _joined(views, shape)
        else:
            files = self._swapper.store.files
            parts = [part for piece in param.pieces for part in files.file_parts(piece, name)]
            strides = param.pieces[0].spans[name].strides  # of several, each is a run of elements
            whole = file_tensor(parts, dtype, shape, strides)
        return like(param.parameter, whole) if shape == param.shape else whole

    def _mapped(self, piece: Any, name: str, dtype: torch.dtype) -> torch.Tensor:
        span = piece.spans[name]
        return file_tensor(self._swapper.store.files.file_parts(piece, name), dtype, span.shape)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (param.parameter for param in self._there())

    def __len__(self) -> int:
        return len(self._there())

    def _there(self) -> list[SwappedParam]:
        """The parameters that have state; none once the optimizer is closed."""
        return [] if self._swapper.closed else [o for o in self._swapper.params if self._has(o)]

    def _has(self, param: SwappedParam) -> bool:
        """Whether an entry would hold anything: plain SGD keeps nothing."""
        first = param.pieces[0]
        master = first.stored and first.step_dtype != param.dtype
        something = bool(first.kinds) or bool(self._swapper.store.small[first.number]) or master
        return something and _begun(param)

    def __contains__(self, parameter: object) -> bool:
        param = self._param_of(parameter)
        return param is not None and not self._swapper.closed and self._has(param)

    def __setitem__(self, parameter: torch.Tensor, value: dict[str, Any]) -> None:
        tensors = [t for t in value.values() if isinstance(t, torch.Tensor)]
        if parameter in self and all(self._handed.get(id(t)) is t for t in tensors):
            return
        raise TypeError("the state is on the drive: change it through load_state_dict")

    def __delitem__(self, parameter: torch.Tensor) -> None:
        raise TypeError("the state is on the drive: change it through load_state_dict")


def _joined(parts: Sequence[torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
    """The whole of what the pieces of a parameter have."""
    if len(parts) == 1:
        return parts[0] if parts[0].shape == shape else parts[0].reshape(shape)
    return torch.cat([part.reshape(-1) for part in parts]).view(shape)


def _begun(param: SwappedParam) -> bool:
    return any(piece.begun for piece in param.pieces)


class Prepared(NamedTuple):
    """A state dict that fits."""

    states: dict[int, dict[str, Any] | None]
    groups: list[dict[str, Any]]


def prepared(
    params: Sequence[SwappedParam], groups: Sequence[dict[str, Any]], state_dict: dict[str, Any]
) -> Prepared:
    """Check a state dict against parameters and their groups, before anything is changed.

    ValueError says which groups, parameters, shapes or kinds of state differ.
    """
    try:
        saved, state = state_dict["param_groups"], state_dict["state"]
    except (KeyError, TypeError):
        raise ValueError(
            "a state dict of an optimizer needs the keys 'state' and 'param_groups'"
        ) from None
    if [len(g["params"]) for g in saved] != [len(g["params"]) for g in groups]:
        raise ValueError(
            f"the sizes of param_groups are {[len(g['params']) for g in saved]} in the state dict: "
            f"make the optimizer with the same, not with {[len(g['params']) for g in groups]}"
        )
    states: dict[int, dict[str, Any] | None] = {}
    keys = [key for group in saved for key in group["params"]]
    for param, key in zip(params, keys, strict=True):
        entry = state.get(key) or None
        if entry is not None:
            _check_entry(param, entry)
        states[param.number] = entry
    return Prepared(states, [{k: v for k, v in group.items() if k != "params"} for group in saved])


def _check_entry(param: SwappedParam, entry: dict[str, Any]) -> None:
    for kind in param.pieces[0].kinds:
        value = entry.get(kind.name)
        shape = param.shape if kind.shape is None else kind.shape
        found = tuple(local(value).shape) if isinstance(value, torch.Tensor) else None
        if found != shape:
            raise ValueError(
                f"parameter {param.number} needs the state {kind.name!r} of shape {shape}; the "
                f"state dict has {found} (it has {sorted(map(str, entry))})"
            )
    master = entry.get(MASTER)
    if master is not None and tuple(local(master).shape) != param.shape:
        raise ValueError(
            f"parameter {param.number} must have the shape of its master weights in the state "
            f"dict, {tuple(local(master).shape)}, not {param.shape}"
        )


def apply_groups(groups: list[dict[str, Any]], saved: list[dict[str, Any]]) -> None:
    """Give parameter groups copies of others' options, as torch's load_state_dict does."""
    for group, options in zip(groups, copy.deepcopy(saved), strict=True):
        names = group.get("param_names")
        group.update({k: v for k, v in options.items() if k not in ("params", "param_names")})
        if names is not None:
            group["param_names"] = names

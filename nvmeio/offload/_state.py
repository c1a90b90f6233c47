"""`optimizer.state` over the swap files, and state dicts on their way in."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, MutableMapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from nvmeio.offload._file_tensors import file_tensor
from nvmeio.offload._layout import WEIGHTS
from nvmeio.offload._loading import MASTER
from nvmeio.offload._owners import Owner
from nvmeio.offload._tensors import like, local

if TYPE_CHECKING:
    from nvmeio.offload._state_swapper import StateSwapper
    from nvmeio.offload._transactions import Transactions


class StateView(MutableMapping[torch.Tensor, dict[str, Any]]):
    """The state by parameter, read from the files when it is looked at; changes go nowhere.

    It has an entry for each parameter that was stepped, as a torch optimizer's `state`.
    """

    def __init__(
        self, swapper: StateSwapper, owners: list[Owner], transactions: Transactions
    ) -> None:
        self._swapper = swapper
        self._transactions = transactions
        self._owners = owners
        self._by_id: dict[int, Owner] = {}
        # What was handed out: whoever puts the same back (to move it where it is) changes nothing.
        self._handed: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()

    def __getitem__(self, parameter: torch.Tensor) -> dict[str, Any]:
        owner = self._owner_of(parameter)
        if owner is None:
            raise KeyError("this tensor is no parameter of the optimizer")
        return self._transactions.run(lambda _: self._entry(owner) if _begun(owner) else {})

    def _owner_of(self, parameter: object) -> Owner | None:
        if len(self._by_id) != len(self._owners):  # a group was added
            self._by_id = {id(owner.parameter): owner for owner in self._owners}
        return self._by_id.get(id(parameter))

    def _entry(self, owner: Owner) -> dict[str, Any]:
        first = owner.pieces[0]
        found = dict(self._swapper.store.small[first.number])
        for kind in first.kinds:
            shape = owner.shape if kind.shape is None else kind.shape
            found[kind.name] = self._tensor(owner, kind.name, kind.dtype, shape)
        if first.stored and first.step_dtype != owner.dtype:
            found[MASTER] = self._tensor(owner, WEIGHTS, first.step_dtype, owner.shape)
        self._handed.update({id(t): t for t in found.values() if isinstance(t, torch.Tensor)})
        return found

    def _tensor(
        self, owner: Owner, name: str, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> torch.Tensor:
        held = [self._swapper.resident_view(piece, name) for piece in owner.pieces]
        if any(each is not None for each in held):
            flat = [
                (self._mapped(piece, name, dtype) if view is None else view).reshape(-1)
                for piece, view in zip(owner.pieces, held, strict=True)
            ]
            whole = flat[0] if len(flat) == 1 else torch.cat(flat)
            whole = whole.view(shape)
        else:
            store = self._swapper.store
            parts = [store.file_part(piece, name) for piece in owner.pieces]
            whole = file_tensor(parts, dtype, shape)
        return like(owner.parameter, whole) if shape == owner.shape else whole

    def _mapped(self, piece: Any, name: str, dtype: torch.dtype) -> torch.Tensor:
        span = piece.spans[name]
        return file_tensor([self._swapper.store.file_part(piece, name)], dtype, span.shape)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (owner.parameter for owner in self._there())

    def __len__(self) -> int:
        return len(self._there())

    def _there(self) -> list[Owner]:
        """Those that have state; none once the optimizer is closed."""
        return [] if self._swapper.closed else [o for o in self._owners if self._has(o)]

    def _has(self, owner: Owner) -> bool:
        """Whether there is anything to tell of it: plain SGD keeps nothing."""
        first = owner.pieces[0]
        master = first.stored and first.step_dtype != owner.dtype
        something = bool(first.kinds) or bool(self._swapper.store.small[first.number]) or master
        return something and _begun(owner)

    def __contains__(self, parameter: object) -> bool:
        owner = self._owner_of(parameter)
        return owner is not None and not self._swapper.closed and self._has(owner)

    def __setitem__(self, parameter: torch.Tensor, value: dict[str, Any]) -> None:
        tensors = [t for t in value.values() if isinstance(t, torch.Tensor)]
        if parameter in self and all(self._handed.get(id(t)) is t for t in tensors):
            return
        raise TypeError("the state is on the drive: change it through load_state_dict")

    def __delitem__(self, parameter: torch.Tensor) -> None:
        raise TypeError("the state is on the drive: change it through load_state_dict")


def _begun(owner: Owner) -> bool:
    return any(piece.begun for piece in owner.pieces)


class Prepared(NamedTuple):
    """A state dict that fits."""

    states: dict[int, dict[str, Any] | None]
    groups: list[dict[str, Any]]


def prepared(optimizer: Any, state_dict: dict[str, Any]) -> Prepared:
    """Check a state dict against an optimizer, before anything is changed.

    Raises:
        ValueError: Groups, parameters, shapes or kinds of state differ; says which.
    """
    try:
        saved, state = state_dict["param_groups"], state_dict["state"]
    except (KeyError, TypeError):
        raise ValueError(
            "a state dict of an optimizer has the keys 'state' and 'param_groups'"
        ) from None
    groups = optimizer.param_groups
    if [len(g["params"]) for g in saved] != [len(g["params"]) for g in groups]:
        raise ValueError(
            f"the state dict has groups of {[len(g['params']) for g in saved]} parameters, this "
            f"optimizer of {[len(g['params']) for g in groups]}"
        )
    states: dict[int, dict[str, Any] | None] = {}
    keys = [key for group in saved for key in group["params"]]
    for owner, key in zip(optimizer._owners, keys, strict=True):
        entry = state.get(key) or None
        if entry is not None:
            _check_entry(owner, entry)
        states[owner.number] = entry
    options = [{k: v for k, v in group.items() if k != "params"} for group in saved]
    return Prepared(states, options)


def _check_entry(owner: Owner, entry: dict[str, Any]) -> None:
    for kind in owner.pieces[0].kinds:
        value = entry.get(kind.name)
        shape = owner.shape if kind.shape is None else kind.shape
        if not isinstance(value, torch.Tensor) or tuple(local(value).shape) != shape:
            found = tuple(local(value).shape) if isinstance(value, torch.Tensor) else value
            raise ValueError(
                f"parameter {owner.number} needs the state {kind.name!r} of shape {shape}; the "
                f"state dict has {found} (it has {sorted(map(str, entry))})"
            )
    master = entry.get(MASTER)
    if master is not None and tuple(local(master).shape) != owner.shape:
        raise ValueError(
            f"parameter {owner.number} has shape {owner.shape}, its master weights in the state "
            f"dict {tuple(local(master).shape)}"
        )


def apply_groups(groups: list[dict[str, Any]], saved: list[dict[str, Any]]) -> None:
    """Give parameter groups the options of others, as torch's load_state_dict does."""
    for group, options in zip(groups, saved, strict=True):
        names = group.get("param_names")
        group.update({k: v for k, v in options.items() if k not in ("params", "param_names")})
        if names is not None:
            group["param_names"] = names

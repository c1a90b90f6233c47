"""The division of a module so that its windows suffice: too large linear layers into tiles.

A tile is a linear layer like others: a part of the module, with parameters, gradients and optimizer
state of its own. The layer stays where it is in the module, with its hooks, and calls its tiles one
after another. In state dicts, too, it is what it was.
"""

from __future__ import annotations

import math
import types
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from nvmeio._pages import PAGE_BYTES
from nvmeio._residency import calls, tiled_linear
from nvmeio._residency.tiled_linear import LinearRows
from nvmeio.offload._module.param_store import store_of
from nvmeio.offload._module.stages import (
    AS_ONE,
    ParamUnit,
    Stage,
    find_stages,
    find_units,
    unit_nbytes,
)
from nvmeio.offload._swap_files.subgroups import SlotSpan
from nvmeio.offload._swap_files.tensors import absent, is_absent, lay

_TILES = "tiles"
_READ_AHEAD = 3  # of the largest parts: one that computes and two that are read
_SHOWN = "_nvmeio_shown"  # of a layer: the tensors it shows in the places of its parameters


class WholeParameter(NamedTuple):
    """A parameter of a cut layer: the parts that its tiles have, and the shape of the whole."""

    parts: list[nn.Parameter]
    shape: tuple[int, ...]

    def split(self, values: torch.Tensor) -> dict[int, torch.Tensor]:
        """The rows of each part, by its id."""
        rows = torch.split(values, [part.shape[0] for part in self.parts])
        return {id(part): of_part for part, of_part in zip(self.parts, rows, strict=True)}


class _Shown(NamedTuple):
    """The tensor that a layer shows in the place of a parameter, as it was put there."""

    tensor: torch.Tensor
    version: int
    requires_grad: bool

    def is_as_it_was(self, now: object) -> bool:
        return (
            now is self.tensor
            and calls.version_of(self.tensor) == self.version
            and self.tensor.requires_grad == self.requires_grad
            and (is_absent(self.tensor) or not self.tensor.numel())
        )


class TiledLayers:
    """The layers of a module that were cut. They can be made whole again until `keep`."""

    def __init__(self) -> None:
        self._whole: list[tuple[nn.Linear, dict[str, nn.Parameter | None], list[Any]]] = []

    def cut(
        self, root: nn.Module, most_bytes: int, window_bytes: int, device: torch.device
    ) -> None:
        """Cut layers that take more than `window_bytes` into tiles of at most `most_bytes`.

        64 rows are one tile anyway. `device` is where the layers will compute.
        """
        owners = Counter(id(p) for module in root.modules() for p in module._parameters.values())
        for layer in _layers(root):
            inside = [p for p in layer._parameters.values() if p is not None]
            if unit_nbytes(inside) <= window_bytes:
                continue
            plain = all(owners[id(p)] == 1 and _is_plain(p) for p in inside)
            if not plain or not tiled_linear.can_be_tiled(layer):
                continue
            a_row = sum(p.nbytes for p in inside) // layer.out_features
            bounds = tiled_linear.row_bounds(layer.out_features, a_row, most_bytes)
            if len(bounds) > 1:
                self._cut(layer, bounds, device)

    def _cut(
        self, layer: nn.Linear, bounds: Sequence[tuple[int, int]], device: torch.device
    ) -> None:
        tiles = nn.ModuleList(_tile(layer, first, last) for first, last in bounds)
        tiles.training = layer.training
        hooks: list[Any] = []
        self._whole.append((layer, dict(layer._parameters), hooks))
        untyped: Any = layer
        hooks.append(untyped.register_state_dict_post_hook(_join))
        hooks.append(untyped._register_load_state_dict_pre_hook(_split, with_module=True))
        shown = layer.__dict__[_SHOWN] = {}
        for name, parameter in list(layer._parameters.items()):
            if parameter is not None:
                nothing = _nothing(parameter, device).requires_grad_(parameter.requires_grad)
                shown[name] = _Shown(nothing, calls.version_of(nothing), parameter.requires_grad)
                del layer._parameters[name]
                layer.__dict__[name] = nothing
        layer._modules[_TILES] = tiles
        layer.forward = types.MethodType(_forward, layer)  # type: ignore[method-assign]

    def undo(self) -> None:
        for layer, parameters, hooks in self._whole:
            layer.__dict__.pop("forward", None)
            layer.__dict__.pop(_SHOWN, None)
            layer._modules.pop(_TILES, None)
            for name in parameters:
                layer.__dict__.pop(name, None)
            layer._parameters.clear()
            layer._parameters.update(parameters)
            for hook in hooks:
                hook.remove()
        self._whole.clear()

    def keep(self) -> None:
        """Leave the layers cut; the memory of their parameters goes with the tiles'."""
        for _, parameters, _ in self._whole:
            for parameter in parameters.values():
                if parameter is not None and not parameter.is_meta:
                    lay(parameter, _nothing(parameter, parameter.device))  # holders get an error
        self._whole.clear()


def whole_parameters(root: nn.Module) -> dict[str, WholeParameter]:
    """The whole parameters of cut layers, by their names in a state dict."""
    found = {}
    for name, layer in root.named_modules(remove_duplicate=False):
        if not _is_cut(layer):
            continue
        tiles: Any = layer._modules[_TILES]
        for each in tiles[0]._parameters:
            parts = [tile._parameters[each] for tile in tiles]
            if parts[0] is not None:
                shape = (sum(p.shape[0] for p in parts), *parts[0].shape[1:])
                found[f"{name}.{each}" if name else each] = WholeParameter(parts, shape)
    return found


def _layers(root: nn.Module) -> list[nn.Linear]:
    """Linear layers that their users call themselves."""
    found: list[nn.Linear] = []
    seen: set[int] = set()

    def visit(module: nn.Module) -> None:
        if id(module) in seen or isinstance(module, AS_ONE):
            return
        seen.add(id(module))
        if isinstance(module, nn.Linear):
            found.append(module)
        for child in module.children():
            visit(child)

    visit(root)
    return found


def _is_plain(parameter: nn.Parameter) -> bool:
    """Whether tiles can replace a parameter: it has no class, gradient or hooks of its own."""
    hooks: Any = (
        parameter._backward_hooks,
        getattr(parameter, "_post_accumulate_grad_hooks", None),
    )
    return type(parameter) is nn.Parameter and parameter.grad is None and not any(hooks)


def _tile(layer: nn.Linear, first: int, last: int) -> nn.Linear:
    """Some rows as a layer, over the memory of the whole."""
    tile = nn.Linear(layer.in_features, last - first, bias=False, device="meta")
    for name, parameter in layer._parameters.items():
        own = None
        if parameter is not None:
            own = nn.Parameter(parameter.data[first:last], parameter.requires_grad)
            own.__dict__.update(parameter.__dict__)
        tile._parameters[name] = own
    tile.training = layer.training
    return tile


def _nothing(parameter: nn.Parameter, device: torch.device) -> torch.Tensor:
    """The tensor that a layer shows in the place of a parameter: its shape and dtype, and NaN."""
    shape = tuple(parameter.shape)
    nbytes = math.prod(shape) * parameter.dtype.itemsize
    return absent(SlotSpan(0, nbytes, parameter.dtype, shape), device)


def _is_cut(module: nn.Module) -> bool:
    return getattr(module.__dict__.get("forward"), "__func__", None) is _forward


def _forward(self: nn.Linear, input: torch.Tensor) -> torch.Tensor:
    _check_nothing_given(self)
    tiles: Any = self._modules[_TILES]
    rows, first = [], 0
    for tile in tiles:
        rows.append(LinearRows(first, first + tile.out_features, tile))
        first += tile.out_features
    return tiled_linear.compute(input, self.out_features, rows)


def _check_nothing_given(layer: nn.Linear) -> None:
    """Refuse what was given to the layer itself or changed there: its tiles do not see it."""
    given = [name for name, parameter in layer._parameters.items() if parameter is not None]
    for name, shown in layer.__dict__[_SHOWN].items():
        if not shown.is_as_it_was(layer.__dict__.get(name)):
            given.append(name)
    if given:
        raise RuntimeError(
            f"a linear layer of {layer.out_features} outputs was given another {given[0]!r}, or "
            "its own was changed or frozen, and is in tiles on the drive, which do not have that: "
            "do it before the module is swapped; or change the tiles' within gather(), freeze "
            "with requires_grad_() of the layer or of its tiles' parameters, and give "
            "functional_call the tiles' names"
        )


# State dicts


def _keys(tiles: Any, prefix: str, name: str) -> list[str]:
    return [f"{prefix}{_TILES}.{number}.{name}" for number in range(len(tiles))]


def _join(layer: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Join the rows of the tiles: over the files, or in memory where a block gathered some."""
    if not _is_cut(layer):
        return  # an interrupt came between making it whole again and this hook's going
    tiles: Any = layer._modules[_TILES]
    for name in tiles[0]._parameters:
        found = [state_dict.pop(key) for key in _keys(tiles, prefix, name) if key in state_dict]
        if not found:
            continue
        parts = [tile._parameters[name] for tile in tiles]
        store = store_of(parts[0])
        if store is None or any(store.is_gathered(part) for part in parts):
            state_dict[prefix + name] = torch.cat(found)
        else:
            state_dict[prefix + name] = store.on_file(*parts)


def _split(
    layer: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    metadata: Mapping[str, Any],
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    if not _is_cut(layer):
        return
    tiles: Any = layer._modules[_TILES]
    for name in tiles[0]._parameters:
        if prefix + name not in state_dict:
            continue
        whole = state_dict.pop(prefix + name)
        wanted: Any = layer.__dict__[name]
        if tuple(whole.shape) != tuple(wanted.shape):
            errors.append(
                f"size mismatch for {prefix}{name}: {tuple(whole.shape)} in the state dict, "
                f"{tuple(wanted.shape)} in the module"
            )
            continue
        rows = torch.split(whole, [tile.out_features for tile in tiles])
        state_dict.update(zip(_keys(tiles, prefix, name), rows, strict=True))


# The least size of a module's windows


class Need(NamedTuple):
    """Bytes that a window must hold at once, and the name of the part whose call takes most."""

    nbytes: int
    name: str


def needed(root: torch.nn.Module, stages: Sequence[Stage], units: Sequence[ParamUnit]) -> Need:
    """The bytes that must be in memory at once: a part, and those whose calls are around its own.

    With gradients that is one part more: a node of the graph may hold its weight while it runs a
    checkpointed region of other parts again.
    """
    training = any(parameter.requires_grad for parameter in root.parameters())
    names = {id(stage.module): stage.name or type(root).__name__ for stage in stages}
    of_module: dict[int, frozenset[int]] = {}
    for stage in stages:
        mine = (n for n, unit in enumerate(units) if stage in unit.stages)
        of_module[id(stage.module)] = of_module.get(id(stage.module), frozenset()).union(mine)
    saved = [n for n, unit in enumerate(units) if training and _is_saved(unit)]
    saved.sort(key=lambda n: units[n].nbytes)
    seen: set[tuple[int, frozenset[int]]] = set()
    most = Need(0, "")

    def visit(module: torch.nn.Module, held: frozenset[int]) -> None:
        nonlocal most
        held |= of_module.get(id(module), frozenset())
        if (id(module), held) in seen:
            return
        seen.add((id(module), held))
        beside = next((units[n].nbytes for n in reversed(saved) if n not in held), 0)
        nbytes = sum(units[n].nbytes for n in held) + (beside if held else 0)
        if id(module) in names and nbytes > most.nbytes:
            most = Need(nbytes, names[id(module)])
        for child in module.children():
            visit(child, held)

    visit(root, frozenset())
    return most


def _is_saved(unit: ParamUnit) -> bool:
    """Whether autograd saves some of it for backward; embeddings are not saved."""
    return not all(type(stage.module) is torch.nn.Embedding for stage in unit.stages)


def largest(root: torch.nn.Module, units: Sequence[ParamUnit]) -> Need:
    """The largest unit: its parameters come at once."""
    unit = max(units, key=lambda each: each.nbytes, default=None)
    if unit is None:
        return Need(0, "")
    return Need(unit.nbytes, unit.stages[0].name or type(root).__name__)


class Windows(NamedTuple):
    """The windows that the user gave.

    `device_bytes` None is as many as are wanted. With `direct`, parts go straight to the device.
    """

    resident_bytes: int
    device_bytes: int | None
    device: torch.device
    direct: bool

    @property
    def host_bytes(self) -> int | None:
        """The window in host memory, if one is taken."""
        return None if self.direct else self.resident_bytes

    @property
    def smaller_bytes(self) -> int:
        """The window that decides how large parts are."""
        nbytes = self.device_bytes or self.resident_bytes
        return nbytes if self.direct else min(nbytes, self.resident_bytes)

    def hold(self, most: Need, need: Need) -> bool:
        at_once = self.host_bytes if self.device.type == "cpu" else self.device_bytes
        one = self.host_bytes
        return (one is None or most.nbytes <= one) and (at_once is None or need.nbytes <= at_once)

    def checked(self, most: Need, need: Need | None) -> int:
        """The window on the device, 0 for none; raises where one is too small.

        `most` comes at once; `need` must be together where the module computes, None: only `most`.
        """
        need = most if need is None else need
        if self.device.type == "cpu":
            _check("resident_bytes", self.host_bytes, need, most)
            return 0
        _check("resident_bytes", self.host_bytes, most, most)  # only their way to the device
        _check("device_bytes", self.device_bytes, need, most)
        return self.device_bytes or max(need.nbytes, _READ_AHEAD * most.nbytes)


def _check(name: str, nbytes: int | None, need: Need, most: Need) -> None:
    if nbytes is None or need.nbytes <= nbytes:
        return
    around = (
        ", with the parameters of the modules that call it and, to train, one part more"
        if need.nbytes > most.nbytes
        else ""
    )
    raise ValueError(
        f"{name}={nbytes} is too small: {need.name} needs {need.nbytes} bytes at once{around}. "
        f"Give {name}={need.nbytes} or more (half as much again reads ahead), or make smaller "
        "modules of it (docs/offload.md, Matrices larger than the window)"
    )


def divide(
    root: torch.nn.Module, tiled: TiledLayers, windows: Windows, stage_bytes: int | None
) -> int:
    """Cut large layers, and say how large a part may be, so that the windows are enough.

    Layers stay whole and parts large where that is possible. The last try does not depend on the
    windows: what it needs is enough for any, and stands in the error of windows that are smaller.
    """
    window_bytes = windows.smaller_bytes
    keep = window_bytes
    while True:
        is_last = keep <= PAGE_BYTES
        most_bytes = min(stage_bytes or (keep if is_last else window_bytes // 4), keep)
        tiled.cut(root, most_bytes, keep, windows.device)
        stages = find_stages(root, most_bytes)
        units = find_units(stages)
        most, need = largest(root, units), needed(root, stages, units)
        if is_last or windows.hold(most, need):
            windows.checked(most, need)
            return most_bytes
        tiled.undo()
        keep = max(keep // 2, PAGE_BYTES)

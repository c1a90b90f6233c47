"""How large the windows of a module must be, and how it is divided so that they are enough."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from nvmeio._files.plan import PAGE_BYTES
from nvmeio.offload._module.stages import Stage, Unit, find_stages, find_units
from nvmeio.offload._module.tiles import TiledLayers

_READ_AHEAD = 3  # of the largest parts: one that computes and two that are read


class Need(NamedTuple):
    """What a window must hold at once.

    Attributes:
        nbytes: How much.
        name: The part whose call takes most.
    """

    nbytes: int
    name: str


def needed(root: torch.nn.Module, stages: Sequence[Stage], units: Sequence[Unit]) -> Need:
    """What must be in memory at once: a part, and those whose calls are around its own.

    Where something wants gradients, that is one part more: a node of the graph may have its weight
    while it has a checkpointed region run again, of other parts.
    """
    training = any(parameter.requires_grad for parameter in root.parameters())
    names = {id(stage.module): stage.name or type(root).__name__ for stage in stages}
    of_module: dict[int, frozenset[int]] = {}
    for stage in stages:
        wanted = {id(p) for p in stage.parameters}
        mine = (n for n, u in enumerate(units) if wanted & {id(p) for p in u.parameters})
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


def _is_saved(unit: Unit) -> bool:
    """Whether autograd keeps some of it for backward: of a table of embeddings it needs none."""
    return not all(type(stage.module) is torch.nn.Embedding for stage in unit.stages)


def largest(root: torch.nn.Module, units: Sequence[Unit]) -> Need:
    """The parameters that come at once."""
    unit = max(units, key=lambda each: each.nbytes, default=None)
    if unit is None:
        return Need(0, "")
    return Need(unit.nbytes, unit.stages[0].name or type(root).__name__)


class Windows(NamedTuple):
    """What the user gave.

    Attributes:
        resident_bytes: In host memory, unless parts go straight to the device.
        device_bytes: On a device; None there: as many as are wanted.
        device: Where the module computes.
        direct: Whether parts go straight to it.
    """

    resident_bytes: int
    device_bytes: int | None
    device: torch.device
    direct: bool

    @property
    def host_bytes(self) -> int | None:
        """The one in host memory, if one is taken."""
        return None if self.direct else self.resident_bytes

    @property
    def smaller_bytes(self) -> int:
        """The one that decides how large parts are."""
        nbytes = self.device_bytes or self.resident_bytes
        return nbytes if self.direct else min(nbytes, self.resident_bytes)

    def hold(self, most: Need, need: Need) -> bool:
        """Whether they are large enough."""
        at_once = self.host_bytes if self.device.type == "cpu" else self.device_bytes
        one = self.host_bytes
        return (one is None or most.nbytes <= one) and (at_once is None or need.nbytes <= at_once)

    def checked(self, most: Need, need: Need | None) -> int:
        """The window on the device, 0 for none; raises where one is too small.

        Args:
            most: The parameters that come at once.
            need: What must be there together, where the module computes; None: only those.
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

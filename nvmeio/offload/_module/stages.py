"""Which parts of a module are brought into memory together, and which parameters they need."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from nvmeio._files.plan import PAGE_BYTES, round_up
from nvmeio.offload._swap_files.subgroups import SlotSpan, aligned
from nvmeio.offload._swap_files.tensors import own_strides

# These reach into their children's parameters without calling the children.
AS_ONE = (torch.nn.MultiheadAttention, torch.nn.TransformerEncoderLayer, torch.nn.RNNBase)


@dataclass(eq=False)
class Stage:
    """A module whose forward needs some parameters.

    Attributes:
        name: Its name in the model, "" for the model itself.
        module: The module.
        parameters: What it needs, itself or in its children.
    """

    name: str
    module: torch.nn.Module
    parameters: list[torch.nn.Parameter]


@dataclass(eq=False)
class ParamUnit:
    """Parameters that the same stages need: they come and go together.

    Attributes:
        parameters: In the order of the model.
        spans: Where each lies in the unit's memory (and, at first, in its part of the file).
        nbytes: Its length.
        file_offset: Where it begins in the module's own file.
        stages: Who needs it.
    """

    parameters: list[torch.nn.Parameter]
    spans: list[SlotSpan] = field(default_factory=list)
    nbytes: int = 0
    file_offset: int = 0
    stages: list[Stage] = field(default_factory=list)


def find_stages(root: torch.nn.Module, most_bytes: int) -> list[Stage]:
    """The largest modules whose parameters are at most so many bytes; larger ones by their parts.

    A module that is larger and has parameters of its own is a stage for those, and its children
    are stages too. Containers that are never called (ModuleList) hand their parameters to who
    has them.
    """
    found: list[Stage] = []

    def visit(name: str, module: torch.nn.Module) -> None:
        inside = list(module.parameters())
        if not inside:
            return
        if _is_called(module) and (_nbytes(inside) <= most_bytes or isinstance(module, AS_ONE)):
            found.append(Stage(name, module, inside))
            return
        if _is_called(module):
            own = list(_own_parameters(module))
            if own:
                found.append(Stage(name, module, own))
        for child_name, child in module.named_children():
            visit(f"{name}.{child_name}" if name else child_name, child)

    visit("", root)
    return found


def _is_called(module: torch.nn.Module) -> bool:
    return type(module).forward is not torch.nn.Module.forward


def _own_parameters(module: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """Of the module itself, and of containers in it that nobody calls."""
    yield from module.parameters(recurse=False)
    for child in module.children():
        if not _is_called(child):
            yield from _own_parameters(child)


def _nbytes(parameters: Sequence[torch.nn.Parameter]) -> int:
    return sum(parameter.nbytes for parameter in parameters)


def find_units(
    stages: Sequence[Stage], strides: Mapping[int, tuple[int, ...]] | None = None
) -> list[ParamUnit]:
    """Parameters by who needs them: those of one stage alone are one unit, tied ones another.

    Args:
        stages: All of them.
        strides: Of parameters, by id, that have no memory to tell them by.
    """
    users: dict[int, list[Stage]] = {}
    parameters: dict[int, torch.nn.Parameter] = {}
    for stage in stages:
        for parameter in stage.parameters:
            parameters[id(parameter)] = parameter
            mine = users.setdefault(id(parameter), [])
            if stage not in mine:
                mine.append(stage)
    by_users: dict[tuple[int, ...], ParamUnit] = {}
    for key, parameter in parameters.items():
        who = tuple(id(stage) for stage in users[key])
        unit = by_users.setdefault(who, ParamUnit([], stages=users[key]))
        unit.parameters.append(parameter)
    offset = 0
    for unit in by_users.values():
        unit.spans, unit.nbytes = _laid_out(unit.parameters, strides or {})
        unit.file_offset = offset
        offset += unit.nbytes
    return list(by_users.values())


def unit_nbytes(parameters: Sequence[torch.nn.Parameter]) -> int:
    """What a unit of these takes."""
    return _laid_out(parameters, {})[1]


def _laid_out(
    parameters: Sequence[torch.nn.Parameter], given: Mapping[int, tuple[int, ...]]
) -> tuple[list[SlotSpan], int]:
    at = 0
    spans = []
    for parameter in parameters:
        shape = tuple(parameter.shape)
        strides = given.get(id(parameter), own_strides(parameter.detach()))
        nbytes = math.prod(shape) * parameter.dtype.itemsize
        at = aligned(at, nbytes)
        spans.append(SlotSpan(at, nbytes, parameter.dtype, shape, strides))
        at += nbytes
    return spans, round_up(max(at, 1), PAGE_BYTES)

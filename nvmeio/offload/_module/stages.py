"""Parts of a module that come into memory together, what parameters they need, where those lie."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeGuard

import torch

from nvmeio import files
from nvmeio._io.drives import FileSpan, StripedFile
from nvmeio._pages import PAGE_BYTES, round_up
from nvmeio._residency import routing
from nvmeio._residency.calls import version_of
from nvmeio.offload._swap_files.file_tensors import file_tensor
from nvmeio.offload._swap_files.subgroups import SlotSpan, aligned
from nvmeio.offload._swap_files.tensors import like, local, nothing, own_strides

# These reach into their children's parameters without calling the children.
AS_ONE = (torch.nn.MultiheadAttention, torch.nn.TransformerEncoderLayer, torch.nn.RNNBase)


@dataclass(eq=False)
class Stage:
    """A module ("" is the model itself), and the parameters that its forward needs.

    `experts` is the list of experts that it is one of, or is a part of; None for other modules.
    """

    name: str
    module: torch.nn.Module
    parameters: list[torch.nn.Parameter]
    experts: torch.nn.ModuleList | None = None


@dataclass(eq=False)
class ParamUnit:
    """Parameters that the same stages need: they come and go together.

    `spans` say where each lies in the unit's memory (and, at first, in its part of the file), and
    `file_offset` where the unit begins in the module's own file.
    """

    parameters: list[torch.nn.Parameter]
    spans: list[SlotSpan] = field(default_factory=list)
    nbytes: int = 0
    file_offset: int = 0
    stages: list[Stage] = field(default_factory=list)

    @property
    def experts(self) -> torch.nn.ModuleList | None:
        """The list of experts that it is of, alone; None: whoever calls the layer calls it."""
        return self.stages[0].experts if len(self.stages) == 1 else None

    @functools.cached_property
    def fused(self) -> int:
        """How many experts are rows of its parameters, and are read where they are needed."""
        return fused_experts(self.stages[0].module) if len(self.stages) == 1 else 0

    def rows_of(self, parameter: torch.Tensor) -> int:
        """How many rows of a parameter are read each by itself; 0 for none."""
        return self.fused if self.fused and has_rows(parameter, self.fused) else 0


def find_stages(root: torch.nn.Module, most_bytes: int) -> list[Stage]:
    """The largest modules whose parameters have at most `most_bytes`; larger ones by their parts.

    A module that is larger and has parameters of its own is a stage for those, and its children are
    stages too. The parameters of containers that are never called (ModuleList) belong to the module
    around them.

    The part around the experts of a mixture is a stage without these. Each expert of a list is a
    stage too: tokens need only some of them.
    """
    found: list[Stage] = []
    around: set[torch.nn.Module] = set()  # these hold a mixture

    def find_mixtures(name: str, module: torch.nn.Module) -> bool:
        held = [find_mixtures(child_name, child) for child_name, child in module.named_children()]
        if any(held) or _has_experts(module, name):
            around.add(module)
        return module in around or fused_experts(module) > 0

    def visit(name: str, module: torch.nn.Module, experts: torch.nn.ModuleList | None) -> None:
        inside = list(module.parameters())
        if not inside:
            return
        small = _nbytes(inside) <= most_bytes and module not in around
        if _is_called(module) and (small or isinstance(module, AS_ONE)):
            found.append(Stage(name, module, inside, experts))
            return
        if _is_called(module):
            own = list(_own_parameters(module))
            if own:
                found.append(Stage(name, module, own, experts))
        inner = module if _has_experts(module, name) else experts
        for child_name, child in module.named_children():
            visit(f"{name}.{child_name}" if name else child_name, child, inner)

    find_mixtures("", root)
    visit("", root, None)
    return found


def _has_experts(module: torch.nn.Module, name: str) -> TypeGuard[torch.nn.ModuleList]:
    """Whether it is a list of experts that are worth a read each."""
    return routing.is_list_of_experts(module, name) and all(
        _is_called(each) and _nbytes(list(each.parameters())) >= routing.LEAST_BYTES
        for each in module
    )


def fused_experts(module: torch.nn.Module) -> int:
    """How many experts a module has as rows of its parameters, worth a read each; 0 for another."""
    number = routing.fused_experts(module)
    return number if any(has_rows(p, number) for p in module.parameters(recurse=False)) else 0


def has_rows(parameter: torch.Tensor, experts: int) -> bool:
    """Whether each expert has a row of a parameter that is worth a read."""
    whole = parameter.shape[:1] == (experts,) and not own_strides(parameter.detach())
    return whole and parameter.nbytes // experts >= routing.LEAST_BYTES


def _is_called(module: torch.nn.Module) -> bool:
    return type(module).forward is not torch.nn.Module.forward


def _own_parameters(module: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """The parameters of the module itself, and of containers in it that nobody calls."""
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

    `strides` are those of parameters that have no memory to tell them by, by id.
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


class Versions:
    """How often parameters had been changed in place when memory and the drive were the same.

    Not of those that torch does not count, or counts together with others (views of one tensor).
    """

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        was = [version_of(each) for each in params]
        for each in params:
            torch.autograd.graph.increment_version(each)
        self._alone = {id(p) for p, n in zip(params, was, strict=True) if version_of(p) == n + 1}
        self._noted: dict[int, int] = {}

    def note(self, parameters: Iterable[torch.Tensor]) -> None:
        """Memory and the drive have the same values."""
        self._noted |= {id(p): p._version for p in parameters if id(p) in self._alone}

    def undo(self, parameter: torch.Tensor) -> None:
        """Let a single element that is not in memory show nothing again."""
        parameter.detach().fill_(nothing(parameter.dtype))
        self.note([parameter])

    def count(self, parameters: Iterable[torch.Tensor]) -> None:
        """These have changed on the drive."""
        for parameter in parameters:
            torch.autograd.graph.increment_version(parameter)
            if id(parameter) in self._noted:
                self._noted[id(parameter)] += 1

    def changed(self, unit: ParamUnit) -> torch.Tensor | None:
        """A parameter that somebody else has changed since `note`. From any thread."""
        for parameter in unit.parameters:
            if id(parameter) in self._noted and parameter._version != self._noted[id(parameter)]:
                return parameter
        return None


def refused(unit: ParamUnit, changed: torch.Tensor) -> RuntimeError:
    named = (each for s in unit.stages for each in s.module.named_parameters(s.name))
    return RuntimeError(
        f"the parameter {next((n for n, p in named if p is changed), '')} was changed in place "
        "outside of gather(), not on the drive: change it within `with module.gather():`, or by a "
        "step. An empty block of gather() keeps the change if the parameter was in memory; "
        "otherwise the change is undone"
    )


class ParamPlaces:
    """The places of parameters: in `file` with all units, or in files of an optimizer."""

    def __init__(self, unit_of: Mapping[int, ParamUnit], file: StripedFile) -> None:
        self._unit_of = unit_of
        self._file = file
        self._elsewhere: dict[int, Callable[[], Sequence[FileSpan]]] = {}

    def moves(self, unit: ParamUnit, writing: bool = False) -> list[FileSpan]:
        """The transfers between the drive and a unit's memory.

        Reads go over small gaps, where another unit's parameter may lie. Writes do not.
        """
        if not any(id(p) in self._elsewhere for p in unit.parameters):
            return self._file.spans(unit.file_offset, unit.nbytes)
        found: list[FileSpan] = []
        for parameter, span in zip(unit.parameters, unit.spans, strict=True):
            for each in self.where(parameter):
                move = each._replace(start=span.offset + each.start)
                last = found[-1] if found else None
                if last is not None and _follows(last, move, 1 if writing else PAGE_BYTES):
                    found[-1] = last._replace(nbytes=move.start + move.nbytes - last.start)
                elif move.nbytes:
                    found.append(move)
        return found

    def moves_of_experts(
        self, unit: ParamUnit, experts: Collection[int], beside: bool
    ) -> list[FileSpan]:
        """The reads of some experts of a unit that has them fused; `beside`: and of all else."""
        found: list[FileSpan] = []
        for parameter, span in zip(unit.parameters, unit.spans, strict=True):
            rows = unit.rows_of(parameter)
            share = span.nbytes // rows if rows else 0
            wanted = [(e * share, share) for e in sorted(experts)] if rows else []
            if beside and not rows:
                wanted = [(0, span.nbytes)]
            if not wanted:
                continue
            where = self.where(parameter)
            for first, nbytes in wanted:
                for each in where:
                    start = max(first, each.start)
                    stop = min(first + nbytes, each.start + each.nbytes)
                    if start >= stop:
                        continue
                    offset = each.file_offset + start - each.start
                    move = FileSpan(each.file, offset, span.offset + start, stop - start)
                    if found and _follows(found[-1], move, 1):
                        found[-1] = found[-1]._replace(nbytes=found[-1].nbytes + move.nbytes)
                    else:
                        found.append(move)
        return found

    def where(self, parameter: torch.Tensor) -> Sequence[FileSpan]:
        """The present place of the parameter's elements; from any thread."""
        locate = self._elsewhere.get(id(parameter))
        if locate is not None:
            return locate()
        span = self.span_of(parameter)
        return self._file.spans(self._unit_of[id(parameter)].file_offset + span.offset, span.nbytes)

    def span_of(self, parameter: torch.Tensor) -> SlotSpan:
        unit = self._unit_of[id(parameter)]
        return next(
            span
            for each, span in zip(unit.parameters, unit.spans, strict=True)
            if each is parameter
        )

    def relocate(self, parameter: torch.Tensor, locate: Callable[[], Sequence[FileSpan]]) -> None:
        """Read the parameter from where `locate` says from now on; `locate` waits for nobody."""
        self._elsewhere[id(parameter)] = locate
        if self._elsewhere.keys() >= self._unit_of.keys():
            for file in self._file.files:
                with files.in_use(file, True) as opened:
                    os.ftruncate(opened.any_fd(), 0)  # nobody reads it any more

    def on_file(self, parameter: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        """The parameter over the file, unread, with the rows of `rest` below its own."""
        spans = [span for each in (parameter, *rest) for span in self.where(each)]
        shape, strides = tuple(local(parameter).shape), self.span_of(parameter).strides
        if rest:
            shape = (sum(each.shape[0] for each in (parameter, *rest)), *shape[1:])
        return like(parameter, file_tensor(spans, parameter.dtype, shape, strides))


def _follows(last: FileSpan, move: FileSpan, limit: int) -> bool:
    """Whether two moves can be one, with the same small gap in file and memory."""
    gap = move.file_offset - (last.file_offset + last.nbytes)
    return (
        last.file is move.file
        and 0 <= gap < limit
        and move.start - (last.start + last.nbytes) == gap
    )

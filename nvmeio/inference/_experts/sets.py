"""Which weights of a model are experts, and where the bytes of each expert lie. No I/O here.

A set is the experts of one layer. They are fused, parameters [experts, ...] of one module that is
called with the experts of each token; or modules of their own in a `ModuleList`, which are called
one by one. An expert's share of all parameters lies side by side in a region of whole pages, so
that it comes and goes as one. A packed file has the same order, so one read brings it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from nvmeio._formats.safetensors.open_set import SafetensorsSet
from nvmeio._io.spans import read_to
from nvmeio._pages import PAGE_BYTES, TENSOR_ALIGNMENT, round_up
from nvmeio._residency.routing import LEAST_BYTES, fused_experts, is_list_of_experts
from nvmeio._storage import crc32
from nvmeio.inference._plan.checksums import ExpectedBytes
from nvmeio.inference._plan.slot_layout import (
    ExpertRegion,
    FileExtent,
    Read,
    Weight,
    WeightPart,
)
from nvmeio.inference._plan.units import Target, Unit

# Experts that are read at a time to be converted, into memory of their own.
STAGES = 4


class PartPlace(NamedTuple):
    """The place of an expert's share of one stored tensor.

    Attributes:
        dtype: As stored.
        shape: The shape of one expert's share.
        start: Its first byte, in the expert's region; if `staged`, in memory that is converted.
        staged: Whether it is converted, and only the result lies in the region.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    staged: bool

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class WeightPlace(NamedTuple):
    """One expert's share of a weight: its parts as they are read, and the place of its result.

    `converted` is where its elements lie once converted, None where the parts are computed with.
    `copied` is where these go from memory that is converted, none if they were not read there.
    """

    weight: Weight
    parts: tuple[PartPlace, ...]
    converted: PartPlace | None
    copied: tuple[PartPlace, ...] = ()

    @property
    def shown(self) -> tuple[PartPlace, ...]:
        """The tensors that kernels compute with: the parts, or their converted form."""
        return (self.copied or self.parts) if self.converted is None else (self.converted,)


class ExpertReads(NamedTuple):
    """The reads that fill one memory of an expert: its region, or the memory for conversions.

    Attributes:
        reads: From the files.
        expected: The checksums of what they bring, where the file has them.
    """

    reads: tuple[Read, ...]
    expected: tuple[ExpectedBytes, ...]


class ExpertSet:
    """The fused experts of one module.

    Attributes:
        unit: Its weights and their targets, as a unit that no window has.
        module: Is called with the experts that each token is routed to.
        number: How many experts there are.
        weights: The place of an expert's share of each weight.
        nbytes: An expert's region, in whole pages.
        stage_nbytes: Bytes of an expert that are read to be converted.
        direct: The reads that bring each expert to its region.
        staged: The reads of each expert's bytes that are to be converted.
    """

    def __init__(self, unit: Unit, module: nn.Module, number: int) -> None:
        self.unit = unit
        self.module = module
        self.number = number
        self.weights: list[WeightPlace] = []
        self.nbytes = self.stage_nbytes = 0
        self.direct: list[ExpertReads] = []
        self.staged: list[ExpertReads] = []

    @property
    def name(self) -> str:
        return self.unit.name

    @property
    def all_nbytes(self) -> int:
        """The address space of all of them."""
        return self.number * self.nbytes

    @property
    def least_nbytes(self) -> int:
        """Memory for a call that needs all of them, and for conversions meanwhile."""
        return self.all_nbytes + STAGES * self.stage_nbytes

    @property
    def read_nbytes(self) -> int:
        """Bytes that are read for an expert."""
        return sum(read.nbytes for read in (*self.direct[0].reads, *self.staged[0].reads))

    def targets_of(self, hit: Sequence[int]) -> Sequence[Target]:
        """The places in modules that show the weights while some experts compute."""
        return self.unit.targets

    def tensors_over(
        self, hit: Sequence[int], lay: Callable[[PartPlace, int | None], torch.Tensor]
    ) -> dict[int, list[torch.Tensor]]:
        """The parts of each weight, by its number in the unit, for a call of some experts.

        `lay` lays a tensor over the place of one expert, or of all one behind the other (None).
        """
        return {
            number: [lay(part, None) for part in place.shown]
            for number, place in enumerate(self.weights)
        }

    def plan(self, checkpoint: SafetensorsSet, own_alignment: bool) -> None:
        """Lay an expert's region out.

        With `own_alignment`, a tensor that lies on an odd address for 64 bytes in its file is moved
        to one that torch's allocator would give it.
        """
        self.unit.own_alignment = own_alignment
        shares = self._all_shares()
        packed = _side_by_side(shares, self._region(), checkpoint)
        if packed is not None:
            self._plan_packed(packed, shares, checkpoint)
            return
        region = _Room()
        stage = _Room()
        for weight, mapped in self._of_one():
            staged = bool(weight.converted_bytes)
            room = stage if staged else region
            parts = []
            for part, stored in zip(weight.parts, mapped, strict=True):
                shift = 0 if staged or own_alignment else shift_of(stored)
                start = room.take(part.nbytes, shift)
                parts.append(PartPlace(part.dtype, part.shape, start, staged))
            converted = None
            if staged:
                start = region.take(weight.converted_bytes, 0)
                converted = PartPlace(weight.dtype, weight.shape, start, False)
            self.weights.append(WeightPlace(weight, tuple(parts), converted))
        self.nbytes = round_up(region.end, PAGE_BYTES)
        self.stage_nbytes = stage.end
        for expert in range(self.number):
            self.direct.append(self._reads(expert, shares, checkpoint, staged=False))
            self.staged.append(self._reads(expert, shares, checkpoint, staged=True))

    def _plan_packed(
        self,
        packed: _Packed,
        shares: Sequence[Sequence[_Shares]],
        checkpoint: SafetensorsSet,
    ) -> None:
        """Lay a region out as the file has it: an expert is one read, and has one checksum."""
        of_one = self._of_one()
        staged = any(weight.converted_bytes for weight, _ in of_one)
        region = _Room()
        for (weight, _), starts in zip(of_one, packed.starts, strict=True):
            parts = tuple(
                PartPlace(part.dtype, part.shape, start, staged)
                for part, start in zip(weight.parts, starts, strict=True)
            )
            converted = None
            copied: tuple[PartPlace, ...] = ()
            if weight.converted_bytes:
                start = region.take(weight.converted_bytes, 0)
                converted = PartPlace(weight.dtype, weight.shape, start, False)
            elif staged:
                copied = tuple(
                    part._replace(start=region.take(part.nbytes, 0), staged=False) for part in parts
                )
            self.weights.append(WeightPlace(weight, parts, converted, copied))
        self.nbytes = round_up(region.end if staged else packed.nbytes, PAGE_BYTES)
        self.stage_nbytes = packed.nbytes if staged else 0
        nothing = ExpertReads((), ())
        for expert in range(self.number):
            own = self._read_of(packed, expert, shares, checkpoint)
            self.direct.append(nothing if staged else own)
            self.staged.append(own if staged else nothing)

    def _region(self) -> ExpertRegion | None:
        """The one region that holds all weights of its experts, if there is one."""
        regions = {part.region for weight in self.unit.weights for part in weight.parts}
        return regions.pop() if len(regions) == 1 else None

    def _read_of(
        self,
        packed: _Packed,
        expert: int,
        shares: Sequence[Sequence[_Shares]],
        checkpoint: SafetensorsSet,
    ) -> ExpertReads:
        """The one read of an expert, and its one checksum where the file has what gives it."""
        file, first = packed.firsts[expert]
        reads = tuple(
            Read(span.file, span.start, span.end, span.start - first)
            for span in checkpoint.spans(file, first, first + packed.nbytes)
        )
        files = tuple(dict.fromkeys(read.file for read in reads))
        region, name = self._region(), f"{self.name}.{expert}"
        if region is not None:
            name, total = region.name, region.sums[expert] if region.sums else None
        else:
            parts = [
                (start, extents.extents[expert][0].nbytes, extents.sums[expert : expert + 1])
                for of_weight, starts in zip(shares, packed.starts, strict=True)
                for extents, start in zip(of_weight, starts, strict=True)
            ]
            total = _joined_sum(parts, packed.nbytes)
        if total is None:
            return ExpertReads(reads, ())
        place = (files, first, 0, packed.nbytes)
        return ExpertReads(reads, (ExpectedBytes(name, *place, total),))

    def _reads(
        self,
        expert: int,
        shares: Sequence[Sequence[_Shares]],
        checkpoint: SafetensorsSet,
        staged: bool,
    ) -> ExpertReads:
        reads: list[Read] = []
        expected: list[ExpectedBytes] = []
        for place, of_parts in zip(self.weights, shares, strict=True):
            for number, (part, stored) in enumerate(zip(place.parts, of_parts, strict=True)):
                if part.staged is not staged:
                    continue
                own = [
                    Read(span.file, span.start, span.end, at + span.start - offset)
                    for file, offset, nbytes, within in stored.extents[expert]
                    for at in [part.start + within]
                    for span in checkpoint.spans(file, offset, offset + nbytes)
                ]
                reads += own
                if stored.sums:
                    name = place.weight.sources[number]
                    files = tuple(dict.fromkeys(read.file for read in own))
                    offset = stored.extents[expert][0].offset
                    found = stored.sums[expert]
                    place_of = (files, offset, part.start, part.nbytes)
                    expected.append(ExpectedBytes(name, *place_of, found))
        return ExpertReads(_joined(reads), tuple(expected))

    def _of_one(self) -> list[tuple[Weight, tuple[WeightPart, ...]]]:
        """The weights in the shapes of one expert, each with its parts as the file has them."""
        found = []
        for weight in self.unit.weights:
            parts = tuple(part._replace(shape=part.shape[1:]) for part in weight.parts)
            found.append((weight._replace(shape=weight.shape[1:], parts=parts), weight.parts))
        return found

    def _all_shares(self) -> list[list[_Shares]]:
        """The experts' share of each weight, and of each of its parts."""
        return [
            [_shares(part, self.number) for part in weight.parts] for weight in self.unit.weights
        ]


class ExpertModules(ExpertSet):
    """Experts that are modules of their own, alike in all but their bytes.

    The unit has the weights of the first expert, then those of the second, and so on.
    """

    def __init__(self, unit: Unit, module: nn.ModuleList) -> None:
        super().__init__(unit, module, len(module))
        self._each = len(unit.weights) // len(module)

    def weights_of(self, expert: int) -> Sequence[Weight]:
        """The weights of one of them."""
        return self.unit.weights[expert * self._each : (expert + 1) * self._each]

    def targets_of(self, hit: Sequence[int]) -> Sequence[Target]:
        return [target for target in self.unit.targets if target.weight // self._each in hit]

    def tensors_over(
        self, hit: Sequence[int], lay: Callable[[PartPlace, int | None], torch.Tensor]
    ) -> dict[int, list[torch.Tensor]]:
        return {
            expert * self._each + number: [lay(part, expert) for part in place.shown]
            for expert in hit
            for number, place in enumerate(self.weights)
        }

    def _of_one(self) -> list[tuple[Weight, tuple[WeightPart, ...]]]:
        return [(weight, weight.parts) for weight in self.unit.weights[: self._each]]

    def _all_shares(self) -> list[list[_Shares]]:
        shares = []
        for first in range(self._each):
            alike = [weight.parts for weight in self.unit.weights[first :: self._each]]
            shares.append(
                [
                    _Shares(
                        [list(part.extents) for part in parts],
                        tuple(total for part in parts for total in part.sums[:1]),
                    )
                    for parts in zip(*alike, strict=True)
                ]
            )
        return shares


class _Packed(NamedTuple):
    """Experts that lie in whole pages, each with its share of all weights side by side.

    Attributes:
        firsts: The file, and the first byte there, of each.
        nbytes: Bytes of each, up to the end of its last page.
        starts: The first byte of each part of each weight in an expert.
    """

    firsts: tuple[tuple[int, int], ...]
    nbytes: int
    starts: tuple[tuple[int, ...], ...]


def _side_by_side(
    shares: Sequence[Sequence[_Shares]], region: ExpertRegion | None, checkpoint: SafetensorsSet
) -> _Packed | None:
    """The layout of experts that are each one run of pages in their file; None if they are not.

    `region` has them all, where there is one.
    """
    firsts, found, nbytes = [], set(), 0
    flat = [part.extents for of_weight in shares for part in of_weight]
    for expert in range(len(flat[0])):
        own = [extents[expert] for extents in flat]
        if any(len(extents) != 1 for extents in own):
            return None
        placed = [extents[0] for extents in own]
        first = min(extent.offset for extent in placed)
        end = max(extent.offset + extent.nbytes for extent in placed)
        nbytes = read_to(end, checkpoint.files[placed[0].file].size()) - first
        if region is not None:
            first, nbytes = region.start + expert * region.nbytes, region.nbytes
        starts = tuple(extent.offset - first for extent in placed)
        found.add((starts, nbytes))
        firsts.append((placed[0].file, first))
        room = sum(round_up(extent.nbytes, TENSOR_ALIGNMENT) for extent in placed)
        aligned = first % PAGE_BYTES == 0 and not any(start % TENSOR_ALIGNMENT for start in starts)
        one_file = len({extent.file for extent in placed}) == 1
        dense = region is not None or nbytes <= round_up(room, PAGE_BYTES)
        if not (one_file and aligned and dense) or len(found) > 1:
            return None
    (starts, nbytes), *_ = found
    in_order = iter(starts)
    return _Packed(
        tuple(firsts),
        nbytes,
        tuple(tuple(itertools.islice(in_order, len(of_weight))) for of_weight in shares),
    )


def _joined_sum(parts: Sequence[tuple[int, int, tuple[int, ...]]], nbytes: int) -> int | None:
    """The checksum of bytes from those of their parts, with zeros between; None if one is missing.

    Each part is where it begins, its length and its checksum.
    """
    total, end = 0, 0
    for start, length, sums in sorted(parts):
        if not sums:
            return None
        total = crc32.combine(total, crc32.of_bytes(bytes(start - end)), start - end)
        total = crc32.combine(total, sums[0], length)
        end = start + length
    return crc32.combine(total, crc32.of_bytes(bytes(nbytes - end)), nbytes - end)


class _Room:
    """Bytes that are given out one behind the other."""

    def __init__(self) -> None:
        self.end = 0

    def take(self, nbytes: int, shift: int) -> int:
        start = round_up(self.end, TENSOR_ALIGNMENT) + shift
        self.end = start + nbytes
        return start


def shift_of(part: WeightPart) -> int:
    """The offset of a tensor, as mapped from its file, from an address that torch would give it.

    Matrix kernels give other last bits at other alignments.
    """
    if len(part.extents) != 1:
        return 0
    shift = part.extents[0].offset % TENSOR_ALIGNMENT
    return 0 if shift % part.dtype.itemsize else shift


class _Shares(NamedTuple):
    """For each expert, the extents of its share of a part, and its checksum where there is one."""

    extents: list[list[FileExtent]]
    sums: tuple[int, ...]


def _shares(part: WeightPart, number: int) -> _Shares:
    share = part.nbytes // number
    found: list[list[FileExtent]] = [[] for _ in range(number)]
    for file, offset, nbytes, at in part.extents:
        first = at
        while first < at + nbytes:
            expert = first // share
            last = min(at + nbytes, (expert + 1) * share)
            extent = FileExtent(file, offset + first - at, last - first, first - expert * share)
            found[expert].append(extent)
            first = last
    return _Shares(found, part.sums if len(part.sums) == number else ())


def _joined(reads: Sequence[Read]) -> tuple[Read, ...]:
    """Reads, joined where they follow each other in file and memory."""
    joined: list[Read] = []
    for read in reads:
        last = joined[-1] if joined else None
        follows = last is not None and (last.file, last.end) == (read.file, read.start)
        if last is not None and follows and last.at + last.nbytes == read.at:
            joined[-1] = last._replace(end=read.end)
        else:
            joined.append(read)
    return tuple(joined)


def find_sets(
    model: nn.Module, weights: dict[int, Weight], packing: bool = False
) -> list[ExpertSet]:
    """The sets of experts of a model, in the order of its tree.

    Args:
        model: Its weights on the meta device.
        weights: By the id of the meta tensor that each is shown as.
        packing: For experts that are to be written side by side, with all that they have, wherever
            that lies now.
    """
    users: dict[int, set[nn.Module]] = {}
    names = {module: name for name, module in model.named_modules()}
    for module in names:
        for parameter in module._parameters.values():
            if parameter is not None:
                users.setdefault(id(parameter), set()).add(module)
    found: list[ExpertSet] = []
    for module, name in names.items():
        if is_list_of_experts(module, name):
            modules = _modules_of(module, name, weights, users, packing)
            found += () if modules is None else (modules,)
            continue
        number = fused_experts(module)
        if not number:
            continue
        unit = Unit(name)
        for attribute, parameter in module._parameters.items():
            weight = weights.get(id(parameter))
            if weight is None or parameter is None or users[id(parameter)] != {module}:
                continue
            is_alike = weight.order is None and parameter.shape[:1] == (number,)
            if is_alike and _by_expert(weight, number) and (packing or _is_kept(weight, number)):
                unit.targets.append(Target(module, attribute, False, len(unit.weights), parameter))
                unit.weights.append(weight)
        large = sum(weight.nbytes for weight in unit.weights) >= LEAST_BYTES * number
        if large and len({id(target.empty) for target in unit.targets}) == len(unit.weights):
            found.append(ExpertSet(unit, module, number))
    return found


def _modules_of(
    module: nn.ModuleList,
    name: str,
    weights: dict[int, Weight],
    users: dict[int, set[nn.Module]],
    packing: bool,
) -> ExpertModules | None:
    """The set of a list of experts; None where they are not alike, or share something."""
    unit = Unit(name)
    kinds = set()
    for expert in module:
        kind: list[object] = [type(expert)]
        for part_name, part in expert.named_modules():
            for attribute, parameter in part._parameters.items():
                if parameter is None:
                    continue
                weight = weights.get(id(parameter))
                if weight is None or weight.order is not None or users[id(parameter)] != {part}:
                    return None
                stored = [(p.dtype, p.shape, len(p.extents), len(p.sums)) for p in weight.parts]
                shifts = [0 if packing else shift_of(p) for p in weight.parts]
                how = (weight.dtype, weight.shape, weight.quantised, weight.compute)
                kind.append((part_name, attribute, how, tuple(stored), tuple(shifts)))
                unit.targets.append(Target(part, attribute, False, len(unit.weights), parameter))
                unit.weights.append(weight)
            if any(id(buffer) in weights for buffer in part._buffers.values()):
                return None
        kinds.add(tuple(kind))
    alike = len(kinds) == 1 and len(module) > 1 and bool(unit.weights)
    if not alike or sum(w.nbytes for w in unit.weights) < LEAST_BYTES * len(module):
        return None
    return ExpertModules(unit, module)


def _by_expert(weight: Weight, number: int) -> bool:
    return all(part.shape[:1] == (number,) and part.extents for part in weight.parts)


def _is_kept(weight: Weight, number: int) -> bool:
    """Whether an expert's share comes with the expert: it is large, or lies beside what is."""
    packed = all(part.region is not None for part in weight.parts)
    return packed or weight.nbytes // number >= LEAST_BYTES

"""Where the parameters of a swapped module lie: in their own file, or elsewhere by now."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence

import torch

from nvmeio._files.plan import PAGE_BYTES
from nvmeio._io.drives import FileSpan, StripedFile
from nvmeio.offload._module.stages import ParamUnit
from nvmeio.offload._step.pipeline import Move
from nvmeio.offload._swap_files.extents import Extent, extents_of, file_tensor, moves_of, parts_of
from nvmeio.offload._swap_files.subgroups import SlotSpan
from nvmeio.offload._swap_files.tensors import like, local


class ParamPlaces:
    """Where parameters are.

    Args:
        unit_of: The unit of each parameter, by id.
        file: Has all units, each at its offset.
    """

    def __init__(self, unit_of: Mapping[int, ParamUnit], file: StripedFile) -> None:
        self._unit_of = unit_of
        self._file = file
        self._elsewhere: dict[int, Callable[[], Sequence[Extent]]] = {}

    def moves(self, unit: ParamUnit, writing: bool = False) -> list[Move]:
        """The transfers between the drive and a unit's memory.

        Reads go over small gaps, where another unit's parameter may lie. Writes do not.
        """
        if not any(id(p) in self._elsewhere for p in unit.parameters):
            return moves_of(self._file, unit.file_offset, 0, unit.nbytes)
        found: list[Move] = []
        for parameter, span in zip(unit.parameters, unit.spans, strict=True):
            size = span.dtype.itemsize
            for extent in self.where(parameter):
                nbytes = (extent.stop - extent.start) * size
                move = Move(
                    extent.file,
                    extent.file_offset,
                    span.offset + extent.start * size,
                    nbytes,
                )
                last = found[-1] if found else None
                if last is not None and _follows(last, move, 1 if writing else PAGE_BYTES):
                    found[-1] = last._replace(
                        nbytes=move.slot_offset + move.nbytes - last.slot_offset
                    )
                elif nbytes:
                    found.append(move)
        return found

    def where(self, parameter: torch.Tensor) -> Sequence[Extent]:
        """Where the parameter's elements are now; from any thread."""
        locate = self._elsewhere.get(id(parameter))
        if locate is not None:
            return locate()
        span = self.span_of(parameter)
        offset = self._unit_of[id(parameter)].file_offset + span.offset
        return extents_of(self._file, offset, 0, math.prod(span.shape), span.dtype.itemsize)

    def span_of(self, parameter: torch.Tensor) -> SlotSpan:
        """Where a parameter lies in its unit, and how."""
        unit = self._unit_of[id(parameter)]
        return next(
            span
            for each, span in zip(unit.parameters, unit.spans, strict=True)
            if each is parameter
        )

    def relocate(self, parameter: torch.Tensor, locate: Callable[[], Sequence[Extent]]) -> None:
        """From now on the parameter is read from where `locate` says, which waits for nobody."""
        self._elsewhere[id(parameter)] = locate
        if self._elsewhere.keys() >= self._unit_of.keys():
            for file in self._file.files:
                opened = file.acquire(True)
                try:
                    os.ftruncate(opened.any_fd(), 0)  # nobody reads it any more
                finally:
                    opened.release()

    def on_file(self, parameter: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        """The parameter over the file, unread, with the rows of others below its own."""
        size = parameter.dtype.itemsize
        spans = [
            FileSpan(file, offset, start * size, (stop - start) * size)
            for each in (parameter, *rest)
            for file, offset, start, stop in self.where(each)
        ]
        shape, strides = tuple(local(parameter).shape), self.span_of(parameter).strides
        if rest:
            shape = (sum(each.shape[0] for each in (parameter, *rest)), *shape[1:])
        return like(parameter, file_tensor(parts_of(spans), parameter.dtype, shape, strides))


def _follows(last: Move, move: Move, limit: int) -> bool:
    """Whether two moves are one: neighbours in file and memory, with the same gap below a limit."""
    gap = move.file_offset - (last.file_offset + last.nbytes)
    return (
        last.file is move.file
        and 0 <= gap < limit
        and move.slot_offset - (last.slot_offset + last.nbytes) == gap
    )

"""The plan of a step for each subgroup, made once for the pieces that have a gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from nvmeio._io.drives import FileSpan
from nvmeio.offload._generations.state_files import StateFiles
from nvmeio.offload._optimizer.params import SwappedParam
from nvmeio.offload._swap_files.subgroups import Piece, Subgroup

# Plans kept for each subgroup: from either place, with two sets of gradients.
_MOST = 4


class TurnPlan(NamedTuple):
    """A step of some pieces of a subgroup, from the places where they are to the others.

    Attributes:
        begun: True for the number of each piece.
        reads: The moves of state, and of weights that are stepped in the slot.
        writes: The moves of all that the step changes.
        verify: Compares with the checksums; None for nothing.
        stored: Whether the drive has the weights of all pieces of the subgroup.
        rounded: The pieces whose rounded weights go to a module's store.
    """

    subgroup: Subgroup
    pieces: Sequence[Piece]
    begun: dict[int, bool]
    reads: Sequence[FileSpan]
    writes: Sequence[FileSpan]
    verify: Callable[[torch.Tensor], None] | None
    stored: bool
    rounded: Sequence[Piece]


class TurnPlans:
    """Keeps the plans of the last steps.

    A plan follows from the layout of the files, which pieces are stepped, and from which of its
    two places each comes. Options, gradients on the drive, and where a module keeps its parameters
    are not in it: these may be others in each step.
    """

    def __init__(self, files: StateFiles, params: Sequence[SwappedParam]) -> None:
        """`params` are all of them, by number; others are added to it later."""
        self._files = files
        self._params = params
        self._layout = files.layout
        self._plans: dict[Subgroup, dict[tuple[tuple[int, int, bool], ...], TurnPlan]] = {}

    def plan(self, subgroup: Subgroup, pieces: Sequence[Piece]) -> TurnPlan:
        """The plan for pieces of a subgroup as they are now."""
        if self._layout != self._files.layout:
            self._plans.clear()
            self._layout = self._files.layout
        key = tuple([(piece.number, piece.current, piece.begun) for piece in pieces])
        plans = self._plans.setdefault(subgroup, {})
        if key not in plans:
            if len(plans) >= _MOST:
                del plans[next(iter(plans))]
            plans[key] = self._planned(subgroup, pieces)
        return plans[key]

    def _planned(self, subgroup: Subgroup, pieces: Sequence[Piece]) -> TurnPlan:
        files = self._files
        staged = [piece for piece in pieces if piece.staged]
        begun = [piece for piece in pieces if not piece.staged and piece.begun]
        reads: list[FileSpan] = []
        if staged:
            reads += files.reads(subgroup, staged, weights=True)
        if begun:
            reads += files.reads(subgroup, begun, weights=False)
        return TurnPlan(
            subgroup,
            pieces,
            dict.fromkeys([piece.number for piece in pieces], True),
            reads,
            files.writes(subgroup, pieces),
            files.verifying(staged, pieces),
            all(piece.stored for piece in subgroup.pieces),
            [piece for piece in pieces if self._params[piece.param].stores_rounded],
        )

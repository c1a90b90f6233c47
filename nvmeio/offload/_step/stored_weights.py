"""The weights on the drive, which undo a step and are what is resumed from."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from nvmeio.offload._optimizer.swapped import Swapped
from nvmeio.offload._step import piece_weights
from nvmeio.offload._step.pipeline import Move, SlotTurn
from nvmeio.offload._swap_files.subgroups import Piece, Subgroup


class StoredWeights:
    """Takes the weights of parameters to the drive, and gives them back.

    Args:
        swapped: The state that they are a part of.
    """

    def __init__(self, swapped: Swapped) -> None:
        self._swapped = swapped

    def take(
        self,
        subgroups: Sequence[Subgroup],
        groups: list[dict[str, Any]],
        check: Callable[[], None] | None = None,
    ) -> None:
        """Take parameters as they are now for the weights on the drive: a generation of its own.

        Args:
            subgroups: Those of the parameters.
            groups: The options of all parameter groups.
            check: Raises if nobody wants it any more.
        """
        swapped = self._swapped
        swapped.store.prepare()
        turns, moved = [], {}
        sums: dict[int, dict[str, int]] = {}

        def seal(pieces: Sequence[Piece], slot: torch.Tensor) -> None:
            for piece in pieces:
                sums.update(swapped.files.sum_up(slot, [piece], piece.begun))

        for subgroup in subgroups:
            pieces = [p for p in subgroup.pieces if p.stored and self._can_differ(p)]
            reads = swapped.param_reads(pieces, subgroup)
            compute = functools.partial(self._take, subgroup, pieces)
            if subgroup.resident:
                memory = swapped.resident[id(subgroup)]
                swapped.read_now(memory, reads)
                compute(memory)
                continue
            begun = [piece for piece in pieces if piece.begun]
            reads += swapped.files.reads(subgroup, begun, weights=False)
            verify = swapped.files.verifying([], begun)
            turns.append(SlotTurn(reads, compute, verify, functools.partial(seal, pieces)))
            moved.update({piece.number: piece.begun for piece in pieces})
        swapped.pipeline.run(turns, check)
        swapped.store.commit(set(moved), moved, {}, groups, sums)

    def _can_differ(self, piece: Piece) -> bool:
        """Whether the parameter can differ from the drive: one that lives there does not."""
        param = self._swapped.param_of(piece)
        at_first = not self._swapped.store.generation
        return param.param_store is None or param.stores_rounded or at_first

    def _take(self, subgroup: Subgroup, pieces: Sequence[Piece], slot: torch.Tensor) -> list[Move]:
        for piece in pieces:
            piece_weights.weights_in(subgroup, piece, self._swapped.param_of(piece), slot)
        old = [piece for piece in pieces if piece.begun]
        new = [piece for piece in pieces if not piece.begun]
        files = self._swapped.files
        return files.writes(subgroup, old) + files.writes(subgroup, new, False)

    def give_back(self, subgroups: Sequence[Subgroup]) -> None:
        """Bring the weights of the last complete step back into the parameters."""
        files, turns = self._swapped.files, []
        for subgroup in subgroups:
            if not subgroup.resident:
                pieces = [piece for piece in subgroup.pieces if piece.stored]
                compute = functools.partial(self._give_back, subgroup, pieces)
                verify = files.verifying(pieces, [])
                turns.append(SlotTurn(files.weights(subgroup, pieces), compute, verify))
        self._swapped.pipeline.run(turns)

    def _give_back(
        self, subgroup: Subgroup, pieces: Sequence[Piece], slot: torch.Tensor
    ) -> list[Move]:
        for piece in pieces:
            piece_weights.weights_out(subgroup, piece, self._swapped.param_of(piece), slot)
        return self._swapped.param_writes(subgroup, pieces)

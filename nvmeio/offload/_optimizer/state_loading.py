"""A state dict on its way to the drive, subgroup by subgroup."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from nvmeio.offload._optimizer.swapped import Swapped
from nvmeio.offload._step import piece_weights
from nvmeio.offload._step.pipeline import Move, SlotTurn
from nvmeio.offload._swap_files.subgroups import WEIGHTS, Piece, Subgroup
from nvmeio.offload._swap_files.tensors import local, part, strides_of, view

MASTER = "master"


class StateLoad:
    """Takes over states by parameter number; None for one without.

    Args:
        swapped: The optimizer's state.
        states: As a state dict has them.

    Attributes:
        turns: For the pipeline.
        moved: The numbers of the pieces that are written to their other place.
        small: The state outside of the files, by piece number.
        begun: Whether the state of a piece exists, by its number.
        sums: The checksums of the pieces, by number.
        strides: Of their state, by number and name.
    """

    def __init__(self, swapped: Swapped, states: Mapping[int, dict[str, Any] | None]) -> None:
        self._swapped = swapped
        self._states = states
        self.turns: list[SlotTurn] = []
        self.moved: set[int] = set()
        self.small: dict[int, dict[str, Any]] = {}
        self.begun: dict[int, bool] = {}
        self.sums: dict[int, dict[str, int]] = {}
        self.strides: dict[int, dict[str, tuple[int, ...]]] = {}
        self._resident: list[Subgroup] = []
        for subgroup in swapped.subgroups:
            if subgroup.resident:
                self._resident.append(subgroup)
                continue
            in_stores = [p for p in subgroup.pieces if swapped.param_of(p).param_store is not None]
            reads = swapped.files.weights(subgroup, in_stores)
            self.turns.append(
                SlotTurn(
                    reads,
                    functools.partial(self._take_over, subgroup),
                    swapped.files.verifying(in_stores, []),
                    functools.partial(self._seal, subgroup),
                )
            )
            self.moved.update(piece.number for piece in subgroup.pieces if piece.spans)

    @property
    def has_masters(self) -> bool:
        """Whether there are master weights, which the parameters have to follow."""
        return any(entry and MASTER in entry for entry in self._states.values())

    def load_resident(self) -> None:
        """Take over what stays in memory."""
        for subgroup in self._resident:
            self._take_over(subgroup, self._swapped.resident[id(subgroup)])

    def follow_resident_masters(self) -> None:
        """Bring the master weights that stay in memory into their parameters."""
        for subgroup in self._resident:
            slot = self._swapped.resident[id(subgroup)]
            stored = [piece for piece in subgroup.pieces if piece.stored]
            for piece in stored:
                piece_weights.weights_out(subgroup, piece, self._swapped.param_of(piece), slot)
            self._swapped.write_now(slot, self._swapped.param_writes(subgroup, stored))

    def _take_over(self, subgroup: Subgroup, slot: torch.Tensor) -> list[Move]:
        for piece in subgroup.pieces:
            entry = self._states.get(piece.param)
            if piece.stored:
                self._take_weights(subgroup, piece, entry, slot)
            self.begun[piece.number] = bool(entry)
            self.small[piece.number] = self._take_state(piece, entry, slot) if entry else {}
        # Both sorts move, or a piece without state would be left behind by its weights.
        old = [p for p in subgroup.pieces if self.begun[p.number]]
        new = [p for p in subgroup.pieces if not self.begun[p.number]]
        files = self._swapped.files
        return files.writes(subgroup, old) + files.writes(subgroup, new, False)

    def _seal(self, subgroup: Subgroup, slot: torch.Tensor) -> None:
        for piece in subgroup.pieces:
            begun = self.begun[piece.number]
            self.sums.update(self._swapped.files.sum_up(slot, [piece], begun))

    def _take_weights(
        self, subgroup: Subgroup, piece: Piece, entry: dict[str, Any] | None, slot: torch.Tensor
    ) -> None:
        param = self._swapped.param_of(piece)
        if entry and MASTER in entry:
            given = part(local(entry[MASTER]), piece.start, piece.stop, piece.shape)
            view(slot, piece.spans[WEIGHTS]).copy_(given)
        elif param.param_store is None:
            piece_weights.weights_in(subgroup, piece, param, slot)

    def _take_state(
        self, piece: Piece, entry: dict[str, Any], slot: torch.Tensor
    ) -> dict[str, Any]:
        """Copy what is swapped into the slot; what is not."""
        small: dict[str, Any] = {}
        strides = self.strides[piece.number] = {}
        for name, value in entry.items():
            if name in piece.spans:
                kind = next(kind for kind in piece.kinds if kind.name == name)
                given = local(value)
                if kind.shape is None:
                    given = part(given, piece.start, piece.stop, piece.shape)
                strides[name] = strides_of(given)
                span = piece.spans[name]._replace(strides=strides[name])
                view(slot, span).copy_(given)
            elif name != MASTER:
                small[name] = value.detach().clone() if isinstance(value, torch.Tensor) else value
        return small

"""What belongs to one swapped optimizer: its parameters, their subgroups, files and buffers."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from nvmeio._io.drives import DriveHandles
from nvmeio.offload._generations.state_files import StateFiles
from nvmeio.offload._generations.state_store import StateStore
from nvmeio.offload._module.param_store import ParamStore
from nvmeio.offload._optimizer.params import SwappedParam
from nvmeio.offload._step.device_turns import DeviceTurns
from nvmeio.offload._step.piece_weights import param_moves
from nvmeio.offload._step.pipeline import Move, Pipeline, SlotTurn, Times, move_all
from nvmeio.offload._swap_files.subgroups import Piece, Subgroup
from nvmeio.offload.gradients import GradientSwapper
from nvmeio.pool import PinnedPool

logger = logging.getLogger("nvmeio")


class Buffers:
    """The slots that subgroups pass through, and the pipeline over them.

    Args:
        handles: Move the bytes.
        read_ahead: Read the next subgroup while one is computed.
        write_behind: Write the last subgroup while one is computed.
        device: Where they are computed, with a buffer more on the way there and back; None for the
            CPU.

    Attributes:
        slots: The buffers.
        read_bytes: Since this was made.
        written_bytes: Since this was made.
    """

    def __init__(
        self,
        handles: DriveHandles,
        read_ahead: bool,
        write_behind: bool,
        device: DeviceTurns | None = None,
    ) -> None:
        self.slots: list[torch.Tensor] = []
        self.read_bytes = 0
        self.written_bytes = 0
        self._handles = handles
        self._read_ahead = read_ahead
        self._write_behind = write_behind
        self._on_device = device
        self._pool: PinnedPool | None = None
        self._leases = contextlib.ExitStack()

    def make(self, nbytes: int, most: int) -> None:
        """Have a buffer for each stage of the pipeline; those there are stay if long enough.

        Args:
            nbytes: The length of each.
            most: How many are of use.
        """
        stages = 1 + self._read_ahead + self._write_behind + (self._on_device is not None)
        count = min(stages, max(1, most))
        if not nbytes or (len(self.slots) >= count and self.slots[0].nbytes >= nbytes):
            return
        self.free()
        self._pool = PinnedPool(count * nbytes)
        for _ in range(count):
            self.slots.append(self._leases.enter_context(self._pool.take(nbytes)))

    def free(self) -> None:
        """Give the memory back."""
        self.slots = []
        self._leases.close()
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    def run(
        self,
        turns: Sequence[SlotTurn],
        check: Callable[[], None] | None = None,
        device: DeviceTurns | None = None,
    ) -> Times:
        """Take turns in a pipeline, on a device if they compute there; see `Pipeline.run`."""
        if not turns:
            return Times()
        ahead, behind = self._read_ahead, self._write_behind
        pipeline = Pipeline(self._handles, self.slots, ahead, behind, device)
        times = pipeline.run(turns, check)
        self.read_bytes += times.read_bytes
        self.written_bytes += times.written_bytes
        return times

    @property
    def pinned(self) -> bool:
        """Whether the buffers are page-locked, or there are none."""
        return self._pool is None or self._pool.locked


@dataclass(eq=False)
class Swapped:
    """The state of one optimizer, where it is and what it passes through.

    Attributes:
        handles: Move the bytes.
        store: The generations, and their files.
        buffers: The slots.
        gradients: Has the gradients, where those are on the drive.
        params: The parameters, by number.
        subgroups: In the order of the parameters.
        resident: By id of a subgroup: its memory, where it stays there (`ratio`).
        device: Computes the steps; None for the CPU.
    """

    handles: DriveHandles
    store: StateStore
    buffers: Buffers
    gradients: GradientSwapper | None = None
    params: list[SwappedParam] = field(default_factory=list)
    subgroups: list[Subgroup] = field(default_factory=list)
    resident: dict[int, torch.Tensor] = field(default_factory=dict)
    device: DeviceTurns | None = None

    @property
    def files(self) -> StateFiles:
        """Where the pieces lie, and what moves them."""
        return self.store.files

    @property
    def with_grads(self) -> bool:
        """Whether a buffer has room for gradients: of the drive, or rounded weights to it."""
        return self.gradients is not None or any(param.stores_rounded for param in self.params)

    def make_buffers(self) -> None:
        """Have buffers for the largest subgroup; a line in the log where they hold all of it."""
        swapped = [each for each in self.subgroups if not each.resident]
        need = max((each.slot_nbytes(self.with_grads) for each in swapped), default=0)
        self.buffers.make(need, len(swapped))
        if self.device is not None:
            there = [each.slot_nbytes(self.with_grads) for each in self.subgroups]
            self.device.make(max(there, default=0), len(there))
        if swapped and len(swapped) <= len(self.buffers.slots):
            logger.info(
                "the state on the drive is %.1f MB, and the buffers it passes through %.1f MB: "
                "without swapping it would need no more memory; a smaller subgroup_bytes makes the "
                "buffers smaller",
                sum(each.slot_nbytes(self.with_grads) for each in swapped) / 1e6,
                sum(slot.nbytes for slot in self.buffers.slots) / 1e6,
            )

    def param_of(self, piece: Piece) -> SwappedParam:
        """The parameter that a piece is of."""
        return self.params[piece.param]

    def evict_params(self) -> None:
        """What is in memory of parameters that live on the drive is of the past."""
        for store, _ in self._param_stores():
            store.evict()

    def make_way(self) -> None:
        """What is in memory of parameters that live on the drive is about to be of the past.

        Raises:
            RuntimeError: A block of `SwappedModule.gather` would write them back.
        """
        for store, parameters in self._param_stores():
            store.make_way(parameters)

    def _param_stores(self) -> list[tuple[ParamStore, list[torch.Tensor]]]:
        found: dict[int, tuple[ParamStore, list[torch.Tensor]]] = {}
        for param in self.params:
            if param.param_store is not None:
                found.setdefault(id(param.param_store), (param.param_store, []))[1].append(
                    param.parameter
                )
        return list(found.values())

    def param_reads(self, pieces: Iterable[Piece], subgroup: Subgroup) -> list[Move]:
        """The moves that bring the weights of parameters that live on the drive."""
        return [m for p in pieces for m in param_moves(subgroup, p, self.param_of(p))]

    def param_writes(self, subgroup: Subgroup, pieces: Iterable[Piece]) -> list[Move]:
        """The moves that take rounded weights to parameters that live on the drive."""
        return self.param_reads((p for p in pieces if self.param_of(p).stores_rounded), subgroup)

    def read_now(self, slot: torch.Tensor, moves: Sequence[Move]) -> None:
        """Outside of the pipeline; awaited."""
        move_all(self.handles, slot, moves, writing=False)

    def write_now(self, slot: torch.Tensor, moves: Sequence[Move]) -> None:
        """Outside of the pipeline; awaited."""
        move_all(self.handles, slot, moves, writing=True)

"""What moves an optimizer's state: jobs for the pipeline, and how a failed step is undone."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from nvmeio._io.handles import new_handle
from nvmeio.buffers import empty_aligned
from nvmeio.handle import AioHandle
from nvmeio.offload import _weights
from nvmeio.offload._homes import Extent
from nvmeio.offload._layout import WEIGHTS, Piece, Subgroup
from nvmeio.offload._manifest import Manifest
from nvmeio.offload._owners import Owner
from nvmeio.offload._pipeline import Job, Move, Pipeline, Times, move_all
from nvmeio.offload._plan import MemoryPlan, plan_of
from nvmeio.offload._ranks import DurableSteps
from nvmeio.offload._stepping import Stepper, Work
from nvmeio.offload._store import Store
from nvmeio.offload._swap_dir import SwapDir
from nvmeio.offload._tensors import local, part, view
from nvmeio.offload.gradients import GradientSwapper
from nvmeio.pool import PinnedPool

Groups = Callable[[], list[dict[str, Any]]]


class Engine:
    """The state of one optimizer, and the buffers it passes through.

    Args:
        directory: Locked by this process.
        handle: Moves the bytes and stays open; None makes one.
        stepper: Does the arithmetic.
        durable: As for `SwappedOptimizer`, like the next two.
        read_ahead: Read the next subgroup during a step.
        write_behind: Write the last subgroup during a step.

    Attributes:
        store: The files.
        swapper: Has the gradients, where those are on the drive.
        broken: Why no further step can be made, or "".
        closed: `close` was called.
        read_bytes: Since this was made.
        written_bytes: Since this was made, gradients not counted.
    """

    def __init__(
        self,
        directory: SwapDir,
        handle: AioHandle | None,
        stepper: Stepper,
        durable: bool,
        read_ahead: bool,
        write_behind: bool,
    ) -> None:
        self.directory = directory
        self._own_handle = handle is None
        self.handle = new_handle(directory.path) if handle is None else handle
        ranks = DurableSteps.of_default_group(directory.path) if durable else None
        self.store = Store(directory, self.handle, durable, ranks)
        self.swapper: GradientSwapper | None = None
        self.broken = ""
        self.closed = False
        self._stepper = stepper
        self._read_ahead = read_ahead
        self._write_behind = write_behind
        self._owners: list[Owner] = []
        self._subgroups: list[Subgroup] = []
        self._resident: dict[int, torch.Tensor] = {}  # by id of the subgroup
        self._pool: PinnedPool | None = None
        self._slots: list[torch.Tensor] = []
        self._leases: list[Any] = []
        self._moved_bytes = Times()

    # Making

    def add(self, owners: Sequence[Owner], subgroups: Sequence[Subgroup]) -> None:
        """Take parameters on: places in the files, and buffers that are large enough."""
        self.store.place(subgroups)
        self._owners += owners
        self._subgroups += subgroups
        for subgroup in subgroups:
            if subgroup.resident:
                nbytes = max(1, subgroup.slot_nbytes(self._with_grads))
                self._resident[id(subgroup)] = empty_aligned(nbytes, dtype=torch.uint8)

    @torch.no_grad()
    def begin(self, resume: bool, groups: Groups) -> Manifest | None:
        """Open the files; bring weights there, or, where there is something to resume, back.

        Returns:
            What was resumed; None where this is the beginning.
        """
        manifest = self.store.resume() if resume else None
        self.store.open()
        self._make_slots()
        if manifest is None:
            self.store_weights(groups)
        else:
            self._evict_homes()
            self._restore(self._subgroups)
        self._relocate(self._owners)
        return manifest

    @torch.no_grad()
    def extend(
        self, owners: Sequence[Owner], subgroups: Sequence[Subgroup], groups: Groups
    ) -> None:
        """Take further parameters on."""
        self.store.settle()
        before = len(self._owners), len(self._subgroups), self.store.nbytes
        try:
            self.add(owners, subgroups)
            self.store.open()
            self._make_slots()
            self._store_weights(subgroups, groups)
        except BaseException as failed:
            del self._owners[before[0] :], self._subgroups[before[1] :]
            for subgroup in subgroups:
                self._resident.pop(id(subgroup), None)
            self.store.forget(subgroups, before[2])
            try:
                self._make_slots()  # none are left if there was no memory for larger ones
            except BaseException as again:
                self.broken = f"adding a group failed ({failed}), and then its buffers: {again}"
            raise
        self._relocate(owners)

    def _relocate(self, owners: Sequence[Owner]) -> None:
        for owner in owners:
            if owner.home is not None and not owner.casts_home:
                locate = functools.partial(_extents, self.store, owner.pieces)
                owner.home.relocate(owner.parameter, locate)

    @property
    def _with_grads(self) -> bool:
        """Whether a buffer has room for gradients: of the drive, or rounded weights to it."""
        return self.swapper is not None or any(owner.casts_home for owner in self._owners)

    def _make_slots(self) -> None:
        """Buffers for the largest subgroup; those there are stay where they are long enough."""
        swapped = [s for s in self._subgroups if not s.resident]
        need = max((s.slot_nbytes(self._with_grads) for s in swapped), default=0)
        count = min(1 + self._read_ahead + self._write_behind, max(1, len(swapped)))
        if not need or (len(self._slots) >= count and self._slots[0].nbytes >= need):
            return
        self._free_slots()
        self._pool = PinnedPool(count * need)
        for _ in range(count):
            lease = self._pool.take(need)
            self._slots.append(lease.__enter__())
            self._leases.append(lease)

    def _free_slots(self) -> None:
        self._slots = []
        for lease in self._leases:
            lease.__exit__(None, None, None)
        self._leases = []
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    # The step

    @torch.no_grad()
    def step(
        self, groups: list[dict[str, Any]], factor: torch.Tensor | None, saved: Groups
    ) -> Times:
        """Step every parameter that has a gradient.

        Args:
            groups: The parameter groups.
            factor: What gradients on the drive are multiplied with, or None.
            saved: What the manifest keeps of the groups.

        Raises: As `SwappedOptimizer.step`.
        """
        for owner in self._owners:
            owner.check_unchanged()
        swapper = self.swapper
        if swapper is not None:
            swapper.flush()
        self._evict_homes()
        small: dict[int, dict[str, Any]] = {}
        moved: dict[int, bool] = {}
        touched: list[Subgroup] = []
        jobs: list[Job] = []
        later: list[tuple[Subgroup, list[Piece]]] = []
        for subgroup in self._subgroups:
            pieces = [p for p in subgroup.pieces if self._has_gradient(self._owners[p.owner])]
            if not pieces:
                continue
            if subgroup.resident:
                later.append((subgroup, pieces))
                continue

            def compute(
                slot: torch.Tensor, subgroup: Subgroup = subgroup, pieces: list[Piece] = pieces
            ) -> list[Move]:
                touched.append(subgroup)
                small.update(self._compute(subgroup, pieces, slot, groups, factor))
                return self.store.writes(subgroup, pieces) + self._home_writes(subgroup, pieces)

            jobs.append(Job(self._step_reads(subgroup, pieces), compute))
            moved.update({piece.number: True for piece in pieces})
        if not jobs and not later and not self.store.lockstep:
            return Times()
        self.store.prepare()
        in_memory = False
        try:
            times = self._run(jobs)
            # What stays in memory cannot be undone, and cannot fail: it is stepped last.
            for subgroup, pieces in later:
                slot = self._resident[id(subgroup)]
                self._read_gradients(subgroup, pieces, slot)
                in_memory = True
                small.update(self._compute(subgroup, pieces, slot, groups, factor))
                self._write_homes(subgroup, pieces, slot)
            began = {p.number: True for _, pieces in later for p in pieces}
            self.store.commit(set(moved), moved | began, small, saved())
        except BaseException as failed:
            self._undo(touched, in_memory, failed)
            raise
        self._tell_changed([*touched, *(subgroup for subgroup, _ in later)])
        return times

    def _tell_changed(self, subgroups: Sequence[Subgroup]) -> None:
        """Count a change of the parameters that changed on the drive only; backward looks at it."""
        for number in {piece.owner for subgroup in subgroups for piece in subgroup.pieces}:
            owner = self._owners[number]
            if owner.home is not None and self._has_gradient(owner):
                torch.autograd.graph.increment_version(owner.parameter)

    def _evict_homes(self) -> None:
        """What is in memory of parameters that live on the drive is about to be of the past."""
        for home in {id(o.home): o.home for o in self._owners if o.home is not None}.values():
            home.evict()

    def _step_reads(self, subgroup: Subgroup, pieces: list[Piece]) -> list[Move]:
        """State, weights where the step works on them, gradients where they are on the drive."""
        staged = [piece for piece in pieces if piece.staged]
        plain = [piece for piece in pieces if not piece.staged]
        reads: list[Move] = []
        if staged:
            reads += self.store.reads(subgroup, staged, weights=True)
        if plain:
            reads += self.store.reads(subgroup, [p for p in plain if p.begun], weights=False)
        if self.swapper is not None:
            base = subgroup.nbytes + subgroup.scratch_nbytes
            reads += self.swapper.reads(subgroup, pieces, base)
        return reads

    def _has_gradient(self, owner: Owner) -> bool:
        if self.swapper is not None:
            if self.swapper.has(owner.number):
                return True
            if self.swapper.stands_in(owner):
                return False
        return owner.parameter.grad is not None

    def _compute(
        self,
        subgroup: Subgroup,
        pieces: Sequence[Piece],
        slot: torch.Tensor,
        groups: Sequence[dict[str, Any]],
        factor: torch.Tensor | None,
    ) -> dict[int, dict[str, Any]]:
        """Step some pieces of a subgroup in a slot; their state outside of it."""
        works = []
        for piece in pieces:
            owner = self._owners[piece.owner]
            weights = (
                view(slot, piece.spans[WEIGHTS])
                if piece.staged
                else part(local(owner.parameter), piece.start, piece.stop, piece.shape)
            )
            stepped = torch.nn.Parameter(weights)
            stepped.grad = self._gradient(subgroup, piece, owner, slot, factor)
            works.append(Work(piece, owner.group, stepped, slot))
        small = self._stepper.step(works, groups, self.store.small)
        for work in works:
            owner = self._owners[work.piece.owner]
            if work.piece.staged:
                _weights.weights_out(subgroup, work.piece, owner, slot)
            elif work.piece.stored:
                view(slot, work.piece.spans[WEIGHTS]).copy_(work.weights.detach())
        return small

    def _gradient(
        self,
        subgroup: Subgroup,
        piece: Piece,
        owner: Owner,
        slot: torch.Tensor,
        factor: torch.Tensor | None,
    ) -> torch.Tensor:
        """The piece's gradient, in the dtype of the step."""
        base = subgroup.nbytes + subgroup.scratch_nbytes
        if self.swapper is not None and self.swapper.has(owner.number) and piece.grad is not None:
            gradient = view(slot, piece.grad, base)
            if factor is not None:
                gradient.mul_(factor)
        else:
            given = owner.parameter.grad
            if given is None:
                raise RuntimeError(f"the gradient of parameter {owner.number} has gone")
            if given.layout is not torch.strided:
                raise TypeError(
                    f"parameter {owner.number} has a {given.layout} gradient: only dense ones "
                    "can be stepped (an embedding wants sparse=False)"
                )
            gradient = part(local(given), piece.start, piece.stop, piece.shape)
            if factor is not None:
                gradient = gradient * factor
        if gradient.dtype == piece.step_dtype and gradient.device.type == "cpu":
            return gradient
        if piece.scratch is None:
            return gradient.to("cpu", piece.step_dtype)
        wide = view(slot, piece.scratch, subgroup.nbytes)
        wide.copy_(gradient)
        return wide

    # Weights

    def _home_writes(self, subgroup: Subgroup, pieces: Sequence[Piece]) -> list[Move]:
        return [
            move
            for piece in pieces
            if self._owners[piece.owner].casts_home
            for move in _weights.home_moves(subgroup, piece, self._owners[piece.owner])
        ]

    @torch.no_grad()
    def store_weights(self, groups: Groups) -> None:
        """Take the parameters as they are now for the weights on the drive."""
        self._store_weights(self._subgroups, groups)

    def _store_weights(self, subgroups: Sequence[Subgroup], groups: Groups) -> None:
        self.store.prepare()
        jobs, moved = [], {}
        for subgroup in subgroups:
            pieces = [p for p in subgroup.pieces if p.stored and self._reads_weights(p)]

            def compute(
                slot: torch.Tensor, subgroup: Subgroup = subgroup, pieces: list[Piece] = pieces
            ) -> list[Move]:
                for piece in pieces:
                    _weights.weights_in(subgroup, piece, self._owners[piece.owner], slot)
                old = [piece for piece in pieces if piece.begun]
                new = [piece for piece in pieces if not piece.begun]
                return self.store.writes(subgroup, old) + self.store.writes(subgroup, new, False)

            reads = [
                move
                for piece in pieces
                for move in _weights.home_moves(subgroup, piece, self._owners[piece.owner])
            ]
            if subgroup.resident:
                self._move_now(self._resident[id(subgroup)], reads)
                compute(self._resident[id(subgroup)])
                continue
            reads += self.store.reads(subgroup, [p for p in pieces if p.begun], weights=False)
            jobs.append(Job(reads, compute))
            moved.update({piece.number: piece.begun for piece in pieces})
        self._run(jobs)
        self.store.commit(set(moved), moved, {}, groups())

    def _reads_weights(self, piece: Piece) -> bool:
        """Whether the parameter can differ from the drive: one that lives there does not."""
        owner = self._owners[piece.owner]
        return owner.home is None or owner.casts_home or not self.store.generation

    def _restore(self, subgroups: Sequence[Subgroup]) -> None:
        """Bring the weights of the last complete step back into the parameters."""
        jobs = []
        for subgroup in subgroups:
            pieces = [piece for piece in subgroup.pieces if piece.stored]

            def compute(
                slot: torch.Tensor, subgroup: Subgroup = subgroup, pieces: list[Piece] = pieces
            ) -> list[Move]:
                for piece in pieces:
                    _weights.weights_out(subgroup, piece, self._owners[piece.owner], slot)
                return self._home_writes(subgroup, pieces)

            if not subgroup.resident:
                jobs.append(Job(self.store.weights(subgroup, pieces), compute))
        self._run(jobs)

    def _undo(
        self,
        touched: Sequence[Subgroup],
        in_memory: bool,
        failed: BaseException,
    ) -> None:
        """After a failed step: the drive has the last one; memory gets it back from there."""
        lost = [p for s in touched for p in s.pieces if not p.stored]
        why = "the weights have no copy on the drive (recoverable=False)" if lost else ""
        if in_memory:
            why = "the part of the state that is in memory (ratio) was stepped already"
        if not why:
            try:
                self._restore(touched)
                return
            except BaseException as again:
                why = f"bringing back the weights failed: {again}"
        self.broken = (
            f"a step failed and could not be undone: {why}. Weights in memory are partly stepped; "
            f"load a checkpoint, or resume from {self.directory.path}. The step failed with: "
            f"{failed}"
        )

    # Loading

    @torch.no_grad()
    def load(self, states: dict[int, dict[str, Any] | None], groups: Groups) -> None:
        """Take over states by parameter number; None for one without."""
        self.store.prepare()
        small: dict[int, dict[str, Any]] = {}
        begun: dict[int, bool] = {}
        moved: set[int] = set()
        jobs = []
        later = []
        for subgroup in self._subgroups:

            def compute(slot: torch.Tensor, subgroup: Subgroup = subgroup) -> list[Move]:
                return self._load_subgroup(subgroup, slot, states, small, begun)

            if subgroup.resident:
                later.append((subgroup, compute))
                continue
            reads = self.store.weights(
                subgroup, [p for p in subgroup.pieces if self._owners[p.owner].home is not None]
            )
            jobs.append(Job(reads, compute))
            moved.update(p.number for p in subgroup.pieces if p.spans)
        self._evict_homes()
        self._run(jobs)
        for subgroup, compute in later:
            compute(self._resident[id(subgroup)])
        self.store.commit(moved, begun, small, groups())
        if any(entry and "master" in entry for entry in states.values()):
            try:
                self._restore(self._subgroups)
                for subgroup, _ in later:
                    slot = self._resident[id(subgroup)]
                    stored = [piece for piece in subgroup.pieces if piece.stored]
                    for piece in stored:
                        _weights.weights_out(subgroup, piece, self._owners[piece.owner], slot)
                    self._write_homes(subgroup, stored, slot)
            except BaseException as failed:
                self.broken = (
                    "a state dict was loaded, and its master weights could not be brought into "
                    f"the parameters, which are partly those of before: {failed}. Make the "
                    "optimizer anew, and load again"
                )
                raise

    def _load_subgroup(
        self,
        subgroup: Subgroup,
        slot: torch.Tensor,
        states: dict[int, dict[str, Any] | None],
        small: dict[int, dict[str, Any]],
        begun: dict[int, bool],
    ) -> list[Move]:
        for piece in subgroup.pieces:
            owner = self._owners[piece.owner]
            entry = states.get(piece.owner)
            if piece.stored:
                weights = view(slot, piece.spans[WEIGHTS])
                if entry and "master" in entry:
                    given = local(entry["master"])
                    weights.copy_(part(given, piece.start, piece.stop, piece.shape))
                elif owner.home is None:
                    _weights.weights_in(subgroup, piece, owner, slot)
            begun[piece.number] = bool(entry)
            small[piece.number] = {}
            if not entry:
                continue
            for name, value in entry.items():
                if name in piece.spans:
                    kind = next(k for k in piece.kinds if k.name == name)
                    given = local(value)
                    if kind.shape is None:
                        given = part(given, piece.start, piece.stop, piece.shape)
                    view(slot, piece.spans[name]).copy_(given)
                elif name != "master":
                    kept = value.detach().clone() if isinstance(value, torch.Tensor) else value
                    small[piece.number][name] = kept
        # Both sorts move, or a piece without state would be left behind by its weights.
        old = [p for p in subgroup.pieces if begun[p.number]]
        new = [p for p in subgroup.pieces if not begun[p.number]]
        return self.store.writes(subgroup, old) + self.store.writes(subgroup, new, False)

    # Small steps

    def _run(self, jobs: Sequence[Job]) -> Times:
        if not jobs:
            return Times()
        pipeline = Pipeline(self.handle, self._slots, self._read_ahead, self._write_behind)
        times = pipeline.run(jobs)
        self._moved_bytes.read_bytes += times.read_bytes
        self._moved_bytes.written_bytes += times.written_bytes
        return times

    def _move_now(self, slot: torch.Tensor, moves: Sequence[Move], writing: bool = False) -> None:
        """Outside of the pipeline; awaited."""
        move_all(self.handle, slot, moves, writing)

    def _read_gradients(
        self, subgroup: Subgroup, pieces: Sequence[Piece], slot: torch.Tensor
    ) -> None:
        if self.swapper is not None:
            base = subgroup.nbytes + subgroup.scratch_nbytes
            self._move_now(slot, self.swapper.reads(subgroup, pieces, base))

    def _write_homes(self, subgroup: Subgroup, pieces: Sequence[Piece], slot: torch.Tensor) -> None:
        self._move_now(slot, self._home_writes(subgroup, pieces), writing=True)

    def snapshot(self, directory: str | os.PathLike[str]) -> None:
        """See `SwappedOptimizer.snapshot`."""
        if self._resident:
            raise ValueError(
                "with ratio below 1 a part of the state is in memory: use state_dict()"
            )
        self.store.snapshot(directory)

    def resident_view(self, piece: Piece, name: str) -> torch.Tensor | None:
        """A piece's state where it is in memory; None where it is on the drive."""
        memory = self._resident.get(id(self.store.subgroup_of(piece)))
        return None if memory is None else view(memory, piece.spans[name])

    def memory_plan(self) -> MemoryPlan:
        """See `SwappedOptimizer.plan`."""
        return plan_of(
            self._owners,
            self._subgroups,
            self._slots,
            self.swapper.file_bytes if self.swapper else 0,
            sum(memory.nbytes for memory in self._resident.values())
            + (self.swapper.memory_bytes if self.swapper else 0),
        )

    @property
    def pinned(self) -> bool:
        """Whether the buffers are page-locked, or there are none."""
        return self._pool is None or self._pool.locked

    @property
    def read_bytes(self) -> int:
        """Read from the drive since this was made, gradients included."""
        grads = 0 if self.swapper is None else self.swapper.read_bytes
        return self._moved_bytes.read_bytes + grads

    @property
    def written_bytes(self) -> int:
        """Written to the drive since this was made, gradients included."""
        grads = 0 if self.swapper is None else self.swapper.written_bytes
        return self._moved_bytes.written_bytes + grads

    def close(self) -> None:
        """Wait for what is being made durable; give back files, memory and handle."""
        self.closed = True
        try:
            self.store.close()
        finally:
            self._free_slots()
            self._resident.clear()
            if self._own_handle:
                self.handle.close()


def _extents(store: Store, pieces: Sequence[Piece]) -> list[Extent]:
    return [store.extent(piece) for piece in pieces]

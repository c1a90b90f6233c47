"""The swapper opens an optimizer's state, and moves it between drive, memory and parameters."""

from __future__ import annotations

import errno
import functools
import hashlib
import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from nvmeio._checks import Paths
from nvmeio._distributed.rank_store import several
from nvmeio._io.drives import DriveHandles, FileSpan
from nvmeio._memory import page_locked
from nvmeio._threads.closing import do_all, on_error
from nvmeio._threads.shutdown import Ending
from nvmeio.buffers import empty_aligned
from nvmeio.errors import ClosedError, TransferError
from nvmeio.handle import AioHandle
from nvmeio.offload._generations.generations import Generations
from nvmeio.offload._generations.rank_steps import DurableSteps, agreed, directory_name
from nvmeio.offload._generations.state_files import StateFiles
from nvmeio.offload._generations.transactions import Transaction, Transactions
from nvmeio.offload._optimizer import memory_plans
from nvmeio.offload._optimizer.arguments import OptimizerSettings
from nvmeio.offload._optimizer.arithmetic import Stepper, placed
from nvmeio.offload._optimizer.gradients import GradientSwapper
from nvmeio.offload._optimizer.memory_plans import Cuts
from nvmeio.offload._optimizer.params import StepInputs, SwappedParam, grads_of
from nvmeio.offload._optimizer.turns import MASTER, StateLoad, Step, Swapped
from nvmeio.offload._swap_files.manifests import Manifest
from nvmeio.offload._swap_files.pipeline import DeviceTurns, Pipeline, Times, new_helper
from nvmeio.offload._swap_files.subgroups import WEIGHTS, Piece, Subgroup
from nvmeio.offload._swap_files.swap_dirs import SwapDirs
from nvmeio.offload._swap_files.tensors import view

logger = logging.getLogger("nvmeio")

Groups = Sequence[dict[str, Any]]


class StateSwapper(Swapped):
    """Takes the state of one optimizer to the drive and back.

    The thread of `transactions` makes it and calls all that changes something. `handle` stays open;
    None makes one for each drive. `broken` says why no further step can be made, or is "".
    """

    def __init__(
        self,
        directory: SwapDirs,
        handle: AioHandle | None,
        transactions: Transactions,
        stepper: Stepper,
        settings: OptimizerSettings,
    ) -> None:
        handles = DriveHandles(handle, directory.paths)
        helper = new_helper("nvmeio-offload-help")
        durable, checksum = settings.durable, settings.checksum
        ranks = DurableSteps.of_default_group(directory.path) if durable else None
        device = None if settings.device.type == "cpu" else DeviceTurns(settings.device)
        super().__init__(
            handles,
            Generations(directory, handles, durable, checksum, ranks, helper),
            Pipeline(handles, settings.read_ahead, settings.write_behind, helper, device),
            GradientSwapper(directory, handles, transactions) if settings.on_disk else None,
            device,
        )
        self.directory = directory
        self.broken = ""
        self.steps = 0  # complete ones, since it was made
        self.closed = False
        self._owner = transactions.owner
        self._helper = helper
        self._settings = settings
        self._stepper = stepper
        self._cuts = Cuts(stepper, settings)

    # Making

    def open(self, groups: Groups, transaction: Transaction) -> Manifest | None:
        """Open the files, and bring weights there, or back where there is something to resume.

        Returns the generation that was resumed; None at the beginning.
        """
        params: list[SwappedParam] = []
        for number, group in enumerate(groups):
            params += self._cuts.params(len(params), number, group)
        subgroups = self._cuts.subgroups(params)
        bound = {p.number for p in params if p.param_store is not None and not p.stores_rounded}
        memory_plans.hold(subgroups, self._settings.ratio, bound)
        if self.gradients is not None:
            self.gradients.reserve(params, subgroups)
        self._add(params, subgroups)
        self._describe()
        manifest = self.store.resume() if self._settings.resume else None
        if manifest is None and self._settings.must_resume:
            hint = self.directory.hint()
            self.directory.withdraw()
            raise TransferError(
                errno.ENOENT,
                operation="resume",
                path=self.directory.path,
                detail='resume="must", and there is nothing to go on from: check swap_dir, or '
                f"begin with resume=True{hint}",
            )
        self.store.open()
        self.make_buffers()
        if manifest is None:
            self.store_weights(groups, transaction)
        else:
            self.make_way()
            self.give_back(subgroups)
            self.store.small = [
                self._placed(piece, small, manifest.groups)
                for piece, small in zip(self.store.files.pieces, self.store.small, strict=True)
            ]
        self._relocate(params)
        if self.gradients is not None:
            self.gradients.extend(params, subgroups)
        return manifest

    def _placed(self, piece: Piece, small: dict[str, Any], groups: Groups) -> dict[str, Any]:
        """A piece's state outside of the files where its step wants it."""
        return placed(small, groups[self.param_of(piece).group], self._settings.device)

    def extend(self, groups: Groups) -> None:
        """Take on the parameters of the last group, which is new; if it fails, none of them."""
        params = self._cuts.params(len(self.params), len(groups) - 1, groups[-1])
        subgroups = self._cuts.subgroups(params)
        if self.gradients is not None:
            self.gradients.reserve(params, subgroups)
        self.store.settle()
        before = len(self.params), len(self.subgroups), self.store.files.nbytes
        try:
            self._add(params, subgroups)
            self.store.open()
            self.make_buffers()
            self._describe()
            self.take_weights(subgroups, options_of(groups))
        except BaseException as failed:
            del self.params[before[0] :], self.subgroups[before[1] :]
            for subgroup in subgroups:
                self.resident.pop(id(subgroup), None)
            self.store.forget(subgroups, before[2])
            self._describe()
            try:
                self.make_buffers()  # none are left if there was no memory for larger ones
            except BaseException as again:
                self.broken = f"adding a group failed ({failed}), and then its buffers: {again}"
            raise
        self._relocate(params)
        if self.gradients is not None:
            self.gradients.extend(params, subgroups)

    def _add(self, params: Sequence[SwappedParam], subgroups: Sequence[Subgroup]) -> None:
        """Take parameters on: places in the files, and memory for what stays there."""
        self.store.place(subgroups)
        self.params += params
        self.subgroups += subgroups
        for subgroup in subgroups:
            if subgroup.resident:
                nbytes = max(1, subgroup.slot_nbytes(self.with_grads))
                self.resident[id(subgroup)] = self._memory(nbytes)

    def _describe(self) -> None:
        """Put what the layout follows from into manifests, for errors of a later resume."""
        settings, shapes = self._settings, [param.shape for param in self.params]
        elements = sum(map(math.prod, shapes))
        digest = hashlib.sha256(repr(shapes).encode()).hexdigest()[:8]
        kind = self._stepper.optimizer_class
        self.store.made_of = {
            "optimizer": f"{kind.__module__}.{kind.__qualname__}",
            "parameters": f"{len(shapes)} of {elements} elements in all, shapes {digest}",
            "dtypes": ", ".join(sorted({str(param.dtype) for param in self.params})),
            "master_dtype": str(settings.master_dtype),
            "subgroup_bytes": str(settings.subgroup_bytes),
            "buffer_bytes": str(settings.buffer_bytes),
        }

    def _memory(self, nbytes: int) -> torch.Tensor:
        """Memory for state that stays there; page-locked where a device copies it."""
        if self.device is None and not self.copies_beside:
            return empty_aligned(nbytes, dtype=torch.uint8)
        return page_locked.new(nbytes)

    def _relocate(self, params: Sequence[SwappedParam]) -> None:
        for param in params:
            if param.param_store is not None and not param.stores_rounded:
                locate = functools.partial(_weights_in, self.store.files, param.pieces)
                param.param_store.relocate(param.parameter, locate)

    # The step

    def step(self, inputs: StepInputs, transaction: Transaction) -> Times | None:
        """Step every parameter that has a gradient, with the inputs of when it was asked for.

        If nobody wants the step any more it is left undone or taken back, unless that is
        impossible: without a copy of the weights on the drive, and once state that stays in memory
        was stepped. Returns where the time went; None if a GradScaler has the step left out.
        """
        gradients = self.gradients
        inverse: torch.Tensor | None = None  # of a GradScaler's scale
        if gradients is not None:
            if inputs.scaled is not None:
                inverse = inputs.scaled.inverse()
                if bool(inputs.scaled.found_inf):
                    gradients.factor = None
                    return None
            gradients.check(scaled=inverse is not None)
            gradients.restore()
        grads = grads_of(self.params) if inputs.grads is None else inputs.grads
        for param in self.params:
            param.check_unchanged()
        self.make_way()
        clipping = factor = None
        if gradients is not None:
            gradients.flush()
            clipping = gradients.factor
            factor = _product(clipping, inverse)
        step = Step(self, self._stepper, inputs.groups, grads, factor)
        if step.is_empty and not self.store.lockstep:
            if gradients is not None:
                gradients.factor = None  # of no gradients
            return Times()
        times = self._make(step, inputs.groups, transaction)
        self.steps += 1
        self.follow_drive()
        self._tell_changed(step)
        if gradients is not None:
            gradients.factor = None
        # Other ranks count on this step from now on.
        if step.why_no_undo == "" and not self.store.lockstep:
            transaction.on_rollback(lambda: self._roll_back(step, clipping))
        self._owner.post(self._fill_ahead, step)
        return times

    def _fill_ahead(self, step: Step) -> None:
        """Begin the first reads of the next step, from where the state is now."""
        if not self.closed and not self.broken:
            self.pipeline.fill_ahead(step.next_reads())

    def _make(self, step: Step, groups: Groups, transaction: Transaction) -> Times:
        """Compute a step and complete it on the drive, or undo it and raise."""

        def check() -> None:
            if step.why_no_undo == "":
                transaction.check()

        self.store.prepare()
        try:
            times = self.pipeline.run(step.turns, check, on_device=True)
            check()
            # Subgroups that stay in memory cannot be undone, and cannot fail: they are stepped
            # last.
            step.step_resident()
            self.store.commit(step.change, options_of(groups))
        except BaseException as failed:
            self._undo(step, failed)
            raise
        finally:
            step.turns.clear()  # they know the step: gradients would stay until the collector runs
        return times

    def _undo(self, step: Step, failed: BaseException) -> None:
        """After a failed step: the drive has the last one; memory gets it back from there."""
        with suppress(RuntimeError):  # a device that failed stops copying
            step.settle()
        why = step.why_no_undo
        if not why:
            try:
                self.give_back(step.touched)
                return
            except BaseException as again:
                why = f"bringing back the weights failed: {again}"
        self.broken = (
            f"a step failed and could not be undone: {why}. Weights in memory are partly stepped; "
            f"load a checkpoint, or resume from {self.directory.path}. The step failed with: "
            f"{failed}"
        )

    def _roll_back(self, step: Step, factor: torch.Tensor | None) -> None:
        """Take back a complete step whose caller was interrupted."""
        try:
            self.store.revert()
            self.steps -= 1
            self.give_back(step.touched)
            self._tell_changed(step)
            if self.gradients is not None:
                self.gradients.factor = factor
        except BaseException as failed:
            self.broken = (
                f"a step was interrupted and could not be taken back: {failed}. Load a "
                f"checkpoint, or resume from {self.directory.path}"
            )

    def _tell_changed(self, step: Step) -> None:
        """Raise the version of parameters that changed on the drive only; backward looks at it."""
        if all(param.param_store is None for param in self.params):
            return
        stepped = step.stepped_params()
        for store, parameters in self._param_stores(stepped).items():
            with suppress(ClosedError):  # of a module that was closed meanwhile
                store.count_changes(parameters)
        for param in stepped:
            param.stepped_version = param.parameter._version

    # Weights

    def store_weights(self, groups: Groups, transaction: Transaction) -> None:
        self.take_weights(self.subgroups, options_of(groups), transaction.check)

    def load(
        self, states: Mapping[int, dict[str, Any] | None], groups: Groups, transaction: Transaction
    ) -> None:
        """Take over states by parameter number; None for one without."""
        self.store.prepare()
        load = StateLoad(self, states)
        self.make_way()
        try:
            self.pipeline.run(load.turns, transaction.check)
        finally:
            load.turns.clear()  # they know the load, which knows all that was given
        load.load_resident()
        pieces = self.store.files.pieces
        for number, small in load.change.small.items():
            load.change.small[number] = self._placed(pieces[number], small, groups)
        self.store.commit(load.change, list(groups))
        if any(entry and MASTER in entry for entry in states.values()):  # weights follow them
            try:
                self.give_back(self.subgroups)
                load.follow_resident_masters()
            except BaseException as failed:
                self.broken = (
                    "a state dict was loaded, but its master weights could not be copied into all "
                    f"parameters, so some still have their old values: {failed}. Make a new "
                    "optimizer, and load again"
                )
                raise

    # Looking

    def snapshot(self, directory: Paths, transaction: Transaction) -> None:
        if self.resident:
            raise ValueError(
                "with ratio below 1 a part of the state is in memory: use state_dict()"
            )
        self.store.snapshot(directory, transaction)

    def resident_view(self, piece: Piece, name: str) -> torch.Tensor | None:
        """A piece's state where it is in memory; None where it is on the drive."""
        memory = self.resident.get(id(self.store.files.subgroup_of[piece.number]))
        return None if memory is None else view(memory, piece.spans[name])

    @property
    def read_bytes(self) -> int:
        """Read from the drive since this was made, gradients included."""
        grads = 0 if self.gradients is None else self.gradients.read_bytes
        return self.pipeline.read_bytes + grads

    @property
    def written_bytes(self) -> int:
        """Written to the drive since this was made, gradients included."""
        grads = 0 if self.gradients is None else self.gradients.written_bytes
        return self.pipeline.written_bytes + grads

    # The end

    def close(self, remove: bool) -> None:
        """Wait for what is being made durable; give back files, memory, handle and directory.

        With `remove`, what is in the directory goes too.
        """
        self.closed = True
        gradients = [] if self.gradients is None else [self.gradients.close]
        release = functools.partial(self.directory.release, remove)
        close_store = functools.partial(self.store.close, kept=not remove)
        forget = self.pipeline.forget_ahead
        do_all([forget, *gradients, close_store, self._free, self.handles.close, release])

    def _free(self) -> None:
        self.pipeline.close()
        if self._helper is not None:
            self._helper.close()
        if self.device is not None:
            self.device.free()
        self.resident.clear()


def _product(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    """The product of two factors; None stands for 1."""
    if one is None or other is None:
        return other if one is None else one
    return one * other


def options_of(groups: Groups) -> list[dict[str, Any]]:
    """The part of parameter groups that the manifest keeps."""
    return [{name: v for name, v in group.items() if name != "params"} for group in groups]


def _weights_in(files: StateFiles, pieces: Sequence[Piece]) -> list[FileSpan]:
    return [span for piece in pieces for span in files.file_parts(piece, WEIGHTS)]


class OpenedState(NamedTuple):
    """Opened state, what closes it, and the options of groups that were resumed, if any."""

    swapper: StateSwapper
    ending: Ending
    resumed: list[dict[str, Any]] | None


def open_state(
    swap_dir: Paths | None,
    handle: AioHandle | None,
    transactions: Transactions,
    stepper: Stepper,
    settings: OptimizerSettings,
    groups: Groups,
    transaction: Transaction,
) -> OpenedState:
    """Make the state of an optimizer, or go on with what is in its directory.

    Arguments are as for `SwappedOptimizer` and `StateSwapper`.
    """
    remove = not settings.resume
    name = directory_name("optimizer")
    try:
        directory = SwapDirs(swap_dir, name, settings.resume, overwrite=settings.overwrite)
    except Exception as failed:
        if settings.resume and several():
            agreed("", failed)  # the others wait to hear what this rank has
        raise
    with on_error(directory.release, remove):
        swapper = StateSwapper(directory, handle, transactions, stepper, settings)
        with on_error(swapper.close, remove):
            manifest = swapper.open(groups, transaction)
            transaction.check()
    ending = Ending(transactions.owner, functools.partial(swapper.close, remove))
    store = swapper.store
    transaction.on_rollback(lambda: do_all((store.undo_stay, ending.close)))
    store.stay()
    _tell(directory, manifest, settings)
    return OpenedState(swapper, ending, None if manifest is None else manifest.groups)


def _tell(directory: SwapDirs, manifest: Manifest | None, settings: OptimizerSettings) -> None:
    """Log in one line what became of what was there."""
    where = ", ".join(directory.paths)
    if manifest is not None:
        logger.info("resumed %s from %s", manifest, where)
    elif settings.resume:
        hint = directory.hint()
        level = logging.WARNING if hint else logging.INFO
        logger.log(level, "began in %s: there was nothing to resume%s", where, hint)
    else:
        logger.info("began in %s", where)

"""The generations of an optimizer's state: the complete one, and the current state in it.

They survive a power cut: data first, then the word that it is there.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nvmeio._checks import Paths
from nvmeio._io.drives import DriveHandles
from nvmeio._storage.durable import sync_data
from nvmeio._threads.owner import OwnerThread
from nvmeio.errors import ClosedError, IntegrityError, TransferError
from nvmeio.files import File
from nvmeio.offload._generations.rank_steps import DurableSteps, agreed
from nvmeio.offload._generations.state_files import NAMES, StateFiles, copy_files
from nvmeio.offload._generations.transactions import Transaction
from nvmeio.offload._swap_files import manifests
from nvmeio.offload._swap_files.manifests import Manifest, UnusableGeneration
from nvmeio.offload._swap_files.subgroups import WEIGHTS, SlotSpan, Subgroup
from nvmeio.offload._swap_files.swap_dirs import SwapDirs
from nvmeio.offload._swap_files.tensors import fits

logger = logging.getLogger("nvmeio")

_PieceFacts = tuple[int, bool, dict[str, int], dict[str, SlotSpan]]  # current, begun, sums, spans


@dataclass
class Change:
    """The changes since a generation, by the numbers of the pieces.

    `moved` pieces were written to their other place; `begun` says whether state exists now, where
    that changed; `strides` are by name too, where the order of elements changes.
    """

    moved: set[int] = field(default_factory=set)
    begun: dict[int, bool] = field(default_factory=dict)
    small: dict[int, dict[str, Any]] = field(default_factory=dict)
    sums: dict[int, dict[str, int]] = field(default_factory=dict)
    strides: dict[int, dict[str, tuple[int, ...]]] = field(default_factory=dict)


class Generations:
    """State in two files, and the manifest that says which of them is current for each piece.

    Args:
        directory: Locked by this process.
        handles: For fsync.
        durable: Make each generation survive a power cut, beside the next step.
        checksum: Sum written bytes, and compare read ones.
        ranks: Tells other ranks which generation is durable.
        helper: Makes generations durable; without it `commit` does.

    Attributes:
        small: For each piece, the state that is not in the files.
        generation: The number of the last complete step.
        made_of: As in `Manifest`.
    """

    def __init__(
        self,
        directory: SwapDirs,
        handles: DriveHandles,
        durable: bool,
        checksum: bool,
        ranks: DurableSteps | None = None,
        helper: OwnerThread | None = None,
    ) -> None:
        self._directory = directory
        self._handles = handles
        self._ranks = ranks if durable else None
        self._durable = durable
        self._helper = helper
        self.files = StateFiles(directory, checksum)
        self.small: list[dict[str, Any]] = []
        self.generation = 0
        self.made_of: dict[str, str] = {}
        self._run = ""
        self._begun: Manifest | None = None  # until it is durable, or lost
        self._lost: tuple[int, BaseException] | None = None  # an untrusted generation, and why
        self._unmarked: Manifest | None = None  # durable, but for the mark
        self._names_to_sync = 2  # the first two generations make new files
        self._unsynced: set[int] = set()  # those of the two files that may not be durable
        self._resumed: Manifest | None = None  # may have to be made durable
        self._before: list[_PieceFacts] = []  # of the generation before
        self._small_before: list[dict[str, Any]] = []

    def place(self, subgroups: Sequence[Subgroup]) -> None:
        self.files.place(subgroups)
        self.small += [{} for subgroup in subgroups for _ in subgroup.pieces]

    def forget(self, subgroups: Sequence[Subgroup], nbytes: int) -> None:
        self.files.forget(subgroups, nbytes)
        del self.small[len(self.files.pieces) :]

    def open(self) -> None:
        """Open the files, and reserve their space. On failure, files that were open still are."""
        self._join()
        self.files.open()
        self._unsynced = {0, 1}  # their lengths
        resumed, self._resumed = self._resumed, None
        if resumed is not None:
            self._begin_sync(resumed)

    # Generations

    def prepare(self) -> None:
        """Give up the generation before the current one; called before anything is written.

        First every rank makes the current one durable, then the other manifest goes, durably. So no
        manifest speaks of what is about to be written, even after a power cut or an interrupted
        commit. If this rank's drive or another's refuses, nothing has changed.
        """
        self.settle()
        if self._ranks is not None:
            self._ranks.wait(self.generation)
        manifests.drop(self._directory.path, self.generation + 1, durable=self._durable)

    def commit(self, change: Change, groups: list[dict[str, Any]]) -> None:
        """Make the writes since `prepare` current; after a failure the generation before is."""
        # Without a call for each piece: there may be 10,000 of them.
        pieces, moved = self.files.pieces, change.moved
        current = [piece.current ^ (piece.number in moved) for piece in pieces]
        begun = [int(piece.begun) for piece in pieces]
        for number, has_state in change.begun.items():
            begun[number] = int(has_state)
        small = list(self.small)
        for number, state in change.small.items():
            small[number] = state
        sums = [piece.sums for piece in pieces]
        for number in moved:
            sums[number] = change.sums.get(number, {})
        spans = [piece.spans for piece in pieces]
        for number, strides in change.strides.items():
            if strides:
                spans[number] = _laid(spans[number], strides)
        manifest = Manifest(
            generation=self.generation + 1,
            signature=self.files.signature(),
            current=current,
            begun=begun,
            small=small,
            groups=groups,
            sums=[
                of_piece.get(name, -1)
                for piece, of_piece in zip(pieces, sums, strict=True)
                for name in piece.spans
            ],
            strides=_strides_of(spans),
            run=self._run,
            made_of=self.made_of,
        )
        manifests.store(self._directory.path, manifest)
        self.generation += 1
        self._small_before, self.small = self.small, small
        self._before = [(p.current, p.begun, p.sums, p.spans) for p in pieces]
        self._be(zip(current, map(bool, begun), sums, spans, strict=True))
        self._unsynced.update([current[number] for number in moved])
        if [piece for piece in pieces if piece.lent]:
            self._unsynced = {0, 1}  # the module writes to what is current
        self._begin_sync(manifest)

    @property
    def lockstep(self) -> bool:
        """Whether several ranks count the same generations."""
        return self._ranks is not None

    def _join(self) -> None:
        if self._ranks is not None:
            self._ranks.join()

    def stay(self) -> None:
        """Count the optimizer as made; until then other ranks rely on nothing here."""
        if self._ranks is not None:
            self._ranks.stay()

    def undo_stay(self) -> None:
        """Take `stay` back; the optimizer is closed next."""
        if self._ranks is not None:
            self._ranks.undo_stay()

    def revert(self) -> None:
        """Undo the last commit, once and before the next `prepare`. On failure it stands."""
        self.settle()
        manifests.drop(self._directory.path, self.generation, durable=self._durable)
        self.generation -= 1
        self.small = self._small_before
        self._be(self._before)

    def snapshot(self, directory: Paths, transaction: Transaction) -> None:
        """Copy the last generation; see `state_files.copy_files`."""
        self.settle()
        path = self._directory.path
        manifest = manifests.newest(path)
        if manifest is None or manifest.generation != self.generation:
            raise IntegrityError(
                f"the manifest in {path} was not written by this process: the directory was "
                "changed meanwhile; save state_dict() instead",
                expected=self.generation,
                found=manifest and manifest.generation,
            )
        copy_files(self._directory, NAMES, manifest, directory, transaction)

    def resume(self) -> Manifest | None:
        """Take up the last generation that all ranks have, before `open`; None if there is none.

        IntegrityError if it belongs to other parameters, another optimizer or other sizes.
        """
        path = self._directory.path
        self._join()  # before any of them can make a step: `agreed` waits for all
        manifest, later, unusable, self._run = agreed(path)
        if manifest is None:
            return None
        self._check_fits(manifest)
        for each in later:
            manifests.drop(path, each.generation, durable=True)
            logger.info("%s of %s is dropped: not every rank has it", each, path)
        _tell_of(unusable, manifest)
        self._resumed = manifest
        self.generation = manifest.generation
        self.small = manifest.small
        self._take_strides(manifest)
        flat = iter(manifest.sums)
        for piece, which, has in zip(
            self.files.pieces, manifest.current, manifest.begun, strict=True
        ):
            piece.current, piece.begun = which, bool(has)
            found = {name: next(flat, -1) for name in piece.spans}
            piece.sums = {name: total for name, total in found.items() if total >= 0}
        return manifest

    def _be(self, facts: Iterable[_PieceFacts]) -> None:
        for piece, each in zip(self.files.pieces, facts, strict=True):
            piece.current, piece.begun, piece.sums, piece.spans = each

    def _take_strides(self, manifest: Manifest) -> None:
        """Take the elements' order from a manifest; row-major where it has none.

        Raises IntegrityError if an order is impossible, or not that of a module's parameter.
        """
        for piece in self.files.pieces:
            strides = manifest.strides.get(piece.number, {})
            for name, span in piece.spans.items():
                wanted = tuple(strides.get(name, ()))
                if not fits(wanted, span.shape):
                    raise IntegrityError(
                        f"the manifest in {self._directory.path} is undamaged, but has impossible "
                        f"strides for {name} of parameter {piece.param}: go on from a checkpoint",
                        expected=f"strides that fill the memory of shape {span.shape}",
                        found=wanted,
                    )
                if piece.lent and name == WEIGHTS and wanted != span.strides:
                    raise IntegrityError(
                        f"parameter {piece.param} of the SwappedModule has another memory format "
                        f"than the state in {self._directory.path}: give the module the one that "
                        "it "
                        "had (memory_format=torch.channels_last, or contiguous), or start afresh "
                        "with resume=False",
                        expected=span.strides or "row-major order",
                        found=wanted or "row-major order",
                    )
                piece.lay(name, wanted)

    def _check_fits(self, manifest: Manifest) -> None:
        if manifest.signature != self.files.signature():
            differing = [
                f"{name} ({before} there, {self.made_of[name]} here)"
                for name, before in manifest.made_of.items()
                if name in self.made_of and before != self.made_of[name]
            ]
            what = (
                f"does not fit, for these differ: {'; '.join(differing)}. Make them"
                if differing
                else "is laid out for another optimizer, other parameters, or another "
                "subgroup_bytes or buffer_bytes: make them"
            )
            raise IntegrityError(
                f"the state in {self._directory.path} {what} the same as before, or start afresh "
                "with overwrite=True",
                expected=self.files.signature(),
                found=manifest.signature,
            )
        if len(manifest.current) != len(self.files.pieces):
            raise IntegrityError(
                f"the manifest in {self._directory.path} is undamaged, but describes other pieces "
                "than its signature: go on from a checkpoint",
                expected=len(self.files.pieces),
                found=len(manifest.current),
            )
        self.files.check_there()

    # Durability

    def _begin_sync(self, manifest: Manifest) -> None:
        """Make a generation durable, beside the next step; the one before is settled."""
        if not self._durable:
            return
        self._begun = manifest
        if self._helper is None:
            self._take_up()
        else:
            self._helper.post(self._take_up)

    def _take_up(self) -> None:
        manifest = self._begun
        if manifest is not None:
            self._sync(manifest)
            if self._begun is manifest:
                self._begun = None

    def _sync(self, manifest: Manifest) -> None:
        """Make data durable, then the manifest: it must not promise data that may be lost."""
        try:
            for file in self.files.opened(self._unsynced):
                self._sync_file(file)
            self._unsynced.clear()
            if self._names_to_sync:
                self._directory.sync_names()
                self._names_to_sync -= 1
        except BaseException as failed:
            self._lost = manifest.generation, failed
            if self._ranks is not None:
                self._ranks.lose(manifest.generation, str(failed))
            with contextlib.suppress(TransferError):  # resuming must not rely on it
                manifests.drop(self._directory.path, manifest.generation)
            return
        try:
            if not manifest.durable:
                manifests.mark_durable(self._directory.path, manifest)
            self._tell_ranks(manifest)
        except BaseException:
            self._unmarked = manifest  # `settle` tries again, and tells

    def _tell_ranks(self, manifest: Manifest) -> None:
        if self._ranks is not None:
            self._ranks.tell(manifest.generation)

    def _sync_file(self, file: File) -> None:
        try:
            self._handles.sync_fsync(file, data_only=True)
        except ClosedError:  # the handle's owner closed it first: what was written is there
            sync_data(file)

    def settle(self) -> None:
        """Wait until the last generation is durable: the next one overwrites the one before it.

        If its data was lost, every call raises: the kernel reports that once, and forgets what it
        could not write (man 2 fsync).
        """
        if self._begun is not None and self._helper is not None:
            self._helper.drain()
        self._take_up()  # if the helper has ended, or runs no more at the end of the program
        if self._lost is not None:
            generation, why = self._lost
            raise TransferError(
                getattr(why, "errno", None) or errno.EIO,
                operation="fsync",
                path=self._directory.path,
                detail=f"generation {generation} may be lost ({why}): load a "
                "checkpoint, or make a new optimizer with resume=True, which goes on from the last "
                "durable step",
            ) from why
        if self._unmarked is not None:
            manifests.store(self._directory.path, self._unmarked)
            manifests.mark_durable(self._directory.path, self._unmarked)
            self._tell_ranks(self._unmarked)
            self._unmarked = None

    def close(self, kept: bool = True) -> None:
        """Wait for the generation that is being made durable, and close the files.

        Args:
            kept: False where the files are removed now: then it is not an error that somebody has
                removed their directory before.
        """
        try:
            self.settle()
        except TransferError:
            if kept or os.path.isdir(self._directory.path):
                raise
        finally:
            if self._ranks is not None:
                self._ranks.leave()
            self.files.close()


def _laid(
    spans: dict[str, SlotSpan], strides: Mapping[str, tuple[int, ...]]
) -> dict[str, SlotSpan]:
    return {
        name: span._replace(strides=strides.get(name, span.strides)) for name, span in spans.items()
    }


def _strides_of(
    spans_of_pieces: Sequence[Mapping[str, SlotSpan]],
) -> dict[int, dict[str, tuple[int, ...]]]:
    """The strides that are not row-major, by number of the piece and name of the span."""
    laid = [
        (number, name, spans[name].strides)
        for number, spans in enumerate(spans_of_pieces)
        for name in spans
        if spans[name].strides
    ]
    strides: dict[int, dict[str, tuple[int, ...]]] = {}
    for number, name, of_span in laid:
        strides.setdefault(number, {})[name] = of_span
    return strides


def _tell_of(unusable: Sequence[UnusableGeneration], resumed: Manifest) -> None:
    """Log that a newer generation is there, or may be, and could not be resumed."""
    last = resumed.generation
    for path, generation, why in unusable:
        if generation > last:
            which = f"generation {generation}"
        elif not generation:
            older = f", or {last - 1}, which would lose nothing" if last > 1 else ""
            which = f"generation {last + 1}{older}"
        else:
            continue  # an older one, which nobody needs
        logger.warning("%s (%s) %s: resumed from %s instead", path, which, why, resumed)

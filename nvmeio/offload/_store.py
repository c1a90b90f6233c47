"""The swap files of an optimizer: where each piece is, and which generation is complete."""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from nvmeio._io.drives import DriveHandles
from nvmeio._io.striping import StripedFile
from nvmeio._io.threads import Thread
from nvmeio._storage.durable import sync_data
from nvmeio.errors import ClosedError, IntegrityError, TransferError
from nvmeio.files import File
from nvmeio.offload import _file_copies, _manifest, _state_checksums
from nvmeio.offload._extents import Extent, extents_of, moves_of, parts_of
from nvmeio.offload._file_tensors import FilePart
from nvmeio.offload._manifest import Manifest
from nvmeio.offload._pipeline import Move
from nvmeio.offload._rank_steps import DurableSteps, agreed
from nvmeio.offload._subgroups import WEIGHTS, Piece, Subgroup, runs, sections
from nvmeio.offload._swap_dirs import Paths, SwapDirs
from nvmeio.offload._transactions import Transaction

NAMES = ("state.0", "state.1")


class StateStore:
    """Two files of state, and the manifest that says which of them is current for each piece.

    Args:
        directory: Locked by this process.
        handles: For fsync.
        durable: Make each generation survive a power cut, beside what comes next.
        checksum: Sum what is written, and compare what is read.
        ranks: What several ranks tell each other of that.

    Attributes:
        pieces: All of them, by number.
        small: For each piece, the state that is not in the files.
        generation: Of the last complete step.
    """

    def __init__(
        self,
        directory: SwapDirs,
        handles: DriveHandles,
        durable: bool,
        checksum: bool,
        ranks: DurableSteps | None = None,
    ) -> None:
        self._directory = directory
        self._ranks = ranks if durable else None
        self._handles = handles
        self._durable = durable
        self._checksum = checksum
        self._files: list[StripedFile] = []
        self._nbytes = 0
        self._bands: list[int] = []  # of the files, for their striping
        self.pieces: list[Piece] = []
        self.small: list[dict[str, Any]] = []
        self.generation = 0
        self._subgroup_of: dict[int, Subgroup] = {}
        self._syncing: Thread | None = None
        self._lost: BaseException | None = None  # why what was written cannot be trusted
        self._unmarked: Manifest | None = None  # durable, but for the mark
        self._names_to_sync = 2  # the first two generations make new files
        self._resumed: Manifest | None = None  # may have to be made durable
        self._before: list[tuple[int, bool, dict[str, int]]] = []  # of the generation before
        self._small_before: list[dict[str, Any]] = []

    def place(self, subgroups: Sequence[Subgroup]) -> None:
        """Give further subgroups their places; `open` makes the files that long."""
        for subgroup in subgroups:
            if not subgroup.resident:
                subgroup.offset = self._nbytes
                self._nbytes += subgroup.nbytes
                self._bands += sections(subgroup)
            for piece in subgroup.pieces:
                piece.number = len(self.pieces)
                self.pieces.append(piece)
                self.small.append({})
                self._subgroup_of[piece.number] = subgroup

    def forget(self, subgroups: Sequence[Subgroup], nbytes: int) -> None:
        """Take back what `place` did last; the files stay as long as they are."""
        while self._nbytes > nbytes:
            self._nbytes -= self._bands.pop()
        for subgroup in subgroups:
            for piece in subgroup.pieces:
                if self._subgroup_of.pop(piece.number, None) is not None:
                    self.pieces.pop()
                    self.small.pop()

    def open(self) -> None:
        """Open the files, and reserve their space.

        Raises:
            TransferError: There is no space; the files that were open still are.
        """
        self._join()
        opened: list[StripedFile] = []
        try:
            for name in NAMES:
                opened.append(self._directory.allocate(name, self._bands))
        except BaseException:
            for file in opened:
                file.close()
            raise
        before, self._files = self._files, opened
        for file in before:
            file.close()
        resumed, self._resumed = self._resumed, None
        if resumed is not None:
            self._start_syncing(resumed)

    # What moves

    def reads(self, subgroup: Subgroup, pieces: Sequence[Piece], weights: bool) -> list[Move]:
        """The moves that bring the current state of pieces into a slot.

        Args:
            subgroup: Theirs.
            pieces: Some of it.
            weights: The weights as well, where they are stored.
        """
        found: list[Move] = []
        for which in (0, 1):
            mine = [piece for piece in pieces if piece.current == which]
            spans = [
                span
                for piece in mine
                for name, span in piece.spans.items()
                if (weights if name == WEIGHTS else piece.begun)
            ]
            whole = len(mine) == len(subgroup.pieces) and all(piece.begun for piece in mine)
            found += self._moves(subgroup, which, spans, whole)
        return found

    def weights(self, subgroup: Subgroup, pieces: Sequence[Piece]) -> list[Move]:
        """The moves that bring the current weights of pieces into a slot."""
        found: list[Move] = []
        for which in (0, 1):
            mine = [piece for piece in pieces if piece.current == which and piece.stored]
            spans = [piece.spans[WEIGHTS] for piece in mine]
            whole = len(mine) == len(subgroup.pieces)
            found += self._moves(subgroup, which, spans, whole)
        return found

    def writes(self, subgroup: Subgroup, pieces: Sequence[Piece], begun: bool = True) -> list[Move]:
        """The moves that take pieces to the place that is not current.

        Args:
            subgroup: Theirs.
            pieces: Some of it.
            begun: Weights and state; False for the weights alone.
        """
        found: list[Move] = []
        for which in (0, 1):
            mine = [piece for piece in pieces if piece.current != which]
            spans = [
                span
                for piece in mine
                for name, span in piece.spans.items()
                if begun or name == WEIGHTS
            ]
            found += self._moves(subgroup, which, spans, len(mine) == len(subgroup.pieces))
        return found

    def verifying(
        self, weights_of: Sequence[Piece], state_of: Sequence[Piece]
    ) -> Callable[[torch.Tensor], None] | None:
        """What compares a slot with the checksums, after `reads` or `weights`.

        Args:
            weights_of: Pieces whose weights were read.
            state_of: Pieces whose state was read, where it exists.
        """
        if not self._checksum:
            return None
        spans = [(piece, WEIGHTS) for piece in weights_of if WEIGHTS in piece.sums]
        spans += [
            (piece, name)
            for piece in state_of
            if piece.begun
            for name in piece.sums
            if name != WEIGHTS
        ]
        expected = [
            _state_checksums.ExpectedSpan(
                self._files[piece.current],
                self._subgroup_of[piece.number].offset + piece.spans[name].offset,
                piece,
                name,
                piece.sums[name],
            )
            for piece, name in spans
        ]
        return functools.partial(_state_checksums.verify, expected=expected) if expected else None

    def sum_up(
        self, slot: torch.Tensor, pieces: Iterable[Piece], begun: bool = True
    ) -> dict[int, dict[str, int]]:
        """The checksums of what `writes` takes to the drive, by the numbers of the pieces."""
        if not self._checksum:
            return {}
        return {piece.number: _state_checksums.of_piece(slot, piece, begun) for piece in pieces}

    def _moves(
        self, subgroup: Subgroup, which: int, spans: Sequence[Any], whole: bool
    ) -> list[Move]:
        return [
            move
            for run in runs(spans, subgroup.nbytes, whole)
            for move in moves_of(
                self._files[which], subgroup.offset + run.offset, run.offset, run.nbytes
            )
        ]

    def extents(self, piece: Piece) -> list[Extent]:
        """Where the current weights of a piece are."""
        offset = self._subgroup_of[piece.number].offset + piece.spans[WEIGHTS].offset
        return extents_of(
            self._files[piece.current], offset, piece.start, piece.stop, piece.step_dtype.itemsize
        )

    def subgroup_of(self, piece: Piece) -> Subgroup:
        """The subgroup that a piece belongs to."""
        return self._subgroup_of[piece.number]

    def file_parts(self, piece: Piece, name: str) -> list[FilePart]:
        """A piece's current state as spans of open files."""
        span = piece.spans[name]
        offset = self._subgroup_of[piece.number].offset + span.offset
        return parts_of(self._files[piece.current].spans(offset, span.nbytes))

    # Generations

    def prepare(self) -> None:
        """To be called before anything is written: the place that is not current loses its value.

        Not before every rank has made what is current durable. Then its manifest goes, durably. So
        whatever comes of what is about to be written, also after a loss of power, no manifest says
        that it is there; that includes one of a commit that was interrupted.

        Raises:
            TransferError: The drive of this or of another rank lost the last generation, or
                refuses; nothing has changed.
        """
        self.settle()
        if self._ranks is not None:
            self._ranks.wait(self.generation)
        _manifest.drop(self._directory.path, self.generation + 1, durable=self._durable)

    def commit(
        self,
        moved: set[int],
        begun: dict[int, bool],
        small: dict[int, dict[str, Any]],
        groups: list[dict[str, Any]],
        sums: Mapping[int, dict[str, int]],
    ) -> None:
        """What was written since `prepare` is current from now on.

        Args:
            moved: The pieces that were written to their other place, by number.
            begun: Of those whose state exists now, or does not, which it is.
            small: What changed of the state outside of the files, by number.
            groups: The options of the parameter groups.
            sums: The checksums of what was written, by number.

        Raises:
            TransferError: The manifest could not be written: the generation before is current.
        """
        current = [piece.current ^ (piece.number in moved) for piece in self.pieces]
        started = [int(begun.get(piece.number, piece.begun)) for piece in self.pieces]
        values = list(self.small)
        for number, value in small.items():
            values[number] = value
        summed = [
            sums.get(piece.number, {}) if piece.number in moved else piece.sums
            for piece in self.pieces
        ]
        flat = [
            one.get(name, -1)
            for piece, one in zip(self.pieces, summed, strict=True)
            for name in piece.spans
        ]
        manifest = Manifest(
            self.generation + 1, self.signature(), current, started, values, groups, flat
        )
        _manifest.store(self._directory.path, manifest)
        self.generation += 1
        self._small_before, self.small = self.small, values
        self._before = [(piece.current, piece.begun, piece.sums) for piece in self.pieces]
        for piece, which, has, one in zip(self.pieces, current, started, summed, strict=True):
            piece.current, piece.begun, piece.sums = which, bool(has), one
        self._start_syncing(manifest)

    @property
    def lockstep(self) -> bool:
        """Whether several ranks count the same generations."""
        return self._ranks is not None

    def _join(self) -> None:
        if self._ranks is not None:
            self._ranks.join()

    def _start_syncing(self, manifest: Manifest) -> None:
        """Make a generation durable, beside what comes next."""
        if not self._durable:
            return
        thread = Thread(self._sync, "nvmeio-offload-sync", (manifest,))
        try:
            thread.start()
            self._syncing = thread
        except (RuntimeError, MemoryError):  # no room for another thread: here, then
            self._sync(manifest)

    def revert(self) -> None:
        """Let the last commit not have been; only until the next `prepare`, and once.

        Raises:
            TransferError: The drive refuses; the commit stands.
        """
        self.settle()
        _manifest.drop(self._directory.path, self.generation, durable=self._durable)
        self.generation -= 1
        self.small = self._small_before
        for piece, (which, has, one) in zip(self.pieces, self._before, strict=True):
            piece.current, piece.begun, piece.sums = which, has, one

    def _sync(self, manifest: Manifest) -> None:
        """Data first, then the manifest: it must not promise what a power cut could take."""
        try:
            for file in self._drives_files():
                self._sync_file(file)
            if self._names_to_sync:
                self._directory.sync_names()
                self._names_to_sync -= 1
        except BaseException as failed:
            self._lost = failed
            if self._ranks is not None:
                self._ranks.lose(manifest.generation, str(failed))
            with contextlib.suppress(TransferError):  # who resumes must not rely on it
                _manifest.drop(self._directory.path, manifest.generation)
            return
        try:
            if not manifest.durable:
                _manifest.mark_durable(self._directory.path, manifest)
            self._tell(manifest)
        except BaseException:
            self._unmarked = manifest  # `settle` tries again, and tells

    def _tell(self, manifest: Manifest) -> None:
        if self._ranks is not None:
            self._ranks.tell(manifest.generation)

    def _drives_files(self) -> list[File]:
        return [file for striped in self._files for file in striped.files]

    def _sync_file(self, file: File) -> None:
        try:
            self._handles.sync_fsync(file, data_only=True)
        except ClosedError:  # the handle's owner closed it first: what was written is there
            sync_data(file)

    def settle(self) -> None:
        """Wait until the last generation is durable: the next overwrites the one before it.

        Raises:
            TransferError: It is not. Where its data was lost, every further call raises: the
                kernel reports that once, and forgets what it could not write (man 2 fsync).
        """
        thread, self._syncing = self._syncing, None
        if thread is not None:
            thread.join()
        if self._lost is not None:
            raise TransferError(
                getattr(self._lost, "errno", None) or errno.EIO,
                operation="fsync",
                path=self._directory.path,
                detail=f"generation {self.generation} may be lost ({self._lost}): load a "
                "checkpoint, or make the optimizer anew with resume=True, which goes on from the "
                "last step that is durable",
            ) from self._lost
        if self._unmarked is not None:
            _manifest.store(self._directory.path, self._unmarked)
            _manifest.mark_durable(self._directory.path, self._unmarked)
            self._tell(self._unmarked)
            self._unmarked = None

    def snapshot(self, directory: Paths, transaction: Transaction) -> None:
        """Copy the last generation; see `_file_copies.copy`."""
        self.settle()
        path = self._directory.path
        manifest = _manifest.newest(path)
        if manifest is None or manifest.generation != self.generation:
            raise IntegrityError(
                f"the manifest in {path} is not the one that this process wrote: somebody changed "
                "the directory; save state_dict() instead",
                expected=self.generation,
                found=manifest and manifest.generation,
            )
        _file_copies.copy(self._directory, NAMES, manifest, directory, transaction)

    def resume(self) -> Manifest | None:
        """Take up what is in the directory; None where there is nothing. Before `open`.

        Of several ranks each takes up the last generation that all of them have: they may have
        been killed on either side of the end of a step.

        Raises:
            IntegrityError: It belongs to other parameters, another optimizer or other sizes; or the
                ranks have no generation in common.
        """
        path = self._directory.path
        self._join()  # before any of them can make a step: `agreed` waits for all
        manifest, later = agreed(path)
        if manifest is None:
            return None
        self._check_fits(manifest)
        for each in later:
            _manifest.drop(path, each.generation, durable=True)
        self._resumed = manifest
        self.generation = manifest.generation
        self.small = manifest.small
        flat = iter(manifest.sums)
        for piece, which, has in zip(self.pieces, manifest.current, manifest.begun, strict=True):
            piece.current, piece.begun = which, bool(has)
            found = {name: next(flat, -1) for name in piece.spans}
            piece.sums = {name: total for name, total in found.items() if total >= 0}
        return manifest

    def _check_fits(self, manifest: Manifest) -> None:
        if manifest.signature != self.signature():
            raise IntegrityError(
                f"the state in {self._directory.path} belongs to another optimizer, other "
                "parameters, or another subgroup_bytes or buffer_bytes: make the same as "
                "before, or begin anew with resume=False",
                expected=self.signature(),
                found=manifest.signature,
            )
        if len(manifest.current) != len(self.pieces):
            raise IntegrityError(
                f"the manifest in {self._directory.path} is whole, and tells of other pieces than "
                "its signature: go on from a checkpoint",
                expected=len(self.pieces),
                found=len(manifest.current),
            )
        for drive, length in enumerate(self._directory.striping(self._bands).lengths):
            for name in NAMES:
                path = self._directory.file(name, drive)
                if not os.path.isfile(path) or os.path.getsize(path) < length:
                    raise TransferError(
                        errno.ENODATA,
                        operation="open",
                        path=path,
                        detail="the manifest is there, but this file is missing or too short",
                    )

    def signature(self) -> str:
        """What the files are laid out for, as a digest."""
        digest = hashlib.sha256(self._directory.layout.encode())
        for piece in self.pieces:
            subgroup = self._subgroup_of[piece.number]
            facts = (piece.param, piece.start, piece.stop, piece.shape, subgroup.offset)
            digest.update(repr((facts, sorted(piece.spans.items()))).encode())
        return digest.hexdigest()[:32]

    @property
    def nbytes(self) -> int:
        """Length of each of the two files."""
        return self._nbytes

    def close(self) -> None:
        """Wait for what is being made durable, and close the files."""
        try:
            self.settle()
        finally:
            if self._ranks is not None:
                self._ranks.leave()
            for file in self._files:
                file.close()

"""The two state files: the places of pieces, their reads and writes, their sums; copies."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from nvmeio import _checks
from nvmeio._bindings import memory_at
from nvmeio._checks import Paths
from nvmeio._io.drives import FileSpan, StripedFile
from nvmeio._storage import crc32, durable, untrusted
from nvmeio._storage.durable import make_directory
from nvmeio._threads.closing import do_all, on_error, opened
from nvmeio.errors import IntegrityError, TransferError, transfer_error
from nvmeio.files import File
from nvmeio.offload._generations.transactions import Transaction
from nvmeio.offload._swap_files import manifests
from nvmeio.offload._swap_files.manifests import Manifest
from nvmeio.offload._swap_files.subgroups import WEIGHTS, Piece, SlotSpan, Subgroup, runs, sections
from nvmeio.offload._swap_files.swap_dirs import LOCK, OURS, SwapDirs

NAMES = ("state.0", "state.1")


class StateFiles:
    """Two places for each piece, one in each file; `Piece.current` says which one counts.

    It reads `Piece.current` and never sets it: `Generations` does. With `checksum`, written bytes
    are summed, and read ones compared. `pieces` are all of them, by number.
    """

    def __init__(self, directory: SwapDirs, checksum: bool) -> None:
        self._directory = directory
        self._checksum = checksum
        self._files: list[StripedFile] = []
        self.nbytes = 0  # the length of each of the two files
        self._bands: list[int] = []  # the files' bands, for their striping
        self.subgroup_of: dict[int, Subgroup] = {}
        self._signature = ""  # of the present pieces; "" until it is requested
        self.layout = 0  # counts changes of what lies where, or in which open files
        self.pieces: list[Piece] = []

    def place(self, subgroups: Sequence[Subgroup]) -> None:
        """Give further subgroups their places; `open` makes the files that long."""
        self._signature = ""
        self.layout += 1
        for subgroup in subgroups:
            if not subgroup.resident:
                subgroup.offset = self.nbytes
                self.nbytes += subgroup.nbytes
                self._bands += sections(subgroup)
            for piece in subgroup.pieces:
                piece.number = len(self.pieces)
                self.pieces.append(piece)
                self.subgroup_of[piece.number] = subgroup

    def forget(self, subgroups: Sequence[Subgroup], nbytes: int) -> None:
        """Take back what `place` did last; the files stay as long as they are."""
        self._signature = ""
        self.layout += 1
        while self.nbytes > nbytes:
            self.nbytes -= self._bands.pop()
        for subgroup in subgroups:
            for piece in subgroup.pieces:
                if self.subgroup_of.pop(piece.number, None) is not None:
                    self.pieces.pop()

    def open(self) -> None:
        """Open the files, and reserve their space. On failure, files that were open still are."""
        opened: list[StripedFile] = []
        with on_error(do_all, (file.close for file in opened)):
            for name in NAMES:
                opened.append(self._directory.allocate(name, self._bands))
        before, self._files = self._files, opened
        self.layout += 1
        for file in before:
            file.close()

    # Moves

    def reads(self, subgroup: Subgroup, pieces: Sequence[Piece], weights: bool) -> list[FileSpan]:
        """The moves that bring the current state of pieces into a slot, and perhaps weights."""
        wanted = [
            [s for n, s in piece.spans.items() if (weights if n == WEIGHTS else piece.begun)]
            for piece in pieces
        ]
        here = [piece.current for piece in pieces]
        return self._moves(subgroup, here, wanted, all(piece.begun for piece in pieces))

    def weights(self, subgroup: Subgroup, pieces: Sequence[Piece]) -> list[FileSpan]:
        """The moves that bring the current weights of pieces into a slot."""
        stored = [piece for piece in pieces if piece.stored]
        wanted = [[piece.spans[WEIGHTS]] for piece in stored]
        return self._moves(subgroup, [piece.current for piece in stored], wanted)

    def writes(
        self, subgroup: Subgroup, pieces: Sequence[Piece], begun: Mapping[int, bool] | None = None
    ) -> list[FileSpan]:
        """The moves that take pieces to the place that is not current.

        `begun` says by number whether a piece has state to write beside its weights; None: all
        have.
        """
        has_state = [begun is None or begun[piece.number] for piece in pieces]
        wanted = [
            [span for name, span in piece.spans.items() if state or name == WEIGHTS]
            for piece, state in zip(pieces, has_state, strict=True)
        ]
        there = [1 - piece.current for piece in pieces]
        return self._moves(subgroup, there, wanted, len(set(has_state)) <= 1)

    def _moves(
        self,
        subgroup: Subgroup,
        places: Sequence[int],
        wanted: Sequence[Sequence[SlotSpan]],
        alike: bool = True,
    ) -> list[FileSpan]:
        """The moves of the wanted spans of each piece, to or from its place of the two.

        With `alike` the spans are the same for all pieces: if these are all pieces of the subgroup,
        nothing else lies between them.
        """
        moves: list[FileSpan] = []
        for which, file in enumerate(self._files):
            mine = [spans for place, spans in zip(places, wanted, strict=True) if place == which]
            whole = alike and len(mine) == len(subgroup.pieces)
            for run in runs([span for spans in mine for span in spans], subgroup.nbytes, whole):
                moves += file.spans(subgroup.offset + run.offset, run.nbytes, run.offset)
        return moves

    def verifying(
        self, weights_of: Sequence[Piece], state_of: Sequence[Piece]
    ) -> Callable[[torch.Tensor], None] | None:
        """A function that compares a slot with the checksums after `reads` or `weights`, if needed.

        Pieces of `state_of` that have no state are left out. Spans that have no checksum then are
        not compared.
        """
        if not self._checksum:
            return None
        spans = [(piece, WEIGHTS) for piece in weights_of if WEIGHTS in piece.spans]
        spans += [
            (piece, name)
            for piece in state_of
            if piece.begun
            for name in piece.spans
            if name != WEIGHTS
        ]
        return functools.partial(self._verify, spans) if spans else None

    def _verify(self, spans: Sequence[tuple[Piece, str]], slot: torch.Tensor) -> None:
        """Compare read bytes with their checksums; errors name file, parameter and span."""
        memory = memory_at(slot.data_ptr(), slot.nbytes)
        for piece, name in spans:
            if name not in piece.sums:
                continue
            span, expected = piece.spans[name], piece.sums[name]
            found = crc32.of_bytes(memory[span.offset : span.offset + span.nbytes])
            if found != expected:
                file = self._files[piece.current]
                file_offset = self.subgroup_of[piece.number].offset + span.offset
                raise IntegrityError(
                    f"{name} of parameter {piece.param}, elements {piece.start} to {piece.stop}, "
                    f"in {file.describe(file_offset, span.nbytes)}, are not what was written "
                    "there: look at `dmesg` and `smartctl -a`, and go on from a checkpoint or a "
                    "snapshot (checksum=False takes them as they are)",
                    expected=f"CRC-32 {expected:08x}",
                    found=f"{found:08x}",
                )

    def sum_up(
        self, slot: torch.Tensor, pieces: Iterable[Piece], begun: bool = True
    ) -> dict[int, dict[str, int]]:
        """The checksums of what `writes` takes to the drive, by the numbers of the pieces.

        Those of the weights alone where `begun` says that there is no state.
        """
        if not self._checksum:
            return {}
        memory = memory_at(slot.data_ptr(), slot.nbytes)
        sums: dict[int, dict[str, int]] = {}
        for piece in pieces:
            sums[piece.number] = of_piece = {}
            for name in piece.spans:
                if not piece.lent if name == WEIGHTS else begun:
                    span = piece.spans[name]
                    part = memory[span.offset : span.offset + span.nbytes]
                    of_piece[name] = crc32.of_bytes(part)
        return sums

    def file_parts(self, piece: Piece, name: str) -> list[FileSpan]:
        """A piece's current state as spans of open files, from its place in the parameter on."""
        span = piece.spans[name]
        offset = self.subgroup_of[piece.number].offset + span.offset
        start = piece.start * span.dtype.itemsize
        return self._files[piece.current].spans(offset, span.nbytes, start)

    # Their layout

    def check_there(self) -> None:
        """Check that the files are there in their whole length (TransferError); before `open`."""
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
        """A digest of the layout that the files are for."""
        if self._signature:
            return self._signature
        digest = hashlib.sha256(self._directory.layout.encode())
        for piece in self.pieces:
            subgroup = self.subgroup_of[piece.number]
            facts = (piece.param, piece.start, piece.stop, piece.shape, subgroup.offset)
            # Without strides: those of a state are not known before it is made.
            spans = [(name, span._replace(strides=())) for name, span in piece.spans.items()]
            digest.update(repr((facts, sorted(spans))).replace(", strides=()", "").encode())
        self._signature = digest.hexdigest()[:32]
        return self._signature

    def opened(self, places: Iterable[int]) -> list[File]:
        """The open files of the given places, on all drives."""
        return [file for which in places for file in self._files[which].files]

    def close(self) -> None:
        for file in self._files:
            file.close()


_FICLONE = 0x40049409  # linux/fs.h
_STRIDE_BYTES = 64 << 20  # between two looks whether the copy is still wanted
# Errors of copy_file_range where it cannot copy: between file systems, to a network, on an old
# kernel.
_NOT_RANGES = frozenset({errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM})


# Copies of the files, within the kernel: shared blocks where the file system has them


def copy_files(
    source: SwapDirs,
    names: tuple[str, ...],
    manifest: Manifest,
    directories: Paths,
    transaction: Transaction,
) -> None:
    """Copy swap files that nobody writes to just now, durably; the manifest comes last.

    In the copy the generation is durable, so it counts on another machine too. If copying fails or
    `transaction` is not wanted any more, nothing is left of the copy.

    Args:
        source: The swap directories; each copy has its directory's name.
        names: The files of state.
        manifest: The manifest of the generation in them.
        directories: One for each of `source`; made where they are missing. ValueError if not as
            many.
        transaction: The change that this copy is.

    Raises:
        TransferError: The copy exists (EEXIST), or cannot be written.

    Source: man 2 ioctl_ficlone, man 2 copy_file_range, man 2 sendfile.
    """
    above = _checks.directory_paths("directory", directories)
    if len(above) != len(source.paths):
        raise ValueError(
            f"name as many directories for the copy as the state lies in, {source.paths}: "
            f"{len(source.paths)}, not {len(above)}"
        )
    targets = [
        os.path.join(each, os.path.basename(path))
        for each, path in zip(above, source.paths, strict=True)
    ]
    made: list[str] = []
    with on_error(_remove, made):
        for each, target in zip(above, targets, strict=True):
            _make(each, target)
            made.append(target)
        for drive, target in enumerate(targets):
            try:
                for name in names:
                    path = os.path.join(target, name)
                    copy_file(source.file(name, drive), path, transaction.check)
            except OSError as failed:
                raise _wrapped(failed, target) from failed
            if len(targets) > 1:
                source.write_record(drive, target, targets)
        # The state must be durable before its manifest, on all drives.
        for each, target in list(zip(above, targets, strict=True))[1:]:
            _sync(each, target)
        manifests.store(targets[0], manifest)
        manifests.mark_durable(targets[0], manifest)
        _sync(above[0], targets[0])
    transaction.on_rollback(lambda: _remove(made))


def _make(above: str, target: str) -> None:
    try:
        make_directory(above, mode=untrusted.DIRECTORY_MODE)
        untrusted.make_private_directory(target)
        if any(entry != LOCK for entry in os.listdir(target)):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
    except OSError as failed:
        raise _wrapped(failed, target) from failed


def _sync(above: str, target: str) -> None:
    for path in (target, above, os.path.dirname(os.path.abspath(above))):
        durable.sync_directory(path)


def _remove(targets: list[str]) -> None:
    for target in targets:
        with contextlib.suppress(OSError):
            for each in set(os.listdir(target)).intersection(OURS):
                os.unlink(os.path.join(target, each))
            os.rmdir(target)


def _wrapped(failed: OSError, target: str) -> OSError:
    if isinstance(failed, TransferError):
        return failed
    return transfer_error(failed, "copy", target)


def copy_file(source: str, target: str, check: Callable[[], None] = lambda: None) -> None:
    """Copy one file, durably; blocks are shared where the file system can.

    `check` is called now and then, and ends the copy by raising.
    """
    with opened(source, os.O_RDONLY | os.O_NOFOLLOW) as reading, contextlib.ExitStack() as made:
        writing = untrusted.create(target)
        made.callback(os.close, writing)
        try:
            fcntl.ioctl(writing, _FICLONE, reading)
        except OSError:
            _copy_bytes(reading, writing, check)
        os.fsync(writing)


def _copy_bytes(reading: int, writing: int, check: Callable[[], None]) -> None:
    left = os.fstat(reading).st_size
    move: Any = os.copy_file_range
    while left:
        check()
        try:
            count = move(reading, writing, min(left, _STRIDE_BYTES))
        except OSError as failed:
            if move is _send or failed.errno not in _NOT_RANGES:
                raise
            move = _send  # goes on where the descriptors stand
            continue
        if not count:
            raise OSError(errno.ENODATA, "a swap file became shorter while it was copied")
        left -= count


def _send(reading: int, writing: int, nbytes: int) -> int:
    return os.sendfile(writing, reading, None, nbytes)

"""From a Checkpointer's directory back to the state: which checkpoint, and which of its files."""

from __future__ import annotations

import errno
import json
import os
from typing import Any

from nvmeio._storage.locks import leads_to, reading
from nvmeio.checkpoint import _generations
from nvmeio.checkpoint._generations import Generation
from nvmeio.checkpoint._loading import MapLocation, _Loading
from nvmeio.errors import IntegrityError, TransferError
from nvmeio.handle import AioHandle

_ATTEMPTS = 5


class Restoring:
    """One restore. Parameters as for `Checkpointer.restore`.

    Args:
        size: How many ranks there are now.
        own: Which of them this is.
    """

    def __init__(
        self,
        directory: str,
        step: int | None,
        map_location: MapLocation,
        weights_only: bool,
        rank: int | None,
        size: int,
        own: int,
        handle: AioHandle | None,
    ) -> None:
        self._directory = directory
        self._step = step
        self._rank = rank
        self._size = size
        self._own = own
        self._how: tuple[Any, ...] = (map_location, weights_only, handle, None, {})
        self._loading: _Loading | None = None
        self._cancelled = False

    def cancel(self) -> None:
        """Stop soon; from any thread."""
        self._cancelled = True
        loading = self._loading
        if loading is not None:
            loading.cancel()

    def run(self) -> Any:
        """The state, or a list of states."""
        for attempt in range(_ATTEMPTS):
            generation = self._find()
            try:
                return self._load(generation)
            except OSError as failed:
                # Recycled between the look into the directory and the opening, or replaced.
                gone = failed.errno == errno.ESTALE or (
                    failed.errno == errno.ENOENT and not os.path.exists(generation.path)
                )
                if not gone or attempt + 1 == _ATTEMPTS:
                    raise
        raise AssertionError("unreachable")

    def _find(self) -> Generation:
        if self._step is None:
            newest = _generations.newest(self._directory)
            if newest is None:
                raise TransferError(
                    errno.ENOENT,
                    operation="open",
                    path=self._directory,
                    detail="there is no complete checkpoint yet",
                )
            return newest
        there = _generations.generations(self._directory)
        found = [each for each in there if each.step == self._step]
        if not found:
            steps = ", ".join(str(step) for step in sorted({each.step for each in there}))
            raise TransferError(
                errno.ENOENT,
                operation="open",
                path=_generations.file_path(self._directory, self._step),
                detail=f"there is no step {self._step}; there is {steps or 'none at all'}",
            )
        return found[-1]

    def _load(self, generation: Generation) -> Any:
        if not generation.of_ranks:
            return self._load_file(generation.path)
        try:
            fd = os.open(generation.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as failed:
            raise TransferError(
                failed.errno or errno.EIO, operation="open", path=generation.path
            ) from failed
        try:
            with reading(fd, generation.path) as is_it:
                if is_it:
                    try:
                        found = self._load_ranks(generation.path)
                    except (OSError, IntegrityError):
                        if leads_to(generation.path, fd):
                            raise
                    # A save of the same step may have put a new directory in its place: then some
                    # files may have been of the one, some of the other.
                    if leads_to(generation.path, fd):
                        return found
        finally:
            os.close(fd)
        raise TransferError(
            errno.ESTALE,
            operation="open",
            path=generation.path,
            detail="the checkpoint was replaced while it was being read",
        )

    def _load_ranks(self, path: str) -> Any:
        names = _files_of(path)
        rank = self._rank
        if rank is None and self._size == len(names):
            rank = self._own
        if rank is None:
            return [self._load_file(os.path.join(path, name)) for name in names]
        if rank >= len(names):
            raise ValueError(
                f"{path}: there is no rank {rank}: it was saved by {len(names)}, 0 to "
                f"{len(names) - 1}"
            )
        return self._load_file(os.path.join(path, names[rank]))

    def _load_file(self, path: str) -> Any:
        self._loading = _Loading(path, *self._how)
        if self._cancelled:
            self._loading.cancel()
        return self._loading.run()


def _files_of(path: str) -> list[str]:
    """The files of a directory of ranks, by rank.

    Raises:
        IntegrityError: The index is damaged, or a file has another size than it says.
    """
    index_path = os.path.join(path, _generations.INDEX)
    try:
        with open(index_path, encoding="utf-8") as file:
            index = json.load(file)
        sizes: dict[str, int] = dict(index["files"])
        names = sorted(sizes)
        if not names or any(os.path.basename(name) != name for name in names):
            raise ValueError("names that are none of files here")
    except OSError as failed:
        raise TransferError(
            failed.errno or errno.EIO, operation="open", path=index_path
        ) from failed
    except (ValueError, KeyError, TypeError) as wrong:
        raise IntegrityError(
            f"{index_path}: damaged: {wrong}", expected="an index of files", found=str(wrong)
        ) from wrong
    for name, nbytes in sizes.items():
        file_path = os.path.join(path, name)
        there = os.path.getsize(file_path) if os.path.exists(file_path) else None
        if there != nbytes:
            raise IntegrityError(
                f"{file_path}: expected {nbytes} bytes, found {there}",
                expected=nbytes,
                found=there,
            )
    return names

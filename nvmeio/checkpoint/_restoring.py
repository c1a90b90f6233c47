"""From a Checkpointer's directory back to the state: which checkpoint, and which of its files."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Generic

from nvmeio._files.descriptors import open_error
from nvmeio._formats.sniff import NoCheckpointError
from nvmeio._io.handles import CallHandle
from nvmeio._io.long_call import LongCall
from nvmeio._storage.locks import leads_to, reading
from nvmeio._storage.untrusted import INDEX_BYTES, read_object
from nvmeio.checkpoint._directory import retention
from nvmeio.checkpoint._directory.retention import Generation
from nvmeio.checkpoint._multi_rank.drives import OwnDrives, Save, parsed, parts_in
from nvmeio.checkpoint._multi_rank.loading_ranks import ALONE, LoadingRanks, Ranks
from nvmeio.checkpoint._multi_rank.part_ranks import Image, PartRanks, of_one, open_part
from nvmeio.checkpoint._unpickling import HowToLoad, nothing_to_read, seam
from nvmeio.checkpoint.loading import Loaded, load_archive, load_file
from nvmeio.errors import (
    BackendUnavailableError,
    IntegrityError,
    TransferError,
    naming,
    transfer_error,
    with_context,
)

_ATTEMPTS = 5


@dataclass(frozen=True)
class Wanted(Generic[Ranks]):
    """The arguments of a restore; as for `Checkpointer.restore`.

    `directory` is the Checkpointer's, or the first of this rank's drives. `size` is how many ranks
    there are now, and `own` which this is. `new_ranks` makes those that restore it together;
    `ALONE` if this one does so by itself.
    """

    directory: str
    step: int | None
    rank: int | None
    size: int
    own: int
    new_ranks: Callable[[], Ranks]


def until_there(
    call: LongCall, load: Callable[[], Loaded], is_gone: Callable[[OSError], bool]
) -> Loaded:
    """Look and load; look again, a few times, if the checkpoint is gone by then."""
    for _ in range(_ATTEMPTS - 1):
        call.again()
        try:
            return load()
        except OSError as failed:
            if not is_gone(failed):
                raise
    call.again()
    return load()


@contextlib.contextmanager
def naming_others(directory: str) -> Iterator[None]:
    """Let the error of a damaged checkpoint say which other steps the directory has."""
    try:
        yield
    except (IntegrityError, NoCheckpointError) as damaged:
        damaged.args = (f"{damaged}{_others_than(str(damaged), directory)}", *damaged.args[1:])
        raise
    except TransferError as failed:
        others = _others_than(str(failed), directory) if failed.errno == errno.EIO else ""
        if not others:
            raise
        raise with_context(failed, others.lstrip(". ")) from failed


def _others_than(told: str, directory: str) -> str:
    """A note on other steps, for an error that has named the file of one."""
    try:
        there = retention.generations(directory)
    except OSError:
        return ""
    steps = sorted({each.step for each in there if each.path not in told}, reverse=True)
    if not steps or len(steps) == len({each.step for each in there}):
        return ""
    return (
        f". Other steps are there: {', '.join(map(str, steps))}. "
        f"resume(step={steps[0]}) or restore(step={steps[0]}) goes back to one"
    )


def restore(wanted: Wanted[LoadingRanks], how: HowToLoad) -> Loaded:
    load = _Loading(wanted, how)
    return until_there(how.call, load.found, load.is_gone)


class _Loading:
    """A checkpoint, which is looked for, and its files, as for `load_file`."""

    def __init__(self, wanted: Wanted[LoadingRanks], how: HowToLoad) -> None:
        self.wanted = wanted
        self.how = how
        self._ranks: LoadingRanks = ALONE
        self._path = ""  # of the checkpoint that was found

    def found(self) -> Loaded:
        ranks = self._ranks = self.wanted.new_ranks()
        self._path = ""
        ranks.listen(self.how.call)
        with ranks.telling():
            generation = ranks.choose(partial(_find, self.wanted), self.wanted.directory)
            self._path = path = generation.path
            return _load_directory(path, self) if generation.of_ranks else self.load(path)

    def is_gone(self, failed: OSError) -> bool:
        """Whether it was recycled between the look and the opening, or replaced.

        Several ranks look once more if all know of it.
        """
        ranks, path = self._ranks, self._path
        if ranks.is_alone and path and failed.errno == errno.ENOENT:
            return not os.path.exists(path)
        return failed.errno == errno.ESTALE and (ranks.is_alone or not os.path.isdir(path))

    def load(self, path: str) -> Loaded:
        """Load a file; with the other ranks, if they restore together."""
        ranks = self._ranks
        if ranks.is_over and not ranks.is_alone:  # of a file before
            ranks = self.wanted.new_ranks()
        return load_file(path, self.how, ranks)


def _find(wanted: Wanted[LoadingRanks]) -> Generation:
    if wanted.step is None:
        newest = retention.newest(wanted.directory)
        if newest is None:
            detail = f"there is no complete checkpoint yet{_parts_there(wanted.directory)}"
            raise open_error(errno.ENOENT, wanted.directory, detail)
        return newest
    there = retention.generations(wanted.directory)
    found = [each for each in there if each.step == wanted.step]
    if not found:
        steps = ", ".join(str(step) for step in sorted({each.step for each in there}))
        detail = f"there is no step {wanted.step}; existing steps: {steps or 'none'}"
        path = retention.file_path(wanted.directory, wanted.step)
        raise open_error(errno.ENOENT, path, detail + _parts_there(wanted.directory))
    return found[-1]


def _parts_there(directory: str) -> str:
    """A note on parts that ranks with drives of their own have written."""
    known = [parsed(os.path.basename(path)) for path in parts_in([directory])]
    steps = sorted({each[0].step for each in known if each is not None})
    if not steps:
        return ""
    return (
        f"; but parts of step {', '.join(map(str, steps))}, whose others are on drives of other "
        "ranks: a Checkpointer with shared=False restores them"
    )


def _load_directory(path: str, loading: _Loading) -> Loaded:
    with naming("open", path):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with reading(fd, path) as is_it:
            if is_it:
                try:
                    found = _load_ranks(path, loading)
                except (OSError, IntegrityError):
                    if leads_to(path, fd):
                        raise
                # A save of the same step may have put a new directory in its place: then some
                # files may have been of the one, some of the other.
                if leads_to(path, fd):
                    return found
    finally:
        os.close(fd)
    raise open_error(errno.ESTALE, path, "the checkpoint was replaced while it was being read")


def _load_ranks(path: str, loading: _Loading) -> Loaded:
    wanted, names = loading.wanted, files_of(path)
    rank = wanted.rank
    if rank is None and wanted.size == len(names):
        return load_file(os.path.join(path, names[wanted.own]), loading.how)  # nobody else wants it
    if rank is None:
        return Loaded.of_all([loading.load(os.path.join(path, name)) for name in names])
    if rank >= len(names):
        raise ValueError(
            f"{path}: rank {rank} is out of range: ranks 0 to {len(names) - 1} saved it"
        )
    return loading.load(os.path.join(path, names[rank]))


def files_of(path: str) -> list[str]:
    """The files of a directory of ranks, by rank; IntegrityError if its index is wrong."""
    index_path = os.path.join(path, retention.INDEX)
    try:
        sizes: dict[str, int] = dict(read_object(index_path, INDEX_BYTES)["files"])
        names = sorted(sizes)
        if not names or any(os.path.basename(name) != name for name in names):
            raise ValueError("it names files that are not here")
    except OSError as failed:
        raise transfer_error(failed, "open", index_path) from failed
    except (ValueError, KeyError, TypeError) as wrong:
        raise IntegrityError(
            f"{index_path}: damaged: {wrong}", expected="an index of files", found=str(wrong)
        ) from wrong
    for name, nbytes in sizes.items():
        file_path = os.path.join(path, name)
        there = os.path.getsize(file_path) if os.path.exists(file_path) else None
        if there != nbytes:
            raise IntegrityError(
                f"{file_path}: expected {nbytes} bytes, found {there}", expected=nbytes, found=there
            )
    return names


logger = logging.getLogger("nvmeio")


def restore_parts(wanted: Wanted[PartRanks], drives: OwnDrives, how: HowToLoad) -> Loaded:
    """Read the state, or a list of states, from what ranks have on their drives."""
    if seam() is None:
        raise BackendUnavailableError(
            "parts of a checkpoint are put together beneath torch's unpickler, which this torch "
            "does not have where nvmeio looks for it",
            attempts=[("torch.serialization._load", "missing, or of other parameters")],
        )
    load = _LoadingParts(wanted, drives, how)
    # Recycled between the look and the opening, which all ranks know.
    return until_there(how.call, load.found, lambda failed: failed.errno == errno.ESTALE)


@dataclass(frozen=True)
class _LoadingParts:
    wanted: Wanted[PartRanks]
    drives: OwnDrives
    how: HowToLoad

    def found(self) -> Loaded:
        wanted = self.wanted
        ranks = wanted.new_ranks()
        ranks.listen(self.how.call)
        with ranks.telling():
            survey = ranks.survey(self.drives, step=wanted.step, rank=wanted.rank)
            save, warning = survey.chosen(wanted.step)
            if warning and wanted.own == 0:
                logger.warning("%s", warning)
            if save.kind == "part":
                ranks.resume()
                return self._load(save, None, ranks)
            return self._load_states(save, survey.saves[save])

    def _load_states(self, save: Save, having: dict[int, list[int]]) -> Loaded:
        """Load a save with a state for each rank: this rank's, another rank's, or all."""
        wanted, own = self.wanted, self.wanted.own
        if wanted.rank is not None:
            if wanted.rank >= save.parts:
                raise ValueError(
                    f"step {save.step}: rank {wanted.rank} is out of range: "
                    f"ranks 0 to {save.parts - 1} saved it"
                )
            return self._load(save, wanted.rank, wanted.new_ranks())
        if wanted.size != save.parts:
            all_ranks = range(save.parts)
            return Loaded.of_all([self._load(save, each, wanted.new_ranks()) for each in all_ranks])
        if all(rank in having[rank] for rank in range(save.parts)):
            return self._load_own(save)
        mine: Loaded | None = None
        for each in range(save.parts):
            loaded = self._load(save, each, wanted.new_ranks())
            mine = loaded if each == own else mine
        assert mine is not None  # one of as many ranks
        return mine

    def _load_own(self, save: Save) -> Loaded:
        try:
            return self._load(save, self.wanted.own, of_one())
        except TransferError as failed:
            if failed.errno != errno.ESTALE:
                raise
            path = os.path.join(self.wanted.directory, save.name)
            detail = f"step {save.step} was recycled while it was restored; restore a newer one"
            # No other rank knows, to look once more.
            raise open_error(errno.ENOENT, path, detail) from failed

    def _load(self, save: Save, number: int | None, ranks: PartRanks) -> Loaded:
        """One archive; all of its parts, or the one that it has."""
        paths = self.drives.paths(save)
        if number is not None:
            paths = {number: paths[number]} if number in paths else {}
        name = os.path.join(self.wanted.directory, save.name)
        with ranks.loading(self.how.call), contextlib.ExitStack() as opened:
            mine = [open_part(path, save, each, opened) for each, path in paths.items()]
            nbytes = ranks.connect(mine, name, nothing_to_read(self.how.options))
            image = opened.enter_context(Image(nbytes, name))
            with CallHandle(self.how.handle, name) as handle:
                ranks.fill(image, handle.get)
                return load_archive(image, self.how, handle, ranks, opened)


def whole_saves(ranks: PartRanks, drives: OwnDrives, call: LongCall) -> list[Save]:
    """The saves that can be restored, the oldest first; the same on all ranks."""
    ranks.listen(call)
    with ranks.telling():
        return ranks.survey(drives).whole()

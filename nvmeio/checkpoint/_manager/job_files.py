"""The background of a save: files, parts of files, and when they get their names.

Rank 0 makes the file (or the directory), under a temporary name, and tells the others; every rank
writes its part of it and makes that durable; when all have, rank 0 gives the name, then moves
`latest`, then tells the others. A process alone is rank 0 of one.

A rank that fails tells the others (`_distributed.Messages.fail`), and rank 0 removes the files.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import struct

from nvmeio import files
from nvmeio._files.descriptors import open_error
from nvmeio._formats.torch_archives.torch_layout import FileLayout
from nvmeio._formats.torch_archives.torch_writing import (
    Crc,
    finish,
    padded_nbytes,
    unfinished_pages,
)
from nvmeio._storage import durable
from nvmeio._storage.locks import check_unused, hold, lock_alone, unlock
from nvmeio._storage.replace import Replacement, temporary_name
from nvmeio._storage.untrusted import create
from nvmeio._threads.closing import on_error, unlink
from nvmeio.checkpoint._directory import retention
from nvmeio.checkpoint._manager.job import SaveJob
from nvmeio.errors import TransferError, naming, transfer_error
from nvmeio.files import File

_CRC = struct.Struct("<QQQI")


class OneFile(SaveJob):
    """A save into one file, of which each rank writes a part: they all have the same state."""

    LAYOUT = "one"
    COMMENT_BYTES = retention.COMMENT_BYTES

    @property
    def path(self) -> str:
        return retention.file_path(self.setup.directory, self.step)

    def pages_beside(self, layout: FileLayout) -> list[int]:
        """The pages with CRCs that no part knows alone: rank 0 writes these."""
        if self.messages.rank or self.messages.size == 1 or not self.setup.checksum:
            return []
        return unfinished_pages(layout, self.parts(layout))

    def write(self) -> bool | None:
        if self.messages.rank == 0:
            return self._write_and_commit()
        if self.messages.rank in self.writing:
            self._write_and_report()
        else:
            self.messages.put("part", b"")
        _wait_for_end(self)
        return None

    def _write_and_report(self) -> None:
        with files.open(_place_of_first(self), "r+") as file:
            crcs = self._write_part(file)
            durable.sync_data(file)
            self.messages.put("part", b"".join(_CRC.pack(*crc) for crc in crcs))

    def _write_and_commit(self) -> bool:
        setup = self.setup
        old = _make_room(self)
        # The other ranks hear of a failure before anything is removed.
        with Replacement(self.path, recycle=old) as replacement, self.messages.telling():
            layout = self.layout()
            if old is not None and not replacement.recycled:
                unlink(old)  # somebody reads it: let them, and have its blocks later
            replacement.reserve(padded_nbytes(layout))
            self.messages.put("place", os.path.basename(replacement.temporary).encode())
            crcs = self._write_part(replacement.file)
            if self.messages.size > 1:
                # While the others write: the commit is a moment, then.
                durable.sync_data(replacement.file)
                for rank in range(1, self.messages.size):
                    crcs += map(Crc._make, _CRC.iter_unpack(self.messages.get("part", rank)))
                finish(setup.get_handle(), replacement.file, layout, self.parts(layout), crcs)
            replacement.truncate(layout.nbytes)
            _complete(replacement.file, setup.directory, layout.nbytes)
            _check_before_commit(self)
            replacement.commit()
        retention.set_latest(setup.directory, os.path.basename(self.path))
        self.messages.put("end", b"")
        _trim(self)
        return replacement.recycled

    def _write_part(self, file: File) -> list[Crc]:
        start, end = self.parts(self.layout())[self.messages.rank]
        return self.write_bytes(file, start, end)


class FileOfEachRank(SaveJob):
    """A save into one file per rank, in a directory: each has a state of its own."""

    LAYOUT = "per_rank"

    @property
    def path(self) -> str:
        return retention.ranks_path(self.setup.directory, self.step)

    def write(self) -> bool | None:
        if self.messages.rank:
            recycled = self._write_file(_place_of_first(self))
            _wait_for_end(self)
            return recycled
        setup = self.setup
        temporary = self._make_directory()
        undo = on_error(durable.remove_directory, temporary)
        with undo, self.messages.telling():
            self.messages.put("place", os.path.basename(temporary).encode())
            recycled = self._write_file(temporary)
            names = [_rank_name(rank) for rank in range(self.messages.size)]
            told = [self.messages.get("part", rank) for rank in range(1, self.messages.size)]
            sizes = [self.layout().nbytes, *map(int, told)]
            _check_before_commit(self)
            self._commit(temporary, dict(zip(names, sizes, strict=True)))
        retention.set_latest(setup.directory, os.path.basename(self.path))
        self.messages.put("end", b"")
        _trim(self)
        return recycled

    def _make_directory(self) -> str:
        """An old directory under a temporary name, or a new one."""
        index = os.path.join(self.path, retention.INDEX)
        if os.path.isdir(self.path) and not os.path.exists(index):
            detail = (
                "there is a directory of this name that no Checkpointer has written: move it away"
            )
            raise open_error(errno.EEXIST, self.path, detail)
        old = _make_room(self)
        taken = None if old is None else retention.take_directory(old)
        if taken is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(taken, retention.INDEX))
            return taken
        temporary = temporary_name(*os.path.split(self.path))
        with naming("open", self.path):
            os.mkdir(temporary)
        return temporary

    def _write_file(self, directory: str) -> bool:
        path = os.path.join(directory, _rank_name(self.messages.rank))
        layout = self.layout()
        recycled = _clear_way(path)
        with files.open(path, "rw") as file:
            with (
                naming("truncate", self.path),
                files.in_use(file, True) as opened,
                contextlib.ExitStack() as undo,
            ):
                hold(fd := opened.any_fd())
                undo.callback(unlock, fd)
                durable.allocate(fd, padded_nbytes(layout), path)
                self.write_bytes(file, 0, padded_nbytes(layout))
                os.ftruncate(fd, layout.nbytes)
            durable.sync_data(file)
        durable.sync_directory(directory)
        self.messages.put("part", str(layout.nbytes).encode())
        return recycled

    def _commit(self, temporary: str, sizes: dict[str, int]) -> None:
        """Write the index, make all names durable, and give the directory its own."""
        with naming("rename", self.path):
            for name in set(os.listdir(temporary)) - set(sizes):
                os.unlink(os.path.join(temporary, name))  # of more ranks, once
            completed_ns = retention.completion(self.setup.directory)
            index = {"format": 1, "step": self.step, "completed_ns": completed_ns, "files": sizes}
            path = os.path.join(temporary, retention.INDEX)
            text = json.dumps(index, indent=1)

            def make_durable(fd: int) -> None:
                retention.set_time(fd, completed_ns)
                os.fsync(fd)

            durable.write_small(create(path, 0o666), text.encode(), make_durable)
            durable.sync_directory(temporary)
            if os.path.isdir(self.path):
                self._exchange(temporary)
                durable.sync_directory(self.setup.directory)
                durable.remove_directory(temporary)
            else:
                durable.rename(temporary, self.path)

    def _exchange(self, temporary: str) -> None:
        try:
            durable.exchange(temporary, self.path)
        except OSError as refused:
            if refused.errno not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
                raise
            detail = (
                "this file system cannot exchange two directories, so that a checkpoint of several "
                "files cannot be replaced at once: delete it before, or save under another step"
            )
            raise transfer_error(refused, "rename", self.path, detail) from refused


def _rank_name(rank: int) -> str:
    return f"rank-{rank:05d}.pt"


def _place_of_first(job: SaveJob) -> str:
    """The directory that rank 0 has made for all, under a unique name."""
    path = os.path.join(job.setup.directory, job.messages.get("place", 0).decode())
    if os.path.exists(path):
        return path
    detail = (
        f"rank 0 has made it, but rank {job.messages.rank} does not see it: their directories "
        "differ. If each rank has a drive of its own, make all Checkpointers with shared=False"
    )
    raise open_error(errno.ENOENT, path, detail)


def _wait_for_end(job: SaveJob) -> None:
    """Wait until rank 0 has committed; it may end its process once all have confirmed that."""
    job.messages.get("end", 0)
    with contextlib.suppress(TransferError):  # it did not wait for us
        job.messages.put("seen", b"")


def _check_before_commit(job: SaveJob) -> None:
    """Stop if a rank has given up: it must not find the checkpoint later."""
    job.check_cancelled()
    job.messages.check()


def _make_room(job: SaveJob) -> str | None:
    """Remove surplus checkpoints; returns the path of the one to be recycled."""
    setup = job.setup
    going = retention.surplus(setup.directory, setup.keep, job.path)
    usable = [each for each in going if each.of_ranks == (job.LAYOUT == "per_rank")]
    recycled = usable[0] if usable and setup.recycle else None
    for each in going:
        if each is not recycled:
            retention.remove(each)
    return None if recycled is None else recycled.path


def _trim(job: SaveJob) -> None:
    """Remove checkpoints beyond `keep`, without recycling; after the commit."""
    setup = job.setup
    if not setup.recycle:
        for each in retention.surplus(setup.directory, setup.keep, job.path):
            retention.remove(each)


def _clear_way(path: str) -> bool:
    """Whether an old file may be overwritten; one that somebody else uses is unlinked."""
    with naming("open", path):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
    try:
        facts = os.fstat(fd)
        if stat.S_ISREG(facts.st_mode) and facts.st_nlink == 1 and lock_alone(fd):
            with contextlib.suppress(BlockingIOError):
                check_unused(fd)
                return True
    finally:
        unlock(fd)
        os.close(fd)
    os.unlink(path)
    return False


def _complete(file: File, directory: str, nbytes: int) -> None:
    """Let an archive say that it was completed behind all that are there."""
    with files.in_use(file, True) as opened, naming("write", file.path):
        retention.complete(opened.buffered_fd(), nbytes, retention.completion(directory))

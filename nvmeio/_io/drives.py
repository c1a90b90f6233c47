"""Several drives at once: how fast each is, and a handle for each.

A lane of a handle serves its requests in turn and has one queue. If several drives shared it, the
requests of a slow one would fill the queue and the fast ones wait; and io_submit(2) blocks where a
drive's own queue is full, whoever else is served by that thread. So each drive gets a handle of its
own, with the setting that was tuned for it, and with it at least one lane.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence

import torch

from nvmeio import tuned
from nvmeio._io.handles import new_handle
from nvmeio._threads.endings import do_all
from nvmeio.files import File
from nvmeio.handle import AioHandle
from nvmeio.operation import Operation


def weights_of(
    directories: Sequence[str | os.PathLike[str]], reads: float = 1.0, writes: float = 0.0
) -> list[int]:
    """How much of the bytes each of some directories should get.

    Args:
        directories: Those on one file system share its rate.
        reads: How many bytes are read, for
        writes: so many that are written.

    Returns:
        In proportion to the rates that `nvmeio tune --save` measured, where it has them for all;
        else equal ones.
    """
    equal = [1] * len(directories)
    if len(directories) < 2:
        return equal
    found: list[float] = []
    try:
        keys = [tuned.file_system_key(each) for each in directories]
        settings = [tuned.find(each) for each in directories]
    except (ValueError, OSError):  # `new_handle` warns of it
        return equal
    sharing = Counter(keys)
    for key, setting in zip(keys, settings, strict=True):
        seconds = 0.0
        for share, rate in (
            (reads, setting and setting.read_gb_per_s),
            (writes, setting and setting.write_gb_per_s),
        ):
            if share and not (isinstance(rate, (int, float)) and rate > 0):
                return equal
            seconds += share / rate if share and rate else 0.0
        found.append(1 / seconds / sharing[key])
    return [max(1, round(1000 * rate / sum(found))) for rate in found]


class DriveHandles:
    """The handles that files on some drives are moved by.

    Args:
        handle: The caller's, for all of them; it stays open. None makes one for each drive.
        directories: On the drives; those on one device share a handle.

    Raises:
        BackendUnavailableError: A handle cannot be made.
    """

    def __init__(self, handle: AioHandle | None, directories: Sequence[str]) -> None:
        self._own: list[AioHandle] = []
        self._by_device: dict[int, AioHandle] = {}
        if handle is None:
            try:
                for directory in directories:
                    device = os.stat(directory).st_dev
                    if device not in self._by_device:
                        self._own.append(new_handle(directory))
                        self._by_device[device] = self._own[-1]
            except BaseException:
                self.close()
                raise
        self._first = self._own[0] if handle is None else handle

    @property
    def first(self) -> AioHandle:
        """The handle of the first directory."""
        return self._first

    def of(self, file: File) -> AioHandle:
        """The handle of the drive that a file lies on; the first one's for a file elsewhere."""
        if len(self._by_device) < 2:
            return self._first
        opened = file.acquire(False)
        try:
            return self._by_device.get(opened.inode[0], self._first)
        finally:
            opened.release()

    def async_pread(self, memory: torch.Tensor, file: File, file_offset: int = 0) -> Operation:
        """As `AioHandle.async_pread`."""
        return self.of(file).async_pread(memory, file, file_offset)

    def async_pwrite(self, memory: torch.Tensor, file: File, file_offset: int = 0) -> Operation:
        """As `AioHandle.async_pwrite`."""
        return self.of(file).async_pwrite(memory, file, file_offset)

    def sync_fsync(self, file: File, data_only: bool = False) -> None:
        """As `AioHandle.sync_fsync`."""
        self.of(file).sync_fsync(file, data_only=data_only)

    def close(self) -> None:
        """Close those that it made; idempotent."""
        do_all(handle.close for handle in self._own)

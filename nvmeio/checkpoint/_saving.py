"""`save`: an object into a torch checkpoint, at once or not at all."""

from __future__ import annotations

import logging
import os
import pickle
from typing import Any

import torch

from nvmeio._formats.torch_layout import DEFAULT_PROTOCOL, plan_layout
from nvmeio._formats.torch_writing import padded_nbytes, write_part
from nvmeio._io.handles import CallHandle
from nvmeio._io.inflight import Cancelled, InFlight
from nvmeio._io.threads import in_thread
from nvmeio._storage.replace import Replacement
from nvmeio.checkpoint.file_objects import FastFileWriter
from nvmeio.errors import BackendUnavailableError
from nvmeio.handle import AioHandle

logger = logging.getLogger("nvmeio")


def save(
    obj: object,
    path: str | os.PathLike[str],
    pickle_module: Any = pickle,
    pickle_protocol: int = DEFAULT_PROTOCOL,
    *,
    checksum: bool = True,
    handle: AioHandle | None = None,
) -> None:
    """Save an object as `torch.save` does, at the drive's speed, atomically and durably.

    The file is an ordinary torch checkpoint that every `torch.load` reads, with its storages on
    4 KiB boundaries. It is written beside `path` under a temporary name and renamed when all of it
    is durable, so `path` is the old file or the new one at every moment, also after a crash, and
    the new one once this returns.

    Args:
        obj: Anything that torch.save takes; it must not be changed meanwhile.
        path: The file. A symbolic link stays, and what it leads to is replaced. A file that
            exists keeps its permissions.
        pickle_module: As for torch.save.
        pickle_protocol: As for torch.save.
        checksum: Write the CRC-32 of every record, computed beside the transfer; `nvmeio verify`
            checks them. Without, 0 stands in their place.
        handle: Moves the bytes, and stays open; None makes one for this call.

    Raises:
        TransferError: The disk is full, the directory cannot be written in, the drive failed.
        Exception: What pickling the object raises.

    After an error or interrupt: `path` is as it was, and the partial file is gone.

    Cost: no copy of the state; 16 MiB of staging and the handle's bounce memory, 128 MiB in all,
    whatever the size. Storages on a GPU go through 64 MiB of page-locked memory.
    """
    _Save(obj, path, pickle_module, pickle_protocol, checksum, handle).run()


async def async_save(
    obj: object,
    path: str | os.PathLike[str],
    pickle_module: Any = pickle,
    pickle_protocol: int = DEFAULT_PROTOCOL,
    *,
    checksum: bool = True,
    handle: AioHandle | None = None,
) -> None:
    """`save`, awaited: a thread does it, so that the event loop goes on meanwhile.

    The object is pickled in that thread, and its memory is read until the end: it must not be
    changed before this returns. Parameters and errors as for `save`.

    Cancelling stops the writing; `CancelledError` is raised once nothing is in flight, the partial
    file is gone, and `path` is as it was. A save that was being renamed at that moment is complete.
    """
    work = _Save(obj, path, pickle_module, pickle_protocol, checksum, handle)
    await in_thread(work.run, work.cancel)


class _Save:
    def __init__(
        self,
        obj: object,
        path: str | os.PathLike[str],
        pickle_module: Any,
        pickle_protocol: int,
        checksum: bool,
        handle: AioHandle | None,
    ) -> None:
        self._obj = obj
        self._path = path
        self._pickle = (pickle_module, pickle_protocol)
        self._checksum = checksum
        self._handle = handle
        self._flight = InFlight()
        self._cancelled = False

    def cancel(self) -> None:
        """Stop soon; from any thread."""
        self._cancelled = True
        self._flight.cancel()

    def run(self) -> None:
        with (
            Replacement(self._path) as replacement,
            CallHandle(self._handle, replacement.temporary) as handle,
        ):
            try:
                layout = plan_layout(self._obj, *self._pickle)
            except BackendUnavailableError as unknown:
                logger.warning("saving through torch.save, which is slower: %s", unknown)
                self._save_through_torch(handle.get())
                return
            replacement.reserve(padded_nbytes(layout))
            write_part(
                handle.get(),
                replacement.file,
                layout,
                checksum=self._checksum,
                flight=self._flight,
            )
            handle.done()
            replacement.truncate(layout.nbytes)
            if self._cancelled:
                raise Cancelled
            replacement.commit()

    def _save_through_torch(self, handle: AioHandle) -> None:
        with FastFileWriter(self._path, handle=handle) as writer:
            torch.save(self._obj, writer, *self._pickle)  # type: ignore[arg-type]

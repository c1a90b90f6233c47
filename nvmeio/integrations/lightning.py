"""Lightning checkpoints through nvmeio: a `CheckpointIO` plugin, and one that saves meanwhile.

    Trainer(plugins=[NvmeCheckpointIO()])

Works with `lightning` and with `pytorch_lightning`, whichever the Trainer comes from. Files are
ordinary Lightning checkpoints: with or without the plugin, each reads what the other wrote.
"""

from __future__ import annotations

import concurrent.futures
import importlib
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable
from typing import Any

import torch

from nvmeio._formats.torch_layout import Layout, Record, plan_layout
from nvmeio._formats.torch_writing import padded_nbytes, write_part
from nvmeio._io.handles import CallHandle
from nvmeio._io.staging import new_staging
from nvmeio._storage.replace import Replacement
from nvmeio.checkpoint import load, save
from nvmeio.errors import BackendUnavailableError, ClosedError
from nvmeio.handle import AioHandle

# Where the two packages keep the class that a Trainer's plugin has to be one of.
_PLUGIN_MODULES = {
    "lightning": "lightning.fabric.plugins.io.checkpoint_io",
    "pytorch_lightning": "lightning_fabric.plugins.io.checkpoint_io",
}

# A storage that is not in memory as a whole is copied in pieces of this size.
_CHUNK_BYTES = 16 << 20


class NvmeCheckpointIO:
    """Saves and loads a Trainer's checkpoints at the drive's speed, atomically and durably.

    A checkpoint is the old file or the new one at every moment. `save_checkpoint` returns when the
    file is durable.

    Args:
        checksum: Write the CRC-32 of every record, as torch.save does.
        handle: Moves the bytes and stays open; None makes one for each call. (One that was kept
            would outlive the Trainer: plugins are used behind its `teardown` as well, and some
            wrappers, Lightning's own `AsyncCheckpointIO` among them, do not pass that on.)

    Raises:
        BackendUnavailableError: Neither `lightning` nor `pytorch_lightning` is installed.

    Cost: see `nvmeio.save` and `nvmeio.load`.
    """

    def __init__(self, *, checksum: bool = True, handle: AioHandle | None = None) -> None:
        _register(NvmeCheckpointIO)
        self._checksum = checksum
        self._handle = handle

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | os.PathLike[str],
        storage_options: Any | None = None,
    ) -> None:
        """Save; the directory is made where it is missing.

        Args:
            checkpoint: The Trainer's state.
            path: A file of this machine.
            storage_options: Not supported: must be None.

        Raises:
            TypeError: There are `storage_options`.
            ValueError: The path is a URL.
            TransferError: The disk is full, or failed; an older file is untouched.
        """
        target = _prepared(path, storage_options)
        save(checkpoint, target, checksum=self._checksum, handle=self._handle)

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Any | None = "cpu",
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load a checkpoint.

        Args:
            path: A file of this machine.
            map_location: As for torch.load; host memory by default, as Lightning's own plugin.
            weights_only: As for torch.load; None is True.

        Raises:
            FileNotFoundError: There is none.
            IntegrityError: It is damaged.
        """
        target = _local(path)
        loaded: dict[str, Any] = load(
            target,
            map_location,
            weights_only=weights_only is not False,
            handle=self._handle,
        )
        return loaded

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint, a file or a directory; nothing happens where there is none."""
        _remove(_local(path))

    def teardown(self) -> None:
        """Nothing is kept between two calls, so nothing is given back; it may be used again."""

    def __getstate__(self) -> dict[str, Any]:
        """For launchers that send the Trainer to other processes: without the handle."""
        return {**self.__dict__, "_handle": None}


class AsyncNvmeCheckpointIO(NvmeCheckpointIO):
    """`NvmeCheckpointIO` that writes while training goes on.

    `save_checkpoint` waits for the save before it, copies the state into memory of its own and
    returns; a thread writes it. Everything else waits for what it must see: `load_checkpoint` for
    the save before it; a checkpoint is removed only once all saves asked for earlier are durable,
    and not at all if one failed. A failure is raised by the next call of any method, `teardown`
    included, which the Trainer calls at its end.

    Args:
        checksum: As for `NvmeCheckpointIO`, like `handle`.
        handle: See `checksum`.

    Cost: host memory of the size of the state, kept until `teardown`; the training loop is held
    for one copy of it (longer at the first save, when the memory is new).
    """

    def __init__(self, *, checksum: bool = True, handle: AioHandle | None = None) -> None:
        super().__init__(checksum=checksum, handle=handle)
        self._pending: list[concurrent.futures.Future[None]] = []
        self._memory: torch.Tensor | None = None

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | os.PathLike[str],
        storage_options: Any | None = None,
    ) -> None:
        """Copy the state and begin to save it; see the class.

        Raises:
            TypeError, ValueError: As `NvmeCheckpointIO.save_checkpoint`.
            TransferError: An earlier save failed. This one was not begun.
        """
        target = _prepared(path, storage_options)
        self.wait()
        try:
            layout = plan_layout(checkpoint)
        except BackendUnavailableError:  # says so in the log
            save(checkpoint, target, checksum=self._checksum, handle=self._handle)
            return
        snapshot = self._copied(layout)
        self._submit(lambda: self._write(snapshot, target))

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Any | None = "cpu",
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load a checkpoint, after all saves that were begun; see the class."""
        self.wait()
        return super().load_checkpoint(path, map_location, weights_only)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint once all saves that were begun are durable; see the class."""
        target = _local(path)
        self._raise_failures()
        earlier = list(self._pending)
        if not earlier:
            _remove(target)
            return

        def remove() -> None:
            # They are done. What a failed save was to replace stays.
            if all(future.exception() is None for future in earlier):
                _remove(target)

        self._submit(remove)

    def wait(self) -> None:
        """Block until all that was begun is durable.

        Raises:
            TransferError: A save failed; raised once.
        """
        concurrent.futures.wait(self._pending)
        self._raise_failures()

    def teardown(self) -> None:
        """Wait, and give back the memory; raises what failed."""
        try:
            self.wait()
        finally:
            self._memory = None

    def _copied(self, layout: Layout) -> Layout:
        """The layout with the bytes of its storages in memory of ours, as they are now."""
        nbytes = padded_nbytes(layout)
        memory = self._memory
        if memory is None or memory.nbytes < nbytes:
            self._memory = memory = None  # not both at a time
            memory = self._memory = _new_memory(layout, nbytes)
        records = []
        for record in layout.records:
            # At its offset in the file: what is aligned there is aligned here.
            room = memory[record.offset : record.end]
            for offset in range(0, record.nbytes, _CHUNK_BYTES):
                size = min(_CHUNK_BYTES, record.nbytes - offset)
                room[offset : offset + size].copy_(_part(record, offset, size))
            records.append(record._replace(data=room))
        return layout._replace(records=records)

    def _write(self, layout: Layout, target: str) -> None:
        with CallHandle(self._handle, target) as handle, Replacement(target) as replacement:
            replacement.reserve(padded_nbytes(layout))
            write_part(handle.get(), replacement.file, layout, checksum=self._checksum)
            handle.done()
            replacement.truncate(layout.nbytes)
            replacement.commit()

    def _submit(self, work: Callable[[], None]) -> None:
        """Do it after all that was asked for earlier, in a thread that ends with it.

        One of an executor, which the end of the program waits for.
        """
        earlier = list(self._pending)

        def in_order() -> None:
            concurrent.futures.wait(earlier)
            work()

        executor = concurrent.futures.ThreadPoolExecutor(1, "nvmeio-lightning")
        self._pending.append(executor.submit(in_order))
        executor.shutdown(wait=False)

    def _raise_failures(self) -> None:
        """The first failure among what is done, which is forgotten with it."""
        done = [future for future in self._pending if future.done()]
        self._pending = [future for future in self._pending if future not in done]
        failures = [failed for future in done if (failed := future.exception()) is not None]
        if failures:
            raise failures[0]

    def __getstate__(self) -> dict[str, Any]:
        if self._pending:
            raise ClosedError("saves are under way: call wait() before this is sent elsewhere")
        return {**super().__getstate__(), "_memory": None}


def _register(plugin: type) -> None:
    """Make the class one of `CheckpointIO`'s, of each of the two packages that is in use.

    A registered class is as good as a derived one to the Trainer, and neither package needs to be
    imported before its user does so.
    """
    names = [name for name in _PLUGIN_MODULES if name in sys.modules]
    if not names:
        names = [name for name in _PLUGIN_MODULES if importlib.util.find_spec(name) is not None]
    if not names:
        raise BackendUnavailableError(
            "there is no Lightning to plug into",
            attempts=[(name, "not installed") for name in _PLUGIN_MODULES],
            remedy="pip install lightning",
        )
    for name in names:
        module = importlib.import_module(_PLUGIN_MODULES[name])
        module.CheckpointIO.register(plugin)


def _prepared(path: str | os.PathLike[str], storage_options: Any | None) -> str:
    if storage_options is not None:
        raise TypeError("storage_options are for remote file systems; NvmeCheckpointIO has none")
    target = _local(path)
    os.makedirs(os.path.dirname(target) or ".", exist_ok=True)
    return target


def _local(path: str | os.PathLike[str]) -> str:
    name = os.fspath(path)
    if name.startswith("file://"):
        return name.removeprefix("file://")
    if "://" in name:
        raise ValueError(
            f"{name} is not a file of this machine: NvmeCheckpointIO writes to local file systems; "
            "leave it out of Trainer(plugins=…) for others"
        )
    return name


def _remove(target: str) -> None:
    if os.path.isdir(target) and not os.path.islink(target):
        shutil.rmtree(target)
    elif os.path.lexists(target):
        os.unlink(target)


def _part(record: Record, offset: int, nbytes: int) -> torch.Tensor:
    if isinstance(record.data, torch.Tensor):
        return record.data[offset : offset + nbytes]
    return record.data(offset, nbytes)


def _new_memory(layout: Layout, nbytes: int) -> torch.Tensor:
    on_gpu = any(
        isinstance(record.data, torch.Tensor) and record.data.is_cuda for record in layout.records
    )
    return new_staging(nbytes, torch.device("cuda" if on_gpu else "cpu"))

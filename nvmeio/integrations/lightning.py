"""Lightning checkpoints through nvmeio: plugins that save in the foreground or meanwhile.

    Trainer(plugins=[NvmeCheckpointIO()])
    Trainer(callbacks=[NvmeModelCheckpoint(...)])  # while training goes on

Works with `lightning` and with `pytorch_lightning`, whichever the Trainer comes from. Files are
ordinary Lightning checkpoints: with or without the plugin, each reads what the other wrote.
"""

from __future__ import annotations

import importlib
import logging
import os
import shutil
import threading
import warnings
from typing import Any

import torch

from nvmeio._storage.durable import make_directory
from nvmeio.checkpoint import SaveReport, load, save
from nvmeio.checkpoint.background import BackgroundSaver
from nvmeio.errors import ClosedError
from nvmeio.handle import AioHandle
from nvmeio.integrations._clients import LIGHTNING, joined, lightning_modules, on_demand

logger = logging.getLogger("nvmeio")

__all__ = [
    "AsyncNvmeCheckpointIO",
    "NvmeCheckpointIO",
    "NvmeModelCheckpoint",  # noqa: F822
    "NvmeModelCheckpointMixin",
]


class NvmeCheckpointIO:
    """Saves and loads a Trainer's checkpoints at the drive's speed, atomically and durably.

    A checkpoint is the old file or the new one at every moment. `save_checkpoint` returns when the
    file is durable.

    Args:
        checksum: Write the CRC-32 of every record, as torch.save does.
        handle: Moves the bytes and stays open; None makes one for each call.

    Raises:
        BackendUnavailableError: Neither `lightning` nor `pytorch_lightning` is installed.

    Cost: see `nvmeio.save` and `nvmeio.load`.
    """

    def __init__(self, *, checksum: bool = True, handle: AioHandle | None = None) -> None:
        # A registered class is as good as a derived one to the Trainer, and neither package needs
        # to be imported before its user does so.
        for name in lightning_modules(LIGHTNING):
            importlib.import_module(f"{name}.plugins.io").CheckpointIO.register(NvmeCheckpointIO)
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
        target = self._prepared(path, storage_options)
        save(checkpoint, target, checksum=self._checksum, handle=self._handle)

    def _prepared(self, path: str | os.PathLike[str], storage_options: Any | None) -> str:
        if storage_options is not None:  # in Lightning's words: others may look for them
            raise TypeError(
                "`Trainer.save_checkpoint(..., storage_options=...)` with `storage_options` arg is "
                f"not supported for `{type(self).__name__}`. Please implement your custom "
                "`CheckpointIO` to define how you'd like to use `storage_options`."
            )
        target = _local(path)
        make_directory(os.path.dirname(os.path.abspath(target)), above=True)
        return target

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
        loaded: dict[str, Any] = load(
            _local(path), map_location, weights_only=weights_only is not False, handle=self._handle
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

    `save_checkpoint` waits for the save before it, takes a snapshot and returns; a thread writes
    it. `load_checkpoint` waits for the save before it. A checkpoint is removed once all earlier
    saves are durable, and not at all if one failed. The next call of any method raises a failure,
    also `teardown`, which the Trainer calls at its end. If a later save fails and nobody waits for
    it, the program's exit status is 120.

    With a ``filename`` that is the same at each save, use `NvmeModelCheckpoint`: Lightning's own
    callback looks for the files that are there, finds no name taken while one is being written, and
    writes over it.

    Do not put Lightning's `AsyncCheckpointIO` around this: it removes old checkpoints before new
    ones are there. If a wrapper saves in a thread of its own, the save returns when it is durable,
    so the wrapper learns of a failure.

    Args:
        checksum: As for `NvmeCheckpointIO`, like `handle`.
        handle: See `checksum`.

    Cost: host memory of the size of the state, kept until `teardown`; the training loop is held
    for one copy of it (longer at the first save, when the memory is new). If the kernel
    write-protects memory for this process, nothing large is copied (see `Checkpointer`).
    """

    def __init__(self, *, checksum: bool = True, handle: AioHandle | None = None) -> None:
        super().__init__(checksum=checksum, handle=handle)
        self._made: BackgroundSaver | None = None
        self._thread = threading.get_ident()
        self._begun: set[str] = set()  # files that were ever saved or removed
        self._trainer: Any = None  # behind its fit a save returns when it is durable

    def guard(self, *optimizers: torch.optim.Optimizer) -> None:
        """Deprecated: does nothing; see `Checkpointer.guard`."""
        warnings.warn(
            "AsyncNvmeCheckpointIO.guard does nothing any more: leave the call out",
            DeprecationWarning,
            stacklevel=2,
        )

    @property
    def report(self) -> SaveReport | None:
        """The last save's report: the bytes copied, the bytes left in place, and the times."""
        return None if self._made is None else self._made.last

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | os.PathLike[str],
        storage_options: Any | None = None,
    ) -> None:
        """Take a snapshot of the state and begin to write it; see the class.

        Raises:
            TypeError, ValueError: As `NvmeCheckpointIO.save_checkpoint`.
            TransferError: An earlier save failed. This one was not begun.
        """
        target = self._prepared(path, storage_options)
        self._begun.add(target)
        self._saver.save(checkpoint, target)
        ended = self._trainer is not None and self._trainer.state.status != "running"
        if ended or threading.get_ident() != self._thread:
            self.wait()

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
        self._saver.raise_failures()
        if self._saver.idle:
            _remove(target)
        else:
            self._saver.after(lambda: _remove(target))
            self._begun.add(target)

    def wait(self) -> None:
        """Block until all that was begun is durable.

        Raises:
            TransferError: A save failed; raised once.
        """
        self._saver.wait()

    def teardown(self) -> None:
        """Wait, and give back the memory; raises what failed."""
        try:
            self.wait()
        finally:
            self._saver.release()

    @property
    def _saver(self) -> BackgroundSaver:
        """This process's saver; a forked child makes its own."""
        if self._made is None or self._made.pid != os.getpid():
            self._made = BackgroundSaver(checksum=self._checksum, handle=self._handle)
        return self._made

    def __getstate__(self) -> dict[str, Any]:
        if self._made is not None and not self._made.idle:
            raise ClosedError("saves are under way: call wait() before this is sent elsewhere")
        return {**super().__getstate__(), "_made": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _thread=threading.get_ident())


class NvmeModelCheckpointMixin:
    """The additions of `NvmeModelCheckpoint` to a ``ModelCheckpoint``, of Lightning's or one's own.

    When training starts, the Trainer's own `CheckpointIO` gives way to an `AsyncNvmeCheckpointIO`
    (one that was passed in ``plugins=[…]`` stays), which writes while training goes on. Behind it,
    ``trainer.save_checkpoint`` returns when the file is durable.

    If another plugin saves, or the strategy writes checkpoints of its own (DeepSpeed, sharded
    FSDP), a warning says so, and checkpoints are written as without this class.
    """

    def file_exists(self, filepath: Any, trainer: Any) -> Any:
        """As Lightning's, which gives a name that is taken a version (``-v1``)."""
        plugin = trainer.strategy.checkpoint_io
        if isinstance(plugin, AsyncNvmeCheckpointIO) and _local(filepath) in plugin._begun:
            plugin.wait()
        return super().file_exists(filepath, trainer)  # type: ignore[misc]

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to save in the background."""
        super().on_train_start(trainer, pl_module)  # type: ignore[misc]
        strategy = trainer.strategy
        if not trainer.is_global_zero:
            return  # only that rank saves
        own = _writes_itself(strategy)
        if own is not None:
            logger.warning("checkpoints are not written while training goes on: %s", own)
            return
        plugin = strategy.checkpoint_io
        if type(plugin).__name__ == "TorchCheckpointIO":
            plugin = strategy.checkpoint_io = AsyncNvmeCheckpointIO()
        if isinstance(plugin, AsyncNvmeCheckpointIO):
            plugin._trainer = trainer
        else:
            logger.warning(
                "checkpoints are not written while training goes on: %s saves, and no "
                "AsyncNvmeCheckpointIO",
                type(plugin).__name__,
            )


def _writes_itself(strategy: Any) -> str | None:
    """Why a strategy's checkpoints do not come to the plugin; None if they do."""
    name = type(strategy).__name__
    if "DeepSpeed" in name:
        return f"{name} writes checkpoints of its own"
    if getattr(strategy, "_state_dict_type", None) == "sharded":
        return f"{name} writes sharded checkpoints through torch.distributed.checkpoint itself"
    if getattr(strategy, "_save_distributed_checkpoint", False):
        return f"{name} writes distributed checkpoints itself (save_distributed_checkpoint=True)"
    return None


def _local(path: str | os.PathLike[str]) -> str:
    name = os.fspath(path)
    if name.startswith("file://"):
        name = name.removeprefix("file://")
    elif "://" in name:
        raise ValueError(
            f"{name} is not a file of this machine: NvmeCheckpointIO writes to local file systems; "
            "leave it out of Trainer(plugins=…) for others"
        )
    # os.chdir must not move it while it is written.
    return name if os.path.isabs(name) else os.path.join(os.getcwd(), name)


def _remove(target: str) -> None:
    if os.path.isdir(target) and not os.path.islink(target):
        shutil.rmtree(target)
    elif os.path.lexists(target):
        os.unlink(target)


def _model_checkpoint() -> Any:
    stock = importlib.import_module(lightning_modules(LIGHTNING)[0]).callbacks.ModelCheckpoint
    about = "Lightning's ``ModelCheckpoint`` with `NvmeModelCheckpointMixin`."
    return joined("NvmeModelCheckpoint", NvmeModelCheckpointMixin, stock, doc=about)


__getattr__ = on_demand(__name__, "NvmeModelCheckpoint", _model_checkpoint)

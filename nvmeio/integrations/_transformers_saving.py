"""A Trainer's checkpoint that is written while training goes on.

It is made in a directory that nobody takes for a checkpoint, and gets its name when all of it is
durable; older checkpoints are removed after that.
"""

from __future__ import annotations

import importlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from typing import Any

import torch

from nvmeio._storage.durable import sync_directory
from nvmeio._threads.endings import do_all
from nvmeio.checkpoint.background import BackgroundSaver
from nvmeio.handle import AioHandle

_HIDDEN = ".nvmeio-saving-"


class TrainerSaving:
    """The checkpoints of one Trainer, one after the other.

    Args:
        handle: Moves the bytes and stays open; None makes one for each file.

    Attributes:
        directory: Where the checkpoint's directory is to be made; None while none is.
        savers: One for each file of a checkpoint.
    """

    def __init__(self, handle: AioHandle | None) -> None:
        self._handle = handle
        self._files = 0
        self.directory: str | None = None
        self.savers: list[BackgroundSaver] = []

    def begin(self, run_directory: str) -> None:
        """From now on files are part of a checkpoint; the one before must have ended."""
        self._files = 0
        os.makedirs(run_directory, exist_ok=True)
        for name in os.listdir(run_directory):
            if name.startswith(_HIDDEN):  # of a program that was killed, or interrupted
                shutil.rmtree(os.path.join(run_directory, name), ignore_errors=True)
        self.directory = tempfile.mkdtemp(prefix=_HIDDEN, dir=run_directory)

    def save(self, state: object, path: str) -> None:
        """Begin to write a file as `torch.save` would."""
        self._next().save(state, os.path.abspath(path))

    def save_safetensors(
        self, tensors: Mapping[str, torch.Tensor], path: Any, metadata: Mapping[str, str] | None
    ) -> None:
        """Begin to write a safetensors file."""
        self._next().save_safetensors(tensors, os.path.abspath(path), metadata)

    def name_when_durable(self, run_directory: str, trainer: Any) -> None:
        """No file is to come: once all are durable the checkpoint gets its name."""
        hidden, self.directory = self.directory, None
        assert hidden is not None
        savers = self.savers[: self._files]
        limit, others = trainer.args.save_total_limit, savers[1:]
        if savers:
            savers[0].after(lambda: _name(hidden, run_directory, others, limit))
        else:
            _name(hidden, run_directory, [], limit)

    def give_up(self) -> None:
        """The checkpoint was not made as a whole: it gets no name."""
        self.directory = None

    def wait(self) -> None:
        """Until the last checkpoint is durable and has its name; raises what failed, once."""
        do_all((saver.wait for saver in self.savers), Exception)

    def release(self) -> None:
        """Give the memory back."""
        for saver in self.savers:
            saver.release()

    def _next(self) -> BackgroundSaver:
        if self._files == len(self.savers):
            self.savers.append(BackgroundSaver(handle=self._handle))
        saver = self.savers[self._files]
        self._files += 1
        return saver


def why_not(trainer: Any) -> str | None:
    """Why a Trainer's checkpoints cannot be written meanwhile; None if they can."""
    args = trainer.args
    if args.world_size > 1:
        return "several processes write into one checkpoint"
    if args.push_to_hub:
        return "push_to_hub reads a checkpoint as soon as it was saved"
    if args.load_best_model_at_end or args.metric_for_best_model:
        return "the best checkpoint is looked for as soon as it was saved"
    if getattr(trainer, "hp_search_backend", None) is not None:
        return "a hyperparameter search has directories of its own"
    return None


def _name(
    hidden: str, run_directory: str, others: list[BackgroundSaver], limit: int | None
) -> None:
    for saver in others:
        saver.wait()
    for name in os.listdir(hidden):
        target = os.path.join(run_directory, name)
        if os.path.isdir(target):
            shutil.rmtree(target)
        sync_directory(os.path.join(hidden, name))
        os.rename(os.path.join(hidden, name), target)
    os.rmdir(hidden)
    sync_directory(run_directory)
    rotate = getattr(importlib.import_module("transformers.trainer"), "rotate_checkpoints", None)
    if rotate is not None:
        rotate(output_dir=run_directory, save_total_limit=limit, use_mtime=True)

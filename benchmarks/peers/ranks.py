"""One of several ranks with the same state, each in a process of its own: they save and load it."""

from __future__ import annotations

import gc
import os
from typing import Any

import torch
import torch.distributed as dist
from _measure import Sample, timed

import nvmeio


class Rank:
    """The process of a rank."""

    def __init__(self) -> None:
        self._state: Any = None
        self._nbytes = 0
        self._checkpointer: Any = None
        self._step = 0

    def join(self, rank: int, world: int, store: str, nbytes: int) -> None:
        """Be this rank of a gloo group, with a state of so many bytes."""
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo", store=dist.FileStore(store, world), rank=rank, world_size=world
        )
        tensors = 8
        self._state = [
            torch.full((nbytes // tensors,), i, dtype=torch.uint8) for i in range(tensors)
        ]
        self._nbytes = nbytes

    def open(self, directory: str, writers: int) -> None:
        """A Checkpointer of which so many ranks write."""
        self.close()
        self._checkpointer = nvmeio.Checkpointer(
            directory, keep=1, process_group=dist.group.WORLD, writers=writers
        )

    def save(self) -> Sample:
        """From the call until it is durable."""
        self._step += 1
        with timed(self._nbytes) as sample:
            self._checkpointer.save_sync(self._state, self._step)
            self._checkpointer.wait_sync()
        return sample

    def load(self, path: str, together: bool) -> Sample:
        """All of a file, of which this rank reads a part, or all."""
        group = dist.group.WORLD if together else None
        dist.barrier()
        with timed(self._nbytes) as sample:
            loaded = nvmeio.load(path, process_group=group)
        del loaded
        gc.collect()
        return sample

    def release(self) -> None:
        """Give everything back."""
        self.close()
        self._state = None

    def close(self) -> None:
        checkpointer, self._checkpointer = self._checkpointer, None
        if checkpointer is not None:
            checkpointer.close()

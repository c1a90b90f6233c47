"""The worker that holds the state, made on first demand and shared by all rows."""

from __future__ import annotations

import mmap

from _session import Session

from nvmeio.cli.measure.worker import Worker

NAME = "checkpoints"


def worker_with_state(session: Session) -> tuple[Worker, int] | None:
    """The worker and the state's bytes; None where it cannot be made (and that is said)."""
    worker = session.worker(NAME)
    if worker is None or not session.attempt(NAME, worker, "prepare", nbytes=session.size):
        return None
    return worker, int(worker.call("state_nbytes"))


def touch_memory(nbytes: int) -> None:
    """Have the kernel find so much memory, and give it back.

    A virtual machine's host takes memory away that is free for some seconds, and the next to touch
    it waits at 0.3 to 0.9 GB/s. Whoever loads finds memory that the machine has.
    """
    with mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        for offset in range(0, nbytes, mmap.PAGESIZE):
            memory[offset] = 1

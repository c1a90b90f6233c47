"""Files of any name, written while training goes on: what other libraries' trainers save with.

A `Checkpointer` has a directory of its own; here the caller says where each file goes, and when one
is removed. The snapshot and the life of a save are the same (`_manager.job`).
"""

from __future__ import annotations

import concurrent.futures
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from nvmeio._checks import NotPickled
from nvmeio._distributed import DEFAULT_TIMEOUT_S
from nvmeio._distributed.rank_store import RankStore
from nvmeio._formats.torch_archives.torch_writing import padded_nbytes
from nvmeio._io.handles import new_handle
from nvmeio._storage.replace import Replacement
from nvmeio._threads import shutdown
from nvmeio._threads.closing import do_all, members
from nvmeio._threads.interruptible import Cancellation, begun, run_interruptible
from nvmeio.checkpoint import safetensors
from nvmeio.checkpoint._manager.job import Plan, SaveJob, SaveReport, Setup, pickled_state
from nvmeio.checkpoint._snapshot.state_snapshot import Snapshots
from nvmeio.handle import AioHandle

# How often a wait looks whether it was cancelled.
_LOOK_S = 0.05


class BackgroundSaver(NotPickled):
    """Saves into files, one after the other, each durable at once or not at all.

    `save` waits for the save before, takes a snapshot and returns. A failure is raised by the next
    call of `save` or `wait`, once. One that nobody has asked for is logged, and the program's exit
    says so.

    Args:
        checksum: Write the CRC-32 of every record.
        handle: Moves the bytes and stays open; None makes one for each save.
        memory_bytes: As for `Checkpointer`.
    """

    _elsewhere = "make one in each process"

    def __init__(
        self,
        *,
        checksum: bool = True,
        handle: AioHandle | None = None,
        memory_bytes: int | None = None,
    ) -> None:
        self._checksum = checksum
        self._handle = handle
        self._memory_bytes = memory_bytes
        self._snapshots: Snapshots | None = None
        self._turn = threading.Lock()
        self._pending: list[concurrent.futures.Future[Any]] = []
        # The report of the save that was begun last; with its times once it is durable.
        self.last: SaveReport | None = None
        self.pid = os.getpid()
        _savers.add(self)

    def save(self, state: object, path: str) -> SaveReport:
        """Take a snapshot of a state and begin to write it, as `torch.save` would.

        Args:
            state: Any object that torch.save takes.
            path: The file.

        Raises:
            Exception: An earlier save failed, or what `Checkpointer.save` raises. Nothing of this
                one is left.
        """
        began = time.perf_counter()
        return self._save(pickled_state(state), path, self._checksum, began)

    def save_safetensors(
        self, tensors: Mapping[str, torch.Tensor], path: str, metadata: Mapping[str, str] | None
    ) -> SaveReport:
        """The same as one safetensors file; tensors and metadata as for `save_safetensors`."""
        # Aligned, as all of `NvmeTrainer`'s: the files do not depend on when they are written.
        began = time.perf_counter()
        wanted = safetensors.checked(tensors, path, metadata, None, True)
        return self._save(lambda: safetensors.layout_of(wanted), path, False, began)

    def after(self, work: Callable[[], object]) -> None:
        """Have something done once all that was begun is durable; not at all if that failed."""
        earlier = list(self._pending)

        def in_order() -> None:
            concurrent.futures.wait(earlier)
            if all(future.exception() is None for future in earlier):
                work()

        # An executor's thread is waited for at the end of the program.
        executor = concurrent.futures.ThreadPoolExecutor(1, "nvmeio-after")
        self._pending.append(executor.submit(in_order))
        executor.shutdown(wait=False)

    def wait(self) -> None:
        """Block until all that was begun is done.

        Raises:
            Exception: Something failed; raised once.
        """
        pending = list(self._pending)
        begun(lambda: concurrent.futures.wait(pending), "nvmeio-wait").wait()
        self.raise_failures()

    def raise_failures(self) -> None:
        """Raise the first failure among finished saves, which are forgotten with it."""
        done = [future for future in self._pending if future.done()]
        self._pending = [future for future in self._pending if future not in done]
        failures = [failed for future in done if (failed := future.exception()) is not None]
        if failures:
            try:
                raise failures[0]
            finally:
                failures.clear()  # no cycle with the traceback

    def end(self) -> None:
        """`wait` at the end of the program, which starts no thread any more."""
        concurrent.futures.wait(self._pending)
        self.raise_failures()

    def release(self) -> None:
        """Give the memory back; the next save makes it anew."""
        if self._snapshots is not None:
            self._snapshots.release()

    @property
    def idle(self) -> bool:
        """Whether nothing is under way, and nobody has a failure to see."""
        return not self._pending

    def _save(self, plan: Plan, path: str, checksum: bool, began: float) -> SaveReport:
        call = Cancellation()
        pickled_s = time.perf_counter() - began
        return run_interruptible(
            lambda: self._begin(plan, path, checksum, (began, pickled_s), call), call.cancel
        )

    def _begin(
        self, plan: Plan, path: str, checksum: bool, times: tuple[float, float], call: Cancellation
    ) -> SaveReport:
        with self._turn:
            while concurrent.futures.wait(self._pending, _LOOK_S).not_done:
                call.check()
            self.raise_failures()
            own = _OwnHandle(self._handle, path)
            setup = Setup(
                os.path.dirname(path),
                1,
                False,
                checksum,
                self._of_directory(os.path.dirname(path)),
                RankStore.of_one(path, "save"),
                DEFAULT_TIMEOUT_S,
                own.get,
                lambda: None,
            )
            job = _NamedFile(setup, path, own.close)
            call.then(job.cancel)
            future: concurrent.futures.Future[Any] = concurrent.futures.Future()
            try:
                self.last = job.take(plan, *times)
            finally:
                if job.going_on:
                    self._pending.append(future)
                    job.over.then(lambda: self._settle(job, future))
            return self.last

    def _of_directory(self, directory: str) -> Snapshots:
        if self._snapshots is None:
            self._snapshots = Snapshots(self._memory_bytes, "auto", directory)
        self._snapshots.directory = directory
        return self._snapshots

    def __del__(self, getpid: Callable[[], int] = os.getpid) -> None:
        if getpid() == self.pid:
            for future in self._pending:
                future.add_done_callback(_nobody_asked)

    def _settle(self, job: SaveJob, future: concurrent.futures.Future[Any]) -> None:
        try:
            report = job.result()
            if report is not None:
                self.last = report
            future.set_result(report)
        except BaseException as failed:
            future.set_exception(failed)


class _NamedFile(SaveJob):
    """A save into one file of any name, by one process."""

    LAYOUT = "file"

    def __init__(self, setup: Setup, path: str, written: Callable[[], None]) -> None:
        self._path = path  # its own, before what asks for `path`
        super().__init__(setup, 0, 1)
        self._written = written

    @property
    def path(self) -> str:
        return self._path

    def write(self) -> bool | None:
        layout = self.layout()
        end = padded_nbytes(layout)
        try:
            with Replacement(self._path) as replacement:
                replacement.reserve(end)
                self.write_bytes(replacement.file, 0, end)
                replacement.truncate(layout.nbytes)
                self.check_cancelled()
                replacement.commit()
        finally:
            self._written()
        return None


class _OwnHandle:
    """The handle of one save: the caller's, or one made when its first byte is written."""

    def __init__(self, given: AioHandle | None, path: str) -> None:
        self._given = given
        self._path = path
        self._own: AioHandle | None = None

    def get(self) -> AioHandle:
        """The handle that moves the bytes; one that the caller has closed is replaced."""
        if self._given is not None and not self._given.closed:
            return self._given
        if self._own is None:
            self._own = new_handle(self._path)
        return self._own

    def close(self) -> None:
        own, self._own = self._own, None
        if own is not None:
            own.close()


# A program may end without having asked what became of its saves, or drop who saved.
_savers: weakref.WeakSet[BackgroundSaver] = weakref.WeakSet()


def _nobody_asked(future: concurrent.futures.Future[Any]) -> None:
    failed = future.exception()
    if failed is not None:
        shutdown.nobody_was_told(failed)


def _at_exit() -> None:
    """Finish all that was begun; raises a failure that nobody has seen."""
    savers = [saver for saver in members(_savers) if saver.pid == os.getpid()]
    do_all(partial(shutdown.end_saving, saver.end) for saver in savers)


shutdown.at_exit(_at_exit)

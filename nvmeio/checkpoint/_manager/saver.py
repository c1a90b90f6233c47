"""The saves of one Checkpointer, one after another, and their shared resources.

Apart from `Checkpointer` itself, so that one that is dropped can warn while this goes on: the
thread that writes holds this, not that.
"""

from __future__ import annotations

import _thread
import contextlib
import errno
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial

from nvmeio._distributed.messages import Messages
from nvmeio._io import long_call
from nvmeio._io.handles import new_handle
from nvmeio._storage.durable import make_directory
from nvmeio._storage.locks import leads_to, lock_directory, unlock
from nvmeio._storage.replace import check_writable
from nvmeio._threads import interruptible, shutdown, threads
from nvmeio._threads.closing import collect, do_all, members
from nvmeio._threads.future import Future
from nvmeio._threads.interruptible import Cancellation, Cancelled
from nvmeio.checkpoint._directory import retention
from nvmeio.checkpoint._manager.job import Plan, SaveJob, SaveReport, Setup, pickled_state
from nvmeio.checkpoint._manager.job_files import FileOfEachRank, OneFile
from nvmeio.checkpoint._manager.job_parts import OwnFileOfEachRank, PartOfEachRank
from nvmeio.checkpoint._multi_rank.loading_ranks import Ranks
from nvmeio.errors import ClosedError, TransferError
from nvmeio.handle import AioHandle
from nvmeio.progress import Progress

logger = logging.getLogger("nvmeio")

# How often a wait looks whether it was cancelled.
_LOOK_S = 0.05

_READ_ONLY = "a Checkpointer that only restores is made with read_only=True"
_ONE_DIRECTORY = (
    ". With shared=False, no two ranks may save into the same directory: give each rank one of its "
    "own, or leave shared=False out if all ranks see one directory"
)

JOBS: dict[str, type[SaveJob]] = {OneFile.LAYOUT: OneFile, FileOfEachRank.LAYOUT: FileOfEachRank}
JOBS_ON_OWN_DRIVES: dict[str, type[SaveJob]] = {
    PartOfEachRank.LAYOUT: PartOfEachRank,
    OwnFileOfEachRank.LAYOUT: OwnFileOfEachRank,
}


class Saver:
    """Saves, one after another; `new_setup` makes the setup from this one's own resources."""

    def __init__(
        self,
        new_setup: Callable[..., Setup],
        handle: AioHandle | None,
        layout: str,
        overwrite: bool,
    ) -> None:
        self.lineage = retention.Lineage(overwrite)
        self.setup = setup = new_setup(
            get_handle=self.get_handle, claim=self._claim, lineage=self.lineage
        )
        self.directory = setup.directory
        self._new_job = (JOBS if setup.drives is None else JOBS_ON_OWN_DRIVES)[layout]
        self._handle = handle
        self._own = handle is None
        self._opening = threading.Lock()
        self._lock_fd = -1
        self._turn = threading.Lock()  # one call of save or close at a time
        self._job: SaveJob | None = None  # the last one whose snapshot was taken
        self._saves = self._loads = 0
        self._pid = os.getpid()
        self.released = False
        self.under_way: list[Future[SaveReport]] = []  # and failures that were not reported
        self.closed = False
        self._stopped = False  # while it opens
        _savers.add(self)

    # Saving

    def begin(self, state: object, call: SaveCall) -> Future[SaveReport]:
        """Begin `save` in a thread; those before it, which nobody may wait for, come first."""
        self.check_open()
        before = self.under_way
        self.under_way = [each for each in before if not (each.done and each.seen)]

        def work() -> SaveReport:
            for each in before:
                each.wait()
            call.pickle(state)
            return self.save(call)

        begun = interruptible.begun(work, "nvmeio-save", call.cancel)
        self.under_way = [*self.under_way, begun]
        return begun

    def tell_interrupt(self, call: SaveCall | None, interrupt: KeyboardInterrupt) -> None:
        """Tell the other ranks, who wait for this one; not if a thread saves already."""
        size, before = self.setup.store.size, self.under_way

        def tell() -> None:
            for each in before:
                each.wait()
            self.save(SaveCall(-1, None, size, interrupt))

        if size > 1 and (call is None or call.take()):
            # It raises the interrupt, and a second one ends it.
            with contextlib.suppress(KeyboardInterrupt, ClosedError):
                interruptible.run_interruptible(tell)

    def save(self, call: SaveCall) -> SaveReport:
        """Take the snapshot of the pickled state, once the save before is durable."""
        self.check_open()
        if not call.take():
            raise Cancelled
        while not self._turn.acquire(timeout=_LOOK_S):
            if self.setup.store.size == 1:
                call.check()
        try:
            self.check_open()
            job = self._job
            while job is not None and not call.cancelled and not job.wait(_LOOK_S):
                pass
            if not call.cancelled:
                self.result(job)
            self._saves += 1
            refused, call.refused = call.refused, None
            plan, call.plan = call.plan, None
            if refused is not None:
                self.setup.messages(self._saves).fail(refused)
                try:
                    raise refused
                finally:
                    del refused  # no cycle with the traceback
            call.job = job = self._new_job(self.setup, call.step, self._saves, call.progress)
            if call.cancelled:
                job.messages.fail(Cancelled())  # in its turn, for the other ranks wait for it
                raise Cancelled
            assert plan is not None
            try:
                return job.take(plan, call.began, call.pickled_s)
            finally:  # also when Ctrl-C comes between the two
                if job.going_on:
                    self._job = job
        finally:
            self._turn.release()

    def result(self, job: SaveJob | None) -> SaveReport | None:
        """The report of a save that is over, or its failure, which the caller has seen then."""
        if job is None:
            return None
        try:
            return job.result()
        except BaseException:
            if self._job is job:
                self._job = None
            raise

    def wait(self, timeout: float | None) -> SaveReport | None:
        """See `Checkpointer.wait_sync`."""
        self.check_process()
        self.take_unseen()
        job = self._job
        if job is not None and not job.wait(timeout):
            raise TimeoutError(
                f"step {job.step} is not durable after {timeout} s; it is being written"
            )
        return self.result(job)

    def wait_for_ends(self, call: Cancellation) -> None:
        """Wait until all that was begun is durable or has failed; `call` can end the waiting.

        A failure is not raised here. It stays for `wait`, and the log says which step is missing.
        """
        if self.forked:
            return
        for each in self.under_way:
            while not each.wait(_LOOK_S):
                call.check()
        job = self._job
        if job is None or job.is_here:
            return
        while not job.wait(_LOOK_S):
            call.check()
        if job.failed():
            logger.warning(
                "step %d was not saved, and %s has no such checkpoint: %s",
                job.step,
                self.directory,
                job.over.error,
            )

    @property
    def last(self) -> SaveJob | None:
        """The save that was begun last, of this process."""
        self.check_process()
        return self._job

    def check_open(self) -> None:
        """Raise `ClosedError` if nothing can be saved."""
        self.check_process()
        if self.closed:
            raise ClosedError(f"the Checkpointer of {self.directory} is closed; make a new one")

    @property
    def forked(self) -> bool:
        """Whether this process is a forked child, in which everything is the parent's."""
        return os.getpid() != self._pid

    def check_process(self) -> None:
        """Raise `ClosedError` in a forked child."""
        if self.forked:
            raise ClosedError(
                f"the Checkpointer of {self.directory} belongs to the parent of this forked "
                "process; make one here, of another directory"
            )

    # Shared by all saves

    def get_handle(self) -> AioHandle:
        """The caller's handle, or one that lives as long as this; never one that is closed.

        A save that is under way when the caller closes his handle is finished with another.
        """
        with self._opening:
            if self._handle is None or (self._handle.closed and not self._own):
                self._handle, self._own = new_handle(self.directory), True
            return self._handle

    @property
    def open_handle(self) -> AioHandle | None:
        """The handle, if there is one yet; a forked child needs one of its own."""
        handle = self._handle
        return handle if handle is not None and not handle.closed and not self.forked else None

    def ranks(self, kind: type[Ranks]) -> Ranks:
        """The ranks, for one more load of all of them together."""
        self._loads += 1
        store = self.setup.store.within("restore", self.directory, "restore")
        return kind(store, self._loads, self.setup.timeout_s)

    def open(self) -> None:
        """Take the directory: all ranks hear now what would refuse the first save.

        Raises TransferError if it cannot be made or written in, or another Checkpointer saves
        there, and what opening a handle raises.
        """
        setup = self.setup
        try:
            if setup.store.rank == 0 or setup.drives is not None:
                make_directory(self.directory)
                check_writable(self.directory, _READ_ONLY)
                self._lock()
                retention.check_pointer(self.directory)
            elif setup.writers == "all" and os.path.isdir(self.directory):
                check_writable(self.directory, _READ_ONLY)  # rank 0 makes it
            self.get_handle()  # reports missing features now, and not at the first save
        except BaseException as failed:
            restores = setup.store.within("restore", self.directory, "restore")
            for store in (setup.store, restores):
                Messages(store, 1, setup.timeout_s).fail(failed)
            raise

    def stop_opening(self) -> None:
        """Have `open` wait for nobody any more."""
        self._stopped = True

    def _claim(self) -> None:
        """Make the directory, and be the only one that saves there."""
        if self._lock_fd >= 0 and not leads_to(self.directory, self._lock_fd):
            self._unlock()  # removed, or replaced by another one
        if self._lock_fd < 0:
            make_directory(self.directory)
            self._lock()
        retention.remove_dead(self.directory)

    def _lock(self) -> None:
        """Take the directory's lock, after those of this process that nobody has any more.

        One that was dropped has it until it is collected, and until what it saves is durable.
        """
        shared = self.setup.drives is None or self.setup.store.size == 1
        looked = False
        while self._lock_fd < 0:
            # Before the try: one that gives the lock back just after it is waited for too.
            ending = not looked or any(saver.ends_in(self.directory) for saver in members(_savers))
            try:
                self._lock_fd = lock_directory(self.directory, "" if shared else _ONE_DIRECTORY)
                return
            except TransferError as busy:
                if busy.errno != errno.EBUSY or self._stopped or not ending:
                    raise
            if not looked:
                collect()
                looked = True
            time.sleep(_LOOK_S / 10)

    def ends_in(self, directory: str) -> bool:
        """Whether this has been closed or dropped, and gives that directory back soon."""
        here = self.closed and not self.forked
        return here and self._lock_fd >= 0 and leads_to(directory, self._lock_fd)

    def _unlock(self) -> None:
        if self._lock_fd >= 0:
            unlock(self._lock_fd)  # while `ends_in` tells of it
            fd, self._lock_fd = self._lock_fd, -1
            os.close(fd)

    # The end

    def close(self) -> None:
        """See `Checkpointer.close`."""
        if self.forked:
            self.closed = True
            return
        try:
            self.take_unseen()
        finally:
            self._close()

    def take_unseen(self) -> None:
        """Wait for saves that nobody awaits; raises a failure that nobody has seen."""
        for each in self.under_way:
            each.wait()
        do_all(each.result for each in self.under_way if not each.seen)

    def _close(self) -> None:
        with self._turn:
            self.closed = True  # also if Ctrl-C ends the waiting; the next call waits again
            job = self._job
            if job is not None:
                job.wait(None)
                if job.number == self._saves and not self.released:
                    job.part_from_others()
            self._release()
        self.result(job)

    def abandon(self) -> None:
        """Finish writing, then give all back, because nobody has this any more."""
        if self.forked or self.closed:
            return
        self.closed = True
        job = self._job
        if any(not each.done for each in self.under_way):
            threads.start(self._end_under_way, "nvmeio-close", _no_thread)
        elif job is None:
            self._release()
        else:
            job.over.then(lambda: self._end_abandoned(job))

    def _end_under_way(self) -> None:
        try:
            self.close()
        except BaseException as failed:
            shutdown.nobody_was_told(failed)

    def _end_abandoned(self, job: SaveJob) -> None:
        try:
            job.result()
        except Exception as failed:
            shutdown.nobody_was_told(failed)
            logger.error("step %d was not saved, and its result was never awaited", job.step)
        finally:
            self._release()

    def _release(self) -> None:
        self.released = True
        self.setup.snapshots.release()
        handle, self._handle = self._handle, None
        try:
            if handle is not None and self._own:
                handle.close()
        finally:
            self._unlock()

    @property
    def unfinished(self) -> SaveJob | None:
        """The save that is being written, or whose failure nobody has seen; not in a child."""
        job = self._job
        if job is None or self.forked:
            return None
        return job if not job.done() or job.failed() else None


class SaveCall:
    """One call of `save` by so many ranks, which another thread may cancel.

    `refused` is the reason why there is none; the other ranks learn of it in its turn, and it is
    raised.
    """

    def __init__(
        self, step: int, progress: Progress | None, ranks: int, refused: BaseException | None = None
    ) -> None:
        self._ranks = ranks
        self.refused = refused
        self.plan: Plan | None = None
        self.pickled_s = 0.0
        self.step = step
        self.progress = long_call.checked(progress)
        self.began = time.perf_counter()
        self.job: SaveJob | None = None
        self.cancelled = isinstance(refused, KeyboardInterrupt)
        self._claim = _thread.allocate_lock()  # taken by the saving caller, or if nobody saves

    def take(self) -> bool:
        """Whether the caller saves it, and nobody has begun to."""
        return self._claim.acquire(False)

    def pickle(self, state: object) -> None:
        """Pickle the state; in the thread whose modes its own code must see."""
        if self.refused is not None:
            return
        began = time.perf_counter()
        try:
            self.plan = pickled_state(state)
        except BaseException as failed:
            if self._ranks == 1:
                raise
            self.refused = failed  # the other ranks wait for this one, and learn of it in its turn
            self.cancelled = not isinstance(failed, Exception)
        self.pickled_s = time.perf_counter() - began

    def cancel(self) -> None:
        """Stop soon; from any thread."""
        self.cancelled = True
        job = self.job
        if job is not None:
            job.cancel()

    def check(self) -> None:
        if self.cancelled:
            raise Cancelled


# A program may end without having closed its Checkpointers, or dropped them.
_savers: weakref.WeakSet[Saver] = weakref.WeakSet()


def _no_thread(failed: BaseException) -> None:
    logger.error("the end of a Checkpointer was not waited for: %s", failed)


def _at_exit() -> None:
    """Finish all that was begun; raises a failure that nobody has seen."""
    savers = [saver for saver in members(_savers) if not saver.released]
    do_all(partial(shutdown.end_saving, saver.close) for saver in savers)


shutdown.at_exit(_at_exit)

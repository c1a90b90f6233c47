"""`Checkpointer`: checkpoints that are written while training goes on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import warnings
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

from nvmeio import _checks
from nvmeio._checks import NotPickled
from nvmeio._distributed import DEFAULT_TIMEOUT_S
from nvmeio._io.long_call import LongCall, profiled
from nvmeio._threads.closing import ClosingWork
from nvmeio._threads.future import Future
from nvmeio._threads.interruptible import Cancellation, begun, in_thread, run_interruptible
from nvmeio.checkpoint._directory import retention
from nvmeio.checkpoint._manager.job import SaveJob, SaveReport, Setup
from nvmeio.checkpoint._manager.saver import JOBS, SaveCall, Saver
from nvmeio.checkpoint._multi_rank.agreement import being_made, checked_writers, ranks_of, store_of
from nvmeio.checkpoint._multi_rank.drives import OwnDrives, Save
from nvmeio.checkpoint._multi_rank.loading_ranks import ALONE, Attempts, LoadingRanks
from nvmeio.checkpoint._multi_rank.part_ranks import PartRanks
from nvmeio.checkpoint._restoring import (
    Wanted,
    naming_others,
    restore,
    restore_parts,
    whole_saves,
)
from nvmeio.checkpoint._snapshot.state_snapshot import Snapshots, checked_way
from nvmeio.checkpoint._unpickling import HowToLoad, LoadOptions, MapLocation
from nvmeio.checkpoint.loading import Loaded
from nvmeio.checkpoint.training import Training
from nvmeio.errors import counted
from nvmeio.handle import AioHandle
from nvmeio.progress import Progress

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup


class Checkpointer(NotPickled, ClosingWork):
    """Saves the state of a training loop, step by step, into a directory.

    `save` takes a snapshot and returns; the file is written in the background. Every byte of it is
    what it was when `save` was called, despite later writes to the state. (One exception: a
    direct read into the state that is in flight already. Wait for it first.) Files are ordinary
    torch checkpoints, ``step-00000012.pt``, that every `torch.load` reads. The link ``latest``
    leads to the one that was completed last.

        async with nvmeio.Checkpointer("checkpoints", keep=3) as ckpt:
            for step in range(first, last):
                train(state)
                await ckpt.save(state, step)  # or, without an event loop, ckpt.save_sync

    At every moment, also after ``kill -9`` or a loss of power, every file called ``step-…`` is
    complete and durable, and ``latest`` leads to one of them. Once `keep` were saved, there are
    never fewer. The next save removes what a killed process left.

    Each save overwrites the oldest file in place, under a temporary name. So there are ``keep + 1``
    files, and a save takes about half the time of one into a new file. A file that somebody has
    open, or mapped (``torch.load(mmap=True)``), is not overwritten. On a file system of another
    machine (NFS) that is known only of readers who hold a shared flock, as those do that use
    nvmeio, or who made a hard link of it. ``recycle=False`` turns this off.

    One Checkpointer at a time saves into a directory, until it is closed or dropped. Any number of
    others, here and in other processes, may restore from it: make those with ``read_only=True``.

    With a process group all its ranks save together: each calls every save, in the same order, with
    the same step. The ranks talk through the store of torch.distributed and not through the group,
    so the background never meets a collective of your training. A save is complete when all ranks
    have written. If one fails or dies, all others get an error within `timeout_s`, and the
    checkpoint before stays the latest.

    Ranks that have no directory in common say ``shared=False``. Each writes its part into its own
    directory, and a step exists when all of its parts do. All ranks then call `restore`, `steps`
    and `latest_step`: they compare what they have, and send each other what they read.

    Args:
        directory: The directory of the checkpoints. Made if it is missing, one level. It is checked
            at once: it must be writable, and no other Checkpointer may save there. With
            ``shared=False`` each rank's own, or a list: saves go into the first, and restores read
            all of them.
        keep: How many checkpoints are there at every moment, 1 or more. If there are more, the
            first save removes the oldest ones.
        handle: Moves the bytes, and stays open. None opens one at once (with ``read_only=True``
            for each restore), with the setting stored for the file system (`AioHandle.tuned`).
        process_group: A `torch.distributed.ProcessGroup` of any backend. All its members make
            their Checkpointers in the same order, with the same directory (unless `shared` is
            False). If a rank leaves this out, the others raise after `timeout_s`; then all of them
            make new ones.
        memory_bytes: The most memory that the snapshots of this process may take; 64 MiB if this is
            less; "8GB" is 8 GiB. Bytes that training changes before they were read go through a
            nameless file if the memory is full. If the state has to be copied and is larger than
            this, `save` takes as long as writing it. None: half of what the machine has available.
        snapshot: "protect" leaves large tensors in host memory where they lie, write-protected by
            the kernel (userfaultfd; Linux 6.4), until they are read. A write to them before that
            waits while 2 MiB are copied aside. "copy" copies the state before `save` returns.
            "auto" protects if the kernel shows this process every write, also those of system
            calls, and copies if not (docs/checkpoint.md says how to allow it), or if others have
            pinned memory of this process (io_uring, RDMA), which they write past the protection.
        checksum: Write the CRC-32 of every record.
        layout: The files of several ranks. "one": all have the same state, and each writes an equal
            part of one file, which any number of ranks can load. "per_rank": each has a state of
            its own, in a file of its own, in a directory ``step-00000012``.
        recycle: Overwrite the oldest file. False deletes it and writes a new one each time; there
            are `keep` files then.
        timeout_s: How long a rank may make no progress before the others give it up, in seconds.
        writers: Which of several ranks write, with ``layout="one"``: "all", "per_node" (the first
            one on each machine), or a number of them, as far apart as can be. With fewer writers
            each writes more. The same on all ranks.
        shared: Whether all ranks see the same directory. False: each has one of its own, on its own
            drive. The first save compares what the ranks have.
        overwrite: Let the first save be of any step. Without it the first step must be later than
            the latest one there, or one must have been restored: a new run in an old run's
            directory would overwrite that run's checkpoints. Later saves may be of any step.
        read_only: Restore only. The directory need not be writable or there yet, and another
            Checkpointer may save into it. Nothing is made or removed there. Saves are refused.

    Raises:
        TypeError, ValueError: A parameter has another type, or is out of range.
        TransferError: `directory` is a file, cannot be made or cannot be written in, or another
            Checkpointer saves into it. The other ranks of a process group learn of it: their first
            save, or their first restore together, raises.
        BackendUnavailableError: ``snapshot="protect"`` is not possible here; says why, and what to
            do.

    Cost: memory for what is copied, kept for the next save; 48 MiB of staging, and the handle's.
    """

    _elsewhere = "keep its directory, and make one in each process that saves"

    _work = "a save"

    def __init__(
        self,
        directory: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        keep: int = 3,
        handle: AioHandle | None = None,
        process_group: ProcessGroup | None = None,
        *,
        memory_bytes: int | str | None = None,
        snapshot: str = "auto",
        checksum: bool = True,
        layout: str = "one",
        recycle: bool = True,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        writers: str | int = "all",
        shared: bool = True,
        overwrite: bool = False,
        read_only: bool = False,
    ) -> None:
        with being_made(process_group):
            paths = retention.checked_directories(directory, shared)
            path = paths[0]
            _checks.integer("keep", keep, 1)
            if memory_bytes is not None:
                memory_bytes = _checks.size("memory_bytes", memory_bytes, 1)
            if layout not in JOBS:
                raise ValueError(f"layout must be 'one' or 'per_rank', not {layout!r}")
            _checks.timeout(timeout_s)
            if handle is not None and not isinstance(handle, AioHandle):
                raise TypeError(f"handle must be an nvmeio.AioHandle, not {handle!r:.80}")
            writers = checked_writers(writers, layout, ranks_of(process_group))
            way = checked_way(snapshot)
            self._store = store_of(process_group, path, timeout_s)
        self._keep = keep
        self._layout = layout
        self._training: Training | None = None
        self._read_only = bool(read_only)
        self._closing: Future[None] | None = None
        new_setup = partial(
            Setup,
            path,
            keep,
            bool(recycle),
            bool(checksum),
            Snapshots(memory_bytes, way, path),
            self._store,
            timeout_s,
            writers=writers,
            drives=None if shared else OwnDrives(paths),
        )
        self._saver = Saver(new_setup, handle, layout, bool(overwrite))
        if not read_only:
            try:
                run_interruptible(self._saver.open, self._saver.stop_opening)
            except BaseException:
                run_interruptible(self._saver.abandon)
                raise

    # Saving

    def save(
        self, state: object, step: int, *, progress: Progress | None = None
    ) -> Coroutine[Any, Any, SaveReport]:
        """Take a snapshot of a state, and write it in the background.

        The snapshot begins at once, in a thread, while the event loop goes on. When the ``await``
        returns it is taken, and the state may change. Without an event loop it is taken when this
        call returns. A save that nobody awaits is done anyway; `wait`, `close` or the end of
        ``with`` raises its error. If the save before is still being written, this one waits until
        that is durable, so memory holds one snapshot.

        Args:
            state: Anything that torch.save takes, on any device. It must not change before this
                returns.
            step: The number of the checkpoint, 0 or more. A checkpoint of the same number is
                replaced at once. The latest checkpoint is the one that was saved last, also if its
                number is smaller. The first save must be of a later step than all that are there,
                unless this Checkpointer has restored one or was made with ``overwrite=True``.
            progress: Called in the background as ``progress(what, done_bytes, total_bytes)``, with
                the bytes of this rank; see `nvmeio.progress`. If it raises, the save fails.

        Returns:
            The bytes that were copied, and the times. The file is not durable yet: see `wait`.

        Raises:
            Exception: The save before failed, and nobody has seen that yet. This state was not
                saved: call again.
            TransferError: The first save would overwrite an earlier run (also a `FileExistsError`;
                nothing has changed, and another save may follow). The directory was replaced, and
                another Checkpointer has it. Another rank failed or is gone. The state is larger
                than `memory_bytes`, and the disk is full or the drive failed.
            ValueError: `step` is negative; the ranks do not save the same; this was made with
                ``read_only=True``.
            TypeError: `step` is not an int.
            MemoryError: There is no room for the snapshot.
            ClosedError: It is closed, or belongs to the parent of this forked process.

        After an error or a cancellation nothing of this save is left, and older checkpoints are as
        they were. (If it was durable already when it was cancelled, it stays.) Cancelling takes as
        long as copying some MiB, and the other ranks get an error.

        Cost: pickling, about 8 us a tensor and 3 us a storage. Protecting takes 40 ms a GiB on
        small pages and less than 10 on huge ones; copying takes one copy at the speed of memory (of
        this rank's part with ``layout="one"``).
        """
        call: SaveCall | None = None
        try:
            call = self._save_call(step, progress)
            begun = self._saver.begin(state, call)
        except KeyboardInterrupt as interrupt:
            self._saver.tell_interrupt(call, interrupt)
            raise
        if asyncio._get_running_loop() is None:
            with profiled("snapshot"):
                begun.wait()
        return begun

    def save_sync(
        self, state: object, step: int, *, progress: Progress | None = None
    ) -> SaveReport:
        """`save`, blocking: it returns when the snapshot is taken. All else is as for `save`."""
        call: SaveCall | None = None
        try:
            call = self._save_call(step, progress)
            self._saver.check_open()
            with profiled("snapshot"):
                call.pickle(state)  # nothing that follows asks the state's own code
                return run_interruptible(partial(self._saver.save, call), call.cancel)
        except KeyboardInterrupt as interrupt:
            self._saver.tell_interrupt(call, interrupt)
            raise

    def _save_call(self, step: int, progress: Progress | None) -> SaveCall:
        try:
            if self._read_only:
                raise ValueError(
                    f"the Checkpointer of {self.directory} was made with read_only=True, and saves "
                    "nothing: make another one without"
                )
            return SaveCall(_checked_step(step), progress, self._store.size)
        except Exception as refused:
            if self._store.size == 1:
                raise
            # In its turn, for the other ranks wait for it.
            return SaveCall(-1, None, self._store.size, refused)

    def guard(self, *optimizers: torch.optim.Optimizer) -> None:
        """Deprecated: does nothing. `save` leaves all of the state where it lies, by itself."""
        warnings.warn(
            "Checkpointer.guard does nothing any more: save leaves the state where it lies by "
            "itself, whatever writes to it afterwards (snapshot='auto'); leave the call out",
            DeprecationWarning,
            stacklevel=2,
        )

    # Waiting

    def wait(self) -> Coroutine[Any, Any, SaveReport | None]:
        """Wait until the save is durable, and ``latest`` leads to it.

        Returns:
            The report of the last save; None if there was none.

        Raises:
            Exception: The save failed. Every call that was waiting raises it; if none was, the next
                call raises it once. Older checkpoints are as they were.

        Cancelling the wait cancels no save.
        """
        before = [each for each in self._saver.under_way if not each.seen]
        return self._wait(before, self._saver.last)

    async def _wait(
        self, before: Sequence[Future[SaveReport]], job: SaveJob | None
    ) -> SaveReport | None:
        for each in before:
            await each
        if before:
            job = self._saver.last
        if job is None:
            return None
        await job.over.ended()
        return self._saver.result(job)

    def wait_sync(self, timeout: float | None = None) -> SaveReport | None:
        """`wait`, blocking.

        Args:
            timeout: Seconds at most; None waits for as long as it takes.

        Raises:
            TimeoutError: It is not durable yet. The writing goes on.
            Exception: As for `wait`.
        """
        return self._saver.wait(timeout)

    # Restoring

    def restore(
        self,
        step: int | None = None,
        map_location: MapLocation = None,
        weights_only: bool = True,
        *,
        rank: int | None = None,
        progress: Progress | None = None,
        together: bool = False,
    ) -> Any:
        """Load a checkpoint of the directory, as `nvmeio.load` does.

        Saves of this Checkpointer that are under way are waited for first. If one fails, that is
        logged here and raised by `wait`, as ever.

        Args:
            step: The step to restore; None for the latest. If ``latest`` is missing or leads
                nowhere, that is the one that was completed last, and the log says so.
            map_location: As for torch.load.
            weights_only: As for torch.load.
            rank: The rank whose state to load, from a checkpoint with one file per rank.
            progress: Called as it goes on: ``progress(what, done_bytes, total_bytes)``; see
                `nvmeio.progress`.
            together: All ranks of the process group call this, and each reads an equal part of what
                they want in common, and gets the rest from the others (see `nvmeio.load`). Rank 0
                says which checkpoint is the latest. Each may have a `map_location` of its own.
                With ``shared=False`` it is always so, and each reads what is on its drive.

        Returns:
            The state. If each rank has its own file and `rank` is None: this rank's own if there
            are as many ranks now as then, else the list of all states, by rank.

        Raises:
            TransferError: There is no such step (a `FileNotFoundError`; says which there are), or
                it cannot be read.
            IntegrityError: It is damaged; says where, and which other steps are there.
            ValueError: It has no file of such a rank.
            Exception: As for `nvmeio.load`.

        Works on a closed Checkpointer, too. No rank waits for another, but with `together`: where
        one fails then, dies or does not come, all others raise a `TransferError` that says which.
        """
        begun = self._begin_restore(together)
        with begun.telling():
            options = LoadOptions.checked(map_location, weights_only=weights_only)
            read = self._restoring(step, rank, begun)
            with LongCall("restore", self.directory, progress) as call:
                how = HowToLoad(options, self._saver.open_handle, call)
                with self._naming_others():
                    state = run_interruptible(lambda: read(how), call.cancel).result()
                self._saver.lineage.goes_on = True
                return state

    async def async_restore(
        self,
        step: int | None = None,
        map_location: MapLocation = None,
        weights_only: bool = True,
        *,
        rank: int | None = None,
        progress: Progress | None = None,
        together: bool = False,
    ) -> Any:
        """`restore`, awaited: a thread does it. Cancelling stops the reading."""
        begun = self._begin_restore(together)
        with begun.telling():
            options = LoadOptions.checked(map_location, weights_only=weights_only)
            read = self._restoring(step, rank, begun)
            with LongCall("restore", self.directory, progress) as call:
                how = HowToLoad(options, self._saver.open_handle, call)
                with self._naming_others():
                    state = await in_thread(lambda: read(how).result(), call.cancel)
                self._saver.lineage.goes_on = True
                return state

    def _begin_restore(self, together: bool) -> Attempts[Any]:
        """Begin before anything is refused, because the other ranks wait for this one."""
        if self._saver.setup.drives is not None:
            return Attempts(partial(self._saver.ranks, PartRanks))
        if together and self._store.size > 1:
            return Attempts(partial(self._saver.ranks, LoadingRanks))
        return Attempts(lambda: ALONE)

    def _restoring(
        self, step: int | None, rank: int | None, begun: Attempts[Any]
    ) -> Callable[[HowToLoad], Loaded]:
        number = None if step is None else _checked_step(step)
        if rank is not None:
            _checks.integer("rank", rank, 0)
        size, own, drives = self._store.size, self._store.rank, self._saver.setup.drives
        wanted = Wanted[Any](self.directory, number, rank, size, own, begun.next)

        def read(how: HowToLoad) -> Loaded:
            self._saver.wait_for_ends(how.call)
            return restore(wanted, how) if drives is None else restore_parts(wanted, drives, how)

        return read

    def _naming_others(self) -> AbstractContextManager[None]:
        """The errors of a damaged checkpoint say which others there are."""
        if self._saver.setup.drives is not None:  # all ranks would have to look
            return contextlib.nullcontext()
        return naming_others(self.directory)

    # A training, gone on with

    def resume(
        self,
        *,
        step: int | None = None,
        strict: bool = True,
        progress: Progress | None = None,
        **parts: Any,
    ) -> int:
        """Go on from the latest checkpoint, or begin. Returns the step that comes next.

        Brings back each part, and the random states of torch, numpy, Python and (where it is in
        use) CUDA. `training_state` is what to save. The parts are remembered for it. Saves of this
        Checkpointer that are under way are waited for first, as in `restore`.

        Args:
            step: The step to go back to, one of `steps`; None for the latest.
            strict: Refuse a checkpoint that has other parts. False brings back those that both
                have, and the log names the others.
            progress: As for `restore`.
            parts: Whatever has `state_dict` and `load_state_dict`, by names of your own: model,
                optimizer, scheduler, scaler, a data loader that keeps its place (StatefulDataLoader
                of torchdata). None is left out.

        Returns:
            The step after that of the checkpoint; 0 where there is none.

        Raises:
            TypeError: A part has no `state_dict` and `load_state_dict`.
            ValueError: The checkpoint holds other parts, was not made from `training_state`, or a
                part does not take its state. Says which. The parts before it have theirs then.
            TransferError, IntegrityError: As for `restore`. A damaged checkpoint is never passed
                over: the error says which other steps there are, for `step`.

        Examples:
            >>> with nvmeio.Checkpointer("checkpoints") as checkpointer:
            ...     first = checkpointer.resume(model=model, optimizer=optimizer, data=loader)
            ...     for step, batch in enumerate(loader, first):
            ...         train(batch)
            ...         checkpointer.save_sync(checkpointer.training_state(), step)
        """
        self._training = training = Training(parts)
        number = self.latest_step() if step is None else _checked_step(step)
        if number is None:
            return 0
        training.load(self.restore(number, "cpu", progress=progress), self._named(number), strict)
        return number + 1

    async def async_resume(
        self,
        *,
        step: int | None = None,
        strict: bool = True,
        progress: Progress | None = None,
        **parts: Any,
    ) -> int:
        """`resume`, whose reading is awaited."""
        self._training = training = Training(parts)
        number = None if step is None else _checked_step(step)
        if number is None:
            look = Cancellation()
            number = await in_thread(partial(self._latest_step, look), look.cancel)
        if number is None:
            return 0
        state = await self.async_restore(number, "cpu", progress=progress)
        training.load(state, self._named(number), strict)
        return number + 1

    def training_state(self) -> dict[str, Any]:
        """The state that `resume` brings back: the states of its parts, and the random states.

        Raises:
            ValueError: `resume` was not called; or several ranks save one file of what has to be
                the same on all of them, which their random states are not.
        """
        if self._training is None:
            raise ValueError(
                "call resume() first, with the parts: resume(model=model, optimizer=optimizer)"
            )
        if self._store.size > 1 and self._layout == "one":
            raise ValueError(
                f"{counted(self._store.size, 'rank')} have random states of their own, and "
                "layout='one' saves what all have in common: make the Checkpointer with "
                "layout='per_rank'"
            )
        return self._training.state()

    def _named(self, step: int) -> str:
        path = retention.ranks_path if self._layout == "per_rank" else retention.file_path
        return f"step {step} of {self.directory} ({os.path.basename(path(self.directory, step))})"

    def steps(self) -> list[int]:
        """The steps that are complete, in ascending order; [] if there is no directory.

        In the steady state ``keep + 1`` of them: the next save overwrites the oldest. A save that
        is under way is not among them, and not waited for: `wait_sync` does that. With
        ``shared=False`` all ranks call this, and are told the same.
        """
        if self._saver.setup.drives is not None:
            return sorted({save.step for save in self._whole()})
        return sorted({each.step for each in retention.generations(self.directory)})

    def latest_step(self) -> int | None:
        """The step that `restore` would load; None if there is none.

        Like `restore` it waits first for saves of this Checkpointer that are under way. With
        ``shared=False`` all ranks call this, and are told the same.
        """
        return self._latest_step(Cancellation())

    def _latest_step(self, look: Cancellation) -> int | None:
        self._saver.wait_for_ends(look)
        if self._saver.setup.drives is not None:
            whole = self._whole()
            return whole[-1].step if whole else None
        newest = retention.newest(self.directory)
        return None if newest is None else newest.step

    def _whole(self) -> list[Save]:
        """The saves that are whole on the ranks' drives, the oldest first."""
        drives = self._saver.setup.drives
        assert drives is not None
        ranks = self._saver.ranks(PartRanks)
        with LongCall("restore", self.directory, None) as call:
            return run_interruptible(lambda: whole_saves(ranks, drives, call), call.cancel)

    # The end

    def close(self) -> None:
        """Refuse new saves, wait until all is durable, give memory and handle back.

        Raises the failure of the last save, if nobody has seen it yet; closed anyway.
        Idempotent. Blocks: in a coroutine use `aclose`. An interrupt ends the waiting only: call it
        again to wait on.
        """
        closing = self._closing
        if closing is None or closing.seen:
            closing = self._closing = begun(self._saver.close, "nvmeio-close", closes=True)
        closing.wait()
        closing.result()

    async def aclose(self) -> None:
        """`close`, awaited. A cancelled one closes anyway, then raises `CancelledError`."""
        await in_thread(self._saver.close, lambda: None)

    def __del__(self) -> None:
        saver = getattr(self, "_saver", None)
        if saver is None or saver.closed:
            return
        try:
            job = saver.unfinished
            if job is not None:
                state = "failed" if job.done() else "is being written, and will be finished"
                warnings.warn(
                    f"{self!r} was dropped: step {job.step} {state}. Close the Checkpointer, or "
                    "use it in a with statement",
                    ResourceWarning,
                    stacklevel=2,
                    source=self,
                )
        finally:  # warnings may be errors
            saver.abandon()

    # Properties

    @property
    def directory(self) -> str:
        """The directory of the checkpoints."""
        return self._saver.directory

    @property
    def keep(self) -> int:
        """How many checkpoints stay whole at every moment."""
        return self._keep

    @property
    def closed(self) -> bool:
        """Whether saves are refused."""
        return self._saver.closed

    def __repr__(self) -> str:
        state = "closed" if self.closed else "open"
        job = self._saver.unfinished
        doing = "" if job is None or job.done() else f", writing step {job.step}"
        return f"<nvmeio.Checkpointer {self.directory!r} keep={self._keep} {state}{doing}>"


def _checked_step(step: int) -> int:
    return _checks.integer("step", step, 0)

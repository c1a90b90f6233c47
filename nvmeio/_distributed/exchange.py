"""Bytes from one rank to all others, through gloo, for ranks that load together.

A process group of its own, made for one load over the ranks of the caller's and dropped behind it:
no collective of it can meet one of the training, it has a time limit of its own, and if a rank
fails in the middle, the caller's group is unharmed.

Collectives come in the same order on all ranks, so a rank that has failed goes on with them until
all have agreed to stop (`agreeing`). One that cannot, for it died or hangs, is given up: by gloo,
whose connections end with the process, or by the time limit.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from nvmeio._bindings import memory_at
from nvmeio._distributed.rank_store import RankStore, pauses
from nvmeio._threads import interruptible, threads
from nvmeio._threads.interruptible import Cancellation, Cancelled
from nvmeio.errors import BackendUnavailableError, TransferError

logger = logging.getLogger("nvmeio")

# A rank that learns of another's failure, or is to stop, waits this long for a collective in
# progress: then all of them end it, and nothing of it is left behind.
_GRACE_S = 1.0

# Between two looks whether another rank has failed, while a collective is under way.
_LOOK_S = 0.05

# The most that a rank tells the others in one go.
_TOLD_BYTES = 1024

# Others wait no longer than this for a rank that died when all else was done.
_PARTING_S = 5.0


class Exchange:
    """Sends bytes between the ranks of one load. For one thread.

    A collective may take `timeout_s`. `check` raises if another rank has failed, `fail` tells the
    others that this one has, `stop` ends the waiting soon. Raises TransferError if not all ranks
    came, BackendUnavailableError if torch is built without gloo.
    """

    def __init__(
        self,
        store: RankStore,
        timeout_s: float,
        check: Callable[[], None],
        fail: Callable[[BaseException], None],
        stop: Cancellation,
    ) -> None:
        self.rank, self.size = store.rank, store.size
        self._store = store
        self._timeout_s = timeout_s
        self._check = check
        self._fail = fail
        self._stop = stop
        self._left: list[Any] = []  # collectives that were given up
        self._group = self._new_group()

    def _new_group(self) -> Any:
        import torch.distributed as dist

        if not dist.is_gloo_available():
            raise BackendUnavailableError(
                "ranks load together through gloo, and this torch is built without it: load "
                "without process_group",
                attempts=[("gloo", "not in this torch")],
            )
        limit = timedelta(seconds=self._timeout_s)
        make: Any = dist.ProcessGroupGloo
        arguments = (self._store.for_torch("gloo"), self.rank, self.size, limit)
        # It waits for all ranks to come, and one may have given up.
        making = interruptible.Job(partial(make, *arguments), "nvmeio-exchange")
        making.start()
        self._until(lambda: making.done, making)
        with self._naming():
            return making.result()

    def start(self, memory: torch.Tensor, root: int) -> Any:
        """Begin to send bytes from `root` to all; the same call on all ranks, in one order.

        `memory` is contiguous, in host memory, and as long on each rank: at the root what is sent,
        elsewhere where it comes to. To be left alone until `wait`.
        """
        with self._naming():
            return self._group.broadcast(memory, root)

    def wait(self, work: Any) -> None:
        """Wait until what was started is done.

        Raises TransferError if a rank died, hangs, or failed; Cancelled if this one was told to
        stop.
        """
        self._until(work.is_completed, work)
        with self._naming():
            work.wait()

    def _until(self, done: Callable[[], bool], work: Any) -> None:
        until: float | None = None
        reason: BaseException | None = None
        looked = time.monotonic()
        for _ in pauses():
            if done():
                return
            now = time.monotonic()
            if until is None and now - looked > _LOOK_S:
                looked = now
                reason = self._reason()
                until = None if reason is None else now + _GRACE_S
            elif until is not None and now > until:
                assert reason is not None
                self._left.append(work)
                raise reason

    @contextlib.contextmanager
    def agreeing(self) -> Iterator[None]:
        """Have all ranks do the body, or none go on; then nothing of it is under way.

        Raises what the body raised; else a `TransferError` with what another rank said.
        """
        failed: BaseException | None = None
        try:
            self._stop.check()
            yield
            self._stop.check()
        except BaseException as error:
            failed = error
            self._fail(error)
        try:
            self._agree(failed)
        finally:
            del failed  # no cycle with the traceback

    def _agree(self, failed: BaseException | None) -> None:
        import torch.distributed as dist

        flag = torch.tensor([failed is not None], dtype=torch.uint8, device="cpu")
        with self._naming():
            work = self._group.allreduce(flag, dist.ReduceOp.MAX)
        try:
            self.wait(work)
        except (TransferError, Cancelled):
            if failed is None:
                raise
        if failed is not None:
            raise failed
        if flag.item():
            self._check()
            raise self._store.error(errno.ECANCELED, "another rank failed, and did not say of what")

    def share(self, data: bytes | None, root: int) -> bytes:
        """Send bytes of `root` to all; `data` is None elsewhere."""
        size = torch.tensor([len(data or b"")], dtype=torch.int64, device="cpu")
        self.wait(self.start(size, root))
        memory = torch.empty(int(size.item()), dtype=torch.uint8, device="cpu")
        if data:
            memory.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        if memory.nbytes:
            self.wait(self.start(memory, root))
        return data if data is not None else bytes(memory_at(memory.data_ptr(), memory.nbytes))

    # For a thread that does nothing else: it waits in gloo, and nothing but the time limit ends it

    def tell(self, told: dict[str, Any]) -> list[dict[str, Any]]:
        """Tell all ranks a few hundred bytes of JSON; what each said, by rank."""
        text = json.dumps(told).encode().ljust(_TOLD_BYTES)
        if len(text) > _TOLD_BYTES:
            raise ValueError(f"a message of {len(text)} bytes is too long")
        mine = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        heard = [torch.empty_like(mine) for _ in range(self.size)]
        with self._naming():
            self._group.allgather([heard], [mine]).wait()
        return [json.loads(each.numpy().tobytes()) for each in heard]

    def swap(
        self, sent: Sequence[tuple[int, torch.Tensor]], received: Sequence[tuple[int, torch.Tensor]]
    ) -> None:
        """Send contiguous bytes in host memory to ranks, and receive others from them.

        After TransferError (a rank died, or hangs) nobody touches the memory any more.
        """
        works: list[Any] = []
        failed: RuntimeError | None = None
        try:
            for rank, memory in received:
                works.append(self._group.recv([memory], rank, 0))
            for rank, memory in sent:
                works.append(self._group.send([memory], rank, 0))
        except RuntimeError as error:
            failed = error
        for work in works:  # all of them: gloo writes to their memory until they have ended
            try:
                work.wait()
            except RuntimeError as error:
                failed = failed or error
        if failed is not None:
            with self._naming():
                raise failed

    def end(self, well: bool) -> None:
        """Give it back. Never raises.

        If all went `well`, all ranks come here: the first to leave must not end the others'
        connections.
        """
        group, self._group = self._group, None
        if group is None:
            return
        if well:
            import torch.distributed as dist

            with contextlib.suppress(Exception):
                work = group.allreduce(torch.zeros(1, device="cpu"), dist.ReduceOp.MAX)
                until = time.monotonic() + _PARTING_S
                for _ in pauses():
                    if work.is_completed():
                        return
                    if time.monotonic() > until:
                        self._left.append(work)
                        break
        # gloo waits in its end for what is still under way, for as long as the time limit.
        remains = [group, *self._left]
        del group
        self._left.clear()
        with contextlib.suppress(RuntimeError, MemoryError):
            threads.start(remains.clear, "nvmeio-exchange", _no_thread)

    def _reason(self) -> BaseException | None:
        """The reason not to wait for what is under way, if there is one."""
        if self._stop.cancelled:
            return Cancelled()
        try:
            self._check()
        except TransferError as failed:
            # A store that is gone is none: the rank that serves it may be done before others.
            return None if failed.errno == errno.ECONNRESET else failed
        return None

    @contextlib.contextmanager
    def _naming(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as failed:
            if isinstance(failed, (TransferError, BackendUnavailableError)):
                raise
            reason = self._reason()
            if isinstance(reason, TransferError):
                raise reason from failed
            late = "imed out" in str(failed) or "timeout" in str(failed).lower()
            raise self._store.error(
                errno.ETIMEDOUT if late else errno.ECONNRESET,
                f"a rank made no progress for {self._timeout_s:g} s, and is given up"
                if late
                else "a rank is gone: its connection ended",
            ) from failed


class NoExchange(Exchange):
    """The exchange of a rank alone, which has read everything itself."""

    def __init__(self) -> None:
        self.rank, self.size = 0, 1

    def start(self, memory: torch.Tensor, root: int) -> Any:
        """Do nothing."""

    def wait(self, work: Any) -> None:
        """Do nothing."""

    @contextlib.contextmanager
    def agreeing(self) -> Iterator[None]:
        yield

    def share(self, data: bytes | None, root: int) -> bytes:
        return data or b""

    def end(self, well: bool) -> None:
        """Do nothing."""


def _no_thread(failed: BaseException) -> None:
    logger.warning("a process group is given back by the end of the process: %s", failed)

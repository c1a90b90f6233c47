"""How the ranks of a process group agree on one save or load: messages, with a time limit.

Every one has keys of its own in the store that the ranks share (`nvmeio._ranks.rank_store`): set
once, read by whoever needs them. Missing keys are asked for again and again. Each rank counts up a
key of its own while it makes progress; the one that others wait for and that stops counting is
given up after the time limit, by all. Whoever fails says so under one key that everybody looks at.
"""

from __future__ import annotations

import contextlib
import errno
import json
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from nvmeio._io.inflight import Cancelled
from nvmeio._ranks.rank_store import MOST_PAUSE_S, Calls, RankStore, checked_group, pauses
from nvmeio.errors import TransferError

DEFAULT_TIMEOUT_S = 120.0

_BEAT_S = 0.5

# TCPStore refuses values of 8 MiB and more.
_MOST_VALUE_BYTES = 1 << 20

_NO_MEMBER = "make no Checkpointer"

# Checkpointers that were made; whoever does not come is missed by the first save or restore.
_made = Calls("save", "1/failed", "restore/1/failed")


def being_made(group: Any) -> AbstractContextManager[None]:
    """Around the making of a Checkpointer, `store_of` at its end: one that is refused is counted.

    Args:
        group: As for `store_of`.
    """
    return _made.asked(group)


def ranks_of(group: Any) -> int:
    """How many ranks save together. Raises as `store_of`."""
    return 1 if group is None else checked_group(group, _NO_MEMBER)[1]


def store_of(group: Any, directory: str) -> RankStore:
    """What the ranks that save into a directory share.

    Args:
        group: A `torch.distributed.ProcessGroup`, of any backend; None for a process alone.
        directory: Where this one saves, for errors. Not part of the keys' names: ranks that take
            directories of their own for a shared one are to find that out from each other.

    Raises:
        TypeError: `group` is no process group.
        ValueError: This process is no member of it.
    """
    found = _made.begin(group, _NO_MEMBER, directory)
    if found is None:
        return RankStore(None, 0, 1, directory, "save")
    store, number = found
    return store.within(str(number), directory, "save")


class Messages:
    """The messages of one save or load; for a process alone, none are sent.

    Args:
        store: What the ranks share.
        number: Of the save or load: the same on all ranks.
        timeout_s: How long a rank may go without progress, in seconds.
        directory: Where they save or load, for errors.

    Used by one thread at a time, but for `beat`, `fail` and `stop`, which may come from any.
    """

    def __init__(self, store: RankStore, number: int, timeout_s: float, directory: str) -> None:
        self.rank, self.size = store.rank, store.size
        self._timeout_s = timeout_s
        self._store = store
        self._number = number
        self._directory = directory
        self._beaten = 0.0
        self._stopped = False
        self._said: dict[int, tuple[int, float]] = {}  # rank → its count, when that was new

    # Sending

    def put(self, name: str, value: bytes) -> None:
        """Tell all ranks something, once.

        Raises:
            TransferError: The store cannot be reached.
        """
        if self._store.alone:
            return
        key = self._key(name, self.rank)
        parts = range(0, len(value), _MOST_VALUE_BYTES)
        for number, start in enumerate(parts if len(parts) > 1 else ()):
            part = value[start : start + _MOST_VALUE_BYTES]
            self._store.set(f"{key}/{number}", part)
        whole = b"0" + value if len(parts) <= 1 else b"1" + str(len(parts)).encode()
        self._store.set(key, whole)

    def beat(self) -> None:
        """Say that this rank makes progress; costs nothing when called often."""
        now = time.monotonic()
        if self._store.alone or now - self._beaten < _BEAT_S:
            return
        self._beaten = now
        with contextlib.suppress(TransferError):  # whoever waits for something will find out
            self._store.add(self._key("beat", self.rank), 1)

    def fail(self, failed: BaseException) -> None:
        """Tell all ranks that this one cannot go on. Never raises.

        Where one has said so before, that stays: it is the cause.
        """
        if self._store.alone:
            return
        code = failed.errno if isinstance(failed, OSError) else None
        if isinstance(failed, Cancelled):
            failed = Cancelled("it was cancelled")
        text = f"{type(failed).__name__}: {failed}" if str(failed) else type(failed).__name__
        told = json.dumps({"rank": self.rank, "errno": code, "text": text[:4096]})
        key = f"{self._number}/failed"
        with contextlib.suppress(Exception):
            if not self._store.check([key]):
                self._store.set(key, told.encode())

    def stop(self) -> None:
        """Let this rank wait for nobody any more: whatever waits raises `Cancelled`."""
        self._stopped = True

    # Receiving

    def get(self, name: str, rank: int) -> bytes:
        """What a rank told, as soon as it has.

        Raises:
            TransferError: A rank failed (with its errno), or made no progress (ETIMEDOUT).
            Cancelled: `stop` was called.
        """
        key = self._key(name, rank)
        self._wait_for(key, rank)
        value: bytes = self._store.get(key)
        if value[:1] == b"0":
            return value[1:]
        return b"".join(self._store.get(f"{key}/{number}") for number in range(int(value[1:])))

    def gather(self, name: str) -> list[bytes]:
        """What each rank told, by rank. Raises as `get`."""
        return [self.get(name, rank) for rank in range(self.size)]

    def has_told(self, name: str, value: bytes) -> bool:
        """Whether a rank has told just this; of those that have told something so far.

        Never raises and never waits: where the store cannot be reached, nothing is known of it.
        """
        if self._store.alone:
            return False
        keys = (self._key(name, rank) for rank in range(self.size))
        with contextlib.suppress(TransferError):
            return any(
                self._store.check([key]) and self._store.get(key) == b"0" + value for key in keys
            )
        return False

    def check(self) -> None:
        """Raise if a rank has failed, as `get` does."""
        key = f"{self._number}/failed"
        if not self._store.alone and self._store.check([key]):
            raise self._failure(json.loads(self._store.get(key)))

    def wait_for_others(self, name: str, limit_s: float) -> None:
        """Until all others have told something; for a limited time, and never raises."""
        until = time.monotonic() + limit_s
        keys = [self._key(name, rank) for rank in range(self.size) if rank != self.rank]
        with contextlib.suppress(TransferError):
            while not self._store.alone and time.monotonic() < until:
                if self._store.check(keys):
                    return
                time.sleep(MOST_PAUSE_S)

    def _wait_for(self, key: str, rank: int) -> None:
        self._said.pop(rank, None)
        for _ in pauses():
            if self._stopped:
                raise Cancelled
            if self._store.check([key]):
                return  # whoever else failed: what was told holds
            self.check()
            self.beat()
            self._check_progress(rank)

    def _check_progress(self, rank: int) -> None:
        now = time.monotonic()
        count, since = self._said.get(rank, (-1, now))
        if now - since < min(_BEAT_S, self._timeout_s) and count >= 0:
            return
        new = int(self._store.add(self._key("beat", rank), 0))
        if new != count:
            self._said[rank] = (new, now)
        elif now - since > self._timeout_s:
            failed = TransferError(
                errno.ETIMEDOUT,
                operation=self._store.operation,
                path=self._directory,
                detail=f"rank {rank} of {self.size} made no progress for {self._timeout_s:g} s: "
                f"it died, hangs, or did not call {self._store.operation}, or without this "
                "process_group; older checkpoints are as they were",
            )
            self.fail(failed)
            raise failed

    def _failure(self, told: dict[str, Any]) -> TransferError:
        return TransferError(
            told["errno"] or errno.ECANCELED,
            operation=self._store.operation,
            path=self._directory,
            detail=f"rank {told['rank']} of {self.size} could not {self._store.operation}: "
            f"{told['text']}",
        )

    def _key(self, name: str, rank: int) -> str:
        return f"{self._number}/{name}/{rank}"

    def forget(self, names: Sequence[str]) -> None:
        """Delete this rank's keys of a round that all ranks have left.

        Not those of others: to get a key that another one deletes just now would wait for it.
        """
        if self._store.alone:
            return
        keys = [self._key(name, self.rank) for name in names]
        if self.rank == 0:
            keys.append(f"{self._number}/failed")
        for key in keys:
            with contextlib.suppress(Exception):  # a store that cannot: a few bytes stay
                if not self._store.check([key]):
                    continue
                value = self._store.get(key)
                if value[:1] == b"1" and "/beat/" not in key:
                    for number in range(int(value[1:])):
                        self._store.delete(f"{key}/{number}")
                self._store.delete(key)

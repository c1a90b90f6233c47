"""Messages of ranks: keys and values in the store of torch.distributed, no collectives.

Collectives are the training's. Those of two threads on one group meet in a different order on every
rank, which hangs or mixes their data; a group of our own would do, but one rank that fails in the
middle leaves it in no known state. The store that torch.distributed itself was set up with (a
TCPStore as a rule) has neither fault.

Nothing waits in the store: a blocking read would hold the connection that training shares. Who
waits asks again and again, at intervals that grow (`pauses`).
"""

from __future__ import annotations

import contextlib
import errno
import json
import time
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from typing import Any

from nvmeio._distributed import DEFAULT_TIMEOUT_S
from nvmeio._distributed.asking import Asker
from nvmeio.errors import TransferError

FIRST_PAUSE_S = 0.0005
MOST_PAUSE_S = 0.02


def several() -> bool:
    """Whether the default process group has more than one rank."""
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def checked_group(group: Any, otherwise: str) -> tuple[int, int, str]:
    """This process's rank in a group, its size, and a name for who its members are.

    Raises TypeError if it is not a process group, ValueError if this process is not a member of it,
    with what to do `otherwise`.
    """
    import torch.distributed as dist

    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"process_group must be a torch.distributed.ProcessGroup, not {group!r:.80}; "
            "torch.distributed.group.WORLD is the group of all ranks"
        )
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise ValueError(f"this process is not a member of process_group: {otherwise}")
    return rank, size, ",".join(map(str, dist.get_process_group_ranks(group)))


class RankStore:
    """Keys and values that the ranks of a group share, under a name of their own.

    `store` is torch.distributed's; None for a process alone, which tells nobody anything. Errors
    name `path` and `operation`. Calls raise TransferError if the store cannot be reached, or does
    not answer within `limit_s` (ETIMEDOUT). `asker` makes the calls, one at a time; by default a
    new one does.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        path: str,
        operation: str,
        limit_s: float = DEFAULT_TIMEOUT_S,
        asker: Asker | None = None,
    ) -> None:
        self.rank, self.size = rank, size
        self._limit_s = limit_s
        self._asker = asker or Asker()
        self._store = store
        self.path = path
        self.operation = operation

    @classmethod
    def of_group(
        cls,
        group: Any,
        name: str,
        path: str,
        operation: str,
        limit_s: float = DEFAULT_TIMEOUT_S,
    ) -> RankStore:
        """The store of a group of this process, on a connection of its own if torch has that.

        `name` is the same on all ranks, and used once. TransferError (ETIMEDOUT) if the store does
        not answer within `limit_s`; ValueError if there is none.
        """
        import torch.distributed as dist

        rank, size = dist.get_rank(group), dist.get_world_size(group)
        shared: Any = dist.distributed_c10d._get_default_store()
        if shared is None:
            raise ValueError(
                "ranks communicate through a process group's store, which an MPI group lacks: "
                'use init_process_group("gloo") or "nccl"'
            )
        store = cls(shared, rank, size, path, operation).limited(limit_s)
        store._store = _prefixed(f"nvmeio/{name}", store._connection())
        return store

    @classmethod
    def of_one(cls, path: str, operation: str) -> RankStore:
        return cls(None, 0, 1, path, operation)

    @property
    def alone(self) -> bool:
        return self._store is None

    def within(self, name: str, path: str, operation: str) -> RankStore:
        """Keys of their own in this store, under a name that is used once."""
        store = None if self._store is None else _prefixed(name, self._store)
        return RankStore(store, self.rank, self.size, path, operation, self._limit_s, self._asker)

    def limited(self, limit_s: float) -> RankStore:
        """The same keys, with another limit for each call; one that no limit can be is left out.

        A call with such a `timeout_s` is refused, and the others must be told.
        """
        if not (isinstance(limit_s, (int, float)) and limit_s > 0):
            limit_s = self._limit_s
        rest = self.rank, self.size, self.path, self.operation
        return RankStore(self._store, *rest, limit_s, self._asker)

    def for_torch(self, name: str) -> Any:
        """The store under a name, for what torch itself asks it.

        torch waits within the store, which holds the connection: nothing could be asked meanwhile.
        So it has one of its own, if torch can make another (from 2.9 on).
        """
        return _prefixed(name, self._connection())

    def _connection(self) -> Any:
        """Another connection to the store, if torch can make one (from 2.9 on); else this one.

        To make one waits for the rank that serves the store, without a limit of its own.
        """
        clone = getattr(self._store, "clone", None)
        if clone is None:
            return self._store

        def connected() -> Any:
            try:
                return clone()
            except (AttributeError, RuntimeError):
                return self._store

        return self._ask(connected)

    @property
    def timeout_s(self) -> float:
        """The time limit of the store's own waits, from the setup of the process group."""
        return float(self._store.timeout.total_seconds())

    def set(self, key: str, value: bytes) -> None:
        self._ask(self._store.set, key, value)

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ask(self._store.check, list(keys)))

    def get(self, key: str) -> bytes:
        """The value of a key that is there."""
        value: bytes = self._ask(self._store.get, key)
        return value

    def fail(self, key: str, failed: BaseException | str, **more: Any) -> None:
        """Tell all ranks, under a key that they look at, why this one does not go on. Never raises.

        If one has said so before, that stays: it is the cause. `more` goes with it, in JSON.
        """
        if self._store is None:
            return
        code = failed.errno if isinstance(failed, OSError) else None
        text = str(failed)
        if isinstance(failed, BaseException):
            text = f"{type(failed).__name__}: {failed}" if text else type(failed).__name__
        told = {"rank": self.rank, "errno": code, "text": text[:4096], **more}
        with contextlib.suppress(Exception):
            if not self.check([key]):
                self.set(key, json.dumps(told).encode())

    def failure(self, key: str) -> dict[str, Any] | None:
        """The failure that a rank told by `fail`; None if none has."""
        return json.loads(self.get(key)) if self.check([key]) else None

    def add(self, key: str, number: int) -> int:
        """Count a key up, from 0, and return it."""
        return int(self._ask(self._store.add, key, number))

    def delete(self, key: str) -> None:
        """Delete a key; a store that cannot keeps a few bytes. Never raises."""
        with contextlib.suppress(Exception):
            self._ask(self._store.delete_key, key)

    def _ask(self, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return self._asker.ask(call, arguments, self._limit_s)
        except TimeoutError as failed:
            raise self.error(
                errno.ETIMEDOUT,
                f"the store of torch.distributed did not answer for {self._limit_s:g} s: the rank "
                "that serves it (rank 0, as a rule) hangs, or its machine was cut off",
            ) from failed
        except Exception as failed:
            raise self.error(
                errno.ECONNRESET,
                f"the store of torch.distributed cannot be reached ({failed}): the rank that "
                "serves it is gone, or the process group was destroyed before this was closed",
            ) from failed

    def error(self, code: int, detail: str) -> TransferError:
        return TransferError(code, operation=self.operation, path=self.path, detail=detail)


class Calls:
    """Numbers the joint calls of a group's ranks, which all come in the same order.

    A call that is refused before its group is known has no number, and the others give it up in
    vain. The next one finds that out, and leaves those numbers out. So it does for calls of the
    same path without a group, which may have been meant for all ranks.

    `operation` is a part of the keys' names. `failed` are the keys, below the number, under which a
    rank says (`RankStore.fail`) that it does not go on.
    """

    def __init__(self, operation: str, *failed: str) -> None:
        self._operation = operation
        self._failed = failed
        self._counts: dict[str, int] = {}  # by the keys' names
        self._refused = 0  # since the last number was taken
        self._alone = ("", 0)  # a path, and the calls of it without a group, one after the other

    @contextlib.contextmanager
    def asked(self, group: Any) -> Iterator[None]:
        """Surround all that can refuse a call, `begin` too: a refused call is counted."""
        before = self._refused
        try:
            yield
        except BaseException:
            if group is not None:
                self._refused = before + 1
            raise

    def begin(
        self, group: Any, otherwise: str, path: str, limit_s: float, of: str = ""
    ) -> tuple[RankStore, int] | None:
        """Begin one more call of all ranks; what can refuse it before is within `asked`.

        `group` is None for a process alone, `otherwise` what a process does that is not a member.
        Calls `of` each subject are counted separately. Each question to the store may take
        `limit_s`. Returns the store that all calls of the group share,
        and the number of this one, from 1; None if there is no other rank.
        """
        alone = self._alone[1] if self._alone[0] == path else 0
        if group is None:
            if several():
                self._alone = path, alone + 1
            return None
        with self.asked(group):
            _, size, members = checked_group(group, otherwise)
            if size == 1:
                return None
            digest = sha256(f"{members} {of}".encode()).hexdigest()[:16]
            name = f"{self._operation}/{digest}"
            store = RankStore.of_group(group, name, path, self._operation, limit_s)
            number = self._counts.get(digest, 0) + 1
            for _ in range(self._refused + alone):
                if not self._given_up(store, number):
                    break
                number += 1
        self._counts[digest] = number
        self._refused = 0
        self._alone = "", 0
        return store, number

    def _given_up(self, store: RankStore, number: int) -> bool:
        """Whether the others have waited for this rank, and do so no longer."""
        told = [store.failure(f"{number}/{failed}") for failed in self._failed]
        return any(each is not None and each["errno"] == errno.ETIMEDOUT for each in told)


def _prefixed(name: str, store: Any) -> Any:
    import torch.distributed as dist

    return dist.distributed_c10d.PrefixStore(name, store)


def pauses() -> Iterator[None]:
    """Pauses between two looks, longer and longer."""
    pause = FIRST_PAUSE_S
    while True:
        yield
        time.sleep(pause)
        pause = min(pause * 1.5, MOST_PAUSE_S)

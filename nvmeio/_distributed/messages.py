"""The ways in which ranks act together: meet, agree, fail together, hand bytes on.

Each save, load or stream has messages of its own, with a time limit: keys in the store that the
ranks share (`rank_store`), set once, read by the ranks that need them. Missing keys are asked for
again and again. Each rank counts up a key of its own while it makes progress; the one that others
wait for and that stops counting is given up after the time limit, by all. A rank that fails says so
under one key that everybody looks at. Bytes go another way (`exchange`).
"""

from __future__ import annotations

import contextlib
import errno
import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

from nvmeio._distributed.exchange import Exchange
from nvmeio._distributed.rank_store import MOST_PAUSE_S, RankStore, pauses
from nvmeio._threads.interruptible import Cancellation, Cancelled
from nvmeio.errors import TransferError

_BEAT_S = 0.5

# TCPStore refuses values of 8 MiB and more.
_MOST_VALUE_BYTES = 1 << 20


class Messages:
    """The messages of one thing that ranks do together; for a process alone, none are sent.

    `number` is that of the save, load or stream, the same on all ranks. `timeout_s` is how long a
    rank may go without progress. `could_not` is what one that fails could not do, for the others'
    errors; "" for the store's operation. Used by one thread at a time, but for `beat`, `fail` and
    `stop`, which may come from any.
    """

    def __init__(
        self, store: RankStore, number: int, timeout_s: float, could_not: str = ""
    ) -> None:
        self.rank, self.size = store.rank, store.size
        self.timeout_s = timeout_s
        self._store = store.limited(timeout_s)
        self._number = number
        self._could_not = could_not or store.operation
        self._beaten = 0.0
        self._stopped = False
        self._said: dict[int, tuple[int, float]] = {}  # rank → its count, when that was new

    # Sending

    def put(self, name: str, value: bytes) -> None:
        """Tell all ranks something, once; TransferError if the store cannot be reached."""
        if self._store.alone:
            return
        key = self._key(name, self.rank)
        parts = range(0, len(value), _MOST_VALUE_BYTES)
        for number, start in enumerate(parts if len(parts) > 1 else ()):
            self._store.set(f"{key}/{number}", value[start : start + _MOST_VALUE_BYTES])
        whole = b"0" + value if len(parts) <= 1 else b"1" + str(len(parts)).encode()
        self._store.set(key, whole)

    def beat(self) -> None:
        """Say that this rank makes progress; costs nothing when called often."""
        now = time.monotonic()
        if self._store.alone or now - self._beaten < _BEAT_S:
            return
        self._beaten = now
        with contextlib.suppress(TransferError):  # waiting ranks will find out
            self._store.add(self._key("beat", self.rank), 1)

    def fail(self, failed: BaseException) -> None:
        """Say that this rank cannot go on. Never raises; a failure told before stays the cause."""
        if isinstance(failed, Cancelled):
            failed = Cancelled("it was cancelled")
        self._store.fail(self._failed, failed)

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Tell the other ranks, which wait for this one, what the body raises."""
        try:
            yield
        except BaseException as failed:
            self.fail(failed)
            raise

    def stop(self) -> None:
        """Stop all waiting of this rank: it raises `Cancelled`."""
        self._stopped = True

    # Receiving

    def get(self, name: str, rank: int) -> bytes:
        """Wait for what a rank says, and return it.

        Raises TransferError if a rank failed (with its errno), or made no progress (ETIMEDOUT);
        Cancelled after `stop`.
        """
        key = self._key(name, rank)
        self._wait_for(key, rank)
        value: bytes = self._store.get(key)
        if value[:1] == b"0":
            return value[1:]
        return b"".join(self._store.get(f"{key}/{number}") for number in range(int(value[1:])))

    def gather(self, name: str) -> list[bytes]:
        """Wait for what each rank tells; by rank. Raises as `get`."""
        return [self.get(name, rank) for rank in range(self.size)]

    def tell_all(self, name: str, told: Any) -> list[Any]:
        """Tell all ranks something in JSON, and hear what each tells, by rank. Raises as `get`."""
        text = json.dumps(told).encode()
        if self._store.alone:
            return [json.loads(text)]
        self.put(name, text)
        return [json.loads(each) for each in self.gather(name)]

    def agree(self, name: str, told: Any) -> list[Any]:
        """Do as `tell_all`, and raise the failure of a rank that answered and then failed."""
        heard = self.tell_all(name, told)
        self.check()
        return heard

    def exchange(self, stop: Cancellation) -> Exchange:
        """Make the exchange through which ranks send bytes; the caller ends it."""
        store = self._store
        name = f"exchange/{self._number}"
        return Exchange(
            store.within(name, store.path, store.operation),
            self.timeout_s,
            self.check,
            self.fail,
            stop,
        )

    def has_told(self, name: str, value: bytes) -> bool:
        """Whether a rank that has said something said just this.

        Never raises and never waits: if the store cannot be reached, nothing is known of it.
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
        told = None if self._store.alone else self._store.failure(self._failed)
        if told is not None:
            raise self._store.error(
                told["errno"] or errno.ECANCELED,
                f"rank {told['rank']} of {self.size} could not {self._could_not}: {told['text']}",
            )

    def wait_for_others(self, name: str, limit_s: float) -> None:
        """Wait until all others have told something; for a limited time, and never raises."""
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
                return  # another rank failed first: its message counts
            self.check()
            self.beat()
            self._check_progress(rank)

    def _check_progress(self, rank: int) -> None:
        now = time.monotonic()
        count, since = self._said.get(rank, (-1, now))
        if now - since < min(_BEAT_S, self.timeout_s) and count >= 0:
            return
        new = int(self._store.add(self._key("beat", rank), 0))
        if new != count:
            self._said[rank] = (new, now)
        elif now - since > self.timeout_s:
            failed = self._store.error(
                errno.ETIMEDOUT,
                f"rank {rank} of {self.size} made no progress for {self.timeout_s:g} s: "
                f"it died, hangs, or did not call {self._store.operation}, or without this "
                "process_group; older checkpoints are as they were",
            )
            self.fail(failed)
            raise failed

    @property
    def _failed(self) -> str:
        """The key that everybody looks at."""
        return f"{self._number}/failed"

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
            keys.append(self._failed)
        for key in keys:
            with contextlib.suppress(Exception):  # a store that cannot: a few bytes stay
                if not self._store.check([key]):
                    continue
                value = self._store.get(key)
                if value[:1] == b"1" and "/beat/" not in key:
                    for number in range(int(value[1:])):
                        self._store.delete(f"{key}/{number}")
                self._store.delete(key)

"""How the ranks of a process group agree on one save: messages through a store, with a time limit.

Not through collectives. A save goes on in the background while training uses its process group, and
collectives of two threads on one group meet in a different order on every rank, which hangs or
mixes their data. A group of our own would do, but one rank that fails in the middle leaves it in no
known state. The store that torch.distributed itself was set up with (a TCPStore as a rule) has
neither fault: keys are set once, read by whoever needs them, and every save has keys of its own.

Nothing waits in the store: a blocking read would hold the connection that training shares. Missing
keys are asked for again and again, at growing intervals of up to `_MOST_PAUSE_S`. Each rank counts
up a key of its own while it makes progress; the one that others wait for and that stops counting is
given up after the time limit, by all. Whoever fails says so under one key that everybody looks at.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any

from nvmeio._formats import torch_zip
from nvmeio._formats.torch_layout import Layout
from nvmeio._io.inflight import Cancelled
from nvmeio.errors import TransferError

DEFAULT_TIMEOUT_S = 120.0

_FIRST_PAUSE_S = 0.0005
_MOST_PAUSE_S = 0.02
_BEAT_S = 0.5

# TCPStore refuses values of 8 MiB and more.
_MOST_VALUE_BYTES = 1 << 20

# Checkpointers made so far, by group and directory: the ranks make them in the same order.
_made: dict[tuple[str, str], int] = {}


class Ranks:
    """This process among those that save together.

    Args:
        group: A `torch.distributed.ProcessGroup`, of any backend; None for a process alone.
        directory: Where they save: part of the keys' names, and of errors.
        timeout_s: How long a rank may go without progress, in seconds.

    Attributes:
        rank: This process's number in the group.
        size: How many there are.

    Raises:
        TypeError: `group` is no process group.
        RuntimeError: torch.distributed is not set up.
    """

    def __init__(self, group: Any, directory: str, timeout_s: float) -> None:
        self.rank, self.size = 0, 1
        self.timeout_s = timeout_s
        self._directory = directory
        self._store: Any = None
        if group is None:
            return
        import torch.distributed as dist

        if not isinstance(group, dist.ProcessGroup):
            raise TypeError(
                f"process_group must be a torch.distributed.ProcessGroup, not {group!r:.80}; "
                "torch.distributed.group.WORLD is the one of all ranks"
            )
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError("this process is no member of process_group: make no Checkpointer")
        if self.size > 1:
            self._store = self._open_store(dist, group)

    def _open_store(self, dist: Any, group: Any) -> Any:
        store: Any = dist.distributed_c10d._get_default_store()
        with contextlib.suppress(AttributeError, RuntimeError):
            store = store.clone()  # a connection of its own, from torch 2.9 on
        members = ",".join(map(str, dist.get_process_group_ranks(group)))
        key = (members, self._directory)
        number = _made[key] = _made.get(key, 0) + 1
        digest = sha256(f"{members} {os.path.abspath(self._directory)}".encode()).hexdigest()
        return dist.PrefixStore(f"nvmeio/{digest[:16]}/{number}", store)

    def new_round(self, number: int) -> Round:
        """The messages of one save.

        Args:
            number: Of the save: the same on all ranks.
        """
        return Round(self, self._store, number, self._directory)


class Round:
    """The messages of one save; for a process alone, none are sent.

    Used by one thread at a time, but for `beat`, `fail` and `stop`, which may come from any.
    """

    def __init__(self, ranks: Ranks, store: Any, number: int, directory: str) -> None:
        self.rank, self.size = ranks.rank, ranks.size
        self._timeout_s = ranks.timeout_s
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
        if self._store is None:
            return
        key = self._key(name, self.rank)
        parts = range(0, len(value), _MOST_VALUE_BYTES)
        for number, start in enumerate(parts if len(parts) > 1 else ()):
            part = value[start : start + _MOST_VALUE_BYTES]
            self._ask(self._store.set, f"{key}/{number}", part)
        whole = b"0" + value if len(parts) <= 1 else b"1" + str(len(parts)).encode()
        self._ask(self._store.set, key, whole)

    def beat(self) -> None:
        """Say that this rank makes progress; costs nothing when called often."""
        now = time.monotonic()
        if self._store is None or now - self._beaten < _BEAT_S:
            return
        self._beaten = now
        with contextlib.suppress(TransferError):  # whoever waits for something will find out
            self._ask(self._store.add, self._key("beat", self.rank), 1)

    def fail(self, failed: BaseException) -> None:
        """Tell all ranks that this one cannot go on. Never raises.

        Where one has said so before, that stays: it is the cause.
        """
        if self._store is None:
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
        value: bytes = self._ask(self._store.get, key)
        if value[:1] == b"0":
            return value[1:]
        return b"".join(
            self._ask(self._store.get, f"{key}/{number}") for number in range(int(value[1:]))
        )

    def gather(self, name: str) -> list[bytes]:
        """What each rank told, by rank. Raises as `get`."""
        return [self.get(name, rank) for rank in range(self.size)]

    def check(self) -> None:
        """Raise if a rank has failed, as `get` does."""
        key = f"{self._number}/failed"
        if self._store is not None and self._ask(self._store.check, [key]):
            raise self._failure(json.loads(self._ask(self._store.get, key)))

    def wait_for_others(self, name: str, limit_s: float) -> None:
        """Until all others have told something; for a limited time, and never raises."""
        until = time.monotonic() + limit_s
        keys = [self._key(name, rank) for rank in range(self.size) if rank != self.rank]
        with contextlib.suppress(TransferError):
            while self._store is not None and time.monotonic() < until:
                if self._ask(self._store.check, keys):
                    return
                time.sleep(_MOST_PAUSE_S)

    def _wait_for(self, key: str, rank: int) -> None:
        pause = _FIRST_PAUSE_S
        self._said.pop(rank, None)
        while True:
            if self._stopped:
                raise Cancelled
            if self._ask(self._store.check, [key]):
                return  # whoever else failed: what was told holds
            self.check()
            self.beat()
            self._check_progress(rank)
            time.sleep(pause)
            pause = min(pause * 1.5, _MOST_PAUSE_S)

    def _check_progress(self, rank: int) -> None:
        now = time.monotonic()
        count, since = self._said.get(rank, (-1, now))
        if now - since < min(_BEAT_S, self._timeout_s) and count >= 0:
            return
        new = int(self._ask(self._store.add, self._key("beat", rank), 0))
        if new != count:
            self._said[rank] = (new, now)
        elif now - since > self._timeout_s:
            failed = TransferError(
                errno.ETIMEDOUT,
                operation="save",
                path=self._directory,
                detail=f"rank {rank} of {self.size} made no progress for {self._timeout_s:g} s: "
                "it died, hangs, or did not call save; older checkpoints are as they were",
            )
            self.fail(failed)
            raise failed

    def _failure(self, told: dict[str, Any]) -> TransferError:
        return TransferError(
            told["errno"] or errno.ECANCELED,
            operation="save",
            path=self._directory,
            detail=f"rank {told['rank']} of {self.size} could not save: {told['text']}",
        )

    def _ask(self, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except Exception as failed:
            raise TransferError(
                errno.ECONNRESET,
                operation="save",
                path=self._directory,
                detail=f"the store of torch.distributed cannot be reached ({failed}): the rank "
                "that serves it is gone, or the process group was destroyed before the "
                "Checkpointer was closed",
            ) from failed

    def _key(self, name: str, rank: int) -> str:
        return f"{self._number}/{name}/{rank}"

    def forget(self, names: Sequence[str]) -> None:
        """Delete this rank's keys of a round that all ranks have left.

        Not those of others: to get a key that another one deletes just now would wait for it.
        """
        if self._store is None:
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
                        self._store.delete_key(f"{key}/{number}")
                self._store.delete_key(key)


# Do the ranks save the same?

# Where a tensor was, as the pickle says it: each rank has a device of its own. A str of the
# pickle's protocols 1 to 3, or of 4 and later; the length stands before it.
_LOCATION = re.compile(rb"(?:X.\x00\x00\x00|\x8c.)([a-z]+):\d+", re.DOTALL)


def fingerprint(layout: Layout) -> dict[str, Any]:
    """What must be the same on all ranks that write one file, and small.

    Returns:
        "pieces": of all bytes but the storages'; "state": of the storages' number, order and sizes
        and of the pickle, whatever device each tensor was on; "sizes": of the storages alone;
        "records" and "nbytes": how many storages, and of how many bytes.
    """
    pieces = sha256()
    for piece in layout.pieces:
        pieces.update(f"{piece.offset} {len(piece.data)} ".encode())
        pieces.update(piece.data)
    sizes = sha256(repr([record.nbytes for record in layout.records]).encode())
    state = sizes.copy()
    state.update(_LOCATION.sub(rb"\1", _pickle_of(layout)))
    return {
        "pieces": pieces.hexdigest(),
        "state": state.hexdigest(),
        "sizes": sizes.hexdigest(),
        "records": len(layout.records),
        "nbytes": layout.data_nbytes,
    }


def _pickle_of(layout: Layout) -> bytes:
    starts = [piece.offset for piece in layout.pieces]

    def read(offset: int, nbytes: int) -> bytes:
        """Bytes of one piece; fewer where it ends."""
        piece = layout.pieces[max(bisect_right(starts, offset) - 1, 0)]
        return piece.data[offset - piece.offset : offset - piece.offset + nbytes]

    def read_many(wanted: Sequence[tuple[int, int]]) -> list[bytes]:
        return [read(offset, nbytes) for offset, nbytes in wanted]

    archive = torch_zip.parse(read_many, layout.nbytes, "the skeleton of the checkpoint")
    entry = archive.records()["data.pkl"]
    return read(entry.offset, entry.nbytes)


def explain(plans: Sequence[dict[str, Any]]) -> str | None:
    """How the ranks' plans for one file differ; None if they save the same."""
    first = plans[0]
    for rank, plan in enumerate(plans[1:], 1):
        for name, what in (
            ("step", "step {}"),
            ("layout", "layout {!r}"),
            ("checksum", "checksum={}"),
            ("records", "{} storages"),
            ("nbytes", "{} bytes of storages"),
        ):
            if plan[name] != first[name] and name in _COMPARED[first["layout"]]:
                mine, its = what.format(first[name]), what.format(plan[name])
                return f"rank 0 saves {mine}, rank {rank} {its}"
        if first["layout"] == "one":
            for name, what in (
                ("sizes", "the sizes or the order of its storages"),
                ("state", "its structure, names, shapes, dtypes or values that are no tensors"),
            ):
                if plan[name] != first[name]:
                    return f"rank {rank}'s state differs from rank 0's in {what}"
    return None


_COMPARED = {
    "one": ("step", "layout", "checksum", "records", "nbytes"),
    "per_rank": ("step", "layout", "checksum"),
}

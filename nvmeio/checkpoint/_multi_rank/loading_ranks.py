"""Ranks that load one checkpoint together: each reads a part, and has the rest from the others.

    all: what file is it?            messages through the store: the one check that all came
    rank 0: directory and pickle     to the others, who read neither
    all: what goes where             each for its own devices
    all: the storages                _distributed.shared_spans, each byte read once
    each: unpickles

After each step all ranks agree to go on. One that fails tells the others why.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from hashlib import sha256
from typing import Any, Generic, TypeVar

import torch

from nvmeio._distributed.exchange import Exchange
from nvmeio._distributed.messages import Messages
from nvmeio._distributed.rank_store import Calls, RankStore
from nvmeio._distributed.shared_spans import RankSpan, read_together
from nvmeio._files.descriptors import open_error
from nvmeio._formats.torch_archives.torch_file import TorchFile
from nvmeio._io.long_call import LongCall
from nvmeio._io.spans import Span
from nvmeio._threads.interruptible import Cancellation
from nvmeio.checkpoint._directory.retention import Generation
from nvmeio.errors import IntegrityError
from nvmeio.files import File, read_buffered
from nvmeio.handle import AioHandle

_MESSAGES = ("which", "there", "file", "beat")

# The end of an archive is its directory, with the CRC-32 of every record.
_TAIL_BYTES = 64 << 10

_loads = Calls("load", "failed")


class LoadingRanks:
    """The ranks of one load, or a process alone, for which all of this does nothing.

    `number` is the load's: the same on all ranks, one more each time. `timeout_s` is how long a
    rank may make no progress.
    """

    _sources: Sequence[RankSpan] = ()  # the ranks' spans, if not all ranks have all of it

    def __init__(self, store: RankStore, number: int, timeout_s: float) -> None:
        self._store = store
        self._number = number
        self._stop = Cancellation()
        self._messages = Messages(store, number, timeout_s)
        self._exchange: Exchange | None = None
        self.is_over = store.alone  # no rank waits for another one any more
        if not store.alone:
            self._stop.then(self._messages.stop)

    @classmethod
    def of_group(cls, group: Any, timeout_s: float, path: Any) -> LoadingRanks:
        """The ranks of a process group; `ALONE` for a process alone. Raises as `checked_group`."""
        found = _loads.begin(group, "call load without it", str(path), timeout_s)
        return ALONE if found is None else cls(*found, timeout_s)

    @property
    def is_alone(self) -> bool:
        return self._store.alone

    def choose(self, find: Callable[[], Generation], directory: str) -> Generation:
        """The checkpoint that rank 0 finds, as this rank sees it in its own directory."""
        if self.is_alone:
            return find()
        if self._messages.rank == 0:
            first = find()
            told = {"path": os.path.basename(first.path), "of_ranks": first.of_ranks}
            self._messages.put("which", json.dumps(told | {"step": first.step}).encode())
        told = json.loads(self._messages.get("which", 0))
        path = os.path.join(directory, os.path.basename(told["path"]))
        there = self._messages.agree("there", os.path.exists(path))
        if not all(there):
            self.is_over = True  # all ranks find that
            detail = (
                f"rank 0 has found this checkpoint, and rank {there.index(False)} does not find "
                "it: it was replaced meanwhile, or that rank does not see the same directory"
            )
            raise open_error(errno.ESTALE, path, detail)
        return Generation(0, told["step"], path, told["of_ranks"])

    @property
    def together(self) -> bool:
        return self._exchange is not None

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Tell the others what the body raises, as long as they wait for this rank."""
        try:
            yield
        except BaseException as failed:
            if not self.is_over:
                self._messages.fail(failed)
            raise

    def listen(self, call: Cancellation) -> None:
        if not self.is_alone:
            call.then(self._stop.cancel)

    @contextlib.contextmanager
    def loading(self, call: Cancellation) -> Iterator[None]:
        """Surround the load itself, in the thread that does it."""
        self.listen(call)
        try:
            with self.telling():
                yield
        finally:
            self._end(False)

    def meet(self, file: File, together: bool) -> None:
        """See that all have come, and have the same file; `together` if it can be read together.

        Raises:
            IntegrityError: They have not the same.
            ValueError: Some can read it together, others cannot.
            TransferError: A rank has failed, or did not come.
        """
        if self.is_over:
            return
        nbytes = file.size()
        tail = min(nbytes, _TAIL_BYTES)
        digest = sha256(read_buffered(file, nbytes - tail, tail)).hexdigest()
        mine = {"nbytes": nbytes, "tail": digest, "together": together}
        told = self._messages.agree("file", mine)
        self._forget_last()
        self._compare(file.path, told)
        if not together:
            self.is_over = True
            return
        self._exchange = self._messages.exchange(self._stop)

    def _forget_last(self) -> None:
        """Forget the load before, which all ranks have left, because they have come to this one."""
        Messages(self._store, self._number - 1, self._messages.timeout_s).forget(_MESSAGES)

    def _compare(self, path: str, told: Sequence[dict[str, Any]]) -> None:
        """Compare the files; all ranks find the same, so nobody has to tell."""
        for rank, each in enumerate(told):
            if each["nbytes"] == told[0]["nbytes"] and each["tail"] == told[0]["tail"]:
                continue
            self.is_over = True
            what = f"{each['nbytes']} bytes, where rank 0 has {told[0]['nbytes']}"
            if each["nbytes"] == told[0]["nbytes"]:
                what = "as many bytes, and other records"
            raise IntegrityError(
                f"{path}: rank {rank} has another file than rank 0: {what}; give all ranks the "
                "same one, or load without process_group",
                expected=told[0]["tail"],
                found=each["tail"],
            )
        if any(each["together"] != told[0]["together"] for each in told):
            self.is_over = True
            raise ValueError(
                f"{path}: some ranks want all of it on the meta device, or mapped (mmap=True), and "
                "others do not: ranks that load together all read it, or none"
            )

    def open(self, new: Callable[..., TorchFile]) -> TorchFile:
        """The checkpoint, made by `new` from what rank 0 reads for all (``told=``)."""
        exchange = self._exchange
        if exchange is None:
            return new()
        found: list[TorchFile] = []
        with exchange.agreeing():
            if exchange.rank == 0:
                found.append(new())
        if exchange.rank == 0:
            exchange.share(found[0].told(), 0)
        else:
            found.append(new(told=exchange.share(None, 0)))
        return found[0]

    def agreeing(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if self._exchange is None else self._exchange.agreeing()

    def read(
        self,
        get_handle: Callable[[], AioHandle],
        file: File,
        spans: Sequence[Span],
        device: torch.device,
        call: LongCall,
    ) -> list[torch.Tensor]:
        """Read spans, a part of them by each rank, or each byte by one that has it."""
        exchange = self._exchange
        assert exchange is not None
        with exchange.agreeing():
            get_handle()
        return read_together(
            spans,
            device,
            exchange,
            handle=get_handle(),
            file=file,
            call=call,
            sources=self._sources,
        )

    def part(self) -> None:
        """Note that all ranks have all bytes: from here on nobody needs another one."""
        self.is_over = True
        self._end(True)

    def _end(self, well: bool) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.end(well)


Ranks = TypeVar("Ranks", bound=LoadingRanks)


class Attempts(Generic[Ranks]):
    """One load after the other by the ranks, of which the first is begun at once.

    So those that wait for this rank can be told what its caller is refused.
    """

    def __init__(self, new: Callable[[], Ranks]) -> None:
        self._new = new
        self._first = new()
        self._begun = False

    def telling(self) -> AbstractContextManager[None]:
        return self._first.telling()

    def next(self) -> Ranks:
        """The first of them, and later another one."""
        begun, self._begun = self._begun, True
        return self._new() if begun else self._first


ALONE = LoadingRanks(RankStore.of_one("", "load"), 0, 1.0)

"""Ranks that stream one model together: that they have the same one, and how they are connected.

    all: what is streamed, and how     the same on all of them, or nobody goes on
    all: the smallest budget           so that the same layers stay everywhere

If a rank fails before that (a file is missing), it tells the others, which wait for it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from typing import Any

from nvmeio._distributed.exchange import Exchange
from nvmeio._distributed.messages import Messages
from nvmeio._distributed.rank_store import Calls, RankStore
from nvmeio._formats import packed_index
from nvmeio._formats.safetensors.open_set import SafetensorsSet
from nvmeio._io.drives import DriveHandles
from nvmeio._residency.reader import Reader
from nvmeio._threads.closing import on_error
from nvmeio._threads.interruptible import Cancellation
from nvmeio.errors import IntegrityError, counted
from nvmeio.files import read_buffered
from nvmeio.inference._parallel.rank_reader import RankReader, room_bytes, shares
from nvmeio.inference._plan import packed_format
from nvmeio.inference._plan.slot_layout import Read
from nvmeio.inference._plan.units import Unit

# Bytes compared of a file that has no checksums to tell it from another of the same shape.
_TAIL_BYTES = 64 << 10

_streams = Calls("stream", "0/failed")


class Ranks:
    """The ranks of one stream; more than one. `timeout_s`: how long one may make no progress."""

    def __init__(self, store: RankStore, timeout_s: float) -> None:
        self.rank, self.size = store.rank, store.size
        self.timeout_s = timeout_s
        self._store = store
        self._times = 0  # that they met
        self._messages = self._new_messages()
        self._told: dict[str, Any] = {}
        self._exchange: Exchange | None = None

    @classmethod
    def of_group(cls, group: Any, timeout_s: float, path: str) -> Ranks | None:
        """The ranks of a process group; None for a process alone.

        TypeError if `group` is none, ValueError if this process is not a member of it.
        """
        found = _streams.begin(group, "call stream_model without it", path, timeout_s)
        if found is None:
            return None
        store, number = found
        return cls(store.within(str(number), path, "stream"), timeout_s)

    # --- meeting --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Tell the other ranks, which wait for this one, what the block raises."""
        with on_error(self.drop), self._messages.telling():
            yield

    @contextlib.contextmanager
    def opening(self) -> Iterator[None]:
        """Open the stream in this block, the first time or again; all ranks do so as often."""
        if self._exchange is None:
            self._times += 1
            self._messages = self._new_messages()
        with self.telling():
            yield

    def _new_messages(self) -> Messages:
        return Messages(self._store, self._times, self.timeout_s, "open it")

    def meet(self, digest: str, budget: int) -> int:
        """Connect, see that all ranks stream the same (by digests), and return the smallest budget.

        IntegrityError if a rank streams something else, TransferError if one failed or did not
        come.
        """
        self._told = {"digest": digest, "budget": budget}
        self._exchange = self._messages.exchange(Cancellation())
        heard = self._exchange.tell(self._told)
        for rank, each in enumerate(heard):
            if each["digest"] != heard[0]["digest"]:
                raise IntegrityError(
                    f"{self._store.path}: rank {rank} streams another model than rank 0, or the "
                    "same one with other settings (dtype, window, layers, checksum): parts of "
                    "different models cannot be put together. Give all ranks the same model",
                    expected=heard[0]["digest"],
                    found=each["digest"],
                )
        return min(int(each["budget"]) for each in heard)

    def connected(self) -> Exchange:
        """The exchange of the ranks, for its taker to end; a new one if it was taken before."""
        if self._exchange is None:
            self.meet(**self._told)
        exchange, self._exchange = self._exchange, None
        assert exchange is not None
        return exchange

    def drop(self) -> None:
        """End an exchange that nobody has taken; see `Exchange.end`."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.end(False)


def room_for_others(units: Sequence[Unit], ranks: int) -> int:
    """Memory for a rank's part of any unit."""
    return room_bytes([shares(unit.layout.reads, ranks) for unit in units])


def digest_of(opened: SafetensorsSet, units: Sequence[Unit], *settings: Any) -> str:
    """A digest of what must be the same on all ranks: bytes, their places, and their use.

    A packed model's index has its checksums. Other files are told apart by their last bytes.
    """
    found = sha256(repr(settings).encode())
    metadata = dict(opened.metadata)
    part = packed_format.part_of_rank(opened)
    for name in (packed_index.PART, packed_index.SEAL):
        metadata.pop(name, None)
    found.update(json.dumps(metadata, sort_keys=True).encode())
    for file in opened.files:
        nbytes = file.size()
        found.update(str(nbytes).encode())
        if part is None:
            tail = min(nbytes, _TAIL_BYTES)
            found.update(read_buffered(file, nbytes - tail, tail))
    for unit in units:
        described = [(w.name, str(w.dtype), w.shape) for w in unit.weights]
        found.update(repr((unit.name, unit.layout, described)).encode())
    return found.hexdigest()


def check_part(opened: SafetensorsSet, units: Sequence[Unit], ranks: Ranks | None) -> None:
    """Raise ValueError if a directory does not hold the part that this rank is to read.

    It may hold the part of another rank, of another number of ranks, or for other layers. `units`
    are planned, the fixed parts first; `ranks` is None for a process alone.
    """
    part = packed_format.part_of_rank(opened)
    if part is None:
        return
    what = f"{opened.path} holds the part of rank {part.rank} of {part.ranks} of a model"
    if ranks is None:
        raise ValueError(
            f"{what}: stream it with process_group= in {counted(part.ranks, 'process')}, or pack "
            "the model without --ranks"
        )
    if part.ranks != ranks.size:
        raise ValueError(
            f"{what}, and there are {counted(ranks.size, 'rank')}: pack it for as many (nvmeio "
            f"pack --ranks {ranks.size})"
        )
    if part.rank != ranks.rank:
        raise ValueError(f"{what}, and this is rank {ranks.rank}: give each rank its own")
    base = packed_format.base_of(opened)
    for number, unit in enumerate(units):
        reads: Sequence[Read] = unit.layout.reads
        # Rows of an embedding are looked up one by one, and small parts are read by everybody.
        if number and not unit.row_modules:
            reads = shares(reads, ranks.size)[ranks.rank]
        for read in reads:
            held = read.start - base  # up to here; spans lie one behind the other
            for low, high in part.spans:
                held = high if low <= held < high else held
            if held < read.end - base:
                raise ValueError(
                    f"{what}, and not what that rank needs of {unit.name!r}: that is another layer "
                    "than it was packed for (stream it without layers=), or shares weights with "
                    "another one (pack it without --ranks, and give each rank a copy)"
                )


def new_reader(
    ranks: Ranks | None,
    handles: DriveHandles,
    checkpoint: SafetensorsSet,
    units: Sequence[Unit],
    in_pass: Callable[[], bool],
) -> Reader:
    """The reader of a stream's units: with several ranks, each reads a part of each."""
    if ranks is None:
        return Reader(handles.mover)
    exchange = ranks.connected()
    with on_error(exchange.end, False):
        parts = [shares(unit.layout.reads, ranks.size) for unit in units]
        names = [unit.name for unit in units]
        return RankReader(handles, checkpoint, exchange, parts, names, in_pass, ranks.timeout_s)

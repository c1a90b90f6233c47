"""The reader of a stream with several ranks: a part of each unit is read here, the rest comes over.

One thread does all that concerns the others, in rounds; no rank needs to know how many passes the
others make:

    all tell     what they wait for, and whether they are to be waited for
    all choose   the unit that those who wait want, as soon as everybody in a pass wants one
    all read     their part of it, ahead for themselves, or just for the others
    all tell     whether it is there, and whether they take the others' parts
    all swap     parts, into the slots of those who do

A rank that is in no pass, or closing, serves the others: it is not waited for, and sends its parts.
So ranks that make different numbers of passes are allowed, and cost what the odd ones have to read
alone. If a rank ends, everything that others wait for fails, and so do later calls, until all ranks
open it again.

Nothing here leads to the model (see `Resources`).
"""

from __future__ import annotations

import _thread
import errno
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from nvmeio import buffers
from nvmeio._distributed.exchange import Exchange
from nvmeio._formats.packed_index import cuts
from nvmeio._formats.safetensors.open_set import SafetensorsSet
from nvmeio._io.drives import DriveHandles
from nvmeio._pages import PAGE_BYTES, round_down, round_up
from nvmeio._residency.reader import Fill, Reader, WantedBytes
from nvmeio._threads.closing import on_error
from nvmeio._threads.future import SLICE_S
from nvmeio._threads.threads import Thread, log_failure
from nvmeio.errors import ClosedError, TransferError, with_context
from nvmeio.files import File
from nvmeio.inference._plan.slot_layout import Read

# A rank in a pass says so this often, while it computes and asks for nothing.
_BEAT_S = 0.1

# If no rank is in a pass, they check this often whether one is.
_QUIET_S = 0.03

# A rank is waited for this long after its pass: it may be choosing a token for the next one.
LINGER_S = 0.5

# Parts of each unit, by number and rank.
Parts = Sequence[Sequence[Sequence[Read]]]


class SharedFill(Fill):
    """A unit on its way into `host`, a part of it from each rank.

    `reads` are this rank's; `wake` is called when these are there or failed; `arrived` with all of
    it there, before it is done.
    """

    def __init__(
        self,
        number: int,
        host: torch.Tensor,
        reads: Sequence[WantedBytes],
        wake: Callable[[], None],
        arrived: Callable[[], None] | None,
    ) -> None:
        super().__init__(())
        self.number = number
        self.host = host
        self.own = Fill(reads, ended=wake)
        self.nbytes = self.own.nbytes
        self.gathered = arrived
        self.event: Any = None  # on a GPU: its copy has been started
        self.taking = False  # others' bytes are about to come


class RankReader(Reader):
    """A `Reader` that also carries out `SharedFill`s.

    `exchange` is closed with this; `parts` say who reads what of which unit; `in_pass` whether a
    pass of the model is under way; `timeout_s` how long a rank may hold up the others.
    """

    def __init__(
        self,
        handle: DriveHandles,
        checkpoint: SafetensorsSet,
        exchange: Exchange,
        parts: Parts,
        names: Sequence[str],
        in_pass: Callable[[], bool],
        timeout_s: float,
    ) -> None:
        self._exchange = exchange
        self._checkpoint = checkpoint
        self._parts, self._names = parts, names
        self._in_pass = in_pass
        self._was_in_pass = False
        self._passed_at = time.monotonic()  # when one was under way
        self._timeout_s = timeout_s
        self.rank = exchange.rank
        # For parts that only others want.
        self._room = buffers.empty_aligned(max(room_bytes(parts), 1), dtype=torch.uint8)
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._wants: list[SharedFill] = []
        self._wanted_at = time.monotonic()
        self._broken: TransferError | None = None
        self._leaving = False  # when no other one needs this rank
        self._left = False  # at once
        self._quiet = False
        self._needed_at = time.monotonic()
        self._ended = _thread.allocate_lock()  # held until no other rank needs this one
        self._ended.acquire()
        super().__init__(handle)
        self._ranks_thread = Thread(self._serve, "nvmeio-ranks")
        with on_error(super().stop):
            self._ranks_thread.start()

    # --- the window's side, as of Reader -------------------------------------------------------

    def shared(
        self, number: int, host: torch.Tensor, arrived: Callable[[], None] | None
    ) -> SharedFill:
        """A fill that brings a unit, all but its experts."""
        reads = self._wanted(number, lambda read: read.part(host))
        return SharedFill(number, host, reads, self._wake.set, arrived)

    def own_reads(self, number: int) -> Sequence[Read]:
        return self._parts[number][self.rank]

    @property
    def files(self) -> Sequence[File]:
        return self._checkpoint.files

    def submit(self, fill: Fill) -> None:
        if not isinstance(fill, SharedFill):
            super().submit(fill)
            return
        with self._lock:
            if self._broken is None:
                self._wants.append(fill)
                self._wanted_at = time.monotonic()
                self._leaving = self._left
            else:
                _end(fill, self._broken)
        if not fill.done.is_set():
            super().submit(fill.own)
        self._wake.set()

    def wait(self, fill: Fill) -> None:
        if isinstance(fill, SharedFill):
            fill.done.wait()
        else:
            super().wait(fill)

    def cancel(self, fill: Fill) -> None:
        """End a fill; when this returns nobody touches its memory any more."""
        if not isinstance(fill, SharedFill):
            super().cancel(fill)
            return
        with self._lock:
            fill.cancelled = True
            if fill in self._wants:
                self._wants.remove(fill)
            taking = fill.taking
        super().cancel(fill.own)
        if taking:
            fill.done.wait()
        fill.done.set()

    def leave_with_others(self) -> None:
        """Wait until no other rank needs this one; an interrupt ends the waiting at once.

        Others that want nothing for the time limit do not count.
        """
        while True:
            self._leaving = True  # again and again: a pass in another thread takes it back
            if self._ended.acquire(timeout=SLICE_S):
                self._ended.release()
                return

    def stop(self) -> None:
        """End both threads; other ranks that still need this one fail, and say so."""
        self._left = self._leaving = True
        self._wake.set()
        self._ranks_thread.join()
        super().stop()

    # --- rounds, in a thread of their own ------------------------------------------------------

    def _serve(self) -> None:
        failed: BaseException | None = None
        try:
            while self._round():
                pass
        except BaseException as error:
            failed = error
        self._exchange.end(failed is None and not self._left)
        if failed is None:
            failed = ClosedError("the stream of weights is closed: open the model again")
        elif not isinstance(failed, TransferError):
            log_failure(failed, "unexpected error in nvmeio-ranks")
        self._break(failed)
        self._ended.release()

    def _break(self, failed: BaseException) -> None:
        """Fail all fills, now and later: nothing can be gathered any more."""
        path = str(self._checkpoint.path)
        if not isinstance(failed, TransferError):
            detail = f"the ranks do not stream together any more ({failed})"
            failed = TransferError(errno.ECANCELED, operation="stream", path=path, detail=detail)
        advice = "close and reopen the stream on all ranks"
        with self._lock:
            self._broken = with_context(failed, advice)
            for fill in self._wants:
                fill.taking = False
                _end(fill, self._broken)
            self._wants.clear()

    def _round(self) -> bool:
        """Gather one unit, if one is wanted; False when this rank leaves."""
        self._await_reason()
        mine = self._state()
        heard = self._exchange.tell(mine)
        for rank, each in enumerate(heard):
            if each["left"] and rank != self.rank:
                raise self._error(f"rank {rank} has closed its stream")
        if mine["left"] or all(each["leaving"] for each in heard):
            return False
        wants = [each["wants"] for each in heard if each["wants"] is not None]
        needed = [each for each in heard if each["waits"] or each["wants"] is not None]
        self._quiet = not needed
        now = time.monotonic()
        if needed or not self._leaving:
            self._needed_at = now
        elif now - self._needed_at > self._timeout_s:
            self._left = True
        if wants and not any(each["wants"] is None and each["waits"] for each in heard):
            self._gather(choose(wants, len(self._parts)))
        return True

    def _await_reason(self) -> None:
        """Wait until this rank wants something, or must not keep others waiting."""
        if self._wants or self._left:
            return
        if self._in_step():
            self._wake.wait(_BEAT_S)
        elif self._quiet:
            self._wake.wait(_QUIET_S)
        self._wake.clear()

    def _in_step(self) -> bool:
        """Whether others are to wait until this rank wants something."""
        now, in_pass = time.monotonic(), self._in_pass()
        if in_pass or self._was_in_pass:
            self._passed_at = now
        self._was_in_pass = in_pass
        is_waited_for = not self._leaving and now - self._passed_at < LINGER_S
        return is_waited_for and now - self._wanted_at < self._timeout_s

    def _state(self) -> dict[str, Any]:
        waits = self._in_step()
        with self._lock:
            wants = self._wants[0].number if self._wants else None
        return {"wants": wants, "waits": waits, "leaving": self._leaving, "left": self._left}

    def _gather(self, number: int) -> None:
        with self._lock:
            fill = next((each for each in self._wants if each.number == number), None)
        if fill is not None:
            self._await(fill.own, number)
            with self._lock:
                if fill.cancelled:  # others may want it still
                    fill = None
                else:
                    fill.taking = True
                    self._wants.remove(fill)
        if fill is None:
            own = Fill(self._wanted(number, self._in_room()), ended=self._wake.set)
            super().submit(own)
            self._await(own, number)
            self.served_bytes += own.nbytes
        else:
            own = fill.own
        try:
            self._swap(number, own, fill)
        except BaseException:
            if fill is not None:
                with self._lock:
                    self._wants.append(fill)  # it fails with all others, in the same words
            raise

    def _await(self, own: Fill, number: int) -> None:
        if not own.done.wait(self._timeout_s):  # by now the others have given this rank up
            what = f"this rank's part of {self._names[number]!r} was not read within "
            raise self._error(f"{what}{self._timeout_s:g} s", errno.ETIMEDOUT)

    def _swap(self, number: int, own: Fill, fill: SharedFill | None) -> None:
        error = own.error or self._changed(number)
        told: dict[str, Any] = {"takes": fill is not None}
        if error is not None:
            code = error.errno if isinstance(error, OSError) else None
            told["failed"] = [code, f"{type(error).__name__}: {error}"[:300]]
        heard = self._exchange.tell(told)
        failed: BaseException | None = error
        for rank, each in enumerate(heard):
            if "failed" in each and failed is None:
                code, text = each["failed"]
                what = f"rank {rank} could not read its part of {self._names[number]!r}: {text}"
                failed = self._error(what, code)
        if failed is None:
            self._swap_parts(number, fill, [bool(each["takes"]) for each in heard])
            if fill is not None and fill.gathered is not None:
                try:
                    fill.gathered()
                except BaseException as wrong:
                    failed = wrong
        if fill is not None:
            fill.failed_at = own.failed_at
            _end(fill, failed)

    def _swap_parts(self, number: int, fill: SharedFill | None, takes: Sequence[bool]) -> None:
        parts, mine = self._parts[number], self.rank
        sent = [
            (rank, memory)
            for rank, is_taking in enumerate(takes)
            if is_taking and rank != mine
            for memory in self._memory_of(number, fill)
        ]
        received = [
            (rank, read.part(fill.host))
            for rank, part in enumerate(parts)
            if fill is not None and rank != mine
            for read in part
        ]
        self._exchange.swap(sent, received)

    def _memory_of(self, number: int, fill: SharedFill | None) -> list[torch.Tensor]:
        """The memory of this rank's part of a unit, now that it was read."""
        reads = self.own_reads(number)
        if fill is not None:
            return [read.part(fill.host) for read in reads]
        return [wanted.memory for wanted in self._wanted(number, self._in_room())]

    def _in_room(self) -> Callable[[Read], torch.Tensor]:
        at = 0

        def take(read: Read) -> torch.Tensor:
            nonlocal at
            start, at = at, at + pages(read)
            return self._room[start : start + read.nbytes]

        return take

    def _wanted(self, number: int, place: Callable[[Read], torch.Tensor]) -> list[WantedBytes]:
        files = self._checkpoint.files
        reads = self.own_reads(number)
        return [WantedBytes(files[r.file], r.start, place(r), r.at) for r in reads]

    def _changed(self, number: int) -> BaseException | None:
        """The error of files of this rank's part that were changed, or None."""
        try:
            for index in {read.file for read in self.own_reads(number)}:
                self._checkpoint.check(index, f"layer {self._names[number]!r}")
        except Exception as wrong:
            return wrong
        return None

    def _error(self, detail: str, code: int | None = None) -> TransferError:
        path = str(self._checkpoint.path)
        code = errno.ECANCELED if code is None else code
        return TransferError(code, operation="stream", path=path, detail=detail)


def _end(fill: SharedFill, failed: BaseException | None) -> None:
    fill.error = fill.error or failed
    fill.gathered = None
    fill.done.set()


def pages(read: Read) -> int:
    """Bytes that a read takes in room that is cut in pages."""
    return round_up(read.nbytes, PAGE_BYTES)


def room_bytes(parts: Parts) -> int:
    """Memory that a rank needs for what only others want."""
    return max((sum(map(pages, each)) for unit in parts for each in unit), default=0)


def shares(reads: Sequence[Read], ranks: int) -> list[tuple[Read, ...]]:
    """The reads of a unit in even parts, one a rank; all together they are all of it, once.

    A read is cut at whole pages of itself, so that direct I/O stays direct.
    """
    found: list[list[Read]] = [[] for _ in range(ranks)]
    places = cuts(sum(read.nbytes for read in reads), ranks)
    before = 0
    for read in reads:
        low = 0
        for rank in range(ranks):
            high = min(max(places[rank + 1] - before, 0), read.nbytes)
            if high < read.nbytes:
                high = round_down(high, PAGE_BYTES)
            if low < high:
                found[rank].append(
                    Read(read.file, read.start + low, read.start + high, read.at + low)
                )
                low = high
        before += read.nbytes
    return [tuple(each) for each in found]


def choose(wanted: Sequence[int], count: int) -> int:
    """The unit that is gathered next, of `count`, where ranks want different ones.

    Models go round, so ranks are together again soonest if all wait for those that are behind on
    the shortest arc that holds them all.
    """
    places = sorted(set(wanted))
    gaps = [
        ((later - place) % count or count, later)
        for place, later in zip(places, places[1:] + places[:1], strict=True)
    ]
    return max(gaps, key=lambda gap: (gap[0], -gap[1]))[1]

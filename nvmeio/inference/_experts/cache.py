"""The cache of experts: those in memory, those that a call brings, and those that go for it.

All state belongs to the stream's owner (`OwnerThread`). A caller asks for the experts that its
tokens are routed to, and gets a `Use`: a claim, and the reads that are still under way. The caller
waits for these itself and checks what came, so that the owner serves others meanwhile. One caller
at a time computes with experts. When its claim ends, the owner keeps what arrived whole and was
checked; all else is dropped, so that an interrupt or a failure leaves no half-read expert behind.

One budget holds the experts of all layers. If it is full, an expert takes the pages of the one
that goes (`places`, `recency`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence, Set
from typing import Any, NamedTuple

import torch

from nvmeio._threads.closing import on_error
from nvmeio._threads.owner import Claim, OwnerThread
from nvmeio.inference._experts.arrivals import Arrival, Source
from nvmeio.inference._experts.on_device import DeviceExperts, DevicePlaces
from nvmeio.inference._experts.places import Kept, Lent, Places
from nvmeio.inference._experts.recency import Recency
from nvmeio.inference._experts.sets import STAGES, ExpertModules, ExpertSet
from nvmeio.inference._experts.waiting import Arriving, show_arriving
from nvmeio.inference._experts.way_back import WayBack
from nvmeio.inference._plan.units import Target
from nvmeio.inference._stream import stand_ins
from nvmeio.inference._stream.turns import Turns, Waiting

# If a call named at least this share of a layer's experts, the next layer's are read ahead.
DENSE_SHARE = 0.75


class ExpertStats(NamedTuple):
    """The cost of the experts of a layer or of a whole model.

    Attributes:
        hits: Experts that were in memory, or on their way, when a call needed them.
        misses: Experts whose read began when a call needed them.
        read_ahead: Experts whose read began before a call needed them.
        read_in_vain: Those of them that were dropped before a call needed them.
        evictions: Experts that went to make room for others.
        bytes_read: Bytes of all reads.
        uploads: On a GPU: experts that were copied to it from host memory.
    """

    hits: int = 0
    misses: int = 0
    read_ahead: int = 0
    read_in_vain: int = 0
    evictions: int = 0
    bytes_read: int = 0
    uploads: int = 0


class Use(NamedTuple):
    """A caller's right to compute with some experts; ends with the last reference to it.

    Memory that tensors lie over by then stays for as long as these tensors.

    Attributes:
        claim: The right to compute with the experts.
        arriving: Those that are still read.
        waits: Whether the caller has to wait for them all before it computes. Else the weights that
            its module shows wait for each.
    """

    claim: Claim
    arriving: Arriving
    waits: bool


_Key = tuple[int, int]  # the number of a set, and of its expert


class _Computing(NamedTuple):
    """The use under way, as the owner knows it."""

    number: int
    places: Kept
    hit: Sequence[int]
    targets: Sequence[Target]
    arriving: dict[int, Arrival]
    lent: Lent
    shown: list[torch.Tensor]
    backward: frozenset[_Key] = frozenset()  # experts of backward, if no module shows them


class _Loan(NamedTuple):
    """Experts that somebody has tensors over after their call, for as long as the mark lives."""

    mark: Callable[[], Any]
    number: int
    keys: frozenset[_Key]


class ExpertCache:
    """The experts of a model's layers, as many as a budget holds.

    Args:
        owner: The thread that owns it, and calls all but `check_as_read`.
        source: The files that experts are read from.
        sets: In the order of the model's tree.
        budget: Bytes of the host, at least those of all experts of any set, and of any set's
            `STAGES`.
        device: The device that experts compute on. The sets of a GPU are `level`.
        there_bytes: Bytes on a GPU, at least those of all experts of any set.
    """

    def __init__(
        self,
        owner: OwnerThread,
        source: Source,
        sets: Sequence[ExpertSet],
        budget: int,
        device: torch.device,
        there_bytes: int = 0,
    ) -> None:
        self._owner = owner
        self._source = source
        self._numbers = {experts: number for number, experts in enumerate(sets)}
        self._budget = budget - max((STAGES * each.stage_nbytes for each in sets), default=0)
        self._device: DeviceExperts | None = None
        self._places: list[Kept]
        if sets and device.type == "cuda":
            there = DeviceExperts(device, sets, self._budget, there_bytes)
            self._device = there
            self._places = [DevicePlaces(each, number, there) for number, each in enumerate(sets)]
        else:
            self._places = [Places(experts) for experts in sets]
        self._in_use = 0  # bytes of pages that experts have
        self._recency: Recency[_Key] = Recency()  # all that have pages
        self._ahead: dict[_Key, Arrival] = {}  # reads that no call has needed yet
        self._held: set[_Key] = set()  # of the call under way
        # For sets without spare address space: dead once no tensor lies over their experts.
        self._kept_by_others: dict[int, list[Callable[[], Any]]] = {}
        self._counts: list[Counter[str]] = [Counter() for _ in sets]
        self._computing: _Computing | None = None
        self._loans: list[_Loan] = []
        self._last: int | None = None
        self._in_a_row: set[int] = set()  # experts that calls of the same set have needed
        self._follows: dict[int, int] = {}  # the set that came after a set the last time
        self._way_back = WayBack()
        self.turns = Turns(owner)

    # --- what callers ask -----------------------------------------------------------------------

    def enter(
        self,
        waited: Waiting | None,
        experts: ExpertSet,
        hit: Sequence[int],
        counts: Sequence[int],
        caller: Hashable,
        frozen: bool = False,
        backward: bool = False,
    ) -> Use | Waiting:
        """Have experts in memory or on their way, and let their module show them.

        Args:
            waited: The result of an earlier call.
            experts: The set.
            hit: Its experts that tokens are routed to, ascending.
            counts: How many tokens each of them has.
            caller: A thread, or micro-batches in lockstep.
            frozen: Raise (RuntimeError) where somebody wants gradients of them. Backward comes.
            backward: It is a call that backward makes again (gradient checkpointing).

        Raises:
            ClosedError: The stream is closed.
            TransferError: A read could not begin.
        """
        queued = self.turns.take(caller, waited)
        if queued is not None:
            return queued
        number = self._numbers[experts]
        arriving: dict[int, Arrival] = {}
        with on_error(self.turns.end, caller), on_error(self._drop_late, number, arriving):
            self._leave(self._computing, None)  # of this caller, which was interrupted
            self._note_order(number)
            targets = experts.targets_of(hit)
            if frozen:
                stand_ins.check_frozen(targets)
            self._bring(number, hit, counts, arriving)
            places = self._places[number]
            if self._device is not None:
                self._copy([expert for expert in hit if expert not in arriving], number)
            lent = places.lend(hit)
            shown = stand_ins.install(targets, lent.tensors)
            awaited = Arriving(arriving, self._owner)
            waits = bool(arriving) and (
                self._device is not None or not show_arriving(targets, shown, awaited)
            )
            use = _Computing(number, places, hit, targets, arriving, lent, shown)
            self._computing = use
        if backward:
            self._read_back(number)
        else:
            if frozen:
                self._way_back.note(number, hit)
            self._read_ahead(number, len(hit))
        return Use(self._owner.claim(self._leave, use, caller), awaited, waits)

    def let_compute(self, stream: Any) -> None:
        """Order a device stream's later work behind the copies of a call.

        By the caller that has the turn, after all of its experts have arrived.
        """
        use = self._computing
        assert use is not None
        assert self._device is not None
        self._copy(list(use.arriving), use.number)
        self._device.let_compute(stream)

    def _copy(self, experts: Sequence[int], number: int) -> None:
        """Begin to copy experts to where the device computes with them."""
        assert self._device is not None
        places = self._places[number]
        assert isinstance(places, DevicePlaces)
        before = self._device.uploads
        self._device.bring(places, experts)
        self._counts[number]["uploads"] += self._device.uploads - before

    def enter_backward(
        self, waited: Waiting | None, experts: ExpertSet, hit: Sequence[int], caller: Hashable
    ) -> tuple[Use, torch.Tensor] | Waiting:
        """`enter`, for backward: all are to be waited for, and no module shows them.

        Returns the bytes of the set as well.
        """
        queued = self.turns.take(caller, waited)
        if queued is not None:
            return queued
        number = self._numbers[experts]
        arriving: dict[int, Arrival] = {}
        with on_error(self.turns.end, caller), on_error(self._drop_late, number, arriving):
            self._leave(self._computing, None)
            self._bring(number, hit, [0] * len(hit), arriving)
            places = self._places[number]
            assert isinstance(places, Places)
            memory, mark = places.view()
            lent = Lent({}, mark)
            keys = frozenset((number, expert) for expert in hit)
            use = _Computing(number, places, hit, (), arriving, lent, [], keys)
            self._computing = use
        self._read_back(number)
        claim = self._owner.claim(self._leave, use, caller)
        return Use(claim, Arriving(arriving, self._owner), True), memory

    def address_of(self, experts: ExpertSet) -> int:
        """The address of a set's memory. From any thread, during a call of the set."""
        places = self._places[self._numbers[experts]]
        assert isinstance(places, Places)
        return places.address

    @property
    def locked(self) -> bool:
        """Whether the source of copies to a device is page-locked, if there is such memory."""
        return self._device is None or self._device.host.locked

    def check_as_read(self) -> None:
        """Take the weights away from the module that was called; raises if the call changed them.

        In the thread that computes, at the call's end: once its claim is gone, another expert may
        have their memory.
        """
        use = self._computing
        if use is None:
            return
        try:
            stand_ins.check_as_read(use.targets, use.shown)
        except RuntimeError:
            self._owner.call(self._purge, use.number)
            raise
        stand_ins.uninstall(use.targets)
        if torch.is_autocast_enabled("cpu") and any(each.requires_grad for each in use.shown):
            torch.clear_autocast_cache()  # keeps such weights, and copies, to the end of its block

    def _leave(self, use: _Computing | None, caller: Hashable | None) -> None:
        if use is None or self._computing is not use:
            return
        self._computing = None
        try:
            stand_ins.uninstall(use.targets)
            self._drop_late(use.number, use.arriving)
            use.shown.clear()
            use.lent.tensors.clear()
            if use.lent.mark() is not None:  # backward, a hook, or an error's traceback keeps some
                everything = range(use.places.experts.number)
                keys = use.backward or {(use.number, expert) for expert in everything}
                kept = frozenset(key for key in keys if key in self._recency)
                self._loans.append(_Loan(use.lent.mark, use.number, kept))
        finally:
            if caller is not None:
                self.turns.end(caller)

    def close(self) -> None:
        """Show nothing, and end all reads. Memory stays mapped while a tensor lies over it."""
        self._leave(self._computing, None)
        for arrival in self._ahead.values():
            arrival.cancel()
        self._ahead.clear()
        self._loans.clear()
        self._places.clear()
        self.turns.close()
        if self._device is not None:
            self._device.close()

    # --- coming ---------------------------------------------------------------------------------

    def _bring(
        self,
        number: int,
        hit: Sequence[int],
        counts: Sequence[int],
        arriving: dict[int, Arrival],
    ) -> None:
        keys = [(number, expert) for expert in hit]
        self._held.update(keys)
        self._hold_loans(len(hit) * self._places[number].nbytes)
        counted = self._counts[number]
        for key in keys:
            if key in self._recency:
                counted["hits"] += 1
                if key in self._ahead:
                    arriving[key[1]] = self._ahead.pop(key)
            elif self._device is not None and self._device.has(key):
                counted["hits"] += 1
            else:
                counted["misses"] += 1
                arriving[key[1]] = self._begin(key, self._held)
        if isinstance(self._places[number].experts, ExpertModules):
            self._in_a_row.update(hit)
        by_count = [key for _, key in sorted(zip(counts, keys, strict=True), reverse=True)]
        share = self._share(number, hit, self._budget // self._places[number].nbytes)
        for key in by_count[share:]:
            if key in self._recency:
                self._recency.pass_by(key)
        for key in by_count[:share][::-1]:
            if key in self._recency:
                self._recency.use(key)
        if self._device is not None:
            self._device.expected = set(by_count[: self._share(number, hit, self._device.number)])

    def _share(self, number: int, hit: Sequence[int], kept: int) -> int:
        """How many of a call's experts are expected again, where so many of all are kept."""
        share = max(1, kept // len(self._places))
        if isinstance(self._places[number].experts, ExpertModules):
            return len(hit) if len(self._in_a_row) <= share else 0
        return share

    def _hold_loans(self, nbytes: int) -> None:
        """Keep what others have tensors over; it is left to them where a call has no room beside.

        Tensors [experts, ...] look at places of all experts of a set, so none of them moves.
        """
        self._loans = [loan for loan in self._loans if loan.mark() is not None]
        lent = {key for loan in self._loans for key in loan.keys}
        if nbytes + sum(self._places[number].nbytes for number, _ in lent) > self._budget:
            loans, self._loans = self._loans, []
            for loan in loans:
                self._leave_to_others(loan.number, loan.mark)
        else:
            self._held.update(lent)

    def _begin(self, key: _Key, held: Set[_Key]) -> Arrival:
        """Begin the read of an expert that has no pages; those that convert begin in turn.

        None of the `held` experts is evicted for it.
        """
        number, expert = key
        places = self._places[number]
        self._make_room(key, held)
        self._recency.pass_by(key)
        arrival = Arrival(self._source, places, expert)
        if not places.experts.stage_nbytes:
            with on_error(self._drop, key):
                arrival.begin()
        self._counts[number]["bytes_read"] += places.experts.read_nbytes
        return arrival

    def _make_room(self, key: _Key, held: Set[_Key]) -> None:
        """Have pages for an expert: new ones, or those of another one that goes."""
        places = self._places[key[0]]
        while self._in_use + places.nbytes > self._budget:
            victim = self._victim(held)
            if victim is None:
                raise MemoryError(self._no_room_for(places, held))
            source = self._places[victim[0]]
            self._evict(victim)
            if source.nbytes == places.nbytes and places.take_pages(key[1], source, victim[1]):
                return
            source.release(victim[1])
            self._in_use -= source.nbytes
        self._in_use += places.nbytes
        places.take(key[1])

    def _victim(self, held: Set[_Key], passing_only: bool = False) -> _Key | None:
        """The next expert to evict; None if none may be evicted."""
        victims = self._recency.victims(held, passing_only)
        return next((key for key in victims if not self._must_stay(key[0])), None)

    def _must_stay(self, number: int) -> bool:
        """Whether tensors outside lie over a set that can have no other pages."""
        marks = self._kept_by_others.get(number)
        if marks is None:
            return False
        marks[:] = [mark for mark in marks if mark() is not None]
        if not marks:
            del self._kept_by_others[number]
        return bool(marks)

    def _no_room_for(self, places: Kept, held: Set[_Key]) -> str:
        kept = [number for number in list(self._kept_by_others) if self._must_stay(number)]
        if kept:
            names = ", ".join(self._places[number].experts.name for number in kept)
            return (
                f"{places.experts.name} gets no memory: a hook, a traceback or other code refers "
                f"to weights of {names}, and no address space is left to replace them. Drop these "
                "references, keep copies (weight.clone()), or raise the limit of "
                "address space (ulimit -v)"
            )
        return (
            f"{places.experts.name} needs {len(held)} experts at once, and {self._budget} bytes of "
            "resident_bytes are for experts: raise it"
        )

    def _evict(self, victim: _Key) -> None:
        counted = self._counts[victim[0]]
        counted["evictions"] += 1
        arrival = self._ahead.pop(victim, None)
        if arrival is not None:
            counted["read_in_vain"] += 1
            arrival.cancel()
        self._recency.forget(victim)

    # --- going ----------------------------------------------------------------------------------

    def _drop_late(self, number: int, arriving: dict[int, Arrival]) -> None:
        """Drop what did not arrive whole, or was not waited for: the call is over."""
        self._held.clear()
        for expert, arrival in arriving.items():
            if not arrival.right:
                arrival.cancel()
                self._drop((number, expert))

    def _drop(self, key: _Key) -> None:
        arrival = self._ahead.pop(key, None)
        if arrival is not None:
            arrival.cancel()
        if key in self._recency:
            places = self._places[key[0]]
            self._recency.forget(key)
            places.release(key[1])
            self._in_use -= places.nbytes

    def _purge(self, number: int) -> None:
        """Drop all of a set: its bytes are not those of the file. Tensors over them stay."""
        if self._device is not None:
            self._device.forget_room()  # alone was changed
        elif not self._move_elsewhere(number):
            for expert in range(self._places[number].experts.number):
                self._drop((number, expert))

    def _leave_to_others(self, number: int, mark: Callable[[], Any]) -> None:
        """Tensors outside lie over a set: its experts must not move from now on."""
        if not self._move_elsewhere(number):  # it stays where it is, until they are gone
            self._kept_by_others.setdefault(number, []).append(mark)

    def _move_elsewhere(self, number: int) -> bool:
        """Begin a set anew in other address space; False if there is none.

        The old one goes with the last tensor over it.
        """
        old = self._places[number]
        try:
            self._places[number] = Places(old.experts)
        except MemoryError:
            return False
        for expert in range(old.experts.number):
            key = (number, expert)
            if key in self._ahead:
                self._ahead.pop(key).cancel()
            if key in self._recency:
                self._recency.forget(key)
                self._in_use -= old.nbytes
        self._loans = [loan for loan in self._loans if loan.number != number]
        return True

    # --- ahead ----------------------------------------------------------------------------------

    def _note_order(self, number: int) -> None:
        if number == self._last:
            return
        if self._last is not None:
            self._follows[self._last] = number
        self._last = number
        self._in_a_row.clear()

    def _read_ahead(self, number: int, hits: int) -> None:
        """Begin to read the next layer's experts, where this one needed nearly all of its own.

        They take free pages, or those of experts that only a prompt has needed. Others go for them
        only while as many stay as a layer has: what decoding asks for again.
        """
        following = self._follows.get(number, (number + 1) % len(self._places))
        experts = self._places[following].experts
        dense = hits >= DENSE_SHARE * self._places[number].experts.number
        if not dense or following == number or experts.stage_nbytes:
            return
        keys = [(following, expert) for expert in range(experts.number)]
        held = self._held.union(keys)
        for key in keys:
            if key in self._recency or (self._device is not None and self._device.has(key)):
                continue
            spare = self._recency.used > experts.number
            if not self._begin_ahead(key, held, passing_only=not spare):
                return

    def _read_back(self, number: int) -> None:
        """Begin to read the experts that the previous set has used, which backward needs next.

        Experts of sets that backward has left go first, then those of the sets that it comes to
        last. Those of this set and of the next one stay, so where they have no room together, the
        rest is read when it is needed.
        """
        left = self._way_back.come_to(number)
        if left is None:
            return
        for each in left:
            for key in self._way_back.needed(each):
                self._recency.leave(key)
        following = self._way_back.before(number)
        if following is None or self._places[following].experts.stage_nbytes:
            return
        keys = self._way_back.needed(following)
        held = self._held.union(keys, self._way_back.needed(number))
        for key in keys:
            if key not in self._recency and not self._begin_ahead(key, held):
                return

    def _begin_ahead(self, key: _Key, held: Set[_Key], passing_only: bool = False) -> bool:
        """Begin a read that no call waits for yet; False if there is no room, or it cannot begin.

        The call that needs it then begins it, and raises what fails.
        """
        full = self._in_use + self._places[key[0]].nbytes > self._budget
        if full and self._victim(held, passing_only) is None:
            return False
        try:
            self._ahead[key] = self._begin(key, held)
        except (OSError, MemoryError):
            return False
        self._counts[key[0]]["read_ahead"] += 1
        return True

    # --- what it has done -----------------------------------------------------------------------

    def stats(self) -> list[ExpertStats]:
        """The counters of each set."""
        return [ExpertStats(**counted) for counted in self._counts]

"""`WeightStream`: layers into memory ahead of the computation, and out of it behind.

Theory of operation: a wrapper around the call of each unit's modules (`_hooks`) asks for a claim on
the unit. It waits until the unit's bytes are there and its parameters lie over them; what comes
next is being read by then. The claim ends with the call, however that ends; the parameters are
taken away and the slot is given back. One thread does all that is asked, and owns that state
(`_stream.uses`); here are the caller's side, and opening and closing.

Units are read ahead in the order of the last pass; before the first, in the order of the module
tree. A unit that was read in vain is dropped as soon as that is seen.

After a failure nothing is in flight and nothing is kept that was on its way. The error goes through
the model's forward to the caller, so that no value is computed from bytes that did not arrive, and
the cache of the pass that failed, which some layers have updated and others not, is refused from
then on.
"""

from __future__ import annotations

import contextlib
import operator
import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from nvmeio._checks import NotPickled
from nvmeio._formats.safetensors.open_set import SafetensorsSet
from nvmeio._io.drives import DriveHandles
from nvmeio._io.long_call import profiled
from nvmeio._memory import devices
from nvmeio._residency.calls import Origin, in_backward
from nvmeio._threads.closing import Closing, do_all, on_error
from nvmeio._threads.interruptible import in_thread, run_interruptible
from nvmeio._threads.owner import Claim, OwnerThread
from nvmeio._threads.shutdown import Ending
from nvmeio.errors import ClosedError
from nvmeio.handle import AioHandle
from nvmeio.inference._experts.arrivals import Source
from nvmeio.inference._experts.cache import ExpertCache, ExpertStats, Use
from nvmeio.inference._experts.sets import ExpertSet
from nvmeio.inference._parallel.rank_reader import RankReader
from nvmeio.inference._parallel.stream_ranks import Ranks, new_reader
from nvmeio.inference._plan.budget import Shares
from nvmeio.inference._plan.units import Partition, Unit, as_code
from nvmeio.inference._stream.lockstep import Lockstep, lockstep_here
from nvmeio.inference._stream.slots import SlotPools
from nvmeio.inference._stream.stand_ins import ABSENT, ABSENT_WITHIN
from nvmeio.inference._stream.turns import CLOSED, OwnPass, in_turn
from nvmeio.inference._stream.uses import GradMode, Uses
from nvmeio.inference._stream.weights import EmbeddingRows, Resources
from nvmeio.progress import Progress

Value = TypeVar("Value")


class StreamStats(NamedTuple):
    """The counters of a stream since it was made.

    Attributes:
        bytes_read: Bytes of weights that were asked of the files, rows and experts included.
        units_read: Units (layers) that were read.
        units_used: How often a unit was used.
        mispredicted: Units that were needed and not being read yet, except for the very first.
        dropped: Units that were read, wholly or in part, and not used.
        experts_read: Experts of mixtures that were read, on demand or ahead.
        experts: The cost of the experts; `WeightStream.expert_stats` has that of each layer.
        rows_read: Rows of embeddings that were read.
        waited_s: Seconds in which the computation waited for weights.
        resident_bytes: Memory that holds weights permanently: a part of what `stream_model` was
            given under this name, which is the most that this, `window_bytes`, `work_bytes` and
            `expert_bytes` take together.
        window_bytes: Memory that weights are streamed through.
        work_bytes: Memory that converted weights are in, and what only other ranks want.
        expert_bytes: Memory for the experts that are kept.
        expert_host_bytes: On a GPU: page-locked memory for experts, below that of the device.
        streamed_bytes: Bytes that one pass reads of units that do not stay, with all experts and
            without rows.
    """

    bytes_read: int
    units_read: int
    units_used: int
    mispredicted: int
    dropped: int
    experts_read: int
    rows_read: int
    waited_s: float
    resident_bytes: int
    window_bytes: int
    work_bytes: int
    expert_bytes: int
    expert_host_bytes: int
    streamed_bytes: int
    experts: ExpertStats


class _Origin(NamedTuple):
    """A unit's memory, or that of its converted weights."""

    stream: WeightStream
    unit: Unit
    converted: bool

    def memory(self) -> torch.Tensor:
        return self.stream.memory_of(self.unit, self.converted)


class _ExpertOrigin(NamedTuple):
    """The memory of experts that a call has computed with."""

    stream: WeightStream
    experts: ExpertSet
    hit: tuple[int, ...]

    def memory(self) -> torch.Tensor:
        return self.stream.memory_of_experts(self.experts, self.hit)


def _caller(lockstep: Lockstep[Any] | None) -> Any:
    """The owner of a turn: a thread, or micro-batches."""
    return threading.get_ident() if lockstep is None else lockstep


# An embedding that is used as a matrix is copied for each use up to this size, beside the budget.
_MOST_TABLE_BYTES = 16 << 20
_NO_GRADS = GradMode(False, False)


class WeightStream(NotPickled, Closing):
    """The weights of one streamed model; `model.weight_stream`, made by `nvmeio.stream_model`.

    Usable as a context manager, which closes it. Several threads may use the model, whose layers
    take turns.

    Args:
        partition: Its units.
        shares: The parts of the memory.
        device: The device that it computes on.
        open_checkpoint: Opens the checkpoint, anew at each `reopen`.
        handle: Moves the bytes and stays open; None makes one for each drive, for as long as the
            stream is open.
        paths: The checkpoint's paths, on each of its drives, for handles with the settings stored
            for their file systems.
        beside: Closed with the stream.
        trainable: Backward needs the weights again.
        ranks: The ranks that each read a part of each unit; None for a process alone.
        experts: The experts of a mixture that are kept one by one.
    """

    _elsewhere = "call stream_model in each process, with a share of the memory each"

    def __init__(
        self,
        *,
        partition: Partition,
        shares: Shares,
        device: torch.device,
        open_checkpoint: Callable[[], SafetensorsSet],
        handle: AioHandle | None,
        paths: Sequence[str | os.PathLike[str]],
        beside: Callable[[], None] | None = None,
        trainable: bool = False,
        ranks: Ranks | None = None,
        experts: Sequence[ExpertSet] = (),
    ) -> None:
        self._paths = [os.fspath(path) for path in paths]
        self._partition = partition
        self._experts = tuple(experts)
        self._shares = shares
        self._device = device
        self._open_checkpoint = open_checkpoint
        self._handle = handle
        self._beside = beside
        self._trainable = trainable
        self._ranks = ranks
        self._own_pass = OwnPass(sum(unit.streamed_bytes for unit in partition.units))
        self._rows = EmbeddingRows(device)
        self._owner: OwnerThread | None = None
        self._opening = threading.Lock()
        self._uses: Uses | None = None
        self._cache: ExpertCache | None = None
        self._experts_before = [ExpertStats()] * len(self._experts)
        self._experts_waited_s = 0.0
        self._ending: Ending | None = None
        self._before: dict[str, Any] = {}  # counts of what was closed
        self.reopen()
        self._before = dict.fromkeys(self._counts(), 0)

    @property
    def checkpoint(self) -> SafetensorsSet:
        """Its files, as it has them open; others after a `reopen`. ClosedError if it is closed."""
        return self._check()[1].resources.checkpoint

    # --- the model's side: what the wrappers around its modules call ----------------------------

    def use(self, unit: Unit) -> Claim:
        """Have a unit's weights in place; blocks until they are.

        Args:
            unit: Which one.

        Returns:
            To hold for as long as they are used.

        Raises:
            TransferError: A read failed; names tensors, file and layer.
            IntegrityError: A file was written to.
            ClosedError: The stream is closed.
        """
        lockstep = lockstep_here()
        if lockstep is not None:
            lockstep.hand_on()
        self._own_pass.check()
        owner, uses = self._check()
        claim: Claim | None = None
        try:
            if lockstep is None and unit.resident:
                claim = uses.settled_use(unit, threading.get_ident())
            if claim is None:
                claim = self._ask(owner, uses, unit, lockstep)
            self._own_pass.note(unit)
            return claim
        finally:
            del claim  # the traceback of an interrupt must not keep the unit

    def as_read(self, unit: Unit) -> set[int]:
        """The storages' addresses of a unit's weights, once its call has ended.

        RuntimeError if the call has changed them. Afterwards modules do not show them any more
        unless they stay in place, or backward comes.
        """
        return set() if self._uses is None else self._uses.as_read(unit)

    def _ask(
        self, owner: OwnerThread, uses: Uses, unit: Unit, lockstep: Lockstep[Any] | None
    ) -> Claim:
        self._own_pass.waits()
        grads = self._grads() if self._trainable else _NO_GRADS
        entered: Any = None
        try:
            with profiled("wait", unit.name):
                entered = in_turn(
                    owner, uses.enter, unit, _caller(lockstep), self._cuda_stream(), grads
                )
            if not unit.as_stored:
                uses.convert()
            return entered  # type: ignore[no-any-return]
        except BaseException:
            self._own_pass.spoil()
            raise
        finally:
            del entered  # the traceback of an interrupt must not keep the turn

    def _grads(self) -> GradMode:
        if not self._trainable:
            return _NO_GRADS
        return GradMode(torch.is_grad_enabled(), in_backward())

    def origin_of(self, address: int, offset: int, _: int) -> Origin | None:
        """The owner of the weights under a tensor that autograd keeps; see `_residency.calls`."""
        uses = self._uses
        found = None if uses is None else uses.place_at(address)
        return None if found is None else _Origin(self, *found)

    def memory_of(self, unit: Unit, converted: bool) -> torch.Tensor:
        """The memory of a unit that backward needs again; blocks until its bytes are there.

        Args:
            unit: Which one.
            converted: The memory of its converted weights.

        Raises:
            TransferError, IntegrityError: As for `use`.
            MemoryError: There is no room for it: somebody keeps tensors over other weights.
            ClosedError: The stream was closed since the forward pass.
        """
        owner, uses = self._check()
        memory = uses.lent(unit, converted)
        if memory is not None:
            owner.post(uses.note_lent, unit)
            return memory
        caller = _caller(lockstep_here())
        with profiled("wait", unit.name):
            make = in_turn(
                owner, uses.lend, unit, converted, caller, self._cuda_stream(), self._grads()
            )
        return make()

    def use_experts(self, experts: ExpertSet, top_k_index: torch.Tensor) -> Use:
        """Have those experts in place, or on their way, that tokens are routed to.

        Computation with them waits for those that are on their way (`_experts.waiting`).

        Args:
            experts: The set of the module that is called.
            top_k_index: Numbers of experts, any shape; others than 0 to count - 1 mean none.

        Returns:
            To hold for as long as they are computed with.

        Raises:
            TransferError, IntegrityError, ClosedError: As for `use`; names the expert.
        """
        owner, _ = self._check()
        cache = self._cache
        if cache is None:
            raise ClosedError(CLOSED)
        tokens_of = Counter(top_k_index.flatten().tolist())
        hit = sorted(expert for expert in tokens_of if 0 <= expert < experts.number)
        counts = [tokens_of[expert] for expert in hit]
        entered: Any = None
        try:
            with profiled("wait", experts.name):
                caller = _caller(lockstep_here())
                grads = (self._trainable, self._trainable and in_backward())
                entered = in_turn(owner, cache.enter, experts, hit, counts, caller, *grads)
                if entered.waits:
                    entered.arriving.wait()
                if self._device.type == "cuda":
                    owner.call(cache.let_compute, self._cuda_stream())
            return entered  # type: ignore[no-any-return]
        except BaseException:
            self._own_pass.spoil()
            raise
        finally:
            del entered  # the traceback of an interrupt must not keep the turn

    def origin_of_experts(
        self, experts: ExpertSet, hit: Sequence[int], address: int, offset: int, nbytes: int
    ) -> Origin | None:
        """The owner of experts under a tensor that autograd keeps; see `_residency.calls`.

        Args:
            experts: The set that is called.
            hit: Those that it computes with.
            address: The address of the tensor's storage.
            offset: In that.
            nbytes: From its first byte to its last.
        """
        cache = self._cache
        if cache is None or address != cache.address_of(experts):
            return None
        first, last = offset // experts.nbytes, (offset + max(nbytes, 1) - 1) // experts.nbytes
        return _ExpertOrigin(self, experts, tuple(e for e in hit if first <= e <= last))

    def memory_of_experts(self, experts: ExpertSet, hit: Sequence[int]) -> torch.Tensor:
        """The memory of a set, with those experts that backward needs again; blocks until then.

        Raises:
            TransferError, IntegrityError: As for `use`; names the expert.
            ClosedError: The stream was closed since the forward pass.
        """
        owner, _ = self._check()
        cache = self._cache
        if cache is None:
            raise ClosedError(CLOSED)
        entered: Any = None
        use: Any = None
        try:
            with profiled("wait", experts.name):
                caller = _caller(lockstep_here())
                entered = in_turn(owner, cache.enter_backward, experts, hit, caller)
                use, memory = entered
                use.arriving.wait()
                self._experts_waited_s += use.arriving.waited_s
            return memory  # type: ignore[no-any-return]
        finally:
            del entered, use  # the traceback of an interrupt must not keep the turn

    def experts_used(self, use: Use | None = None) -> None:
        """Take experts whose call has ended away; RuntimeError if the call has changed them."""
        if use is not None:
            self._experts_waited_s += use.arriving.waited_s
        if self._cache is not None:
            self._cache.check_as_read()

    def spoil(self) -> None:
        """A call has failed with some of its experts: the cache of its pass is refused."""
        self._own_pass.spoil()

    def rows(self, unit: Unit, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows of an embedding that is not in memory; see `EmbeddingRows.read`."""
        _, uses = self._check()
        try:
            return self._rows.read(uses.resources, unit, ids)
        except IndexError:  # of the caller's, before any layer has run
            raise
        except BaseException:
            self._own_pass.spoil()
            raise

    def weight(self, unit: Unit, number: int) -> torch.Tensor:
        """A copy of one weight, for a look outside of its module's call.

        Args:
            unit: The unit of the weight.
            number: The number of the weight in the unit.

        Raises:
            TransferError, IntegrityError, ClosedError: As for `use`.
            RuntimeError: A pass for inference asks, whose layers are to be read once (small tables
                of embeddings are read each time), or one of several ranks, which may have a part
                of it.
        """
        of_experts = any(unit is experts.unit for experts in self._experts)
        is_table = self._ranks is None and _is_small_table(unit)
        if not (of_experts or is_table) and (self.in_pass or self._ranks is not None):
            raise RuntimeError(self._remedy(unit))
        owner, uses = self._check()
        with profiled("wait", unit.name):
            return owner.call(uses.weight, unit, number, self._cuda_stream())()

    def _remedy(self, unit: Unit) -> str:
        """The advice for a weight of a unit that is used without a call that would bring it."""
        if unit.modules or unit.tiled or not unit.row_modules:
            return ABSENT_WITHIN
        layers = [each.name for each in self._partition.units if each.is_layer]
        return f"{ABSENT}. Give stream_model layers=[{as_code([unit.name, *layers])}]"

    @property
    def in_pass(self) -> bool:
        """Whether this thread is in a pass for inference, whose layers are to be read once."""
        return not self._trainable and self._own_pass.under_way

    def has_turn(self) -> bool:
        """Whether the caller is within the call of a unit that does not stay in place."""
        owner, uses = self._check()
        return owner.call(uses.turns.has, _caller(lockstep_here()))

    def begin_pass(self, cache: Any) -> None:
        """A forward pass of the whole model begins.

        Args:
            cache: The cache of past keys and values, or None.

        Raises:
            RuntimeError: The cache is one that a pass left behind which failed; or another tensor
                was put in the place of a weight, or one is to have gradients.
        """
        owner, uses = self._check()
        self._own_pass.begin(cache)
        if not uses.shows_fixed():
            owner.call(uses.check_fixed)
        if self._trainable:
            uses.check_fixed_frozen()
        self._own_pass.ready(cache)

    def pass_mark(self) -> object:
        """To hold for as long as a pass goes on: other ranks wait for its units."""
        return self._own_pass.mark()

    def end_pass(self) -> None:
        """It is over, and not interrupted; its last unit has been released."""
        waited = self._own_pass.end()
        if waited and self._owner is not None and not self._owner.forked:
            self._owner.drain()

    def _cuda_stream(self) -> Any:
        return devices.stream_here(self._device) if self._device.type == "cuda" else None

    # --- awaited ------------------------------------------------------------------------------

    async def run(self, work: Callable[..., Value], *arguments: Any, **named: Any) -> Value:
        """Call `model.generate`, or the model itself, in a thread, awaited.

        Other coroutines run meanwhile. Autograd is off in it. Cancelling stops the work at the next
        layer; `CancelledError` is raised when it has stopped.

        Examples:
            >>> tokens = await model.weight_stream.run(model.generate, ids, max_new_tokens=8)
        """
        stop = threading.Event()

        def call() -> Value:
            self._own_pass.stop_with(stop)
            with torch.no_grad():
                return work(*arguments, **named)

        return await in_thread(call, stop.set)

    def in_lockstep(self, works: Sequence[Callable[[], Value]]) -> list[Value]:
        """Run micro-batches in lockstep, and clean up when they are done.

        Ctrl-C stops them at their next unit.
        """
        lockstep = Lockstep(works)

        def run() -> list[Value]:
            owner, uses = self._check()
            held: Any = None
            try:
                held = in_turn(owner, uses.hold, lockstep)
                return lockstep.run()
            finally:
                del held
                owner.drain()

        return run_interruptible(run, lockstep.stop)

    # --- opening and closing ------------------------------------------------------------------

    def reopen(self) -> None:
        """Open again what `close` closed; the files are read from their paths anew. Idempotent.

        Raises:
            FileNotFoundError, IntegrityError: A file is missing, damaged, or another than before.
        """
        while True:
            with self._opening:
                owner = self._owner
                if owner is None or owner.closed:
                    owner = self._owner = OwnerThread("nvmeio-weights", CLOSED)
            begun: list[bool] = []
            try:
                if owner.call(self._open, owner, begun):
                    return
            except ClosedError:
                if begun:
                    raise
            # It was about to close, as somebody had asked before.

    def _open(self, owner: OwnerThread, begun: list[bool]) -> bool:
        if owner.closed:
            return False
        begun.append(True)
        if self._uses is not None:
            return True
        with (
            on_error(owner.close),
            contextlib.ExitStack() as telling,
            contextlib.ExitStack() as undo,
        ):
            if self._ranks is not None:
                telling.enter_context(self._ranks.opening())
            handles = DriveHandles(self._handle, self._paths)
            undo.callback(handles.close)
            checkpoint = self._open_checkpoint()
            undo.callback(checkpoint.close)
            memory = SlotPools(self._shares, self._device, self._trainable)
            undo.callback(memory.close)
            units = self._partition.units
            in_pass = self._own_pass.any_under_way
            reader = new_reader(self._ranks, handles, checkpoint, units, in_pass)
            undo.callback(reader.stop)
            resources = Resources(handles, checkpoint, memory, reader)
            uses = Uses(owner, resources, self._partition, self._trainable)
            uses.open()
            source = Source(handles, checkpoint)
            shares = self._shares
            cache = ExpertCache(
                owner,
                source,
                self._experts,
                shares.host_experts or shares.experts,
                self._device,
                shares.experts,
            )
            undo.pop_all()
        self._uses, self._cache = uses, cache
        self._ending = Ending(owner, resources.close)
        return True

    def close(self) -> None:
        """Stop reading, close the files, give back the memory. Idempotent.

        The model's forward raises `ClosedError` until `reopen`. A pass that is under way in another
        thread ends with that error at one of its next layers, or with its result.

        One of several ranks goes on to read its part for the others, until they close their streams
        too, or want nothing for `timeout_s`; an interrupt ends that.
        """
        owner = self._owner
        if owner is None or owner.forked:
            return
        uses = self._uses
        if uses is not None and isinstance(uses.resources.reader, RankReader):
            uses.resources.reader.leave_with_others()
        del uses
        bar: Any = None
        try:
            with contextlib.suppress(ClosedError):
                bar = owner.call(self._bar)
                if bar is not None:
                    in_turn(owner, self._close, threading.get_ident())
        finally:
            del bar

    def _bar(self) -> Claim | None:
        return None if self._uses is None else self._uses.bar()

    def _close(self, waited: Any, caller: int) -> Any:
        uses = self._uses
        if uses is None:
            return None
        staying = uses.turns.await_shared(caller)
        if staying is not None:
            return staying
        queued = uses.turns.take(caller, waited)  # its unit is taken away when it is done
        cache = self._cache
        if queued is None and cache is not None:
            queued = cache.turns.take(caller, waited)
        if queued is not None:
            return queued
        self._before, self._experts_before = self._counts(), self.expert_stats
        self._uses = self._cache = None
        close_experts = None if cache is None else cache.close
        ending = None if self._ending is None else self._ending.close
        do_all(
            step for step in (close_experts, uses.close, ending, self._beside) if step is not None
        )
        return None

    # --- properties ---------------------------------------------------------------------------

    @property
    def progress(self) -> Progress | None:
        """Told, in each pass, of the layers that are used."""
        return self._own_pass.progress

    @progress.setter
    def progress(self, progress: Progress | None) -> None:
        self._own_pass.progress = progress

    @property
    def closed(self) -> bool:
        """Whether the model cannot be used until `reopen`."""
        return self._uses is None

    @property
    def locked(self) -> bool:
        """Whether the memory that weights are in is page-locked."""
        uses, cache = self._uses, self._cache
        if uses is None or cache is None:
            return False
        return uses.resources.memory.locked and cache.locked

    @property
    def device(self) -> torch.device:
        """The device that it computes on."""
        return self._device

    @property
    def trainable(self) -> bool:
        """Whether gradients go through it."""
        return self._trainable

    @property
    def fixed(self) -> Unit:
        """The unit that is always in memory."""
        return self._partition.fixed

    @property
    def experts(self) -> Sequence[ExpertSet]:
        """The sets of experts that are kept one by one, in the order of the module tree."""
        return self._experts

    @property
    def expert_stats(self) -> list[ExpertStats]:
        """The cost of experts since the stream was made, for each of `experts`."""
        now = [ExpertStats()] * len(self._experts) if self._cache is None else self._cache.stats()
        return [
            ExpertStats(*map(operator.add, before, later))
            for before, later in zip(self._experts_before, now, strict=True)
        ]

    @property
    def units(self) -> Sequence[Unit]:
        """The units, each streamed or kept as a whole, in the order of the module tree."""
        return tuple(self._partition.units)

    @property
    def stats(self) -> StreamStats:
        """Counters since the stream was made."""
        counts = dict(self._before)
        owner = self._owner
        if owner is not None and not owner.forked:
            with contextlib.suppress(ClosedError):
                counts = owner.call(self._counts)
        rows, units = self._rows, self._partition.units
        experts = ExpertStats(*map(sum, zip(*self.expert_stats, strict=True)))
        read = experts.misses + experts.read_ahead
        return StreamStats(
            bytes_read=counts.pop("bytes_read") + rows.nbytes + experts.bytes_read,
            rows_read=rows.number,
            experts_read=read,
            experts=experts,
            expert_bytes=self._shares.experts,
            expert_host_bytes=self._shares.host_experts,
            waited_s=counts.pop("waited_s") + rows.waited_s + self._experts_waited_s,
            resident_bytes=self._shares.resident,
            window_bytes=self._shares.window,
            work_bytes=self._shares.work + self._shares.others + self._shares.products,
            streamed_bytes=sum(u.streamed_bytes for u in units if not u.resident)
            + self._streamed_expert_bytes,
            **counts,
        )

    @property
    def _streamed_expert_bytes(self) -> int:
        """Bytes of all experts, where not all of them stay."""
        total = sum(experts.all_nbytes for experts in self._experts)
        shares = self._shares
        return total if total > max(shares.experts, shares.host_experts) else 0

    def _counts(self) -> dict[str, Any]:
        now = {} if self._uses is None else self._uses.counts()
        return {n: self._before.get(n, 0) + now.get(n, 0) for n in self._before or now}

    def _check(self) -> tuple[OwnerThread, Uses]:
        owner, uses = self._owner, self._uses
        if owner is None or uses is None:
            raise ClosedError(CLOSED)
        if owner.forked:
            raise ClosedError("the stream of weights is the parent process's: make one in this one")
        return owner, uses

    def __repr__(self) -> str:
        kept = sum(unit.resident for unit in self.units)
        state = "closed" if self.closed else "open"
        return (
            f"<nvmeio.WeightStream {len(self.units)} units, {kept} resident, "
            f"{self._shares.total} bytes of weights in memory, {state}>"
        )


def _is_small_table(unit: Unit) -> bool:
    """Whether a unit is an embedding that is read by rows, and may be copied whole in a pass.

    Tables of positions are used as matrices in some models (DeBERTa, SEW-D, Qwen2-Audio).
    """
    nbytes = sum(weight.nbytes for weight in unit.weights)
    return bool(unit.row_modules) and not unit.modules and nbytes <= _MOST_TABLE_BYTES

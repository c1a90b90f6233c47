"""`WeightStream`: layers into memory ahead of the computation, and out of it behind.

How it works: the forward hooks of each unit call `enter` and `leave`. `enter` waits until the
unit's bytes are there, lays its parameters over them and begins reading what comes next; `leave`
takes the parameters away and gives the slot back. One thread at a time is between the two
(`_Turns`), so the state below has no lock of its own: whoever has the turn may change it.

What comes next is what followed the last time; before anything followed, the order of the module
tree. What was read in vain is dropped as soon as that is seen.

After a failure nothing is in flight and nothing is kept that was on its way. The error goes through
the model's forward to the caller, so that no value is computed from bytes that did not arrive, and
the cache of the pass that failed, which some layers have updated and others not, is refused from
then on.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import Any, TypeVar

import torch
from torch import nn

from nvmeio._io.handles import new_handle
from nvmeio._io.span_plan import Span
from nvmeio._io.spans import read as read_spans
from nvmeio._io.threads import in_thread
from nvmeio.errors import ClosedError, TransferError, with_context
from nvmeio.handle import AioHandle
from nvmeio.inference._budget import Shares
from nvmeio.inference._checkpoint import Checkpoint
from nvmeio.inference._feeder import Feeder, finish
from nvmeio.inference._layout import Read
from nvmeio.inference._opened import Opening, StreamStats
from nvmeio.inference._opened import close as close_all
from nvmeio.inference._showing import install, names_in, uninstall
from nvmeio.inference._slots import Memory, Slot, load, load_beside, settle
from nvmeio.inference._turns import Schedule, Turns
from nvmeio.inference._units import Partition, Unit

Value = TypeVar("Value")

# Where a token's routing named this share of the experts or more, the next layer's are read whole
# and ahead; below it, those that are named are read when they are.
_DENSE_SHARE = 0.75


class Cancelled(Exception):
    """A pass was told to stop; raised in it at the next layer."""


class WeightStream:
    """The weights of one streamed model; `model.weight_stream`, made by `nvmeio.stream_model`.

    Usable as a context manager, which closes it. Several threads may use the model, whose layers
    take turns.

    Args:
        model: With hooks that call `enter` and `leave`.
        partition: Its units.
        shares: What memory is spent on.
        device: Where it computes.
        open_checkpoint: Opens the checkpoint through a handle, anew at each `reopen`.
        handle: Moves the bytes and stays open; None makes one for as long as the stream is open.
        path: Of the checkpoint, for a handle with the setting stored for its file system.
    """

    def __init__(
        self,
        model: nn.Module,
        partition: Partition,
        shares: Shares,
        device: torch.device,
        open_checkpoint: Callable[[AioHandle], Checkpoint],
        handle: AioHandle | None,
        path: str | os.PathLike[str],
    ) -> None:
        self._model = weakref.ref(model)
        self._path = path
        self._pid = os.getpid()
        self._fixed, self._units = partition
        self._shares = shares
        self._device = device
        self._open_checkpoint = open_checkpoint
        self._handle = handle
        self._turns = Turns()
        self._opened: Opening | None = None
        self._slots: dict[Unit, Slot] = {}
        self._tensors: list[torch.Tensor] = []  # of the unit in use
        self._in_use: Unit | None = None
        self._held: Unit | None = None  # used, and kept for the other micro-batches
        self._ahead: deque[Unit] = deque()  # on their way, in the order in which they are expected
        self._after: dict[Unit, Unit] = {}
        self._last: Unit | None = None
        self._settled: set[Unit] = set()  # resident, there, and installed for good
        self._dense = False
        self._spoilt: weakref.WeakSet[Any] = weakref.WeakSet()
        self._here = threading.local()
        self._counts = dict.fromkeys(StreamStats._fields[:7], 0)
        self._waited_s = 0.0
        self.progress: Callable[[str, int], None] | None = None
        self.root: nn.Module | None = None  # of spilled modules, whom nobody else holds
        self.closes_too: Callable[[], None] | None = None  # what works beside the stream
        self.reopen()

    # --- the model's side: what its hooks call ------------------------------------------------

    def enter(self, unit: Unit, caller: FrameType | None = None) -> None:
        """Have a unit's weights in place; blocks until they are.

        Args:
            unit: Which one.
            caller: The frame that ends with the use, where Ctrl-C may keep `leave` from being
                called.

        Raises:
            TransferError: A read failed; names tensors, file and layer.
            IntegrityError: A file was written to.
            ClosedError: The stream is closed.
        """
        self._turns.take(unit, caller)
        try:
            opened = self._check()
            stop = getattr(self._here, "stop", None)
            if stop is not None and stop.is_set():
                raise Cancelled
            self._put_away(unit)
            self._counts["units_used"] += 1
            if unit in self._settled or unit is self._held:
                self._in_use = unit
                return
            self._learn(unit)
            self._bring(unit, opened)
            self._show(unit, opened)
            self._in_use = unit
        except BaseException:
            self._give_up()
            self._turns.give(unit)
            raise

    def leave(self, unit: Unit) -> None:
        """Take a unit's weights away again; harmless if it was not entered."""
        if self._in_use is not unit or not self._turns.mine():
            return
        try:
            self._in_use = None
            if unit in self._settled:
                return
            if self._turns.shared():  # the other micro-batches want it too
                self._held = unit
            else:
                self._done_with(unit)
            if self._opened is not None:
                self._prefetch(self._opened)
        except BaseException:
            self._give_up()
            raise
        finally:
            self._turns.give(unit)

    def need_experts(self, unit: Unit, top_k_index: torch.Tensor) -> None:
        """Have those experts in place that tokens are routed to.

        Args:
            unit: In use.
            top_k_index: Numbers of experts, any shape; others than 0 to count - 1 mean none.

        Raises:
            TransferError, IntegrityError: As for `enter`.
        """
        opened, experts = self._check(), unit.experts
        slot = self._slots.get(unit)
        if experts is None or slot is None:
            return
        hit = [e for e in torch.unique(top_k_index).tolist() if 0 <= e < experts.number]
        self._dense = len(hit) >= _DENSE_SHARE * experts.number
        missing = [e for e in hit if not slot.experts[e]]
        if not missing:
            return
        reads = [read for expert in missing for read in unit.layout.experts[expert]]
        began = time.perf_counter()
        try:
            self._read_now(reads, slot, opened)
        except BaseException:
            self._give_up()
            raise
        self._waited_s += time.perf_counter() - began
        for expert in missing:
            slot.experts[expert] = 1
            opened.memory.convert_expert(slot, self._tensors, expert)
        self._counts["experts_read"] += len(missing)

    def rows(self, unit: Unit, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows of an embedding that is not in memory.

        Args:
            unit: Of which it is the only weight.
            ids: Numbers of rows.

        Returns:
            Rows, each once, and for each id its number among them.

        Raises:
            IndexError: An id is out of range, as of torch's own embedding.
            TransferError, IntegrityError: As for `enter`.
        """
        self._turns.take(None)
        try:
            opened = self._check()
            weight = unit.weights[0]
            part = weight.parts[0]
            unique, places = torch.unique(ids.reshape(-1).cpu(), return_inverse=True)
            rows, width = weight.shape
            if unique.numel() and not 0 <= int(unique[0]) <= int(unique[-1]) < rows:
                raise IndexError(
                    f"index out of range: {weight.name!r} has {rows} rows, ids are "
                    f"{int(unique[0])} to {int(unique[-1])}"
                )
            stride = width * part.dtype.itemsize
            piece = part.pieces[0]
            file = opened.checkpoint.files[piece.file]
            spans = [
                Span(file, piece.offset + row * stride, stride, f"row {row} of {weight.name!r}")
                for row in unique.tolist()
            ]
            began = time.perf_counter()
            try:
                read = read_spans(opened.handle, spans)
                opened.checkpoint.check(piece.file, repr(weight.name))
            except TransferError as failed:
                self._give_up()
                raise with_context(failed, f"weight {weight.name!r} of {unit.name}") from failed
            except BaseException:
                self._give_up()
                raise
            self._waited_s += time.perf_counter() - began
            self._counts["bytes_read"] += stride * len(spans)
            self._counts["rows_read"] += len(spans)
            found = torch.empty(len(read), width, dtype=part.dtype)
            for number, row in enumerate(read):
                found[number].view(torch.uint8).copy_(row)
            shape = ids.shape
            return found.to(self._device, weight.dtype), places.view(shape).to(self._device)
        finally:
            self._turns.give(None)

    def begin_pass(self, cache: Any) -> None:
        """A forward pass of the whole model begins.

        Args:
            cache: Of past keys and values, or None.

        Raises:
            RuntimeError: The cache is one that a pass left behind which failed.
        """
        self._check()
        self._spoil()  # a pass that Ctrl-C ended did not reach its `end_pass`
        if cache is not None and cache in self._spoilt:
            raise RuntimeError(
                "this cache of past keys and values was left by a pass that failed, with some "
                "layers "
                "updated and others not: start again with a new one"
            )
        self._here.cache = None
        if cache is not None:
            with contextlib.suppress(TypeError):  # tuples, as old models have them
                self._here.cache = weakref.ref(cache)

    def end_pass(self) -> None:
        """It is over, one way or another."""
        self._here.cache = None

    # --- bringing -----------------------------------------------------------------------------

    def _learn(self, unit: Unit) -> None:
        if self._last is not None and self._last is not unit:
            self._after[self._last] = unit
        self._last = unit

    def _next(self, unit: Unit) -> Unit:
        """What is expected after a unit: what came then, or what the module tree has there."""
        known = self._after.get(unit)
        if known is not None:
            return known
        return self._units[(self._units.index(unit) + 1) % len(self._units)]

    def _bring(self, unit: Unit, opened: Opening) -> None:
        slot = self._slots.get(unit)
        if slot is None:
            if self._counts["units_read"]:
                self._counts["mispredicted"] += 1
            self._drop_ahead(None)
            slot = self._start(unit, opened)
            if slot is None:
                raise RuntimeError(f"no slot for {unit!r}: {self._slots}")
        elif unit in self._ahead:
            self._drop_ahead(unit)
        self._prefetch(opened)
        job = slot.job
        if job is None:
            return
        began = time.perf_counter()
        try:
            job.wait()
        except TransferError as failed:
            at = job.failed_at
            names = names_in(unit, at.at, at.memory.nbytes) if at is not None else unit.name
            raise with_context(failed, f"weights {names} of {unit.name}") from failed
        self._waited_s += time.perf_counter() - began
        for index in slot.files:
            opened.checkpoint.check(index, f"layer {unit.name!r}")
        slot.job = None
        if self.progress is not None:
            self.progress(unit.name, unit.layout.nbytes)

    def _start(self, unit: Unit, opened: Opening) -> Slot | None:
        """Begin to read a unit; None where there is no room for it now."""
        slot = opened.memory.take(unit, unit.resident)
        if slot is None:
            return None
        reads = unit.layout.reads
        if self._dense and unit.experts is not None:
            reads += unit.layout.all_experts
            slot.experts = bytearray(b"\1" * unit.experts.number)
        slot.job = opened.memory.job(slot, reads, opened.checkpoint.files)
        self._slots[unit] = slot
        self._counts["units_read"] += 1
        self._counts["bytes_read"] += slot.job.nbytes
        try:
            opened.feeder.submit(slot.job)
        except BaseException:
            self._release(unit)
            raise
        return slot

    def _prefetch(self, opened: Opening) -> None:
        """Begin to read what comes next, as far as there is room."""
        unit = self._ahead[-1] if self._ahead else self._last
        if unit is None:
            return
        seen = {self._last, self._in_use, *self._ahead}
        for _ in range(len(self._units)):
            unit = self._next(unit)
            if unit in seen:
                return
            seen.add(unit)
            if not unit.modules and not unit.resident:
                continue  # an embedding of which rows are read
            if unit in self._slots:
                continue
            if self._start(unit, opened) is None:
                return
            if not unit.resident:
                self._ahead.append(unit)

    def _drop_ahead(self, wanted: Unit | None) -> None:
        """Drop what was expected before `wanted`; None: all that was expected."""
        while self._ahead:
            unit = self._ahead.popleft()
            if unit is wanted:
                return
            self._counts["dropped"] += 1
            self._release(unit)

    def _read_now(self, reads: Sequence[Read], slot: Slot, opened: Opening) -> None:
        """Read past the queue, for somebody who waits."""
        load_beside(slot, reads, opened.handle, opened.checkpoint.files)
        for index in {read.file for read in reads}:
            opened.checkpoint.check(index, f"layer {slot.unit.name!r}")
        for read in reads:
            opened.memory.copied(slot, read)
        self._counts["bytes_read"] += sum(read.end - read.start for read in reads)

    # --- showing and putting away --------------------------------------------------------------

    def _show(self, unit: Unit, opened: Opening) -> None:
        slot = self._slots[unit]
        opened.memory.ready(slot)
        self._tensors = opened.memory.tensors(slot)
        install(unit.targets, self._tensors)
        if unit.resident and not unit.converted_bytes and unit.experts is None:
            self._settled.add(unit)

    def _put_away(self, unit: Unit) -> None:
        """Clear away another unit: kept for micro-batches, or left by a pass that was stopped."""
        for left in (self._in_use, self._held):
            if left is not None and left is not unit and left not in self._settled:
                self._done_with(left)
        self._in_use = None
        if self._held is not unit:
            self._held = None

    def _done_with(self, unit: Unit) -> None:
        uninstall(unit.targets)
        self._tensors = []
        if not unit.resident:
            self._release(unit)

    def _release(self, unit: Unit) -> None:
        slot = self._slots.pop(unit, None)
        if slot is None or self._opened is None:
            return
        settle(slot, self._opened.feeder)
        self._opened.memory.give_back(slot)

    def _give_up(self) -> None:
        """After a failure: nothing in flight, nothing shown, nothing half there."""
        self._spoil()
        self._ahead.clear()
        for unit in [u for u in self._slots if u not in self._settled]:
            uninstall(unit.targets)
            self._release(unit)
        self._tensors = []
        self._in_use = self._held = self._last = None

    def _spoil(self) -> None:
        reference = getattr(self._here, "cache", None)
        cache = None if reference is None else reference()
        if cache is not None:
            self._spoilt.add(cache)

    # --- awaited ------------------------------------------------------------------------------

    async def run(self, work: Callable[..., Value], *arguments: Any, **named: Any) -> Value:
        """Call `model.generate`, or the model itself, in a thread, awaited.

        Other coroutines run meanwhile. Autograd is off in it. Cancelling stops the work at the next
        layer; `CancelledError` is raised when it has stopped.

        Example:
            >>> tokens = await model.weight_stream.run(model.generate, ids, max_new_tokens=8)
        """
        stop = threading.Event()

        def call() -> Value:
            self._here.stop = stop
            with torch.no_grad():
                return work(*arguments, **named)

        return await in_thread(call, stop.set)

    @property
    def turns(self) -> Turns:
        """Who may use the weights."""
        return self._turns

    def in_turns(self, schedule: Schedule[Value]) -> list[Value]:
        """Run a schedule of micro-batches; what they leave is put away when they are done."""
        try:
            return schedule.run()
        finally:
            self._turns.take(None)
            try:
                held, self._held = self._held, None
                if held is not None and self._opened is not None:
                    self._done_with(held)
                    self._prefetch(self._opened)
            finally:
                self._turns.give(None)

    # --- opening and closing ------------------------------------------------------------------

    def reopen(self) -> None:
        """Open again what `close` closed; the files are read from their paths anew. Idempotent.

        Raises:
            FileNotFoundError, IntegrityError: A file is missing, damaged, or another than before.
        """
        if self._opened is not None:
            return
        with contextlib.ExitStack() as undo:
            handle = self._handle
            if handle is None:
                handle = undo.enter_context(new_handle(self._path))
            checkpoint = undo.enter_context(contextlib.closing(self._open_checkpoint(handle)))
            memory = undo.enter_context(contextlib.closing(Memory(self._shares, self._device)))
            feeder = Feeder(handle)
            undo.callback(feeder.stop)
            fixed: Slot | None = None
            if self._fixed.weights:
                fixed = memory.take(self._fixed, True)
                if fixed is None:
                    raise RuntimeError(f"no slot for {self._fixed!r}")
                self._load_fixed(fixed, memory, feeder, checkpoint)
            lease = None if fixed is None else fixed.lease
            self._opened = Opening(handle, self._handle is None, checkpoint, memory, feeder, lease)
            undo.pop_all()
        close = functools.partial(close_all, self._opened)
        self._finalizer = weakref.finalize(self, finish, close)

    def _load_fixed(
        self, slot: Slot, memory: Memory, feeder: Feeder, checkpoint: Checkpoint
    ) -> None:
        try:
            load(slot, memory, feeder, checkpoint.files)
        except TransferError as failed:
            at = slot.job.failed_at if slot.job is not None else None
            names = names_in(self._fixed, at.at, at.memory.nbytes) if at is not None else "them"
            raise with_context(failed, f"weights {names} of {self._fixed.name}") from failed
        for index in slot.files:
            checkpoint.check(index, self._fixed.name)
        install(self._fixed.targets, memory.tensors(slot, keep=True))

    def close(self) -> None:
        """Stop reading, close the files, give back the memory. Idempotent.

        The model's forward raises `ClosedError` until `reopen`. A pass that is under way in another
        thread ends with that error at its next layer.
        """
        self._turns.take(None)
        try:
            opened, self._opened = self._opened, None
            if opened is None:
                return
            self._ahead.clear()
            for unit in [self._fixed, *self._units]:
                uninstall(unit.targets)
            for slot in self._slots.values():
                settle(slot, opened.feeder)
                opened.memory.give_back(slot)
            self._slots.clear()
            self._settled.clear()
            self._tensors = []
            self._in_use = self._held = self._last = None
            self._finalizer.detach()
            close_all(opened)
            if self.closes_too is not None:
                self.closes_too()
        finally:
            self._turns.give(None)

    def __enter__(self) -> WeightStream:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # --- properties ---------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether the model cannot be used until `reopen`."""
        return self._opened is None

    @property
    def locked(self) -> bool:
        """Whether the memory that weights are in is page-locked."""
        return self._opened is not None and self._opened.memory.locked

    @property
    def units(self) -> Sequence[Unit]:
        """What is streamed or kept as one, in the order of the module tree."""
        return tuple(self._units)

    @property
    def stats(self) -> StreamStats:
        """Counters since the stream was made."""
        streamed = sum(u.streamed_bytes for u in self._units if not u.resident)
        shares = self._shares
        return StreamStats(
            **self._counts,
            waited_s=self._waited_s,
            resident_bytes=shares.resident,
            window_bytes=shares.window,
            work_bytes=shares.work,
            streamed_bytes=streamed,
        )

    def _check(self) -> Opening:
        if self._opened is None:
            raise ClosedError("the stream of weights is closed: model.weight_stream.reopen()")
        if self._pid != os.getpid():
            raise ClosedError("the stream of weights belongs to the parent of this forked process")
        return self._opened

    def __repr__(self) -> str:
        kept = sum(unit.resident for unit in self._units)
        state = "closed" if self.closed else "open"
        return (
            f"<nvmeio.WeightStream {len(self._units)} units, {kept} resident, "
            f"{self._shares.total} bytes of weights in memory, {state}>"
        )

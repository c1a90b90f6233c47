"""The engine on Linux AIO: lanes in the native shim, one daemon thread parked in each."""

from __future__ import annotations

import ctypes
import errno
import functools
import itertools
import os
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nvmeio._bindings import KernelAio, ffi, lib, open_kernel_aio
from nvmeio._threads.closing import members, on_error
from nvmeio._threads.interruptible import Job
from nvmeio._threads.threads import Thread
from nvmeio.engines import base
from nvmeio.errors import BackendUnavailableError, counted

# A ring of bounce blocks: enough in flight to keep a drive busy while one is copied, and a little
# less than a default queue, which may be filled. See docs/architecture.md for the measurement.
BOUNCE_BYTES = 112 << 20
MIN_BOUNCE_BLOCKS = 4
_REAP_MAX = 64

_SHORT = ffi.typeof("nv_short *")
_ENDS = ffi.typeof(f"int64_t[{2 * _REAP_MAX}]")
_gc, _new, _unpack = ffi.gc, ffi.new, ffi.unpack
_short_prepare, _short_start = lib.nv_short_prepare, lib.nv_short_start
_short_moved, _short_end = lib.nv_short_moved, lib.nv_short_end

# A request begins with its result.
_REQUEST, _RESULT, _ADDRESS = map(ffi.typeof, ("nv_request *", "nv_result *", "intptr_t"))

_giving_back: weakref.WeakSet[Job[object]] = weakref.WeakSet()
os.register_at_fork(after_in_child=_giving_back.clear)


class LibaioEngine:
    """Linux AIO through libaio, or through the same system calls where libaio is missing.

    Args:
        table: A call table from `nvmeio._bindings.load_libaio`, for tests that inject faults.

    Attributes:
        given_back: When the kernel has the contexts back, some 30 ms after `join` (io_destroy waits
            for an RCU grace period). None before that.
    """

    name = "libaio"
    capabilities = base.Capabilities(rows=True, batches=True, short_transfers=True, keeps_gil=True)

    def __init__(self, table: Any = None) -> None:
        self._table = table
        self._engine: Any = None
        self._lanes: list[Thread] = []
        self.given_back: Job[object] | None = None

    def start(self, options: base.Options) -> None:
        """Set up one AIO context a lane and start the lanes' threads."""
        if self._engine is not None:
            raise RuntimeError("this engine was started before: one engine serves one handle")
        table = self._table or open_kernel_aio()[0]
        raw = ffi.new("nv_options *")
        raw.block_size = options.block_size
        raw.queue_depth = options.queue_depth
        raw.lanes = options.intra_op_parallelism
        raw.bounce_blocks = min(
            options.queue_depth, max(MIN_BOUNCE_BLOCKS, BOUNCE_BYTES // options.block_size)
        )
        raw.single_submit = options.single_submit
        raw.overlap_events = options.overlap_events
        error = ffi.new("int *")
        engine = lib.nv_engine_new(table, raw, error)
        if engine == ffi.NULL and error[0] == errno.EAGAIN:
            for job in members(_giving_back):
                job.wait()  # what was closed just now counts until then
            engine = lib.nv_engine_new(table, raw, error)
        if engine == ffi.NULL:
            raise _unavailable(error[0], options)
        self._engine = engine = ffi.gc(engine, lib.nv_engine_free)
        with on_error(base.end, self):  # there are no more threads in this process
            for index in range(options.intra_op_parallelism):
                # It holds the engine, not this object: a lane with work outlives its handle.
                lane = Thread(lib.nv_lane_run, f"nvmeio-lane-{index}", (engine, index))
                lane.start()
                self._lanes.append(lane)

    def open_completion_queue(self) -> base.CompletionQueue:
        """A completion queue with an eventfd."""
        return self._open_queue(LibaioQueue)

    def open_gil_keeping_queue(self) -> base.CompletionQueue:
        """The same for a thread that keeps the GIL while it prepares, starts and reaps."""
        return self._open_queue(_GilKeepingQueue)

    def _open_queue(self, kind: type[LibaioQueue]) -> LibaioQueue:
        cq = lib.nv_cq_new(self._engine)
        if cq == ffi.NULL:
            raise OSError(errno.EMFILE, f"{os.strerror(errno.EMFILE)}: no eventfd (ulimit -n)")
        return kind(ffi.gc(cq, lib.nv_cq_free))

    def prepare(
        self, cq: base.CompletionQueue, token: int, transfer: base.Transfer
    ) -> base.Request:
        """A request for one of the lanes."""
        assert isinstance(cq, LibaioQueue)
        return cq.prepare(self._engine, token, transfer)

    def short_place(
        self, opcode: int, fd: int, direct: bool, unit: int, memory: int
    ) -> Callable[[base.CompletionQueue, int, int], base.ShortRequest]:
        """The maker of a file's short transfers, which take less of everything.

        It is called with a queue, a token, and the flag of a storage (`holds`) that is to be held.
        The engine has to be kept for as long.
        """
        raw = ffi.new("nv_place *")
        raw.engine, raw.opcode = self._engine, opcode
        raw.direct_fd, raw.buffered_fd = (fd, -1) if direct else (-1, fd)
        raw.offset_alignment, raw.memory_alignment = unit, memory
        return functools.partial(_ShortRequest, raw)  # no call of Python's in between

    def prepare_rows(
        self, cq: base.CompletionQueue, token: int, transfer: base.Transfer, rows: base.Rows
    ) -> base.Request:
        """One request for all rows; the shim sorts them and cuts them into blocks."""
        assert isinstance(cq, LibaioQueue)
        told = transfer.opcode, transfer.direct_fd, transfer.buffered_fd, transfer.address
        needs = transfer.offset_alignment, transfer.memory_alignment, transfer.foreign
        arguments = (self._engine, cq.raw, token, *told, *rows, *needs)
        request = _owned(lib.nv_prepare_rows, arguments)
        if not request:
            raise MemoryError(
                f"the native shim could not allocate a request of {counted(rows.number, 'row')}"
            )
        return cq.rows_request(request, rows)

    def prepare_batch(
        self, cq: base.CompletionQueue, token: int, transfers: Sequence[base.Transfer]
    ) -> base.BatchRequest:
        """One request for all; the shim hands them to the lanes."""
        assert isinstance(cq, LibaioQueue)
        number = len(transfers)
        raw = ffi.new("nv_transfer[]", transfers)
        request = _owned(lib.nv_prepare_batch, (self._engine, cq.raw, token, raw, number))
        if not request:
            raise MemoryError(f"the native shim could not allocate {counted(number, 'request')}")
        return _BatchRequest(request, number)

    def counters(self) -> base.Counters:
        """Counted by the lanes."""
        raw = ffi.new("nv_counters *")
        lib.nv_engine_counters(self._engine, raw)
        return base.Counters(*(getattr(raw, field) for field in base.Counters._fields))

    def stop(self) -> None:
        """Tell the lanes to return once nothing is in flight."""
        if self._engine is not None:
            lib.nv_engine_stop(self._engine)

    def join(self) -> None:
        """Wait for the lanes' threads; their AIO contexts are freed by a thread of its own.

        Nothing is in flight, so nobody need wait for that. `threading.enumerate()` does not list
        the thread: test suites that count the threads that a call left find none.
        """
        for lane in self._lanes:
            lane.join()
        if self._lanes:
            give_back = functools.partial(lib.nv_engine_close, self._engine)
            self.given_back = job = Job[object](give_back, "", closes=True)
            _giving_back.add(job)
            try:
                job.start()
            except (RuntimeError, MemoryError):  # no more threads in this process
                give_back()
        self._lanes = []


class _NativeRequest:
    __slots__ = ("_raw",)

    def __init__(self, raw: Any) -> None:
        self._raw = raw

    def start(self) -> None:
        lib.nv_start(self._raw)

    def started(self) -> bool:
        return bool(lib.nv_is_started(self._raw))

    def cancel(self) -> None:
        lib.nv_cancel(self._raw)

    def wait(self, timeout_s: float) -> bool:
        return bool(lib.nv_wait(self._raw, timeout_s))

    def move(self, cq: base.CompletionQueue) -> None:
        assert isinstance(cq, LibaioQueue)
        lib.nv_move(self._raw, cq.raw)

    def moved(self) -> int:
        moved: int = lib.nv_moved(self._raw)
        return moved

    def outcome(self) -> base.Outcome:
        return _outcome(ffi.cast(_RESULT, self._raw))


class _ShortRequest(_NativeRequest):
    __slots__ = ("_owned", "_place", "held")

    def __init__(self, place: Any, cq: Any, token: int, flag: int) -> None:
        # Owned before there is anything: an interrupt may come between two steps.
        self._owned = owned = _gc(_new(_SHORT), _short_end)
        held = _short_prepare(owned, place, cq.raw, token, flag)
        if held < 0:
            raise MemoryError("the native shim could not allocate a request")
        self._place = place
        self.held = held > 0

    @property
    def _raw(self) -> Any:
        return self._owned.request

    def start_at(self, address: int, nbytes: int, file_offset: int) -> None:
        _short_start(self._owned, self._place, address, nbytes, file_offset, not self.held)

    def moved(self) -> int:
        moved: int = _short_moved(self._owned)
        return moved

    def let_go(self) -> None:
        lib.nv_short_let_go(self._owned)


class _RowsRequest(_NativeRequest):
    __slots__ = ("_rows",)

    def __init__(self, raw: Any, rows: base.Rows) -> None:
        super().__init__(raw)
        self._rows = rows

    def outcome(self) -> base.Outcome:
        return base.with_cause(super().outcome(), lib.nv_request_rows(self._raw), self._rows)


class _BatchRequest(_NativeRequest):
    __slots__ = ("_number",)

    def __init__(self, raw: Any, number: int) -> None:
        super().__init__(raw)
        self._number = number

    def outcomes(self) -> list[base.Outcome]:
        raw = self._raw
        return [_outcome(lib.nv_batch_result(raw, member)) for member in range(self._number)]


def _owned(prepare: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """The request that `prepare` makes, given back with the last reference to it; or NULL.

    It is made and owned within one C call: Ctrl-C comes between two steps of Python, and a request
    that nobody owns keeps its engine forever.
    """
    # Nothing runs before `next`, which goes through both steps in C.
    prepared = itertools.starmap(prepare, (arguments,))
    owned = map(ffi.gc, prepared, (lib.nv_request_free,))
    return next(owned)


def _outcome(raw: Any) -> base.Outcome:
    return base.Outcome(
        raw.error, raw.transferred, raw.direct_bytes, raw.bounced_bytes, raw.buffered_bytes
    )


class LibaioQueue:
    """The queue in which the shim's lanes report transfers that have ended."""

    __slots__ = ("raw",)
    rows_request = _RowsRequest

    def __init__(self, raw: Any) -> None:
        self.raw = raw

    def fileno(self) -> int:
        return int(lib.nv_cq_fd(self.raw))

    def peek(self) -> list[int]:
        tokens = ffi.new("uint64_t[]", _REAP_MAX)  # one a call: several threads may peek at once
        found: list[int] = ffi.unpack(tokens, lib.nv_cq_peek(self.raw, tokens, _REAP_MAX))
        return found

    def peek_ends(self) -> tuple[list[int], list[int]]:
        ends = _new(_ENDS)  # one a call, as above
        found = _unpack(ends, 2 * lib.nv_cq_peek_ends(self.raw, ends, _REAP_MAX))
        return found[::2], found[1::2]

    def acknowledge(self, tokens: list[int]) -> None:
        lib.nv_cq_acknowledge(self.raw, tokens, len(tokens))

    def reap(self) -> list[int]:
        tokens = ffi.new("uint64_t[]", _REAP_MAX)  # one a call: several threads may reap at once
        taken: list[int] = []
        while True:
            n = self._reap_into(tokens)
            taken += ffi.unpack(tokens, n)
            if n < _REAP_MAX:
                return taken

    def _reap_into(self, tokens: Any) -> int:
        return int(lib.nv_cq_reap(self.raw, tokens, _REAP_MAX))

    def prepare(self, engine: Any, token: int, transfer: base.Transfer) -> base.Request:
        """A request of the shim's engine, to be reported here."""
        request = _owned(lib.nv_prepare, (engine, self.raw, token, *transfer))
        if not request:
            raise MemoryError("the native shim could not allocate a request")
        return _NativeRequest(request)

    def wake(self) -> None:
        lib.nv_cq_wake(self.raw)

    def close(self) -> None:
        # Freed when nobody holds it any more: another thread may be about to reap.
        lib.nv_cq_close(self.raw)


# The ring's thread may work beside a thread that is busy in Python. Each time it lets go of the GIL
# it may wait 5 ms to get it back, and cffi's calls let go. The calls below keep it: they are short,
# never sleep and never call Python. All other threads use cffi's calls: ctypes converts sixteen
# arguments for nv_prepare, which costs 35,000 instructions a read more (`make bench-instructions`).


def _keeping_gil(name: str, result: Any, *arguments: Any) -> Any:
    """A call of the shim's that keeps the GIL; pointers are integers."""
    return ctypes.PYFUNCTYPE(result, *arguments)(_address(ffi.addressof(lib, name)))


def _address(raw: Any) -> int:
    return int(ffi.cast(_ADDRESS, raw))


_INT, _U32, _U64 = ctypes.c_int, ctypes.c_uint32, ctypes.c_uint64
_of_prepare = *[_U64] * 3, *[_INT] * 3, *[_U64] * 5, *[_U32] * 2, *[_INT] * 3  # as in decl.h
_prepare_keeping_gil = _keeping_gil("nv_prepare", _U64, *_of_prepare)
_start_keeping_gil = _keeping_gil("nv_start", None, _U64)
_reap_keeping_gil = _keeping_gil("nv_cq_reap", _INT, _U64, _U64, _INT)


class _GilKeepingRequest(_NativeRequest):
    __slots__ = ()

    def start(self) -> None:
        _start_keeping_gil(_address(self._raw))


class _GilKeepingRowsRequest(_RowsRequest):
    __slots__ = ()
    start = _GilKeepingRequest.start


class _GilKeepingQueue(LibaioQueue):
    """A queue for a thread that keeps the GIL."""

    __slots__ = ()
    rows_request = _GilKeepingRowsRequest

    def prepare(self, engine: Any, token: int, transfer: base.Transfer) -> base.Request:
        arguments = (_address(engine), _address(self.raw), token, *transfer)
        pointers = map(ffi.cast, (_REQUEST,), itertools.starmap(_prepare_keeping_gil, (arguments,)))
        request = next(map(ffi.gc, pointers, (lib.nv_request_free,)))  # as `_owned`
        if not request:
            raise MemoryError("the native shim could not allocate a request")
        return _GilKeepingRequest(request)

    def _reap_into(self, tokens: Any) -> int:
        return int(_reap_keeping_gil(_address(self.raw), _address(tokens), _REAP_MAX))


def probe() -> tuple[int, str]:
    """Whether io_setup(2) works here: (0, through what) or (errno, why not)."""
    table, source = open_kernel_aio()
    raw = ffi.new("nv_options *", {"block_size": 4096, "queue_depth": 1, "lanes": 1})
    error = ffi.new("int *")
    engine = lib.nv_engine_new(table, raw, error)
    if engine == ffi.NULL:
        return int(error[0]), f"io_setup: {os.strerror(error[0])}"
    lib.nv_engine_free(engine)
    return 0, _through(source)


def _through(source: KernelAio) -> str:
    if source.source == "libaio":
        return f"through {source.path}"
    return f"through the system calls ({source.reason})"


class AioLimitError(BackendUnavailableError):
    """Others have used up ``fs.aio-max-nr``."""


def _unavailable(code: int, options: base.Options) -> BackendUnavailableError:
    if code == errno.EAGAIN:
        used, limit = (int(Path(f"/proc/sys/fs/aio-{n}").read_text()) for n in ("nr", "max-nr"))
        wanted = options.queue_depth * options.intra_op_parallelism
        return AioLimitError(
            f"the kernel's limit for AIO events is reached: fs.aio-max-nr = {limit}, in use "
            f"fs.aio-nr = {used}, wanted {wanted} "
            f"(queue_depth {options.queue_depth} x {options.intra_op_parallelism} lanes)",
            attempts=_holders() or [("holders", "none visible to this user in /proc/*/maps")],
            remedy=f"sudo sysctl -w fs.aio-max-nr={max(1 << 20, used + 2 * wanted)} (for good: in "
            "/etc/sysctl.d/), or a smaller queue_depth, or engine='threads'",
        )
    return BackendUnavailableError(
        "the kernel gives no AIO context",
        attempts=[("io_setup", f"{errno.errorcode.get(code, code)}: {os.strerror(code)}")],
        remedy="engine='threads' works everywhere; in a container, allow io_setup in its "
        "seccomp profile",
    )


def _holders() -> list[tuple[str, str]]:
    """Processes with AIO contexts, most first: each context maps a ring named /[aio]."""
    found = []
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            contexts = maps.read_text(errors="replace").count("/[aio]")
            name = (maps.parent / "comm").read_text(errors="replace").strip()
        except OSError:
            continue
        if contexts:
            pid = maps.parent.name + (
                " (this process)" if int(maps.parent.name) == os.getpid() else ""
            )
            found.append((contexts, f"process {pid}", f"{name}, {contexts} AIO contexts"))
    return [(who, what) for _, who, what in sorted(found, reverse=True)[:8]]

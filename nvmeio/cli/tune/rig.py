"""Measuring: one setting (`Rig`, handles on real files), and a whole search of them (`TuneRun`)."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.console import Console

import nvmeio
from nvmeio._pages import PAGE_BYTES
from nvmeio.cli import _terminal
from nvmeio.cli._terminal import GB, binary_size, say
from nvmeio.cli.measure import Op, disk
from nvmeio.cli.tune.result import Latencies, Log, TunePlan, TuneResult
from nvmeio.cli.tune.search import Search, UnusableSetting
from nvmeio.cli.tune.space import DEFAULT, in_words
from nvmeio.engines.base import Options
from nvmeio.errors import BackendUnavailableError, NvmeioError
from nvmeio.files import probe_direct

DROP_CACHES = Path("/proc/sys/vm/drop_caches")
_LATENCY_PART = 0.08  # of the budget, for the page's latency distributions,
_LATENCY_MOST_S = 6.0  # but never more than this


class Rig:
    """Files and buffers that stay, handles that come and go.

    Args:
        directories: Scratch directories; each transfer is spread over all of them at once.
        plan: How; with `gpu` the tensors lie on CUDA devices, that of the first directory on the
            first one, and with `flush` the whole page cache is dropped before each read, as root.
        engine: "libaio" or "threads"; "auto" would look for them each time.
    """

    def __init__(self, directories: Sequence[Path], plan: TunePlan, engine: str) -> None:
        self.engine = engine
        self._plan = plan
        self._handle = nvmeio.GdsHandle if plan.gds else nvmeio.AioHandle
        self.direct = all(probe_direct(directory).supported for directory in directories)
        self._files = [directory / "tune.bin" for directory in directories]
        self._tensors: list[torch.Tensor] = []

    def prepare(self) -> None:
        """Touches the buffers and writes the files; every block of them, so that writes overwrite.

        Raises:
            TransferError: A file cannot be written.
            MemoryError: The buffers do not fit.
        """
        for index, path in enumerate(self._files):
            host = nvmeio.empty_aligned(self._plan.io_size, dtype=torch.uint8)
            disk.fill(host, index)
            disk.write_file(path, host)
            self._tensors.append(host.to(f"cuda:{index}") if self._plan.gpu else host)

    def measure(self, setting: Options, op: Op, nbytes: int) -> float:
        """Seconds that a transfer takes, all directories at once; making handles is not in it.

        Raises:
            UnusableSetting: The setting cannot be had here.
            TransferError: The drive failed.
        """
        with contextlib.ExitStack() as opened:
            handles = self._open(setting, opened)
            return statistics.median(
                self._once(handles, op, nbytes // len(self._files)) for _ in range(self._plan.loops)
            )

    def _open(self, setting: Options, opened: contextlib.ExitStack) -> list[nvmeio.AioHandle]:
        handles: list[nvmeio.AioHandle] = []
        try:
            for path, tensor in zip(self._files, self._tensors, strict=True):
                handle = opened.enter_context(self._handle(*setting, engine=self.engine))
                handle.sync_pread(tensor[:PAGE_BYTES], path)  # its threads are up and awake
                handles.append(handle)
        except BackendUnavailableError as failed:
            raise UnusableSetting(str(failed).splitlines()[0]) from failed
        return handles

    def _once(self, handles: Sequence[nvmeio.AioHandle], op: Op, nbytes: int) -> float:
        if op == "read":
            self._make_cold()
        pieces = [tensor[:nbytes] for tensor in self._tensors]
        operations = []
        start = time.perf_counter()
        try:
            for handle, piece, path in zip(handles, pieces, self._files, strict=True):
                begin = handle.async_pread if op == "read" else handle.async_pwrite
                operations.append(begin(piece, path))
            for operation in operations:
                operation.result()
        except BaseException:
            for operation in operations:
                operation.cancel()  # Ctrl-C: what the kernel does not have yet, it need not get
            raise
        return time.perf_counter() - start

    def _make_cold(self) -> None:
        if self._plan.flush:
            os.sync()
            DROP_CACHES.write_text("1\n")
        elif not self.direct:
            for path in self._files:
                disk.drop_from_cache(path)

    def latencies(self, setting: Options, op: Op, seconds: float) -> list[float]:
        """How long single blocks take, in seconds, with the queue kept full.

        Each of `queue_depth` tasks awaits one block after another, in the first directory. As an
        awaiting task sees it: from the call to being resumed.
        """
        tensor, path = self._tensors[0], self._files[0]
        block = min(setting.block_size, self._plan.io_size)
        blocks = self._plan.io_size // block
        depth = max(1, min(setting.queue_depth, blocks))
        found: list[float] = []

        async def work(handle: nvmeio.AioHandle, file: nvmeio.File, first: int) -> None:
            begin = handle.async_pread if op == "read" else handle.async_pwrite
            piece = tensor[first * block : (first + 1) * block]
            number = first
            while time.perf_counter() < until:
                start = time.perf_counter()
                await begin(piece, file, number % blocks * block)
                found.append(time.perf_counter() - start)
                number += depth

        async def everybody() -> None:
            async with self._handle(*setting, engine=self.engine) as handle:
                with nvmeio.open(path, "r+") as file:
                    await asyncio.gather(*(work(handle, file, n) for n in range(depth)))

        until = time.perf_counter() + seconds
        asyncio.run(everybody())
        # Those of the first round were all submitted at once, and of the last not all were.
        return found[depth:-depth] if len(found) > 3 * depth else found


def check_flush() -> None:
    """Makes sure that the page cache can be dropped.

    Raises:
        BackendUnavailableError: It takes root.
    """
    if not os.access(DROP_CACHES, os.W_OK):
        raise BackendUnavailableError(
            "--flush-page-cache: this user may not drop the page cache",
            attempts=[(str(DROP_CACHES), "not writable")],
            remedy="run as root, or leave it out: direct reads do not go through the page cache",
        )


class TuneRun:
    """Measures as planned.

    Args:
        plan: The requested search.
        errors: The stream for progress, and for every measurement if `verbose`.
        log: Takes every measurement.
    """

    def __init__(self, plan: TunePlan, errors: Console, log: Log | None, *, verbose: bool) -> None:
        self._plan = plan
        self._errors = errors
        self._log = log
        self._verbose = verbose
        self._started = time.monotonic()
        self._complete = False
        self._latencies: list[Latencies] = []
        self._trouble = ""
        self._tell: Callable[[float, str], None] = lambda passed, what: None
        needs = Counter[Path]()
        for directory in plan.directories:
            needs[directory] += plan.io_size
        self._nbytes = plan.io_size * len(plan.directories)
        disk.check_space(needs)
        disk.check_memory(self._nbytes, needs)
        with nvmeio.AioHandle(engine=plan.engine) as handle:
            self._engine = handle.engine
        self._rig: Rig | None = None
        self._search = Search(
            plan.grid, plan.ops, self._nbytes, self._measure, time.monotonic, self._show
        )

    def measure(self) -> None:
        """Everything, within the budget.

        Raises:
            BackendUnavailableError: The default setting cannot be used here.
            NvmeioError: A transfer failed.
        """
        plan = self._plan
        latency_s = min(plan.budget_s * _LATENCY_PART, _LATENCY_MOST_S) if plan.latencies else 0.0
        with (
            disk.scratch(plan.directories, "tune") as made,
            _terminal.budget(self._errors, plan.budget_s) as self._tell,
        ):
            scratch = [made[directory] for directory in plan.directories]
            rig = self._rig = Rig(scratch, plan, self._engine)
            self._show("writing files")
            rig.prepare()
            try:
                outcome = self._search.run(self._started + plan.budget_s - latency_s)
            except UnusableSetting as unusable:
                raise BackendUnavailableError(
                    f"the default setting cannot be used: {unusable}"
                ) from None
            self._complete = True
            if latency_s:
                self._show("latencies")
                self._look_at_blocks(rig, outcome.winner, latency_s)

    def result(self) -> TuneResult | None:
        """The results so far; None if it was interrupted before anything was measured."""
        outcome = self._search.outcome(self._complete)
        told = self._complete or any(s.stage != "probe" for s in outcome.samples)
        if self._rig is None or not told:
            return None
        return TuneResult(
            self._plan,
            outcome,
            self._engine,
            self._rig.direct,
            time.monotonic() - self._started,
            list(self._latencies),
            self._trouble,
        )

    def _show(self, what: str) -> None:
        self._tell(time.monotonic() - self._started, what)

    def _measure(self, setting: Options, op: Op, nbytes: int) -> float:
        assert self._rig is not None
        seconds = self._rig.measure(setting, op, nbytes)
        if self._log:
            self._log.add(setting, op, nbytes, seconds)
        if self._verbose:
            rate = nbytes / seconds / GB
            line = f"{op:5} {in_words(setting):55} {binary_size(nbytes):>8} {rate:6.2f} GB/s"
            say(self._errors, line)
        return seconds

    def _look_at_blocks(self, rig: Rig, winner: Options, seconds: float) -> None:
        asked = list(dict.fromkeys((winner, DEFAULT)))
        each = seconds / (len(asked) * len(self._plan.ops))
        try:
            for op in self._plan.ops:
                for setting in asked:
                    found = rig.latencies(setting, op, each)
                    self._latencies.append(Latencies(setting, op, found))
        except (NvmeioError, OSError) as failed:
            self._trouble = f"latencies were not measured: {failed}"


def require_libraries() -> None:
    """Makes sure that they are installed, before anything is measured.

    Raises:
        BackendUnavailableError: One is not; says how to install it.
    """
    missing = []
    for name in ("optuna", "plotly", "jinja2"):
        try:
            importlib.import_module(name)
        except ImportError as error:
            missing.append((name, str(error)))
    if missing:
        raise BackendUnavailableError(
            "nvmeio tune searches with optuna and draws with plotly",
            attempts=missing,
            remedy="pip install 'nvmeio[tune]'",
        )

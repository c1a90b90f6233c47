"""What the tests share: event loops of every kind, a gate before the engine, bytes of tensors."""

from __future__ import annotations

import asyncio
import ctypes
import functools
import gc
import inspect
import os
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from programs import Program, run_program

import nvmeio
from nvmeio._memory import copy_on_write
from nvmeio.engines.threads import Block
from nvmeio.testing import FakeEngine

LOOPS = ("asyncio", "debug", "uvloop", "eager")

# Where a test may wait for something that never comes; far above what a busy machine needs.
PATIENCE_S = 60.0


# Loops


def needs_loop(kind: str) -> None:
    """Skips the test where there is no such loop."""
    if kind == "uvloop":
        pytest.importorskip("uvloop")
    if kind == "eager" and sys.version_info < (3, 12):
        pytest.skip("asyncio has eager tasks from Python 3.12 on")


def new_loop(kind: str) -> asyncio.AbstractEventLoop:
    """A loop of this kind; skips the test where there is none."""
    needs_loop(kind)
    if kind == "uvloop":
        import uvloop

        loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        return loop
    loop = asyncio.new_event_loop()
    if kind == "debug":
        loop.set_debug(True)
    if kind == "eager":
        loop.set_task_factory(asyncio.eager_task_factory)  # type: ignore[attr-defined]
    return loop


def run_on(kind: str, main: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine on a loop of this kind; errors that nobody retrieved fail the test."""
    try:
        loop = new_loop(kind)
    except BaseException:
        main.close()
        raise
    unhandled: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: unhandled.append(context))
    try:
        value = loop.run_until_complete(main)
        left = [task for task in asyncio.all_tasks(loop) if not task.done()]
        assert not left, f"tasks were left behind: {left}"
        return value
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
        gc.collect()
        loop.close()
        if sys.exc_info()[0] is None:
            assert not unhandled, unhandled


def on_every_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test on each kind of loop, as `test[…-uvloop]` and so on."""

    @functools.wraps(test)
    def run(*, loop_kind: str, **fixtures: Any) -> None:
        run_on(loop_kind, test(**fixtures))

    signature = inspect.signature(test)
    kind = inspect.Parameter("loop_kind", inspect.Parameter.KEYWORD_ONLY)
    wanted = [p.replace(kind=kind.kind) for p in signature.parameters.values()]
    run.__signature__ = signature.replace(parameters=[*wanted, kind])  # type: ignore[attr-defined]
    # pytest-asyncio would take what it finds to be a coroutine function for its own.
    del run.__wrapped__  # type: ignore[attr-defined]
    return run


async def until(condition: Callable[[], bool]) -> None:
    """Let others run until it holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        await asyncio.sleep(0.0005)


def spin_until(condition: Callable[[], bool]) -> None:
    """`until` for code without a loop."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.0005)


def spin_until_collected(condition: Callable[[], bool]) -> None:
    """`spin_until` for what goes with garbage.

    One collection may be none: `gc.collect` returns at once where the collector is at work in
    another thread. And what it finds is often given back by a thread of its own.
    """

    def look() -> bool:
        gc.collect()
        return condition()

    spin_until(look)


class Turns:
    """A number of turns, each taken by one thread: `left -= 1` may be cut in half by another."""

    def __init__(self, left: int = 0) -> None:
        self._lock = threading.Lock()
        self.left = left

    def take(self) -> bool:
        """Whether there was one left."""
        with self._lock:
            if self.left <= 0:
                return False
            self.left -= 1
            return True


@contextmanager
def thread(target: Callable[..., Any], *arguments: Any) -> Iterator[list[Any]]:
    """Run a function in a thread beside the body; its value is in the list afterwards."""
    values: list[Any] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            values.append(target(*arguments))
        except BaseException as failed:
            failures.append(failed)

    runner = threading.Thread(target=run, name="beside", daemon=True)
    runner.start()
    try:
        yield values
    finally:
        runner.join(PATIENCE_S)
        assert not runner.is_alive(), "the thread beside hangs"
    if failures:
        raise failures[0]


# Engines


class HeldEngine(FakeEngine):
    """Nothing moves until `gate` is set; `begun` counts the blocks that wait at it, or passed."""

    def __init__(self, **faults: Any) -> None:
        self.gate = threading.Event()
        self.begun = 0
        super().__init__(hold=self.gate, **faults)

    def _move(self, block: Block, fd: int, memory: memoryview, offset: int) -> int:
        with self.condition:
            self.begun += 1
        return super()._move(block, fd, memory, offset)

    def wait_until_begun(self, blocks: int = 1) -> None:
        spin_until(lambda: self.begun >= blocks)


class LateEngine(FakeEngine):
    """Blocks are moved and not yet reported: they wait for `gate`; `moved` counts them."""

    def __init__(self, **faults: Any) -> None:
        self.gate = threading.Event()
        self.moved = 0
        super().__init__(**faults)

    def _move(self, block: Block, fd: int, memory: memoryview, offset: int) -> int:
        moved = super()._move(block, fd, memory, offset)
        with self.condition:
            self.moved += 1
        self.gate.wait(PATIENCE_S)
        return moved


# What the machine allows

needs_protection = pytest.mark.skipif(
    copy_on_write.support().kind != "any",
    reason=f"no write protection of memory: {copy_on_write.support().reason}",
)


# Tensors

ALL_DTYPES: list[torch.dtype] = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str
)
QUANTISED = [torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4]
# int1 to uint7: torch has them in name only, and no copy_ for them.
SUB_BYTE = [d for d in ALL_DTYPES if str(d)[6:].strip("uint") in tuple("1234567")]
PLAIN_DTYPES = [d for d in ALL_DTYPES if d not in QUANTISED]


def dtype_id(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def random_bytes(nbytes: int, seed: int = 0) -> bytes:
    """They repeat at no block's length; seven times as quick as `random.randbytes`."""
    return raw(random_tensor(nbytes, seed))


def random_tensor(nbytes: int, seed: int = 0) -> torch.Tensor:
    """`random_bytes` as a uint8 tensor of its own memory."""
    generator = np.random.Generator(np.random.SFC64((nbytes, seed & 0xFFFFFFFF)))
    words = generator.integers(0, 1 << 64, -(-nbytes // 8), dtype=np.uint64)
    return torch.from_numpy(words.view(np.uint8)[:nbytes])


def bytes_tensor(data: bytes) -> torch.Tensor:
    """A uint8 tensor of its own memory."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0).byte()


def cut_before_reads(patch: pytest.MonkeyPatch, path: Path, nbytes: int) -> None:
    """Have each `os.preadv` find the file cut to so many bytes, as if somebody did it just then."""
    preadv = os.preadv

    def cutting(fd: int, buffers: Any, offset: int) -> int:
        os.truncate(path, nbytes)
        return preadv(fd, buffers, offset)

    patch.setattr(os, "preadv", cutting)


def misaligned(nbytes: int, shift: int, fill: int = 0xA5) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor `shift` bytes behind a page's start, and the larger one that it lies in."""
    room = nvmeio.empty_aligned(nbytes + shift + 64, dtype=torch.uint8).fill_(fill)
    return room[shift : shift + nbytes], room


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes of a contiguous tensor's own memory."""
    assert tensor.is_contiguous()
    nbytes = min(tensor.nbytes, tensor.untyped_storage().nbytes())
    return ctypes.string_at(tensor.data_ptr(), nbytes) if nbytes else b""


def make_tensor(dtype: torch.dtype, data: bytes) -> torch.Tensor:
    """A contiguous tensor of any dtype, quantised ones included, with these bytes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates quantised and experimental dtypes
        if dtype not in QUANTISED:
            return bytes_tensor(data).view(dtype)
        per_byte = {torch.quint4x2: 2, torch.quint2x4: 4}.get(dtype, 1)
        numel = len(data) // (4 if dtype is torch.qint32 else 1) * per_byte
        tensor = torch._empty_affine_quantized([numel], scale=0.5, zero_point=1, dtype=dtype)
        assert tensor.untyped_storage().nbytes() == len(data)
        ctypes.memmove(tensor.data_ptr(), data, len(data))
        return tensor


# The process


def open_descriptors() -> dict[int, str]:
    """Open descriptors and what they are."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # the descriptor of the listing itself
    return found


def left_open(before: dict[int, str], after: dict[int, str]) -> dict[int, str]:
    """Descriptors that were opened since; those of CUDA's driver stay open to the program's end."""
    opened = {fd: what for fd, what in after.items() if before.get(fd) != what}
    return {fd: what for fd, what in opened.items() if not what.startswith("/dev/nvidia")}


def aged(path: Path) -> None:
    """Let a file be an hour old: a time stamp of now could be that of the next write as well."""
    then = time.time_ns() - 3600 * 10**9
    os.utime(path, ns=(then, then))


def assert_levels_off(measure: Callable[[], int], work: Callable[[], object], most: int) -> None:
    """Whatever leaks grows by more than `most` with each round of work, and fails.

    Allocators, kernels and collectors let memory grow as well, but not every time.
    """
    grown: list[int] = []
    for _ in range(20):
        before = measure()
        work()
        grown.append(measure() - before)
        if grown[-1] < most:
            return
    raise AssertionError(f"it grows with every round: {grown}")


def tracked_objects() -> int:
    """What the collector knows of, garbage aside."""
    gc.collect()
    return len(gc.get_objects())


def resident_bytes(field: str = "VmRSS") -> int:
    """Memory of this process, as /proc/self/status counts it."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(f"{field}:"))


def new_descriptors(before: dict[int, str]) -> dict[int, str]:
    """Those that were not open before; what has been closed since is nobody's loss."""
    return {fd: what for fd, what in open_descriptors().items() if before.get(fd) != what}


def nvmeio_threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name.startswith("nvmeio")}


def threads_but_finishers() -> int:
    """How many threads nvmeio has; a handle keeps the finisher of an interrupt until it closes."""
    return sum(thread.name != "nvmeio-finish" for thread in nvmeio_threads())


def run_python(
    script: str, *flags: str, fresh: bool = False, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a script in a process of its own; in a `fresh` one nothing was imported before."""
    root = str(Path(nvmeio.__file__).parent.parent)
    command = [sys.executable, *flags, "-c", textwrap.dedent(script)]
    variables = {**os.environ, "PYTHONPATH": root, **environment}
    if not fresh:
        return run_program(command, env=variables, timeout=550)
    return subprocess.run(
        command, env=variables, capture_output=True, text=True, timeout=550, check=False
    )


def run_ranks(script: Path, world: int, folder: Path, *arguments: str) -> list[tuple[int, str]]:
    """`script RANK WORLD FOLDER ...` in so many processes; the status and the output of each."""
    paths = f"{Path(nvmeio.__file__).parents[1]}{os.pathsep}{Path(__file__).parent}"
    ranks = [
        Program[str](
            [sys.executable, str(script), str(rank), str(world), str(folder), *arguments],
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        outputs = [rank.communicate(timeout=550)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    return [(rank.returncode, output) for rank, output in zip(ranks, outputs, strict=True)]


# The garbage collector


def collect() -> None:
    """A whole collection in this thread.

    `gc.collect` alone returns at once, with nothing done, where another thread is collecting. What
    counts objects of the whole process calls this first: else the garbage of an earlier test may go
    in the middle.
    """
    me, done = threading.get_ident(), []

    def note(phase: str, facts: dict[str, int]) -> None:
        if phase == "stop" and facts["generation"] == 2 and threading.get_ident() == me:
            done.append(True)

    gc.callbacks.append(note)
    try:
        spin_until(lambda: gc.collect() >= 0 and bool(done))
    finally:
        gc.callbacks.remove(note)


# Threads


def die_at_birth(patch: pytest.MonkeyPatch, prefix: str) -> None:
    """Threads of this name end before their first step, as those do that get no memory for it."""
    name = "_start_new_thread"
    if not hasattr(threading, name):  # since Python 3.13
        name = "_start_joinable_thread"
    begin = getattr(threading, name)

    def beginning(bootstrap: Any, *args: Any, **named: Any) -> Any:
        thread = getattr(bootstrap, "func", bootstrap).__self__
        dies = thread.name.startswith(prefix)
        return begin(_end_at_once if dies else bootstrap, *args, **named)

    patch.setattr(threading, name, beginning)


def _end_at_once() -> None:
    pass

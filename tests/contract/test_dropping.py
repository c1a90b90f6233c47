"""Tensors, operations and handles that are dropped, and interpreters that end."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from contract.operating import CONTENT, SIZE, WAIT_S, target
from support import (
    HeldEngine,
    bytes_tensor,
    collect,
    new_loop,
    nvmeio_threads,
    random_bytes,
    raw,
    run_on,
    run_python,
    spin_until_collected,
    thread,
)

import nvmeio


def test_a_tensor_dropped_in_flight_stays_until_the_end(
    handle_held: nvmeio.AioHandle, engine_held: HeldEngine, path: Path
) -> None:
    data = random_bytes(SIZE, seed=6)
    tensor = bytes_tensor(data)
    gone = weakref.ref(tensor)
    operation = handle_held.async_pwrite(tensor, path)
    del tensor
    gc.collect()
    others = [target() for _ in range(20)]  # whoever would have got its memory
    engine_held.gate.set()
    assert operation.result(WAIT_S) == SIZE
    assert path.read_bytes() == data
    assert len(others) == 20
    spin_until_collected(lambda: gone() is None)  # and no longer than that


def test_an_operation_dropped_in_flight_goes_on(
    handle_held: nvmeio.AioHandle, engine_held: HeldEngine, file: Path
) -> None:
    tensor = target()
    handle_held.async_pread(tensor, file)
    gc.collect()
    engine_held.gate.set()
    assert handle_held.wait(WAIT_S) == 1
    assert raw(tensor) == CONTENT


def test_a_handle_dropped_in_flight_warns_and_finishes(engine_held: HeldEngine, file: Path) -> None:
    tensor = target()
    handle = nvmeio.AioHandle(16384, 8, engine=engine_held)
    operation = handle.async_pread(tensor, file)
    engine_held.wait_until_begun()
    with pytest.warns(ResourceWarning, match=r"1 in flight> was dropped with operations in flight"):
        del handle
        collect()
    assert not operation.done()
    engine_held.gate.set()
    assert operation.result(WAIT_S) == SIZE
    assert raw(tensor) == CONTENT


def test_a_handle_dropped_at_rest_says_nothing(new_engine: Callable[[], Any], file: Path) -> None:
    before = nvmeio_threads()
    handle = nvmeio.AioHandle(16384, 8, engine=new_engine())
    assert nvmeio_threads() - before
    handle.sync_pread(target(), file)
    del handle
    spin_until_collected(lambda: not nvmeio_threads() - before)


def test_a_handle_may_be_collected_at_any_moment(file: Path, loop_kind: str) -> None:
    """The collector runs where it likes: `__del__` met a lock that its own thread held."""
    new_loop(loop_kind).close()  # skips

    collected: list[int] = []

    class Collecting(HeldEngine):
        def prepare(self, cq: Any, token: int, transfer: Any) -> Any:
            request = super().prepare(cq, token, transfer)
            move = request.move

            def collect_and_move(cq: Any) -> None:
                collected.append(gc.collect())
                move(cq)
                engine.gate.set()

            request.move = collect_and_move  # type: ignore[method-assign]
            return request

    engine = Collecting()
    operations: list[nvmeio.Operation] = []

    class Owner:
        def __init__(self) -> None:
            self.myself = self  # only the collector finds out that nobody else knows us
            self.handle = nvmeio.AioHandle(16384, 8, engine=engine)
            operations.append(self.handle.async_pread(target(), file))

    async def main() -> int:
        return await operations[0]

    gc.disable()
    try:
        Owner()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            with thread(run_on, loop_kind, main()) as values:
                pass
    finally:
        gc.enable()
        engine.gate.set()
    assert values == [SIZE]
    assert collected[0] > 0


def test_a_dropped_handle_is_given_up_even_where_warnings_are_errors(file: Path) -> None:
    """The warning was raised in `__del__`, and what came after it never happened."""
    done = run_python(
        f"""
        import sys, threading, time, torch, nvmeio
        tensor = torch.zeros({SIZE}, dtype=torch.uint8)
        gate = threading.Event()
        handle = nvmeio.AioHandle(engine=nvmeio.testing.FakeEngine(hold=gate))
        operation = handle.async_pread(tensor, {str(file)!r})
        def unraisable(told):
            print(told.exc_type.__name__)
            gate.set()
        sys.unraisablehook = unraisable
        del handle
        assert operation.result(100) == {SIZE}
        patience = time.monotonic() + 100
        while [t for t in threading.enumerate() if t.name.startswith("nvmeio")]:
            assert time.monotonic() < patience, threading.enumerate()
            time.sleep(0.001)
        """.replace("import sys", "import nvmeio.testing, sys"),
        "-W",
        "error::ResourceWarning",
    )
    assert (done.stdout.split(), done.stderr, done.returncode) == (["ResourceWarning"], "", 0)


def test_the_interpreter_may_end_with_operations_in_flight(path: Path) -> None:
    done = run_python(
        f"""
        import threading, torch, nvmeio, nvmeio.testing, warnings
        data = torch.full((1 << 20,), 7, dtype=torch.uint8)
        gate = threading.Event()
        handle = nvmeio.AioHandle(engine=nvmeio.testing.FakeEngine(hold=gate))
        operation = handle.async_pwrite(data, {str(path)!r})
        show = warnings.showwarning
        def showing(*args, **named):
            show(*args, **named)
            gate.set()
        warnings.showwarning = showing
        """,
        "-W",
        "always::ResourceWarning",
    )
    assert done.returncode == 0
    assert "ResourceWarning" in done.stderr
    assert "in flight" in done.stderr
    assert path.read_bytes() == b"\7" * (1 << 20)

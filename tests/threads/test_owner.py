"""A thread that owns state: asked from anywhere, interrupted anywhere, never half done."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
from interrupting import skip_without_opcodes

from nvmeio._threads import future, threads
from nvmeio._threads import owner as owner_module
from nvmeio._threads.owner import Claim, OwnerThread
from nvmeio.errors import ClosedError


@pytest.fixture
def owner() -> Iterator[OwnerThread]:
    made = OwnerThread("nvmeio-test-owner")
    yield made
    made.close()


class Interrupting:
    """Raises KeyboardInterrupt at the n-th bytecode of what is called from here, in this thread."""

    def __init__(self, at: int) -> None:
        self.left = at
        self._files = {owner_module.__file__, future.__file__, threads.__file__, __file__}

    def __enter__(self) -> None:
        sys.settrace(self._call)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename not in self._files or frame.f_locals.get("self") is self:
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        return self._opcode

    def _opcode(self, frame: FrameType, event: str, _: object) -> Any:
        if event == "opcode":
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._opcode


def interrupted_at_every_bytecode(work: Callable[[], object]) -> Iterator[int]:
    """Runs `work` with an interrupt at each of its bytecodes, until it gets to its end."""
    skip_without_opcodes()
    for at in range(1, 100_000):
        interrupted = False
        try:
            with Interrupting(at):
                work()
        except KeyboardInterrupt:
            interrupted = True  # and not a yield here, where the traceback holds the frames
        if not interrupted:
            return
        yield at
    raise AssertionError("the work never ended")


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_calls_run_in_one_thread_in_order(owner: OwnerThread) -> None:
    seen: list[int] = []
    idents = {owner.call(threading.get_ident) for _ in range(3)}
    for number in range(100):
        owner.post(seen.append, number)
    assert owner.call(list, seen) == list(range(100))
    assert len(idents) == 1
    assert idents != {threading.get_ident()}


def test_errors_are_the_callers(owner: OwnerThread) -> None:
    with pytest.raises(ZeroDivisionError):
        owner.call(lambda: 1 // 0)
    assert owner.call(lambda: 1) == 1


def test_calls_from_its_own_thread_run_at_once(owner: OwnerThread) -> None:
    assert owner.call(lambda: owner.call(lambda: owner.is_here)) is True


async def test_calls_are_awaited(owner: OwnerThread) -> None:
    assert await owner.async_call(lambda: 5) == 5
    with pytest.raises(KeyError):
        await owner.async_call(dict[str, int]().__getitem__, "x")


async def test_cancelled_call_is_done_all_the_same(owner: OwnerThread) -> None:
    gate, done = threading.Event(), threading.Event()
    owner.post(gate.wait)
    task = asyncio.ensure_future(owner.async_call(done.set))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gate.set()
    assert await asyncio.to_thread(done.wait, 60)


def test_interrupted_wait_is_ended_and_the_work_goes_on(owner: OwnerThread) -> None:
    entered, gate = threading.Event(), threading.Event()

    def work() -> str:
        entered.set()
        gate.wait()
        return "done"

    def interrupt() -> None:
        entered.wait()
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        owner.call(work)
    gate.set()
    assert owner.call(lambda: "next") == "next"


def test_interrupted_at_any_bytecode_a_call_is_whole_or_has_not_begun(owner: OwnerThread) -> None:
    """A counter in two steps: whoever looks sees both or none, and the next call works.

    The steps are interrupted too, where they are done in this thread.
    """
    state = {"a": 0, "b": 0}

    def step() -> None:
        state["a"] += 1
        state["b"] += 1

    count = before = 0
    for count in interrupted_at_every_bytecode(lambda: owner.call(step)):  # noqa: B007
        a, b = owner.call(lambda: (state["a"], state["b"]))
        assert a == b
        assert a - before in (0, 1)
        before = a
    assert count > 20


def test_what_the_work_raised_is_raised_before_other_work_is_done(owner: OwnerThread) -> None:
    """It waited for the requests behind it as well, as after an interrupt."""
    gate, told = threading.Event(), list[BaseException]()

    def work() -> None:
        owner.post(gate.wait)
        raise ValueError("of the work")

    def call() -> None:
        try:
            owner.call(work, to_end=True)
        except ValueError as error:
            told.append(error)

    caller = threading.Thread(target=call, daemon=True)
    caller.start()
    try:
        caller.join(60)
        assert [str(error) for error in told] == ["of the work"]
    finally:
        gate.set()


def test_an_interrupted_call_to_end_waits_for_its_work(owner: OwnerThread) -> None:
    entered, gate, ended = threading.Event(), threading.Event(), list[bool]()

    def work() -> None:
        entered.set()
        gate.wait()
        ended.append(True)

    def interrupt() -> None:
        entered.wait()
        os.kill(os.getpid(), signal.SIGINT)
        gate.set()

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        owner.call(work, to_end=True)
    assert ended == [True]


def test_lease_ends_once_however_it_ends(owner: OwnerThread) -> None:
    released: list[int] = []
    first = owner.call(lambda: owner.claim(released.append, 1))
    first.end()
    first.end()
    del first
    second = owner.call(lambda: owner.claim(released.append, 2))
    del second
    assert owner.call(list, released) == [1, 2]


def test_lease_of_an_interrupted_caller_ends(owner: OwnerThread) -> None:
    """At whatever bytecode: none is lost, none stays held."""
    held: set[int] = set()
    numbers = iter(range(100_000))

    def take() -> Claim:
        number = next(numbers)
        held.add(number)
        return owner.claim(held.discard, number)

    def use() -> None:
        claim = owner.call(take)
        claim.end()

    count = 0
    for count in interrupted_at_every_bytecode(use):  # noqa: B007
        assert owner.call(len, held) == 0
    assert count > 20


def test_lease_of_an_interrupted_call_ends_though_its_error_is_kept(owner: OwnerThread) -> None:
    """The frame of `call` kept the answer that came later, and with it the claim."""
    released: list[int] = []
    entered, gate = threading.Event(), threading.Event()

    def take() -> Claim:
        entered.set()
        gate.wait()
        return owner.claim(released.append, 1)

    def interrupt() -> None:
        entered.wait()
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt) as kept:
        owner.call(take)
    gate.set()
    until(lambda: owner.call(list, released) == [1])
    assert kept.value.__traceback__ is not None


def test_lease_asked_elsewhere_is_refused(owner: OwnerThread) -> None:
    with pytest.raises(RuntimeError, match="use call"):
        owner.claim(print)


def test_closed_owner_refuses_calls(owner: OwnerThread) -> None:
    seen: list[int] = []
    owner.post(seen.append, 1)
    owner.close()
    owner.close()
    with pytest.raises(ClosedError):
        owner.call(lambda: 1)
    assert seen == [1]
    assert owner.closed


def test_a_log_that_raises_does_not_end_the_owner(owner: OwnerThread) -> None:
    """Its thread died with a handler of the program's, and every later call waited for ever."""

    class Refusing(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise ValueError("of the handler")

    def fail() -> None:
        raise RuntimeError("of the work")

    handler = Refusing()
    logging.getLogger("nvmeio").addHandler(handler)
    try:
        owner.post(fail)
        owner.call(lambda: owner.claim(fail)).end()
        assert owner.call(lambda: 1) == 1
    finally:
        logging.getLogger("nvmeio").removeHandler(handler)


async def test_closed_owner_refuses_awaited_calls(owner: OwnerThread) -> None:
    owner.close()
    with pytest.raises(ClosedError):
        await owner.async_call(lambda: 1)


def test_dropped_owner_ends_its_thread() -> None:
    dropped = OwnerThread("nvmeio-dropped-owner")
    thread = dropped.call(threading.current_thread)
    del dropped
    thread.join(100)
    assert not thread.is_alive()


def test_answers_are_not_kept(owner: OwnerThread) -> None:
    class Thing:
        pass

    gone = weakref.ref(owner.call(Thing))
    until(lambda: gone() is None)  # the owner's thread may be on its way to its next request


def test_forked_child_is_told() -> None:
    made = OwnerThread("nvmeio-forked-owner")
    assert made.call(lambda: 1) == 1
    pid = os.fork()
    if pid == 0:
        try:
            made.call(lambda: 1)
        except ClosedError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    made.close()


def test_a_start_that_is_waited_for_has_begun_or_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    owner = OwnerThread("begun")
    owner.wait_for_start()
    owner.close()
    with pytest.raises(ClosedError, match="it is closed"):
        owner.wait_for_start()

    def refuse(run: object, name: str, failed: Callable[[BaseException], object]) -> None:
        failed(RuntimeError("can't start new thread"))

    monkeypatch.setattr(threads, "start", refuse)
    with pytest.raises(ClosedError):
        OwnerThread("not begun").wait_for_start()

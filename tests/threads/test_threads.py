"""Blocking work in a thread: interrupts are served at once, and never cut it in half."""

from __future__ import annotations

import _thread
import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from types import FrameType
from typing import Any

import pytest
from interrupting import everywhere
from support import die_at_birth, spin_until

from nvmeio._core import completion_queues
from nvmeio._threads import future, interruptible
from nvmeio._threads import threads as threads_module
from nvmeio._threads.future import being_interrupted
from nvmeio._threads.interruptible import in_thread, run_interruptible
from nvmeio.errors import ClosedError


def interrupt_main() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_work_runs_beside_the_main_thread_and_in_place_elsewhere() -> None:
    here = threading.get_ident()
    assert run_interruptible(threading.get_ident) != here
    told: list[bool] = []

    def other() -> None:
        told.append(run_interruptible(threading.get_ident) == threading.get_ident())

    thread = threading.Thread(target=other)
    thread.start()
    thread.join(100)
    assert told == [True]


def test_errors_and_values_are_the_callers() -> None:
    with pytest.raises(ZeroDivisionError):
        run_interruptible(lambda: 1 // 0)
    assert run_interruptible(lambda: 3) == 3


def test_interrupt_cancels_and_waits_for_the_end() -> None:
    entered, stop, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        entered.set()
        stop.wait()
        ended.set()
        raise ClosedError("cancelled")

    def interrupt() -> None:
        entered.wait()
        interrupt_main()

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt) as caught:
        run_interruptible(work, stop.set)
    assert ended.is_set()
    assert isinstance(caught.value.__cause__, ClosedError)


def test_second_interrupt_gets_through_at_once() -> None:
    """While the first one waits for work that does not end."""
    entered, cancelled, gate = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        entered.set()
        gate.wait()

    def interrupt() -> None:
        entered.wait()
        interrupt_main()
        cancelled.wait()
        interrupt_main()

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        run_interruptible(work, cancelled.set)
    gate.set()  # not before: the work would not have ended


async def test_blocking_call_on_a_running_loop_runs_in_a_thread() -> None:
    assert run_interruptible(threading.get_ident) != threading.get_ident()


async def test_cancelled_task_waits_for_the_end_and_then_raises() -> None:
    entered, stop, ended = asyncio.Event(), threading.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def work() -> None:
        loop.call_soon_threadsafe(entered.set)
        stop.wait()
        ended.set()

    task = asyncio.ensure_future(in_thread(work, stop.set))
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


@pytest.mark.parametrize("failed", [None, ValueError("the drive is full")])
async def test_cancelled_task_tells_what_failed(failed: BaseException | None) -> None:
    entered, stop = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def work() -> None:
        loop.call_soon_threadsafe(entered.set)
        stop.wait()
        if failed is not None:
            raise failed

    task = asyncio.ensure_future(in_thread(work))
    await entered.wait()
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    stop.set()
    with pytest.raises(asyncio.CancelledError) as cancelled:
        await task
    # The awaiting task's own error may be a new one around that of the inner frame.
    told = cancelled.value.__cause__ or cancelled.value.__context__
    assert (told.__cause__ if isinstance(told, asyncio.CancelledError) else told) is failed


async def test_awaited_work_returns_and_raises() -> None:
    assert await in_thread(lambda: 4) == 4
    with pytest.raises(ZeroDivisionError):
        await in_thread(lambda: 1 // 0)


# A signal may come within the callback of a weak reference: Python only tells of what that raises.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interrupts_at_random_moments_leave_no_thread() -> None:
    """Real signals; whatever began has ended when the interrupt is raised."""
    running = 0
    lock = threading.Lock()
    interrupted = 0

    def work() -> None:
        nonlocal running
        with lock:
            running += 1
        time.sleep(0.0005)  # what is interrupted
        with lock:
            running -= 1

    def raise_interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, raise_interrupt)
    try:
        for trial in range(200):
            try:
                try:
                    signal.setitimer(signal.ITIMER_REAL, 1e-5 + (trial % 50) * 2e-5)
                    run_interruptible(work)
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                interrupted += 1
            with lock:
                assert running == 0
    finally:
        signal.signal(signal.SIGALRM, before)
    assert interrupted > 0
    assert run_interruptible(lambda: 1) == 1


@pytest.mark.parametrize("waits", [True, False])
def test_interrupted_at_any_place_the_work_has_ended_or_never_begins(
    waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it holds has been given back when the interrupt is raised; cancelled, it ends soon."""
    start = interruptible.Job.start

    def start_and_wait(job: interruptible.Job[Any]) -> None:
        start(job)
        spin_until(lambda: job.began)

    if waits:
        monkeypatch.setattr(interruptible.Job, "start", start_and_wait)
    begun: list[int] = []
    ended: list[int] = []
    cancelled: list[threading.Event] = []

    def work() -> None:
        stop = threading.Event()

        def hold() -> None:
            begun.append(1)
            try:
                stop.wait(0.003)  # so long it lasts, and no longer once it is cancelled
            finally:
                ended.append(1)

        def cancel() -> None:
            cancelled.append(stop)
            stop.set()

        run_interruptible(hold, cancel)

    places = 0
    for place in everywhere(work):
        places += 1
        assert len(begun) == len(ended), place
        run_interruptible(int)  # threads are started one after the other
        spin_until(lambda: "nvmeio-work" not in [each.name for each in threading.enumerate()])
        assert len(begun) == len(ended) <= places, place
        assert len(set(cancelled)) == len(cancelled) <= len(begun), place
    assert places > 20
    assert cancelled
    assert len(begun) < places  # some came before


def test_a_thread_that_dies_before_its_first_step_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it gets no memory for that, `Thread.start` waited for ever, and everybody behind it."""
    with monkeypatch.context() as patched:
        die_at_birth(patched, "nvmeio-work")
        job = interruptible.Job(lambda: 1)
        job.start()
        job.wait()
        with pytest.raises(MemoryError, match="did not begin"):
            job.result()
    assert "nvmeio-work" not in [thread.name for thread in threading.enumerate()]
    late = interruptible.Job(lambda: 2)
    late.start()
    late.wait()
    assert late.result() == 2


def test_the_thread_that_starts_the_others_may_die_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody would answer who asks it."""
    monkeypatch.setattr(threads_module, "_launches", None)
    with monkeypatch.context() as patched:
        begin = _thread.start_new_thread
        patched.setattr(_thread, "start_new_thread", lambda *_: begin(int, ()))
        with pytest.raises(MemoryError, match="did not begin"):
            run_interruptible(lambda: 1)
    assert run_interruptible(lambda: 2) == 2


def test_a_thread_that_was_given_up_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is late, not dead; its starter has told its caller that it was not begun."""
    monkeypatch.setattr(threads_module, "_BIRTH_S", 0.0)
    monkeypatch.setattr(threads_module, "_BIRTH_LOOK_S", 0.001)
    begin = "_start_new_thread"
    if not hasattr(threading, begin):  # since Python 3.13
        begin = "_start_joinable_thread"
    real, kept = getattr(threading, begin), []

    def later(function: object, *args: object, **named: object) -> None:
        kept.append((function, args, named))

    ran: list[int] = []
    thread = threads_module.Thread(ran.append, "late", (1,))
    with monkeypatch.context() as patched:
        patched.setattr(threading, begin, later)
        patched.setattr(threading, "main_thread", threading.Thread)  # in place
        with pytest.raises(MemoryError, match="did not begin"):
            thread.start()
    vars(threading)["_limbo"][thread] = thread  # as the real one finds it
    ((function, args, named),) = kept
    real(function, *args, **named)
    thread._started.wait(100)
    thread.join(100)
    assert not thread.is_alive()
    assert ran == []


@pytest.mark.parametrize("launcher", ["there is one", "there is none"])
def test_at_the_end_of_the_program_work_is_done_in_place(
    monkeypatch: pytest.MonkeyPatch, launcher: str
) -> None:
    """From Python 3.12 on, what `atexit` calls can start no thread."""
    assert run_interruptible(lambda: 1) == 1
    if launcher == "there is none":
        monkeypatch.setattr(threads_module, "_launches", None)

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    with monkeypatch.context() as patched:
        patched.setattr(_thread, "start_new_thread", refuse)
        for begin in ("_start_new_thread", "_start_joinable_thread"):  # 3.13 has the second
            if hasattr(threading, begin):
                patched.setattr(threading, begin, refuse)
        assert run_interruptible(threading.get_ident) == threading.get_ident()
        with pytest.raises(RuntimeError, match="mine"):
            run_interruptible(lambda: (_ for _ in ()).throw(RuntimeError("mine")))


def test_an_interrupt_of_the_wait_for_the_first_thread_stays_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`threading.Event.wait`, cut short, may have given up its lock: "release unlocked lock"."""
    monkeypatch.setattr(
        threads_module, "_launches", threads_module._launches
    )  # it sets its own there
    for after in range(1000):
        left = [after]

        def trace(frame: FrameType, _: str, __: Any, left: list[int] = left) -> Any:
            if frame.f_code.co_filename not in (threads_module.__file__, threading.__file__):
                return None
            frame.f_trace_opcodes = True
            if frame.f_code.co_filename == threading.__file__:
                left[0] -= 1
                if left[0] < 0:
                    raise KeyboardInterrupt
            return trace

        sys.settrace(trace)
        try:
            queue = threads_module._new_launcher()
        except KeyboardInterrupt:
            continue
        finally:
            sys.settrace(None)
        queue.put(None)
        return
    raise AssertionError("it never got through")


def test_who_is_told_that_no_thread_can_be_had_may_raise(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The thread that starts the others ended by it, and no thread was ever begun again."""
    begin = threads_module.Thread.start

    def refuse_one(thread: threads_module.Thread) -> None:
        if thread.name == "refused":
            raise RuntimeError("can't start new thread")
        begin(thread)

    def failed(error: BaseException) -> None:
        raise ValueError("of the one who was told")

    monkeypatch.setattr(threads_module.Thread, "start", refuse_one)
    begun = threading.Event()
    threads_module.start(begun.clear, "refused", failed)
    threads_module.start(begun.set, "begun", failed)
    assert begun.wait(100)
    assert "of the one who was told" in caplog.text


def test_what_is_handed_is_worked_off_though_no_thread_can_be_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Refused before its caller went on, it counted as begun, and the next item stayed for ever."""

    def refuse(run: object, name: str, failed: Callable[[BaseException], object]) -> None:
        failed(RuntimeError("can't start new thread"))

    monkeypatch.setattr(completion_queues, "start", refuse)
    worked_off: list[object] = []
    handing = completion_queues.QueueThread("refused", worked_off.append)
    handing.hand(1)
    handing.hand(2)
    assert worked_off == [1, 2]


def test_an_interrupted_start_is_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    worked_off = SimpleQueue[int]()
    handing = completion_queues.QueueThread("late", worked_off.put)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(completion_queues, "start", interrupt)
        handing.hand(1)
    handing.hand(2)
    assert [worked_off.get(timeout=100), worked_off.get(timeout=100)] == [1, 2]
    handing.close()


def test_a_callback_that_raises_keeps_no_other_from_being_called() -> None:
    """An IndexError of one counted as the end of the list; who waited behind it did for ever."""
    ended: future.Future[None] = future.Future()
    called: list[int] = []
    ended.then(list[int]().pop)
    ended.then(lambda: called.append(2))
    with pytest.raises(IndexError, match="pop from empty list"):
        ended.set(None)
    assert called == [2]


def test_an_interrupt_is_on_its_way_though_something_failed_meanwhile() -> None:
    """What tidying up waited for then, a second Ctrl-C did not end."""
    seen = []
    with pytest.raises(ValueError, match="meanwhile"):
        try:
            raise KeyboardInterrupt
        finally:
            try:
                raise ValueError("meanwhile")
            finally:
                seen.append(being_interrupted())
    seen.append(being_interrupted())
    assert seen == [True, False]

"""What ends with its object: when it is closed, dropped, or the program ends; once."""

from __future__ import annotations

import _thread
import fcntl
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from contract.operating import threads_in
from support import PATIENCE_S, run_python, spin_until, thread

from nvmeio._kv_blocks.catalog import Catalog, Sizes
from nvmeio._threads import closing, shutdown
from nvmeio._threads.closing import collect, members
from nvmeio._threads.owner import OwnerThread
from nvmeio._threads.shutdown import Ending, open_owned
from nvmeio.errors import ClosedError
from nvmeio.offload._swap_files.swap_dirs import SwapDir


@pytest.fixture
def owner() -> Iterator[OwnerThread]:
    made = OwnerThread("nvmeio-test-ending")
    yield made
    made.close()


def test_it_ends_once_in_the_owners_thread(owner: OwnerThread) -> None:
    seen: list[int] = []
    ident = owner.call(threading.get_ident)
    ending = owner.call(lambda: Ending(owner, lambda: seen.append(threading.get_ident())))
    ending.close()
    ending.close()
    del ending
    assert seen == [ident]
    assert owner.closed


def test_what_an_interrupted_call_opened_has_ended_when_that_is_raised(owner: OwnerThread) -> None:
    ended = threading.Event()

    def opening() -> Ending:
        ending = Ending(owner, ended.set)
        _thread.interrupt_main()
        spin_until(lambda: owner in shutdown.those_that_end())
        return ending

    with pytest.raises(KeyboardInterrupt):
        open_owned(owner, opening)
    assert ended.is_set()
    assert owner.closed


def test_what_was_dropped_ends(owner: OwnerThread) -> None:
    ended = threading.Event()
    ending = owner.call(lambda: Ending(owner, ended.set))
    del ending
    assert ended.wait(100)


def test_dropped_where_the_owner_is_busy_nobody_waits_for_long(owner: OwnerThread) -> None:
    """The collector may drop it in a thread that holds what the owner waits for."""
    gate, ended = threading.Event(), threading.Event()
    ending = owner.call(lambda: Ending(owner, ended.set))
    owner.post(gate.wait)
    del ending
    assert not ended.is_set()
    gate.set()
    assert ended.wait(100)


def test_an_error_at_the_end_is_the_callers(owner: OwnerThread) -> None:
    def fail() -> None:
        raise OSError("it cannot be closed")

    ending = owner.call(lambda: Ending(owner, fail))
    with pytest.raises(OSError, match="cannot be closed"):
        ending.close()
    ending.close()


def test_an_end_that_something_was_closed_for_says_so(owner: OwnerThread) -> None:
    """A ClosedError of its own counted as the owner's, which says that it has ended before."""

    def fail() -> None:
        raise ClosedError("the handle is closed")

    ending = owner.call(lambda: Ending(owner, fail))
    with pytest.raises(ClosedError, match="the handle is closed"):
        ending.close()
    ending.close()


@pytest.mark.parametrize("end", ["", "sys.exit(3)", "raise ValueError", "raise KeyboardInterrupt"])
def test_the_last_one_made_ends_first_and_all_of_them_before_the_engines(end: str) -> None:
    """Also where somebody made a `weakref.finalize` before anything was imported."""
    done = run_python(
        f"""
        import sys, weakref
        class Early: pass
        early = Early()
        weakref.finalize(early, print, "early")
        import nvmeio
        from nvmeio._threads.shutdown import Ending
        from nvmeio._threads.owner import OwnerThread
        handle = nvmeio.AioHandle()
        kept = []
        for name in ("first", "second", "third"):
            owner = OwnerThread(name)
            end = lambda name=name: print(name, handle.closed)
            kept.append(owner.call(lambda: Ending(owner, end)))
        {end}
        """
    )
    assert done.stdout.split("\n")[:3] == ["third False", "second False", "first False"]
    assert "Exception ignored" not in done.stderr


def test_what_was_closed_says_nothing_at_the_end_of_the_interpreter() -> None:
    """Kept by a module that was imported before, it was asked about when this one had lost its
    names: "Exception ignored in … Ending.__del__ … 'NoneType' object has no attribute 'getpid'"."""
    done = run_python(
        """
        import sys, types
        sys.modules["early"] = early = types.ModuleType("early")
        from nvmeio._threads import shutdown as ending
        from nvmeio._threads.owner import OwnerThread
        owner = OwnerThread("closed")
        early.kept = owner.call(lambda: ending.Ending(owner, int))
        early.kept.close()
        sys.kept = early, ending  # so that modules end by losing their names
        """
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_what_the_last_end_raises_sets_the_status_of_the_program() -> None:
    """Also a ClosedError, which said nothing there either."""
    done = run_python(
        """
        from nvmeio._threads.shutdown import Ending
        from nvmeio._threads.owner import OwnerThread
        from nvmeio.errors import ClosedError
        def fail():
            raise ClosedError("the handle is closed")
        owner = OwnerThread("failing")
        kept = owner.call(lambda: Ending(owner, fail))
        """
    )
    assert done.returncode == 120
    assert "the handle is closed" in done.stderr


def test_engines_end_behind_owners_whichever_was_imported_first() -> None:
    """An owner's last writes need the engine; with late imports either may come first."""
    done = run_python(
        """
        from nvmeio._threads import shutdown
        shutdown.at_exit_last(lambda: print("engine"))
        shutdown.at_exit(lambda: print("owner"))
        shutdown.at_exit_first(lambda: print("hurry"))
        """,
        fresh=True,
    )
    assert (done.stdout.split(), done.stderr) == (["hurry", "owner", "engine"], "")


# Who opens again what is ending


def _swap_directory(above: Path) -> Callable[[], object]:
    return SwapDir(above, "optimizer").release


def _store_of_blocks(above: Path) -> Callable[[], object]:
    return Catalog(above / "kv" / "a.blocks", Sizes(4096, 4096, 4, 4096), writer=True).close


@pytest.mark.parametrize("opening", [_swap_directory, _store_of_blocks])
def test_it_ends_just_after_what_it_holds_was_tried(
    owner: OwnerThread,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    opening: Callable[[Path], Callable[[], object]],
) -> None:
    """It looked for what ends after the lock was refused, and overlooked what had just ended."""
    gate, refused = threading.Event(), []
    give_back = opening(tmp_path)
    ending = owner.call(lambda: Ending(owner, lambda: (gate.wait(PATIENCE_S), give_back())))
    ending.begin()
    flock = fcntl.flock

    def tried(fd: int, how: int) -> None:
        try:
            flock(fd, how)
        except BlockingIOError:
            refused.append(fd)
            gate.set()
            spin_until(lambda: owner.closed)
            raise

    monkeypatch.setattr(fcntl, "flock", tried)
    opening(tmp_path)()
    assert len(refused) == 1


def test_two_wait_for_what_an_interrupted_call_left(owner: OwnerThread) -> None:
    """The first of them took it off the list before it had ended; the second found nothing."""
    begun, gate = threading.Event(), threading.Event()
    owner.post(lambda: (begun.set(), gate.wait(PATIENCE_S)))
    assert begun.wait(PATIENCE_S)
    shutdown.leave(owner)
    with thread(lambda: shutdown.wait_for(shutdown.those_that_end())) as first:
        spin_until(lambda: threads_in("drain") == 1)
        assert owner in shutdown.those_that_end()
        gate.set()
    assert first == [True]
    assert owner not in shutdown.those_that_end()


def test_a_set_of_what_is_open_may_grow_while_it_is_looked_through() -> None:
    """RuntimeError, in whoever made a handle while another thread closed one."""
    kept = [threading.Event() for _ in range(3)]

    class Growing(weakref.WeakSet[threading.Event]):
        def __iter__(self) -> Iterator[threading.Event]:
            for each in super().__iter__():
                yield each
                self.update(kept)  # as another thread does in between

    assert sorted(map(id, members(Growing(kept[:1])))) == sorted(map(id, kept))


def test_garbage_is_collected_where_another_thread_is_collecting() -> None:
    """`gc.collect` did nothing, and what lay in a cycle was called in use."""
    finalizing, go_on = threading.Event(), threading.Event()

    class Slow:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            finalizing.set()
            go_on.wait(PATIENCE_S)

    class Lost:
        def __init__(self) -> None:
            self.itself = self

    def sleep(seconds: float) -> None:
        go_on.set()
        time.sleep(seconds)

    gc.disable()
    try:
        Slow()
        with thread(collect):
            assert finalizing.wait(PATIENCE_S)
            lost = weakref.ref(Lost())
            gc.collect()
            assert lost() is not None
            with pytest.MonkeyPatch.context() as patched:
                clock = SimpleNamespace(sleep=sleep, monotonic=lambda: 0.0)  # endless patience
                patched.setattr(closing, "time", clock)
                collect()
            assert lost() is None
    finally:
        go_on.set()
        gc.enable()

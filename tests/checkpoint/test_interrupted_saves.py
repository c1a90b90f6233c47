"""Ctrl-C, and errors of a user's own code, at any moment: nothing is left behind."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from checkpoint._objects import assert_same, noise
from interrupting import at_places
from support import threads_but_finishers

import nvmeio
from nvmeio.checkpoint._manager.saver import SaveCall
from nvmeio.checkpoint.background import BackgroundSaver


def state() -> dict[str, Any]:
    return {"a": noise(300_000), "b": [noise(n, seed=n) for n in range(5)], "c": "text"}


class Resources:
    """Threads and descriptors as before, temporary files gone: soon, for threads end alone."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._threads = threads_but_finishers()
        self._files = self._open_files()

    def _open_files(self) -> set[str]:
        found = set()
        for fd in os.listdir("/proc/self/fd"):
            try:
                found.add(os.readlink(f"/proc/self/fd/{fd}"))
            except OSError:
                continue
        return {path for path in found if str(self._folder) in path}

    def check(self) -> None:
        deadline = time.monotonic() + 60
        while not (
            gc.collect() >= 0
            and threads_but_finishers() <= self._threads
            and self._open_files() <= self._files
            and not [name for name in os.listdir(self._folder) if name.endswith("nvmeio-tmp")]
        ):
            assert time.monotonic() < deadline, (
                [thread.name for thread in threading.enumerate()],
                self._open_files(),
                os.listdir(self._folder),
            )
            time.sleep(0.002)


@pytest.fixture
def handle() -> Iterator[nvmeio.AioHandle]:
    with nvmeio.AioHandle(engine="threads") as made:
        yield made


def works(path: Path, kind: str, handle: nvmeio.AioHandle) -> tuple[Callable[[], Any], Any]:
    """What is interrupted, and what a load finds when it was done."""
    saved = state()
    tensors = {"a": saved["a"], "b": saved["b"][4]}
    if kind == "save":
        return lambda: nvmeio.save(saved, path, handle=handle), saved
    if kind == "load":
        nvmeio.save(saved, path, handle=handle)
        return lambda: nvmeio.load(path, handle=handle), saved
    if kind == "save_safetensors":
        return lambda: nvmeio.save_safetensors(tensors, path, handle=handle), tensors
    nvmeio.save_safetensors(tensors, path, handle=handle)
    return lambda: nvmeio.load_safetensors(path, handle=handle), tensors


KINDS = ["save", "load", "save_safetensors", "load_safetensors"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_interrupted_at_any_point(kind: str, tmp_path: Path, handle: nvmeio.AioHandle) -> None:
    path = tmp_path / ("a.safetensors" if "safetensors" in kind else "a.pt")
    load = nvmeio.load_safetensors if "safetensors" in kind else nvmeio.load
    work, wanted = works(path, kind, handle)
    work()
    resources = Resources(tmp_path)
    count = 0
    for _ in at_places(work, 120):
        count += 1
        resources.check()
        assert_same(load(path, handle=handle), wanted)
    assert count > 15
    work()
    assert_same(load(path, handle=handle), wanted)


# Of one that meets a destructor Python says that it is ignored.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_signals_at_random_moments(kind: str, tmp_path: Path) -> None:
    """It hung in a wait for a handle that was being made, in one of three runs."""
    path = tmp_path / ("a.safetensors" if "safetensors" in kind else "a.pt")
    load = nvmeio.load_safetensors if "safetensors" in kind else nvmeio.load
    chance = random.Random(kind)
    with nvmeio.AioHandle(engine="threads") as made:
        work, wanted = works(path, kind, made)
        work()
    # With a handle of each call's own, which is made and closed beside it.
    own: dict[str, Callable[[], Any]] = {
        "save": lambda: nvmeio.save(wanted, path),
        "load": lambda: nvmeio.load(path),
        "save_safetensors": lambda: nvmeio.save_safetensors(wanted, path),
        "load_safetensors": lambda: nvmeio.load_safetensors(path),
    }
    work = own[kind]
    began = time.monotonic()
    work()
    usual = time.monotonic() - began
    resources = Resources(tmp_path)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for _ in range(12):
            try:
                signal.setitimer(signal.ITIMER_REAL, max(1e-4, chance.random() * 1.2 * usual))
                work()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                signal.setitimer(signal.ITIMER_REAL, 0)
            assert_same(load(path), wanted)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    resources.check()


class Raises:
    """An object whose own code ends its pickling, or its unpickling."""

    def __init__(self, error: BaseException, when: str) -> None:
        self.error = error
        self.when = when

    def __reduce__(self) -> Any:
        if self.when == "pickling":
            raise self.error
        return _rebuild, (), {"error": self.error}


class _Rebuilt:
    def __setstate__(self, told: dict[str, BaseException]) -> None:
        raise told["error"]


def _rebuild() -> _Rebuilt:
    return _Rebuilt()


ERRORS = [ValueError("mine"), KeyboardInterrupt("mine"), SystemExit("mine")]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_error_of_a_users_reduce(error: BaseException, tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    nvmeio.save({"a": 1}, path)
    resources = Resources(tmp_path)
    with pytest.raises(type(error), match="mine"):
        nvmeio.save({"t": noise(10_000), "r": Raises(error, "pickling")}, path)
    resources.check()
    assert nvmeio.load(path) == {"a": 1}
    assert not torch.serialization._serialization_tls.skip_data


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_error_of_a_users_setstate(error: BaseException, tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    nvmeio.save({"t": noise(10_000), "r": Raises(error, "unpickling")}, path)
    resources = Resources(tmp_path)
    with pytest.raises(type(error), match="mine"):
        nvmeio.load(path, weights_only=False)
    resources.check()


class Looks:
    """Notes what its own code sees when it is pickled, and unpickled."""

    seen: ClassVar[list[tuple[int, str]]] = []

    def __reduce__(self) -> Any:
        self.look()
        return Looks, (), {"a": noise(10)}

    def __setstate__(self, told: dict[str, Any]) -> None:
        self.look()

    def look(self) -> None:
        self.seen.append((threading.get_ident(), torch.empty(0).device.type))


@pytest.mark.parametrize("kind", ["save", "Checkpointer", "BackgroundSaver"])
def test_an_objects_own_code_sees_the_thread_of_the_caller(kind: str, tmp_path: Path) -> None:
    """torch's modes belong to a thread: an object's own code must find those of its user."""
    Looks.seen = []
    path = str(tmp_path / "a.pt")
    with torch.device("meta"):
        if kind == "save":
            nvmeio.save([Looks()], path)
            nvmeio.load(path, "cpu", weights_only=False)
        elif kind == "Checkpointer":
            with nvmeio.Checkpointer(tmp_path / "c") as checkpointer:
                checkpointer.save_sync([Looks()], 1)
                checkpointer.wait_sync()
                checkpointer.restore(map_location="cpu", weights_only=False)
        else:
            saver = BackgroundSaver()
            saver.save([Looks()], path)
            saver.wait()
            nvmeio.load(path, "cpu", weights_only=False)
    assert Looks.seen == [(threading.get_ident(), "meta")] * 2


def test_an_interrupt_while_one_of_several_ranks_pickles_is_told_to_the_others() -> None:
    """They wait for this rank: what ends its pickling is handed over, to be told in its turn."""
    state = Raises(KeyboardInterrupt("mine"), "pickling")
    call = SaveCall(1, None, ranks=2)
    call.pickle(state)
    assert isinstance(call.refused, KeyboardInterrupt) and call.cancelled
    alone = SaveCall(1, None, ranks=1)
    with pytest.raises(KeyboardInterrupt, match="mine"):
        alone.pickle(state)


# Checkpointer


@pytest.mark.slow
def test_checkpointer_interrupted_at_any_point(tmp_path: Path, handle: nvmeio.AioHandle) -> None:
    """The same save again is whole, whichever call was interrupted, and nothing is left behind."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    saved = state()
    resources = Resources(folder)

    def work() -> None:
        checkpointer = nvmeio.Checkpointer(folder, 2, handle, overwrite=True)
        try:
            checkpointer.save_sync(saved, 1)
            checkpointer.wait_sync()
            checkpointer.restore()
        finally:
            checkpointer.close()
        del checkpointer

    count = 0
    for _ in at_places(work, 150):
        count += 1
        resources.check()
        deadline = time.monotonic() + 60
        while True:  # one whose close was interrupted goes on closing
            try:
                with nvmeio.Checkpointer(folder, 2, handle, overwrite=True) as again:
                    again.save_sync(saved, 1)
                break
            except nvmeio.TransferError:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        assert_same(nvmeio.load(folder / "step-00000001.pt", handle=handle), saved)
    assert count > 30


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_checkpointer_goes_on_after_signals(tmp_path: Path) -> None:
    chance = random.Random(7)
    saved = {**state(), "large": noise(2_000_000)}
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    checkpointer = nvmeio.Checkpointer(tmp_path / "checkpoints", 2)
    resources = Resources(tmp_path)
    try:
        for step in range(15):
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-4 + chance.random() * 0.05)
                checkpointer.save_sync(saved, step)
                checkpointer.wait_sync()
                checkpointer.restore()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                signal.setitimer(signal.ITIMER_REAL, 0)
            checkpointer.save_sync(saved, step)
            checkpointer.wait_sync()
            assert_same(checkpointer.restore(step), saved)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        checkpointer.close()
    resources.check()


# Files for torch.save and torch.load


# One that is dropped before its `with` has begun warns that it was not closed. As an error that
# would keep the frame, and with it the writer.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*was dropped, not closed:ResourceWarning")
def test_file_objects_interrupted_at_any_point(tmp_path: Path, handle: nvmeio.AioHandle) -> None:
    path = tmp_path / "a.pt"
    saved = state()

    def work() -> None:
        try:
            with nvmeio.FastFileWriter(path, handle=handle) as writer:
                torch.save(saved, writer)
        except (RuntimeError, nvmeio.ClosedError) as failed:
            # torch ends its archive behind an interrupt, and says of what it could not.
            assert "unexpected pos" in str(failed) or "was interrupted" in str(failed)
            raise KeyboardInterrupt from failed
        with nvmeio.FastFileReader(path, handle=handle) as reader:
            torch.load(reader)

    work()
    resources = Resources(tmp_path)
    count = 0
    for _ in at_places(work, 80):
        count += 1
        resources.check()
        assert_same(nvmeio.load(path, handle=handle), saved)
    assert count > 30


def test_writer_that_was_interrupted_says_so(tmp_path: Path, handle: nvmeio.AioHandle) -> None:
    """What it has taken is not known: the next call must not go on as if nothing was."""
    path = tmp_path / "a.bin"
    path.write_bytes(b"before")
    writer = nvmeio.FastFileWriter(path, handle=handle)
    writer.write(b"first")
    writer._inside = True  # as an interrupt leaves it
    with pytest.raises(nvmeio.ClosedError, match="was interrupted"):
        writer.write(b"second")
    assert writer.closed
    assert path.read_bytes() == b"before"
    assert os.listdir(tmp_path) == ["a.bin"]

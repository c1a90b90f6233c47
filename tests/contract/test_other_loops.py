"""Where no event loop of asyncio runs: trio, curio, or none. What awaits says so by name."""

from __future__ import annotations

import sys
from collections.abc import Callable, Coroutine, Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from contract.operating import CONTENT, SIZE, target
from support import raw

import nvmeio
from nvmeio.data import Records


class _NotFound(RuntimeError):
    """What sniffio raises where it knows no library."""


def _nobody() -> str:
    raise _NotFound("unknown async library, or not in async context")


@pytest.fixture
def under_trio(monkeypatch: pytest.MonkeyPatch) -> None:
    """As sniffio says it in a task of trio; the tests step coroutines themselves, as trio would."""
    monkeypatch.setitem(
        sys.modules, "sniffio", SimpleNamespace(current_async_library=lambda: "trio")
    )


@pytest.fixture
def under_curio(monkeypatch: pytest.MonkeyPatch) -> None:
    """curio brings no sniffio; where that is there too, it may not know of curio."""
    monkeypatch.setitem(sys.modules, "sniffio", SimpleNamespace(current_async_library=_nobody))
    monkeypatch.setitem(sys.modules, "curio.meta", SimpleNamespace(curio_running=lambda: True))


@pytest.fixture
def under_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sniffio", SimpleNamespace(current_async_library=_nobody))
    monkeypatch.delitem(sys.modules, "curio.meta", raising=False)


def step(work: Coroutine[Any, Any, Any]) -> object:
    """Run a coroutine as a foreign loop does, until it yields something to that loop or ends."""
    try:
        return work.send(None)
    except StopIteration as ended:
        return ended.value
    finally:
        work.close()


async def awaited(operation: Any) -> object:
    return await operation


async def aclosed(made: Any) -> None:
    await made.aclose()


@pytest.mark.usefixtures("under_trio")
def test_trio_is_told_by_name_and_what_to_do(handle_held: nvmeio.AioHandle, file: Path) -> None:
    """It said "no running event loop", under a loop that ran."""
    operation = handle_held.async_pread(target(), file)
    with pytest.raises(RuntimeError, match="asyncio") as caught:
        step(awaited(operation))
    assert "trio" in str(caught.value)
    assert "await trio.to_thread.run_sync(operation.result)" in str(caught.value)


@pytest.mark.usefixtures("under_curio")
def test_curio_is_told_by_name_and_what_to_do(handle_held: nvmeio.AioHandle, file: Path) -> None:
    operation = handle_held.async_pread(target(), file)
    with pytest.raises(RuntimeError, match=r"await curio.run_in_thread\(operation.result\)"):
        step(awaited(operation))


@pytest.mark.usefixtures("under_nothing")
def test_where_no_loop_runs_the_error_says_what_blocks(
    handle_held: nvmeio.AioHandle, file: Path
) -> None:
    operation = handle_held.async_pread(target(), file)
    with pytest.raises(RuntimeError, match=r"no event loop .* operation.result\(\)"):
        step(awaited(operation))


@pytest.mark.usefixtures("under_trio")
def test_what_the_error_advises_works(handle: nvmeio.AioHandle, file: Path) -> None:
    """An operation that is done is awaited anywhere, and `result` needs no loop."""
    tensor = target()
    operation = handle.async_pread(tensor, file)
    assert operation.result() == SIZE
    assert raw(tensor) == CONTENT
    assert step(awaited(operation)) == SIZE


def closed_handle(tmp_path: Path) -> Coroutine[Any, Any, Any]:
    handle = nvmeio.AioHandle()
    closing = aclosed(handle)

    async def whole() -> None:
        try:
            await closing
        finally:
            handle.sync_pread(torch.zeros(1, dtype=torch.uint8), tmp_path / "file")  # still open
            handle.close()

    return whole()


def entered_handle(tmp_path: Path) -> Coroutine[Any, Any, Any]:
    async def whole() -> None:
        handle = nvmeio.AioHandle()
        try:
            async with handle:
                raise AssertionError("the body was begun")
        finally:
            handle.close()

    return whole()


def entered_records(tmp_path: Path) -> Coroutine[Any, Any, Any]:
    async def whole() -> None:
        records = Records(tmp_path / "file", torch.uint8, 1)
        try:
            async with records:
                raise AssertionError("the body was begun")
        finally:
            records.close()

    return whole()


def saved_checkpoint(tmp_path: Path) -> Coroutine[Any, Any, Any]:
    return nvmeio.async_save({"a": torch.zeros(3)}, tmp_path / "state.pt")


def waited_for_room(tmp_path: Path) -> Coroutine[Any, Any, Any]:
    async def whole() -> None:
        with nvmeio.PinnedPool(1 << 20) as pool:
            async with pool.take(4096):
                raise AssertionError("the body was begun")

    return whole()


@pytest.mark.parametrize(
    "make",
    [closed_handle, entered_handle, entered_records, saved_checkpoint, waited_for_room],
    ids=lambda make: make.__name__,
)
@pytest.mark.usefixtures("under_trio")
def test_whatever_else_awaits_says_so_before_it_has_begun(
    make: Callable[[Path], Coroutine[Any, Any, Any]], tmp_path: Path
) -> None:
    """``async with AioHandle()`` ran its body, and left the handle open with the same words."""
    (tmp_path / "file").write_bytes(bytes(4096))
    with pytest.raises(RuntimeError, match="trio"):
        step(make(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.usefixtures("under_trio")
def test_a_checkpoint_saved_where_no_loop_runs_is_there_when_it_is_awaited(tmp_path: Path) -> None:
    """`Checkpointer.save` waits by itself there; awaiting what had ended said "no running loop"."""
    with nvmeio.Checkpointer(tmp_path / "saved") as checkpointer:
        report: Any = step(checkpointer.save({"a": torch.zeros(3)}, 1))
        assert report.step == 1
        checkpointer.wait_sync()
        assert checkpointer.latest_step() == 1


class _Stepped:
    """Awaitable, for the loop of this file."""

    def __await__(self) -> Generator[Any, Any, None]:
        yield "to the loop"


def test_the_step_of_this_file_gives_what_a_coroutine_yields() -> None:
    async def whole() -> None:
        await _Stepped()

    assert step(whole()) == "to the loop"

"""The end of the libaio engine: contexts go back to the kernel behind `close`."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from inside import core_of

import nvmeio
from nvmeio.engines import libaio

LIMIT_S = 100


@pytest.fixture
def giving(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The shim with an `nv_engine_close` that waits until `go` is set."""
    true, state = libaio.lib, SimpleNamespace(go=threading.Event(), full=False, made=0)

    def close(engine: Any) -> None:
        assert state.go.wait(LIMIT_S)
        true.nv_engine_close(engine)
        state.full = False

    def new(table: Any, options: Any, error: Any) -> Any:
        state.made += 1
        if state.full:
            error[0] = errno.EAGAIN
            state.go.set()
            return libaio.ffi.NULL
        return true.nv_engine_new(table, options, error)

    names = {name: getattr(true, name) for name in dir(true) if name.startswith("nv_")}
    fakes = {"nv_engine_close": close, "nv_engine_new": new}
    monkeypatch.setattr(libaio, "lib", SimpleNamespace(**{**names, **fakes}))
    yield state
    state.go.set()


def test_close_does_not_wait_for_the_kernel_to_destroy_contexts(giving: SimpleNamespace) -> None:
    """It took 27 to 43 ms, for which a handle that had nothing in flight was waited for."""
    before = set(threading.enumerate())
    handle = nvmeio.AioHandle(engine="libaio")
    handle.close()
    engine: Any = core_of(handle).engine
    given_back = engine.given_back
    assert not given_back.done and before.issuperset(threading.enumerate())
    giving.go.set()
    assert given_back.wait(LIMIT_S) and given_back.error is None


def test_a_limit_that_closed_handles_still_count_for_is_waited_for(
    giving: SimpleNamespace,
) -> None:
    """fs.aio-max-nr counts a context until the kernel has destroyed it."""
    nvmeio.AioHandle(engine="libaio").close()
    giving.full, giving.made = True, 0
    with nvmeio.AioHandle(engine="libaio") as handle:
        assert giving.made == 2
    giving.full, giving.made = True, 0
    engine: Any = core_of(handle).engine
    assert engine.given_back.wait(LIMIT_S)
    giving.full = True
    with pytest.raises(nvmeio.BackendUnavailableError, match="aio-max-nr"):
        nvmeio.AioHandle(engine="libaio")

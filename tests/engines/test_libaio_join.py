"""The end of the libaio engine, in the thread that closes a handle."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import pytest

import nvmeio
from nvmeio.engines import libaio


def test_an_interrupt_while_contexts_are_given_back_is_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was kept as the outcome of a job that nobody asked for: Ctrl-C did nothing."""
    handle = nvmeio.AioHandle(engine="libaio")
    true = libaio.lib

    def close(engine: Any) -> None:
        true.nv_engine_close(engine)
        signal.raise_signal(signal.SIGINT)

    names = {name: getattr(true, name) for name in dir(true) if name.startswith("nv_")}
    monkeypatch.setattr(libaio, "lib", SimpleNamespace(**{**names, "nv_engine_close": close}))
    engine = handle._cores.host.engine
    engine.stop()
    with pytest.raises(KeyboardInterrupt):
        engine.join()
    monkeypatch.undo()
    handle.close()

"""What is behind a public object, for tests that bring about what no caller could.

Each way in is here once, so that what is behind may change without the tests.
"""

from __future__ import annotations

from typing import Any

from torch import nn

import nvmeio


def saver_of(checkpointer: nvmeio.Checkpointer) -> Any:
    """What makes the saves of a Checkpointer, one after another."""
    return checkpointer._saver


def uses_of(model: nn.Module) -> Any:
    """What a streamed model's stream owns: which weights are in memory, and for whom."""
    stream: Any = model.weight_stream
    return stream._uses


def swapper_of(optimizer: Any) -> Any:
    """What a SwappedOptimizer's owner works with."""
    return optimizer._swapper


def store_of(owner: Any) -> Any:
    """Where something of ours keeps what is not in memory."""
    return owner._store


def held_of(module: Any) -> list[Any]:
    """The units of a SwappedModule that somebody holds."""
    store = module._store

    def held() -> list[Any]:
        store._windows.unsettle()
        return [slot.unit for slot in store._windows.top.there if slot.holds]

    found: list[Any] = store._owner.call(held)
    return found


def window_in_use(module: Any) -> int:
    """The bytes of a SwappedModule's window that units, and tensors that outlive them, take."""
    store = module._store
    return int(store._owner.call(lambda: store._memory.pool.in_use_bytes))


def core_of(handle: nvmeio.AioHandle) -> Any:
    """What has a handle's operations on host memory in flight."""
    return handle._cores.host


def cufile_of(handle: nvmeio.GdsHandle) -> Any:
    """The engine that moves a handle's device memory through cuFile."""
    return handle._gds


def leave_host_memory(handle: nvmeio.GdsHandle) -> None:
    """As with `cpu_tensors="bounce"`, which needs CUDA from the start."""
    handle._host_too = False


def record_of(operation: nvmeio.Operation) -> Any:
    """What the core keeps of an operation."""
    return operation._record

"""DeepSpeed's op builders by name: nothing is built, `load` hands out what is here.

The op modules are bare module objects without a ``__file__``: DeepSpeed opens the ``__file__`` of
its pin_memory op as a shared library (``ops/op_builder/pin_memory_load.py``).
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, ClassVar

from nvmeio.compat.deepspeed import handles


def _op(name: str, *members: Any) -> ModuleType:
    module = ModuleType(name, f"DeepSpeed's {name} op, on nvmeio.")
    for member in members:
        setattr(module, member.__name__, member)
    return module


ASYNC_IO = _op(
    "async_io",
    handles.aio_handle,
    handles.aio_read,
    handles.aio_write,
    handles.deepspeed_memcpy,
)
GDS = _op("gds", handles.gds_handle)
PIN_MEMORY = _op("pin_memory", handles.pin_handle)
UTILS = _op("utils", handles.cast_to_byte_tensor)


class _Builder:
    """What callers use of DeepSpeed's `OpBuilder`."""

    NAME: ClassVar[str]
    _MODULE: ClassVar[ModuleType]

    def __init__(self) -> None:
        self.name = self.NAME
        self.error_log: str | None = None

    def load(self, verbose: bool = False) -> ModuleType:
        """The op's module, at once."""
        return self._MODULE

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether the op works here."""
        return True


class AsyncIOBuilder(_Builder):
    """``AsyncIOBuilder().load()``: aio_handle, aio_read, aio_write, deepspeed_memcpy."""

    NAME = "async_io"
    _MODULE = ASYNC_IO


class GDSBuilder(_Builder):
    """``GDSBuilder().load()``: gds_handle, which raises where cuFile cannot be had."""

    NAME = "gds"
    _MODULE = GDS

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether a `gds_handle` can be made here; with `verbose`, prints why not."""
        reason = handles.no_cufile()
        self.error_log = None if reason is None else str(reason)
        if verbose and reason is not None:
            print(f" [WARNING]  {self.error_log}")
        return reason is None


class PinMemoryBuilder(_Builder):
    """``PinMemoryBuilder().load()``: pin_handle."""

    NAME = "pin_memory"
    _MODULE = PIN_MEMORY


class UtilsBuilder(_Builder):
    """``UtilsBuilder().load()``: cast_to_byte_tensor."""

    NAME = "utils"
    _MODULE = UTILS

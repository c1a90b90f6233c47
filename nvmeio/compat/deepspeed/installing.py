"""DeepSpeed's op builders by name, and into an installed DeepSpeed: its ops replaced by ours.

Nothing is built: a builder's `load` hands out what is here.

DeepSpeed keeps every op that is loaded in one dict, `OpBuilder._loaded_ops`, and looks there before
it compiles anything (``ops/op_builder/builder.py``); so the ops are put there. The rest is what
stands in the way of that.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from nvmeio.compat.deepspeed import handles
from nvmeio.errors import BackendUnavailableError

logger = logging.getLogger("nvmeio")

# Looked at by the builders' `load` before `_loaded_ops` (ops/op_builder/pin_memory_load.py).
_PIN_MEMORY_CACHE = "_deepspeed_pin_memory_op_module"


def _op(name: str, *members: Any) -> ModuleType:
    module = ModuleType(name, f"DeepSpeed's {name} op, on nvmeio.")
    for member in members:
        setattr(module, member.__name__, member)
    return module


# Without a `__file__`: DeepSpeed opens that of its pin_memory op as a shared library.
_MODULES = {
    "async_io": _op(
        "async_io",
        handles.aio_handle,
        handles.aio_read,
        handles.aio_write,
        handles.deepspeed_memcpy,
    ),
    "gds": _op("gds", handles.gds_handle),
    "pin_memory": _op("pin_memory", handles.pin_handle),
    "utils": _op("utils", handles.cast_to_byte_tensor),
}
# gds too: DeepSpeed's own cannot work beside our pin_memory, whose symbols it looks for with dlsym.
_OPS = {name: _MODULES[name] for name in ("async_io", "pin_memory", "gds")}
STARTUP = Path(__file__).parent / "startup"


class _Builder:
    """The part of DeepSpeed's `OpBuilder` that callers use."""

    NAME: ClassVar[str]

    def __init__(self) -> None:
        self.name = self.NAME
        self.error_log: str | None = None

    def load(self, verbose: bool = False) -> ModuleType:
        """The op's module, at once."""
        return _MODULES[self.NAME]

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether the op works here."""
        return True


class AsyncIOBuilder(_Builder):
    """``AsyncIOBuilder().load()``: aio_handle, aio_read, aio_write, deepspeed_memcpy."""

    NAME = "async_io"


class GDSBuilder(_Builder):
    """``GDSBuilder().load()``: gds_handle, which raises where cuFile cannot be had."""

    NAME = "gds"

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


class UtilsBuilder(_Builder):
    """``UtilsBuilder().load()``: cast_to_byte_tensor."""

    NAME = "utils"


def install() -> None:
    """Make the installed DeepSpeed use nvmeio for its I/O, in this process.

    Call it before DeepSpeed has loaded its own op, which it does at the first use
    (`deepspeed.initialize` with something on disk, for one). Child processes made by ``fork``
    have it too; ``spawn`` and ``forkserver`` start anew, and ``nvmeio deepspeed`` serves those.
    Idempotent.

    Raises:
        BackendUnavailableError: DeepSpeed is not installed, or is not of a kind that is known here
            (0.19.8 is what this was tested with).
        RuntimeError: Its own op is loaded already.
    """
    deepspeed = _import("deepspeed")
    op_builder = _import("deepspeed.ops.op_builder")
    accelerator = _import("deepspeed.accelerator").get_accelerator()
    writer = _import("deepspeed.io.fast_file_writer")
    caches = _op_caches(accelerator, op_builder)
    _check_not_loaded(caches)
    setattr(sys, _PIN_MEMORY_CACHE, _OPS["pin_memory"])
    for cache in caches:
        cache.update(_OPS)
    _answer_probes(accelerator)
    _serve_fast_file_writer(writer, op_builder)
    logger.info("DeepSpeed %s does its I/O on nvmeio", getattr(deepspeed, "__version__", "?"))


def installed() -> bool:
    """Whether DeepSpeed uses nvmeio in this process. Imports nothing."""
    return getattr(sys, _PIN_MEMORY_CACHE, None) is _OPS["pin_memory"]


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as failed:
        raise BackendUnavailableError(
            "there is no DeepSpeed here that could use nvmeio",
            attempts=[(f"import {name}", str(failed))],
            remedy="DS_BUILD_OPS=0 pip install deepspeed==0.19.8",
        ) from failed


def _op_caches(accelerator: Any, op_builder: Any) -> list[dict[str, Any]]:
    """The dict of loaded ops; two where DeepSpeed's sources lie on the path.

    A source tree has a top-level `op_builder`, whose classes the accelerator then prefers.
    """
    classes = [*accelerator.get_op_builder("AsyncIOBuilder").__mro__, op_builder.OpBuilder]
    caches = [vars(c)["_loaded_ops"] for c in classes if "_loaded_ops" in vars(c)]
    if not caches:
        raise BackendUnavailableError(
            "this DeepSpeed cannot be told to use nvmeio",
            attempts=[("OpBuilder._loaded_ops", "it does not exist")],
            remedy="DS_BUILD_OPS=0 pip install deepspeed==0.19.8",
        )
    return caches


def _check_not_loaded(caches: list[dict[str, Any]]) -> None:
    loaded = {name: op for cache in caches for name, op in cache.items() if name in _OPS}
    cached = getattr(sys, _PIN_MEMORY_CACHE, None)
    if cached is not None:
        loaded["pin_memory"] = cached
    own = sorted(name for name, op in loaded.items() if op is not _OPS[name])
    if own:
        raise RuntimeError(
            f"DeepSpeed has loaded its own {' and '.join(own)}, and objects made with it do not "
            "work with nvmeio's: call install() right after `import deepspeed`"
        )


def _answer_probes(accelerator: Any) -> None:
    """`is_compatible`, which asks for libaio's headers and a compiler, speaks for nvmeio now."""
    for ours in (AsyncIOBuilder, GDSBuilder):
        builder = accelerator.get_op_builder(ours.__name__)
        # The accelerator has one class for all that it has no op for; that one stays.
        if builder is not None and vars(builder).get("NAME") in _OPS:
            builder.is_compatible = ours.is_compatible
    # Probed at its first use, and kept (ops/__init__.py).
    known = vars(sys.modules["deepspeed.ops"]).get("__compatible_ops__", {})
    works = {name: True for name in _OPS if name in known}
    if "gds" in works:
        works["gds"] = handles.no_cufile() is None
    known.update(works)


def _serve_fast_file_writer(*users: Any) -> None:
    """On CPU, DeepSpeed has no op with the one function that its FastFileWriter needs."""
    for module in users:
        if module.UtilsBuilder.NAME == "deepspeed_not_implemented":
            module.UtilsBuilder = UtilsBuilder


def environment(base: Mapping[str, str]) -> dict[str, str]:
    """A copy of these environment variables, for a process tree that uses nvmeio."""
    rest = base.get("PYTHONPATH", "")
    if rest.split(os.pathsep)[0] == str(STARTUP):
        return dict(base)
    # The rest stays as it is: an empty entry in it means the current directory.
    return {**base, "PYTHONPATH": f"{STARTUP}{os.pathsep}{rest}" if rest else str(STARTUP)}

"""Load a native library, or refuse it if it was built for another version."""

from __future__ import annotations

import importlib
from typing import Any

from nvmeio.errors import BackendUnavailableError


def load(name: str, interface: int) -> tuple[Any, Any]:
    """A library's `ffi` and `lib`.

    Args:
        name: Its module in `nvmeio`.
        interface: The CRC-32 of its declarations. A call into a library with other structures would
            end the program.

    Raises:
        BackendUnavailableError: It is not built, or was built for another version of nvmeio.
    """
    full_name = f"nvmeio.{name}"
    try:
        native = importlib.import_module(full_name)
    except ImportError as missing:  # an unbuilt source tree, or a wheel of another platform
        raise BackendUnavailableError(
            "nvmeio's native shim is not built for this Python",
            attempts=[(full_name, str(missing))],
            remedy="pip install . in the source tree (it needs a C compiler), or install the wheel",
        ) from missing
    if getattr(native.lib, "NV_INTERFACE", None) != interface:
        raise BackendUnavailableError(
            "nvmeio's native shim was built for another version of nvmeio",
            attempts=[(full_name, "another interface")],
            remedy="install nvmeio again; in a source tree by `pip install -e .`",
        )
    return native.ffi, native.lib

"""Write protection of memory (native_shim/protection): `ffi` and `lib`, loaded at first use."""

from __future__ import annotations

from typing import Any

from nvmeio import _bindings as pump
from nvmeio._bindings.loading import load

INTERFACE = 1765438793  # the CRC-32 of native_shim/protection/decl.h

ffi: Any
lib: Any


def __getattr__(name: str) -> Any:
    if name not in ("ffi", "lib"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    loaded_ffi, loaded_lib = load("_native_protection", INTERFACE)
    # Before anybody can protect memory: the pump writes to it through the kernel.
    give_up = int(
        loaded_ffi.cast("intptr_t", loaded_ffi.addressof(loaded_lib, "nv_snapshot_give_up"))
    )
    pump.lib.nv_on_give_up(pump.ffi.cast("nv_give_up_function", give_up))
    globals().update(ffi=loaded_ffi, lib=loaded_lib)
    return loaded_ffi if name == "ffi" else loaded_lib

"""Weights of few bits (native_shim/packed): `ffi` and `lib`, loaded at first use."""

from __future__ import annotations

from typing import Any

from nvmeio._bindings.loading import load

INTERFACE = 234537595  # the CRC-32 of native_shim/packed/decl.h

ffi: Any
lib: Any


def __getattr__(name: str) -> Any:
    if name not in ("ffi", "lib"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    loaded_ffi, loaded_lib = load("_native_packed", INTERFACE)
    globals().update(ffi=loaded_ffi, lib=loaded_lib)
    return loaded_ffi if name == "ffi" else loaded_lib

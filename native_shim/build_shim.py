"""Builds nvmeio._native: cffi, out-of-line API mode, one abi3 module for every Python >= 3.10.

Needs a C compiler and nothing else: libaio is loaded at run time, the kernel's own header
describes its structures.
"""

import zlib
from pathlib import Path

from cffi import FFI

HERE = Path(__file__).resolve().parent
# distutils wants sources relative to the project's root, where setup.py runs.
FILES = (
    "kaio",
    "file_facts",
    "copy",
    "copy_crc32",
    "packed",
    "packed_tiles",
    "hold",
    "write_protection",
    "copy_on_write",
    "own_fds",
    "replace",
    "request",
    "rows",
    "rows_request",
    "batch",
    "lane",
    "engine",
)
SOURCES = [f"native_shim/{name}.c" for name in FILES]

DECLARED = (HERE / "decl.h").read_text(encoding="utf-8")
# What nvmeio/_bindings.py compares: a shim of another version has other structures.
INTERFACE = f"#define NV_INTERFACE {zlib.crc32(DECLARED.encode())}\n"

ffibuilder = FFI()
ffibuilder.cdef(DECLARED + INTERFACE)
ffibuilder.set_source(
    "nvmeio._native",
    INTERFACE + '#include "internal.h"',
    sources=SOURCES,
    include_dirs=["native_shim"],
    depends=[f"native_shim/{name}.h" for name in ("decl", "internal", "packed_loops")],
    extra_compile_args=["-std=c11", "-O2", "-Wall", "-Wextra", "-Wno-unused-parameter"],
    libraries=["dl", "pthread"],
    py_limited_api=True,
)

if __name__ == "__main__":
    ffibuilder.compile(verbose=True)

"""Builds the native libraries: cffi, out-of-line API mode, abi3 modules for every Python >= 3.10.

They need a C compiler and nothing else: libaio is loaded at run time, and the kernel's own header
describes its structures.
"""

import zlib
from pathlib import Path

from cffi import FFI

HERE = Path(__file__).resolve().parent
# The files of each library, by its folder. The copies and the page tables of common/ are built into
# each library that uses them.
FILES = {
    "pump": (
        *("kaio", "own_fds", "replace", "hold", "file_facts", "copy", "rows", "request", "lane"),
        *("batch", "rows_request", "engine", "../common/copy_crc32", "../common/page_tables"),
    ),
    "protection": (
        *("write_protection", "copy_on_write", "../common/copy_crc32", "../common/page_tables"),
    ),
    "packed": ("packed", "packed_tiles", "lookup"),
}
MODULES = {
    "pump": "nvmeio._native",
    "protection": "nvmeio._native_protection",
    "packed": "nvmeio._native_packed",
}


def declarations(library: str) -> str:
    """What Python sees of a library."""
    folders = ("common", library) if library == "pump" else (library,)
    return "".join((HERE / name / "decl.h").read_text(encoding="utf-8") for name in folders)


def interface(library: str) -> int:
    """What nvmeio/_bindings compares: a library of another version has other structures."""
    return zlib.crc32(declarations(library).encode())


def builder(library: str) -> FFI:
    """The builder of one library."""
    number = f"#define NV_INTERFACE {interface(library)}\n"
    # distutils wants sources relative to the project's root, where setup.py runs.
    sources = [
        f"native_shim/{name[3:] if name.startswith('../') else f'{library}/{name}'}.c"
        for name in FILES[library]
    ]
    headers = [*HERE.joinpath("common").glob("*.h"), *HERE.joinpath(library).glob("*.h")]
    ffi = FFI()
    ffi.cdef(declarations(library) + number)
    ffi.set_source(
        MODULES[library],
        f'{number}#include "{library}/internal.h"',
        sources=sources,
        include_dirs=["native_shim"],
        depends=sorted(f"native_shim/{path.relative_to(HERE)}" for path in headers),
        # Hidden: each library calls its own copy of a function, whatever else is loaded.
        extra_compile_args=[
            *("-std=c11", "-O2", "-fvisibility=hidden"),
            *("-Wall", "-Wextra", "-Wno-unused-parameter"),
        ],
        libraries=["dl", "pthread"],
        py_limited_api=True,
    )
    return ffi


pump, protection, packed = map(builder, FILES)

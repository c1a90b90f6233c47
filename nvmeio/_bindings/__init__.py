"""The native libraries, which the package imports from here alone; libaio is found here.

This module has the pump, which moves bytes. `protection` and `packed` have the other two, which
are loaded when they are first used.
"""

from __future__ import annotations

import functools
import operator
import os
from typing import Any, NamedTuple

from nvmeio._bindings.loading import load
from nvmeio.errors import BackendUnavailableError

# The CRC-32 of native_shim/common/decl.h and native_shim/pump/decl.h.
INTERFACE = 2150123505
ffi, lib = load("_native", INTERFACE)

# The soname carries "t64" where the distribution was rebuilt for 64-bit time (Ubuntu 24.04).
_LIBAIO_NAMES = ("libaio.so.1", "libaio.so.1t64")


class KernelAio(NamedTuple):
    """The way to the kernel's AIO calls.

    `source` is "libaio", loaded from `path`, or, if it is missing for a `reason`, "syscalls": the
    same calls, made directly.
    """

    source: str
    path: str | None
    reason: str


@functools.cache
def open_kernel_aio() -> tuple[Any, KernelAio]:
    """Load libaio, or fall back to the system calls; the table of calls, and what it is.

    ``NVMEIO_LIBAIO`` names the library to load instead, or BackendUnavailableError says that it
    cannot be loaded; "none" asks for the system calls.
    """
    wanted = os.environ.get("NVMEIO_LIBAIO", "")
    if wanted == "none":
        return lib.nv_kaio_open(ffi.NULL), KernelAio("syscalls", None, "NVMEIO_LIBAIO=none")
    attempts = []
    for name in (wanted,) if wanted else _LIBAIO_NAMES:
        table = lib.nv_kaio_open(name.encode())
        if table != ffi.NULL:
            path = ffi.string(lib.nv_kaio_path(table)).decode(errors="replace")
            return table, KernelAio("libaio", path, "")
        attempts.append((name, ffi.string(lib.nv_kaio_error()).decode(errors="replace")))
    if wanted:
        raise BackendUnavailableError(
            f"NVMEIO_LIBAIO={wanted} cannot be loaded",
            attempts=attempts,
            remedy="set it to the path of a libaio.so.1, or unset it: nvmeio works without libaio",
        )
    reason = "; ".join(f"{name}: {why}" for name, why in attempts)
    return lib.nv_kaio_open(ffi.NULL), KernelAio("syscalls", None, reason)


def kernel_aio() -> KernelAio:
    """The way to the kernel's AIO calls on this machine."""
    return open_kernel_aio()[1]


def copy_foreign(ours: Any, theirs: int, nbytes: int, into: bool) -> None:
    """Copy between a buffer and an address that may be read-only, or not there at all.

    It goes to the address if `into`, else from it. OSError (EFAULT): the kernel may not touch it.
    """
    here = ffi.from_buffer("char[]", ours, require_writable=not into)
    _checked(lib.nv_copy_foreign(here, ffi.cast("char *", theirs), nbytes, into))


def memory_at(address: int, nbytes: int, keep: object = None) -> memoryview:
    """Memory as bytes that may be written to.

    `keep` lives for as long as it does; without one the caller keeps the memory alive. Not an array
    of ctypes: each length would be a class of its own, 15 to 30 us, which stays.
    """
    pointer = ffi.cast("char *", address)
    if keep is not None:
        # The destructor is a C function with `keep` as its argument: see `OwnFds`.
        pointer = ffi.gc(pointer, functools.partial(operator.is_, keep))
    return memoryview(ffi.buffer(pointer, nbytes))


def buffer_at(address: int, nbytes: int) -> Any:
    """The same for a function of C's, without the memoryview; the caller keeps it alive."""
    return ffi.buffer(ffi.cast("char *", address), nbytes)


_FDS = ffi.typeof("nv_fds *")
_FACTS = ffi.typeof(f"uint64_t[{lib.NV_FACTS}]")


class OwnFds:
    """Up to two descriptors of one file, closed with this object at the latest.

    An interrupt (Ctrl-C) may come after any step of Python's: these are owned from the first on.
    """

    __slots__ = ("_raw",)

    def __init__(self) -> None:
        # The destructor is a C function: one of Python's could be interrupted as well.
        self._raw = ffi.gc(ffi.new(_FDS, (-1, -1, 0)), lib.nv_fds_close)

    @property
    def direct(self) -> int:
        """The descriptor with O_DIRECT, or -1."""
        return int(self._raw.direct)

    @property
    def buffered(self) -> int:
        """The descriptor without O_DIRECT, or -1."""
        return int(self._raw.buffered)

    def open(self, direct: bool, path: str, flags: int) -> int:
        """Open a file as the one or the other; OSError as `os.open` raises it."""
        return _checked(lib.nv_fds_open(self._raw, direct, os.fsencode(path), flags))

    def reopen(self, direct: bool, fd: int, flags: int) -> int:
        """Open the same inode once more, even if it was renamed or unlinked."""
        return self.open(direct, f"/proc/self/fd/{fd}", flags)  # the kernel's magic link

    def duplicate(self, fd: int) -> int:
        """dup(2) to be the descriptor without O_DIRECT."""
        return _checked(lib.nv_fds_duplicate(self._raw, fd))

    def demote(self) -> None:
        """Make the direct descriptor the other one."""
        raw = self._raw
        raw.buffered = raw.direct
        raw.direct = -1

    def close(self) -> None:
        """Close what is open; OSError as `os.close` raises it, also if an earlier call told."""
        _checked(lib.nv_fds_close(self._raw))


def _checked(answer: int) -> int:
    if answer < 0:
        raise OSError(-answer, os.strerror(-answer))
    return answer


class FileFacts(NamedTuple):
    """The result of statx(2) for an open file; alignments are None if the kernel does not know."""

    mode: int
    block_size: int
    size: int
    device: int
    inode: int
    memory_alignment: int | None
    offset_alignment: int | None


def file_facts(fd: int) -> FileFacts:
    """Ask statx(2) about a descriptor."""
    facts = ffi.new(_FACTS)
    _checked(lib.nv_file_facts(fd, facts))
    mode, block_size, size, device, inode, known, memory, offset = ffi.unpack(facts, lib.NV_FACTS)
    if not known:
        memory = offset = None
    return FileFacts(mode, block_size, size, device, inode, memory, offset)

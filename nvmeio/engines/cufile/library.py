"""libcufile, bound through cffi's ABI mode: the only importer of cffi outside of the shim.

Calls release the GIL. Statistics, the stream API and the batch API are left out on purpose: the
first changed their layout in 1.19, the others give no descriptor to poll, and batch ignored
buffer offsets on host memory.

Source: cufile.h of 1.11 to 1.20, in which these layouts are the same.
"""

from __future__ import annotations

import fcntl
import functools
import os
from typing import Any, NamedTuple

from nvmeio.engines.cufile import locate, status
from nvmeio.errors import BackendUnavailableError

DECLARATIONS = """
typedef struct { int err; int cu_err; } CUfileError_t;
typedef void *CUfileHandle_t;
typedef struct {
    int type;
    union { int fd; void *handle; } handle;
    const void *fs_ops;
} CUfileDescr_t;
typedef struct {
    struct {
        unsigned int major_version;
        unsigned int minor_version;
        size_t poll_thresh_size;
        size_t max_direct_io_size;
        unsigned int dstatusflags;
        unsigned int dcontrolflags;
    } nvfs;
    unsigned int fflags;
    unsigned int max_device_cache_size;
    unsigned int per_buffer_cache_size;
    unsigned int max_device_pinned_mem_size;
    unsigned int max_batch_io_size;
    unsigned int max_batch_io_timeout_msecs;
} CUfileDrvProps_t;

CUfileError_t cuFileDriverOpen(void);
CUfileError_t cuFileDriverClose_v2(void);
CUfileError_t cuFileHandleRegister(CUfileHandle_t *fh, CUfileDescr_t *descr);
void cuFileHandleDeregister(CUfileHandle_t fh);
CUfileError_t cuFileBufRegister(const void *base, size_t length, int flags);
CUfileError_t cuFileBufDeregister(const void *base);
ssize_t cuFileRead(CUfileHandle_t fh, void *base, size_t size, int64_t file_offset,
                   int64_t buffer_offset);
ssize_t cuFileWrite(CUfileHandle_t fh, const void *base, size_t size, int64_t file_offset,
                    int64_t buffer_offset);
CUfileError_t cuFileDriverGetProperties(CUfileDrvProps_t *props);
CUfileError_t cuFileDriverSetMaxDirectIOSize(size_t kib);
CUfileError_t cuFileGetVersion(int *version);
long cuFileUseCount(void);

/* from 1.14 on, with two more for sizes and strings */
CUfileError_t cuFileSetParameterBool(int parameter, _Bool value);
"""
# Offsets and sizes that every version has had; `layouts` says what cffi made of the above.
LAYOUTS = {
    "CUfileError_t": (8, {"err": 0, "cu_err": 4}),
    "CUfileDescr_t": (24, {"type": 0, "handle": 8, "fs_ops": 16}),
    "CUfileDrvProps_t": (
        56,
        {
            "nvfs": 0,
            "fflags": 32,
            "max_device_cache_size": 36,
            "per_buffer_cache_size": 40,
            "max_device_pinned_mem_size": 44,
            "max_batch_io_size": 48,
            "max_batch_io_timeout_msecs": 52,
        },
    ),
}

OPAQUE_FD = 1  # CUfileFileHandleType
NEEDED = ("cuFileDriverClose_v2", "cuFileGetVersion", "cuFileRead", "cuFileWrite")
# Parameters, by their place in the enumerations of cufile.h (the same in 1.14 and 1.20).
ALLOW_COMPAT_MODE = 1
PARALLEL_IO = 4

# Before 1.11 the layouts were not looked at; before 1.16 host memory cannot be moved.
OLDEST = 1110
OLDEST_FOR_HOST = 1160


class Properties(NamedTuple):
    """What the open driver says of itself (cuFileDriverGetProperties)."""

    nvfs_major: int
    nvfs_minor: int
    max_direct_io_kib: int
    status_flags: int
    control_flags: int
    feature_flags: int


class Library:
    """A loaded libcufile; each method is a call or two of it.

    Args:
        path: The file.
        source: Where it was found, for messages.

    Raises:
        BackendUnavailableError: It cannot be loaded, or lacks what is needed.
    """

    def __init__(self, path: str, source: str) -> None:
        self.path = path
        self.source = source
        self.ffi = _ffi()
        try:
            # One that is in the process already is found by its path (`locate`) and shared. Asking
            # for that with RTLD_NOLOAD would crash cffi: dlerror() is NULL where nothing is loaded.
            self._lib: Any = self.ffi.dlopen(path, os.RTLD_NOW | os.RTLD_LOCAL)
        except OSError as failed:
            raise _unusable(path, source, str(failed)) from failed
        missing = [name for name in NEEDED if not self._has(name)]
        if missing:
            raise _unusable(path, source, f"it has no {', '.join(missing)}: too old")
        self.version = self._version()
        if self.version < OLDEST:
            raise _unusable(
                path, source, f"version {self.version_text} is too old: {_text(OLDEST)} is needed"
            )

    def _has(self, name: str) -> bool:
        return hasattr(self._lib, name)

    def _version(self) -> int:
        number = self.ffi.new("int *")
        answer = self._lib.cuFileGetVersion(number)
        if answer.err:
            raise _unusable(self.path, self.source, f"cuFileGetVersion: status {answer.err}")
        return int(number[0])

    @property
    def version_text(self) -> str:
        """As "1.20"."""
        return _text(self.version)

    # --- the driver -----------------------------------------------------------------------

    def open_driver(self) -> tuple[int, int]:
        """Blocks for 0.1 to 0.2 s, or for ever (see `preflight`); (status, CUDA's error)."""
        return self._answer(self._lib.cuFileDriverOpen())

    def close_driver(self) -> tuple[int, int]:
        """Status and CUDA's error."""
        return self._answer(self._lib.cuFileDriverClose_v2())

    def set_max_direct_io(self, kib: int) -> int:
        """KiB that one direct transfer moves at most, a multiple of 4; before the open."""
        return self._answer(self._lib.cuFileDriverSetMaxDirectIOSize(kib))[0]

    def set_flag(self, parameter: int, value: bool) -> int | None:
        """A switch, before the open; the status, or None where this version has no parameters."""
        if not self._has("cuFileSetParameterBool"):
            return None
        return self._answer(self._lib.cuFileSetParameterBool(parameter, value))[0]

    def properties(self) -> Properties | None:
        """What the driver says of itself; None where it refuses."""
        props = self.ffi.new("CUfileDrvProps_t *")
        if self._lib.cuFileDriverGetProperties(props).err:
            return None
        nvfs = props.nvfs
        return Properties(
            nvfs.major_version,
            nvfs.minor_version,
            nvfs.max_direct_io_size,
            nvfs.dstatusflags,
            nvfs.dcontrolflags,
            props.fflags,
        )

    def use_count(self) -> int:
        """How often the driver is open in this process; tests ask for it."""
        return int(self._lib.cuFileUseCount())

    # --- files and memory -------------------------------------------------------------------

    def register_file(self, fd: int) -> Any:
        """A CUfileHandle_t for an open descriptor.

        Raises:
            CuFileFailure: Refused; opens the driver if nobody has.
        """
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        if flags & os.O_NONBLOCK:  # means nothing for files, and is status 5019 to cuFile
            fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_NONBLOCK)
        described = self.ffi.new("CUfileDescr_t *")
        described.type = OPAQUE_FD
        described.handle.fd = fd
        handle = self.ffi.new("CUfileHandle_t *")
        self._check("cuFileHandleRegister", self._lib.cuFileHandleRegister(handle, described))
        return handle[0]

    def unregister_file(self, handle: Any) -> None:
        """Before its descriptor is closed."""
        self._lib.cuFileHandleDeregister(handle)

    def register_memory(self, address: int, nbytes: int) -> None:
        """Raises `CuFileFailure`."""
        base = self.ffi.cast("void *", address)
        self._check("cuFileBufRegister", self._lib.cuFileBufRegister(base, nbytes, 0))

    def unregister_memory(self, address: int) -> None:
        """Raises `CuFileFailure`."""
        base = self.ffi.cast("void *", address)
        self._check("cuFileBufDeregister", self._lib.cuFileBufDeregister(base))

    # --- transfers --------------------------------------------------------------------------

    def read(self, handle: Any, base: int, nbytes: int, file_offset: int, at: int) -> int:
        """Bytes read into `base + at`; fewer at the end of the file.

        Raises:
            CuFileFailure: As it says.
        """
        pointer = self.ffi.cast("void *", base)
        moved = int(self._lib.cuFileRead(handle, pointer, nbytes, file_offset, at))
        if moved < 0:  # errno stays as it was on success: asked only now
            raise status.transfer_failure("cuFileRead", moved, self.ffi.errno)
        return moved

    def write(self, handle: Any, base: int, nbytes: int, file_offset: int, at: int) -> int:
        """Bytes written from `base + at`; raises as `read`."""
        pointer = self.ffi.cast("void *", base)
        moved = int(self._lib.cuFileWrite(handle, pointer, nbytes, file_offset, at))
        if moved < 0:
            raise status.transfer_failure("cuFileWrite", moved, self.ffi.errno)
        return moved

    @staticmethod
    def _answer(error: Any) -> tuple[int, int]:
        return int(error.err), int(error.cu_err)

    @staticmethod
    def _check(call: str, error: Any) -> None:
        if error.err:
            raise status.failure(call, int(error.err), int(error.cu_err))


def load() -> Library:
    """The library of this machine, loaded.

    Raises:
        BackendUnavailableError: There is none, or it cannot be used; says why.
    """
    return Library(*locate.find())


def layouts() -> dict[str, tuple[int, dict[str, int]]]:
    """Sizes and offsets of the structs as they are bound, in the shape of `LAYOUTS`."""
    ffi = _ffi()
    return {
        name: (ffi.sizeof(name), {field: ffi.offsetof(name, field) for field in fields})
        for name, (_, fields) in LAYOUTS.items()
    }


@functools.cache
def _ffi() -> Any:
    import cffi  # with its C parser: 60 ms, which `import nvmeio` does not pay

    ffi = cffi.FFI()
    ffi.cdef(DECLARATIONS)
    return ffi


def _text(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def _unusable(path: str, source: str, reason: str) -> BackendUnavailableError:
    return BackendUnavailableError(
        "libcufile cannot be used",
        attempts=[(f"{path} ({source})", reason)],
        remedy=f"{locate.INSTALL}, or name another with {locate.VARIABLE}",
    )

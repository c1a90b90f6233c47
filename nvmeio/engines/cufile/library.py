"""libcufile: where it is, its binding through cffi's ABI mode, and its status codes in words.

This is the only importer of cffi outside of the shim. Calls release the GIL. Statistics, the stream
API and the batch API are left out on purpose: the first changed their layout in 1.19, the others
give no descriptor to poll, and batch ignored buffer offsets on host memory.

Source: cufile.h of 1.11 to 1.20, in which these layouts are the same.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from nvmeio._memory.system import text_of
from nvmeio.engines.base import EngineError
from nvmeio.errors import BackendUnavailableError, CuFileError

VARIABLE = "NVMEIO_CUFILE"
SONAME = "libcufile.so.0"
PLACES = "nvidia packages, $CUDA_HOME, $CUDA_PATH, the linker's directories, /usr/local/cuda"
INSTALL = "pip install nvidia-cufile (CUDA 13) or nvidia-cufile-cu12 (CUDA 12)"

OPAQUE_FD = 1  # CUfileFileHandleType
NEEDED = ("cuFileDriverClose_v2", "cuFileGetVersion", "cuFileRead", "cuFileWrite")
# Parameters, by their place in the enumerations of cufile.h (the same in 1.14 and 1.20).
ALLOW_COMPAT_MODE = 1
PARALLEL_IO = 4
USE_PCIP2PDMA = 7

_NVME = 4  # CUfileDriverStatusFlags_t

# Before 1.11 the layouts were not looked at; before 1.16 host memory cannot be moved.
OLDEST = 1110
OLDEST_FOR_HOST = 1160

# Statuses.
BASE = 5000
ALREADY_OPEN = 5026


class FoundLibrary(NamedTuple):
    """A library: the file, and which place of the search order had it."""

    path: str
    source: str


def find_library() -> FoundLibrary:
    """The library that nvmeio would load.

    Order: ``NVMEIO_CUFILE``, one that this process has loaded already (torch's, say: two copies
    would have two drivers), the ``nvidia`` packages of pip, ``$CUDA_HOME`` and ``$CUDA_PATH``, the
    linker's directories, ``/usr/local/cuda``.

    Raises:
        BackendUnavailableError: There is none, or the variable names no file.
    """
    named = os.environ.get(VARIABLE)
    if named:
        if not Path(named).is_file():
            raise BackendUnavailableError(
                f"{VARIABLE} names {named}, no file",
                remedy=f"set {VARIABLE} to the path of a {SONAME}, or unset it",
            )
        return FoundLibrary(named, VARIABLE)
    for found in library_candidates():
        return found
    raise BackendUnavailableError(
        "libcufile was not found", attempts=[("cuFile", f"not in {PLACES}")], remedy=INSTALL
    )


def library_candidates() -> Iterator[FoundLibrary]:
    """Every libcufile that is there, the first choice first."""
    yield from _loaded()
    yield from _packaged()
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if home := os.environ.get(variable):
            yield from _in(f"${variable}", Path(home, "lib64"))
            for target in sorted(Path(home).glob("targets/*-linux/lib")):
                yield from _in(f"${variable}", target)
    for directory in filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":")):
        yield from _in("$LD_LIBRARY_PATH", Path(directory))
    yield from (FoundLibrary(str(path), "ldconfig") for path in linker_cache("libcufile.so"))
    yield from _in("/usr/local/cuda", Path("/usr/local/cuda/lib64"))


def _loaded() -> Iterator[FoundLibrary]:
    for line in text_of("/proc/self/maps").splitlines():
        path = line.split(maxsplit=5)[-1]
        if "/libcufile.so" in path:
            yield FoundLibrary(path, "already loaded")


def _packaged() -> Iterator[FoundLibrary]:
    nvidia = importlib.util.find_spec("nvidia")
    for package in ("cu13", "cufile"):
        for base in (nvidia.submodule_search_locations or ()) if nvidia else ():
            yield from _in(f"nvidia/{package}/lib", Path(base, package, "lib"))


def _in(source: str, directory: Path) -> Iterator[FoundLibrary]:
    yield from (FoundLibrary(str(path), source) for path in sorted(directory.glob("libcufile.so*")))


def linker_cache(prefix: str) -> Iterator[Path]:
    """Libraries of this name that the dynamic linker knows."""
    program = shutil.which("ldconfig", path="/sbin:/usr/sbin:/usr/bin")
    if program is None:
        return
    done = subprocess.run([program, "-p"], capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        name, arrow, path = line.strip().partition(" => ")
        if arrow and name.startswith(prefix):
            yield Path(path)


class Meaning(NamedTuple):
    """A status in words, the nearest errno, and how to fix it (or "")."""

    text: str
    errno: int
    remedy: str = ""


_NO_NVIDIA_FS = "load nvidia-fs (modprobe nvidia-fs), or allow compat mode"
_MEANINGS: dict[int, Meaning] = {
    5001: Meaning("the driver is not initialised", errno.ENODEV, _NO_NVIDIA_FS),
    5002: Meaning("invalid property", errno.EINVAL, "check cufile.json"),
    5003: Meaning("a property is out of range", errno.EINVAL, "check cufile.json"),
    5004: Meaning("nvidia-fs is of another release", errno.ENODEV, "install both from one CUDA"),
    5005: Meaning("the version of nvidia-fs cannot be read", errno.ENODEV, _NO_NVIDIA_FS),
    5006: Meaning("the driver is shutting down", errno.ESHUTDOWN),
    5007: Meaning("GPUDirect Storage is not supported on this platform", errno.EOPNOTSUPP),
    5008: Meaning(
        "GPUDirect Storage is not supported on this file",
        errno.EOPNOTSUPP,
        "another file system, compat mode, or nvmeio.AioHandle",
    ),
    5009: Meaning("GPUDirect Storage is not supported on this GPU", errno.EOPNOTSUPP),
    5010: Meaning("nvidia-fs failed (ioctl)", errno.EIO, "look at dmesg"),
    5011: Meaning("the CUDA driver failed", errno.EIO),
    5012: Meaning("not a pointer that CUDA knows", errno.EFAULT),
    5013: Meaning("the wrong kind of memory", errno.EFAULT),
    5014: Meaning("the span reaches beyond the allocation", errno.EFAULT),
    5015: Meaning("the memory belongs to another CUDA context", errno.EFAULT),
    5016: Meaning("more than may be pinned at once", errno.ENOMEM, "max_device_pinned_mem_size_kb"),
    5017: Meaning("the span reaches beyond the registered memory", errno.EFAULT),
    5018: Meaning("unsupported file type", errno.EOPNOTSUPP),
    5019: Meaning("the file is not open in a way that cuFile supports", errno.EBADF),
    5020: Meaning("the file is not open with O_DIRECT", errno.EINVAL, "a file system that has it"),
    5022: Meaning("invalid argument", errno.EINVAL),
    5023: Meaning("the memory is registered already", errno.EEXIST),
    5024: Meaning("the memory is not registered", errno.ENOENT),
    5025: Meaning("no permission", errno.EACCES),
    5026: Meaning("the driver is open already", errno.EALREADY),
    5027: Meaning(
        "the file is not registered",
        errno.EBADF,
        "on a disk's file system cuFile asks udev: /run/udev/data has to be there (in a container: "
        "docker run -v /run/udev:/run/udev:ro ...); before 1.16 it takes no file in memory (tmpfs)",
    ),
    5028: Meaning("the file is registered already", errno.EEXIST),
    5029: Meaning("there is no such GPU", errno.ENODEV),
    5030: Meaning("internal error", errno.EIO, "look at cufile.log"),
    5031: Meaning("no file descriptor is left", errno.EMFILE, "ulimit -n"),
    5033: Meaning(
        "nvidia-fs or CUDA cannot be initialised",
        errno.ENODEV,
        "cuFile before 1.16 needs libcuda.so.1, that is a GPU driver",
    ),
    5034: Meaning("GPUDirect Storage is disabled for this file", errno.EOPNOTSUPP, "cufile.json"),
    5036: Meaning(
        "GPU memory could not be pinned",
        errno.ENOMEM,
        "unregister some memory; the limit is the GPU's BAR1 (nvidia-smi -q -d MEMORY)",
    ),
    5044: Meaning("I/O error", errno.EIO, "look at dmesg and cufile.log"),
}


class CuFileFailure(EngineError):
    """An answer of cuFile; becomes a `CuFileError` when the operation is known.

    Attributes:
        status: 5000 and up, or 0 where it gave an errno of the kernel's.
        cuda_status: CUDA's error number beside 5011, else 0.
    """

    def __init__(self, errno: int, detail: str, status: int = 0, cuda_status: int = 0) -> None:
        super().__init__(errno, detail)
        self.status = status
        self.cuda_status = cuda_status

    def with_context(self, **about: Any) -> CuFileError:
        """With the operation, the file and the span."""
        return CuFileError(
            self.errno,
            cufile_status=self.status,
            cuda_status=self.cuda_status,
            detail=self.detail,
            **about,
        )


def failure(call: str, status: int, cuda_status: int = 0) -> CuFileFailure:
    """The failure that a status of 5000 and up stands for."""
    meaning = _MEANINGS.get(status, Meaning("unknown to nvmeio", errno.EIO, "look at cufile.log"))
    text = f"{call}: cuFile status {status}, {meaning.text}"
    if cuda_status:
        text += f" (CUDA error {cuda_status})"
    if meaning.remedy:
        text += f"; {meaning.remedy}"
    return CuFileFailure(meaning.errno, text, status, cuda_status)


def transfer_failure(call: str, returned: int, code: int) -> CuFileFailure:
    """The failure of cuFileRead or cuFileWrite.

    Args:
        call: Its name.
        returned: Its result, negative.
        code: errno right after it, which counts only where it returned -1, and which may then be
            a cuFile status itself (5027 after a deregister, for one).
    """
    if returned < -BASE:
        return failure(call, -returned)
    number = code if returned == -1 else -returned
    if number > BASE:
        return failure(call, number)
    number = number or errno.EIO
    return CuFileFailure(number, f"{call}: {os.strerror(number)}")


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
/* from 1.16 on */
CUfileError_t cuFileDriverGetP2PFlags(int status_flag, int *p2p_flags);
"""


class Properties(NamedTuple):
    """Properties of the open driver (cuFileDriverGetProperties)."""

    nvfs_major: int
    status_flags: int
    feature_flags: int


class Library:
    """A loaded libcufile; each method is a call or two of it.

    Args:
        path: The file.
        source: The place where it was found, for messages.

    Raises:
        BackendUnavailableError: It cannot be loaded, or lacks what is needed.
    """

    def __init__(self, path: str, source: str) -> None:
        self.path = path
        self.source = source
        self.ffi = declared()
        try:
            # One that is in the process already is found by its path (`locate`) and shared. Asking
            # for that with RTLD_NOLOAD would crash cffi: dlerror() is NULL where nothing is loaded.
            self._lib: Any = self.ffi.dlopen(path, os.RTLD_NOW | os.RTLD_LOCAL)
        except OSError as failed:
            raise _unusable(path, source, str(failed)) from failed
        missing = [name for name in NEEDED if not self.has(name)]
        if missing:
            raise _unusable(path, source, f"it has no {', '.join(missing)}: too old")
        self.version = self._version()
        if self.version < OLDEST:
            raise _unusable(
                path, source, f"version {self.version_text} is too old: {_text(OLDEST)} is needed"
            )

    def has(self, name: str) -> bool:
        """Whether this libcufile has a function."""
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
        """Blocks for 0.1 to 0.2 s, or forever (see `preflight`); (status, CUDA's error)."""
        return self._answer(self._lib.cuFileDriverOpen())

    def close_driver(self) -> tuple[int, int]:
        """Status and CUDA's error."""
        return self._answer(self._lib.cuFileDriverClose_v2())

    def set_max_direct_io(self, kib: int) -> int:
        """KiB that one direct transfer moves at most, a multiple of 4; before the open."""
        return self._answer(self._lib.cuFileDriverSetMaxDirectIOSize(kib))[0]

    def set_flag(self, parameter: int, value: bool) -> int | None:
        """A switch, before the open; the status, or None where this version has no parameters."""
        if not self.has("cuFileSetParameterBool"):
            return None
        return self._answer(self._lib.cuFileSetParameterBool(parameter, value))[0]

    def p2p_flags(self) -> int | None:
        """Ways of direct DMA for NVMe (CUfileP2PFlags_t, as bits); None where it does not say."""
        if not self.has("cuFileDriverGetP2PFlags"):
            return None
        flags = self.ffi.new("int *")
        return None if self._lib.cuFileDriverGetP2PFlags(_NVME, flags).err else int(flags[0])

    def properties(self) -> Properties | None:
        """Properties of the driver; None where it refuses."""
        props = self.ffi.new("CUfileDrvProps_t *")
        if self._lib.cuFileDriverGetProperties(props).err:
            return None
        nvfs = props.nvfs
        return Properties(nvfs.major_version, nvfs.dstatusflags, props.fflags)

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
        return self._move("cuFileRead", handle, base, nbytes, file_offset, at)

    def write(self, handle: Any, base: int, nbytes: int, file_offset: int, at: int) -> int:
        """Bytes written from `base + at`; raises as `read`."""
        return self._move("cuFileWrite", handle, base, nbytes, file_offset, at)

    def _move(self, call: str, handle: Any, base: int, *span: int) -> int:
        moved = int(getattr(self._lib, call)(handle, self.ffi.cast("void *", base), *span))
        if moved < 0:  # errno stays as it was on success: asked only now
            raise transfer_failure(call, moved, self.ffi.errno)
        return moved

    @staticmethod
    def _answer(error: Any) -> tuple[int, int]:
        return int(error.err), int(error.cu_err)

    @staticmethod
    def _check(call: str, error: Any) -> None:
        if error.err:
            raise failure(call, int(error.err), int(error.cu_err))


def load() -> Library:
    """The library of this machine, loaded.

    Raises:
        BackendUnavailableError: There is none, or it cannot be used; says why.
    """
    return Library(*find_library())


@functools.cache
def declared() -> Any:
    """The interface that cffi makes of `DECLARATIONS`."""
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
        remedy=f"{INSTALL}, or name another with {VARIABLE}",
    )

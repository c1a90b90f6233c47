"""Memory as the kernel and CUDA see it: their calls, how much there is, why not more.

Sources: Documentation/admin-guide/mm/transhuge.rst in the kernel tree, man 5 proc, man 2 getrlimit.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import resource
from typing import Any

import torch

from nvmeio import _torch_private

# From here on a mapping is checked against MemAvailable before it is touched. Overcommit lets mmap
# succeed for far more than there is, and the OOM killer would answer the touching. Below this size
# reading /proc/meminfo (40 us) would cost more than it guards.
_CHECK_BYTES = 64 << 20

# CDLL, not PyDLL: each call gives up the GIL.
libc = ctypes.CDLL(None, use_errno=True)
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.munlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.mlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.mlock2.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]


# How much there is


def text_of(path: str | os.PathLike[str]) -> str:
    """The text of a file of the kernel; "" where it is not there, or may not be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


@functools.cache
def huge_page_bytes() -> int:
    """Size of a transparent huge page: 2 MiB on x86-64, else the kernel's value."""
    nbytes = text_of("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size").strip()
    return int(nbytes) if nbytes.isdecimal() else 2 << 20


@functools.cache
def huge_pages_for_all() -> bool:
    """Whether the kernel gives huge pages to memory that did not ask for them."""
    return "[always]" in text_of("/sys/kernel/mm/transparent_hugepage/enabled")


def proc_bytes(path: str, field: str) -> int | None:
    """A "Field: 123 kB" line of /proc/meminfo or /proc/self/status, in bytes."""
    found = re.search(rf"^{field}:\s*(\d+)", text_of(path), re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def available_bytes() -> int | None:
    """How much the kernel could allocate now without swapping; None if it does not say."""
    return proc_bytes("/proc/meminfo", "MemAvailable")


def pinned_bytes() -> int:
    """How much of this process's memory others write to past its page tables.

    The kernel counts what io_uring and RDMA have registered (VmPin), and not where it is: a fork
    would tell of each page, at the cost of a fork (man 5 proc; measured on Linux 6.18, where
    neither pagemap, PAGEMAP_SCAN nor mincore tells).
    """
    return proc_bytes("/proc/self/status", "VmPin") or 0


def check_available(nbytes: int, length: int) -> None:
    if length < _CHECK_BYTES:
        return
    available = proc_bytes("/proc/meminfo", "MemAvailable")
    if available is not None:
        available += proc_bytes("/proc/meminfo", "SwapFree") or 0
        if length > available:
            raise MemoryError(no_memory(nbytes, "more than is available"))


# Why some is refused


def no_memory(nbytes: int, reason: str) -> str:
    available = proc_bytes("/proc/meminfo", "MemAvailable")
    known = "unknown" if available is None else f"{available} bytes"
    return f"cannot allocate {nbytes} bytes: {reason} (available: {known}; MemAvailable)"


def not_lockable(nbytes: int, code: int) -> str:
    soft, hard = (_limit(limit) for limit in resource.getrlimit(resource.RLIMIT_MEMLOCK))
    used = proc_bytes("/proc/self/status", "VmLck")
    return (
        f"cannot page-lock {nbytes} bytes ({os.strerror(code)}): the limit RLIMIT_MEMLOCK is "
        f"{soft} (hard limit {hard}), of which this process has "
        f"{'an unknown number of' if used is None else used} bytes locked. Raise it with "
        "`ulimit -l unlimited` in the shell, `memlock` in /etc/security/limits.conf, LimitMEMLOCK= "
        "in a systemd unit, or `docker run --ulimit memlock=-1`. nvmeio does not need locked "
        "memory: nvmeio.empty_aligned is as fast"
    )


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value} bytes"


# CUDA

# Devices that have not done in time what they were asked, which they may still do.
silent_devices: set[torch.device] = set()

_STREAM = ctypes.c_void_p
TO_DEVICE, TO_HOST = 1, 2  # cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost; driver_types.h
_CAPTURE_RELAXED = 2  # cudaStreamCaptureModeRelaxed; driver_types.h


def cuda_device() -> int | None:
    """A device on which this process has a context, best the current one; None if none has.

    Asking starts nothing: a process that works on the CPU alone has no context, and may fork.
    """
    cuda: Any = torch.cuda
    if not cuda.is_initialized():
        return None
    here = cuda.current_device()
    return next((d for d in (here, *range(cuda.device_count())) if _has_context(d)), None)


def _has_context(device: int) -> bool:
    # torch's own page-locked memory asks the same (at::cuda::getDeviceIndexWithPrimaryContext).
    has_context = _torch_private.found("has_cuda_context")
    return bool(has_context(device))


def tolerate_captures() -> None:
    """Keep this thread's calls from breaking a capture of a CUDA graph in mode "global" elsewhere.

    Its device must be in use and current. CUDA's default has any thread that asks for an event, or
    allocates, invalidate the capture; torch's watchdog of NCCL does the same as this.
    """
    exchange = getattr(libc, "cudaThreadExchangeStreamCaptureMode", None)
    if exchange is not None:
        exchange(ctypes.byref(ctypes.c_int(_CAPTURE_RELAXED)))


class PromptRuntime:
    """CUDA's runtime, by calls that keep the GIL; AttributeError if it has not these.

    A thread that releases the GIL beside one that is busy in Python gets it back after 5 ms. Only
    for calls that do not wait for the device: copies of memory that CUDA has locked, and records,
    on streams that are not asked for a thousand things at once. Failures are RuntimeErrors.
    """

    def __init__(self) -> None:
        runtime, version = ctypes.PyDLL(None), ctypes.c_int()
        self._copy = runtime.cudaMemcpyAsync
        self._copy.argtypes = [*[ctypes.c_void_p] * 2, ctypes.c_size_t, ctypes.c_int, _STREAM]
        self._record = runtime.cudaEventRecord
        self._record.argtypes = [ctypes.c_void_p, _STREAM]
        self._reason = runtime.cudaGetErrorString
        self._reason.restype = ctypes.c_char_p
        runtime.cudaRuntimeGetVersion(ctypes.byref(version))
        self.release = version.value // 1000

    def copy(self, target: int, source: int, nbytes: int, kind: int, stream: int) -> None:
        self._check(self._copy(target, source, nbytes, kind, stream), "cudaMemcpyAsync")

    def record(self, event: int, stream: int) -> None:
        self._check(self._record(event, stream), "cudaEventRecord")

    def _check(self, code: int, call: str) -> None:
        if code:
            clear_cuda_error()
            raise RuntimeError(f"CUDA error: {self._reason(code).decode()} ({call})")


@functools.cache
def prompt_runtime() -> PromptRuntime | None:
    """The one of torch, if it is surely that: another library may have loaded another before."""
    try:
        runtime = PromptRuntime()
    except AttributeError:  # linked into torch; ROCm, whose names are others; no device at all
        return None
    return runtime if str(torch.version.cuda).split(".")[0] == str(runtime.release) else None


def clear_cuda_error() -> None:
    # CUDA keeps it for the next launch of a kernel in this thread, which would seem to have failed.
    # torch has no name for the call; its runtime's symbols are global.
    take_error = getattr(libc, "cudaGetLastError", None)
    if take_error is not None:
        take_error()


def cuda_refusal(runtime: Any, call: str, nbytes: int, error: Any) -> str:
    clear_cuda_error()
    return f"{call} of {nbytes} bytes failed: {runtime.cudaGetErrorString(error)}"

"""cuFile's status codes: what they mean, which errno comes nearest, how to fix it.

Source: CUfileOpError in cufile.h (1.20). 5039 has another meaning before 1.15 and is not named.
"""

from __future__ import annotations

import errno
import os
from typing import Any, NamedTuple

from nvmeio.engines.base import EngineError
from nvmeio.errors import CuFileError

BASE = 5000
ALREADY_OPEN = 5026


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
    5004: Meaning(
        "the versions of libcufile and nvidia-fs do not match",
        errno.ENODEV,
        "install both from one CUDA release",
    ),
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
    5017: Meaning("the span reaches beyond what is registered", errno.EFAULT),
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
        "docker run -v /run/udev:/run/udev:ro ...)",
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
    5038: Meaning("not supported asynchronously", errno.EOPNOTSUPP),
    5044: Meaning("I/O error", errno.EIO, "look at dmesg and cufile.log"),
    5049: Meaning("not possible in compat mode", errno.EOPNOTSUPP),
}


class CuFileFailure(EngineError):
    """What cuFile answered; becomes a `CuFileError` when the operation is known.

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
        returned: What it returned, negative.
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

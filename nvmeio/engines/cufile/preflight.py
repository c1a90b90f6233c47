"""What must hold before libcufile is called: where it does not, calls hang or do harm.

Each check reads a file or two and is made again at every driver open.
"""

from __future__ import annotations

from pathlib import Path

import torch

from nvmeio.errors import BackendUnavailableError

MODULES = Path("/proc/modules")
UDEV = Path("/run/udev/data")
NVIDIA_FS = Path("/proc/driver/nvidia-fs")
DEVICES = Path("/dev")


def problem() -> tuple[str, str, str]:
    """What would make the driver's open hang or do harm: (subject, reason, remedy), or blanks."""
    if not MODULES.exists():
        return (
            str(MODULES),
            "missing (a kernel without loadable modules, or gVisor): opening cuFile's driver would "
            "never return",
            "run outside the sandbox (docker run --runtime=runc ...), or use nvmeio.AioHandle, "
            "which moves CUDA tensors through host memory",
        )
    if nvidia_fs() and not any(DEVICES.glob("nvidia-fs*")):
        return (
            "nvidia-fs",
            "the module is loaded and /dev/nvidia-fs* is missing: opening cuFile's driver would "
            "close this process's standard input",
            "pass the devices into the container (docker run --device=/dev/nvidia-fs0 ...), or "
            "unload the module on the host (rmmod nvidia_fs) to have compat mode",
        )
    return "", "", ""


def nvidia_fs() -> str:
    """The version of the loaded nvidia-fs kernel module, or ""."""
    try:
        words = (NVIDIA_FS / "version").read_text(errors="replace").split()
        return words[-1] if words else "unknown"
    except OSError:
        pass
    try:
        modules = MODULES.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return "unknown" if any(line.startswith("nvidia_fs ") for line in modules) else ""


def udev_database() -> bool:
    """Whether udev's database is there, which cuFile asks about block devices."""
    return UDEV.is_dir()


def check(needs_cuda: bool) -> None:
    """Make sure that the driver can be opened.

    Raises:
        BackendUnavailableError: It would hang or do harm, or there is no CUDA device.
    """
    subject, reason, remedy = problem()
    if subject:
        raise BackendUnavailableError(
            "cuFile's driver cannot be opened here", attempts=[(subject, reason)], remedy=remedy
        )
    if needs_cuda and not torch.cuda.is_available():
        built = "torch is built without CUDA" if torch.version.cuda is None else "no CUDA device"
        raise BackendUnavailableError(
            "there is no GPU memory for cuFile to move",
            attempts=[("torch", built)],
            remedy='nvmeio.AioHandle for CPU tensors; GdsHandle(cpu_tensors="cufile") has cuFile '
            "move host memory, which is good for trying it out",
        )

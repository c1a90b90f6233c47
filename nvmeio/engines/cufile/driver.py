"""cuFile's driver: one a process, open while at least one engine uses it.

Opening takes 0.1 to 0.2 s. Parameters count only if they are set before, so whoever comes second
has to want the same. If somebody else in the process (torch's GdsFile, say) has opened it, it is
used as it is and left open.

The driver is not opened if that would hang or do harm: `preflight` checks this first, with a file
or two read at every open. Calls that still do not return are given up after a time. A thread cannot
be ended from outside, so one that hangs is left behind: a daemon thread in a foreign call, which
does not keep the interpreter from exiting.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from nvmeio._memory import devices
from nvmeio._memory.system import text_of
from nvmeio._threads.interruptible import begun
from nvmeio.engines.cufile import library
from nvmeio.engines.cufile.library import Library, Properties
from nvmeio.engines.cufile.registry import Files
from nvmeio.errors import BackendUnavailableError

logger = logging.getLogger("nvmeio")

Value = TypeVar("Value")

OPEN_LIMIT_S = 30.0
CLOSE_LIMIT_S = 10.0

MODULES = Path("/proc/modules")
UDEV = Path("/run/udev/data")  # what cuFile asks about block devices
NVIDIA_FS = Path("/proc/driver/nvidia-fs")
DEVICES = Path("/dev")

# CUfileDriverStatusFlags, CUfileDriverControlFlags, CUfileFeatureFlags
_NVME, _NVME_P2P = 1 << 4, 1 << 11
_P2P_FEATURE = 1 << 4
_P2PDMA = 1 << 0  # CU_FILE_P2P_FLAG_PCI_P2PDMA

P2PDMA_VARIABLE = "CUFILE_USE_PCIP2PDMA"


class HangsError(Exception):
    """The call has not returned in time; it may be running still."""


def call_limited(step: Callable[[], Value], limit_s: float, name: str) -> Value:
    """Call in a thread of its own; what it returns or raises.

    Raises:
        HangsError: Not back after `limit_s` seconds.
    """
    job = begun(step, name)
    if not job.wait(limit_s):
        raise HangsError(f"not back after {limit_s} s")
    return job.result()


def preflight_problem() -> tuple[str, str, str]:
    """Why opening the driver would hang or harm: (subject, reason, remedy), or blanks."""
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
    words = text_of(NVIDIA_FS / "version").split()
    loaded = any(line.startswith("nvidia_fs ") for line in text_of(MODULES).splitlines())
    return words[-1] if words else "unknown" if loaded else ""


def preflight(needs_cuda: bool) -> None:
    """Make sure that the driver can be opened.

    Raises:
        BackendUnavailableError: It would hang or do harm, or there is no CUDA device.
    """
    subject, reason, remedy = preflight_problem()
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


@dataclass(frozen=True)
class DriverSettings:
    """The settings that the driver is opened with.

    Attributes:
        needs_cuda: False to move host memory only.
        allow_compat: Go through host memory where direct transfers are not possible.
        max_direct_io_bytes: The most bytes of one direct transfer of the driver, a multiple of
            4096; None for cuFile's own choice.
    """

    needs_cuda: bool = True
    allow_compat: bool = True
    max_direct_io_bytes: int | None = None


class Driver:
    """The driver of this process: opened for the first handle, closed behind the last one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._library: Library | None = None
        self._settings: DriverSettings | None = None
        self._p2p_flags: int | None = None
        self._mine = False
        self._properties: Properties | None = None
        self._stuck = ""  # an open or a close that has not come back
        self._hanging: list[str] = []  # other calls that have not
        self._pid = 0  # of the process that has called it
        self.files = Files()  # registered with it

    def acquire(self, settings: DriverSettings) -> Library:
        """The library with its driver open; `release` it once.

        Raises BackendUnavailableError, which says why and how to fix it; ValueError if it is open
        with other settings.
        """
        with self._lock:
            self._check_process()
            if stuck := self._stuck or "".join(self._hanging[:1]):
                raise _refused(stuck, "start a new process")
            if self._users:
                if settings != self._settings:
                    raise ValueError(
                        f"cuFile's driver is open in this process with {self._settings}, and has "
                        f"one setting for all; close those handles first, or ask for the same "
                        f"instead of {settings}"
                    )
            else:
                self._open(settings)
            self._users += 1
            assert self._library is not None
            return self._library

    def release(self) -> None:
        """One user less; the last one closes, unless a call hangs in the driver."""
        with self._lock:
            if self._pid != os.getpid() or not self._users:
                return
            self._users -= 1
            if self._users or self._stuck or self._hanging or self._library is None:
                return
            self.files.unregister_all(self._library)
            if not self._mine:
                return
            self._mine = False
            self._settings = None
            try:
                code, _ = call_limited(
                    self._library.close_driver, CLOSE_LIMIT_S, "nvmeio-cufile-close"
                )
            except HangsError as hangs:
                self._stuck = f"cuFileDriverClose was called and is {hangs}"
                logger.error("%s", self._stuck)
                return
            if code:
                logger.warning("%s", library.failure("cuFileDriverClose", code).detail)

    def hangs(self, what: str) -> None:
        """Note that a call has not come back: the driver stays open below it."""
        self._hanging.append(what)

    def returned(self) -> None:
        """Note that one of those calls has come back after all."""
        self._hanging.pop()

    def mode(self, settings: DriverSettings) -> str:
        """Which way bytes go at best, as `GdsHandle.mode` says it."""
        if not settings.needs_cuda:
            return "host"
        return mode_of(self._properties, nvidia_fs(), self._p2p_flags)

    # --- steps ----------------------------------------------------------------------------

    def _check_process(self) -> None:
        if self._pid and self._pid != os.getpid():
            raise BackendUnavailableError(
                "cuFile cannot be used in this process",
                attempts=[("fork", "it was forked from one that had opened cuFile's driver")],
                remedy='start processes with multiprocessing.get_context("spawn"), or fork before '
                "the first GdsHandle",
            )

    def _open(self, settings: DriverSettings) -> None:
        preflight(settings.needs_cuda)
        if self._library is None:
            self._library = library.load()
        loaded = self._library
        if not settings.needs_cuda and loaded.version < library.OLDEST_FOR_HOST:
            raise _refused(
                f"{loaded.path} is version {loaded.version_text}; cuFile moves host memory from "
                "1.16 on",
                'pip install "nvidia-cufile>=1.16"',
            )
        self._pid = os.getpid()
        environment = self._set_parameters(loaded, settings)
        device = torch.cuda.current_device() if settings.needs_cuda else None
        try:
            with _environment(environment):
                code, cuda = call_limited(
                    lambda: _open_in_context(loaded, device), OPEN_LIMIT_S, "nvmeio-cufile-open"
                )
        except HangsError as hangs:
            self._stuck = f"cuFileDriverOpen was called and is {hangs}"
            raise _refused(self._stuck, "start a new process; `nvmeio report` may tell why") from (
                hangs
            )
        if code and code != library.ALREADY_OPEN:
            raise _refused(
                library.failure("cuFileDriverOpen", code, cuda).detail,
                "nvmeio.AioHandle moves CUDA tensors through host memory",
            )
        self._mine = not code
        self._settings = settings
        self._properties = loaded.properties()
        self._p2p_flags = loaded.p2p_flags()

    @staticmethod
    def _set_parameters(loaded: Library, settings: DriverSettings) -> dict[str, str]:
        """Apply the settings before the open, or by the environment during it."""
        # Without a path, cuFile writes cufile.log into the working directory. 1.20 accepts the
        # string parameter for it and does so anyway.
        environment = {"CUFILE_LOGFILE_PATH": log_path()}
        answers: dict[str, int | None] = {
            # Transfers are split here already; its own threads would split them again.
            "parallel_io": loaded.set_flag(library.PARALLEL_IO, False),
            "allow_compat_mode": loaded.set_flag(library.ALLOW_COMPAT_MODE, settings.allow_compat),
        }
        if answers["allow_compat_mode"] is None:  # the variable that 1.20 ignores is read by those
            environment["CUFILE_ALLOW_COMPAT_MODE"] = "true" if settings.allow_compat else "false"
        # Off by default. With nvidia-fs it would take that one's place.
        if settings.needs_cuda and not nvidia_fs() and P2PDMA_VARIABLE not in os.environ:
            answers["use_pci_p2pdma"] = loaded.set_flag(library.USE_PCIP2PDMA, True)
            if answers["use_pci_p2pdma"] is None:
                environment[P2PDMA_VARIABLE] = "true"
        if settings.max_direct_io_bytes is not None:
            answers["max_direct_io_size"] = loaded.set_max_direct_io(
                settings.max_direct_io_bytes // 1024
            )
        for name, code in answers.items():
            if code and code != library.ALREADY_OPEN:
                logger.info("cuFile does not take the parameter %s: status %d", name, code)
        return environment


@contextlib.contextmanager
def _environment(wanted: dict[str, str]) -> Iterator[None]:
    """Variables that are set for the length of a call, where the user has not set them."""
    added = [name for name in wanted if name not in os.environ]
    os.environ.update({name: wanted[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def _open_in_context(loaded: Library, device: int | None) -> tuple[int, int]:
    if device is not None:  # a new thread would be on device 0
        devices.enter(device)
    return loaded.open_driver()


def mode_of(properties: Properties | None, nvidia_fs: str, p2p_flags: int | None = None) -> str:
    """Which of "gds" (nvidia-fs), "p2p" (the kernel's own P2PDMA) and "compat" it is.

    Args:
        properties: The driver's own description.
        nvidia_fs: The kernel module's version, or "".
        p2p_flags: cuFile's flags for NVMe, from 1.16 on; None for a version that does not, whose
            status flags have a bit for it that is deprecated since.
    """
    if p2p_flags is not None and not p2p_flags & _P2PDMA:
        return "gds" if mode_of(properties, nvidia_fs) == "gds" else "compat"
    if properties is None:
        return "compat"
    if nvidia_fs and properties.nvfs_major and properties.status_flags:
        return "gds"
    if properties.status_flags & (_NVME | _NVME_P2P) and properties.feature_flags & _P2P_FEATURE:
        return "p2p"
    return "compat"


def log_path() -> str:
    """The file that cuFile logs to, unless ``CUFILE_LOGFILE_PATH`` names another file."""
    # A relative path in the variable is to be ignored (XDG Base Directory Specification).
    home = os.environ.get("XDG_STATE_HOME", "")
    try:
        base = Path(home) if os.path.isabs(home) else Path.home() / ".local/state"
        (base / "nvmeio").mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # a user without a home, as containers have them
        return os.devnull
    return str(base / "nvmeio/cufile.log")


def _refused(reason: str, remedy: str) -> BackendUnavailableError:
    return BackendUnavailableError(
        "cuFile's driver cannot be opened", attempts=[("cuFile", reason)], remedy=remedy
    )


DRIVER = Driver()


def _after_fork_in_child() -> None:
    DRIVER._lock = threading.Lock()  # may have been copied while it was held


os.register_at_fork(after_in_child=_after_fork_in_child)

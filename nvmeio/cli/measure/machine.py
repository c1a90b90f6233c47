"""The machine and its directories, as plain data.

Reading order: `gather` calls one function per subject below it; of cuFile `find_cufile` says where
it lies, and `look_into_cufile` tries it in a process of its own. Nothing here judges
(`report.find_problems` does) and nothing here prints. An unreadable value is None, never an error:
a report is most useful when things are missing. `require_devices` alone refuses: a GPU or cuFile
that was requested and is missing.
"""

from __future__ import annotations

import dataclasses
import gzip
import importlib.metadata
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import nvmeio
from nvmeio import _torch_private, engines, tuned
from nvmeio._bindings import kernel_aio
from nvmeio._files.descriptors import Descriptors
from nvmeio._files.system import find_mount
from nvmeio._memory import copy_on_write
from nvmeio._memory.system import text_of
from nvmeio.engines.base import Options, end
from nvmeio.engines.cufile import driver, library
from nvmeio.errors import BackendUnavailableError, counted
from nvmeio.files import DirectSupport, probe_direct
from nvmeio.tuned import Tuned

CAP_IPC_LOCK = 14  # linux/capability.h
PROBE_LIMIT_S = 30.0


@dataclass(frozen=True)
class Software:
    """Versions of the software below nvmeio; None for missing packages."""

    nvmeio: str
    kernel: str
    python: str
    torch: str
    torch_cuda: str | None
    cuda_available: bool
    cuda_detail: str
    uvloop: str | None
    torch_lacks: list[str]  # private names of torch, each with what happens without it


@dataclass(frozen=True)
class MemoryLimits:
    """The kernel's limits for buffers.

    Attributes:
        memlock_bytes: RLIMIT_MEMLOCK, None for unlimited.
        memlock_hard_bytes: The most that a process may raise it to, None for unlimited.
        memlock_exempt: CAP_IPC_LOCK is held, so that the limit does not apply.
        huge_pages: "always", "madvise" or "never"; None where the kernel does not say.
        protection: Which writes to write-protected memory are seen: "any", "user" (those of
            programs, not of system calls) or "none".
        protection_reason: Why not any, or "".
    """

    memlock_bytes: int | None
    memlock_hard_bytes: int | None
    memlock_exempt: bool
    huge_pages: str | None
    protection: str = "any"
    protection_reason: str = ""


@dataclass(frozen=True)
class Aio:
    """Linux AIO: how it is reached, and how many of the machine's events are taken.

    Attributes:
        library: "libaio", or "syscalls" where the kernel's calls are made directly; None where
            NVMEIO_LIBAIO names something that cannot be loaded.
        path: The file libaio was loaded from.
        reason: Why it is not libaio, or "".
        nr: Events taken on this machine (/proc/sys/fs/aio-nr).
        max_nr: Events there may be (/proc/sys/fs/aio-max-nr).
    """

    library: str | None
    path: str | None
    reason: str
    nr: int | None
    max_nr: int | None


@dataclass(frozen=True)
class EngineAttempt:
    """One engine, whether it works here, and how or why not."""

    name: str
    ok: bool
    detail: str


@dataclass(frozen=True)
class EngineChoice:
    """The engine that ``engine="auto"`` chooses.

    Attributes:
        auto: The engine's name, None where starting it failed.
        attempts: Every engine there is.
        reason: Why starting it failed, or "".
        remedy: The way to fix that, or "".
    """

    auto: str | None
    attempts: list[EngineAttempt]
    reason: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class Device:
    """A block device as /sys describes it.

    Attributes:
        name: The whole disk, "nvme0n1".
        model: The drive's own name, else its driver, else "".
        logical_block_size: Its logical block size in bytes.
        rotational: As reported; virtual disks often claim it.
    """

    name: str
    model: str
    logical_block_size: int | None
    rotational: bool | None


@dataclass(frozen=True)
class Directory:
    """One directory, its drive, and whether direct I/O works there.

    Attributes:
        tuned: The settings that `nvmeio tune --save` stored for its file system, or None.
        tuned_problem: Why that could not be read, or "".
    """

    path: str
    source: str | None
    mount_point: str | None
    file_system: str | None
    device: Device | None
    direct: DirectSupport
    free_bytes: int
    total_bytes: int
    tuned: Tuned | None = None
    tuned_problem: str = ""


@dataclass(frozen=True)
class Facts:
    """Everything that `nvmeio report` knows."""

    software: Software
    memory: MemoryLimits
    aio: Aio
    engine: EngineChoice
    cufile: CuFile
    directories: list[Directory]


def gather(directories: Sequence[Path]) -> Facts:
    """Looks at the machine and at each directory.

    Args:
        directories: They pass `check_directory`. A small file is made in each and removed.
    """
    return Facts(
        software=software(),
        memory=memory(),
        aio=aio(),
        engine=engine(),
        cufile=look_into_cufile(find_cufile(), directories),
        directories=[look_at(directory) for directory in directories],
    )


# The machine


def software() -> Software:
    """Versions; asks torch for CUDA without letting a broken driver fail or warn."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    if available:
        detail = torch.cuda.get_device_name()
    elif torch.version.cuda is None:
        detail = "torch is built without CUDA"
    else:
        detail = (str(caught[0].message).splitlines()[0] if caught else "") or "no CUDA device"
    return Software(
        **versions(),
        torch_cuda=torch.version.cuda,
        cuda_available=available,
        cuda_detail=detail,
        uvloop=_installed_version("uvloop"),
        torch_lacks=_torch_private.missing(),
    )


def versions() -> dict[str, str]:
    """The versions that figures depend on, for readers elsewhere."""
    return {
        "nvmeio": nvmeio.__version__,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def aio() -> Aio:
    """The way to the kernel's AIO calls, and the number of events left."""
    nr, max_nr = _read_int("/proc/sys/fs/aio-nr"), _read_int("/proc/sys/fs/aio-max-nr")
    try:
        found = kernel_aio()
    except BackendUnavailableError as error:
        return Aio(None, None, _one_line(error), nr, max_nr)
    return Aio(found.source, found.path, found.reason, nr, max_nr)


def _one_line(error: BackendUnavailableError) -> str:
    attempts = "; ".join(f"{name}: {reason}" for name, reason in error.attempts)
    return str(error).splitlines()[0] + (f" ({attempts})" if attempts else "")


def memory() -> MemoryLimits:
    """The limit on page-locked memory, the transparent huge page mode, and write protection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    effective = re.search(r"^CapEff:\s*([0-9a-f]+)", text_of("/proc/self/status"), re.MULTILINE)
    modes = text_of("/sys/kernel/mm/transparent_hugepage/enabled")
    chosen = re.search(r"\[(\w+)\]", modes)
    return MemoryLimits(
        memlock_bytes=None if soft == resource.RLIM_INFINITY else soft,
        memlock_hard_bytes=None if hard == resource.RLIM_INFINITY else hard,
        memlock_exempt=bool(effective and int(effective[1], 16) >> CAP_IPC_LOCK & 1),
        huge_pages=chosen[1] if chosen else None,
        protection=copy_on_write.support().kind,
        protection_reason=copy_on_write.support().reason,
    )


def engine() -> EngineChoice:
    """The engine that ``engine="auto"`` chooses here, found by starting it as a handle would."""
    attempts: list[EngineAttempt] = []
    try:
        attempts += (EngineAttempt(*attempt) for attempt in engines.describe())
        started = engines.start("auto", Options())
    except BackendUnavailableError as error:
        return EngineChoice(None, attempts, _one_line(error), error.remedy)
    end(started)
    return EngineChoice(started.name, attempts)


# Directories


def check_directory(directory: Path) -> None:
    """Makes sure that a directory can be looked at, by making a file in it.

    Before `look_at`, so that "cannot write here" is never mistaken for "no direct I/O here".

    Raises:
        OSError: It is missing, no directory, or not writable; the text says which.
    """
    if not directory.exists():
        raise FileNotFoundError(f"{directory} does not exist")
    if not directory.is_dir():
        raise NotADirectoryError(f"{directory} is not a directory; name the one it lies in")
    try:
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        raise PermissionError(
            f"cannot make a file in {directory} ({error.strerror}); "
            "the check makes a small one and removes it"
        ) from error


def look_at(directory: Path) -> Directory:
    """The drive of a directory, and whether direct I/O works there."""
    mount = find_mount(directory)
    usage = shutil.disk_usage(directory)
    stored, problem = None, ""
    try:
        stored = tuned.find(directory)
    except (ValueError, OSError) as error:
        problem = str(error)
    return Directory(
        path=str(directory.resolve()),
        source=mount.source if mount else None,
        mount_point=mount.mount_point if mount else None,
        file_system=mount.file_system if mount else None,
        device=find_device(directory, mount.source if mount else None),
        direct=probe_direct(directory),
        free_bytes=usage.free,
        total_bytes=usage.total,
        tuned=stored,
        tuned_problem=problem,
    )


def find_device(directory: Path, source: str | None) -> Device | None:
    """The disk below a directory; None for tmpfs, network file systems and overlays."""
    numbers = [directory.stat().st_dev]
    # btrfs and some others have a device number of their own and name the disk as their source.
    if source and source.startswith("/dev/") and Path(source).is_block_device():
        numbers.append(Path(source).stat().st_rdev)
    for number in numbers:
        node = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
        if node.exists():
            disk = node.resolve()
            if (disk / "partition").exists():
                disk = disk.parent
            rotational = _read_int(disk / "queue/rotational")
            return Device(
                name=disk.name,
                model=_model(disk),
                logical_block_size=_read_int(disk / "queue/logical_block_size"),
                rotational=None if rotational is None else bool(rotational),
            )
    return None


def _model(disk: Path) -> str:
    for fact in ("device/model", "dm/name", "md/level", "loop/backing_file"):
        if text := text_of(disk / fact):
            return f"{fact.partition('/')[0]} {text.strip()}".removeprefix("device ")
    driver = disk / "device/driver"
    return driver.resolve().name if driver.exists() else ""


# Reading what may not be there


def _read_int(path: str | Path) -> int | None:
    text = text_of(path).strip()
    return int(text) if text.isdecimal() else None


def _installed_version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


@dataclass(frozen=True)
class CuFile:
    """The path of libcufile, and the result of trying it.

    Attributes:
        path: The library, None where it was not found.
        source: Which place of the search order had it.
        reason: Why it was not found, or why it could not be used.
        usable: False where it was not found, and where opening its driver would hang.
        version: As "1.20"; None where it could not be loaded.
        driver: "opens", or why it does not; "" where it was not tried.
        mode: The value that `GdsHandle.mode` would have, or None.
        nvidia_fs: Version of the loaded kernel module, "" where it is not loaded.
        p2pdma: Whether the kernel was built with PCI P2PDMA; None where it does not say.
        udev: Whether udev's database is there, which files on a disk need.
        modules: Whether /proc/modules is there, without which the driver's open hangs.
        json: The cufile.json in force, or None for cuFile's own defaults.
        refused: Directories that were tried and where no file can be registered, and why.
    """

    path: str | None
    source: str
    reason: str
    usable: bool
    version: str | None = None
    driver: str = ""
    mode: str | None = None
    nvidia_fs: str = ""
    p2pdma: bool | None = None
    udev: bool = False
    modules: bool = False
    json: str | None = None
    refused: dict[str, str] = dataclasses.field(default_factory=dict)


def find_cufile() -> CuFile:
    """Finds libcufile where nvmeio would look for it, in that order, without loading it."""
    try:
        found = library.find_library()
    except BackendUnavailableError as missing:
        named = bool(os.environ.get(library.VARIABLE))
        why = str(missing).splitlines()[0] if named else missing.attempts[0][1]
        return CuFile(None, library.VARIABLE if named else "", why, False)
    subject, reason, _ = driver.preflight_problem()
    return CuFile(
        found.path, found.source, f"{subject} is {reason}" if subject else "", not subject
    )


def look_into_cufile(found: CuFile, directories: Sequence[Path] = ()) -> CuFile:
    """The same with everything else that is to be known; loads the library in a process.

    Args:
        found: The result of `find_cufile`.
        directories: A small file is made, registered and removed in each: the driver opens on
            machines where cuFile takes no file of a disk.
    """
    told = _probe(directories) if found.path else {}
    refusal = told.get("refusal", "")
    return dataclasses.replace(
        found,
        nvidia_fs=driver.nvidia_fs(),
        p2pdma=_p2pdma(),
        udev=driver.UDEV.is_dir(),
        modules=driver.MODULES.exists(),
        json=_json_in_force(),
        version=told.get("version"),
        driver=refusal or ("opens" if "mode" in told else ""),
        refused=told.get("refused", {}),
        mode=told.get("mode"),
        usable=found.usable and not refusal,
        reason=found.reason or refusal,
    )


def _print_what_it_says() -> None:
    """Opens the driver in this process, and prints as JSON what became of that."""
    told: dict[str, Any] = {}
    try:
        told["version"] = library.load().version_text
        settings = driver.DriverSettings(needs_cuda=torch.cuda.is_available())
        opened = driver.DRIVER.acquire(settings)
        told["mode"] = driver.DRIVER.mode(settings)
        told["refused"] = {place: why for place in sys.argv[1:] if (why := _refusal(opened, place))}
        driver.DRIVER.release()
    except BackendUnavailableError as no:
        reasons = [f"{name}: {reason}" for name, reason in no.attempts]
        told["refusal"] = "; ".join(reasons) or str(no).splitlines()[0]
    print(json.dumps(told))


def _refusal(opened: library.Library, directory: str) -> str:
    """Why cuFile takes no file in a directory, or ""."""
    with tempfile.NamedTemporaryFile(dir=directory, prefix=".nvmeio-probe-") as made:
        file = Descriptors.open(made.name, os.O_RDWR)
        try:
            opened.unregister_file(opened.register_file(file.any_fd()))
            return ""
        except library.CuFileFailure as refused:
            return refused.detail
        finally:
            file.close()


_CODE = f"from {__name__} import {_print_what_it_says.__name__} as main; main()"


def _probe(directories: Sequence[Path]) -> dict[str, Any]:
    root = str(Path(nvmeio.__file__).parent.parent)
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    try:
        done = subprocess.run(
            [sys.executable, "-c", _CODE, *map(str, directories)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PROBE_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"refusal": f"a process that tried it was not done after {PROBE_LIMIT_S:.0f} s"}
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return {"refusal": f"a process that tried it ended with {done.returncode}: {last}"}
    told: dict[str, Any] = json.loads(lines[-1])
    return told


def _json_in_force() -> str | None:
    named = os.environ.get("CUFILE_ENV_PATH_JSON", "/etc/cufile.json")
    return named if Path(named).is_file() else None  # not shell-expanded: ~ names no file


def _p2pdma() -> bool | None:
    try:
        text = gzip.decompress(Path("/proc/config.gz").read_bytes()).decode(errors="replace")
    except (OSError, EOFError):
        text = text_of(f"/boot/config-{platform.release()}")
    return "CONFIG_PCI_P2PDMA=y" in text.splitlines() if text else None


def require_devices(
    gpu: bool, gds: bool, devices: tuple[int, ...] = (0,), asked: str = "--gpu"
) -> None:
    """Makes sure that the requested devices are there.

    Args:
        gpu: A CUDA device is wanted.
        gds: GPUDirect Storage is.
        devices: Which CUDA devices.
        asked: The flag that wants the device, for the message.

    Raises:
        BackendUnavailableError: It is not; says what was tried, and how to fix it.
    """
    if gds:
        _require_cufile()
    if gpu or gds:
        _require_cuda(devices, asked)


def _as_typed(flag: str) -> str:
    """The flag as the user spelled it: with underscores, where that is how it stands there."""
    underscored = f"--{flag.removeprefix('--').replace('-', '_')}"
    return underscored if underscored in sys.argv else flag


def _require_cuda(devices: tuple[int, ...], asked: str) -> None:
    asked = _as_typed(asked)
    cuda = _cuda()
    if cuda:
        raise BackendUnavailableError(
            f"{asked}: there is no CUDA device to move tensors to and from",
            attempts=[("torch", cuda)],
            remedy=f"leave out {asked}, or install torch with CUDA on a machine with a GPU "
            "(https://pytorch.org/get-started)",
        )
    missing = [d for d in devices if d >= torch.cuda.device_count()]
    if missing:
        raise BackendUnavailableError(
            f"{asked}: there is no CUDA device {missing[0]}",
            attempts=[
                ("torch", f"{counted(torch.cuda.device_count(), 'CUDA device')}, counted from 0")
            ],
            remedy="name one of them: DIR:DEVICE",
        )


def _cuda() -> str:
    """Why there is no CUDA device, or ""."""
    here = software()
    return "" if here.cuda_available else f"{here.torch}: {here.cuda_detail}"


def _require_cufile() -> None:
    tried = [("torch", _cuda()), ("cuFile", find_cufile().reason)]
    if attempts := [(name, reason) for name, reason in tried if reason]:
        raise BackendUnavailableError(
            "--gds: GPUDirect Storage is not available",
            attempts=attempts,
            remedy="leave out --gds: --gpu alone goes through host memory; "
            "`nvmeio report` says what cuFile lacks",
        )

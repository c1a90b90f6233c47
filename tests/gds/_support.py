"""What the tests of cuFile share: the fake library's knobs, processes for the real one."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import nvmeio
from nvmeio.engines.cufile import driver, engine
from nvmeio.engines.cufile import library as library_module

PAGE = 4096
TASK = 16384
FAKES = Path(__file__).parents[1] / "fakes"
ROOT = Path(nvmeio.__file__).parent.parent
LIMIT_S = 300  # of a process that opens the real driver, which may hang


def compiled(source: str, directory: Path) -> Path:
    """A C file of fakes/ as a shared library."""
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    if compiler is None:
        pytest.skip(f"no C compiler (cc, gcc) to build {source} with")
    library = directory / source.replace(".c", ".so")
    flags = ("-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread")
    command = [compiler, *flags, "-o", library, FAKES / source, "-ldl"]
    subprocess.run(command, check=True, timeout=300)
    return library


class _Noted(ctypes.Structure):
    _fields_ = [(name, ctypes.c_long) for name in ("base", "size", "file_offset", "buffer_offset")]


class FakeCuFile:
    """The knobs and counters of one loaded copy; any name of the C file's globals will do."""

    def __init__(self, path: Path) -> None:
        object.__setattr__(self, "path", path)
        object.__setattr__(self, "_library", ctypes.CDLL(str(path)))

    def __getattr__(self, name: str) -> int:
        return int(ctypes.c_long.in_dll(self._library, name).value)

    def __setattr__(self, name: str, value: int) -> None:
        ctypes.c_long.in_dll(self._library, name).value = value

    @property
    def flags(self) -> dict[int, bool]:
        """Boolean parameters that were set."""
        raw = (ctypes.c_long * 32).in_dll(self._library, "flags_set")
        return {i: value == 2 for i, value in enumerate(raw) if value}

    @property
    def noted(self) -> list[tuple[int, int, int, int]]:
        """Transfers: base, size, file offset, buffer offset."""
        raw = (_Noted * 256).in_dll(self._library, "noted")
        return [(n.base, n.size, n.file_offset, n.buffer_offset) for n in raw[: self.calls]]


@contextlib.contextmanager
def fake_cufile(library: Path, folder: Path, patch: pytest.MonkeyPatch) -> Iterator[FakeCuFile]:
    """A libcufile of its own (a copied file has its own variables), and a driver.

    Args:
        library: fakes/fake_cufile.c, compiled.
        folder: Where the copy goes.
        patch: Undoes it.
    """
    path = Path(shutil.copy(library, folder / "fake_cufile.so"))
    modules = folder / "modules"
    modules.touch()
    patch.setenv("NVMEIO_CUFILE", str(path))
    patch.setattr(driver, "MODULES", modules)
    patch.setattr(driver, "NVIDIA_FS", folder / "no-nvidia-fs")
    patch.setattr(engine, "DRIVER", driver.Driver())
    made = FakeCuFile(path)
    yield made
    made.hold = made.open_hold = made.close_hold = 0


ON_NVME = 1 << 4  # of the driver's status, and of its features: P2PDMA


@functools.cache
def real_library() -> str:
    """libcufile's path; skips the test where none is installed that moves host memory."""
    try:
        path = library_module.find_library().path
        version = library_module.Library(path, "the test").version
    except nvmeio.BackendUnavailableError as missing:
        pytest.skip(f"libcufile is not installed (pip install nvidia-cufile): {missing}")
    if version < library_module.OLDEST_FOR_HOST:
        pytest.skip(f"{path} is version {version}, as torch for CUDA 13 brings it: 1.16 is needed")
    return path


def real(
    script: str, directory: Path, *, traps: Path | None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a script that may open the real driver, in a process that is killed in time.

    Where /proc/modules or udev's database is missing, `traps` stands in for them.
    """
    env = {**os.environ, "PYTHONPATH": str(ROOT), "NVMEIO_CUFILE": real_library()}
    if traps is not None:
        stand_in = directory / "stand-in"
        if not Path("/proc/modules").exists():
            stand_in.mkdir(exist_ok=True)
            (stand_in / "modules").touch()
            env |= {"LD_PRELOAD": str(traps), "NVMEIO_TEST_MODULES": str(stand_in / "modules")}
        if not Path("/run/udev/data").is_dir():
            device = os.stat(directory).st_dev
            entry = stand_in / f"udev/data/b{os.major(device)}:{os.minor(device)}"
            entry.parent.mkdir(parents=True, exist_ok=True)
            entry.write_text("I:1\nE:ID_FS_USAGE=filesystem\nE:ID_FS_TYPE=ext4\n")
            env |= {"LD_PRELOAD": str(traps), "NVMEIO_TEST_UDEV": str(stand_in / "udev")}
    env |= {"XDG_STATE_HOME": str(directory / "state"), "DIR": str(directory), **environment}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=directory,
        env=env,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def room(nbytes: int) -> torch.Tensor:
    return torch.full((nbytes,), 0xA5, dtype=torch.uint8)

"""Where libcufile is: candidates in the order in which they are tried. Nothing is loaded here."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from nvmeio.errors import BackendUnavailableError

VARIABLE = "NVMEIO_CUFILE"
SONAME = "libcufile.so.0"
PLACES = "nvidia packages, $CUDA_HOME, $CUDA_PATH, the linker's directories, /usr/local/cuda"
INSTALL = "pip install nvidia-cufile (CUDA 13) or nvidia-cufile-cu12 (CUDA 12)"


class FoundLibrary(NamedTuple):
    """A library: the file, and which place of the search order had it."""

    path: str
    source: str


def find() -> FoundLibrary:
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
                remedy=f"name a {SONAME}, or unset {VARIABLE}",
            )
        return FoundLibrary(named, VARIABLE)
    for found in candidates():
        return found
    raise BackendUnavailableError(
        "libcufile was not found",
        attempts=[("cuFile", f"not in {PLACES}")],
        remedy=INSTALL,
    )


def candidates() -> Iterator[FoundLibrary]:
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
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            lines = maps.read().splitlines()
    except OSError:
        return
    for line in lines:
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

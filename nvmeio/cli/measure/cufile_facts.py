"""What of cuFile there is on this machine: found without loading it, then tried in a process.

The process matters: opening cuFile's driver hangs on some machines, and what hangs there is ended.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

import nvmeio
from nvmeio.engines.cufile import driver, library
from nvmeio.errors import BackendUnavailableError

PROBE_LIMIT_S = 30.0


@dataclass(frozen=True)
class CuFile:
    """Where libcufile lies, and what became of trying it.

    Attributes:
        path: The library, None where it was not found.
        source: Which place of the search order had it.
        reason: Why it was not found, or why it could not be used.
        usable: False where it was not found, and where opening its driver would hang.
        version: As "1.20"; None where it could not be loaded.
        driver: "opens", or why it does not; "" where it was not tried.
        mode: What `GdsHandle.mode` would be, or None.
        nvidia_fs: Version of the loaded kernel module, "" where it is not loaded.
        p2pdma: Whether the kernel was built with PCI P2PDMA; None where it does not say.
        udev: Whether udev's database is there, which files on a disk need.
        modules: Whether /proc/modules is there, without which the driver's open hangs.
        json: The cufile.json in force, or None for cuFile's own defaults.
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


def look_into_cufile(found: CuFile) -> CuFile:
    """The same with everything else that is to be known; loads the library in a process."""
    facts = dataclasses.replace(
        found,
        nvidia_fs=driver.nvidia_fs(),
        p2pdma=_p2pdma(),
        udev=driver.udev_database(),
        modules=driver.MODULES.exists(),
        json=_json_in_force(),
    )
    if found.path is None:
        return facts
    told = _probe()
    refusal = told.get("refusal", "")
    return dataclasses.replace(
        facts,
        version=told.get("version"),
        driver=refusal or ("opens" if "mode" in told else ""),
        mode=told.get("mode"),
        usable=found.usable and not refusal,
        reason=found.reason or refusal,
    )


def _print_what_it_says() -> None:
    """Opens the driver in this process, and prints as JSON what became of that."""
    told = {}
    try:
        told["version"] = library.load().version_text
        settings = driver.DriverSettings(needs_cuda=torch.cuda.is_available())
        driver.DRIVER.acquire(settings)
        told["mode"] = driver.DRIVER.mode(settings)
        driver.DRIVER.release()
    except BackendUnavailableError as no:
        reasons = [f"{name}: {reason}" for name, reason in no.attempts]
        told["refusal"] = "; ".join(reasons) or str(no).splitlines()[0]
    print(json.dumps(told))


_CODE = f"from {__name__} import {_print_what_it_says.__name__} as main; main()"


def _probe() -> dict[str, str]:
    root = str(Path(nvmeio.__file__).parent.parent)
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    try:
        done = subprocess.run(
            [sys.executable, "-c", _CODE],
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
    told: dict[str, str] = json.loads(lines[-1])
    return told


def _json_in_force() -> str | None:
    named = os.environ.get("CUFILE_ENV_PATH_JSON", "/etc/cufile.json")
    return named if Path(named).is_file() else None  # not shell-expanded: ~ names no file


def _p2pdma() -> bool | None:
    text = ""
    try:
        text = gzip.decompress(Path("/proc/config.gz").read_bytes()).decode(errors="replace")
    except (OSError, EOFError):
        try:
            text = Path(f"/boot/config-{platform.release()}").read_text(errors="replace")
        except OSError:
            return None
    return "CONFIG_PCI_P2PDMA=y" in text.splitlines()

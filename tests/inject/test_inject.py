"""The kernel refuses, delays, or takes nothing: right bytes or a clear error, nothing lasts.

strace is attached to a process that has everything imported, and answers in the kernel's place at
random calls; `_runs` makes all public operations under that. NVMEIO_INJECT_SEED repeats a run.
"""

from __future__ import annotations

import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from programs import Program

import nvmeio

pytestmark = pytest.mark.slow

PROCESSES, ROUNDS = 24, 4  # of 22 operations: some 2,100 runs
PROCESS_LIMIT_S = 600

# What the kernel may answer, and how often (every so many calls of a thread) it does.
ANSWERS: dict[str, tuple[list[str], int]] = {
    "io_submit": (["EAGAIN", "EINTR", "EIO", "ENOMEM", "EINVAL", "retval=0"], 12),
    "io_getevents": (["EINTR"], 12),
    "io_setup": (["EAGAIN", "ENOMEM"], 4),
    "openat": (["EMFILE", "ENFILE", "EACCES", "EIO", "ENOSPC", "EINTR", "ENOMEM"], 40),
    "fallocate": (["ENOSPC", "EINTR", "EOPNOTSUPP", "EIO", "EDQUOT"], 6),
    "statx": (["ENOSYS", "EIO", "EACCES", "ENOMEM"], 12),
    "eventfd2": (["EMFILE", "ENOMEM"], 5),
    "mmap": (["ENOMEM"], 40),
    "mlock": (["EPERM", "ENOMEM", "EAGAIN"], 4),
    "madvise": (["EINVAL", "ENOMEM", "EAGAIN"], 6),
    "fdatasync": (["EIO", "ENOSPC", "EDQUOT"], 5),
    "fsync": (["EIO", "ENOSPC"], 5),
    "rename": (["EIO", "ENOSPC", "EACCES", "EXDEV"], 4),
    "flock": (["EINTR", "ENOLCK", "EAGAIN"], 5),
    "pwrite64": (["EIO", "ENOSPC", "EINTR"], 8),
    "pwritev": (["EIO", "ENOSPC", "EINTR"], 8),
    "pread64": (["EIO", "EINTR"], 20),
    "ftruncate": (["EIO", "ENOSPC", "EINTR"], 5),
    "unlink": (["EIO", "EACCES"], 6),
}


@pytest.fixture(scope="session")
def strace() -> str:
    """The command, where it is installed and may be attached."""
    path = shutil.which("strace")
    if path is None:
        pytest.skip("strace is not installed")
    probe = subprocess.run(
        [path, "-f", "-o", "/dev/null", "-e", "inject=flock:error=EIO:when=1", "true"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    if probe.returncode:
        pytest.skip(f"strace cannot trace here: {probe.stderr.strip()}")
    return path


def injections(chance: random.Random) -> list[str]:
    """Some answers to one to three system calls."""
    found = []
    for call in chance.sample(list(ANSWERS), chance.randint(1, 3)):
        answers, every = ANSWERS[call]
        answer = chance.choice([*answers, "delay_enter=3000"])
        what = answer if "=" in answer else f"error={answer}"
        first, step = chance.randint(1, every), chance.randint(2, 2 * every)
        found.append(f"{call}:{what}:when={first}+{step}")
    return found


class Line:
    """Reads lines of a process that may die or hang."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def read(self, timeout_s: float) -> str:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        return self._process.stdout.readline().strip() if ready else "(nothing)"


def run(strace: str, folder: Path, seed: int, rounds: int) -> dict[str, Any]:
    """One process under random injections."""
    chosen = injections(random.Random(seed))
    told = f"NVMEIO_INJECT_SEED={seed}: {' '.join(chosen)}"
    root, tests = Path(nvmeio.__file__).parents[1], Path(__file__).parents[1]
    errors = folder / "errors"
    with open(errors, "w") as stderr:
        process = Program[str](
            [sys.executable, "-m", "inject._runs", str(folder), str(rounds)],
            env={**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{tests}", "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
    assert process.stdin is not None and process.stdout is not None
    line = Line(process)
    try:
        assert line.read(PROCESS_LIMIT_S) == "ready", errors.read_text()[-4000:]
        calls = ",".join(dict.fromkeys(each.split(":")[0] for each in chosen))
        options = ["-f", "-p", process.pid, "-o", folder / "strace", "-e", "signal=none"]
        options += ["-e", f"trace={calls}"]
        for each in chosen:
            options += ["-e", f"inject={each}"]
        tracer = subprocess.Popen(
            [strace, *map(str, options)],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        assert tracer.stderr is not None
        try:
            attached = tracer.stderr.readline()
            if "attached" not in attached:
                pytest.skip(f"strace cannot be attached here: {attached.strip()}")
            process.stdin.write("go\n")
            process.stdin.flush()
            ended = line.read(PROCESS_LIMIT_S)
        finally:
            tracer.send_signal(signal.SIGINT)  # it detaches
            tracer.communicate(timeout=300)
        if ended != "done":
            pytest.fail(f"{told}: hangs or died ({ended})\n{_seen(process, errors)}")
        process.stdin.write("calm\n")
        process.stdin.flush()
        last = line.read(PROCESS_LIMIT_S)
        if not last.startswith("{"):
            pytest.fail(f"{told}: hangs or died afterwards ({last})\n{_seen(process, errors)}")
        report: dict[str, Any] = json.loads(last)
        process.wait(300)
    finally:
        process.kill()
        process.communicate()
    injected = (folder / "strace").read_text().count("(INJECTED)")
    injected += (folder / "strace").read_text().count("(DELAYED)")
    print(
        f"{told}\n{injected} injected, {report['right']} of {report['runs']} right,",
        report["errors"],
    )
    report["injected"] = injected
    faults = "\n".join(report["faults"])
    assert not report["faults"], f"{told}\n{faults}"
    return report


def _seen(process: subprocess.Popen[str], errors: Path) -> str:
    deadline = time.monotonic() + 5
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    return f"status {process.poll()}\n{errors.read_text()[-10000:]}"


def seed_of(default: int | None = None) -> int:
    given = os.environ.get("NVMEIO_INJECT_SEED")
    if given:
        return int(given)
    return default if default is not None else random.SystemRandom().randrange(1 << 32)


def test_right_bytes_or_a_clear_error(strace: str, tmp_path: Path) -> None:
    run(strace, tmp_path, seed_of(1), rounds=1)


@pytest.mark.stress
@pytest.mark.timeout(2 * PROCESS_LIMIT_S)
@pytest.mark.parametrize("number", range(PROCESSES))
def test_right_bytes_or_a_clear_error_two_thousand_times(
    number: int, strace: str, tmp_path: Path
) -> None:
    report = run(strace, tmp_path, seed_of(), ROUNDS)
    assert report["runs"] >= 2000 // PROCESSES

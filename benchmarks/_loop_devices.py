"""Drives of a known rate: loop devices over files, with ext4, limited by a control group.

Needs root. Everything is undone in the end. The drive below must be faster than all together.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

MB = 1_000_000


def exit_on_sigterm() -> None:
    """Have SIGTERM end the program as an exception does, so that everything is undone."""

    def end(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # another one would cut the undoing short
        sys.exit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Signals that end the program come after the body, which makes something to be undone."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Unavailable(SystemExit):
    """The machine cannot do this. Ends the program with that message, unless somebody goes on."""


def run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except FileNotFoundError:
        raise Unavailable(f"{command[0]} is not installed") from None
    if done.returncode:
        raise Unavailable(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout.strip()


def need_root() -> None:
    if os.geteuid():
        sys.exit("loop devices and control groups need root")
    exit_on_sigterm()


@contextlib.contextmanager
def loop_device(image: Path, nbytes: int) -> Iterator[str]:
    """A loop device over a new file."""
    with contextlib.ExitStack() as undo:
        undo.callback(image.unlink, missing_ok=True)
        run("fallocate", "-l", str(nbytes), str(image))
        with uninterrupted():
            device = run("losetup", "--find", "--show", "--direct-io=on", str(image))
            undo.callback(run, "losetup", "--detach", device)
        yield device


@contextlib.contextmanager
def mounted(place: Path, *command: str) -> Iterator[Path]:
    """A new directory, on which `command`, which is given its name, mounts something."""
    with contextlib.ExitStack() as undo:
        with uninterrupted():
            place.mkdir()
            undo.callback(place.rmdir)
            run(*command, str(place))
            undo.callback(run, "umount", str(place))
        yield place


@contextlib.contextmanager
def drive(directory: Path, number: int, nbytes: int) -> Iterator[tuple[Path, str]]:
    """A mounted loop device with ext4; its directory and its number."""
    with loop_device(directory / f"image{number}", nbytes) as device:
        run("mkfs.ext4", "-q", "-E", "lazy_itable_init=0,lazy_journal_init=0", device)
        with mounted(directory / f"drive{number}", "mount", device) as place:
            info = os.stat(device).st_rdev
            yield place, f"{os.major(info)}:{os.minor(info)}"


@contextlib.contextmanager
def limited(devices: Sequence[str], rate: int) -> Iterator[None]:
    """This process may move so many bytes a second to and from each device."""
    name = f"nvmeio-bench-{os.getpid()}"
    first = Path("/sys/fs/cgroup/blkio")
    if (first / "blkio.throttle.read_bps_device").exists():
        group = first / name
        limits = [
            (f"blkio.throttle.{kind}_bps_device", f"{device} {rate}")
            for kind in ("read", "write")
            for device in devices
        ]
        above = first
    else:
        above = Path("/sys/fs/cgroup")
        if "io" not in (above / "cgroup.controllers").read_text().split():
            sys.exit("no control group limits the rate of devices here (no io controller)")
        (above / "cgroup.subtree_control").write_text("+io")
        group = above / name
        limits = [("io.max", f"{device} rbps={rate} wbps={rate}") for device in devices]
    group.mkdir()
    try:
        for file, text in limits:
            (group / file).write_text(text)
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield
    finally:
        (above / "cgroup.procs").write_text(str(os.getpid()))
        for _ in range(100):  # the last of its threads may still be on its way out
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.1)

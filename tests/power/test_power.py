"""A loss of power at random moments: what was said to be durable is there, and nothing is damaged.

A workload runs on a file system on a drive that logs every write and flush (`_drive`). From the log
come images of what the drive may hold after a loss of power: everything that was flushed, and of
the rest all, none, half, or half with torn writes. Each is mounted, and checked against what had
been promised by then. `make power` runs this; it needs root, FUSE and loop devices.
NVMEIO_POWER_IMAGES is how many images are made for each workload and file system.
"""

from __future__ import annotations

import bisect
import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from power import _drive
from power._drive import LOSSES, MKFS, Drive, Unavailable

import nvmeio
from nvmeio._memory import copy_on_write

IMAGES = int(os.environ.get("NVMEIO_POWER_IMAGES", "24"))
# How much longer the second rank's drive takes to flush.
SLOW_S = 0.6
MOST_FAILURES = 4

pytestmark = [
    pytest.mark.stress,
    pytest.mark.root,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(os.geteuid() != 0, reason="mounting takes root"),
    pytest.mark.skipif(not os.path.exists("/dev/fuse"), reason="there is no /dev/fuse"),
    pytest.mark.skipif(not os.path.exists("/dev/loop-control"), reason="no loop devices"),
]

WORKLOADS = (
    "save",
    "save-large",
    "writer",
    "safetensors",
    "checkpointer",
    "protected",
    "dcp",
    "optimizer",
    "snapshot",
    "blocks",
    "ranks",
    "drives",
    "striped-adamax",
    "striped-radam",
)
# How much longer each drive takes to flush, of those that have several.
DELAYS = {
    "ranks": [0.0, SLOW_S],
    "drives": [0.0, SLOW_S],
    "striped-adamax": [0.0, 0.1, 0.0],
    "striped-radam": [0.1, 0.0],
}


@pytest.fixture
def folder() -> Iterator[Path]:
    """In memory, for the drive must not depend on a drive."""
    made = Path(tempfile.mkdtemp(prefix="nvmeio-power-", dir="/dev/shm"))
    yield made
    shutil.rmtree(made)


def environment() -> dict[str, str]:
    root, tests = Path(nvmeio.__file__).parents[1], Path(__file__).parents[1]
    return {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{tests}", "OMP_NUM_THREADS": "1"}


class Run:
    """A workload on drives that log; afterwards the logs, and the promises."""

    def __init__(self, folder: Path, kind: str, name: str, delays: list[float]) -> None:
        self.folder, self.kind, self.name = folder, kind, name
        self.drives = []
        for number, delay_s in enumerate(delays):
            place = folder / str(number)
            place.mkdir()
            self.drives.append(Drive(place, MKFS[kind][1], delay_s))
        self.began_ns = 0
        self.promises: list[tuple[int, int]] = []

    def work(self) -> None:
        with contextlib.ExitStack() as stack:
            mounts = []
            for drive in self.drives:
                device = stack.enter_context(drive.running())
                try:
                    _drive.run(*MKFS[self.kind][0], device)
                    mount = _drive.mounted(self.kind, device, drive.folder / "mount")
                    mounts.append(stack.enter_context(mount))
                except subprocess.CalledProcessError as failed:
                    raise Unavailable(f"no {self.kind} here: {failed.stderr.strip()}") from None
            os.sync()
            self.began_ns = time.monotonic_ns()
            told = self.folder / "promises"
            command = [sys.executable, "-m", "power._workloads", "work", self.name, told, *mounts]
            ran = subprocess.run(
                list(map(str, command)),
                env=environment(),
                capture_output=True,
                text=True,
                timeout=600,
            )
            self.ended_ns = time.monotonic_ns()
            assert ran.returncode == 0, ran.stderr[:8000]  # the first of the ranks' errors counts
        lines = [line.split() for line in told.read_text().splitlines()]
        self.promises = sorted((int(when), int(number)) for when, _, number in lines)
        self.records = [drive.records() for drive in self.drives]
        self.times = [[record.time_ns for record in records] for records in self.records]

    def promised(self, when_ns: int) -> int | None:
        """The last number that was durable by then."""
        made = [number for time_ns, number in self.promises if time_ns < when_ns]
        return max(made) if made else None

    def moments(self, count: int, chance: random.Random) -> list[int]:
        """Times in ascending order, each that of a record: there the images change."""
        all_times = sorted(t for times in self.times for t in times)
        first = bisect.bisect(all_times, self.began_ns)
        last = bisect.bisect(all_times, self.ended_ns)
        picked = (chance.randrange(first, last) for _ in range(count))
        return sorted(all_times[at] for at in picked)


class Checker:
    """A process that checks images, with everything imported."""

    def __init__(self, name: str, errors: Path) -> None:
        self._errors = open(errors, "w")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "power._workloads", "check", name],
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def check(self, **asked: Any) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        found: dict[str, Any] = json.loads(self._process.stdout.readline())
        return found

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()
        self._errors.close()


def images(run: Run, count: int, seed: int) -> list[str]:
    """Make them and check them; what was wrong."""
    chance = random.Random(seed)
    checker = Checker(run.name, run.folder / "errors")
    wrong = []
    try:
        for number, when_ns in enumerate(run.moments(count, chance)):
            # Each drive loses what it likes: after 4 ** drives images all combinations were there.
            losses = [
                LOSSES[number // len(LOSSES) ** index % len(LOSSES)]
                for index in range(len(run.drives))
            ]
            with contextlib.ExitStack() as stack:
                mounts = []
                for index, drive in enumerate(run.drives):
                    image = drive.folder / "cut"
                    at = bisect.bisect_left(run.times[index], when_ns)
                    own_seed = seed + number * len(run.drives) + index
                    drive.cut(run.records[index], at, losses[index], own_seed, image)
                    stack.callback(image.unlink)
                    mount = _drive.mounted_image(run.kind, image, drive.folder / "cut-mount")
                    mounts.append(str(stack.enter_context(mount)))
                promised = run.promised(when_ns)
                found = checker.check(
                    folders=mounts, promised=promised, results=str(run.folder / "results")
                )
            for each in found["wrong"]:
                wrong.append(f"image {number}, {losses}, promised {promised}: {each}")
            if len(wrong) >= MOST_FAILURES:
                break
    finally:
        checker.close()
    return wrong


def seed_of(request: pytest.FixtureRequest) -> int:
    given = os.environ.get("NVMEIO_POWER_SEED")
    seed = int(given) if given else random.SystemRandom().randrange(1 << 32)
    print(f"NVMEIO_POWER_SEED={seed}")
    return seed


def worked(folder: Path, kind: str, name: str) -> Run:
    run = Run(folder, kind, name, DELAYS.get(name, [0.0]))
    try:
        run.work()
    except Unavailable as reason:
        pytest.skip(str(reason))
    return run


@pytest.mark.parametrize("kind", MKFS)
@pytest.mark.parametrize("name", WORKLOADS)
def test_what_was_durable_is_there(
    name: str, kind: str, folder: Path, request: pytest.FixtureRequest
) -> None:
    if name == "protected" and copy_on_write.support().kind == "none":
        pytest.skip(f"no write protection of memory: {copy_on_write.support().reason}")
    run = worked(folder, kind, name)
    assert len(run.promises) > 2
    seed = seed_of(request)
    wrong = images(run, IMAGES, seed)
    print(f"{IMAGES} images of {name} on {kind}, {len(wrong)} wrong")
    assert not wrong, f"NVMEIO_POWER_SEED={seed}\n" + "\n".join(wrong)


@pytest.mark.parametrize("kind", MKFS)
def test_a_missing_flush_is_caught(kind: str, folder: Path, request: pytest.FixtureRequest) -> None:
    """The rig itself: with fsync and fdatasync stubbed out a promise is broken."""
    assert images(worked(folder, kind, "unsynchronised"), IMAGES, seed_of(request))

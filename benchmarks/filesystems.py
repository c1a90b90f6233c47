"""File systems one by one: is I/O direct, does a save survive, what does a full disk do.

    sudo python benchmarks/filesystems.py --dir /mnt/nvme
    sudo python benchmarks/filesystems.py --dir /mnt/nvme --only overlay,tmpfs --json

Needs root: file systems of 512 MiB are made in files in `--dir`, on loop devices, and mounted.
Everything is undone in the end. One that the machine lacks is left out, and the reason is printed.
The rows of "What you have, what happens" in docs/filesystems.md come from here.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from _loop_devices import Unavailable, loop_device, mounted, need_root, run

import nvmeio
from nvmeio.cli.measure import disk

IMAGE_BYTES = 512 << 20
STATE_BYTES = 64 << 20  # above what `nvmeio.save` writes through the page cache


@dataclass(frozen=True)
class Row:
    """The findings in one directory.

    Attributes:
        place: The name of the row.
        direct: Alignment in the file and in memory, or why there is no direct I/O.
        cached: Share of a file that is in the page cache after it was written and read, 0 to 1.
        saves: Whether the last of ten checkpoints has the right values.
        full: The outcome of a save that has no room.
        second: The outcome of a second Checkpointer of the same directory.
    """

    place: str
    direct: str
    cached: float
    saves: str
    full: str
    second: str


@contextlib.contextmanager
def made(directory: Path, mkfs: list[str], options: str = "defaults") -> Iterator[Path]:
    """A file system on a loop device of its own."""
    with loop_device(directory / "image", IMAGE_BYTES) as device:
        run(*mkfs, device)
        with mounted(directory / "mounted", "mount", "-o", options, device) as place:
            yield place


@contextlib.contextmanager
def overlay(directory: Path) -> Iterator[Path]:
    """As a container has it: its upper layer on ext4."""
    with made(directory, ["mkfs.ext4", "-q"]) as below:
        for name in ("lower", "upper", "work"):
            (below / name).mkdir()
        layers = f"lowerdir={below}/lower,upperdir={below}/upper,workdir={below}/work"
        command = ("mount", "-t", "overlay", "overlay", "-o", layers)
        with mounted(directory / "merged", *command) as place:
            yield place


@contextlib.contextmanager
def fuse(directory: Path) -> Iterator[Path]:
    """A directory of ext4 seen through bindfs, a file system in user space."""
    with contextlib.ExitStack() as stack:
        below = stack.enter_context(made(directory, ["mkfs.ext4", "-q"]))
        yield stack.enter_context(mounted(directory / "seen", "bindfs", str(below)))


@contextlib.contextmanager
def striped(directory: Path) -> Iterator[Path]:
    """RAID 0 over two loop devices."""
    with contextlib.ExitStack() as stack:
        devices = []
        for number in range(2):
            image = directory / f"image{number}"
            devices.append(stack.enter_context(loop_device(image, IMAGE_BYTES)))
        create = ("mdadm", "--create", "/dev/md/nvmeio", "--run", "--level=0", "--raid-devices=2")
        run(*create, *devices)
        stack.callback(run, "mdadm", "--stop", "/dev/md/nvmeio")
        run("mkfs.ext4", "-q", "/dev/md/nvmeio")
        yield stack.enter_context(mounted(directory / "striped", "mount", "/dev/md/nvmeio"))


@contextlib.contextmanager
def encrypted(directory: Path) -> Iterator[Path]:
    """LUKS over a loop device."""
    with contextlib.ExitStack() as stack:
        device = stack.enter_context(loop_device(directory / "image", IMAGE_BYTES))
        key = directory / "key"
        key.write_bytes(os.urandom(64))
        run("cryptsetup", "luksFormat", "--batch-mode", device, str(key))
        run("cryptsetup", "open", "--key-file", str(key), device, "nvmeio-bench")
        stack.callback(run, "cryptsetup", "close", "nvmeio-bench")
        run("mkfs.ext4", "-q", "/dev/mapper/nvmeio-bench")
        mount = ("mount", "/dev/mapper/nvmeio-bench")
        yield stack.enter_context(mounted(directory / "opened", *mount))


Maker = Callable[[Path], contextlib.AbstractContextManager[Path]]
PLACES: dict[str, Maker] = {
    "ext4": lambda d: made(d, ["mkfs.ext4", "-q"]),
    "ext4 data=journal": lambda d: made(d, ["mkfs.ext4", "-q"], "data=journal"),
    "xfs": lambda d: made(d, ["mkfs.xfs", "-q"]),
    "btrfs": lambda d: made(d, ["mkfs.btrfs", "-q"]),
    "btrfs nodatacow": lambda d: made(d, ["mkfs.btrfs", "-q"], "nodatacow"),
    "btrfs compress": lambda d: made(d, ["mkfs.btrfs", "-q"], "compress-force=zstd"),
    "overlay": overlay,
    "tmpfs": lambda d: mounted(
        d / "mounted", "mount", "-t", "tmpfs", "-o", f"size={IMAGE_BYTES}", "tmpfs"
    ),
    "FUSE": fuse,
    "RAID 0": striped,
    "LUKS": encrypted,
}


def look_at(name: str, place: Path) -> Row:
    return Row(name, direct(place), cached(place), saves(place), full(place), second(place))


def direct(place: Path) -> str:
    command = [sys.executable, "-m", "nvmeio", "report", "--json", "--dir", str(place)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    found = json.loads(done.stdout)["directories"][0]["direct"]
    if not found["supported"]:
        return f"no: {found['reason']}"
    return f"{found['offset_alignment']} B, {found['memory_alignment']} B"


def cached(place: Path) -> float:
    path = place / "cached"
    written = nvmeio.empty_aligned(STATE_BYTES, dtype=torch.uint8)
    written.copy_(torch.randint(0, 256, written.shape, dtype=torch.uint8))
    seen = nvmeio.empty_aligned(STATE_BYTES, dtype=torch.uint8)
    with nvmeio.AioHandle() as handle:
        handle.sync_pwrite(written, path)
        handle.sync_pread(seen, path)
    if not torch.equal(written, seen):
        raise SystemExit(f"{path}: what was read is not what was written")
    share = disk.cached_fraction(path)
    if share is None:
        raise SystemExit(f"{path}: the kernel does not say what of it is in the page cache")
    path.unlink()
    return share


def saves(place: Path) -> str:
    """Ten checkpoints, of which three are kept and whose files are used again."""
    directory = place / "checkpoints"
    state = {"weights": torch.zeros(STATE_BYTES // 4)}
    with nvmeio.Checkpointer(directory, keep=3) as checkpoints:
        for step in range(10):
            state["weights"].fill_(step)
            checkpoints.save_sync(state, step)
        checkpoints.wait_sync()
    loaded = nvmeio.load(directory / "latest")
    ok = bool((loaded["weights"] == 9).all())
    shutil.rmtree(directory)
    return "right" if ok else "WRONG"


def full(place: Path) -> str:
    """A save larger than what is free, over a file that is there."""
    path = place / "state.pt"
    nvmeio.save({"old": torch.ones(4)}, path)
    filler = place / "filler"
    block = os.urandom(1 << 20)
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:  # until nothing is free; root may take what is reserved, too
            file.write(block)
    with filler.open("rb+") as file:
        file.truncate(max(0, filler.stat().st_size - STATE_BYTES // 2))
        os.fsync(file.fileno())
    before = set(os.listdir(place))
    try:
        nvmeio.save({"new": torch.randn(STATE_BYTES // 4)}, path)
        said = "saved"
    except OSError as failed:
        said = os.strerror(failed.errno or 0)
    kept = "old" in nvmeio.load(path)
    left_over = set(os.listdir(place)) - before
    filler.unlink()
    path.unlink()
    return f"{said}; the old file {'stays' if kept else 'IS GONE'}" + (
        f"; LEFT: {sorted(left_over)}" if left_over else ""
    )


def second(place: Path) -> str:
    directory = place / "locked"
    program = f"import nvmeio; nvmeio.Checkpointer({str(directory)!r})"
    with nvmeio.Checkpointer(directory):
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    shutil.rmtree(directory)
    if done.returncode and "EBUSY" not in done.stderr:
        raise SystemExit(f"{directory}: a second Checkpointer failed otherwise: {done.stderr}")
    return "refused" if done.returncode else "TAKEN"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, default=Path(), help="where the images lie")
    parser.add_argument("--only", help="names of rows, separated by commas")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    need_root()
    names = [n.strip() for n in options.only.split(",")] if options.only else list(PLACES)
    if unknown := [n for n in names if n not in PLACES]:
        parser.error(f"unknown: {', '.join(unknown)}; known are {', '.join(PLACES)}")
    for name in names:
        with tempfile.TemporaryDirectory(dir=options.dir, prefix="nvmeio-") as directory:
            try:
                with PLACES[name](Path(directory)) as place:
                    row = look_at(name, place)
            except Unavailable as reason:
                print(
                    json.dumps({"place": name, "untried": str(reason)})
                    if options.json
                    else f"{name:20} not tried: {reason}",
                    flush=True,
                )
                continue
        if options.json:
            print(json.dumps(asdict(row)), flush=True)
        else:
            print(
                f"{row.place:20} direct: {row.direct}; {row.cached:.0%} cached; saves "
                f"{row.saves}; full: {row.full}; second writer {row.second}",
                flush=True,
            )


if __name__ == "__main__":
    main()

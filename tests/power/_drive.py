"""A drive that logs what it is told: a file of a small FUSE server, under a loop device.

python _drive.py MOUNT_FILE IMAGE LOG FLUSH_DELAY_S

serves MOUNT_FILE (a regular file that is mounted upon) out of IMAGE. LOG gets a record for each
write and each flush, in the order in which the drive answered them: a loss of power at any place of
it leaves every write that came before the last flush, and of those behind it whatever it likes. The
kernel's FUSE protocol is spoken directly (linux/fuse.h): one file, a dozen requests.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import random
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

# Writes are torn between these. A drive promises 512 bytes; but file systems take a block of their
# own to be atomic (ext4 cannot be mounted with half of a superblock, whatever we do).
ATOMIC_BYTES = 4096
_RECORD = struct.Struct("<qqq")  # time_ns, offset, nbytes; the bytes follow
_FLUSH = -1

# linux/fuse.h
_IN = struct.Struct("<IIQQIIIHH")
_OUT = struct.Struct("<IiQ")
_FORGET, _GETATTR, _SETATTR, _OPEN, _READ, _WRITE, _STATFS = 2, 3, 4, 14, 15, 16, 17
_RELEASE, _FSYNC, _FLUSH_FD, _INIT, _INTERRUPT, _DESTROY = 18, 20, 25, 26, 36, 38
_BATCH_FORGET = 42
_FLAGS = 1 << 5 | 1 << 22  # FUSE_BIG_WRITES, FUSE_MAX_PAGES: requests of up to 1 MiB
_MAX_WRITE = 1 << 20


def serve(mount_file: str, image: str, log: str, delay_s: float) -> None:
    """Until it is unmounted."""
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=100000,user_id=0,group_id=0,allow_other"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"nvmeio-log", mount_file.encode(), b"fuse", 0, options.encode()):
        raise OSError(ctypes.get_errno(), f"mounting FUSE on {mount_file}")
    print("mounted", flush=True)
    with open(image, "r+b", buffering=0) as data, open(log, "ab", buffering=0) as told:
        while True:
            try:
                request = os.read(device, _MAX_WRITE + 8192)
            except OSError as failed:
                if failed.errno in (errno.EINTR, errno.ENOENT, errno.EAGAIN):
                    continue
                if failed.errno == errno.ENODEV:  # unmounted
                    return
                raise
            _, opcode, unique, *_ = _IN.unpack_from(request)
            answer = _answer(opcode, memoryview(request)[_IN.size :], data, told, delay_s)
            if answer is None:
                continue
            code, body = (answer, b"") if isinstance(answer, int) else (0, answer)
            with contextlib.suppress(FileNotFoundError):  # it was interrupted meanwhile
                os.write(device, _OUT.pack(_OUT.size + len(body), -code, unique) + body)


def _answer(
    opcode: int, body: memoryview, data: IO[bytes], told: IO[bytes], delay_s: float
) -> bytes | int | None:
    if opcode == _WRITE:
        _, offset, nbytes = struct.unpack_from("<QQI", body)
        content = body[40 : 40 + nbytes]
        told.write(_RECORD.pack(time.monotonic_ns(), offset, nbytes) + content)
        os.pwrite(data.fileno(), content, offset)
        return struct.pack("<II", nbytes, 0)
    if opcode == _READ:
        _, offset, nbytes = struct.unpack_from("<QQI", body)
        return os.pread(data.fileno(), nbytes, offset)
    if opcode == _FSYNC:
        if delay_s:
            time.sleep(delay_s)
        told.write(_RECORD.pack(time.monotonic_ns(), _FLUSH, 0))
        return b""
    if opcode in (_GETATTR, _SETATTR):
        size = os.fstat(data.fileno()).st_size
        attributes = struct.pack("<QQQ", 1, size, size // 512)
        attributes += struct.pack("<QQQIII", 0, 0, 0, 0, 0, 0)
        attributes += struct.pack("<IIIIIII", 0o100600, 1, 0, 0, 0, 4096, 0)
        return struct.pack("<QII", 3600, 0, 0) + attributes
    if opcode == _INIT:
        _, minor, readahead, _ = struct.unpack_from("<IIII", body)
        head = struct.pack("<IIII", 7, min(minor, 31), readahead, _FLAGS)
        head += struct.pack("<HHII", 12, 9, _MAX_WRITE, 1)
        return head + struct.pack("<HH", _MAX_WRITE // 4096, 0) + bytes(32)
    if opcode == _OPEN:
        return struct.pack("<QII", 0, 0, 0)
    if opcode == _STATFS:
        blocks = [1 << 20] * 3
        return struct.pack("<QQQQQIII", *blocks, 1, 1, 4096, 255, 4096) + bytes(28)
    if opcode in (_RELEASE, _FLUSH_FD, _DESTROY):
        return b""
    if opcode in (_FORGET, _BATCH_FORGET, _INTERRUPT):
        return None
    return errno.ENOSYS


# The log, read


class Record(NamedTuple):
    """A write, or a flush where `offset` is negative."""

    time_ns: int
    offset: int
    nbytes: int
    at: int  # where its bytes lie in the log

    @property
    def flush(self) -> bool:
        return self.offset == _FLUSH


def read_log(path: Path) -> list[Record]:
    found: list[Record] = []
    with open(path, "rb") as log:
        while True:
            head = log.read(_RECORD.size)
            if len(head) < _RECORD.size:
                return found
            time_ns, offset, nbytes = _RECORD.unpack(head)
            found.append(Record(time_ns, offset, nbytes, log.tell()))
            log.seek(nbytes, os.SEEK_CUR)


LOSSES = ("all", "none", "half", "torn")


class Drive:
    """The log, and images of what a loss of power leaves."""

    def __init__(self, folder: Path, nbytes: int, delay_s: float) -> None:
        self.nbytes = nbytes
        self.delay_s = delay_s
        self.log = folder / "log"
        self.image = folder / "image"
        self.mount_file = folder / "drive"
        self.folder = folder
        self.device = ""
        self._flushed = folder / "flushed"  # what every image has at least: replayed up to `_done`
        self._done = 0

    @contextlib.contextmanager
    def running(self) -> Iterator[str]:
        """The block device, while this lasts."""
        for path in (self.image, self._flushed):
            with open(path, "wb") as file:
                file.truncate(self.nbytes)
        self.log.touch()
        self.mount_file.touch()
        command = [sys.executable, "-S", __file__, self.mount_file, self.image, self.log]
        server = subprocess.Popen(
            [*map(str, command), str(self.delay_s)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert server.stdout is not None and server.stderr is not None
        try:
            if server.stdout.readline() != "mounted\n":
                raise Unavailable(f"no FUSE here: {server.stderr.read().strip()[-300:]}")
            try:
                self.device = run("losetup", "--find", "--show", self.mount_file)
                try:
                    yield self.device
                finally:
                    run("losetup", "--detach", self.device)
            finally:
                _eventually("umount", self.mount_file)
        finally:
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
            server.stdout.close()
            server.stderr.close()

    def records(self) -> list[Record]:
        return read_log(self.log)

    def cut(self, records: list[Record], at: int, loss: str, seed: int, image: Path) -> None:
        """The image after the first `at` records; cuts come in ascending order.

        Of what was not flushed, all is there, none, each write or not, or that and writes that are
        torn between blocks.
        """
        last = max((i for i in range(at) if records[i].flush), default=-1)
        with open(self.log, "rb") as log:
            with open(self._flushed, "r+b") as base:
                for record in records[self._done : last + 1]:
                    _apply(log, base, record, 0, record.nbytes)
            self._done = max(self._done, last + 1)
            run("cp", "--sparse=always", self._flushed, image)
            if loss == "none":
                return
            chance = random.Random(seed)
            with open(image, "r+b") as made:
                for record in records[last + 1 : at]:
                    if loss != "all" and chance.random() < 0.5:
                        continue
                    units = record.nbytes // ATOMIC_BYTES
                    if loss == "torn" and units > 1 and chance.random() < 0.5:
                        first, end = sorted(chance.sample(range(units + 1), 2))
                        torn = first * ATOMIC_BYTES, (end - first) * ATOMIC_BYTES
                        _apply(log, made, record, *torn)
                    else:
                        _apply(log, made, record, 0, record.nbytes)


class Unavailable(Exception):
    """This machine lacks what the rig needs."""


def _apply(log: IO[bytes], image: IO[bytes], record: Record, first: int, nbytes: int) -> None:
    if record.flush:
        return
    log.seek(record.at + first)
    image.seek(record.offset + first)
    image.write(log.read(nbytes))


# Commands


def run(*command: object) -> str:
    name = str(command[0])
    path = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if path is None:
        raise Unavailable(f"{name} is not installed")
    ran = subprocess.run(
        [path, *map(str, command[1:])], capture_output=True, text=True, timeout=120
    )
    if ran.returncode:
        raise subprocess.CalledProcessError(
            ran.returncode, [str(c) for c in command], ran.stdout, ran.stderr
        )
    return ran.stdout.strip()


def _eventually(*command: object) -> None:
    """Something may hold a file open for a moment more."""
    deadline = time.monotonic() + 20
    while True:
        try:
            run(*command)
            return
        except subprocess.CalledProcessError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


MKFS = {
    "ext4": (("mkfs.ext4", "-q", "-F", "-m", "0", "-E", "nodiscard"), 96 << 20),
    "xfs": (("mkfs.xfs", "-q", "-f", "-K"), 320 << 20),
    "btrfs": (("mkfs.btrfs", "-q", "-f", "-K"), 256 << 20),
}


@contextlib.contextmanager
def mounted(kind: str, device: object, folder: Path) -> Iterator[Path]:
    """A file system on a folder that is made for it."""
    folder.mkdir()
    try:
        run("mount", "-t", kind, device, folder)
        try:
            yield folder
        finally:
            _eventually("umount", folder)
    finally:
        folder.rmdir()


@contextlib.contextmanager
def mounted_image(kind: str, image: Path, folder: Path) -> Iterator[Path]:
    """The same of an image, through a loop device of its own."""
    device = run("losetup", "--find", "--show", image)
    try:
        with mounted(kind, device, folder):
            yield folder
    finally:
        run("losetup", "--detach", device)


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4]))

"""A digest of the weights in files, which tells one model's from another's.

All bytes of each file count, as a CRC-32 of every MiB. In models that are too large for that,
samples count: 16 blocks of 4 KiB of each tensor, first and last among them, and the file's time of
modification. A step of training and a merged adapter change far more elements of a tensor than it
takes to be seen in 64 KiB of it. An edit of a few elements is seen by the time, unless somebody
sets that back.

A file's digest may be remembered under its device, inode, size and times: the file is not read
again until one of these changes. `os.utime` cannot set all of them (ctime).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple

from nvmeio._formats.safetensors import headers
from nvmeio._pages import round_up
from nvmeio._storage import crc32
from nvmeio._storage.replace import replace_file
from nvmeio._storage.untrusted import open_own
from nvmeio.errors import IntegrityError, NvmeioError, TransferError

How = Literal["auto", "full", "samples"]
HOWS: tuple[How, ...] = ("auto", "full", "samples")

# Up to so much "auto" reads whole: 2 to 4 s, once.
FULL_BYTES = 8 << 30

SAMPLE_BYTES = 4096
SAMPLES = 16  # of a tensor
_MOST_SAMPLES = 1 << 16  # of a file
_PIECE_BYTES = 1 << 20

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
# Small files beside them that change what is computed, of images and sound as well. The tokenizer's
# do not count: blocks are asked for by the ids of tokens.
_BESIDE = re.compile(
    r"config\.json|params\.json|adapter_config\.json|.*processor_config\.json"
    r"|.*quant.*\.json|.*\.index\.json|.*\.py"
)
_MOST_BESIDE_BYTES = 64 << 20

# A file that was written so shortly before may be written again within the same tick of its times.
_SETTLED_NS = 2_000_000_000
_MOST_KNOWN = 4096
_MOST_KNOWN_BYTES = 4 << 20


class ChangingError(NvmeioError):
    """A file was written to while it was read."""


class WeightFiles(NamedTuple):
    """A digest of the weights in a directory or a file.

    `files` is how many there are, `how` "full" or "samples". `changed` is when one of them was last
    written or put there, in seconds, but for those in a hub's cache, which writes each once.
    """

    digest: str
    files: int
    nbytes: int
    how: How
    changed: float


def look_at(
    path: str | os.PathLike[str], how: How = "auto", known: Path | None = None
) -> WeightFiles:
    """Compute the digest of the weights in a directory, or of one file.

    Args:
        path: The path of either.
        how: "full" takes all bytes into account, and nothing else; "samples" reads a little of each
            tensor; "auto" is "full" up to `FULL_BYTES`.
        known: A file that remembers computed digests, in a directory that is this user's alone;
            None reads all each time.

    Raises FileNotFoundError if there are no weights, ChangingError if they are being written.
    """
    weights, beside = _files_of(Path(path))
    facts = {file: os.stat(file) for file in weights}
    nbytes = sum(each.st_size for each in facts.values())
    if how == "auto":
        how = "full" if nbytes <= FULL_BYTES else "samples"
    digests = _Known(known)
    digest = hashlib.blake2b(digest_size=16)
    for file, before in facts.items():
        text = digests.of(file, before, how)
        digest.update(json.dumps([file.name, before.st_size, text]).encode())
    for file in beside:
        digest.update(json.dumps([file.name, _small(file).hex()]).encode())
    digests.keep()
    changed = max((each.st_ctime for file, each in facts.items() if not _is_hubs(file)), default=0)
    return WeightFiles(digest.hexdigest(), len(facts), nbytes, how, changed)


def _files_of(path: Path) -> tuple[list[Path], list[Path]]:
    """The weights, and the files that count beside them."""
    if path.is_dir():
        there = sorted(file for file in path.iterdir() if file.is_file())
        weights = [file for file in there if file.suffix in _WEIGHTS]
        beside = [file for file in there if _BESIDE.fullmatch(file.name)]
    else:
        weights, beside = ([path] if path.is_file() else []), []
    if not weights:
        raise FileNotFoundError(f"{path} has no weights ({', '.join(_WEIGHTS)})")
    return weights, beside


def _is_hubs(file: Path) -> bool:
    """Whether it is a link into the cache of a hub, where each content is a file of its own."""
    return file.is_symlink() and Path(os.path.realpath(file)).parent.name == "blobs"


def _small(file: Path) -> bytes:
    with file.open("rb") as opened:
        data = opened.read(_MOST_BESIDE_BYTES)
    return hashlib.blake2b(data, digest_size=16).digest()


class _Known:
    """Digests of files that were computed before, kept in a file; None keeps none."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._digests: dict[str, str] = {}
        self._is_new = False
        if path is not None:
            with contextlib.suppress(OSError, ValueError, TransferError):
                self._digests = _read_known(path)

    def of(self, file: Path, facts: os.stat_result, how: How) -> str:
        times = facts.st_mtime_ns, facts.st_ctime_ns
        key = "-".join(map(str, (how, facts.st_dev, facts.st_ino, facts.st_size, *times)))
        before = self._digests.get(key)
        if before is not None:
            return before
        began = time.time_ns()
        with file.open("rb", buffering=0) as opened:
            digest = _whole(opened.fileno()) if how == "full" else _sampled(opened.fileno(), facts)
            now = os.fstat(opened.fileno())
        if (now.st_size, now.st_mtime_ns) != (facts.st_size, facts.st_mtime_ns):
            raise ChangingError(f"{file} was written to while it was read")
        if max(times) < began - _SETTLED_NS:
            self._digests[key] = digest
            self._is_new = True
        return digest

    def keep(self) -> None:
        if self._path is None or not self._is_new:
            return
        newest = dict(list(self._digests.items())[-_MOST_KNOWN:])
        with contextlib.suppress(OSError, TransferError):  # it is computed again, then
            replace_file(self._path, [memoryview(json.dumps(newest).encode())], durable=False)


def _read_known(path: Path) -> dict[str, str]:
    if not path.exists():
        return {}
    with os.fdopen(open_own(path), "rb") as opened:  # a regular file of this user's
        found: Any = json.loads(opened.read(_MOST_KNOWN_BYTES))
    if not isinstance(found, dict) or not all(isinstance(each, str) for each in found.values()):
        raise ValueError(f"{path} is not a record of nvmeio's")
    return found


def _whole(fd: int) -> str:
    digest = hashlib.blake2b(digest_size=16)
    memory = memoryview(bytearray(8 * _PIECE_BYTES))
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    at = 0
    while nbytes := os.preadv(fd, [memory], at):
        # Whole pieces, or what is behind them would be cut elsewhere the next time.
        while nbytes % _PIECE_BYTES and (
            more := os.preadv(fd, [memory[nbytes : round_up(nbytes, _PIECE_BYTES)]], at + nbytes)
        ):
            nbytes += more
        for start in range(0, nbytes, _PIECE_BYTES):
            piece = memory[start : min(start + _PIECE_BYTES, nbytes)]
            digest.update(crc32.of_bytes(piece).to_bytes(4, "little"))
        at += nbytes
    digest.update(at.to_bytes(8, "little"))
    return digest.hexdigest()


def _sampled(fd: int, facts: os.stat_result) -> str:
    digest = hashlib.blake2b(facts.st_mtime_ns.to_bytes(16, "little", signed=True), digest_size=16)
    header, spans = _tensors(fd, facts.st_size)
    digest.update(header)
    count = SAMPLES if header else _MOST_SAMPLES // SAMPLES
    count = max(min(count, _MOST_SAMPLES // max(len(spans), 1)), 1)
    for start, end in spans:
        for at in samples(end - start, count, SAMPLE_BYTES):
            digest.update(os.pread(fd, min(SAMPLE_BYTES, end - start - at), start + at))
    return digest.hexdigest()


def samples(length: int, count: int, size: int) -> Iterable[int]:
    """Offsets of samples of `size` bytes, evenly spread; all offsets if they are few."""
    count = min(count, -(-length // size))
    if count < 2:
        return [max(length - size, 0) // 2] if count else []
    return [(length - size) * number // (count - 1) for number in range(count)]


def _tensors(fd: int, size: int) -> tuple[bytes, list[tuple[int, int]]]:
    """Header and tensors of a safetensors file; of another one no header, and all as one tensor."""
    with contextlib.suppress(IntegrityError):
        length = headers.header_bytes(os.pread(fd, headers.LENGTH_BYTES, 0), size, "")
        text = os.pread(fd, length, headers.LENGTH_BYTES)
        entries = headers.parse(text, size, "").tensors.values()
        return text, [(entry.start, entry.end) for entry in entries]
    return b"", [(0, size)]

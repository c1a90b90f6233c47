"""The manifest: which places are current. Two places of its own, so that one is always whole.

A generation is written twice: at once, which a killed process cannot undo, for the page cache
outlives it; and again as durable once the data is. After a power cut only what is durable counts:
the boot that a generation was written in tells which case it is.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import io
import json
import os
import zlib
from dataclasses import dataclass
from typing import Any

import torch

from nvmeio.errors import IntegrityError, TransferError

_MAGIC = b"nvmeio-swap 1\n"
_HEADER_BYTES = len(_MAGIC) + 16
NAMES = ("manifest.0", "manifest.1")


@dataclass
class Manifest:
    """One generation.

    Attributes:
        generation: Counts steps (and everything else that changes the state).
        signature: What the files are laid out for; another layout cannot read them.
        current: For each piece, which file holds it.
        begun: For each piece, whether its state exists.
        small: For each piece, the state that is not in the files.
        groups: The options of the parameter groups.
        durable: The data has reached the drive.
        boot: Which boot of the machine wrote it.
    """

    generation: int
    signature: str
    current: list[int]
    begun: list[int]
    small: list[dict[str, Any]]
    groups: list[dict[str, Any]]
    durable: bool = False
    boot: str = ""


def boot_id() -> str:
    """Which boot of the machine this is; "" where the kernel does not tell."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def store(directory: str, manifest: Manifest, durable: bool) -> None:
    """Write a generation into the place that its predecessor is not in.

    Raises:
        TransferError: It could not be written; the predecessor is whole.
    """
    manifest.durable, manifest.boot = durable, boot_id()
    body = _encode(manifest)
    header = _MAGIC + f"{len(body):07x} {zlib.crc32(body):08x}".encode()
    path = os.path.join(directory, NAMES[manifest.generation % 2])
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            data = memoryview(header + body)
            at = 0
            while at < len(data):
                at += os.pwrite(fd, data[at:], at)
            if durable:
                os.fdatasync(fd)
        finally:
            os.close(fd)
    except OSError as failed:
        raise TransferError(failed.errno or errno.EIO, operation="write", path=path) from failed


def newest(directory: str) -> Manifest | None:
    """The last complete generation; None where there is none.

    Raises:
        IntegrityError: There is a manifest, and neither place is whole.
        TransferError: It cannot be read.
    """
    found: list[Manifest] = []
    there = False
    for name in NAMES:
        path = os.path.join(directory, name)
        try:
            with open(path, "rb") as file:
                data = file.read()
        except FileNotFoundError:
            continue
        except OSError as failed:
            raise TransferError(failed.errno or errno.EIO, operation="open", path=path) from failed
        there = there or bool(data)
        manifest = _decode(data)
        if manifest is not None and (manifest.durable or manifest.boot == boot_id() != ""):
            found.append(manifest)
    if not found and there:
        raise IntegrityError(
            f"no manifest in {directory} is whole: the state there cannot be used; remove the "
            "directory, and go on from a checkpoint",
            expected="a manifest with a valid checksum",
            found="none",
        )
    return max(found, key=lambda each: each.generation, default=None)


def _encode(manifest: Manifest) -> bytes:
    tensors = io.BytesIO()
    columns, rest = _columns(manifest.small)
    torch.save({"columns": columns, "rest": rest, "groups": manifest.groups}, tensors)
    return json.dumps(
        {
            "generation": manifest.generation,
            "signature": manifest.signature,
            "current": "".join(map(str, manifest.current)),
            "begun": "".join(map(str, manifest.begun)),
            "durable": manifest.durable,
            "boot": manifest.boot,
            "tensors": base64.b64encode(tensors.getvalue()).decode(),
        }
    ).encode()


def _decode(data: bytes) -> Manifest | None:
    """None where it is torn."""
    if not data.startswith(_MAGIC):
        return None
    with contextlib.suppress(ValueError, KeyError):
        length, crc = data[len(_MAGIC) : _HEADER_BYTES].decode().split()
        body = data[_HEADER_BYTES : _HEADER_BYTES + int(length, 16)]
        if len(body) != int(length, 16) or zlib.crc32(body) != int(crc, 16):
            return None
        told = json.loads(body)
        tensors = torch.load(io.BytesIO(base64.b64decode(told["tensors"])), weights_only=True)
        return Manifest(
            told["generation"],
            told["signature"],
            [int(bit) for bit in told["current"]],
            [int(bit) for bit in told["begun"]],
            _rows(tensors["columns"], tensors["rest"]),
            tensors["groups"],
            told["durable"],
            told["boot"],
        )
    return None


def _columns(
    small: list[dict[str, Any]],
) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """Step counters of thousands of pieces as one tensor: torch.save takes 15 us for each."""
    names = set(small[0]).intersection(*small) if small else set()
    columns: dict[str, torch.Tensor] = {}
    for name in names:
        values = [row[name] for row in small]
        scalars = all(isinstance(v, torch.Tensor) and v.dim() == 0 for v in values)
        if scalars and len({value.dtype for value in values}) == 1:
            columns[name] = torch.stack(values).cpu()
    return columns, [{k: v for k, v in row.items() if k not in columns} for row in small]


def _rows(columns: dict[str, torch.Tensor], rest: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {**row, **{name: column[number].clone() for name, column in columns.items()}}
        for number, row in enumerate(rest)
    ]

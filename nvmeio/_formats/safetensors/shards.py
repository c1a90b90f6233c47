"""Sets of safetensors files as transformers lays them out: shards and their index.

`name.safetensors` is a whole; a set is ``name-00001-of-00003.safetensors`` and so on with
``name.safetensors.index.json``, which says for every tensor which shard holds it.

Errors of all safetensors files too: `except safetensors.SafetensorError` takes them as well. That
package is not needed, and not imported before there is an error.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import torch

from nvmeio import _checks
from nvmeio._formats.sniff import how_to_load
from nvmeio._io.inflight import in_groups
from nvmeio._storage.untrusted import INDEX_BYTES, read_json
from nvmeio.errors import BackendUnavailableError, IntegrityError, TransferError, as_kind, joined

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
DEFAULT_NAME = "model.safetensors"

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGTP", 1):
    _UNITS[f"{_letter}B"] = 1000**_power
    _UNITS[f"{_letter}IB"] = 1024**_power


def find(path: str | os.PathLike[str]) -> Path:
    """The file or index that a path stands for; of a directory, the one that is in it.

    Raises ValueError if the directory holds several, and none has transformers' name.
    """
    given = Path(path)
    if not os.fspath(path) or not given.exists():  # Path("") would be the current directory
        raise missing(path)
    if not given.is_dir():
        return given
    for name in (DEFAULT_NAME, f"model{INDEX_SUFFIX}"):  # in the order of transformers
        if (given / name).is_file():
            return given / name
    names = sorted(entry.name for entry in given.iterdir() if not entry.name.startswith("."))
    found = [name for name in names if name.endswith(INDEX_SUFFIX)]
    found = found or [name for name in names if name.endswith(SUFFIX)]
    if not found:
        how = how_to_load(str(given))
        nothing = f"{given} holds no {DEFAULT_NAME}, no index and no *{SUFFIX} file"
        raise FileNotFoundError(f"{nothing}; it is {how}" if how else nothing)
    if len(found) > 1:
        raise ValueError(f"{given} holds several, name one: {', '.join(found[:5])}")
    return given / found[0]


def is_index(path: Path) -> bool:
    """Whether a path names an index rather than a file of tensors."""
    return path.name.endswith(".json")


def read_index(path: Path) -> dict[Path, list[str]]:
    """For each shard, the names of its tensors; IntegrityError if it names files elsewhere."""
    try:
        found = read_json(
            path, INDEX_BYTES, f"{path} is not a valid safetensors index: it", unique=True
        )
    except OSError as failed:
        if failed.errno != errno.EFBIG:
            raise
        size = path.stat().st_size
        raise _bad(path, "it is too large", f"at most {INDEX_BYTES} bytes", size) from None
    names = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(names, dict):
        raise _bad(path, "it has no weight_map", "an object of file names", type(names).__name__)
    shards: dict[Path, list[str]] = {}
    for name, file_name in names.items():
        if not is_inside(file_name):
            raise _bad(path, f"{name!r} lies outside", "a file beside the index", repr(file_name))
        shards.setdefault(path.parent / file_name, []).append(name)
    return shards


def index_text(shards: Iterable[tuple[str, Iterable[str]]], total_bytes: int) -> bytes:
    """An index; `shards` are file names, each with the names of its tensors."""
    weight_map = {name: file_name for file_name, names in shards for name in names}
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()


def split(sizes: Mapping[str, int], limit: int | None) -> list[list[str]]:
    """Names in shards of at most `limit` bytes, in order; a larger tensor gets one of its own."""
    most = math.inf if limit is None else limit
    return list(in_groups(sizes, sizes.__getitem__, most, math.inf)) or [[]]


def shard_names(stem: str, count: int, taken: Sequence[str], token: str) -> list[str]:
    """File names for shards; with `token` in them if an older set has the plain ones.

    Replaced one after another under their own names, the shards of two sets would be mixed for as
    long as that takes. Under other names the index alone decides, and it is replaced in one step.
    """
    for infix in ("", f"-{token}"):
        names = [f"{stem}{infix}-{n + 1:05d}-of-{count:05d}{SUFFIX}" for n in range(count)]
        if not set(names) & set(taken):
            break
    return names


def is_shard_of(stem: str, name: str) -> bool:
    """Whether a file name is one that `shard_names` gives."""
    pattern = rf"{re.escape(stem)}(-[0-9a-f]+)?-[0-9]{{5,}}-of-[0-9]{{5,}}{re.escape(SUFFIX)}"
    return re.fullmatch(pattern, name) is not None


def parse_size(size: int | str) -> int:
    """A number of bytes above 0: an int, or a text such as "5GB" (10**9) or "512MiB" (2**20)."""
    if isinstance(size, str):
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", size)
        unit = _UNITS.get(match[2].upper()) if match else None
        if match is None or unit is None:
            raise ValueError(f'max_shard_size {size!r} is not a size: say 5_000_000_000 or "5GB"')
        nbytes = int(float(match[1]) * unit)
    elif isinstance(size, int) and not isinstance(size, bool):
        nbytes = size
    else:
        raise TypeError(f"max_shard_size must be an int or a str, not {type(size).__name__}")
    if nbytes < 1:
        raise ValueError(f"max_shard_size must be at least 1 byte, not {size!r}")
    return nbytes


def is_inside(name: object) -> bool:
    """Whether a file name that a file gives stays in the directory of that file."""
    if not isinstance(name, str) or not name or "\0" in name:
        return False
    try:
        name.encode()
    except UnicodeEncodeError:  # a half of a surrogate pair, which no file is called
        return False
    pure = PurePosixPath(name)
    return not pure.is_absolute() and ".." not in pure.parts and pure.name != ""


def _bad(path: Path, what: str, expected: object, found: object) -> IntegrityError:
    return IntegrityError(
        f"{path} is not a valid safetensors index: {what} (expected {expected}, found {found})",
        expected=expected,
        found=found,
    )


# Errors, which are the package's as well


AnyError = TypeVar("AnyError", bound=BaseException)


def as_package(cls: type[AnyError]) -> type[AnyError]:
    """An error class that is the package's `SafetensorError` as well, if that is installed."""
    package = _package_error()
    return cls if package is None else joined(cls, package)


def failed_save(failed: TransferError) -> TransferError:
    """The failure of a save, as the package's error as well."""
    package = _package_error()
    return failed if package is None else as_kind(failed, package)


def _package_error() -> type[Exception] | None:
    try:
        from safetensors import SafetensorError
    except ImportError:
        return None
    return SafetensorError


def noted(failed: AnyError, remedy: str) -> AnyError:
    """An error in the package's own words, with what to do as a note (from Python 3.11 on)."""
    if hasattr(failed, "add_note"):
        failed.add_note(remedy)
    return failed


class _MissingError(TransferError):
    """There is no such file; in the package's words."""

    def __str__(self) -> str:
        return f"No such file or directory: {self.path}"


def missing(path: str | os.PathLike[str]) -> TransferError:
    failed = _MissingError(errno.ENOENT, operation="open", path=os.fspath(path))
    return noted(failed, "check the path, and that its directory is there")


def device_of(value: Any) -> torch.device:
    """The device that tensors shall lie on; None is the CPU.

    Raises BackendUnavailableError if it is a CUDA device that is not here, RuntimeError if it is
    none.
    """
    try:
        return _checks.device("device", "cpu" if value is None else value)
    except BackendUnavailableError:
        raise
    except (RuntimeError, TypeError) as failed:
        raise as_package(RuntimeError)(f"device {value!r}: {failed}") from None

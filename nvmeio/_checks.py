"""Checks of arguments, for all of the package: one rule and one message each."""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn, overload

from nvmeio._pages import round_up
from nvmeio.errors import AlignmentError, BackendUnavailableError, an, counted

if TYPE_CHECKING:
    import torch

# Directories of a user's: one, or one on each of several drives.
Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

_SUFFIXES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT]?)(?:I?B)?", re.IGNORECASE)
_SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
OFFSET_MAX = (1 << 63) - 1  # of a file (off_t)
_SWITCHES = {"true": True, "false": False}


def integer(name: str, value: Any, least: int | None = None, most: int | None = None) -> int:
    """An integer within bounds; whatever has ``__index__`` counts as one, a bool does not."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an int, not {type(value).__name__}: {value!r:.80}")
    number = operator.index(value)
    if least is not None and most is not None and not least <= number <= most:
        raise ValueError(f"{name} must lie between {least} and {most}, not {number}")
    if least is not None and number < least:
        raise ValueError(f"{name} must be {least} or more, not {number}")
    if most is not None and number > most:
        raise ValueError(f"{name} must be {most} or less, not {number}")
    return number


def file_offset(name: str, value: Any, nbytes: int) -> int:
    """An offset for so many bytes in a file; ValueError if they would lie outside of any."""
    number = value if type(value) is int else integer(name, value)
    if not 0 <= number <= OFFSET_MAX - nbytes:
        raise ValueError(
            f"{name} must lie between 0 and 2**63 - 1 - {nbytes} (the tensor's bytes), not {number}"
        )
    return int(number)


def pages(name: str, value: Any, most: int) -> None:
    """Check that a size is in bounds, and whole pages as direct I/O needs (AlignmentError)."""
    integer(name, value, 1, most)
    if value % 4096:
        raise AlignmentError(
            f"{name} {value} is not a multiple of 4096; use {round_up(value, 4096)}",
            nbytes=value,
            required=4096,
        )


def parse_size(text: str) -> int:
    """Bytes from "1048576", "64K", "1.5G" or "1 MiB": binary, 1K is 1024.

    Raises ValueError if it is not a size, not a whole number of bytes, or not positive.
    """
    found = _SIZE.fullmatch(text.strip())
    if not found:
        raise ValueError(f"{text!r} is not a size: write bytes, or such as '64K' or '24GiB'")
    nbytes = float(found[1]) * _SUFFIXES[found[2].upper()]
    if nbytes < 1 or not nbytes.is_integer():
        raise ValueError(f"{text!r} is not a whole, positive number of bytes: round it")
    return int(nbytes)


@overload
def size(name: str, value: int | str, least: int | None = None) -> int: ...
@overload
def size(name: str, value: int | str | None) -> int | None: ...
def size(name: str, value: int | str | None, least: int | None = None) -> int | None:
    """A number of bytes, which may be given as text such as "24G"; other values are kept.

    With a `least`, it is checked as by `integer`.
    """
    if isinstance(value, str):
        try:
            value = parse_size(value)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return value if least is None else integer(name, value, least)


def timeout(value: float) -> None:
    """Check the seconds that a rank may make no progress; ValueError if not positive."""
    if not value > 0:
        raise ValueError(f"timeout_s must be more than 0 seconds, not {value!r}")


@overload
def dtype(name: str, value: torch.dtype | str) -> torch.dtype: ...
@overload
def dtype(name: str, value: torch.dtype | str | None) -> torch.dtype | None: ...
def dtype(name: str, value: torch.dtype | str | None) -> torch.dtype | None:
    """A dtype that may be given by its name: "bfloat16", "torch.bfloat16" or "bf16"."""
    import torch  # errors and checks are there before torch is

    if value is None or isinstance(value, torch.dtype):
        return value
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a torch.dtype or the name of one, not {value!r:.80}")
    word = value.strip().removeprefix("torch.")
    found = getattr(torch, _SHORT_DTYPES.get(word, word), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name}: {value!r:.80} is not a dtype of torch: write 'bfloat16', say")
    return found


def device(name: str, value: str | int | torch.device) -> torch.device:
    """A device that is there, a CUDA device with its number: other threads are on others.

    Raises BackendUnavailableError if it is a CUDA device that is not here, RuntimeError if it is
    none.
    """
    import torch

    if isinstance(value, int) and not torch.accelerator.is_available():
        found = torch.device("cuda", value)
    else:
        found = torch.device(value)
    if found.type != "cuda":
        return found
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (found.index or 0) < count:
        index = torch.cuda.current_device() if found.index is None else found.index
        return torch.device("cuda", index)
    if not count:
        why = "no CUDA device was found" if torch.version.cuda else "it is built without CUDA"
    else:
        why = f"{counted(count, 'CUDA device')}, counted from 0"
    raise BackendUnavailableError(
        f"{name}={str(found)!r}: there is no such device",
        attempts=[("torch", why)],
        remedy=f"{name}='cpu', or torch with CUDA on a machine with a GPU",
    )


def switch(name: str, value: Any) -> bool:
    """A setting that is on or off: a bool, 0 or 1, or one of the strings "true" and "false".

    Configuration files and DeepSpeed's tuner give strings, of which "false" is true to Python.
    """
    if value is True or value is False:
        return bool(value)
    if isinstance(value, str):
        known = _SWITCHES.get(value.lower())
        if known is not None:
            return known
    elif value is not None and (value == 0 or value == 1):  # of numpy, for one
        return bool(value)
    raise TypeError(f"{name} must be true or false, not {value!r:.80}")


class NotPickled:
    """Has descriptors and threads of its process, and is not sent to another one: TypeError.

    A class says in `_elsewhere` what to do there.
    """

    __slots__ = ()
    _elsewhere: str

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            f"{an(type(self).__name__)} belongs to the process that made it and is not copied or "
            f"pickled: {self._elsewhere}"
        )


def directory_path(what: str, value: str | os.PathLike[str]) -> str:
    """Check a directory that a user names; TypeError if it is not a path, or bytes."""
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"{what} must be a path, not {type(value).__name__}: {value!r:.80}")
    path = os.fspath(value)
    if not isinstance(path, str):
        raise TypeError(f"{what} must be a str, not {path!r}; os.fsdecode turns bytes into one")
    return path


def directory_paths(what: str, value: Paths) -> list[str]:
    """Check directories that a user names: one, or several, none of them twice."""
    if not isinstance(value, (list, tuple)):
        return [directory_path(what, value)]  # type: ignore[arg-type]
    paths = [directory_path(f"{what}[{number}]", each) for number, each in enumerate(value)]
    if not paths:
        raise ValueError(f"{what} is empty: name a directory, or one on each drive")
    if len({os.path.realpath(path) for path in paths}) < len(paths):
        raise ValueError(f"{what} names a directory twice: {paths}")
    return paths

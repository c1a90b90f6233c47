"""The manifest: which places are current. Two places of its own, so that one is always whole.

A generation is written at once, which a killed process cannot undo, for the page cache outlives it.
Once the data is on the drive, and the manifest is, one byte marks it as durable: nothing of it is
written twice, so there is no moment at which a kill could tear what was whole. After a power cut
only what is durable counts: the boot that a generation was written in tells which case it is.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import io
import json
import os
import re
import zlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from nvmeio._memory import devices, system
from nvmeio._storage import untrusted
from nvmeio._storage.durable import write_all, write_small
from nvmeio._storage.untrusted import read_small
from nvmeio._threads.closing import opened
from nvmeio.errors import IntegrityError, counted, naming, transfer_error

_MAGIC = b"nvmeio-swap 2\n"
DURABLE_AT = len(_MAGIC)  # one byte, outside of what the checksum covers
_DURABLE, _VOLATILE = b"D", b"-"
HEADER_BYTES = len(_MAGIC) + 2 + 16
_NUMBER = re.compile(rb'"generation": (\d{1,15}),')  # near the beginning of the body
_NUMBER_WITHIN = HEADER_BYTES + 64
NAMES = ("manifest.0", "manifest.1")
# Types that a manifest can hold: torch.load(weights_only=True) reads these.
PLAIN_TYPES = frozenset(
    (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Tensor)
)
_MOST_BYTES = 2 << 30  # most of one are sums and what pieces have outside of the files


@dataclass
class Manifest:
    """One generation. Lists have one entry for each piece, by its number.

    Attributes:
        generation: Counts steps (and everything else that changes the state).
        signature: The layout of the files; another layout cannot read them.
        current: Which of the two files holds each piece.
        begun: Whether each piece has state.
        small: The state that is not in the files.
        groups: The options of the parameter groups.
        sums: The CRC-32 of each span of each piece, -1 where it has none; empty if none has one.
        strides: The strides of spans that are not in row-major order, by piece number and name.
        boot: The boot of the machine that wrote it.
        run: The program start that wrote it, the same on all ranks; "" if they agreed on no name.
        made_of: The settings that the layout follows from, in words, by name; empty in older
            manifests.
    """

    generation: int
    signature: str
    current: list[int]
    begun: list[int]
    small: list[dict[str, Any]]
    groups: list[dict[str, Any]]
    sums: list[int] = field(default_factory=list)
    strides: dict[int, dict[str, tuple[int, ...]]] = field(default_factory=dict)
    durable: bool = False
    boot: str = ""
    run: str = ""
    made_of: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        counters = [float(row["step"]) for row in self.small if _counts(row.get("step"))]
        steps = f" (step {max(counters):.0f})" if counters else ""
        return f"generation {self.generation}{steps}"


def _counts(value: Any) -> bool:
    """Whether a value of the state is a step counter; most optimizers keep one."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not devices.is_device(value)
    return isinstance(value, (int, float))


@functools.cache
def boot_id() -> str:
    """The id of this boot of the machine; "" where the kernel does not tell."""
    return system.text_of("/proc/sys/kernel/random/boot_id").strip()


def store(directory: str, manifest: Manifest) -> None:
    """Write a generation into the place that its predecessor is not in; not durable yet.

    On failure it is not there, and the predecessor is whole.
    """
    manifest.durable, manifest.boot = False, boot_id()
    body = _encode(manifest)
    header = _MAGIC + _VOLATILE + f" {len(body):07x} {zlib.crc32(body):08x}".encode()
    path = place(directory, manifest.generation)
    try:
        _write(path, header + body)
    except BaseException:
        # Whole or not: later readers must not take it for a step that has happened, for
        # the next attempt writes over its data.
        with contextlib.suppress(OSError):
            _empty(path)
        raise


def mark_durable(directory: str, manifest: Manifest) -> None:
    """Mark a generation that `store` wrote, once its data is on the drive.

    If that fails it counts as long as the machine runs. A manifest that is gone is not made anew:
    this runs beside the caller's program, which may be removing the directory.
    """
    path = place(directory, manifest.generation)
    with naming("write", path), _existing(path) as fd:
        os.fdatasync(fd)  # its body first
        write_all(fd, [memoryview(_DURABLE)], DURABLE_AT)
        os.fdatasync(fd)
    manifest.durable = True


def drop(directory: str, generation: int, durable: bool = False) -> None:
    """Empty the place of a generation, whatever is in it. If that fails it is still there."""
    path = place(directory, generation)
    try:
        _empty(path)
    except FileNotFoundError:
        return
    except OSError as failed:
        raise transfer_error(failed, "write", path) from failed
    if durable:
        with naming("write", path), _existing(path) as fd:
            os.fdatasync(fd)


def _write(path: str, data: bytes) -> None:
    with naming("write", path):
        write_small(untrusted.open_own(path), data, None)


def _empty(path: str) -> None:
    with _existing(path) as fd:
        os.ftruncate(fd, 0)


def _existing(path: str) -> contextlib.AbstractContextManager[int]:
    return opened(path, os.O_WRONLY | os.O_NOFOLLOW)


def place(directory: str, generation: int) -> str:
    """The file of a generation."""
    return os.path.join(directory, NAMES[generation % 2])


class UnusableGeneration(NamedTuple):
    """A generation that cannot be resumed, and why; its number is 0 where that cannot be read."""

    path: str
    generation: int
    why: str


class StoredGenerations(NamedTuple):
    """The generations in a directory.

    `complete` can be resumed: the last generation and, mostly, the one before it. Empty
    places do not count as `unusable`.
    """

    complete: list[Manifest]
    unusable: list[UnusableGeneration]


def newest(directory: str) -> Manifest | None:
    """The last complete generation; None where no step was ever completed."""
    return max(read(directory).complete, key=lambda each: each.generation, default=None)


def read(directory: str) -> StoredGenerations:
    """Read every generation in a directory.

    IntegrityError if there were steps, and no manifest that counts is left.
    """
    complete: list[Manifest] = []
    unusable: list[UnusableGeneration] = []
    stepped = False
    for name in NAMES:
        path = os.path.join(directory, name)
        try:
            data = read_small(path, _MOST_BYTES)
        except FileNotFoundError:
            continue
        except OSError as failed:
            raise transfer_error(failed, "open", path) from failed
        # The first generation goes to the other place: this one is only there after a step.
        stepped = stepped or name == NAMES[0]
        manifest = _decode(data, path)
        if manifest is None:
            if data:  # an empty place is what a step begins with
                number, why = _number_in(data, name), _why_not_whole(data)
                unusable.append(UnusableGeneration(path, number, why))
        elif manifest.durable or manifest.boot == boot_id() != "":
            complete.append(manifest)
        else:
            why = "had not reached the drive when the machine restarted"
            unusable.append(UnusableGeneration(path, manifest.generation, why))
    if stepped and not complete:
        lost = any("restarted" in each.why for each in unusable)
        what = (
            "is durable, and the machine has restarted since (durable=False)"
            if lost
            else "is undamaged"
        )
        raise IntegrityError(
            f"no manifest in {directory} {what}: the state there cannot be used; go on from a "
            "checkpoint, with overwrite=True, which removes it",
            expected="a manifest with a valid checksum, and durable or of this boot",
            found="none",
        )
    return StoredGenerations(complete, unusable)


def _number_in(data: bytes, name: str) -> int:
    """The number that a torn manifest gives its generation; 0 where it cannot be read."""
    match = _NUMBER.search(data[:_NUMBER_WITHIN])
    number = int(match[1]) if match else 0
    return number if NAMES[number % 2] == name else 0


def _why_not_whole(data: bytes) -> str:
    if data.startswith(_MAGIC + _DURABLE):
        return "is damaged: it was whole when it was made durable, and its checksum differs now"
    return "is damaged, or was cut short by a kill or a loss of power while it was written"


def _encode(manifest: Manifest) -> bytes:
    tensors = io.BytesIO()
    torch.save(_tensors_of(manifest), tensors)
    return json.dumps(
        {
            "generation": manifest.generation,
            "signature": manifest.signature,
            "current": "".join(map(str, manifest.current)),
            "begun": "".join(map(str, manifest.begun)),
            "boot": manifest.boot,
            "run": manifest.run,
            "made_of": manifest.made_of,
            "tensors": base64.b64encode(tensors.getvalue()).decode(),
        }
    ).encode()


def _tensors_of(manifest: Manifest) -> dict[str, Any]:
    columns, rest = _columns(manifest.small)
    return {
        "columns": columns,
        "rest": rest,
        "groups": _plain(manifest.groups),
        "sums": torch.tensor(manifest.sums, dtype=torch.int64, device="cpu"),
        "strides": manifest.strides,
    }


def _plain(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Options that can be read back safely: numpy's numbers as Python's, objects left out.

    An option that is left out keeps the value that the resuming optimizer is made with.
    """
    plain: list[dict[str, Any]] = []
    for group in groups:
        plain.append({})
        for name, value in group.items():
            number = value if type(value) in PLAIN_TYPES else pythons(value)
            if type(number) in PLAIN_TYPES or _is_plain(number):
                plain[-1][name] = number
    return plain


def pythons(value: Any) -> Any:
    """Python's number for one of numpy's, which schedulers leave behind."""
    foreign = type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0
    return value.item() if foreign else value


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return type(value) in (list, tuple) and all(map(_is_plain, value))
    if isinstance(value, dict):
        return type(value) in (dict, Counter) and all(map(_is_plain, [*value, *value.values()]))
    return type(value) in PLAIN_TYPES


def _decode(data: bytes, path: str) -> Manifest | None:
    """The manifest in a file's bytes; None if it is torn."""
    if not data.startswith(_MAGIC):
        return None
    mark = data[DURABLE_AT : DURABLE_AT + 1]
    try:
        length, crc = (int(each, 16) for each in data[DURABLE_AT + 1 : HEADER_BYTES].split())
    except ValueError:
        return None
    body = data[HEADER_BYTES : HEADER_BYTES + length]
    if len(body) != length or zlib.crc32(body) != crc:
        return None
    try:
        manifest = _read(body)
    except Exception as refused:  # whatever its content makes torch, json or us stumble over
        raise IntegrityError(
            f"{path} is undamaged, but its content is not valid: {refused!r:.200}; go on from a "
            "checkpoint, with overwrite=True, which removes it",
            expected="what this version of nvmeio and torch.load(weights_only=True) read",
            found="something else",
        ) from refused
    manifest.durable = mark == _DURABLE
    return manifest


def _read(body: bytes) -> Manifest:
    told = json.loads(body)
    stored = io.BytesIO(base64.b64decode(told["tensors"]))
    tensors = torch.load(stored, map_location="cpu", weights_only=True)
    current, begun = ([int(bit) for bit in told[name]] for name in ("current", "begun"))
    small = _rows(tensors["columns"], tensors["rest"])
    groups, boot, run = tensors["groups"], told["boot"], str(told.get("run", ""))
    made_of = {str(name): str(words) for name, words in told.get("made_of", {}).items()}
    if not len(current) == len(begun) == len(small):
        raise ValueError(
            f"places of {len(current)}, {len(begun)} and {counted(len(small), 'piece')}"
        )
    if not set(current) | set(begun) <= {0, 1}:
        raise ValueError("places other than 0 and 1")
    if type(told["generation"]) is not int or not isinstance(boot, str):
        raise ValueError(f"generation {told['generation']!r:.20} of boot {boot!r:.40}")
    if not all(isinstance(each, dict) for each in [*groups, *small]):
        raise ValueError("its options or state are not dictionaries")
    sums = tensors["sums"].tolist() if "sums" in tensors else []
    signature = str(told["signature"])
    strides = {int(n): dict(by_name) for n, by_name in tensors.get("strides", {}).items()}
    return Manifest(
        generation=told["generation"],
        signature=signature,
        current=current,
        begun=begun,
        small=small,
        groups=groups,
        sums=sums,
        strides=strides,
        boot=boot,
        run=run,
        made_of=made_of,
    )


def _columns(small: list[dict[str, Any]]) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """Step counters of thousands of pieces as one tensor: torch.save takes 15 us for each."""
    names = set(small[0]).intersection(*small) if small else set()
    columns: dict[str, torch.Tensor] = {}
    for name in names:
        values = [row[name] for row in small]
        tensors = all(issubclass(kind, torch.Tensor) for kind in set(map(type, values)))
        scalars = tensors and not any(map(torch.Tensor.dim, values))
        if scalars and len({value.dtype for value in values}) == 1:
            columns[name] = _stacked(values)
    left = [row if len(row) > len(columns) else {} for row in small]
    return columns, [
        {k: _on_host(v) for k, v in row.items() if k not in columns} if row else row for row in left
    ]


def _stacked(values: list[torch.Tensor]) -> torch.Tensor:
    """Scalars as one tensor on the host, by one copy if all are on a device."""
    if len({value.device for value in values}) == 1:
        return devices.on_host(torch.stack(values))
    return torch.stack([devices.on_host(value) for value in values])


def _on_host(value: Any) -> Any:
    return devices.on_host(value) if isinstance(value, torch.Tensor) else value


def _rows(columns: dict[str, torch.Tensor], rest: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {**row, **{name: column[number].clone() for name, column in columns.items()}}
        for number, row in enumerate(rest)
    ]

"""Checking a DCP checkpoint: that each item is what ``.metadata`` says, to the last byte.

An item that torch.save made, as all of DCP's tensors and objects are, is an archive with CRC-32s:
each data file is read once, from its first byte to its last, and each item in it is compared as
`_formats.torch_archives.torch_checking` compares an archive. A tensor's shape and dtype are those
of the metadata, whose parts make up the whole tensor. Nothing of a pickle is run.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed.checkpoint.metadata import MetadataIndex

from nvmeio import files
from nvmeio._formats.sniff import DCP_DATA, DCP_METADATA, dcp_metadata_names
from nvmeio._formats.torch_archives import torch_zip
from nvmeio._formats.torch_archives.torch_checking import (
    ArchiveCheck,
    Problem,
    Stretch,
    Walk,
    stream,
)
from nvmeio._io.handles import CallHandle
from nvmeio._io.inflight import InFlight
from nvmeio._threads.interruptible import run_interruptible
from nvmeio.checkpoint.verifying import Verdict
from nvmeio.errors import IntegrityError, TransferError, counted, naming
from nvmeio.files import File, read_buffered
from nvmeio.handle import AioHandle
from nvmeio.integrations.dcp.metadata import Parser, Stored, TensorPart, read_stored, referred_to

# A checkpoint that is replaced while it is read is read again, so many times at most.
_TRIES = 3

_HEAD_BYTES = 4096
_END_BYTES = 22  # of a zip archive's end record, if it has no comment


class Checked(NamedTuple):
    """The checkpoint that a path stands for.

    Attributes:
        shown: The directory of all ranks' checkpoint, else the path itself.
        metadata: The metadata file.
        only: The one data file that is checked; None for all.
    """

    shown: Path
    metadata: Path
    only: str | None

    @classmethod
    def of(cls, path: Path) -> Checked:
        """Taken from the name: a metadata file, or a data file with the metadata beside it."""
        if not path.name.endswith(DCP_DATA):
            return cls(path.parent if path.name == DCP_METADATA else path, path, None)
        with naming("open", path):
            owners = dcp_metadata_names(os.listdir(path.parent))
        owners = [name for name in owners if path.name in referred_to(path.parent / name)]
        return cls(path, path.parent / (owners or [DCP_METADATA])[0], path.name)


def verify(
    path: str | os.PathLike[str],
    *,
    handle: AioHandle | None = None,
    progress: Callable[[int], None] | None = None,
) -> Verdict:
    """Check every byte of a DCP checkpoint that can be checked; blocks.

    Args:
        path: ``.metadata`` for the whole checkpoint (``__3.metadata`` for that of a rank that saved
            alone), or a ``.distcp`` file for what is in it.
        handle: Moves the bytes, and stays open; None makes one for this call.
        progress: Called with the number of bytes done since the last call.

    Returns:
        The findings; damage is not an error here.

    Raises:
        TransferError: There is no such file (also a FileNotFoundError), or the metadata cannot be
            read.

    Cost: one read of the data files, in 64 MiB of memory, and what ``.metadata`` takes.
    """
    flight = InFlight()
    return run_interruptible(
        lambda: _verify(Path(path), handle, progress or (lambda nbytes: None), flight),
        flight.cancel,
    )


def _verify(
    path: Path, handle: AioHandle | None, progress: Callable[[int], None], flight: InFlight
) -> Verdict:
    checked = Checked.of(path)
    for _ in range(_TRIES):
        try:
            stored = read_stored(checked.metadata)
        except FileNotFoundError:
            return _without_metadata(checked)
        except IntegrityError as wrong:
            return _verdict(checked, 0, 0, 0, [Problem("", str(wrong))], "")
        verdict = _verify_stored(checked, stored, handle, progress, flight)
        if not verdict.problems or _is_still(checked, stored):
            break
    return verdict


def _is_still(checked: Checked, stored: Stored) -> bool:
    """Whether nobody has replaced the checkpoint meanwhile."""
    try:
        return read_stored(checked.metadata).version == stored.version
    except (IntegrityError, TransferError):
        return True


def _without_metadata(checked: Checked) -> Verdict:
    folder = checked.metadata.parent
    names = sorted(name for name in os.listdir(folder) if name.endswith(DCP_DATA))
    if not names:
        read_stored(checked.metadata)  # raises the error that says so
    problem = Problem(
        "",
        f"there is no {checked.metadata.name} beside {counted(len(names), 'data file')}: the save "
        "has not ended, was interrupted, or the file was lost; DCP cannot load this",
    )
    nbytes = sum((folder / name).stat().st_size for name in names)
    return _verdict(checked, nbytes, 0, 0, [problem], "")


def _verdict(
    checked: Checked,
    nbytes: int,
    items: int,
    unchecked: int,
    problems: list[Problem],
    what: str,
) -> Verdict:
    return Verdict(os.fspath(checked.shown), "dcp", nbytes, items, unchecked, problems, what)


def _verify_stored(
    checked: Checked,
    stored: Stored,
    handle: AioHandle | None,
    progress: Callable[[int], None],
    flight: InFlight,
) -> Verdict:
    problems: list[Problem] = []
    if checked.only is None:
        problems += [Problem(f"item {name!r}", what) for name, what in stored.problems()]
        wanted = stored.items
    else:
        wanted = {name: items for name, items in stored.items.items() if name == checked.only}
        if not wanted:
            told = f"{checked.metadata.name} names no item in it: it is left from another save"
            problems.append(Problem("", told))
    nbytes = items = unchecked = 0
    parser = Parser()
    with CallHandle(handle, stored.folder) as call_handle:
        for name, in_file in sorted(wanted.items()):
            check = _FileCheck(stored, name, in_file, parser)
            try:
                with files.open(stored.folder / name) as file:
                    nbytes += file.size()
                    read = partial(stream, file, call_handle, progress, flight)
                    check.run(file, read)
            except TransferError as failed:
                is_gone = isinstance(failed, FileNotFoundError)
                told = "it is missing" if is_gone else f"cannot be read: {failed}"
                check.problems.append(Problem(name, f"{told}; {check.what} in it"))
            items += check.items
            unchecked += check.unchecked
            problems += check.problems
    what = f"DCP checkpoint in {counted(len(wanted), 'file')}"
    left = [] if checked.only else _left_over(stored.folder)
    if left:
        what += f" (not part of it: {', '.join(left)})"
    return _verdict(checked, nbytes, items, unchecked, problems, what)


def _left_over(folder: Path) -> list[str]:
    """Data files that no metadata file names."""
    names = os.listdir(folder)
    kept: set[str] = set()
    for name in dcp_metadata_names(names):
        kept |= set(read_names(folder / name))
    return sorted(name for name in names if name.endswith(DCP_DATA) and name not in kept)


def read_names(path: Path) -> Sequence[str]:
    """The data files of one metadata file; none if it cannot be read."""
    try:
        return list(read_stored(path).items)
    except (IntegrityError, TransferError):
        return ()


class _FileCheck:
    """Compares the items of one data file with the metadata.

    Attributes:
        items: How many there are.
        unchecked: How many of them have no checksum.
        problems: The errors in them.
    """

    def __init__(
        self, stored: Stored, name: str, items: list[tuple[MetadataIndex, Any]], parser: Parser
    ) -> None:
        self.items = len({(info.offset, info.length) for _, info in items})
        self.unchecked = 0
        self.problems: list[Problem] = []
        self._stored = stored
        self._name = name
        self._in_file = items
        self._parser = parser

    @property
    def what(self) -> str:
        """How many items are lost with the file."""
        verb = "is" if self.items == 1 else "are"
        return f"{counted(self.items, 'item')} {verb}"

    def run(self, file: File, read: Callable[[Callable[[int, int], None]], None]) -> None:
        """Check an open file."""
        read(Walk(self._stretches(file)).feed)

    def _stretches(self, file: File) -> Iterator[Stretch]:
        size, position = file.size(), 0
        before: tuple[int, int] | None = None
        for index, info in self._in_file:
            start, end = info.offset, info.offset + info.length
            if (start, end) == before:
                continue
            label = self._label(index)
            if start < 0 or end < start or end > size:
                self._wrong(label, f"it lies at bytes [{start}, {end}), and the file has {size}")
            elif start < position:
                self._wrong(label, f"it begins at byte {start}, before the end of the one before")
            else:
                position, before = end, (start, end)
                yield from self._in_item(file, index, info, label)

    def _in_item(
        self, file: File, index: MetadataIndex, info: Any, label: str
    ) -> Iterator[Stretch]:
        def read(offset: int, nbytes: int) -> bytes:
            return read_buffered(file, info.offset + offset, nbytes)

        def read_many(wanted: Sequence[tuple[int, int]]) -> list[bytes]:
            return [read(offset, nbytes) for offset, nbytes in wanted]

        part = self._stored.parts.get(index)
        if getattr(info, "transform_descriptors", None):
            self.unchecked += 1  # its length is all that is known here
            return
        if part is None and not _is_archive(read, info.length):
            # The bytes of a planner of others; torch's own have torch.save make them.
            self.unchecked += info.length > 0
            if info.length and not read(0, min(_HEAD_BYTES, info.length)).strip(b"\0"):
                self._wrong(label, "it begins with zeros, as what a crash has lost")
            return
        try:
            archive = torch_zip.parse(read_many, info.length, label)
            at = archive.directory_offset
            check = ArchiveCheck(archive, read(at, archive.nbytes - at), info.offset)
        except IntegrityError as wrong:
            self._wrong(label, str(wrong))
            return
        yield from check.stretches()
        for problem in check.problems:
            self._wrong(label, f"{problem.record}: {problem.what}")
        self.unchecked += bool(check.unchecked)
        if part is not None and not check.problems:
            self._compare(info, label, part, read)

    def _compare(
        self,
        info: Any,
        label: str,
        part: TensorPart,
        read: Callable[[int, int], bytes],
    ) -> None:
        """Compare the tensor of an item with the metadata."""
        try:
            found = self._parser.stored(read, info.length, label)
        except (IntegrityError, pickle.UnpicklingError) as wrong:
            self._wrong(label, str(wrong))
            return
        if found is None:  # a subclass, or a quantised or sparse one: only torch knows its shape
            return
        dtype, shape = found.tensor.dtype, tuple(found.tensor.shape)
        if (dtype, shape) != (part.dtype, part.sizes):
            told = f"it is a tensor of {dtype} {shape}, and the metadata says {part.dtype} "
            self._wrong(label, f"{told}{part.sizes}")

    def _label(self, index: MetadataIndex) -> str:
        part = self._stored.parts.get(index, "")
        return f"{self._name}: item '{index.fqn}{part}'"

    def _wrong(self, label: str, what: str) -> None:
        self.problems.append(Problem(label, what.removeprefix(f"{label}: ")))


def _is_archive(read: Callable[[int, int], bytes], nbytes: int) -> bool:
    """Whether an item is an archive at one of its ends: the other one may be damaged."""
    if nbytes < _END_BYTES:
        return False
    end = read(nbytes - _END_BYTES, len(torch_zip.END_MAGIC))
    return (
        read(0, len(torch_zip.LOCAL_MAGIC)) == torch_zip.LOCAL_MAGIC or end == torch_zip.END_MAGIC
    )

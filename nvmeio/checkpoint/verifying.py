"""Checking a checkpoint: the CRC-32 of every record, and that the archive agrees with itself.

A torch archive is read from its first byte to its last, as one stream of large direct reads in a
ring of buffers, and each byte is looked at once: a header is compared with the directory's entry, a
record's bytes go into its CRC-32, its descriptor must agree with the directory. A safetensors file
has no checksums: its structure is checked, and the existence of an index's files. A file of `nvmeio
pack` has checksums in its index: every byte is checked.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

from nvmeio._formats import packed_index
from nvmeio._formats.packed_index import Share
from nvmeio._formats.safetensors import shards
from nvmeio._formats.safetensors.headers import Header
from nvmeio._formats.safetensors.open_set import header_of
from nvmeio._formats.sniff import Kind, NoCheckpointError, kind_of, open_checkpoint
from nvmeio._formats.torch_archives.torch_checking import (
    ArchiveCheck,
    Stream,
    Stretch,
    Walk,
    stream,
)
from nvmeio._formats.torch_archives.torch_checking import Problem as Problem
from nvmeio._formats.torch_archives.torch_file import TorchFile, scan_pickle, spans_of
from nvmeio._formats.torch_archives.torch_part import HEAD_BYTES, head_of
from nvmeio._io.handles import CallHandle
from nvmeio._io.inflight import InFlight
from nvmeio._io.spans import Load
from nvmeio._threads.interruptible import run_interruptible
from nvmeio.errors import IntegrityError, TransferError, counted, naming
from nvmeio.files import File, read_buffered
from nvmeio.files import open as open_file
from nvmeio.handle import AioHandle


class Verdict(NamedTuple):
    """The findings of `verify`.

    Attributes:
        path: The file; the directory of a DCP checkpoint.
        kind: Its format.
        nbytes: Its size.
        records: How many records (of safetensors: tensors; of DCP: items) it has; 0 if that is not
            known.
        unchecked: How many of them have no checksum.
        problems: The errors that were found; empty if there are none.
        what: Which part of a rank on its own drive, or of a packed model. For DCP: the number of
            its files, and files beside them that are not part of it.
    """

    path: str
    kind: Kind | Literal["dcp"]
    nbytes: int
    records: int
    unchecked: int
    problems: list[Problem]
    what: str = ""


def verify(
    path: str | os.PathLike[str],
    *,
    handle: AioHandle | None = None,
    progress: Callable[[int], None] | None = None,
) -> Verdict:
    """Check every byte of a checkpoint that can be checked; blocks.

    Args:
        path: A torch archive, of nvmeio.save or torch.save, a safetensors file, an index of
            several (``*.safetensors.index.json``: whether all files are there, with the tensors
            that it says are in them), or what a Checkpointer with ``shared=False`` wrote on the
            drive of one rank.
        handle: Moves the bytes, and stays open; None makes one for this call.
        progress: Called with the number of bytes done since the last call.

    Returns:
        The findings; damage is not an error here.

    Raises:
        NoCheckpointError: The file is not one of these, or has nothing to check: torch's
            format from before its zip files, a TorchScript archive.
        TransferError: It cannot be opened or read.

    Cost: one read of the file, in 64 MiB of memory.
    """
    flight = InFlight()
    return run_interruptible(
        lambda: _verify(path, handle, progress or (lambda nbytes: None), flight), flight.cancel
    )


def _verify(
    path: str | os.PathLike[str],
    handle: AioHandle | None,
    progress: Callable[[int], None],
    flight: InFlight,
) -> Verdict:
    if os.fspath(path).endswith(shards.INDEX_SUFFIX):
        return _verify_index(Path(path))
    kinds = {"safetensors": _verify_safetensors, "part": _verify_part, "torch": _verify_archive}
    with open_checkpoint(path) as file, CallHandle(handle, path) as call_handle:
        kind = kind_of(file)
        if kind == "torch legacy":
            raise NoCheckpointError(
                f"{path} is in torch's format from before its zip files, which has no checksums"
            )
        return kinds[kind](file, call_handle, partial(stream, file, call_handle, progress, flight))


def _verify_index(path: Path) -> Verdict:
    """Check that all files of an index are there, and each tensor is in its file."""
    with naming("open", path):
        nbytes = path.stat().st_size
    try:
        named = shards.read_index(path)
    except IntegrityError as wrong:
        return Verdict(str(path), "safetensors", nbytes, 0, 0, [Problem("", str(wrong))])
    problems: list[Problem] = []
    for shard, names in named.items():
        try:
            with open_file(shard) as file:
                held = header_of(file).tensors
        except (IntegrityError, TransferError) as failed:
            why = "is not there" if isinstance(failed, FileNotFoundError) else str(failed)
            told = f"holds {counted(len(names), 'tensor')} of the index, and {why}"
            problems.append(Problem(shard.name, told))
            continue
        lacking = [name for name in names if name not in held]
        if lacking:
            told = f"lacks {counted(len(lacking), 'tensor')} that the index says is in it"
            problems.append(Problem(shard.name, f"{told}: {', '.join(map(repr, lacking[:3]))}"))
    count = sum(map(len, named.values()))
    what = f"an index of {counted(len(named), 'file')}"
    return Verdict(str(path), "safetensors", nbytes, count, 0, problems, what)


def _verify_safetensors(file: File, handle: CallHandle, stream: Stream) -> Verdict:
    """Check every byte of what `nvmeio pack` wrote; other files have no checksums."""
    nbytes, problems = file.size(), []
    count = unchecked = 0
    try:
        header = header_of(file)
        count = unchecked = len(header.tensors)
        begin = min((entry.start for entry in header.tensors.values()), default=nbytes)
        shares = _packed_shares(read_buffered(file, 0, begin), header, file.path)
    except IntegrityError as wrong:
        problems.append(Problem("", str(wrong)))
        shares = None
    if shares is None:
        stream(None)
    else:
        problems += _check_shares(stream, shares)
        unchecked = 0
    what = "" if problems else packed_index.part_in_words(header.metadata)
    return Verdict(file.path, "safetensors", nbytes, count, unchecked, problems, what)


def _verify_part(file: File, handle: CallHandle, stream: Stream) -> Verdict:
    """Check one rank's part of a checkpoint, which has one checksum."""
    nbytes = file.size()
    try:
        head = head_of(file)
    except IntegrityError as wrong:
        stream(None)
        return Verdict(file.path, "part", nbytes, 0, 0, [Problem("", str(wrong))])
    if head.sum is None:
        stream(None)
        return Verdict(file.path, "part", nbytes, 1, 1, [], head.what)
    problems = _check_shares(stream, [Share(head.what, HEAD_BYTES, nbytes, head.sum)])
    return Verdict(file.path, "part", nbytes, 1, 0, problems, head.what)


def _packed_shares(prefix: bytes, header: Header, path: str) -> list[Share] | None:
    """The ranges of a packed file that have a checksum; None if it has none."""
    if not packed_index.may_be_packed(prefix):
        return None
    text = header.metadata.get(packed_index.KEY)
    try:
        index = None if text is None else packed_index.read(text)
        whole = packed_index.is_whole(prefix, index)
        sums = None if index is None else packed_index.sums_in(index, header.tensors)
        of_part = header.metadata.get(packed_index.PART)
        part = None if of_part is None else packed_index.read_part(of_part)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as failed:
        whole, told = False, f"its index cannot be read ({type(failed).__name__}: {failed})"
    else:
        told = f"bytes [0, {len(prefix)}), its header, differ from what was packed there"
    if not whole:
        raise IntegrityError(f"{path}: {told}", expected="what nvmeio pack writes", found=told)
    if part is not None:
        return [
            Share(packed_index.in_words(part), len(prefix) + start, len(prefix) + end, value)
            for start, end, value in packed_index.spans_of(part)
            if start < end
        ]
    return None if sums is None else packed_index.shares_of(header.tensors, sums)


def _check_shares(stream: Stream, shares: Sequence[Share]) -> list[Problem]:
    """Read a file, and compare the CRC-32 of each share."""
    problems: list[Problem] = []

    def conclude(share: Share, crc: int, _: bytes) -> None:
        if crc != share.sum:
            told = f"bytes [{share.start}, {share.end}) differ from what was written there: "
            told += f"their CRC-32 is {crc:#010x} and should be {share.sum:#010x}"
            problems.append(Problem(share.name, told))

    stream(Walk(Stretch(s.start, s.end, partial(conclude, s)) for s in shares).feed)
    return problems


def _verify_archive(file: File, handle: CallHandle, stream: Stream) -> Verdict:
    nbytes = file.size()
    try:
        checkpoint = TorchFile(file, handle.get, Load())
    except IntegrityError as wrong:
        return Verdict(file.path, "torch", nbytes, 0, 0, [Problem("", str(wrong))])
    archive = checkpoint.archive
    if archive.is_script:
        raise NoCheckpointError(f"{file.path} is a TorchScript archive")
    at = archive.directory_offset
    check = ArchiveCheck(archive, read_buffered(file, at, archive.nbytes - at))
    stream(Walk(check.stretches()).feed)
    problems = check.problems
    try:
        spans_of(checkpoint, file, scan_pickle(checkpoint))
    except IntegrityError as wrong:
        # A problem of the pickle's own bytes has been told, with the record's name.
        if not any(problem.record.endswith("data.pkl") for problem in problems):
            problems.append(Problem("", str(wrong)))
    return Verdict(file.path, "torch", nbytes, len(archive.entries), check.unchecked, problems)

"""Spans of striped files as what transfers, tensors and the window of parameters are made of."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from nvmeio._io.drives import FileSpan, StripedFile
from nvmeio.files import File
from nvmeio.offload._step.pipeline import Move
from nvmeio.offload._swap_files.file_tensors import FilePart


class Extent(NamedTuple):
    """A run of a parameter's elements in a file.

    Attributes:
        file: The file.
        file_offset: Of the first of them, in bytes.
        start: The first element.
        stop: Behind the last.
    """

    file: File
    file_offset: int
    start: int
    stop: int


def moves_of(file: StripedFile, file_offset: int, slot_offset: int, nbytes: int) -> list[Move]:
    """The transfers between bytes of a striped file and a slot."""
    return [
        Move(span.file, span.file_offset, slot_offset + span.start, span.nbytes)
        for span in file.spans(file_offset, nbytes)
    ]


def extents_of(
    file: StripedFile, file_offset: int, start: int, stop: int, itemsize: int
) -> list[Extent]:
    """Where elements `start` to `stop` are, the first of them at `file_offset`.

    Chunks are whole pages and tensors aligned, so that no element lies on two drives.
    """
    return [
        Extent(
            span.file,
            span.file_offset,
            start + span.start // itemsize,
            start + (span.start + span.nbytes) // itemsize,
        )
        for span in file.spans(file_offset, (stop - start) * itemsize)
    ]


def parts_of(spans: Iterable[FileSpan]) -> list[FilePart]:
    """Spans as parts of a tensor over files."""
    found: list[FilePart] = []
    for span in spans:
        opened = span.file.acquire(False)
        try:
            found.append(FilePart(opened.any_fd(), span.file_offset, span.nbytes))
        finally:
            opened.release()
    return found

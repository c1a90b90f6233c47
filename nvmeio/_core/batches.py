"""What a batch moves: many tensors, each at a place of its own in a file of its own."""

from __future__ import annotations

import itertools
import operator
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, Union

import torch

from nvmeio import _checks, files
from nvmeio._files.descriptors import Descriptors
from nvmeio._memory import holds
from nvmeio._memory import tensors as tensors_module
from nvmeio._memory.tensors import Data, Memory
from nvmeio.engines.base import Opcode
from nvmeio.files import File

if TYPE_CHECKING:
    import numpy

FileLike = str | os.PathLike[str] | int | File
Files = FileLike | Sequence[FileLike]
BatchOffsets = Union[torch.Tensor, "numpy.ndarray[Any, Any]", Sequence[int], None]
Mover = TypeVar("Mover")

_FILES = (str, os.PathLike, int, File)


class BatchMember:
    """What a batch has to do with one file.

    Attributes:
        file: As the caller named it.
        items: The numbers of its items.
        opened: While it is open.
        released: Whether it has been closed since.
    """

    __slots__ = ("file", "items", "opened", "released")

    def __init__(self, file: Any, items: Sequence[int]) -> None:
        named = isinstance(file, (str, os.PathLike))
        self.file: FileLike = files.checked_path(file) if named else file
        self.items = items
        self.opened: Descriptors | None = None
        self.released = False

    @property
    def is_path(self) -> bool:
        """Whether it may be opened later, and more than once."""
        return isinstance(self.file, str)

    @property
    def name(self) -> str:
        """For messages."""
        file = self.file
        if isinstance(file, File):
            return file.path
        return f"descriptor {file}" if isinstance(file, int) else str(file)

    def open(self, writing: bool) -> Descriptors:
        """Its descriptors.

        Raises:
            TransferError: As `files.acquire` does.
        """
        if self.opened is None:
            self.released = False
            self.opened = files.acquire(self.file, writing)
        return self.opened

    def close(self) -> None:
        """Give the descriptors back; OSError where closing tells of an error, and then again."""
        if self.opened is not None:
            self.opened.release(self)
            self.opened = None


class Batch:
    """What a batch moves, and where to.

    Args:
        memories: Of the tensors.
        held: What holds their storages, where a memory does not itself; ends with the batch.

    Attributes:
        parts: Which of them belong to which file.
        offsets: Where in its file each of them begins.
    """

    __slots__ = ("held", "memories", "offsets", "parts")

    def __init__(self, memories: list[Memory], held: Any) -> None:
        self.memories = memories
        self.held = held
        self.parts: list[BatchMember] = []
        self.offsets: list[int] = []

    def end(self) -> None:
        """Nobody needs the memory any more."""
        holds.end(self.held)
        for memory in self.memories:
            if memory.held is not None:
                memory.end()


def memories_of(
    opcode: Opcode,
    tensors: Sequence[Data],
    memory_of: Callable[[Data], tuple[Mover, Memory]],
    usual: Mover | None,
) -> tuple[Mover | None, list[Memory], Any]:
    """The memory of many tensors, and who moves it.

    Args:
        opcode: Whether it is read into, or written.
        tensors: What the caller gave.
        memory_of: A single one's, and who moves it.
        usual: Who moves memory that is used where it lies; None to ask `memory_of` for each.

    Returns:
        Who moves all of it (None if there is none), the memory, and a hold on what is used where it
        lies.

    Raises:
        TypeError: Something has no memory.
        ValueError: Not the same moves all of it.
    """
    if isinstance(tensors, (torch.Tensor, bytes, bytearray)) or not isinstance(tensors, Sequence):
        raise TypeError(f"tensors must be a list of them, not a {type(tensors).__name__}")
    found: list[Memory | None] = [None] * len(tensors)
    held = None
    if usual is not None:
        found, held = tensors_module.in_place(tensors, opcode is Opcode.READ)
    mover = usual if any(each is not None for each in found) else None
    memories: list[Memory] = []
    try:
        for item, memory in enumerate(found):
            if memory is None:
                moves, memory = _asked(memory_of, tensors[item], item)
                found[item] = memory
                if mover is not None and moves is not mover:
                    raise ValueError(
                        f"item {item} lies on another kind of device than those before it: have a "
                        "batch for CUDA tensors, and one for those on the CPU"
                    )
                mover = moves
            memories.append(memory)
    except BaseException:
        holds.end(held)
        for each in found:
            if each is not None:
                each.end()
        raise
    return mover, memories, held


def _asked(
    memory_of: Callable[[Data], tuple[Mover, Memory]], tensor: Data, item: int
) -> tuple[Mover, Memory]:
    try:
        return memory_of(tensor)
    except (TypeError, ValueError, RuntimeError) as failed:
        if type(failed) in (TypeError, ValueError, RuntimeError):
            raise type(failed)(f"item {item}: {failed}") from failed
        raise


def laid_out(
    opcode: Opcode, memories: list[Memory], held: Any, files: Files, file_offsets: BatchOffsets
) -> Batch:
    """A batch, given its memory and the hold on that, which ends with it, or now if this raises.

    Raises:
        TypeError: A file is none, or offsets are no integers.
        ValueError: There are not as many as memories, or a piece would lie outside of any file, or
            over another that is written.
    """
    batch = Batch(memories, held)
    try:
        batch.offsets, batch.parts = _places(opcode, memories, files, file_offsets)
    except BaseException:
        batch.end()
        raise
    return batch


def _places(
    opcode: Opcode, memories: list[Memory], files: Files, file_offsets: BatchOffsets
) -> tuple[list[int], list[BatchMember]]:
    """Where items begin, and which of them belong to which file."""
    number = len(memories)
    one = isinstance(files, _FILES)
    for file in (files,) if one else _one_of_each_type(files):
        if not isinstance(file, _FILES) or isinstance(file, bool):
            raise TypeError(
                f"a file must be a path, an open descriptor or an nvmeio.File, not {file!r}"
            )
    sizes = [memory.nbytes for memory in memories]
    offsets = _offsets(file_offsets, sizes, one)
    highest = max(map(operator.add, offsets, sizes), default=0)
    if min(offsets, default=0) < 0 or highest > _checks.OFFSET_MAX:
        for item, offset in enumerate(offsets):
            _checks.file_offset(f"file_offsets[{item}]", offset, sizes[item])
    parts = [BatchMember(files, range(number))] if one else _parts(files, number)
    if opcode is Opcode.WRITE:
        for part in parts:
            _check_apart(part, offsets, sizes)
    return offsets, parts if number else []


def _one_of_each_type(files: Any) -> list[Any]:
    if isinstance(files, (bytes, bytearray)) or not isinstance(files, Sequence):
        raise TypeError(
            "files must be a path, an open descriptor, an nvmeio.File, or a list of these, not "
            f"{type(files).__name__}"
        )
    return list({type(file): file for file in files}.values())


def _parts(files: Any, number: int) -> list[BatchMember]:
    if len(files) != number:
        raise ValueError(f"there are {number} tensors, but {len(files)} files")
    items_of: dict[Any, list[int]] = {}
    for item, file in enumerate(files):
        key = os.fspath(file) if isinstance(file, os.PathLike) else file
        found = items_of.get(key)
        if found is None:
            items_of[key] = [item]
        else:
            found.append(item)
    return [BatchMember(files[items[0]], items) for items in items_of.values()]


def _offsets(file_offsets: Any, sizes: list[int], one: bool) -> list[int]:
    number = len(sizes)
    if file_offsets is None:
        return list(itertools.accumulate(sizes, initial=0))[:number] if one else [0] * number
    if hasattr(file_offsets, "tolist"):  # a tensor, or numpy's
        file_offsets = file_offsets.tolist()
    if isinstance(file_offsets, (str, bytes)) or not isinstance(file_offsets, Sequence):
        raise TypeError(
            "file_offsets must be a tensor, a numpy array or a sequence of integers, not "
            f"{type(file_offsets).__name__}"
        )
    if len(file_offsets) != number:
        raise ValueError(f"there are {number} tensors, but {len(file_offsets)} file_offsets")
    if set(map(type, file_offsets)) <= {int}:
        return list(file_offsets)
    return [
        _checks.integer(f"file_offsets[{item}]", offset) for item, offset in enumerate(file_offsets)
    ]


def _check_apart(part: BatchMember, offsets: list[int], sizes: list[int]) -> None:
    """Refuse to write two pieces over each other: which of them would remain is unknown."""
    items = [item for item in part.items if sizes[item]]
    items.sort(key=offsets.__getitem__)
    for one, other in itertools.pairwise(items):
        if offsets[one] + sizes[one] > offsets[other]:
            one, other = sorted((one, other))
            raise ValueError(
                f"items {one} and {other} of a batch overlap in {part.name}, and which of them "
                "would remain is unknown; nothing was written"
            )

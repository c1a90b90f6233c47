"""`save`: an object into a torch checkpoint, at once or not at all."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import struct
from array import array
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from nvmeio._bindings import buffer_at
from nvmeio._formats.torch_archives import torch_layout
from nvmeio._formats.torch_archives.torch_layout import (
    DEFAULT_PROTOCOL,
    FileLayout,
    UnknownWriterError,
)
from nvmeio._io.long_call import LongCall
from nvmeio._memory import holds
from nvmeio._storage import crc32
from nvmeio._storage.replace import Replacement, replace_from
from nvmeio._threads.interruptible import in_thread, run_interruptible

if TYPE_CHECKING:
    from nvmeio.handle import AioHandle
    from nvmeio.progress import Progress

logger = logging.getLogger("nvmeio")

# Up to this a state is written from where it lies, through the page cache. That took 0.7 of the
# time of a handle, its threads and staging at 8 MiB and 0.9 at 32, and 0.8 of the CPU time: the
# drive writes copied bytes while the rest is copied (`native_shim/pump/replace.c`).
SMALL_BYTES = 40 << 20


def save(
    obj: object,
    path: str | os.PathLike[str],
    pickle_module: Any = pickle,
    pickle_protocol: int = DEFAULT_PROTOCOL,
    *,
    checksum: bool = True,
    handle: AioHandle | None = None,
    progress: Progress | None = None,
) -> None:
    """Save an object as `torch.save` does, at the drive's speed, atomically and durably.

    The file is an ordinary torch checkpoint that every `torch.load` reads; from 8 MiB on its
    storages lie on 4 KiB boundaries. It is written beside `path` under a temporary name and renamed
    when all of it is durable, so `path` is the old file or the new one at every moment, also after
    a crash, and the new one once this returns.

    Args:
        obj: Anything that torch.save takes; it must not be changed meanwhile.
        path: The file. Its directory is made if it is missing, one level. A symbolic link stays,
            and what it leads to is replaced. A file that exists keeps its permissions.
        pickle_module: As for torch.save.
        pickle_protocol: As for torch.save.
        checksum: Write the CRC-32 of every record, computed beside the transfer; `nvmeio verify`
            checks them. Without, 0 stands in their place.
        handle: Moves the bytes, and stays open; None makes one for this call.
        progress: Told how far it is: ``progress(what, done_bytes, total_bytes)``; see
            `nvmeio.progress`.

    Raises:
        TransferError: The disk is full, the directory cannot be written in, the drive failed.
        Exception: Any error of pickling the object.

    After an error or interrupt: `path` is as it was, and the partial file is gone. (A save that an
    interrupt meets after its rename, or as a small file is being written, is complete.) The object
    is pickled in the calling thread; what is larger than 40 MiB is written in another one, where
    that is the main thread.

    Cost: no copy of the state: what torch allocated goes through 48 MiB of staging, and what
    neither torch nor nvmeio did through the handle's bounce memory, whatever the size. Storages on
    a GPU go through 64 MiB of page-locked memory. A state of up to 40 MiB without a handle of the
    caller's is written through the page cache, from where it lies.
    """
    pickled_by = (pickle_module, pickle_protocol)
    with LongCall("save", path, progress) as call:
        _save(obj, path, pickled_by, checksum, handle, call)


async def async_save(
    obj: object,
    path: str | os.PathLike[str],
    pickle_module: Any = pickle,
    pickle_protocol: int = DEFAULT_PROTOCOL,
    *,
    checksum: bool = True,
    handle: AioHandle | None = None,
    progress: Progress | None = None,
) -> None:
    """`save`, awaited: a thread does it, so that the event loop goes on meanwhile.

    The object must not change until this returns. The thread pickles it and then reads its memory
    to the end: a byte that changes meanwhile may be old or new in the file, and its checksum may be
    wrong. No snapshot is taken here. To go on at once, use `Checkpointer.save`, or take one:

        frozen = nvmeio.snapshot(obj)  # from here on `obj` may change
        await nvmeio.async_save(await frozen, path)

    Parameters and errors as for `save`.

    Cancelling stops the writing; `CancelledError` is raised once nothing is in flight, the partial
    file is gone, and `path` is as it was. A save that was being renamed at that moment, or a small
    file (40 MiB) that was being written, is complete.
    """
    pickled_by = (pickle_module, pickle_protocol)
    with LongCall("save", path, progress) as call:
        await in_thread(lambda: _save(obj, path, pickled_by, checksum, handle, call), call.cancel)


def _save(
    obj: object,
    path: str | os.PathLike[str],
    pickled_by: tuple[Any, int],
    checksum: bool,
    handle: AioHandle | None,
    call: LongCall,
) -> None:
    """Pickle in this thread, and write in one that no interrupt cuts short."""
    try:
        pickling = torch_layout.pickled(obj, *pickled_by)
        call.check()
        if handle is None and pickling.nbytes <= SMALL_BYTES:
            _write_pickled(pickling, path, checksum, call)
        else:
            run_interruptible(lambda: _write(pickling, path, checksum, handle, call), call.cancel)
    except UnknownWriterError as unknown:
        logger.warning("saving through torch.save, which is slower: %s", unknown)
        from nvmeio.checkpoint.file_objects import FastFileWriter

        with FastFileWriter(path, handle=handle) as writer:
            torch.save(obj, writer, *pickled_by)  # type: ignore[arg-type]


def _write_pickled(
    pickling: torch_layout.Pickling, path: str | os.PathLike[str], checksum: bool, call: LongCall
) -> None:
    """`write_small` of a pickled object, whose storages are asked for their memory once each."""
    if not all([storage.device.type == "cpu" for storage in pickling.storages.values()]):
        write_small(pickling.layout(), path, checksum, call)
        return
    skeleton, storages = pickling.skeleton()
    filled: list[_Filled] = []
    with _held([storage for storage, *_ in storages]):
        for storage, name, offset, nbytes, crc_at in storages:
            if storage.nbytes() != nbytes:
                raise torch_layout.resized(name, nbytes, storage.nbytes())
            filled.append((offset, storage.data_ptr(), nbytes, crc_at))
        places, _kept = _in_order(skeleton.pieces, filled, checksum)
        _replace(path, places, skeleton.nbytes, call)


def write_small(
    layout: FileLayout, path: str | os.PathLike[str], checksum: bool, call: LongCall
) -> None:
    """Write from where its bytes lie, in this thread; an interrupt comes before it or after it."""
    each: list[tuple[Any, int]] = [(record.data, record.nbytes) for record in layout.records]
    sources = [(d if isinstance(d, torch.Tensor) else d(0, nbytes)).cpu() for d, nbytes in each]
    filled: list[_Filled] = []
    with _held([source.untyped_storage() for source in sources]) as storages:
        for record, source, storage in zip(layout.records, sources, storages, strict=True):
            if storage.nbytes() < record.nbytes:
                raise torch_layout.resized(record.name, record.nbytes, storage.nbytes())
            filled.append((record.offset, source.data_ptr(), record.nbytes, record.crc_at))
        places, _kept = _in_order(layout.pieces, filled, checksum)
        _replace(path, places, layout.nbytes, call)


def write_behind(
    text: bytes, tensors: Mapping[str, torch.Tensor], path: str | os.PathLike[str], call: LongCall
) -> None:
    """The same of a file of a text, and all bytes of simple tensors behind it, in this order."""
    head = array("B", text)
    places = array("Q", head.buffer_info())
    nbytes = len(text)
    with _held([tensor.untyped_storage() for tensor in tensors.values()]) as storages:
        for (name, tensor), storage in zip(tensors.items(), storages, strict=True):
            wanted, there = tensor.nbytes, storage.nbytes()
            if there - tensor.storage_offset() * tensor.itemsize < wanted:
                raise torch_layout.resized(name, wanted, there)
            if wanted:
                places.extend((tensor.data_ptr(), wanted))
                nbytes += wanted
        _replace(path, places, nbytes, call)


# Offset, address and length of bytes in memory, and the place of their CRC-32.
_Filled = tuple[int, int, int, tuple[int, ...]]


@contextlib.contextmanager
def _held(storages: list[torch.UntypedStorage]) -> Iterator[list[torch.UntypedStorage]]:
    """Storages that torch does not resize for the body."""
    # Storages that cannot be held are memory of others, which torch does not resize.
    held, _ = holds.hold_all(storages)
    try:
        yield storages
    finally:
        holds.end(held)


def _in_order(
    pieces: Iterable[tuple[int, bytes]], filled: list[_Filled], checksum: bool
) -> tuple[array[int], object]:
    """The places of a file's bytes, in its order, and what keeps those of the known pieces."""
    starts: list[int] = []
    known: list[array[int]] = []
    for start, data in pieces:
        starts.append(start)
        known.append(array("B", data))
    parts: list[tuple[int, int, int]] = []
    sums: list[tuple[int, int]] = []
    for offset, address, nbytes, crc_at in filled:
        parts.append((offset, address, nbytes))
        if checksum:
            crc = crc32.of_bytes(buffer_at(address, nbytes))
            sums += [(at, crc) for at in crc_at]
    # In the file's order, the piece of each is that of the one before it, or a later one.
    sums.sort()
    number, last = 0, len(starts) - 1
    for at, crc in sums:
        while number < last and starts[number + 1] <= at:
            number += 1
        at -= starts[number]
        struct.pack_into("<I", known[number], at, crc)
    parts += [(at, *data.buffer_info()) for at, data in zip(starts, known, strict=True)]
    parts.sort()
    places = array("Q")
    for _, *place in parts:
        places.extend(place)
    return places, known


def _replace(path: str | os.PathLike[str], places: array[int], nbytes: int, call: LongCall) -> None:
    call.expect(nbytes)
    call.moved(nbytes)  # called first: if it raises or cancels, the old file stays
    call.check()
    replace_from(path, places)


def _write(
    pickling: torch_layout.Pickling,
    path: str | os.PathLike[str],
    checksum: bool,
    handle: AioHandle | None,
    call: LongCall,
) -> None:
    # Most states that people try first are small: what only others need is imported here.
    from nvmeio._formats.torch_archives.torch_writing import padded_nbytes, write_part
    from nvmeio._io.handles import CallHandle
    from nvmeio._io.inflight import InFlight

    with Replacement(path) as replacement, CallHandle(handle, replacement.temporary) as call_handle:
        layout = pickling.layout()
        nbytes = padded_nbytes(layout)
        replacement.reserve(nbytes)
        flight = InFlight(finished=call.finished)
        call.then(flight.cancel)
        call.expect(nbytes)
        write_part(call_handle.get(), replacement.file, layout, checksum=checksum, flight=flight)
        call_handle.done()
        replacement.truncate(layout.nbytes)
        call.check()
        replacement.commit()

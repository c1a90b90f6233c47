"""`save`: an object into a torch checkpoint, at once or not at all."""

from __future__ import annotations

import logging
import os
import pickle
import struct
from bisect import bisect_right
from typing import TYPE_CHECKING, Any

import torch

from nvmeio._bindings import memory_at
from nvmeio._formats.torch_archives import torch_layout
from nvmeio._formats.torch_archives.torch_layout import (
    DEFAULT_PROTOCOL,
    FileLayout,
    UnknownWriterError,
)
from nvmeio._io.long_call import LongCall
from nvmeio._memory import holds
from nvmeio._storage import crc32
from nvmeio._storage.replace import Replacement, replace_file
from nvmeio._threads.interruptible import in_thread, run_interruptible

if TYPE_CHECKING:
    from nvmeio.handle import AioHandle
    from nvmeio.progress import Progress

logger = logging.getLogger("nvmeio")

# Up to this a state is written from where it lies, through the page cache. That took 0.7 of the
# time of a handle, its threads and staging at 8 MiB and 0.9 at 16; as long from 20 MiB on where the
# drive writes 0.8 GB/s, from 16 on where it writes 2.4.
SMALL_BYTES = 20 << 20


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
        Exception: What pickling the object raises.

    After an error or interrupt: `path` is as it was, and the partial file is gone. (A save that an
    interrupt meets after its rename, or as a small file is being written, is complete.) The object
    is pickled in the calling thread; what is larger than 20 MiB is written in another one, where
    that is the main thread.

    Cost: no copy of the state: what torch allocated goes through 48 MiB of staging, and what
    neither torch nor nvmeio did through the handle's bounce memory, whatever the size. Storages on
    a GPU go through 64 MiB of page-locked memory. A state of up to 20 MiB without a handle of the
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
    file (20 MiB) that was being written, is complete.
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
            write_small(pickling.layout(), path, checksum, call)
        else:
            run_interruptible(lambda: _write(pickling, path, checksum, handle, call), call.cancel)
    except UnknownWriterError as unknown:
        logger.warning("saving through torch.save, which is slower: %s", unknown)
        from nvmeio.checkpoint.file_objects import FastFileWriter

        with FastFileWriter(path, handle=handle) as writer:
            torch.save(obj, writer, *pickled_by)  # type: ignore[arg-type]


def write_small(
    layout: FileLayout, path: str | os.PathLike[str], checksum: bool, call: LongCall
) -> None:
    """Write from where its bytes lie, in this thread; an interrupt comes before it or after it."""
    call.expect(layout.nbytes)
    each: list[tuple[Any, int]] = [(record.data, record.nbytes) for record in layout.records]
    sources = [(d if isinstance(d, torch.Tensor) else d(0, nbytes)).cpu() for d, nbytes in each]
    # What cannot be held is memory of others, which torch does not resize.
    held, _ = holds.hold_all([source.untyped_storage() for source in sources])
    try:
        parts = _in_order(layout, sources, checksum)
        call.moved(layout.nbytes)  # told before: whoever raises, or cancels, keeps the old file
        call.check()
        replace_file(path, parts)
    finally:
        holds.end(held)


def _in_order(layout: FileLayout, sources: list[torch.Tensor], checksum: bool) -> list[memoryview]:
    """The whole of a file, in its order; its storages where they lie."""
    starts = [piece.offset for piece in layout.pieces]
    parts = {piece.offset: memoryview(bytearray(piece.data)) for piece in layout.pieces}
    for record, source in zip(layout.records, sources, strict=True):
        nbytes = source.untyped_storage().nbytes()
        if nbytes < record.nbytes:
            raise torch_layout.resized(record.name, record.nbytes, nbytes)
        parts[record.offset] = memory = memory_at(source.data_ptr(), record.nbytes)
        crc = crc32.of_bytes(memory) if checksum else 0
        for at in record.crc_at:
            start = starts[bisect_right(starts, at) - 1]
            struct.pack_into("<I", parts[start], at - start, crc)
    return [parts[offset] for offset in sorted(parts)]


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

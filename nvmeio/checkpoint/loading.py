"""`load`: a torch checkpoint into memory, its storages as few large direct reads.

torch's own unpickler decides what is loaded. It asks its zip reader for one storage after another;
here it is given a reader whose storages have been read already, all at once, straight into the
memory that the tensors then live in.

    1. the zip's structure is checked, the pickle scanned      (torch_zip, torch_unpickler)
    2. what is not allowed, or cannot be, is refused                nothing is allocated before
    3. all storages that the pickle refers to are read              (spans)
    4. torch unpickles, with them

The last is in `_unpickling`, which also says what is left to torch.load.
"""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from nvmeio import _checks
from nvmeio._distributed import DEFAULT_TIMEOUT_S
from nvmeio._formats.sniff import check_older, open_checkpoint
from nvmeio._formats.torch_archives import pickle_values
from nvmeio._formats.torch_archives.pickle_values import Scan
from nvmeio._formats.torch_archives.torch_file import (
    TorchFile,
    check_calls,
    places_of,
    same_file,
    scan_pickle,
    spans_of,
)
from nvmeio._formats.torch_archives.torch_zip import LOCAL_MAGIC, SMALL_BYTES
from nvmeio._io.long_call import LongCall
from nvmeio._threads.interruptible import in_thread, run_interruptible
from nvmeio.checkpoint import _unpickling as unpickling
from nvmeio.checkpoint._unpickling import HowToLoad, LoadOptions, MapLocation, nothing_to_read
from nvmeio.errors import IntegrityError
from nvmeio.files import File, read_buffered

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from nvmeio._io.handles import CallHandle
    from nvmeio.checkpoint._multi_rank.loading_ranks import LoadingRanks
    from nvmeio.handle import AioHandle
    from nvmeio.progress import Progress

_CPU = torch.device("cpu")


def load(
    path: str | os.PathLike[str],
    map_location: MapLocation = None,
    pickle_module: Any = None,
    *,
    weights_only: bool = True,
    mmap: bool | None = None,
    handle: AioHandle | None = None,
    progress: Progress | None = None,
    process_group: ProcessGroup | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    **pickle_load_args: Any,
) -> Any:
    """Load what `nvmeio.save` or `torch.save` wrote, at the drive's speed.

    Storages are read in parallel, past the page cache, into huge pages that the tensors then live
    in; for a CUDA device through a ring of page-locked memory. A storage of 8 MiB or more has
    memory of its own, smaller ones share arenas of at most 32 MiB: that much one small tensor can
    keep alive.

    Args:
        path: The checkpoint. Files in torch's format from before its zip files go through
            torch.load; TorchScript archives are treated as torch.load treats them.
        map_location: As for torch.load: None, a device, a str, a dict, or a callable. A callable
            sees each storage in host memory.
        pickle_module: As for torch.load, with ``weights_only=False``.
        weights_only: Unpickle only objects that are known to be harmless. Pass False only for
            files of a source that you trust: they can run any code.
        mmap: True: torch.load maps the file, which reads a page when it is touched; for files that
            are larger than memory, or of which little is used. The file is opened once, so a writer
            that replaces `path` meanwhile changes nothing. The storages' ``filename`` is a name of
            the open file below /proc. None and False read all of the file here.
        handle: Moves the bytes, and stays open; None makes one for this call.
        progress: Told how far it is: ``progress(what, done_bytes, total_bytes)``; see
            `nvmeio.progress`. Not of files that are left to torch.load.
        process_group: Its ranks, all of which call this with the same file, each read an equal
            part of it, and get the rest from the others (through gloo, in a process group that is
            made for this call alone). Each may have a `map_location` of its own.
        timeout_s: How long one of such ranks may make no progress before the others give it up, in
            seconds.
        pickle_load_args: As for torch.load, such as ``encoding``.

    Returns:
        The object. Tied storages are tied.

    Raises:
        IntegrityError: The archive is damaged, or says what cannot be: a record past the end,
            overlapping, compressed, encrypted, there twice, or of another size than the pickle
            says. Names file and record; known before anything is allocated.
        NvmeioError: The file is not a checkpoint of torch at all, or a truncated one in the format
            from before its zip files; a `pickle.UnpicklingError` too, or an `EOFError` if it is
            empty, as of torch.load.
        pickle.UnpicklingError: torch's own refusal of what ``weights_only`` forbids, or nvmeio's of
            a call that would allocate far more than the pickle holds; likewise.
        TransferError: The file cannot be opened or read.
        TypeError: `path` is an open file; `process_group` is none.
        ValueError: This process is not a member of `process_group`.
        MemoryError: There is less memory than the state needs.

    If one of several ranks fails, dies or is interrupted, all others raise a `TransferError` that
    names the rank and the cause.

    After an error or interrupt: nothing is in flight, and nothing is kept. Unpickling is done in
    the calling thread; a file of more than 8 MiB is read in another one, where that is the main
    thread.

    Cost: the memory of the state, and no copy. The records' CRC-32 are not checked, as torch does
    not: `nvmeio verify` does.
    """
    ranks = _ranks_of(process_group, timeout_s, path)
    with contextlib.nullcontext() if ranks is None else ranks.telling():
        _checks.timeout(timeout_s)
        options = LoadOptions.checked(
            map_location, pickle_module, weights_only, mmap, pickle_load_args
        )
        with LongCall("load", _checked_path(path), progress) as call:
            how = HowToLoad(options, handle, call)
            if ranks is None:
                return load_file(path, how).result()
            return run_interruptible(lambda: load_file(path, how, ranks), call.cancel).result()


async def async_load(
    path: str | os.PathLike[str],
    map_location: MapLocation = None,
    pickle_module: Any = None,
    *,
    weights_only: bool = True,
    mmap: bool | None = None,
    handle: AioHandle | None = None,
    progress: Progress | None = None,
    process_group: ProcessGroup | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    **pickle_load_args: Any,
) -> Any:
    """`load`, awaited: a thread does it, so that the event loop goes on meanwhile.

    Parameters and errors as for `load`. Cancelling stops the reading; `CancelledError` is raised
    once nothing is in flight any more.
    """
    ranks = _ranks_of(process_group, timeout_s, path)
    with contextlib.nullcontext() if ranks is None else ranks.telling():
        _checks.timeout(timeout_s)
        options = LoadOptions.checked(
            map_location, pickle_module, weights_only, mmap, pickle_load_args
        )
        with LongCall("load", _checked_path(path), progress) as call:
            how = HowToLoad(options, handle, call)
            return await in_thread(lambda: load_file(path, how, ranks).result(), call.cancel)


def _checked_path(path: Any) -> str | os.PathLike[str]:
    if not isinstance(path, (str, bytes, os.PathLike)):
        raise TypeError(
            f"expected a path, not {type(path).__name__}; for an open file use torch.load, or "
            "torch.load(nvmeio.FastFileReader(path))"
        )
    return path  # type: ignore[return-value]


class Loaded:
    """A file that was read; the thread whose modes its code must see makes the object.

    Args:
        unpickle: Makes it.
        opened: The file that has to stay open until then; None for none.
    """

    def __init__(
        self, unpickle: Callable[[], Any], opened: contextlib.ExitStack | None = None
    ) -> None:
        self._unpickle = unpickle
        self._opened = None if opened is None else opened.pop_all()

    def result(self) -> Any:
        """The object; called once."""
        try:
            return self._unpickle()
        finally:
            if self._opened is not None:
                run_interruptible(self._opened.close, closes=True)

    @classmethod
    def of_all(cls, loads: Sequence[Loaded]) -> Loaded:
        """A list of objects."""
        return cls(lambda: [each.result() for each in loads])


def _ranks_of(group: ProcessGroup | None, timeout_s: float, path: Any) -> LoadingRanks | None:
    if group is None:
        return None
    from nvmeio.checkpoint._multi_rank.loading_ranks import LoadingRanks

    return LoadingRanks.of_group(group, timeout_s, path)


def load_file(
    path: str | os.PathLike[str], how: HowToLoad, ranks: LoadingRanks | None = None
) -> Loaded:
    """Read a file, alone or with other ranks. See `load`."""
    options = how.options
    loading = contextlib.nullcontext() if ranks is None else ranks.loading(how.call)
    with loading, contextlib.ExitStack() as opened:
        file = opened.enter_context(open_checkpoint(path))
        older = read_buffered(file, 0, min(file.size(), 4)) != LOCAL_MAGIC
        through_torch = older or options.mmap or unpickling.seam() is None
        if ranks is not None:
            ranks.meet(file, together=not (through_torch or nothing_to_read(options)))
        if older and options.pickle_module is None:  # another one may read anything
            check_older(file)
            return Loaded(partial(unpickling.load_older, file, options), opened)
        if through_torch:
            return _left_to_torch(file, options, opened)
        if ranks is None and how.handle is None and file.size() <= SMALL_BYTES:
            return _load_small(file, how, opened)
        from nvmeio._io.handles import CallHandle
        from nvmeio.checkpoint._multi_rank.loading_ranks import ALONE

        def read() -> Loaded:
            with CallHandle(how.handle, path) as handle:
                return load_archive(file, how, handle, ranks or ALONE, opened)

        return run_interruptible(read, how.call.cancel)


def _load_small(file: File, how: HowToLoad, opened: contextlib.ExitStack) -> Loaded:
    """Read a small archive through the page cache, in this thread; an interrupt leaves nothing."""
    options, call = how.options, how.call
    checkpoint = TorchFile(file, None, None, whole=not nothing_to_read(options))
    if checkpoint.archive.is_script:
        return _left_to_torch(file, options, opened)
    scan = _checked_scan(checkpoint, options)
    if nothing_to_read(options):
        return _left_to_torch(file, options, opened)
    places = places_of(checkpoint, scan)
    devices = _allowed_devices(checkpoint, scan, file, options)
    call.expect(sum(nbytes for _, nbytes in places.values()))
    found: dict[str, torch.Tensor] = {}
    for key, (_, nbytes) in places.items():
        call.check()
        device = devices[scan.storages[key].location]
        if nbytes and device.type != "meta":
            memory = checkpoint.memory_of(f"data/{key}", nbytes)
            # Its storage cannot grow.
            found[key] = torch.frombuffer(memory, dtype=torch.uint8).to(device)
        else:
            found[key] = torch.empty(nbytes, dtype=torch.uint8, device=device)
        call.moved(nbytes)
    return _to_unpickle(checkpoint, scan, found, options, file, opened)


def load_archive(
    file: File,
    how: HowToLoad,
    handle: CallHandle,
    ranks: LoadingRanks,
    opened: contextlib.ExitStack,
) -> Loaded:
    """Read an archive that is open, in `opened`, through a handle of this call."""
    from nvmeio._io.spans import Load

    options, call = how.options, how.call
    first = Load()
    call.then(first.cancel)
    checkpoint = ranks.open(partial(TorchFile, file, handle.get, first))
    if checkpoint.archive.is_script:
        return _left_to_torch(file, options, opened)
    with ranks.agreeing():
        scan = _checked_scan(checkpoint, options)
        if nothing_to_read(options):
            return _left_to_torch(file, options, opened)
        spans = spans_of(checkpoint, file, scan)
        devices = _allowed_devices(checkpoint, scan, file, options)
    found: dict[str, torch.Tensor] = {}
    for keys in _read_as_one(scan, devices, ranks):
        wanted, device = [spans[key] for key in keys], devices[scan.storages[keys[0]].location]
        if ranks.together:
            tensors = ranks.read(handle.get, file, wanted, device, call)
        else:
            tensors = Load(call).run(handle.get(), wanted, device)
        found.update(zip(keys, tensors, strict=True))
    ranks.part()
    handle.done()
    del spans  # a container by the thousand, that the collector would go through once more
    return _to_unpickle(checkpoint, scan, found, options, file, opened)


def _checked_scan(checkpoint: TorchFile, options: LoadOptions) -> Scan:
    scan = scan_pickle(checkpoint)
    if options.weights_only:
        check_calls(checkpoint, scan)
    return scan


def _allowed_devices(
    checkpoint: TorchFile, scan: Scan, file: File, options: LoadOptions
) -> dict[str, torch.device]:
    """The devices of storages, by their location, after the check for forbidden content."""
    if options.weights_only and not scan.globals <= pickle_values.COMMON_GLOBALS:
        unpickling.check_globals(file)
    _check_locations(scan, file, options.map_location)
    return _devices(scan, checkpoint, options.map_location)


def _to_unpickle(
    checkpoint: TorchFile,
    scan: Scan,
    found: dict[str, torch.Tensor],
    options: LoadOptions,
    file: File,
    opened: contextlib.ExitStack,
) -> Loaded:
    """Prepare to make the object of storages that were read."""
    reader = unpickling.MemoryReader(checkpoint, found)
    if scan.plain and unpickling.is_usual(options) and not unpickling.is_swapped(checkpoint):
        options = replace(options, plain=True)
    if options.plain or not options.weights_only:
        return Loaded(partial(unpickling.unpickle, reader, options))
    return Loaded(partial(_unpickle, reader, options, file), opened)


def _left_to_torch(file: File, options: LoadOptions, opened: contextlib.ExitStack) -> Loaded:
    # torch opens the file by its name up to three times: by now another one may have `path`.
    same = opened.enter_context(same_file(file))
    return Loaded(partial(unpickling.load_through_torch, same, options), opened)


def _unpickle(reader: unpickling.MemoryReader, options: LoadOptions, file: File) -> Any:
    try:
        return unpickling.unpickle(reader, options)
    except pickle.UnpicklingError:
        with same_file(file) as same:  # torch's own refusals, in its words
            unpickling.refuse(same)
        raise


# Devices of the storages


def _is_registered(location: str) -> bool:
    """Whether somebody's `torch.serialization.register_package` knows what to do with it."""
    restore: Any = torch.serialization.default_restore_location
    try:
        restore(torch.empty(0).untyped_storage(), location)
    except Exception:  # of another kind for each tag
        return False
    return True


def _check_locations(scan: Scan, file: File, where: MapLocation) -> None:
    """Refuse devices that there cannot be, with IntegrityError; torch's own error names no file."""
    if not (where is None or isinstance(where, Mapping)):
        return
    for location in _locations(scan):
        if location in (where or {}):
            continue
        try:
            torch.device(location)
        except RuntimeError:
            if _is_registered(location):
                continue
            raise IntegrityError(
                f"{file.path} says that a storage was saved from {location!r}, which is not a "
                "device "
                "that torch knows here: the file is damaged, or the device is of an extension that "
                "has to be imported first. map_location='cpu' loads it into memory",
                expected="a device such as 'cpu' or 'cuda:0'",
                found=location,
            ) from None


def _devices(scan: Scan, checkpoint: TorchFile, where: MapLocation) -> dict[str, torch.device]:
    """The device that storages are read to, by the location that they were saved from.

    torch tells, given a storage of no bytes: so a device that is not there is refused by it, and in
    its words, before anything is read.
    """
    on_host = callable(where) or unpickling.is_swapped(checkpoint)
    return {each: _CPU if on_host else _destination(where, each) for each in _locations(scan)}


def _locations(scan: Scan) -> list[str]:
    """The locations that storages were saved from, each once, in the order of the pickle."""
    return list(dict.fromkeys([ref.location for ref in scan.storages.values()]))


def _read_as_one(
    scan: Scan, devices: dict[str, torch.device], ranks: LoadingRanks
) -> list[list[str]]:
    """The keys of storages that are read as one: to one device.

    Ranks that read together may each have other devices; the locations are the same for all.
    """
    found: dict[object, list[str]] = {}
    locations, together = _locations(scan), ranks.together
    if len(locations) == 1:
        return [list(scan.storages)]
    for key, ref in scan.storages.items():
        found.setdefault(ref.location if together else devices[ref.location], []).append(key)
    return list(found.values())


def _destination(map_location: MapLocation, location: str) -> torch.device:
    if isinstance(map_location, Mapping):
        location = map_location.get(location, location)
    elif map_location is not None:
        location = str(map_location)
    nothing = torch.UntypedStorage(0)  # type: ignore[no-untyped-call]
    restored: Any = torch.serialization.default_restore_location(  # type: ignore[no-untyped-call]
        nothing, location
    )
    device: torch.device = restored.device
    return device

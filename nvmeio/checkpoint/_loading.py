"""`load`: a torch checkpoint into memory, its storages as few large direct reads.

torch's own unpickler decides what is loaded. It asks its zip reader for one storage after another;
here it is given a reader whose storages have been read already, all at once, straight into the
memory that the tensors then live in.

    1. the zip's structure is checked, the pickle scanned           (_zip, torch_pickle)
    2. what is not allowed, or cannot be, is refused                nothing is allocated before
    3. all storages that the pickle refers to are read              (_spans)
    4. torch unpickles, with them

The seam is `torch.serialization._load`, which takes any object with the methods of torch's own
reader. It is private: where it is missing, or takes other parameters, torch.load does all of it.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import pickle
import struct
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from nvmeio import _checks
from nvmeio._formats import pickle_values, torch_pickle, torch_unpickling
from nvmeio._formats.sniff import TruncatedFileError, check_older
from nvmeio._formats.torch_file import (
    TorchFile,
    check_calls,
    read_buffered,
    same_file,
    scan_pickle,
    size_error,
    spans_of,
    unsafe_globals,
)
from nvmeio._formats.torch_zip import LOCAL_MAGIC
from nvmeio._io.caller import InCaller, at_once, run_with_caller
from nvmeio._io.handles import CallHandle
from nvmeio._io.long_call import LongCall
from nvmeio._io.spans import Load
from nvmeio._io.threads import in_thread
from nvmeio._storage.locks import open_reading
from nvmeio.checkpoint._loading_ranks import ALONE, LoadingRanks
from nvmeio.checkpoint._ranks import DEFAULT_TIMEOUT_S
from nvmeio.errors import IntegrityError
from nvmeio.files import File
from nvmeio.handle import AioHandle
from nvmeio.progress import Progress

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

MapLocation = (
    Callable[[torch.UntypedStorage, str], Any] | torch.device | str | Mapping[str, Any] | None
)

_CPU = torch.device("cpu")
_UNPICKLER_ARGUMENTS = frozenset(("encoding", "errors", "fix_imports", "buffers"))

# What torch says of a file in its older formats that ends too early.
_TRUNCATED = (
    "Ran out of input",
    "unexpected EOF",
    "pickle data was truncated",
    "index out of range",
    "unpack requires",
)


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
        weights_only: Refuse to unpickle what is not known to be harmless. Pass False only for
            files of a source that you trust: they can run any code.
        mmap: True: torch.load maps the file, which reads a page when it is touched; for files that
            are larger than memory, or of which little is used. None and False read all of it here.
        handle: Moves the bytes, and stays open; None makes one for this call.
        progress: Told how far it is: ``progress(what, done_bytes, total_bytes)``; see
            `nvmeio.progress`. Not of files that are left to torch.load.
        process_group: Its ranks, all of which call this with the same file, each read an equal
            part of it, and get the rest from the others (through gloo, in a process group that is
            made for this call alone). Each may have a `map_location` of its own.
        timeout_s: Of such ranks: how long one may make no progress before the others give it up,
            in seconds.
        pickle_load_args: As for torch.load, such as ``encoding``.

    Returns:
        The object. Tied storages are tied.

    Raises:
        IntegrityError: The archive is damaged, or says what cannot be: a record past the end,
            overlapping, compressed, encrypted, there twice, or of another size than the pickle
            says. Names file and record; known before anything is allocated.
        NvmeioError: The file is no checkpoint of torch at all, or a truncated one in the format
            from before its zip files; a `pickle.UnpicklingError` too, or an `EOFError` if it is
            empty, as of torch.load.
        pickle.UnpicklingError: torch's own refusal of what ``weights_only`` forbids, or nvmeio's of
            a call that would allocate far more than the pickle holds; likewise.
        TransferError: The file cannot be opened or read.
        TypeError: `path` is an open file; `process_group` is none.
        ValueError: This process is no member of `process_group`.
        MemoryError: There is less memory than the state needs.

    Where one of several ranks fails, dies or is interrupted, all others raise a `TransferError`
    that says which, and of what.

    After an error or interrupt: nothing is in flight, and nothing is kept. Unpickling is done in
    the calling thread; all else in another one, where that is the main thread.

    Cost: the memory of the state, and no copy. The records' CRC-32 are not checked, as torch does
    not: `nvmeio verify` does.
    """
    ranks = LoadingRanks.of_group(process_group, timeout_s, path)
    with ranks.telling():
        _checks.timeout(timeout_s)
        options = LoadOptions.checked(
            map_location, pickle_module, weights_only, mmap, pickle_load_args
        )
        with LongCall("load", _checked_path(path), progress) as call:
            how = HowToLoad(options, handle, call)
            return run_with_caller(lambda ask: load_file(path, how.by(ask), ranks), call.cancel)


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
    ranks = LoadingRanks.of_group(process_group, timeout_s, path)
    with ranks.telling():
        _checks.timeout(timeout_s)
        options = LoadOptions.checked(
            map_location, pickle_module, weights_only, mmap, pickle_load_args
        )
        with LongCall("load", _checked_path(path), progress) as call:
            how = HowToLoad(options, handle, call)
            return await in_thread(lambda: load_file(path, how, ranks), call.cancel)


def _checked_path(path: Any) -> str | os.PathLike[str]:
    if not isinstance(path, (str, bytes, os.PathLike)):
        raise TypeError(
            f"expected a path, not {type(path).__name__}; for an open file use torch.load, or "
            "torch.load(nvmeio.FastFileReader(path))"
        )
    return path  # type: ignore[return-value]


@dataclass(frozen=True)
class LoadOptions:
    """How something is to be loaded; as for `load`."""

    map_location: MapLocation
    pickle_module: Any
    weights_only: bool
    mmap: bool
    pickle_load_args: dict[str, Any]
    fake: bool
    """Whether tensors without data are made, by a mode of the calling thread."""
    plain: bool = False
    """Whether the pickle was found to need nothing of torch's own unpickler."""

    @classmethod
    def checked(
        cls,
        map_location: MapLocation = None,
        pickle_module: Any = None,
        weights_only: bool = True,
        mmap: bool | None = None,
        pickle_load_args: dict[str, Any] | None = None,
    ) -> LoadOptions:
        """Those that go together, for a load by this thread.

        Raises:
            TypeError: `pickle_module` is a bool: `weights_only` was the third parameter once; or
                torch's unpickler takes no argument of such a name.
            RuntimeError: `pickle_module` is given, and weights alone are wanted.
        """
        if isinstance(pickle_module, bool):
            raise TypeError(
                "the third parameter is pickle_module, as of torch.load: name weights_only= and "
                "those behind it"
            )
        weights_only = weights_only is not False  # None is no way to ask for less safety
        if _asked_for("TORCH_FORCE_WEIGHTS_ONLY_LOAD"):  # torch.load's switch for the careful
            weights_only = True
        if weights_only and pickle_module is not None:
            raise RuntimeError(
                "pickle_module cannot be given with weights_only=True, which has its own unpickler"
            )
        unknown = [name for name in pickle_load_args or {} if name not in _UNPICKLER_ARGUMENTS]
        if unknown and pickle_module is None:  # a module of the caller's may take others
            raise TypeError(
                f"load() got an unexpected keyword argument {unknown[0]!r}"
                + ("; where tensors go is map_location=" if unknown[0] == "device" else "")
            )
        fake = torch._guards.detect_fake_mode(None) is not None
        return cls(
            map_location, pickle_module, weights_only, bool(mmap), pickle_load_args or {}, fake
        )


@dataclass(frozen=True)
class HowToLoad:
    """How one call loads its files.

    Attributes:
        options: The caller's.
        handle: Moves the bytes; None makes one for each file.
        call: Cancels it, and is told how far it is.
        in_caller: Calls what unpickles.
    """

    options: LoadOptions
    handle: AioHandle | None
    call: LongCall
    in_caller: InCaller = at_once

    def by(self, in_caller: InCaller) -> HowToLoad:
        """The same, with the unpickling done by the caller's thread."""
        return replace(self, in_caller=in_caller)


def load_file(path: str | os.PathLike[str], how: HowToLoad, ranks: LoadingRanks = ALONE) -> Any:
    """Load a file. See `load`."""
    options, call, in_caller = how.options, how.call, how.in_caller
    with ranks.loading(call), open_reading(path) as file:
        older = read_buffered(file, 0, min(file.size(), 4)) != LOCAL_MAGIC
        through_torch = older or options.mmap or _seam() is None
        ranks.meet(file, together=not (through_torch or nothing_to_read(options)))
        if older and options.pickle_module is None:  # another one may read anything
            check_older(file)
            return in_caller(_load_older, file, options)
        if through_torch:
            return in_caller(_load_through_torch, path, options)
        with CallHandle(how.handle, path) as handle:
            return load_archive(file, how, handle, ranks)


def load_archive(file: File, how: HowToLoad, handle: CallHandle, ranks: LoadingRanks) -> Any:
    """Load an archive that is open, through a handle of this call."""
    options, call, in_caller = how.options, how.call, how.in_caller
    first = Load()
    call.then(first.cancel)
    checkpoint = ranks.open(partial(TorchFile, file, handle.get, first))
    if checkpoint.archive.is_script:
        with same_file(file) as same:
            return in_caller(_load_through_torch, same, options)
    with ranks.agreeing():
        scan = scan_pickle(checkpoint)
        if options.weights_only:
            check_calls(checkpoint, scan)
        if nothing_to_read(options):
            with same_file(file) as same:
                return in_caller(_load_through_torch, same, options)
        spans = spans_of(checkpoint, file, scan)
        if options.weights_only and not scan.globals <= pickle_values.COMMON_GLOBALS:
            _check_globals(file)
        _check_locations(scan, file, options.map_location)
        devices = _devices(scan, checkpoint, options.map_location)
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
    reader = _Reader(checkpoint, found)
    if scan.plain and _is_usual(options) and not _is_swapped(checkpoint):
        options = replace(options, plain=True)
    del scan, spans  # containers by the thousand, that the collector would go through once more
    try:
        return in_caller(_unpickle, reader, options)
    except pickle.UnpicklingError:
        if options.weights_only:
            with same_file(file) as same:
                _refuse(same)
        raise


# What is left to torch


def _load_through_torch(path: str | os.PathLike[str], options: LoadOptions) -> Any:
    return torch.load(
        path,
        options.map_location,  # type: ignore[arg-type]
        options.pickle_module,
        weights_only=options.weights_only,
        mmap=options.mmap,
        **options.pickle_load_args,
    )


def _load_older(file: File, options: LoadOptions) -> Any:
    """A file from before torch's zip files: torch's errors do not name it."""
    try:
        with same_file(file) as same:
            return _load_through_torch(same, replace(options, mmap=False))
    except (EOFError, RuntimeError, IndexError, struct.error, pickle.PickleError) as e:
        ends = isinstance(e, EOFError) or any(text in str(e) for text in _TRUNCATED)
        if not ends:
            raise
        raise TruncatedFileError(
            f"{file.path} ends in the middle, at byte {file.size()}: what wrote it was "
            f"interrupted; take another checkpoint (torch says {str(e) or type(e).__name__:.200})"
        ) from e


def nothing_to_read(options: LoadOptions) -> bool:
    """Whether tensors without data are asked for: on the meta device, or fake ones."""
    where = options.map_location
    if isinstance(where, (str, torch.device)) and str(where).partition(":")[0] == "meta":
        return True
    return options.fake


def _check_globals(file: File) -> None:
    """Let torch refuse what it forbids, in its own words, before anything is allocated."""
    if unsafe_globals(file):
        with same_file(file) as same:
            _refuse(same)


def _refuse(path: str) -> None:
    """Unpickle to the meta device, which needs no storage: for torch's error."""
    with torch.serialization.skip_data(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.load(path, "meta", weights_only=True, mmap=False)


def _unpickle(reader: _Reader, options: LoadOptions) -> Any:
    if options.plain:
        with contextlib.suppress(Exception):  # whatever is wrong with a tensor is told by torch
            return _unpickle_plain(reader, options)
    arguments = {"encoding": "utf-8", **options.pickle_load_args}
    if options.weights_only:
        module: Any = torch._weights_only_unpickler
    else:
        module = pickle if options.pickle_module is None else options.pickle_module
    return _seam()(reader, options.map_location, module, **arguments)


def _is_usual(options: LoadOptions) -> bool:
    """Whether nothing is asked for that only torch's own unpickler does, nor calls the user."""
    usual = options.weights_only and not options.pickle_load_args and not options.fake
    return usual and not callable(options.map_location)


def _unpickle_plain(reader: _Reader, options: LoadOptions) -> Any:
    """What was found plain, faster than by torch itself.

    Raises:
        UnknownTorchError: torch has to do it.
    """
    settings = getattr(torch.serialization, "_serialization_tls", None)
    restoring = getattr(torch.serialization, "_get_restore_location", None)
    if restoring is None or getattr(settings, "skip_data", False):  # wants storages without bytes
        raise torch_unpickling.UnknownTorchError
    restore = restoring(options.map_location)
    return torch_unpickling.unpickle(reader.get_record("data.pkl"), reader.storages, restore)


# Where the storages go


def _is_registered(location: str) -> bool:
    """Whether somebody's `torch.serialization.register_package` knows what to do with it."""
    restore: Any = torch.serialization.default_restore_location
    try:
        restore(torch.empty(0).untyped_storage(), location)
    except Exception:  # of another kind for each tag
        return False
    return True


def _check_locations(scan: torch_pickle.Scan, file: File, where: MapLocation) -> None:
    """Refuse devices that there cannot be; torch's own error names no file.

    Raises:
        IntegrityError: A storage was saved from one.
    """
    if not (where is None or isinstance(where, Mapping)):
        return
    for location in dict.fromkeys(ref.location for ref in scan.storages.values()):
        if location in (where or {}):
            continue
        try:
            torch.device(location)
        except RuntimeError:
            if _is_registered(location):
                continue
            raise IntegrityError(
                f"{file.path} says that a storage was saved from {location!r}, which is no device "
                "that torch knows here: the file is damaged, or the device is of an extension that "
                "has to be imported first. map_location='cpu' loads it into memory",
                expected="a device such as 'cpu' or 'cuda:0'",
                found=location,
            ) from None


def _devices(
    scan: torch_pickle.Scan, checkpoint: TorchFile, where: MapLocation
) -> dict[str, torch.device]:
    """The device that storages are read to, by the location that they were saved from.

    torch tells, given a storage of no bytes: so a device that is not there is refused by it,
    and in its words, before anything is read.
    """
    on_host = callable(where) or _is_swapped(checkpoint)
    locations = dict.fromkeys(ref.location for ref in scan.storages.values())
    return {each: _CPU if on_host else _destination(where, each) for each in locations}


def _read_as_one(
    scan: torch_pickle.Scan, devices: dict[str, torch.device], ranks: LoadingRanks
) -> list[list[str]]:
    """The keys of storages that are read as one: to one device.

    Ranks that read together may each have other devices; the locations are the same for all.
    """
    found: dict[object, list[str]] = {}
    for key, ref in scan.storages.items():
        kind = ref.location if ranks.together else devices[ref.location]
        found.setdefault(kind, []).append(key)
    return list(found.values())


class _Reader:
    """What torch's unpickler asks of its zip reader: everything is in memory already."""

    def __init__(self, checkpoint: TorchFile, storages: dict[str, torch.Tensor]) -> None:
        self._checkpoint = checkpoint
        self.storages = storages
        self._texts = checkpoint.texts()

    def has_record(self, name: str) -> bool:
        return name in self._checkpoint.records

    def get_record(self, name: str) -> bytes:
        found = self._texts.get(name)
        return self._checkpoint.read(name) if found is None else found

    def get_all_records(self) -> list[str]:
        return list(self._checkpoint.records)

    def get_record_offset(self, name: str) -> int:
        return self._checkpoint.records[name].offset

    def get_storage_from_record(self, name: str, nbytes: int, kind: object) -> torch.Tensor:
        storage = self.storages[name.removeprefix("data/")]
        if storage.nbytes != nbytes:
            raise size_error(self._checkpoint, name, nbytes)
        return storage

    def serialization_id(self) -> str:
        name = ".data/serialization_id"
        return self.get_record(name).decode("latin-1") if self.has_record(name) else ""


def _is_swapped(checkpoint: TorchFile) -> bool:
    """Whether torch may have to swap the bytes of what is loaded, which it does on the host."""
    if "byteorder" not in checkpoint.records:
        return True
    return checkpoint.read("byteorder").decode("latin-1") != sys.byteorder


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


def _asked_for(variable: str) -> bool:
    return os.environ.get(variable, "0").lower() in ("1", "y", "yes", "true")


# The first parameters of `torch.serialization._load`, by position, in every torch so far.
_SEAM = ["zip_file", "map_location", "pickle_module"]


def _seam() -> Any:
    """What makes the object from a zip reader; None if it is not as it is known here."""
    unpickle = getattr(torch.serialization, "_load", None)
    if unpickle is None or not hasattr(torch, "_weights_only_unpickler"):
        return None
    parameters = list(inspect.signature(unpickle).parameters)
    return unpickle if parameters[: len(_SEAM)] == _SEAM else None

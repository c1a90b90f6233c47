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

import inspect
import os
import pickle
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from nvmeio._formats import torch_pickle
from nvmeio._formats.sniff import check_older
from nvmeio._formats.torch_file import (
    Checkpoint,
    check_calls,
    read_buffered,
    same_file,
    scan_pickle,
    size_error,
    spans_of,
    unsafe_globals,
)
from nvmeio._formats.torch_zip import LOCAL_MAGIC
from nvmeio._io.handles import CallHandle
from nvmeio._io.spans import Load, Span
from nvmeio._io.threads import in_thread
from nvmeio._storage.locks import open_reading
from nvmeio.files import File
from nvmeio.handle import AioHandle

MapLocation = (
    Callable[[torch.UntypedStorage, str], Any] | torch.device | str | Mapping[str, Any] | None
)

_CPU = torch.device("cpu")


def load(
    path: str | os.PathLike[str],
    map_location: MapLocation = None,
    weights_only: bool = True,
    *,
    handle: AioHandle | None = None,
    pickle_module: Any = None,
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
        weights_only: Refuse to unpickle what is not known to be harmless. Pass False only for
            files of a source that you trust: they can run any code.
        handle: Moves the bytes, and stays open; None makes one for this call.
        pickle_module: As for torch.load, with ``weights_only=False``.
        pickle_load_args: As for torch.load, such as ``encoding``.

    Returns:
        The object. Tied storages are tied.

    Raises:
        IntegrityError: The archive is damaged, or says what cannot be: a record past the end,
            overlapping, compressed, encrypted, there twice, or of another size than the pickle
            says. Names file and record; known before anything is allocated.
        NvmeioError: The file is no checkpoint of torch at all; a `pickle.UnpicklingError` too, or
            an `EOFError` if it is empty, as of torch.load.
        pickle.UnpicklingError: torch's own refusal of what ``weights_only`` forbids, or nvmeio's of
            a call that would allocate far more than the pickle holds; likewise.
        TransferError: The file cannot be opened or read.
        MemoryError: There is less memory than the state needs.

    Cost: the memory of the state, and no copy. The records' CRC-32 are not checked, as torch does
    not: `nvmeio verify` does.
    """
    return _Loading(path, map_location, weights_only, handle, pickle_module, pickle_load_args).run()


async def async_load(
    path: str | os.PathLike[str],
    map_location: MapLocation = None,
    weights_only: bool = True,
    *,
    handle: AioHandle | None = None,
    pickle_module: Any = None,
    **pickle_load_args: Any,
) -> Any:
    """`load`, awaited: a thread does it, so that the event loop goes on meanwhile.

    Parameters and errors as for `load`. Cancelling stops the reading; `CancelledError` is raised
    once nothing is in flight any more.
    """
    work = _Loading(path, map_location, weights_only, handle, pickle_module, pickle_load_args)
    return await in_thread(work.run, work.cancel)


class _Loading:
    def __init__(
        self,
        path: str | os.PathLike[str],
        map_location: MapLocation,
        weights_only: bool,
        handle: AioHandle | None,
        pickle_module: Any,
        pickle_load_args: dict[str, Any],
    ) -> None:
        weights_only = weights_only is not False  # None is no way to ask for less safety
        if _asked_for("TORCH_FORCE_WEIGHTS_ONLY_LOAD"):  # torch.load's switch for the careful
            weights_only = True
        if weights_only and pickle_module is not None:
            raise RuntimeError(
                "pickle_module cannot be given with weights_only=True, which has its own unpickler"
            )
        self._path = path
        self._map_location = map_location
        self._weights_only = weights_only
        self._handle = handle
        self._pickle_module = pickle_module
        self._pickle_load_args = pickle_load_args
        self._loads: list[Load] = []
        self._cancelled = False

    def cancel(self) -> None:
        """Stop soon; from any thread."""
        self._cancelled = True
        for load in list(self._loads):
            load.cancel()

    def run(self) -> Any:
        with open_reading(self._path) as file:
            if read_buffered(file, 0, min(file.size(), 4)) != LOCAL_MAGIC or _seam() is None:
                if self._pickle_module is None:  # another one may read anything
                    check_older(file)
                return self._through_torch(self._path)
            with CallHandle(self._handle, self._path) as handle:
                checkpoint = Checkpoint(file, handle.get, self._new_load())
                if checkpoint.archive.is_script:
                    with same_file(file) as same:
                        return self._through_torch(same)
                scan = scan_pickle(checkpoint)
                if self._weights_only:
                    check_calls(checkpoint, scan)
                if self._nothing_to_read():
                    with same_file(file) as same:
                        return self._through_torch(same)
                spans = spans_of(checkpoint, file, scan)
                if self._weights_only and not scan.globals <= torch_pickle.COMMON_GLOBALS:
                    self._check_globals(file)
                devices = self._devices(scan, checkpoint)
                found = self._read(handle.get(), spans, devices)
                handle.done()
                return self._unpickle(file, _Reader(checkpoint, found))

    # What is left to torch

    def _through_torch(self, path: str | os.PathLike[str]) -> Any:
        return torch.load(
            path,
            self._map_location,  # type: ignore[arg-type]
            self._pickle_module,
            weights_only=self._weights_only,
            mmap=False,
            **self._pickle_load_args,
        )

    def _nothing_to_read(self) -> bool:
        """Whether tensors without data are asked for: on the meta device, or fake ones."""
        where = self._map_location
        if isinstance(where, (str, torch.device)) and str(where).partition(":")[0] == "meta":
            return True
        return torch._guards.detect_fake_mode(None) is not None

    def _check_globals(self, file: File) -> None:
        """Let torch refuse what it forbids, in its own words, before anything is allocated."""
        if unsafe_globals(file):
            with same_file(file) as same:
                self._refuse(same)

    def _refuse(self, path: str) -> None:
        """Unpickle to the meta device, which needs no storage: for torch's error."""
        with torch.serialization.skip_data(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.load(path, "meta", weights_only=True, mmap=False)

    def _unpickle(self, file: File, reader: _Reader) -> Any:
        arguments = {"encoding": "utf-8", **self._pickle_load_args}
        unpickle = _seam()
        if not self._weights_only:
            module = pickle if self._pickle_module is None else self._pickle_module
            return unpickle(reader, self._map_location, module, **arguments)
        module = torch._weights_only_unpickler
        try:
            return unpickle(reader, self._map_location, module, **arguments)
        except pickle.UnpicklingError:
            with same_file(file) as same:
                self._refuse(same)
            raise

    # Where the storages go

    def _devices(
        self, scan: torch_pickle.Scan, checkpoint: Checkpoint
    ) -> dict[torch.device, list[str]]:
        """The keys of the storages, by the device that they are read to.

        torch tells, given a storage of no bytes: so a device that is not there is refused by it,
        and in its words, before anything is read.
        """
        where = self._map_location
        on_host = callable(where) or _is_swapped(checkpoint)
        devices: dict[str, torch.device] = {}
        found: dict[torch.device, list[str]] = {}
        for key, ref in scan.storages.items():
            if ref.location not in devices:
                device = _CPU if on_host else _destination(where, ref.location)
                devices[ref.location] = device
            found.setdefault(devices[ref.location], []).append(key)
        return found

    def _read(
        self,
        handle: AioHandle,
        spans: dict[str, Span],
        devices: dict[torch.device, list[str]],
    ) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for device, keys in devices.items():
            tensors = self._new_load().run(handle, [spans[key] for key in keys], device)
            found.update(zip(keys, tensors, strict=True))
        return found

    def _new_load(self) -> Load:
        load = Load()
        self._loads.append(load)
        if self._cancelled:
            load.cancel()
        return load


class _Reader:
    """What torch's unpickler asks of its zip reader."""

    def __init__(self, checkpoint: Checkpoint, storages: dict[str, torch.Tensor]) -> None:
        self._checkpoint = checkpoint
        self._storages = storages

    def has_record(self, name: str) -> bool:
        return name in self._checkpoint.records

    def get_record(self, name: str) -> bytes:
        return self._checkpoint.read(name)

    def get_all_records(self) -> list[str]:
        return list(self._checkpoint.records)

    def get_record_offset(self, name: str) -> int:
        return self._checkpoint.records[name].offset

    def get_storage_from_record(self, name: str, nbytes: int, kind: object) -> torch.Tensor:
        storage = self._storages[name.removeprefix("data/")]
        if storage.nbytes != nbytes:
            raise size_error(self._checkpoint, name, nbytes)
        return storage

    def serialization_id(self) -> str:
        name = ".data/serialization_id"
        return self.get_record(name).decode("latin-1") if self.has_record(name) else ""


def _is_swapped(checkpoint: Checkpoint) -> bool:
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

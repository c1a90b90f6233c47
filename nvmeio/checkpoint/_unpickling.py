"""Objects from pickles, as the caller asked for them: by torch's unpickler, or faster by ours.

Also what is left to torch.load.

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
from typing import TYPE_CHECKING, Any

import torch

from nvmeio import _torch_private
from nvmeio._formats.torch_archives import torch_unpickler
from nvmeio._formats.torch_archives.torch_file import (
    TorchFile,
    same_file,
    size_error,
    unsafe_globals,
)
from nvmeio._io.long_call import LongCall
from nvmeio.files import File

if TYPE_CHECKING:
    from nvmeio.handle import AioHandle

# Options

MapLocation = (
    Callable[[torch.UntypedStorage, str], Any] | torch.device | str | Mapping[str, Any] | None
)

_UNPICKLER_ARGUMENTS = frozenset(("encoding", "errors", "fix_imports", "buffers"))


@dataclass(frozen=True)
class LoadOptions:
    """The options of `load`."""

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
        """Check that the options go together, for a load by this thread.

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
        # None is not a way to ask for less safety; the variable is torch.load's, for the careful.
        forced = os.environ.get("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "0").lower()
        weights_only = weights_only is not False or forced in ("1", "y", "yes", "true")
        if weights_only and pickle_module is not None:
            raise RuntimeError(
                "pickle_module is for weights_only=False: weights_only=True has its own unpickler"
            )
        unknown = [name for name in pickle_load_args or {} if name not in _UNPICKLER_ARGUMENTS]
        if unknown and pickle_module is None:  # a module of the caller's may take others
            raise TypeError(
                f"load() got an unexpected keyword argument {unknown[0]!r}"
                + ("; map_location= says where tensors go" if unknown[0] == "device" else "")
            )
        fake = _torch_private.detect_fake_mode(None) is not None
        return cls(
            map_location, pickle_module, weights_only, bool(mmap), pickle_load_args or {}, fake
        )


@dataclass(frozen=True)
class HowToLoad:
    """The settings of one call for its files; without a handle it makes one for each file."""

    options: LoadOptions
    handle: AioHandle | None
    call: LongCall


def nothing_to_read(options: LoadOptions) -> bool:
    """Whether tensors without data are asked for: on the meta device, or fake ones."""
    where = options.map_location
    if isinstance(where, (str, torch.device)) and str(where).partition(":")[0] == "meta":
        return True
    return options.fake


# Left to torch

# Torch's errors for a file in its older formats that ends too early.
_TRUNCATED = (
    "Ran out of input",
    "unexpected EOF",
    "pickle data was truncated",
    "index out of range",
    "unpack requires",
)


def load_through_torch(path: str | os.PathLike[str], options: LoadOptions) -> Any:
    return torch.load(
        path,
        options.map_location,  # type: ignore[arg-type]
        options.pickle_module,
        weights_only=options.weights_only,
        mmap=options.mmap,
        **options.pickle_load_args,
    )


def load_older(file: File, options: LoadOptions) -> Any:
    """Load a file from before torch's zip files, and name it: torch's errors do not."""
    try:
        with same_file(file) as same:
            return load_through_torch(same, replace(options, mmap=False))
    except (EOFError, RuntimeError, IndexError, struct.error, pickle.PickleError) as e:
        ends = isinstance(e, EOFError) or any(text in str(e) for text in _TRUNCATED)
        if not ends:
            raise
        from nvmeio._formats.sniff import TruncatedFileError

        raise TruncatedFileError(
            f"{file.path} is truncated at byte {file.size()}: its writer was interrupted; take "
            f"another checkpoint (torch says {str(e) or type(e).__name__:.200})"
        ) from e


def check_globals(file: File) -> None:
    """Let torch raise its own error for forbidden globals, before anything is allocated."""
    if unsafe_globals(file):
        with same_file(file) as same:
            refuse(same)


def refuse(path: str) -> None:
    """Unpickle to the meta device, which needs no storage: for torch's error."""
    with torch.serialization.skip_data(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.load(path, "meta", weights_only=True, mmap=False)


def unpickle(reader: MemoryReader, options: LoadOptions) -> Any:
    if options.plain:
        with contextlib.suppress(Exception):  # torch reports any error of a tensor
            return _unpickle_plain(reader, options)
    arguments = {"encoding": "utf-8", **options.pickle_load_args}
    if options.weights_only:
        module: Any = _torch_private.weights_only_unpickler
    else:
        module = pickle if options.pickle_module is None else options.pickle_module
    return seam()(reader, options.map_location, module, **arguments)


def is_usual(options: LoadOptions) -> bool:
    """Whether torch's own unpickler is not needed, and no code of the user's is called."""
    usual = options.weights_only and not options.pickle_load_args and not options.fake
    return usual and not callable(options.map_location)


def _unpickle_plain(reader: MemoryReader, options: LoadOptions) -> Any:
    """Unpickle a plain pickle, faster than torch; UnknownTorchError if torch has to."""
    settings = _torch_private.found("serialization_settings")
    restoring = _torch_private.found("restore_location")
    if restoring is None or getattr(settings, "skip_data", False):  # wants storages without bytes
        raise torch_unpickler.UnknownTorchError
    restore = restoring(options.map_location)
    return torch_unpickler.unpickle(reader.get_record("data.pkl"), reader.storages, restore)


# With the bytes that were read


class MemoryReader:
    """The zip reader for torch's unpickler; everything is in memory already."""

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


def is_swapped(checkpoint: TorchFile) -> bool:
    """Whether torch may have to swap the loaded bytes, which it does on the host."""
    if "byteorder" not in checkpoint.records:
        return True
    return checkpoint.read("byteorder").decode("latin-1") != sys.byteorder


# The first parameters of `torch.serialization._load`, by position, in every torch so far.
_SEAM = ["zip_file", "map_location", "pickle_module"]


def seam() -> Any:
    """The function of torch that makes the object; None if it is not known here."""
    unpickle = _torch_private.found("load")
    if unpickle is None or _torch_private.found("weights_only_unpickler") is None:
        return None
    parameters = list(inspect.signature(unpickle).parameters)
    return unpickle if parameters[: len(_SEAM)] == _SEAM else None

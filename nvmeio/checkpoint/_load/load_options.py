"""How something is to be loaded: what the caller asked for, checked."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from nvmeio._io.long_call import LongCall
from nvmeio.handle import AioHandle

MapLocation = (
    Callable[[torch.UntypedStorage, str], Any] | torch.device | str | Mapping[str, Any] | None
)

_UNPICKLER_ARGUMENTS = frozenset(("encoding", "errors", "fix_imports", "buffers"))


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
    """

    options: LoadOptions
    handle: AioHandle | None
    call: LongCall


def nothing_to_read(options: LoadOptions) -> bool:
    """Whether tensors without data are asked for: on the meta device, or fake ones."""
    where = options.map_location
    if isinstance(where, (str, torch.device)) and str(where).partition(":")[0] == "meta":
        return True
    return options.fake


def _asked_for(variable: str) -> bool:
    return os.environ.get(variable, "0").lower() in ("1", "y", "yes", "true")

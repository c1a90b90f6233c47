"""Parameters that are on the drive themselves: what the optimizer has to know of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from nvmeio.files import File

_ATTRIBUTE = "_nvmeio_home"


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


class Home(Protocol):
    """Who keeps parameters on the drive (a `SwappedModule`)."""

    def evict(self) -> None:
        """Let go of all copies in memory that are not in use."""

    def make_way(self, parameters: Sequence[torch.Tensor]) -> None:
        """Let go of all copies in memory: these are about to change on the drive.

        Raises:
            RuntimeError: A block gathered some of them, and would write its own values over them.
        """

    def where(self, parameter: torch.Tensor) -> Sequence[Extent]:
        """Where the parameter's elements are now."""

    def relocate(self, parameter: torch.Tensor, locate: Callable[[], Sequence[Extent]]) -> None:
        """From now on the parameter is read from where `locate` says."""


def home_of(parameter: torch.Tensor) -> Home | None:
    """Who keeps this parameter on the drive; None where it is in memory."""
    found: Home | None = getattr(parameter, _ATTRIBUTE, None)
    return found


def set_home(parameter: torch.Tensor, home: Home | None) -> None:
    """Note who keeps a parameter on the drive."""
    if home is None:
        if hasattr(parameter, _ATTRIBUTE):
            delattr(parameter, _ATTRIBUTE)
    else:
        setattr(parameter, _ATTRIBUTE, home)

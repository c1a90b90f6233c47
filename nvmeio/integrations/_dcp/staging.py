"""A staged state dict that is copied while training goes on: see `nvmeio.snapshot`.

torch gives it to the thread that saves, and that thread's first step is to ask for its items: there
it waits for the copying, and training does not.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint.staging import AsyncStager

from nvmeio import _checks
from nvmeio.checkpoint.frozen import FrozenState, snapshot


class SnapshotStager(AsyncStager):
    """Stages for `dcp.async_save` without holding the training for a copy.

    ::

        stager = SnapshotStager()
        future = dcp.async_save(state_dict, storage_writer=writer, async_stager=stager)

    The checkpoint has every byte as it was when `dcp.async_save` was called, whatever writes to the
    state afterwards; for any storage writer. Large tensors in host memory are protected at once,
    and copied in the thread that saves (see `nvmeio.snapshot`); what cannot be protected is copied
    before `async_save` returns. With ``AsyncCheckpointerType.THREAD``.

    Attributes:
        protected_bytes: What the last `stage` did not copy before it returned.

    Cost: memory of the size of the state until the checkpoint is written, as torch's own stagers.
    """

    _synchronize_after_execute = False

    def __init__(self) -> None:
        self.protected_bytes = 0

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The state dict for one save.

        Raises:
            MemoryError: There is no room for it.
        """
        frozen = snapshot(dict(state_dict))
        self.protected_bytes = frozen.protected_bytes
        return Staged(frozen)

    def synchronize_staging(self) -> None:
        """Nothing is to be waited for: the state may change."""

    def close(self) -> None:
        """Nothing to do: each staged state has its own memory."""

    def __reduce__(self) -> NoReturn:
        _checks.refuse_pickling(
            self,
            "make one in each process; a save by another process (AsyncCheckpointerType.PROCESS) "
            "needs torch's own stager",
        )


class GuardingStager(SnapshotStager):
    """Deprecated: `SnapshotStager`, which needs no optimizers.

    Args:
        optimizers: Not used.
        memory_bytes: Not used.
    """

    def __init__(
        self, *optimizers: torch.optim.Optimizer, memory_bytes: int | str | None = None
    ) -> None:
        warnings.warn(
            "GuardingStager is SnapshotStager now, which needs no optimizers",
            DeprecationWarning,
            stacklevel=2,
        )
        super().__init__()


class Staged(dict[str, Any]):
    """A state dict for one save: whoever asks for what is in it waits until all of it is there."""

    def __init__(self, frozen: FrozenState[dict[str, Any]]) -> None:
        super().__init__(frozen.peek())
        self._frozen = frozen

    def items(self) -> Any:
        """Torch asks for them in the thread that saves."""
        self._frozen.result()
        return super().items()

    def values(self) -> Any:
        """As `items`."""
        self._frozen.result()
        return super().values()

    def __getitem__(self, key: str) -> Any:
        self._frozen.result()
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """As ``[key]``."""
        self._frozen.result()
        return super().get(key, default)

    def __iter__(self) -> Iterator[str]:
        self._frozen.result()
        return super().__iter__()

    def copy(self) -> dict[str, Any]:
        """As `items`."""
        return dict(self.items())

    def __or__(self, other: Any) -> Any:
        return self.copy() | other

    def pop(self, key: str, *default: Any) -> Any:
        """As ``[key]``."""
        self._frozen.result()
        return super().pop(key, *default)

    def popitem(self) -> tuple[str, Any]:
        """As `items`."""
        self._frozen.result()
        return super().popitem()

    def setdefault(self, key: str, default: Any = None) -> Any:
        """As ``[key]``."""
        self._frozen.result()
        return super().setdefault(key, default)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "this is copied in this process's memory, so no other process can save it: use "
            "AsyncCheckpointerType.THREAD, or torch's own stager"
        )

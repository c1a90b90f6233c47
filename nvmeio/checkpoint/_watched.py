"""Whether somebody changes a tensor that is written from where it lies.

torch counts the changes of a tensor in its `_version`: those of its own operations, also of views
and of `detach()`. Writes through ``.data``, numpy, other processes, and the fused optimizers' own
kernels are not counted. So some of its bytes are compared as well: a word in every `_SAMPLE_BYTES`,
the first and the last. An update of a whole tensor changes them; one of a few elements only may
not be seen.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from nvmeio._shim import memory_at
from nvmeio.errors import IntegrityError

_SAMPLE_BYTES = 256 << 10
_WORD = 8


class Told(NamedTuple):
    """How the error of a save begins and ends, whose tensors somebody has changed.

    Attributes:
        what: Was not saved, such as "step 12".
        remedy: When to change them instead.
    """

    what: str
    remedy: str


class Watched:
    """A tensor that must not change, and the optimizer that has it.

    Args:
        name: What it is, for errors.
        optimizer: Whose it is.
        parameter: The parameter, as the optimizer has it.
        key: Of the parameter's state; None for the parameter itself.
        memory: Its storage's bytes, where this may look at them; else somebody else compares
            (`changed`).
    """

    __slots__ = ("_before", "_key", "_memory", "_name", "_optimizer", "_parameter", "_samples")

    def __init__(
        self,
        name: str,
        optimizer: torch.optim.Optimizer,
        parameter: torch.Tensor,
        key: str | None,
        memory: torch.Tensor | None,
    ) -> None:
        self._name = name
        self._optimizer = optimizer
        self._parameter = parameter
        self._key = key
        self._memory = memory
        self._before = self._facts()
        self._samples = None if memory is None else samples(memory)

    def check(self, told: Told) -> None:
        """Raise `IntegrityError` if it was changed since."""
        found, memory = self._facts(), self._memory
        if found == self._before and (memory is None or samples(memory) == self._samples):
            return
        what = "changed"
        if found is None or self._before is None or found[0] != self._before[0]:
            what = "given other memory"
        raise self.changed(told, what)

    def changed(self, told: Told, what: str = "changed") -> IntegrityError:
        """The error of a save that read this while somebody changed it."""
        return IntegrityError(
            f"{told.what} was not saved: {self._name} was {what} while it was written from where "
            f"it lies, and not by the step of its guarded optimizer. {told.remedy}",
            expected="what it was when save returned",
            found=self._name,
        )

    def _facts(self) -> tuple[int, int, int] | None:
        tensor: Any = self._parameter
        if self._key is not None:
            tensor = state_of(self._optimizer, self._parameter).get(self._key)
        if not isinstance(tensor, torch.Tensor):
            return None
        local = local_of(tensor)
        return local.untyped_storage().data_ptr(), tensor._version, local._version


def state_of(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> dict[str, Any]:
    """An optimizer's state of a parameter; none of a `SwappedOptimizer`, whose is on the drive."""
    state: Any = optimizer.state
    found = state.get(parameter) if isinstance(state, dict) else None
    return found if isinstance(found, dict) else {}


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of it: a DTensor's shard."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def samples(memory: torch.Tensor) -> bytes:
    """A copy of some words of a storage in host memory, the first and the last."""
    whole = memory.numel() // _WORD * _WORD
    if not whole:
        return b""
    words = memory_at(memory.data_ptr(), whole).cast("q")
    return words[:: _SAMPLE_BYTES // _WORD].tobytes() + words[-1:].tobytes()


def sampled(memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Some words of a storage, and its last one; views."""
    whole = memory.numel() // _WORD
    words = memory[: whole * _WORD].view(torch.int64)
    return words[:: _SAMPLE_BYTES // _WORD], words[-1:]


def sampled_words(nbytes: int) -> int:
    """How many words `sampled` gives of so many bytes."""
    whole = nbytes // _WORD * _WORD
    return -(-whole // _SAMPLE_BYTES) + 1 if whole else 0

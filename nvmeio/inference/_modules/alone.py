"""One weight by itself, for who looks at it outside of its layer's computation."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

from nvmeio.errors import ClosedError, TransferError, with_context
from nvmeio.inference._plan.units import Unit
from nvmeio.inference._stream.resources import Resources

if TYPE_CHECKING:
    from nvmeio.inference.stream import WeightStream


class WeightSource:
    """Where a weight is had; refers to the stream weakly, as it is kept with tensors.

    Args:
        stream: Reads it.
        unit: Whose weight it is.
        number: Of its weights.
    """

    def __init__(self, stream: WeightStream, unit: Unit, number: int) -> None:
        self._stream = weakref.ref(stream)
        self._unit = unit
        self._number = number

    def memory(self) -> torch.Tensor:
        """A copy of the weight, laid out alike each time."""
        stream = self._stream()
        if stream is None:
            raise ClosedError("the model that this weight is of is gone")
        return stream.weight(self._unit, self._number)


def read_weight(
    resources: Resources, unit: Unit, number: int, shown: torch.Tensor | None
) -> tuple[torch.Tensor, int]:
    """A copy of a weight, in memory of its own that lasts as long as it; in the owner's thread.

    It lies at the same offset in its page as in the window: kernels give other last bits at others.

    Args:
        resources: Of the stream.
        unit: Whose weight it is.
        number: Of its weights.
        shown: The weight, where it is in memory; None reads it.

    Returns:
        It, and how many bytes were read.

    Raises:
        TransferError, IntegrityError: As for `WeightStream.use`.
    """
    files, memory = resources.checkpoint.files, resources.memory
    alone = Unit(unit.name)
    alone.weights = [unit.weights[number]]
    alone.plan(resources.checkpoint, unit.own_alignment)
    slot = memory.apart(alone)
    if shown is not None:
        (copy,) = memory.tensors(slot, keep=True)
        return copy.copy_(shown), 0
    fill = memory.fill(slot, alone.layout.reads, files)
    resources.reader.submit(fill)
    fill.done.wait()
    what = f"weight {alone.weights[0].name!r} of {unit.name}"
    if isinstance(fill.error, TransferError):
        raise with_context(fill.error, what) from fill.error
    if fill.error is not None:
        raise fill.error
    for index in slot.files:
        resources.checkpoint.check(index, what)
    if slot.event is not None:
        slot.event.wait()  # its host memory goes
    memory.ready(slot)
    (copy,) = memory.tensors(slot, keep=True)
    return copy, fill.nbytes

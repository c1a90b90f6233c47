"""Where the rows of a gather or scatter lie: what users name, as memory that an engine reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Union

import torch

from nvmeio import _checks
from nvmeio._memory import holds
from nvmeio.engines.base import Rows

if TYPE_CHECKING:
    import numpy

FileOffsets = Union[torch.Tensor, "numpy.ndarray[Any, Any]", Sequence[int]]

_MOST_ROWS = (1 << 32) - 1
_INTEGERS = frozenset(
    (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32)
)


class RowPlaces(NamedTuple):
    """Where rows lie, kept in memory for an operation.

    Attributes:
        rows: For the engine.
        lowest: The least of the offsets.
        keep: The storage of the offsets.
        held: The hold on it. Last, so that it goes before what it holds.
    """

    rows: Rows
    lowest: int
    keep: torch.UntypedStorage
    held: Any

    def end(self) -> None:
        """The engine is done with the offsets."""
        holds.end(self.held)


def row_places(tensor: torch.Tensor, file_offsets: FileOffsets) -> RowPlaces | None:
    """One place in the file for each row of a tensor; None where there is no byte to move.

    Raises:
        TypeError: `file_offsets` are no integers.
        ValueError: There are not as many as rows, or a row would lie outside of any file.
    """
    if not tensor.dim():
        raise ValueError("a tensor of no dimensions has no rows; tensor.unsqueeze(0) has one")
    count = tensor.shape[0]
    offsets = as_integers("file_offsets", file_offsets)
    if offsets.dim() != 1 or len(offsets) != count:
        raise ValueError(
            f"file_offsets must be one for each of the {count} rows, not of shape "
            f"{tuple(offsets.shape)}"
        )
    row_bytes = tensor.nbytes // count if count else 0
    if not row_bytes:
        return None
    if count > _MOST_ROWS:
        raise ValueError(f"{count} rows are too many for one operation: {_MOST_ROWS} at most")
    if tensor.is_quantized:
        raise TypeError("a quantized tensor has no rows of bytes; gather its int_repr()")
    lowest, highest = (int(end) for end in torch.aminmax(offsets))
    if lowest < 0 or highest > _checks.OFFSET_MAX - row_bytes:
        wrong = lowest if lowest < 0 else highest
        raise ValueError(
            f"file_offsets must lie between 0 and 2**63 - 1 - {row_bytes} (a row's bytes), "
            f"not {wrong}"
        )
    held = holds.hold(offsets.untyped_storage())
    if held is None:  # a mapped file, which may be cut short; numpy's, which may be freed
        offsets = offsets.clone()
        held = holds.hold(offsets.untyped_storage())
    rows = Rows(count, row_bytes, offsets.data_ptr())
    return RowPlaces(rows, lowest, offsets.untyped_storage(), held)


def as_integers(name: str, given: FileOffsets) -> torch.Tensor:
    """A tensor of int64 on the CPU, contiguous: the given one where it is that.

    Args:
        name: Of the argument.
        given: A tensor, a numpy array or a sequence of integers.

    Raises:
        TypeError: It is none of these, or holds bools, which would be taken for 0 and 1.
    """
    if isinstance(given, torch.Tensor):
        found = given
    elif hasattr(given, "__array_interface__"):  # numpy's, which torch warns of if read-only
        array: Any = given
        if array.dtype.kind not in "iu" or array.dtype == "uint64":
            raise TypeError(f"{name} must be integers of 64 bits, not {array.dtype}")
        found = torch.from_numpy(array.astype("int64"))
    elif isinstance(given, range):
        return torch.arange(given.start, given.stop, given.step)
    elif isinstance(given, Sequence) and not isinstance(given, (str, bytes)):
        if not len(given):
            return torch.empty(0, dtype=torch.int64)
        if bool in set(map(type, given)):
            raise TypeError(f"{name} must be integers, and there are bools among them")
        try:
            found = torch.tensor(given)
        except (TypeError, ValueError, RuntimeError, OverflowError) as failed:
            raise TypeError(f"{name} must be integers below 2**63: {failed}") from failed
    else:
        raise TypeError(
            f"{name} must be a tensor, a numpy array or a sequence of integers, not "
            f"{type(given).__name__}"
        )
    if found.dtype not in _INTEGERS:
        raise TypeError(f"{name} must be integers of 64 bits, not {found.dtype}")
    return found.detach().to("cpu", torch.int64).contiguous()

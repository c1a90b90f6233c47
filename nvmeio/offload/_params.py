"""The parameters of an optimizer: what they were when they were handed over, and their pieces."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from nvmeio.offload._param_store import ParamStore, store_of
from nvmeio.offload._stepping import Stepper
from nvmeio.offload._subgroups import Piece, cut
from nvmeio.offload._tensors import local


@dataclass(eq=False)
class SwappedParam:
    """A parameter, as it was handed over.

    Attributes:
        number: Position among all parameters.
        parameter: The parameter.
        group: The number of its group.
        param_store: Keeps it on the drive; None where it is in memory.
        shape: Of this process's part.
        dtype: Of the parameter.
        device: Where it is.
        pieces: Its pieces, in order.
    """

    number: int
    parameter: torch.Tensor
    group: int
    param_store: ParamStore | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    pieces: list[Piece] = field(default_factory=list)

    @property
    def stores_rounded(self) -> bool:
        """Whether its store gets rounded weights, which its step has in another dtype."""
        return self.param_store is not None and any(p.step_dtype != self.dtype for p in self.pieces)

    def check_unchanged(self) -> None:
        """Whether it is still what was handed over.

        Raises:
            RuntimeError: It was resized, converted, moved or laid out otherwise; says what it was
                and is.
        """
        now = local(self.parameter)
        for what, was, found in (
            ("shape", self.shape, tuple(now.shape)),
            ("dtype", self.dtype, now.dtype),
            ("device", self.device, now.device),
            ("contiguity", True, self._in_order(now)),
        ):
            if was != found:
                raise RuntimeError(
                    f"parameter {self.number} of shape {self.shape} has changed since the "
                    f"optimizer was made: its {what} was {was} and is {found}. Its state on the "
                    "drive does not fit any more: make a new optimizer"
                )

    def _in_order(self, now: torch.Tensor) -> bool:
        """Whether its pieces are where they were: runs of elements, if there are several."""
        return len(self.pieces) == 1 or self.param_store is not None or now.is_contiguous()


def new_param(
    number: int,
    parameter: torch.Tensor,
    group_number: int,
    group: dict[str, Any],
    stepper: Stepper,
    master_dtype: torch.dtype | None,
    recoverable: bool,
    most_bytes: int,
    gradients: bool,
) -> SwappedParam:
    """A parameter with its pieces, none of which has a record longer than `most_bytes`.

    Raises:
        TypeError: It is complex with master weights, or the optimizer cannot be probed with it.
    """
    tensor = local(parameter)
    param_store = store_of(parameter)
    param = SwappedParam(
        number,
        parameter,
        group_number,
        param_store,
        tuple(tensor.shape),
        tensor.dtype,
        tensor.device,
    )
    if tensor.layout is not torch.strided:
        raise TypeError(f"parameter {number} is {tensor.layout}: only dense parameters are swapped")
    step_dtype = master_dtype or tensor.dtype
    if master_dtype is not None and not tensor.dtype.is_floating_point:
        step_dtype = tensor.dtype
    contiguous = param_store is not None or tensor.is_contiguous()
    staged = (
        step_dtype != tensor.dtype
        or param_store is not None
        or not contiguous
        or tensor.device.type != "cpu"
    )
    kinds = stepper.kinds(group, group_number, step_dtype, param.shape)
    stored = staged or recoverable
    whole = Piece(
        number, 0, tensor.numel(), param.shape, step_dtype, tensor.dtype, kinds, staged, stored
    )
    nbytes = whole.record_nbytes + (whole.numel * tensor.dtype.itemsize if gradients else 0)
    if stepper.splits(step_dtype) and contiguous and nbytes > most_bytes:
        each = nbytes / max(1, whole.numel)
        for start, stop in cut(whole.numel, each, most_bytes):
            param.pieces.append(
                Piece(
                    number,
                    start,
                    stop,
                    (stop - start,),
                    step_dtype,
                    tensor.dtype,
                    kinds,
                    staged,
                    stored,
                )
            )
    else:
        param.pieces.append(whole)
    for piece in param.pieces:
        piece.lent = param_store is not None and not param.stores_rounded
    return param

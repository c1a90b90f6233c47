"""The parameters of an optimizer: what they were when they were handed over, and their pieces."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from nvmeio.offload._module.param_store import ParamStore
from nvmeio.offload._swap_files.subgroups import Piece
from nvmeio.offload._swap_files.tensors import local


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

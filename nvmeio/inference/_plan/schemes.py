"""Schemes in which several stored tensors hold one weight in fewer bytes than its dtype takes.

Two kinds of schemes are known: the one that nvmeio writes (`quantization`), and those in which
models are published (`published`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

Shape = tuple[int, ...]


class Scheme(Protocol):
    """One way to hold a weight. Two of them are equal if they hold weights in the same way."""

    @property
    def multiplies(self) -> bool:
        """Whether products may be made with the parts as they are.

        Otherwise a whole matrix is widened for each product, which torch makes: its sums are those
        of a model that was widened when it was loaded.
        """

    def stored(self, shape: Shape) -> list[tuple[torch.dtype, Shape]]:
        """The parts of a weight of some shape; ValueError if it cannot be held."""

    def shape_of(self, shapes: Sequence[Shape]) -> Shape:
        """The shape of the weight whose parts have these shapes."""

    def widen(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Write the weight's elements into `out`, contiguous, in its dtype.

        `out` is the weight, or one of its experts; the parts may have a dimension of 1 in front.
        """

    def described(self) -> dict[str, Any]:
        """Its entry in the index of a packed file."""

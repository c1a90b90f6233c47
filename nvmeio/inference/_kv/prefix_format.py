"""How a prefix lies in a block store: a head, and parts that are cut into blocks of one size.

No I/O here.
"""

from __future__ import annotations

import json
import math
from typing import Any, NamedTuple

import torch

# Large enough for a drive's full rate with a batch in flight, small enough for half of one to be
# lost in each layer. A head is one.
BLOCK_BYTES = 256 << 10
_FORMAT = 2  # 1 told weights by fewer of their values


class Layer(NamedTuple):
    """Shapes and dtype of one layer's keys and values."""

    keys: tuple[int, ...]
    values: tuple[int, ...]
    dtype: torch.dtype

    @property
    def sizes(self) -> tuple[int, int]:
        """Bytes of the keys, and of the values."""
        return (
            math.prod(self.keys) * self.dtype.itemsize,
            math.prod(self.values) * self.dtype.itemsize,
        )


class Head(NamedTuple):
    """What is saved under a name."""

    generation: str
    model: dict[str, Any]
    weights: str
    ids: tuple[int, int]  # sequences, tokens
    layers: tuple[Layer | None, ...]  # None: one that has no keys of its own

    def pack(self) -> torch.Tensor:
        """One block; blocks are read with the length that they were written with."""
        layers = [
            layer and [layer.keys, layer.values, str(layer.dtype).removeprefix("torch.")]
            for layer in self.layers
        ]
        text = json.dumps({"format": _FORMAT, **self._asdict(), "layers": layers}).encode()
        if len(text) > BLOCK_BYTES:
            raise ValueError(
                f"what is to be said of the model takes {len(text)} bytes, {BLOCK_BYTES} at most"
            )
        return torch.frombuffer(bytearray(text.ljust(BLOCK_BYTES)), dtype=torch.uint8)

    @classmethod
    def unpack(cls, block: torch.Tensor) -> Head | None:
        """From a block; None where another version wrote it."""
        known: dict[str, Any] = json.loads(bytes(block.numpy()))
        if known.pop("format") != _FORMAT:
            return None
        sequences, tokens = known.pop("ids")
        layers = tuple(
            layer and Layer(tuple(layer[0]), tuple(layer[1]), getattr(torch, layer[2]))
            for layer in known.pop("layers")
        )
        return cls(**known, ids=(sequences, tokens), layers=layers)

    def sizes(self) -> list[int]:
        """Bytes of each part: the tokens, then the layers."""
        return [
            8 * math.prod(self.ids),
            *(sum(layer.sizes) if layer else 0 for layer in self.layers),
        ]

    def blocks(self, name: str, part: int) -> list[str]:
        """The names of a part's blocks."""
        count = -(-self.sizes()[part] // BLOCK_BYTES)
        return [f"{name}\0{self.generation}\0{part}\0{number}" for number in range(count)]

    def all_blocks(self, name: str) -> list[str]:
        """Those of all parts."""
        return [key for part in range(len(self.layers) + 1) for key in self.blocks(name, part)]


def states_on(memory: torch.Tensor, about: Layer) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer's keys and values, on the memory that is written or was read."""
    middle = about.sizes[0]
    keys, values = memory[:middle].view(about.dtype), memory[middle:].view(about.dtype)
    return keys.view(about.keys), values.view(about.values)


def cut(memory: torch.Tensor) -> list[torch.Tensor]:
    """A part as blocks."""
    starts = range(0, memory.nbytes, BLOCK_BYTES)
    return [memory[start : start + BLOCK_BYTES] for start in starts]

"""The layout of a prefix in a block store, and the fingerprint of its model.

A prefix is a head, and parts that are cut into blocks of one size. Its keys and values depend on
the model's configuration and weights, of which a fingerprint is kept.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from nvmeio._formats.safetensors.open_set import SafetensorsSet, StoredTensor
from nvmeio._formats.weights_digest import SAMPLE_BYTES, SAMPLES, How, samples
from nvmeio._storage import crc32
from nvmeio.files import File
from nvmeio.handle import AioHandle

# Large enough for a drive's full rate with a batch in flight, small enough for half of one to be
# lost in each layer. A head is one.
BLOCK_BYTES = 256 << 10
_FORMAT = 2  # 1 told weights by fewer of their values


_PIECE_BYTES = 1 << 20
# Entries of a configuration that say where the model came from, and how it is run.
_BESIDE = {
    *("transformers_version", "architectures", "dtype", "torch_dtype", "use_cache"),
    *("return_dict", "output_attentions", "output_hidden_states"),
}


class Layer(NamedTuple):
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
    """The record that is saved under a name."""

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
                f"the description of the model has {len(text)} bytes, {BLOCK_BYTES} are possible"
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
        count = -(-self.sizes()[part] // BLOCK_BYTES)
        return [f"{name}\0{self.generation}\0{part}\0{number}" for number in range(count)]

    def all_blocks(self, name: str) -> list[str]:
        return [key for part in range(len(self.layers) + 1) for key in self.blocks(name, part)]


def states_on(memory: torch.Tensor, about: Layer) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer's keys and values, on the memory that is written or was read."""
    middle = about.sizes[0]
    keys, values = memory[:middle].view(about.dtype), memory[middle:].view(about.dtype)
    return keys.view(about.keys), values.view(about.values)


def cut(memory: torch.Tensor) -> list[torch.Tensor]:
    """A part as blocks."""
    return [memory[start : start + BLOCK_BYTES] for start in range(0, memory.nbytes, BLOCK_BYTES)]


def configuration(model: Any) -> dict[str, Any]:
    """A model's class and configuration, as JSON gives them back."""
    own = {"class": type(model).__name__, "dtype": str(model.dtype)}
    known = {**own, **_only_own(model.config.to_dict()), **_adapters(model)}
    plain: dict[str, Any] = json.loads(json.dumps(known, default=str, sort_keys=True))
    return plain


def _adapters(model: nn.Module) -> dict[str, Any]:
    """The adapters that a model computes with, and how strong: PEFT's layers say so."""
    known = {
        json.dumps(
            [
                bool(layer.disable_adapters),
                list(cast(Any, layer.active_adapters)),
                sorted(cast(Any, getattr(layer, "merged_adapters", ()))),
                getattr(layer, "scaling", None),
            ],
            default=str,
            sort_keys=True,
        )
        for layer in model.modules()
        if hasattr(layer, "disable_adapters") and hasattr(layer, "active_adapters")
        if not callable(layer.disable_adapters)
    }
    return {"adapters": sorted(known)} if known else {}


def _only_own(settings: Any) -> Any:
    if not isinstance(settings, dict):
        return settings
    return {
        str(name): _only_own(value)
        for name, value in settings.items()
        if str(name) not in _BESIDE and not str(name).startswith("_")
    }


class Values(NamedTuple):
    """The parts of a weight that a digest covers: its dtype and shape, and the sampled bytes."""

    about: str
    values: bytes


def weights(model: Any, files: Mapping[str, Values], how: How = "samples") -> str:
    """A digest of a model's weights; `files` is what `of_files` found for a streamed one.

    `how` "full" reads all of them; else the same samples as of files (`weights_digest`) count.
    ValueError if a weight is neither in memory nor in a streamed model's files.
    """
    stream = getattr(model, "weight_stream", None)
    # Weights in memory count as they are: they may have been trained, or have adapters.
    found = {**files, **dict(_of_tensors(model, _places(stream), how))}
    digest = hashlib.blake2b(how.encode(), digest_size=16)
    for name in sorted(found):
        about, values = found[name]
        digest.update(json.dumps([name, about, len(values)]).encode() + values)
    return digest.hexdigest()


def _places(stream: Any) -> set[tuple[int, str]]:
    """Which weights of which modules are streamed."""
    return {
        (id(target.module), target.attribute)
        for unit in getattr(stream, "units", ())
        for part in (unit, *unit.tiles)
        for target in part.targets
    }


def _of_tensors(
    model: nn.Module, streamed: set[tuple[int, str]], how: How
) -> Iterator[tuple[str, Values]]:
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        passing = module._non_persistent_buffers_set
        kept = {name: each for name, each in module._buffers.items() if name not in passing}
        for name, weight in (module._parameters | kept).items():
            if weight is None or id(weight) in seen or (id(module), name) in streamed:
                continue
            seen.add(id(weight))
            full = f"{prefix}.{name}".lstrip(".")
            parts = [_values_of(part, full, how) for part in _plain(weight)]
            yield full, Values(f"{weight.dtype}{list(weight.shape)}", b"".join(parts))


def _plain(weight: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors that a tensor of a class of its own is made of."""
    if type(weight) not in (torch.Tensor, nn.Parameter) and hasattr(weight, "__tensor_flatten__"):
        names, _ = weight.__tensor_flatten__()
        return [part for name in names for part in _plain(getattr(weight, name))]
    return [weight.detach().as_subclass(torch.Tensor)]


def _values_of(weight: torch.Tensor, name: str, how: How) -> bytes:
    if weight.is_meta:
        raise ValueError(
            f"{name} of this model is not in memory (it is on the meta device), so its weights "
            "cannot be told from others: give PrefixCache weights_id=, a name for this version"
        )
    flat = weight.reshape(-1).view(torch.uint8) if weight.numel() else torch.empty(0)

    def read(places: Sequence[tuple[int, int]]) -> bytes:
        parts = [flat[at : at + nbytes] for at, nbytes in places]
        return torch.cat(parts).cpu().numpy().tobytes() if parts else b""

    return _values(flat.nbytes, read, how)


def _values(nbytes: int, read: Callable[[Sequence[tuple[int, int]]], bytes], how: How) -> bytes:
    """The digest of a tensor, which `read` reads by places and lengths."""
    if how == "full":
        pieces = (read([(at, min(_PIECE_BYTES, nbytes - at))]) for at in _pieces(nbytes))
        return b"".join(crc32.of_bytes(piece).to_bytes(4, "little") for piece in pieces)
    starts = samples(nbytes, SAMPLES, SAMPLE_BYTES)
    return read([(at, min(SAMPLE_BYTES, nbytes - at)) for at in starts])


def _pieces(nbytes: int) -> range:
    return range(0, nbytes, _PIECE_BYTES)


def _bytes_at(handle: AioHandle, file: File, offset: int, nbytes: int) -> bytes:
    room = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    handle.sync_pread(room, file, offset)
    return bytes(room.numpy())


def of_files(checkpoint: SafetensorsSet, handle: AioHandle, how: How) -> dict[str, Values]:
    """The parts that a digest covers of the weights in a streamed model's files, by name.

    IntegrityError if a file was written to after the stream had opened it.
    """
    found: dict[str, Values] = {}
    for name, stored in checkpoint.tensors.items():
        entry = stored.entry
        dtype, shape = entry.for_torch()

        def read(places: Sequence[tuple[int, int]], stored: StoredTensor = stored) -> bytes:
            return b"".join(
                _bytes_at(handle, checkpoint.files[file], start, end - start)
                for at, nbytes in places
                for file, start, end in checkpoint.spans(
                    stored.file, stored.entry.start + at, stored.entry.start + at + nbytes
                )
            )

        values = _values(entry.end - entry.start, read, how)
        found[name] = Values(f"{dtype}{list(shape)}", values)
    for index in range(len(checkpoint.files)):
        checkpoint.check(index, "a prefix's fingerprint")
    return found

"""What tells one model from another, as far as its past keys and values depend on it.

The class, the configuration, which adapters are in use, and of each weight its name, dtype, shape
and samples: up to 16 blocks of 4 KiB, evenly from the first element to the last. A model that was
trained on, merged or quantised differs in nearly all of them. A streamed model's are read from its
files, and what is beside them (adapters) from memory. Reading all of a model, which is done where
that is asked for, would take longer than to compute a prompt anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from nvmeio._formats.safetensors_files import bytes_at
from nvmeio._formats.safetensors_set import StoredTensor
from nvmeio._formats.weight_files import SAMPLE_BYTES, SAMPLES, How, samples
from nvmeio._storage import crc32
from nvmeio.handle import AioHandle

_PIECE_BYTES = 1 << 20
# Of a configuration what says where the model came from, and how it is run.
_BESIDE = {
    *("transformers_version", "architectures", "dtype", "torch_dtype", "use_cache"),
    *("return_dict", "output_attentions", "output_hidden_states"),
}


def configuration(model: Any) -> dict[str, Any]:
    """A model's class and configuration, as JSON gives them back."""
    own = {"class": type(model).__name__, "dtype": str(model.dtype)}
    known = {**own, **_only_own(model.config.to_dict()), **_adapters(model)}
    plain: dict[str, Any] = json.loads(json.dumps(known, default=str, sort_keys=True))
    return plain


def _adapters(model: nn.Module) -> dict[str, Any]:
    """Which adapters a model computes with, and how strong: PEFT's layers say so."""
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
    """What counts of a weight: its dtype and shape, and the bytes that are looked at."""

    about: str
    values: bytes


def weights(model: Any, files: Mapping[str, Values], how: How = "samples") -> str:
    """A digest of a model's weights.

    Args:
        model: Loaded whole, or streamed.
        files: Of a streamed one: what `of_files` found.
        how: "full" reads all of them; else the same samples as of files (`weight_files`) count.

    Raises:
        ValueError: A weight is neither here nor in a streamed model's files.
    """
    stream = getattr(model, "weight_stream", None)
    # What is in memory counts as it is there: it may have been trained, and adapters be beside it.
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
    """The tensors that one of a class of its own is made of."""
    if type(weight) not in (torch.Tensor, nn.Parameter) and hasattr(weight, "__tensor_flatten__"):
        names, _ = weight.__tensor_flatten__()
        return [part for name in names for part in _plain(getattr(weight, name))]
    return [weight.detach().as_subclass(torch.Tensor)]


def _values_of(weight: torch.Tensor, name: str, how: How) -> bytes:
    if weight.is_meta:
        raise ValueError(
            f"{name} of this model is not in memory (it is on the meta device), so nobody can tell "
            "its weights from others: give PrefixCache weights_id=, a name for this version of them"
        )
    flat = weight.reshape(-1).view(torch.uint8) if weight.numel() else torch.empty(0)

    def read(places: Sequence[tuple[int, int]]) -> bytes:
        parts = [flat[at : at + nbytes] for at, nbytes in places]
        return torch.cat(parts).cpu().numpy().tobytes() if parts else b""

    return _values(flat.nbytes, read, how)


def _values(nbytes: int, read: Callable[[Sequence[tuple[int, int]]], bytes], how: How) -> bytes:
    """What is remembered of a tensor, by a function that reads places and lengths of it."""
    if how == "full":
        pieces = (read([(at, min(_PIECE_BYTES, nbytes - at))]) for at in _pieces(nbytes))
        return b"".join(crc32.of_bytes(piece).to_bytes(4, "little") for piece in pieces)
    starts = samples(nbytes, SAMPLES, SAMPLE_BYTES)
    return read([(at, min(SAMPLE_BYTES, nbytes - at)) for at in starts])


def _pieces(nbytes: int) -> range:
    return range(0, nbytes, _PIECE_BYTES)


def of_files(stream: Any, handle: AioHandle, how: How) -> dict[str, Values]:
    """What counts of the weights in a streamed model's files, by name."""
    found: dict[str, Values] = {}
    with contextlib.closing(stream.open_checkpoint(handle)) as checkpoint:
        for name, stored in checkpoint.tensors.items():
            entry = stored.entry
            dtype, shape = entry.for_torch()

            def read(places: Sequence[tuple[int, int]], stored: StoredTensor = stored) -> bytes:
                return b"".join(
                    bytes_at(handle, checkpoint.files[file], start, end - start)
                    for at, nbytes in places
                    for file, start, end in checkpoint.spans(
                        stored.file, stored.entry.start + at, stored.entry.start + at + nbytes
                    )
                )

            values = _values(entry.end - entry.start, read, how)
            found[name] = Values(f"{dtype}{list(shape)}", values)
    return found

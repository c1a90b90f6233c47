"""What tells one model from another, as far as its past keys and values depend on it.

The class, the configuration, and of each weight its name, dtype, shape and a few of its values: a
model that was trained on, merged or quantised differs in nearly all of them. A streamed model's are
read from its files. Reading all of a model would take longer than to compute a prompt anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Iterator
from typing import Any

import torch

from nvmeio._formats.safetensors_files import bytes_at
from nvmeio.handle import AioHandle

# Of each weight, from its middle row.
VALUES = 64
# Of a configuration what says where the model came from, and how it is run.
_BESIDE = {
    *("transformers_version", "architectures", "dtype", "torch_dtype", "use_cache"),
    *("return_dict", "output_attentions", "output_hidden_states"),
}


def configuration(model: Any) -> dict[str, Any]:
    """A model's class and configuration, as JSON gives them back."""
    own = {"class": type(model).__name__, "dtype": str(model.dtype)}
    known = {**own, **_only_own(model.config.to_dict())}
    plain: dict[str, Any] = json.loads(json.dumps(known, default=str, sort_keys=True))
    return plain


def _only_own(settings: Any) -> Any:
    if not isinstance(settings, dict):
        return settings
    return {
        str(name): _only_own(value)
        for name, value in settings.items()
        if str(name) not in _BESIDE and not str(name).startswith("_")
    }


def weights(model: Any, handle: AioHandle) -> str:
    """A digest of a model's weights.

    Args:
        model: Loaded whole, or streamed.
        handle: Reads the files of a streamed one.
    """
    stream = getattr(model, "weight_stream", None)
    found = _of_files(stream, handle) if stream is not None else _of_tensors(model)
    digest = hashlib.blake2b(digest_size=16)
    for name, about, values in sorted(found):
        digest.update(json.dumps([name, about, len(values)]).encode() + values)
    return digest.hexdigest()


def _of_tensors(model: Any) -> Iterator[tuple[str, str, bytes]]:
    for name, weight in model.named_parameters():
        values = b""
        # Elsewhere (meta), or of a class of its own: its name and shape have to do.
        if not weight.is_meta and type(weight) in (torch.Tensor, torch.nn.Parameter):
            row = weight.detach()
            while row.dim() > 1 and row.numel():
                row = row[row.shape[0] // 2]
            row = row.reshape(-1)[:VALUES].cpu().contiguous()
            values = bytes(row.view(torch.uint8).tolist())
        yield name, f"{weight.dtype}{list(weight.shape)}", values


def _of_files(stream: Any, handle: AioHandle) -> Iterator[tuple[str, str, bytes]]:
    with contextlib.closing(stream.open_checkpoint(handle)) as checkpoint:
        for name, stored in checkpoint.tensors.items():
            entry = stored.entry
            dtype, shape = entry.for_torch()
            # The first element of the row in the middle, as above.
            first = sum(n // 2 * math.prod(shape[at + 1 :]) for at, n in enumerate(shape[:-1]))
            length = min(VALUES, shape[-1] if shape else 1) * dtype.itemsize
            values = b""
            if entry.end > entry.start:
                at = entry.start + first * dtype.itemsize
                for file, start, end in checkpoint.spans(stored.file, at, at + length):
                    values += bytes_at(handle, checkpoint.files[file], start, end - start)
            yield name, f"{dtype}{list(shape)}", values

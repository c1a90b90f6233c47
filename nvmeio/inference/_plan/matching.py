"""The match of a model's tensors with a checkpoint's, and the errors in it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from nvmeio._formats import model_directory
from nvmeio._formats.safetensors.open_set import SafetensorsSet
from nvmeio.errors import IntegrityError
from nvmeio.files import read_buffered
from nvmeio.inference._plan import packed_format, transformers
from nvmeio.inference._plan.packed_format import Packed
from nvmeio.inference._plan.published import weights_in
from nvmeio.inference._plan.slot_layout import (
    FoundWeight,
    Weight,
    WeightPart,
    extents_within,
    found_in,
)

_PIECE_BYTES = 1 << 20


def match(
    model: nn.Module, checkpoint: SafetensorsSet, strict: bool, packed: Packed | None = None
) -> dict[int, Weight]:
    """Find what each tensor of a model is read from.

    Returns the weights by the id of the meta tensor that each is shown as, in the model's order.

    The model's parameters are on the meta device (else ValueError); buffers there must be in the
    checkpoint too. The checkpoint has the model's names or, for transformers' models, those that
    `from_pretrained` takes. `strict` refuses tensors that the model has no place for.
    IntegrityError names tensor and file if one is missing, has no place, or has another shape.
    """
    found, unexpected = _found(model, checkpoint, packed)
    by_tensor: dict[int, Weight] = {}
    tied: dict[torch.Tensor, list[str]] = {}
    for name, tensor in _tensors_of(model):
        tied.setdefault(tensor, []).append(name)
    missing: list[str] = []
    used: set[str] = set()
    for tensor, names in tied.items():
        used.update(names)
        there = [name for name in names if name in found]
        if not there:
            missing.append(names[0])
            continue
        for other in there[1:]:
            if not _are_equal(found[there[0]], found[other], checkpoint):
                what = f"{checkpoint.path} holds other values for {there[0]!r} than for {other!r}"
                what += ", which are one tensor in the model: store one of them only"
                if _is_tied_by_setting(model, tensor):
                    what += (
                        ", or untie embedding and head: tie_word_embeddings=False in config.json"
                    )
                raise IntegrityError(what, expected="the same values", found="others")
        by_tensor[id(tensor)] = _weight(there[0], tensor, found[there[0]], checkpoint)
    unexpected += [name for name in found if name not in used]
    if packed is None and (missing or unexpected):
        named = _quantisation(model, checkpoint)
        if named is None or named.is_read:  # in another way than it is read
            named = model_directory.quantisation_among(unexpected, checkpoint.tensors)
        if named is not None:
            model_directory.refuse_quantised(named, checkpoint.path)
    if missing:
        raise IntegrityError(
            f"{checkpoint.path} lacks {_some(missing)}, which the model has: it belongs to another "
            "model, or is not complete",
            expected=missing,
            found=sorted(checkpoint.tensors)[:20],
        )
    if unexpected and strict:
        stored = checkpoint.tensors.get(unexpected[0])
        where = checkpoint.path if stored is None else checkpoint.files[stored.file].path
        raise IntegrityError(
            f"{where} holds {_some(unexpected)}, for which the model has no place: it belongs to "
            "another model (strict=False leaves them out)",
            expected=sorted(used)[:20],
            found=unexpected,
        )
    return by_tensor


def _quantisation(
    model: nn.Module, checkpoint: SafetensorsSet
) -> model_directory.Quantisation | None:
    """The quantisation in a model's configuration, or in the one beside its weights."""
    return model_directory.quantisation_of(
        getattr(model, "config", None)
    ) or model_directory.quantisation_in(checkpoint.path)


def _found(
    model: nn.Module, checkpoint: SafetensorsSet, packed: Packed | None
) -> tuple[dict[str, FoundWeight], list[str]]:
    if packed is not None:
        return packed_format.parts_of(checkpoint, packed), []
    named = _quantisation(model, checkpoint)
    held = weights_in(checkpoint, named)
    if hasattr(model, "base_model_prefix") and hasattr(model, "config"):
        sources, unexpected = transformers.parts_of(model, checkpoint, held)
        return {name: _one_of(twins, checkpoint) for name, twins in sources.items()}, unexpected
    return {name: found_in(weight.tensors, weight.scheme) for name, weight in held.items()}, []


def _one_of(twins: Sequence[FoundWeight], checkpoint: SafetensorsSet) -> FoundWeight:
    """The source of a weight; IntegrityError if the checkpoint has several values for it."""
    first, *others = twins
    for other in others:
        if not _are_equal(first, other, checkpoint):
            names = " and ".join(repr(each.sources[0]) for each in (first, other))
            raise IntegrityError(
                f"{checkpoint.path} holds {names}, which are one tensor in the model, with "
                "different values: remove the one that is not meant, with "
                "safetensors.torch.load_file and save_file",
                expected="one value",
                found=[each.sources[0] for each in twins],
            )
    return first


def _tensors_of(model: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    """Every parameter, and every buffer on the meta device, under all of its names."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not parameter.is_meta:
            raise ValueError(
                f"parameter {name!r} is on {parameter.device}, where it takes memory already: "
                'build the model within `with torch.device("meta"):`'
            )
        yield name, parameter
    for prefix, module in model.named_modules(remove_duplicate=False):
        for attribute, buffer in module._buffers.items():
            if buffer is None or not buffer.is_meta:
                continue
            name = f"{prefix}.{attribute}" if prefix else attribute
            if attribute in module._non_persistent_buffers_set:
                raise ValueError(
                    f"buffer {name!r} is on the meta device, and no checkpoint holds it: give it "
                    "its value before, on a real device"
                )
            yield name, buffer


def _weight(
    name: str, tensor: torch.Tensor, found: FoundWeight, checkpoint: SafetensorsSet
) -> Weight:
    shape = tuple(tensor.shape)
    stored = found.shape
    if stored != shape:
        extent = found.parts[0].extents[0] if found.parts[0].extents else None
        where = checkpoint.path if extent is None else checkpoint.files[extent.file].path
        raise IntegrityError(
            f"tensor {found.sources[0]!r} in {where} has shape {stored}, but the model has shape "
            f"{shape} "
            f"for {name!r}: it belongs to another configuration",
            expected=shape,
            found=stored,
        )
    return Weight(name, tensor.dtype, shape, found.parts, found.quantised, found.sources)


def _is_tied_by_setting(model: nn.Module, tensor: torch.Tensor) -> bool:
    """Whether a setting of transformers ties this tensor, of the head, to the embedding.

    T5's configuration ties them whatever it is given.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    config: Any = getattr(model, "config", None)
    if getattr(head, "weight", None) is not tensor or not config.tie_word_embeddings:
        return False
    untied = type(config).from_dict({**config.to_dict(), "tie_word_embeddings": False})
    return not untied.tie_word_embeddings


def _are_equal(one: FoundWeight, other: FoundWeight, checkpoint: SafetensorsSet) -> bool:
    """Whether two weights are of the same bytes."""
    kinds = [
        (each.quantised, [(part.dtype, part.shape) for part in each.parts]) for each in (one, other)
    ]
    return kinds[0] == kinds[1] and all(
        _bytes_of(part, at, checkpoint) == _bytes_of(twin, at, checkpoint)
        for part, twin in zip(one.parts, other.parts, strict=True)
        for at in range(0, part.nbytes, _PIECE_BYTES)
    )


def _bytes_of(part: WeightPart, at: int, checkpoint: SafetensorsSet) -> bytes:
    return b"".join(
        read_buffered(checkpoint.files[file], start, end - start)
        for extent in extents_within(part.extents, at, at + _PIECE_BYTES)
        for file, start, end in checkpoint.spans(
            extent.file, extent.offset, extent.offset + extent.nbytes
        )
    )


def _some(names: list[str]) -> str:
    shown = ", ".join(map(repr, names[:5])) + (", …" if len(names) > 5 else "")
    return f"{'tensor' if len(names) == 1 else f'{len(names)} tensors,'} {shown}"

"""A model without weights: what each is read from, and what memory is spent on. Reads none."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from nvmeio._formats import packed_index
from nvmeio._formats.safetensors_set import SafetensorsSet, StoredTensor
from nvmeio.inference._modules import binding
from nvmeio.inference._packed import format
from nvmeio.inference._packed.format import Packed
from nvmeio.inference._plan import transformers
from nvmeio.inference._plan.asked import Asked
from nvmeio.inference._plan.budget import Shares, share_out
from nvmeio.inference._plan.fitting import SHARE, fit
from nvmeio.inference._plan.matching import Matched, match
from nvmeio.inference._plan.units import Partition, partition
from nvmeio.inference._ranks import tensor_parallel
from nvmeio.inference._ranks.stream_ranks import Ranks, check_part, digest_of, room_for_others
from nvmeio.inference._ranks.tensor_parallel import TensorParallel
from nvmeio.inference._stream.limits import memory_left


class ModelPlan(NamedTuple):
    """What is streamed, and how.

    Attributes:
        model: With placeholders in the place of weights.
        parts: What is streamed as one.
        shares: What memory is spent on.
        ranks: Those that read together; None where this one reads for itself.
        parallel: The ranks that compute together.
        stored: The tensors of the files.
        packed: What a packed checkpoint says of itself.
        part: Which part of a packed model it is, if it is one.
    """

    model: Any
    parts: Partition
    shares: Shares
    ranks: Ranks | None
    parallel: TensorParallel | None
    stored: dict[str, StoredTensor]
    packed: Packed | None
    part: str | None

    def differs(self, again: SafetensorsSet, checksum: bool) -> bool:
        """Whether files with the same tensors were packed from others than those of the plan."""
        if again.metadata.get(packed_index.PART) != self.part:
            return True
        return format.parse(again, checksum) != self.packed


def plan_model(asked: Asked, opened: SafetensorsSet, ranks: Ranks | None) -> ModelPlan:
    """Make the model, if it is to be made, and find what it is streamed from.

    Args:
        asked: What for.
        opened: Its files.
        ranks: Those that stream it together.

    Raises:
        IntegrityError, ValueError, TransferError, MemoryError: As `stream_model` says.
    """
    model = _model(asked, opened)
    packed = format.parse(opened, asked.checksum)
    matched = match(model, opened, asked.strict, packed)
    parallel = None
    if asked.tp_plan is not None and ranks is not None:
        words = tensor_parallel.check(model, asked.tp_plan, ranks, matched, packed, opened)
        parallel = TensorParallel(asked.process_group, ranks, asked.label)
        matched = parallel.cut(model, words, matched)
        ranks.drop()
        ranks = None  # each reads for itself
    own_alignment = not asked.is_transformers or parallel is not None

    def cut_to(most: int | None = None) -> Partition:
        return _parts(asked, model, matched, opened, own_alignment, most)

    parts = cut_to()
    planned = (parts.fixed, *parts.units)
    check_part(opened, planned, ranks)
    others = 0 if ranks is None else room_for_others(parts.units, ranks.size)
    budget, left = asked.resident_bytes, None
    if budget is None:
        left = memory_left()
        budget = _default_budget(parts.fixed, parts.units, asked.window, others, left)
    if ranks is not None:
        digest = digest_of(opened, planned, asked.window, asked.checksum, asked.device.type)
        budget = ranks.meet(digest, budget)
        shares = share_out(parts.fixed, parts.units, budget, asked.window, others)
    else:
        parts, shares = fit(parts, cut_to, budget, asked.window, left)
    for unit in (parts.fixed, *parts.units):
        (binding.freeze if asked.trainable else binding.stand_in)(unit, asked.device)
    part = opened.metadata.get(packed_index.PART)
    return ModelPlan(model, parts, shares, ranks, parallel, dict(opened.tensors), packed, part)


def _model(asked: Asked, opened: SafetensorsSet) -> Any:
    if asked.is_transformers:
        model = transformers.empty_model(asked.given, asked.dtype, opened)
    else:
        model = asked.given
        if asked.dtype is not None:
            _set_dtype(model, asked.dtype)
    if hasattr(model, "initialize_weights") and hasattr(model, "config"):
        transformers.compute_buffers(model, asked.device)
    return model


def _parts(
    asked: Asked,
    model: nn.Module,
    matched: Matched,
    opened: SafetensorsSet,
    own_alignment: bool,
    most: int | None,
) -> Partition:
    """The model in units of so many bytes at most, laid out."""
    parts = partition(model, matched.by_tensor, asked.layers, most)
    for unit in (parts.fixed, *parts.units):
        if asked.trainable:
            unit.experts = None  # those of a token would have to be known to backward
        unit.plan(opened, own_alignment=own_alignment)
    return parts


def _set_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    """Have a module want its weights in a dtype."""
    if any(p.is_floating_point() and p.dtype != dtype for p in model.parameters()):
        model.to(dtype)


def _default_budget(fixed: Any, units: Any, window: int | None, others: int, left: int) -> int:
    """Half of what is left, but never less than what streaming needs at all."""
    least = share_out(fixed, units, None, 1 if window is None else window, others).total
    return max(least, int(left * SHARE))

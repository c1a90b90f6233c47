"""A large batch in parts: micro-batches share each streamed layer; a loss some tokens at a time.

The block schedule: one streamed layer serves every micro-batch before the next layer comes in.
A large batch in one forward does that too, as long as its activations fit in memory. In
micro-batches they need only fit one at a time, and each micro-batch keeps its own past keys and
values. The work of each is unmodified code (`model.generate`, say) in a thread of its own;
`_stream.lockstep` lets one run at a time and rotates them at every layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from nvmeio import _checks

Value = TypeVar("Value")


def run_in_blocks(model: Any, works: Sequence[Callable[[], Value]]) -> list[Value]:
    """Run pieces of work that all use a streamed model, in lockstep.

    Args:
        model: A model of `stream_model`.
        works: Each calls the model, with its own inputs and cache; autograd is off.

    Returns:
        Their values, in order.

    Raises: The error of the first one that failed; the others are stopped at their next layer.
    """
    values: list[Value] = model.weight_stream.in_lockstep([torch.no_grad()(work) for work in works])
    return values


def generate_in_blocks(
    model: Any,
    input_ids: torch.Tensor,
    *,
    micro_batches: int,
    attention_mask: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """`model.generate` of a batch, cut into micro-batches that share each layer that is read.

    Args:
        model: A model of `stream_model`.
        input_ids: Prompts, shape (batch, length).
        micro_batches: Into how many parts the batch is cut, 1 to batch.
        attention_mask: 0 where a prompt is padded, shape as `input_ids`; by default `generate`
            finds it.
        options: As for `generate`, the same for each micro-batch.

    Returns:
        Tokens, shape (batch, longest), padded at the end with the padding token where a
        micro-batch ended before the others. Each row is what `generate` gives for its
        micro-batch alone.

    Raises:
        ValueError: `micro_batches` is not within 1 to batch; a cache is given, of which each
            micro-batch has its own.
        TransferError, IntegrityError: As the model's forward.
    """
    batch = int(input_ids.shape[0])
    if not 1 <= micro_batches <= batch:
        raise ValueError(f"micro_batches must lie between 1 and {batch}, not {micro_batches}")
    given = [name for name in ("cache", "past_key_values") if options.get(name) is not None]
    if given:
        raise ValueError(f"{given[0]}: each micro-batch has a cache of its own: leave it out")
    named: list[dict[str, torch.Tensor]] = [{}] * micro_batches  # generate sees where it is padded
    if attention_mask is not None:
        named = [{"attention_mask": mask} for mask in attention_mask.tensor_split(micro_batches)]
    works = [
        partial(model.generate, ids, **masks, **options)
        for ids, masks in zip(input_ids.tensor_split(micro_batches), named, strict=True)
    ]
    found: list[torch.Tensor] = run_in_blocks(model, works)
    longest = max(tokens.shape[1] for tokens in found)
    padding = _padding(model, options)
    rows = [
        torch.nn.functional.pad(tokens, (0, longest - tokens.shape[1]), value=padding)
        for tokens in found
    ]
    return torch.cat(rows)


def _padding(model: Any, options: dict[str, Any]) -> int:
    config = options.get("generation_config") or model.generation_config
    names = ("pad_token_id", "eos_token_id")
    values = (options.get(name, getattr(config, name, None)) for name in names)
    firsts = (value[0] if isinstance(value, (list, tuple)) and value else value for value in values)
    return next((value for value in firsts if isinstance(value, int)), 0)


def chunked_cross_entropy(
    hidden: torch.Tensor,
    head: Callable[[torch.Tensor], torch.Tensor],
    labels: torch.Tensor,
    chunk: int = 1024,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> torch.Tensor:
    """`cross_entropy(head(hidden), labels)`, some tokens at a time.

    Only the logits of `chunk` tokens exist at any moment, in forward and in backward, which
    computes them once more: the head is multiplied with three times instead of twice.

    Args:
        hidden: The head's input, [..., width].
        head: The output head: a module (of a streamed model too), or any function of rows.
        labels: For each token its class, [...]; a causal model's are shifted by the caller:
            ``hidden[:, :-1]`` and ``labels[:, 1:]``.
        chunk: Tokens at a time.
        ignore_index: A label that counts for nothing.
        reduction: "mean" of the tokens that count, or "sum".

    Returns:
        The loss, in float32 (float64 of such logits).

    Raises:
        ValueError: Shapes do not match, or a value is not one of those above.

    It differs from the loss of the whole by rounding: sums are taken chunk by chunk, and a matrix
    product may round otherwise with other numbers of rows. In float32 the loss and the gradients
    agree to a relative 1e-5; in bfloat16 to what that holds, 1e-2.

    Examples:
        >>> hidden = model.model(ids).last_hidden_state
        >>> loss = chunked_cross_entropy(hidden[:, :-1], model.lm_head, ids[:, 1:])
    """
    chunk = _checks.integer("chunk", chunk, 1)
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction must be 'mean' or 'sum', not {reduction!r}")
    if hidden.shape[:-1] != labels.shape:
        raise ValueError(
            f"hidden of shape {tuple(hidden.shape)} needs labels of shape "
            f"{tuple(hidden.shape[:-1])}, not {tuple(labels.shape)}"
        )

    def loss_of(rows: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        logits = head(rows)
        if logits.dtype != torch.float64:
            logits = logits.float()
        return functional.cross_entropy(logits, classes, ignore_index=ignore_index, reduction="sum")

    rows = hidden.reshape(-1, hidden.shape[-1])
    classes = labels.reshape(-1)
    total: torch.Tensor | None = None
    # At least once, so that the loss of no tokens is one of the head's dtype and graph.
    for start in range(0, max(len(classes), 1), chunk):
        part = slice(start, start + chunk)
        found: torch.Tensor = checkpoint(loss_of, rows[part], classes[part], use_reentrant=False)
        total = found if total is None else total + found
    assert total is not None
    return total if reduction == "sum" else total / (classes != ignore_index).sum()

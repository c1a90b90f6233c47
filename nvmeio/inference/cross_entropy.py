"""A loss over a large vocabulary whose logits never exist whole."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from nvmeio import _checks


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

    Of the logits those of `chunk` tokens exist at any moment, in forward and in backward, which
    computes them once more: the head is multiplied with three times instead of twice.

    Args:
        hidden: What the head is given, [..., width].
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
    if reduction == "sum":
        return total
    return total / (classes != ignore_index).sum()

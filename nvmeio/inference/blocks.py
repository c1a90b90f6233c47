"""The block schedule: one streamed layer serves every micro-batch before the next layer comes in.

A large batch in one forward does that too, as long as its activations fit in memory. In
micro-batches they need only fit one at a time, and each micro-batch keeps its own past keys and
values. The work of each is unmodified code (`model.generate`, say) in a thread of its own;
a `Lockstep` has only one run at a time and rotates them at every layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from nvmeio.inference.stream import WeightStream

Value = TypeVar("Value")


def run_in_blocks(model: Any, works: Sequence[Callable[[], Value]]) -> list[Value]:
    """Run pieces of work that all use a streamed model, in lockstep.

    Args:
        model: Of `stream_model`.
        works: Each calls the model, with its own inputs and cache; autograd is off.

    Returns:
        Their values, in order.

    Raises: What the first that failed raised; the others are stopped at their next layer.
    """
    stream: WeightStream = model.weight_stream

    def quietly(work: Callable[[], Value]) -> Callable[[], Value]:
        def run() -> Value:
            with torch.no_grad():
                return work()

        return run

    return stream.in_lockstep([quietly(work) for work in works])


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
        model: Of `stream_model`.
        input_ids: Prompts, shape (batch, length).
        micro_batches: Into how many parts the batch is cut, 1 to batch.
        attention_mask: 0 where a prompt is padded, shape as `input_ids`.
        options: As for `generate`.

    Returns:
        Tokens, shape (batch, longest), padded at the end with the padding token where a
        micro-batch ended before the others. Each row is what `generate` gives for its
        micro-batch alone.

    Raises:
        ValueError: `micro_batches` is not within 1 to batch.
        TransferError, IntegrityError: As the model's forward.
    """
    batch = int(input_ids.shape[0])
    if not 1 <= micro_batches <= batch:
        raise ValueError(f"micro_batches must lie between 1 and {batch}, not {micro_batches}")
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    parts = zip(
        input_ids.tensor_split(micro_batches), mask.tensor_split(micro_batches), strict=True
    )

    def work(ids: torch.Tensor, seen: torch.Tensor) -> Callable[[], torch.Tensor]:
        def generate() -> torch.Tensor:
            found: torch.Tensor = model.generate(ids, attention_mask=seen, **options)
            return found

        return generate

    found = run_in_blocks(model, [work(ids, seen) for ids, seen in parts])
    longest = max(tokens.shape[1] for tokens in found)
    padding = _padding(model, options)
    rows = [
        torch.nn.functional.pad(tokens, (0, longest - tokens.shape[1]), value=padding)
        for tokens in found
    ]
    return torch.cat(rows)


def _padding(model: Any, options: dict[str, Any]) -> int:
    config = options.get("generation_config") or model.generation_config
    for name in ("pad_token_id", "eos_token_id"):
        value = options.get(name, getattr(config, name, None))
        if isinstance(value, (list, tuple)) and value:
            value = value[0]
        if isinstance(value, int):
            return value
    return 0

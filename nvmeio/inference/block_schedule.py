"""A large batch in parts: micro-batches share each streamed layer; a loss some tokens at a time.

The block schedule: one streamed layer serves every micro-batch before the next layer comes in.
A large batch in one forward does that too, as long as its activations fit in memory. In
micro-batches they need only fit one at a time, and each micro-batch keeps its own past keys and
values. The work of each is unmodified code (`model.generate`, say) in a thread of its own;
a `Lockstep` has only one run at a time and rotates them at every layer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from nvmeio import _checks
from nvmeio._memory import devices
from nvmeio._threads.threads import Thread

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
        model: Of `stream_model`.
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


class Abandoned(Exception):
    """Another micro-batch failed, or all were told to stop; whoever did has the reason."""


class Lockstep(Generic[Value]):
    """Pieces of work that use the same units in the same order.

    Each has a thread of its own, but only one runs at any moment: they take turns at every unit, in
    the order in which they were given, so that a unit is brought once for all of them. One that
    ends early leaves the others.

    Args:
        works: What to run.
    """

    def __init__(self, works: Sequence[Callable[[], Value]]) -> None:
        self._works = works
        self._condition = threading.Condition()  # of these threads: none is one that is interrupted
        self._members: list[int] = list(range(len(works)))  # members that are not done
        self._now = 0  # the member that runs
        self._failed: BaseException | None = None
        self._stopped = False

    def run(self) -> list[Value]:
        """Run them all, as the calling thread computes, and return their values, in order.

        Called in a thread of its own.

        Raises: What the first of them raised that failed; the others are stopped at their next
            unit.
        """
        values: dict[int, Value] = {}
        threads: list[Thread] = []
        try:
            for number in range(len(self._works)):
                work = devices.as_here(self._works[number])
                thread = Thread(self._member, f"nvmeio-batch-{number}", (number, work, values))
                thread.start()
                threads.append(thread)
        except BaseException as failed:  # no more threads in this process
            with self._condition:
                self._failed = self._failed or failed
                self._condition.notify_all()
        for thread in threads:
            thread.join()
        if self._failed is not None:
            raise self._failed
        if self._stopped:
            raise Abandoned
        return [values[number] for number in range(len(self._works))]

    def stop(self) -> None:
        """Have them end at their next unit; from any thread."""
        self._stopped = True  # whoever runs sees it, and those who wait for it after that

    @property
    def shared(self) -> bool:
        """Whether others are to use the same unit before the next one."""
        return len(self._members) > 1

    def hand_on(self) -> None:
        """Let the next one run, and wait until the turn comes back; called by a member.

        Raises:
            Abandoned: They are to end.
        """
        number = _membership.number
        with self._condition:
            if self._failed is not None or self._stopped:
                raise Abandoned
            self._now = self._follower(number)
            self._condition.notify_all()
            self._wait(number)

    def _wait(self, number: int) -> None:
        while self._now != number and self._failed is None:
            self._condition.wait()
        if self._failed is not None or self._stopped:
            raise Abandoned

    def _follower(self, number: int) -> int:
        later = [member for member in self._members if member > number]
        return later[0] if later else min(self._members, default=-1)

    def _member(self, number: int, work: Callable[[], Value], values: dict[int, Value]) -> None:
        _membership.lockstep, _membership.number = self, number
        try:
            with self._condition:
                self._wait(number)
            values[number] = work()
        except Abandoned:
            pass
        except BaseException as failed:
            with self._condition:
                self._failed = self._failed or failed
        finally:
            with self._condition:
                self._members.remove(number)
                self._now = self._follower(number)
                self._condition.notify_all()


class _Membership(threading.local):
    lockstep: Lockstep[Any] | None = None
    number: int = -1


_membership = _Membership()


def current() -> Lockstep[Any] | None:
    """The lockstep of which this thread is a member."""
    return _membership.lockstep


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
    return total if reduction == "sum" else total / (classes != ignore_index).sum()

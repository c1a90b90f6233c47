"""Expert parallelism: each rank keeps, reads and computes with some experts of each layer.

    all ranks      how many tokens each sends to each other's experts
    all ranks      hidden states and numbers of experts, to the ranks that have these
    each rank      computes with its experts, for one rank after the other
    all ranks      whether that went well; then outputs, back to where the tokens are
    each rank      adds up what its tokens' experts gave, in the order of one process

A rank computes what another asks for by itself, so that each product has the rows that it has where
one process has all experts: matrix kernels give other last bits for other numbers of rows. It comes
back for each token and expert, since floating-point sums depend on their order.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from nvmeio._residency import routing
from nvmeio.inference._experts.sets import ExpertModules, ExpertSet
from nvmeio.inference._parallel.tensor_parallel import ParallelPasses

logger = logging.getLogger("nvmeio")

EXPERTS_PLAN = "experts"  # as `stream_model(tp_plan=)`
# Arguments of transformers' experts: hidden states, the experts of each token, their weights.
_GIVEN = {
    ("hidden_states", "top_k_index", "top_k_weights"),
    ("hidden_states", "router_indices", "routing_weights"),  # gpt-oss
}
# These add the outputs of a token's experts up as they were chosen, others by ascending numbers.
_AS_CHOSEN = {"grouped_mm", "batched_mm"}


def can_be_shared_out(experts: ExpertSet) -> bool:
    """Whether ranks can compute each other's tokens with a set: fused experts of transformers."""
    takes = tuple(inspect.signature(experts.module.forward).parameters)
    return not isinstance(experts, ExpertModules) and takes in _GIVEN


def owned_nbytes(experts: ExpertSet, ranks: int) -> int:
    """The most bytes of a set that one of several ranks has."""
    if ranks == 1 or not can_be_shared_out(experts):
        return experts.all_nbytes
    return -(-experts.number // ranks) * experts.nbytes


class ExpertParallel(ParallelPasses):
    """The ranks that compute with each other's experts; their group must be of all processes."""

    def share_out(self, experts: Sequence[ExpertSet]) -> None:
        """Have the modules of experts ask the ranks; behind what streams the model."""
        for each in experts:
            if can_be_shared_out(each):
                routing.attach(each.module, functools.partial(self._compute, each))
            else:
                logger.info("%s: every rank has all experts, which are called alone", each.name)

    def _compute(
        self,
        experts: ExpertSet,
        top_k_index: torch.Tensor,
        call: Callable[..., torch.Tensor],
        /,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        hidden, _, weights = inspect.signature(call).bind(*args, **kwargs).arguments.values()
        tokens, chosen = top_k_index.shape
        numbers = top_k_index.reshape(-1)
        there = (numbers >= 0) & (numbers < experts.number)
        # By the rank that has the expert; within that as they were.
        rank_of = torch.where(there, numbers % self.size, self.size)
        order = torch.argsort(rank_of, stable=True)
        sent = torch.bincount(rank_of, minlength=self.size + 1)[: self.size]
        order = order[: int(sent.sum())]
        come = self._all_to_all(sent, [1] * self.size, [1] * self.size)
        to, from_ = sent.tolist(), come.tolist()
        theirs = self._all_to_all(hidden[order // chosen], to, from_)
        asked = self._all_to_all(numbers[order], to, from_)
        outputs = self._outputs(experts, call, theirs, asked, from_)
        own = hidden.new_zeros(tokens * chosen, hidden.shape[-1])
        own[order] = self._all_to_all(outputs, from_, to)
        return self._sum(experts, own.view(tokens, chosen, -1), top_k_index, weights, hidden)

    def _outputs(
        self,
        experts: ExpertSet,
        call: Callable[..., torch.Tensor],
        hidden: torch.Tensor,
        numbers: torch.Tensor,
        counts: list[int],
    ) -> torch.Tensor:
        """This rank's experts' output for the tokens of each rank; raises if a rank failed."""
        parts = [hidden[:0]]
        failed: BaseException | None = None
        try:
            by_rank = zip(torch.split(hidden, counts), torch.split(numbers, counts), strict=True)
            for states, chosen in by_rank:
                if len(states):
                    ones = states.new_ones(len(states), 1)
                    parts.append(call(states, chosen[:, None], ones))
        except BaseException as error:
            failed = error
        well = torch.tensor([failed is None], dtype=torch.uint8)
        heard = [torch.empty_like(well) for _ in range(self.size)]
        try:
            dist.all_gather(heard, well, group=self._group[0])
            if failed is not None:
                raise failed
        finally:
            del failed  # no cycle with the traceback
        bad = [rank for rank, each in enumerate(heard) if not each]
        if bad:
            raise self._error(f"rank {bad[0]} failed to compute with its {experts.name}")
        return torch.cat(parts)

    def _all_to_all(
        self, tensor: torch.Tensor, to: Sequence[int], from_: Sequence[int]
    ) -> torch.Tensor:
        """Send so many rows to each rank; returns those that came, rank by rank."""
        came = tensor.new_empty(sum(from_), *tensor.shape[1:])
        dist.all_to_all_single(
            came, tensor.contiguous(), list(from_), list(to), group=self._group[0]
        )
        return came

    def _sum(
        self,
        experts: ExpertSet,
        outputs: torch.Tensor,
        top_k_index: torch.Tensor,
        weights: torch.Tensor,
        hidden: torch.Tensor,
    ) -> torch.Tensor:
        """Add up the outputs of a token's experts, as the chosen kernel does in one process."""
        weighted = outputs * weights.unsqueeze(-1)
        config: Any = getattr(experts.module, "config", None)
        if getattr(config, "_experts_implementation", None) in _AS_CHOSEN:
            return weighted.sum(dim=1).to(hidden.dtype)
        found = torch.zeros_like(hidden)
        for number in torch.unique(top_k_index).tolist():
            if 0 <= number < experts.number:
                token, place = torch.where(top_k_index == number)
                found.index_add_(0, token, weighted[token, place].to(hidden.dtype))
        return found

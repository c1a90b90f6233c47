"""How many experts of a mixture fit, and how often published routing would find one there."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from nvmeio.inference._experts.sets import ExpertSet

# The share of a layer's experts that is kept, and how often the least-recently-used policy has the
# one that is needed: Qwen3-30B-A3B, 48 layers of 128 experts, 8 a token, 25 prompts of 129 tokens.
# Source: github.com/gajsanders/moe-trace, findings 007 and 015.
_PUBLISHED = ((0.0, 0.0), (8 / 128, 0.424), (16 / 128, 0.647), (32 / 128, 0.81), (0.5, 0.918))


def expected_hits(share: float) -> float:
    """The hit rate that published traces would have with a share of the experts in memory.

    Between two published shares it is interpolated. With all experts it is 1.
    """
    points = (*_PUBLISHED, (1.0, 1.0))
    after = min(bisect_right([point[0] for point in points], share), len(points) - 1)
    (low, first), (high, last) = points[after - 1], points[after]
    return min(1.0, first + (last - first) * (share - low) / (high - low))


def experts_that_fit(sets: Sequence[ExpertSet], nbytes: int) -> str:
    """A sentence for the log: the number of experts in a budget, and the expected hits."""
    number = sum(experts.number for experts in sets)
    total = sum(experts.all_nbytes for experts in sets)
    share = min(1.0, nbytes / total)
    return (
        f"{int(number * share)} of {number} experts fit ({share:.0%}), where the published routing "
        f"of Qwen3-30B-A3B would find {expected_hits(share):.0%} of those that it needs"
    )

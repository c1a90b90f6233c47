"""What measurements tell of settings nearby: a Gaussian process over the grid.

One short transfer is a noisy witness, but its neighbours (half the depth, twice the block size) say
much the same, so all together tell more of each setting than its own measurement does. The prior:
throughput, in logarithms, is a constant, plus a smooth effect of each parameter, plus a smooth
remainder for how they act together. Amplitude and noise are those that explain the measurements
best.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from nvmeio.engines.base import Options

# How far apart two values may lie and still be of much the same opinion: in doublings for numbers;
# a flag's two values are one apart.
_REACH = (2.0, 2.0, 1.5, 1.0, 1.0)
_AMPLITUDES = (0.03, 0.1, 0.3, 0.9)
_NOISES = (0.01, 0.03, 0.1, 0.3)
_CONSTANT = 1.0
_TOGETHER = 0.3  # the part of the remainder beside the effects of single parameters
# What lies further from the others' opinion than so many standard deviations is taken for a hiccup.
_CLIP = 2.5


class Observation(NamedTuple):
    """One measurement: the logarithm of a rate relative to the default's.

    `weight` is its length relative to the others: twice as long, half the variance.
    """

    setting: Options
    value: float
    weight: float


class Opinion(NamedTuple):
    """What is believed of a setting."""

    mean: float
    deviation: float


def opinions(
    observations: Sequence[Observation], settings: Sequence[Options]
) -> dict[Options, Opinion]:
    """What the observations tell of each of the settings, measured or not.

    Cost: 0.05 s for 360 of each.
    """
    if not observations:
        return {setting: Opinion(0.0, math.inf) for setting in settings}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as fast for so little, and not at the mercy of a busy machine
    try:
        return _opinions(observations, settings)
    finally:
        torch.set_num_threads(threads)


def _opinions(
    observations: Sequence[Observation], settings: Sequence[Options]
) -> dict[Options, Opinion]:
    at = _features([o.setting for o in observations])
    values = torch.tensor([o.value for o in observations], dtype=torch.float64)
    lengths = torch.tensor([o.weight for o in observations], dtype=torch.float64)
    alike = _alike(at, at)
    amplitude, noise = _explain(alike, values, lengths)
    fitted = _solve(alike, values, lengths, amplitude, noise, alike)[0]
    allowed = _CLIP * noise / lengths.sqrt()
    clipped = fitted + (values - fitted).clamp(-allowed, allowed)
    amplitude, noise = _explain(alike, clipped, lengths)
    wanted = _alike(_features(settings), at)
    mean, variance = _solve(alike, clipped, lengths, amplitude, noise, wanted)
    deviations = variance.clamp_min(0).sqrt()
    return {
        setting: Opinion(float(m), float(d))
        for setting, m, d in zip(settings, mean, deviations, strict=True)
    }


def _features(settings: Sequence[Options]) -> torch.Tensor:
    rows = [
        (
            math.log2(s.block_size),
            math.log2(s.queue_depth),
            math.log2(s.intra_op_parallelism),
            float(s.single_submit),
            float(s.overlap_events),
        )
        for s in settings
    ]
    return torch.tensor(rows, dtype=torch.float64) / torch.tensor(_REACH, dtype=torch.float64)


def _alike(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """How much each of one has to say about each of the other, before amplitudes."""
    each = torch.exp(-0.5 * (a[:, None, :] - b[None, :, :]) ** 2)
    return each.mean(dim=2) + _TOGETHER * each.prod(dim=2)


def _explain(
    alike: torch.Tensor, values: torch.Tensor, lengths: torch.Tensor
) -> tuple[float, float]:
    """Amplitude and noise of the greatest likelihood."""
    best = (-math.inf, _AMPLITUDES[1], _NOISES[1])
    for amplitude in _AMPLITUDES:
        for noise in _NOISES:
            factor = _factor(alike, lengths, amplitude, noise)
            white = torch.linalg.solve_triangular(factor, values[:, None], upper=False)
            likelihood = -0.5 * float((white**2).sum()) - float(factor.diagonal().log().sum())
            best = max(best, (likelihood, amplitude, noise))
    return best[1], best[2]


def _solve(
    alike: torch.Tensor,
    values: torch.Tensor,
    lengths: torch.Tensor,
    amplitude: float,
    noise: float,
    wanted: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and variance at the wanted places."""
    factor = _factor(alike, lengths, amplitude, noise)
    cross = _CONSTANT + amplitude**2 * wanted
    mean = (cross @ torch.cholesky_solve(values[:, None], factor))[:, 0]
    half = torch.linalg.solve_triangular(factor, cross.T, upper=False)
    own = _CONSTANT + amplitude**2 * (1 + _TOGETHER)
    return mean, own - (half**2).sum(dim=0)


def _factor(
    alike: torch.Tensor, lengths: torch.Tensor, amplitude: float, noise: float
) -> torch.Tensor:
    kernel = _CONSTANT + amplitude**2 * alike
    kernel.diagonal().add_(noise**2 / lengths)
    factor: torch.Tensor = torch.linalg.cholesky(kernel)
    return factor

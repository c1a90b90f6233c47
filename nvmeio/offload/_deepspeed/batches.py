"""The sizes of batches that a configuration states: facts, which have to agree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch.distributed as dist

from nvmeio.offload._deepspeed.keys import number
from nvmeio.offload._deepspeed.refusals import Refusals

_TRAIN = "train_batch_size"
_MICRO = "train_micro_batch_size_per_gpu"
_STEPS = "gradient_accumulation_steps"


class BatchSizes(NamedTuple):
    """How many samples there are; None where the configuration does not say.

    Attributes:
        train: The batch size of a step, over all ranks.
        micro: The batch size of one backward pass of one rank.
        accumulation_steps: Backward passes before a step. Divide each loss by it, as DeepSpeed's
            engine does.
    """

    train: int | None
    micro: int | None
    accumulation_steps: int


def batch_sizes(config: Mapping[str, Any], refusals: Refusals) -> BatchSizes:
    """The sizes, with the one that is left out computed as DeepSpeed does.

    Refused are numbers that are not positive, and those that do not agree.
    """
    found: dict[str, int] = {}
    for key in (_TRAIN, _MICRO, _STEPS):
        if config.get(key) is not None:
            with refusals.collect():
                found[key] = number("config", config, key, 1)
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    train, micro = found.get(_TRAIN), found.get(_MICRO)
    steps = found.get(_STEPS)
    if train is not None and micro is not None and steps is None:
        steps = train // (micro * ranks)
    steps = 1 if steps is None else steps
    if train is not None and micro is None:
        micro = train // (ranks * steps)
    elif train is None and micro is not None:
        train = micro * steps * ranks
    if train is not None and train != (micro or 0) * steps * ranks:
        refusals.add(
            f"config: {_TRAIN} is {train}, and the rest makes {micro} a backward pass × {steps} "
            f'passes × {ranks} ranks = {(micro or 0) * steps * ranks}: write "{_TRAIN}": '
            f"{max(1, micro or 1) * max(1, steps) * ranks}, or leave it out"
        )
    return BatchSizes(train, micro, steps)

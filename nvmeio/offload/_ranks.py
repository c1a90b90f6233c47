"""Several ranks: whose directory is whose, and from which step all of them go on."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from nvmeio.errors import IntegrityError
from nvmeio.offload import _manifest
from nvmeio.offload._manifest import Manifest


def several() -> bool:
    """Whether the default process group has more than one rank."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def directory_name(what: str) -> str:
    """A name that differs between the ranks of the default process group, if there is one."""
    if several():
        return f"{what}-{dist.get_rank():05d}-of-{dist.get_world_size():05d}"
    return what


def agreed(directory: str) -> tuple[Manifest | None, list[Manifest]]:
    """The last generation that every rank has, and those of this rank that come after it.

    Killed ranks may have been on either side of the end of a step: one of them has it, another has
    not. Two generations are there mostly, and nobody is two steps ahead of the others, since
    backward waits for all.

    Args:
        directory: This rank's own.

    Returns:
        None and nothing where no rank has made a step.

    Raises:
        IntegrityError: A rank has no whole manifest, or they have no generation in common. All
            ranks raise it.

    A collective of the default process group, if that has several ranks.
    """
    mine: list[Manifest] = []
    failure: Exception | None = None
    try:
        mine = _manifest.complete(directory)
    except Exception as failed:
        failure = failed
    here = [each.generation for each in mine], str(failure or "")
    told: list[Any] = [here]
    if several():
        told = [None] * dist.get_world_size()
        dist.all_gather_object(told, here)
    if failure is not None:
        raise failure
    for rank, (_, why) in enumerate(told):
        if why:
            raise IntegrityError(
                f"rank {rank} cannot resume: {why}", expected="a whole manifest", found=why
            )
    if any(not found for found, _ in told) and all(max(found, default=1) == 1 for found, _ in told):
        return None, mine  # killed before the first step
    common = set.intersection(*(set(found) for found, _ in told))
    if not common:
        raise IntegrityError(
            f"the ranks have no step in common to resume from: rank by rank, {directory} and its "
            f"neighbours have the generations {[sorted(found) for found, _ in told]}; go on from a "
            "checkpoint",
            expected="a generation that every rank has",
            found=[sorted(found) for found, _ in told],
        )
    last = max(common)
    manifest = next(each for each in mine if each.generation == last)
    return manifest, [each for each in mine if each.generation > last]

"""Which directory is this process's own, where there are several."""

from __future__ import annotations

import torch.distributed as dist


def directory_name(what: str) -> str:
    """A name that differs between the ranks of the default process group, if there is one."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return f"{what}-{dist.get_rank():05d}-of-{dist.get_world_size():05d}"
    return what

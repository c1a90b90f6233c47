"""What a swapped optimizer was asked for."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nvmeio.offload._optimizer import checks


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """The arguments of `SwappedOptimizer` that say how it works; see there.

    Attributes:
        on_disk: Gradients are on the drive too.
        read_ahead: Read the next subgroup during a step.
        write_behind: Write the last subgroup during a step.
        resume: Go on from what is in the directory.
        must_resume: And raise where there is nothing.
        device: Where it is computed.

    Raises:
        TypeError, ValueError: One is not what it has to be, or two do not go together.
    """

    subgroup_bytes: int
    buffer_bytes: int | None
    master_dtype: torch.dtype | None
    on_disk: bool
    ratio: float
    recoverable: bool
    durable: bool
    checksum: bool
    resume: bool
    must_resume: bool
    overwrite: bool
    read_ahead: bool
    write_behind: bool
    device: torch.device
    device_bytes: int | None

    def __post_init__(self) -> None:
        checks.integer("subgroup_bytes", self.subgroup_bytes, 4096)
        if self.buffer_bytes is not None:
            checks.integer("buffer_bytes", self.buffer_bytes, 4096)
        checks.ratio(self.ratio)
        if self.resume and self.overwrite:
            raise ValueError(
                "resume goes on from what is in the directory, and overwrite=True removes it: give "
                "one of them"
            )
        if self.resume and not (self.ratio == 1.0 and self.recoverable):
            raise ValueError(
                "resume=True needs all state and weights on the drive: leave ratio at 1.0 and "
                "recoverable at True"
            )

    @property
    def buffers(self) -> int:
        """How many there are: one for each stage that goes on at a time."""
        return 1 + self.read_ahead + self.write_behind + (self.device.type != "cpu")

"""What a stream consists of while it is open, and its counters."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

from nvmeio._formats.safetensors_set import SafetensorsSet
from nvmeio._io.drives import DriveHandles
from nvmeio._residency.reader import Reader
from nvmeio.inference._stream.slots import SlotPools


class StreamStats(NamedTuple):
    """What a stream has done since it was made.

    Attributes:
        bytes_read: Bytes of weights that were asked of the files, rows and experts included.
        units_read: Units (layers) that were read.
        units_used: How often a unit was used.
        mispredicted: Units that were needed and not on their way, the very first aside.
        dropped: Units that were read, wholly or in part, and not used.
        experts_read: Experts that were read on demand.
        rows_read: Rows of embeddings that were read.
        waited_s: Seconds in which the computation waited for weights.
        resident_bytes: Memory that holds weights for good.
        window_bytes: Memory that weights are streamed through.
        work_bytes: Memory that converted weights are in, and what only other ranks want.
        streamed_bytes: What one pass reads, with all experts and without rows.
    """

    bytes_read: int
    units_read: int
    units_used: int
    mispredicted: int
    dropped: int
    experts_read: int
    rows_read: int
    waited_s: float
    resident_bytes: int
    window_bytes: int
    work_bytes: int
    streamed_bytes: int


class Resources(NamedTuple):
    """What opening a stream makes, and closing takes apart.

    It closes a model that is dropped, so nothing in it may lead to the model (as a slot does, by
    its unit and the modules that show it): the model would never go.
    """

    handles: DriveHandles
    checkpoint: SafetensorsSet
    memory: SlotPools
    reader: Reader

    def close(self) -> None:
        """Take it apart."""
        with contextlib.ExitStack() as steps:
            steps.callback(self.handles.close)
            steps.callback(self.checkpoint.close)
            steps.callback(self.memory.close)
            steps.callback(self.reader.stop)

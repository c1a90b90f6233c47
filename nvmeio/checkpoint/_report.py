"""What a Checkpointer tells of a save."""

from __future__ import annotations

from typing import NamedTuple


class SaveReport(NamedTuple):
    """What a save did, and how long it took.

    Attributes:
        step: The number it was given.
        path: Where the checkpoint is, or will be.
        nbytes: The size of the file; of this rank's own file with ``layout="per_rank"``.
        copied_bytes: What this rank copied into the snapshot.
        snapshot_bytes: The memory of the snapshot; with less than the part to save, it streamed.
        held_s: How long `save` took, in seconds: all of the following, and the copying.
        waited_s: Of that, for the save before to become durable.
        planned_s: Of that, for pickling and, with several ranks, for the others to come.
        memory_s: Of that, for new memory: in the first save, and where the state grew.
        stalled_s: Of that, for memory to become free, because the snapshot streamed.
        durable: Whether all of it is durable; the next two are None until then.
        recycled: Whether the oldest checkpoint's blocks were overwritten, rather than new ones
            allocated; known by rank 0, and with ``layout="per_rank"`` by each for its own file.
        guarded_bytes: What was left where it lies (see `Checkpointer.guard`), and not copied.
        moved_bytes: Of that, copied out of the way of an `optimizer.step` all the same; with
            `step_held_s` 0 until all is durable.
        step_held_s: How long steps waited for that and for the drive, in seconds.
        written_s: From the end of `save` until all was durable, in seconds.
    """

    step: int
    path: str
    nbytes: int
    copied_bytes: int
    snapshot_bytes: int
    held_s: float
    waited_s: float
    planned_s: float
    memory_s: float
    stalled_s: float
    durable: bool = False
    recycled: bool | None = None
    written_s: float | None = None
    guarded_bytes: int = 0
    moved_bytes: int = 0
    step_held_s: float = 0.0

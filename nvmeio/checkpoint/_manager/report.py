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
        guarded_bytes: What was not copied before `save` returned: `protected_bytes`, and what is on
            devices.
        moved_bytes: Of `protected_bytes`, copied aside because somebody wrote there before it was
            read; with `step_held_s` 0 until all is durable.
        step_held_s: How long those who wrote were stopped for that, together, in seconds.
        protected_bytes: What was left in protected host memory; 0 where all of it was copied.
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
    protected_bytes: int = 0

    @property
    def snapshot(self) -> str:
        """How it was taken: "protect" where memory was protected, else "copy"."""
        return "protect" if self.protected_bytes else "copy"

"""The rows of the checkpoint benchmark, by the key that `--only` takes."""

from __future__ import annotations

from _program import Row

from checkpoint_rows import dcp, decoupled, loading, protected, ranks, saving, sizes, small

ROWS: dict[str, Row] = {
    "save": Row("save into a new file, durable", saving.measure, lambda size, _: 2 * size),
    "memory": Row("extra memory of a save", saving.measure_memory, lambda size, _: size),
    "load": Row("load, cold", loading.measure, lambda size, _: 3 * size),
    "sizes": Row("files of all sizes beside torch", sizes.measure, sizes.bytes_needed),
    "dcp": Row("torch.distributed.checkpoint", dcp.measure, lambda size, _: 3 * size),
    "small": Row("many small tensors", small.measure, small.bytes_needed),
    "steady": Row(
        "Checkpointer in steady state", decoupled.measure_steady, lambda size, _: 6 * size
    ),
    "held": Row(
        "time that a save holds the training", decoupled.measure_steady, lambda size, _: 6 * size
    ),
    "training": Row(
        "training with a save every step", decoupled.measure_training, lambda size, _: 4 * size
    ),
    "protect": Row(
        "a save every step, nothing copied", protected.measure, lambda size, _: 3 * size
    ),
    "async": Row(
        "saves in the background, beside DCP's", protected.measure_async, lambda size, _: 6 * size
    ),
    "protect-memory": Row(
        "extra memory of such a save", protected.measure_memory, lambda size, _: 2 * size
    ),
    "ranks": Row("2 and 4 ranks with one state", ranks.measure, lambda size, _: 2 * size),
}

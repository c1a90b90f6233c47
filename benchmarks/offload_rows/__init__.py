"""The rows of the offload benchmark, by the key that `--only` takes."""

from __future__ import annotations

from _program import Row

from offload_rows import activations, parking, passes, steps

ROWS: dict[str, Row] = {
    "step": Row("optimizer step", steps.measure, lambda size, _: 4 * size),
    "written": Row("bytes written in a step", steps.measure, lambda size, _: 4 * size),
    "memory": Row("memory of the optimizer", steps.measure, lambda size, _: 4 * size),
    "lag": Row("loop lag under async_step", steps.measure, lambda size, _: 4 * size),
    "checksums": Row("step with checksums", steps.measure_checksums, lambda size, _: 6 * size),
    "deepspeed": Row("step of ZeRO-3 on NVMe", steps.measure_deepspeed, lambda size, _: 6 * size),
    "passes": Row("forward and backward", passes.measure, lambda size, _: 2 * size),
    "activations": Row("activations on the drive", activations.measure, lambda size, _: size // 2),
    "parking": Row("parking", parking.measure, lambda size, _: size),
}

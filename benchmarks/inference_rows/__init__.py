"""The rows of the inference benchmark, by the key that `--only` takes."""

from __future__ import annotations

from _program import Row

from inference_rows import few_bits, lag, passes, peers_on_disk, training

ROWS: dict[str, Row] = {
    "pass": Row("time of a forward pass", passes.measure_pass, lambda size, _: 2 * size),
    "resident": Row(
        "half of the layers resident", passes.measure_resident, lambda size, _: 2 * size
    ),
    "packed": Row("few bits", passes.measure_packed, lambda size, _: 3 * size),
    "fewbits": Row("few bits beside others", few_bits.measure, lambda size, _: 4 * size),
    "checksums": Row(
        "checksums of a packed model", passes.measure_checksums, lambda size, _: 3 * size
    ),
    "accelerate": Row(
        "accelerate's disk offload", peers_on_disk.measure_accelerate, lambda size, _: 2 * size
    ),
    "deepspeed": Row(
        "DeepSpeed ZeRO-3 inference", peers_on_disk.measure_deepspeed, lambda size, _: 3 * size
    ),
    "airllm": Row("AirLLM", peers_on_disk.measure_airllm, lambda size, _: 3 * size),
    "llamacpp": Row("llama.cpp, mapped", peers_on_disk.measure_llama_cpp, lambda size, _: 3 * size),
    "blocks": Row("micro-batches that share layers", passes.measure_blocks, lambda s, _: 2 * s),
    "train": Row("adapters over a base on disk", training.measure, lambda size, _: 2 * size),
    "lag": Row("event-loop lag beside a pass", lag.measure, lambda size, _: 2 * size),
}

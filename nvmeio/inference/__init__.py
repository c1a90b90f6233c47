"""Inference with models larger than memory: weights streamed from disk, layer by layer.

Reading order for newcomers: `_formats.safetensors_set` (open files), `_recipes` (how a model's
tensors come from theirs), `_units` (what is streamed as one), `_slot_layout` (where it lies),
`_budget` (what stays), `_packed_checksums`, `_slots` (memory), `stream` (the heart), `_hooks` (the
seam to a model), `streaming` (`stream_model`); of several ranks `_rank_parts` (who reads what),
`_stream_ranks` (how they meet), `_rank_reader` (how they go on). `packing` writes what is read
best; `kv_cache` puts past keys and values away, `prefixes` keeps them for other processes;
`_training` is the seam where adapters are trained, `losses` what they need of a large vocabulary.
docs/inference.md has the arithmetic.
"""

from nvmeio.inference.blocks import generate_in_blocks as generate_in_blocks
from nvmeio.inference.blocks import run_in_blocks as run_in_blocks
from nvmeio.inference.losses import chunked_cross_entropy as chunked_cross_entropy
from nvmeio.inference.packing import PackReport as PackReport
from nvmeio.inference.packing import pack as pack
from nvmeio.inference.prefixes import PrefixCache as PrefixCache
from nvmeio.inference.stream import StreamStats as StreamStats
from nvmeio.inference.stream import WeightStream as WeightStream
from nvmeio.inference.streaming import stream_model as stream_model

__all__ = [
    "PackReport",
    "PrefixCache",
    "StreamStats",
    "WeightStream",
    "chunked_cross_entropy",
    "generate_in_blocks",
    "pack",
    "run_in_blocks",
    "stream_model",
]

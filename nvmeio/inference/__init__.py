"""Inference with models larger than memory: weights streamed from disk, layer by layer.

Reading order for newcomers: `streaming` (`stream_model`); `_plan` (what is streamed): `slot_layout`
(what a weight is read from, and where it lies), `units` (what is streamed as one), `budget` (what
stays); `_model_plan` (all of that for one model); `weight_stream` (the caller's side), `_hooks`
(the seam to a model); behind them `_stream`: `stand_ins` (what modules show), `turns` (who may use
the weights), `uses` (what is in memory for it), `weights` (how that is read and shown), `slots`
(memory), `lockstep` (micro-batches). `_parallel` is for several ranks.

`packing` writes files for the fastest reading, `spilling` a model in memory; `kv_cache` puts past
keys and values away, `prefixes` keeps them for other processes; `block_schedule` computes large
batches and vocabularies in parts. docs/inference.md has the arithmetic.
"""

from nvmeio.inference._plan.budget import BudgetTooSmall as BudgetTooSmall
from nvmeio.inference.block_schedule import chunked_cross_entropy as chunked_cross_entropy
from nvmeio.inference.block_schedule import generate_in_blocks as generate_in_blocks
from nvmeio.inference.block_schedule import run_in_blocks as run_in_blocks
from nvmeio.inference.packing import PackReport as PackReport
from nvmeio.inference.packing import pack as pack
from nvmeio.inference.prefixes import PrefixCache as PrefixCache
from nvmeio.inference.streaming import StreamedModel as StreamedModel
from nvmeio.inference.streaming import stream_model as stream_model
from nvmeio.inference.weight_stream import StreamStats as StreamStats
from nvmeio.inference.weight_stream import WeightStream as WeightStream

__all__ = [
    "BudgetTooSmall",
    "PackReport",
    "PrefixCache",
    "StreamStats",
    "StreamedModel",
    "WeightStream",
    "chunked_cross_entropy",
    "generate_in_blocks",
    "pack",
    "run_in_blocks",
    "stream_model",
]

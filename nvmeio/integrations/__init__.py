"""Adapters that put nvmeio under other libraries' own interfaces.

Each module is imported by its user, never by nvmeio itself, and needs its library only.

Checkpoints: `dcp` (a storage writer and reader), `fsspec` (``nvmeio://``), `lightning` (a
`CheckpointIO` plugin), `transformers` (a Trainer, `save_pretrained` and `from_pretrained`).
Inference: `accelerate` (disk offload with prefetch), `sglang` (an offloader), `vllm` (a model
loader). Servers' KV caches: `sglang_hicache`, `vllm_tier`. Training with state on disk:
`lightning_offload`, `transformers_offload`.
"""

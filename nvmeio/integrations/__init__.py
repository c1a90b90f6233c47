"""Adapters that put nvmeio under other libraries' own interfaces.

Each module is imported by its user, never by nvmeio itself, and needs its library only:
`lightning` (a `CheckpointIO` plugin), `transformers` (a Trainer, `save_pretrained` and
`from_pretrained`), `accelerate` (disk offload with prefetch), `sglang` (an offloader), `vllm` (a
model loader).
"""

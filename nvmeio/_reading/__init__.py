"""Reading many parts of files into memory, and what safetensors files say of themselves.

Shared by the systems above, none of which imports another. Reading order: `_span_plan` (which
spans lie where), `_spans` (the reads), `_flight` and `_touching` (what they rest on), then
`_safetensors_header` and `_safetensors_shards`.
"""

"""The formats of files: parsed without trust, built, and written.

The rooms: `torch_archives` and `safetensors`. Beside them: `packed_index` (what a packed model's
safetensors header says beyond tensors), `sniff` (the format of a file), `weights_digest` (one
number for the weights in a model's files).
"""

"""What lies in the files of others: parsed without trust, built, and written.

Reading order for newcomers: `torch_zip` (what a torch checkpoint is, on the disk), `torch_layout`
(from an object to that), `torch_writing` (that into a file); then `torch_pickle` (what its pickle
refers to), `pickle_calls` (what it would call), `torch_file` (an opened one). The other format:
`safetensors_header`, `safetensors_shards` (sets of files and their index), `safetensors_files`
(headers and tensors of open ones), `safetensors_set` (those of a model, and whether they changed),
`safetensors_errors` (their errors, which are the package's as well).
`sniff` tells which of them a file is.
"""

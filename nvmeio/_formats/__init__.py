"""What lies in the files of others: parsed without trust, built, and written.

Reading order for newcomers: `torch_zip` (what a torch checkpoint is, on the disk), `torch_layout`
(from an object to that), `torch_writing` (that into a file); then `torch_unpickler` (what a usual
pickle says, in C, and its object), `pickle_values` (what any says), `pickle_calls` (what it would
call), `torch_file` (an opened one). The other format: `safetensors_header`, `safetensors_shards`
(sets of files, their index, and errors, which are the package's as well), `safetensors_set` (those
of a model, open, and whether they changed). `sniff` tells which of them a file is.
"""

"""safetensors: headers parsed without trust, sets of files, and the open files of a model.

Reading order for newcomers: `headers`, `shards` (sets of files, their index, and the errors, which
are the safetensors package's as well), `open_set` (the files of a model, and whether they changed).
"""

"""torch's checkpoints: read without running anything in them, laid out, and written.

Reading order for newcomers: `torch_zip` (the container, on the disk), `torch_layout` (from an
object to that), `torch_writing` (that into a file); then `torch_unpickler` (a usual pickle, read by
CPython in C), `pickle_values` (any pickle), `pickle_calls` (what it would call), `torch_file` (an
opened archive), `torch_part` (a range of one, on the drive of one rank).
"""

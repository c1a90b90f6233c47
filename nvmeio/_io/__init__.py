"""Moving bytes, for everything above a handle.

`handles` (what ``handle=None`` means), `inflight` (a bounded number of operations, first in first
out, the memory that they go through, and a file written through it from start to end), `spans`
(many parts of files into memory, as few large reads; by several ranks:
`_distributed.shared_spans`), `drives` (bytes over several of them), `long_call` (what a user hears
of a call).
"""

"""What everything above a handle needs to move bytes.

`handles` (what ``handle=None`` means), `inflight` (a bounded number of operations, first in first
out, and the memory that they go through), `write_behind` (a file written from start to end),
`spans` (many parts of files into memory, as few large reads) and `shared_spans` (by several
ranks), `prefault` (new memory found beside those reads), `drives` (bytes over several of them),
`long_call` (what a user hears of a call).
"""

"""What everything above a handle needs to move bytes.

To be read in this order: `threads` (blocking work that an interrupt can neither cut in half nor
lose), `caller` (such work with parts for the caller), `owner` (the thread that alone changes some
state), `ending` (how that ends), `handles` (what ``handle=None`` means), `inflight` (a bounded
number of operations, first in first out) and `staging` (the memory that they go through),
`write_behind` (a file written from start to end),
`span_plan` and `spans` (many parts of files into memory, as few large reads), `prefault` (new
memory found beside those reads), `rank_store` (what ranks tell each other).
"""

"""Blocks of memory kept on a drive under names: what KV caches of servers stand on.

To be read in this order: `table` (what lies in which slot, in a file that survives a killed
process), `catalog` (which slot is free, which goes next, and room for the blocks), `transfers` (a
batch in flight, or a few blocks without the engine; whose thread does it), `store`.
"""

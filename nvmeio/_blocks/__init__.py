"""Blocks of memory kept on a drive under names: what KV caches of servers stand on.

To be read in this order: `table` (what lies in which slot, in a file that survives a killed
process), `slots` (which slot is free, which goes next), `catalog` (both, and room for the blocks),
`transfers` (a batch in flight), `in_place` (a few blocks without), `worker` (whose thread does it),
`store` (blocks to and from the drive).
"""

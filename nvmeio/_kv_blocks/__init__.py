"""Blocks of memory kept on a drive under names: what KV caches of servers stand on.

To be read in this order: `table` (what lies in which slot, in a file that survives a killed
process), `whole_names` (names beside it that lead back from its digests), `free_slots`, `index`
(which slot is free, which block goes next), `catalog` (files, and room for the blocks), `pins`,
`transfers` (a batch in flight, or a few blocks without the engine; whose thread does it), `store`;
and `users` (who has one open) and `upkeep` (a store that is looked after from outside).
"""

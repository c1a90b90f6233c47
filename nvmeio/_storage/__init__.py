"""Durability, and locks: bytes that survive a loss of power, and whose files they are.

Reading order for newcomers: `durable` (room ahead of writing, fsync of files and directories),
`replace` (all of a new file or all of the old one, whatever happens, and what the new one has of
the old), `untrusted` (files where others may write, too), `locks` (who reads a file and who may
overwrite it), `crc32` (checksums of memory).
"""

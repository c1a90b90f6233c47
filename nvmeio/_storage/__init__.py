"""What makes bytes durable, and whose they are.

Reading order for newcomers: `durable` (room ahead of writing, fsync of files and directories),
`replace` (all of a new file or all of the old one, whatever happens), `attributes` (what the new
one has of the old), `private` (what is nobody else's business), `small_files` (what is read whole),
`locks` (who reads a file and who may overwrite it), `unchanged` (whether an open file is as it
was), `crc32` (checksums of memory).
"""

"""What makes bytes durable, and whose they are.

Reading order for newcomers: `replace` (all of a new file or all of the old one, whatever happens),
`locks` (who reads a file and who may overwrite it), `crc32` (checksums of memory).
"""

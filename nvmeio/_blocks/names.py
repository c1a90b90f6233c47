"""What a block's name becomes: a digest, into which goes what the blocks are of.

A server names a block by the tokens in it, whatever weights it computes with. So what else makes
blocks differ goes into the digest: where it is another, nothing is found, and nothing has to be
removed first. What cannot outlive its process gets a number of that process as well; readers of its
store take it from the table.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

from nvmeio._blocks.table import DIGEST_BYTES, TAG_BYTES

Key = str | bytes


class Names(NamedTuple):
    """How names become digests.

    Attributes:
        key: Goes into each digest; empty where names say all.
        tag: What the table says that its blocks are of; None says nothing.
        generation: How often it became another since the store was opened.
        writer: The number of the process that writes the store, where that matters.
    """

    key: bytes
    tag: bytes | None
    generation: int
    writer: bytes | None = None

    def is_of_another(self, writer: bytes) -> bool:
        """Whether they went with a process that wrote the store before."""
        return self.writer is not None and self.writer != writer

    def digest(self, name: Key) -> bytes:
        """The digest of a block's name."""
        data = name.encode() if isinstance(name, str) else name
        return hashlib.blake2b(data, digest_size=DIGEST_BYTES, key=self.key).digest()


def names_of(identity: str | None, writer: bytes, generation: int) -> Names:
    """How the blocks of a store are named.

    Args:
        identity: What they are of. None is not known: of use to this opening alone; empty: their
            names say it all.
        writer: The number of the process that writes the store.
        generation: How often it became another since the store was opened; 0 finds what earlier
            openings stored.
    """
    if generation or identity is None:
        text = f"{identity or ''}\0{generation}".encode() + writer
        key = hashlib.blake2b(text, digest_size=TAG_BYTES).digest()
        return Names(key, None, generation, writer)
    if not identity:
        return Names(b"", None, 0)
    tag = hashlib.blake2b(identity.encode(), digest_size=TAG_BYTES).digest()
    return Names(tag, tag, 0)

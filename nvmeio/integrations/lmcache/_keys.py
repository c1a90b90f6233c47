"""The names of LMCache's objects in a store, and their models.

LMCache names an object by a hash of tokens, the name of the model, rank, object group and salt. The
same name stands for other bytes with other weights at that path, or another type of the cache. So a
name begins with a digest of weights, adapters and settings; and what a memory object says of its
own bytes (shapes, dtypes, format) is the kind of its block, which a load compares.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import secrets
import struct
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from nvmeio.integrations._serving.kv_identity import (
    ServedAdapters,
    ServedModel,
    WeightOptions,
    identity_of,
)

logger = logging.getLogger("nvmeio")

PREFIX_BYTES = 16
# The part of a name that is kept for listings; a model's name may take 300 bytes of it.
NAME_BYTES = 510
# Rank, object group, bytes of the model's name and of the salt; these, and the hash, follow.
_HEAD = struct.Struct("<QIHB")


class Fields(NamedTuple):
    """The fields of LMCache's `ObjectKey`, in its order."""

    chunk_hash: bytes
    model_name: str
    kv_rank: int
    object_group_id: int
    cache_salt: str


def name_of(prefix: bytes, key: Any) -> bytes:
    """The name of an object in the store, below its model's prefix."""
    model, salt = key.model_name.encode(), key.cache_salt.encode()
    head = _HEAD.pack(key.kv_rank, key.object_group_id, len(model), len(salt))
    return b"".join((prefix, head, model, salt, key.chunk_hash))


def fields_of(name: bytes) -> Fields:
    """The argument of `name_of`, without the prefix."""
    rank, group, of_model, of_salt = _HEAD.unpack_from(name, PREFIX_BYTES)
    model = PREFIX_BYTES + _HEAD.size
    salt = model + of_model
    chunk = salt + of_salt
    return Fields(name[chunk:], name[model:salt].decode(), rank, group, name[salt:chunk].decode())


def kind_of(memory_object: Any) -> int:
    """A number for shapes, dtypes and format of a memory object."""
    facts = memory_object.metadata
    shapes = facts.shapes if facts.shapes is not None else [facts.shape]
    dtypes = facts.dtypes if facts.dtypes is not None else [facts.dtype]
    return _kind(tuple(map(tuple, shapes)), tuple(dtypes), facts.fmt.name)


@functools.lru_cache(1024)
def _kind(shapes: tuple[tuple[int, ...], ...], dtypes: tuple[Any, ...], layout: str) -> int:
    text = f"{shapes} {[str(dtype) for dtype in dtypes]} {layout}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


class ServedModels:
    """The prefix of each model's names. Looking at weights may take seconds, the first time."""

    def __init__(self, directory: str, options: WeightOptions, settings: Mapping[str, Any]) -> None:
        self._directory = directory
        self._options = options
        self._settings = {
            "lmcache": getattr(sys.modules.get("lmcache"), "__version__", None),
            "seed": os.environ.get("PYTHONHASHSEED"),  # of one of its hashes
            "settings": dict(settings),
        }
        self._prefixes: dict[str, bytes] = {}

    @property
    def is_named(self) -> bool:
        """Whether no files have to be looked at."""
        return self._options.weights_id is not None and not self._options.adapters

    def known(self, model: str) -> bytes | None:
        return self._prefixes.get(model)

    def identify(self, model: str) -> bytes:
        """The prefix of a model's names; of this process alone, and a warning, if it is unknown."""
        found = self._prefixes.get(model)
        if found is None:
            served = [ServedModel(model, is_revision_known=False)]
            try:
                text = identity_of(
                    served, ServedAdapters(), self._options, self._settings, self._directory
                )
            except Exception:
                logger.exception("the weights of %s cannot be identified", model)
                text = None
            data = secrets.token_bytes(32) if text is None else text.encode()
            found = hashlib.blake2b(data, digest_size=PREFIX_BYTES).digest()
            self._prefixes[model] = found
        return found

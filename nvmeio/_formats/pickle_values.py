"""What a torch pickle says, as values: names, calls not made, storages that are not there."""

from __future__ import annotations

import reprlib
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import torch


class PickleError(ValueError):
    """The bytes are no pickle, or not one that torch.save writes."""


class Global(NamedTuple):
    """A name that the unpickler would import."""

    module: str
    name: str


class PickledCall:
    """What calling something would have made.

    Attributes:
        function: What is called; mostly a `Global`.
        args: Its arguments.
        state: What `__setstate__` would be given, or None.
        items: Keys and values that would be set.
        elements: What would be appended or added.
    """

    __slots__ = ("args", "elements", "function", "items", "state")

    def __init__(self, function: object, args: object) -> None:
        self.function = function
        self.args = args
        self.state: object = None
        # No lists before there is something: of thousands that are made, next to none have any,
        # and each container is one more that Python's collector goes through.
        self.items: list[tuple[Any, Any]] | tuple[()] = ()
        self.elements: list[Any] | tuple[()] = ()

    def __repr__(self) -> str:
        # Not its arguments, which may be calls of calls, and double at every level.
        return f"{getattr(self.function, 'name', '?')}(...)"


class StorageRef(NamedTuple):
    """A storage, as a tensor's pickle refers to it.

    Attributes:
        kind: Such as "FloatStorage".
        key: The record is ``data/<key>``.
        location: The device that it was saved from.
        numel: Its elements.
    """

    kind: str
    key: str
    location: str
    numel: int

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of its elements; None where its kind is not one of torch's."""
        return _DTYPES.get(self.kind)


def storage_of(pid: Any) -> StorageRef:
    """The storage that a persistent id says.

    Raises:
        PickleError: It says none.
    """
    if type(pid) is not tuple or len(pid) != 5 or as_text(pid[0]) != "storage":
        raise PickleError(f"a persistent id that is no storage: {shown(pid)}")
    _, kind, key, location, numel = pid
    if type(kind) is not Global or not isinstance(numel, int) or numel < 0:
        raise PickleError(f"a storage that is none: {shown(pid)}")
    return StorageRef(kind.name, as_text(key), as_text(location), numel)


def as_text(value: Any) -> str:
    """A name in a pickle; Python 2 wrote bytes."""
    if type(value) is str:
        return value
    if not isinstance(value, bytes):
        raise PickleError(f"expected a text, not {shown(value)}")
    return value.decode("ascii")


class Scan(NamedTuple):
    """What a pickle says.

    Attributes:
        value: The object, out of the types above, dicts (as lists of pairs in `PickledCall` where
            a key cannot be one), lists, tuples, sets and plain values.
        globals: All names that would be imported.
        storages: All storages that are referred to, each once, by key, in order.
        calls: All calls, in the order in which they would be made; of a plain pickle none.
        nbytes: The length of the pickle.
        plain: Whether it is plain (`plain_pickle`): nothing of it needs another look.
    """

    value: object
    globals: set[Global]
    storages: dict[str, StorageRef]
    calls: list[PickledCall]
    nbytes: int
    plain: bool


# The attributes `dtype` of the storage classes, which torch deprecates asking for.
_DTYPES: dict[str, torch.dtype] = {
    "UntypedStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ByteStorage": torch.uint8,
    "CharStorage": torch.int8,
    "ShortStorage": torch.int16,
    "IntStorage": torch.int32,
    "LongStorage": torch.int64,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
    "QInt8Storage": torch.qint8,
    "QUInt8Storage": torch.quint8,
    "QInt32Storage": torch.qint32,
    "QUInt4x2Storage": torch.quint4x2,
    "QUInt2x4Storage": torch.quint2x4,
}

ORDERED_DICT = Global("collections", "OrderedDict")
REBUILD = Global("torch._utils", "_rebuild_tensor_v2")
PARAMETER = Global("torch._utils", "_rebuild_parameter")

# What every state dict refers to, and torch allows.
COMMON_GLOBALS = frozenset(
    {
        ORDERED_DICT,
        REBUILD,
        PARAMETER,
        *(Global("torch", kind) for kind in _DTYPES),
    }
)

# torch's own limit. A hostile pickle has thousands, whose product takes hours.
_MOST_DIMENSIONS = 64

# The parts that a key of a dict, or an element of a set, may have. Real ones have a few.
_MOST_KEY_PARTS = 1000

# How many of them may have one hash. By chance, those of six numbers that are -1 or -2.
_MOST_OF_ONE_HASH = 100

# Integers below this have each a hash of their own.
_MODULUS = sys.hash_info.modulus


def shape_of(args: Sequence[Any]) -> tuple[int, ...]:
    """The shape that a call rebuilds a tensor with, from its arguments; () if it is none."""
    shape = args[2] if len(args) > 2 else ()
    if isinstance(shape, PickledCall):  # torch.Size
        shape = shape.args[0] if isinstance(shape.args, tuple) and shape.args else ()
    sizes = shape[:_MOST_DIMENSIONS] if isinstance(shape, tuple) else ()
    return tuple(n for n in sizes if isinstance(n, int))


def shown(value: object) -> str:
    """A value, for an error message; a tuple of tuples could be as long as 2 to its depth."""
    return _brief.repr(value)[:80]


_brief = reprlib.Repr()
_brief.maxlevel = 2


class Keys:
    """What a pickle has hashed: refuses what Python could not hash, or compare, in bounded time.

    A tuple of tuples has no hash of its own: all of it is gone through, each time, and where two of
    its elements are one object, twice at every level. And a dict of keys that all have one hash
    compares each of them with all before it. Whoever writes a pickle can make numbers such, and
    tuples of them; no texts.
    """

    def __init__(self) -> None:
        self._seen: set[Any] = set()
        self._of_hash: Counter[int] = Counter()

    def check(self, keys: Iterable[Any]) -> int:
        """Look at keys that are about to be hashed, in one dict or set or another.

        Returns:
            How many parts were looked at.

        Raises:
            PickleError: A key has too many, or too many keys have one hash.
            TypeError: It has no hash.
        """
        looked_at = 0
        for key in keys:
            kind = type(key)
            if kind is str or (kind is int and -_MODULUS < key < _MODULUS):
                continue
            if isinstance(key, PickledCall):
                key = _value_of(key)
            if isinstance(key, (tuple, frozenset)):
                looked_at += _parts_of(key)
            if key not in self._seen:
                self._seen.add(key)
                self._of_hash[hash(key)] += 1
                if self._of_hash[hash(key)] > _MOST_OF_ONE_HASH:
                    raise PickleError(f"more than {_MOST_OF_ONE_HASH} keys of one hash")
        return looked_at


def _parts_of(key: Collection[Any]) -> int:
    waiting, parts = [key], 0
    while waiting:
        value = waiting.pop()
        parts += len(value)
        if parts > _MOST_KEY_PARTS:
            raise PickleError(f"a key of more than {_MOST_KEY_PARTS} parts")
        waiting += [part for part in value if isinstance(part, (tuple, frozenset))]
    return parts


def _value_of(call: PickledCall) -> object:
    """What has the hash of a call's result: the numbers of a `torch.Size` or of a complex one."""
    args = call.args
    if type(args) is not tuple:
        return call
    numbers = args[0] if len(args) == 1 and type(args[0]) in (list, tuple) else args
    if not all(type(number) in (int, float) for number in numbers):
        return call
    return complex(*numbers) if numbers is args and len(args) == 2 else tuple(numbers)

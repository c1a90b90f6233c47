"""The values in a pickle: names, calls not made, storages that are not there.

`scan` reads any pickle with Python's own unpickler in Python. It replaces the steps that would run
something, or take more memory than the pickle has bytes: globals are names, calls are noted. The
result says which storages a checkpoint refers to, their sizes, and the imports, before anything is
allocated; and for `nvmeio inspect` the names, shapes and dtypes of the tensors.

torch's ``weights_only`` makes allowed objects while it reads. This is too late here:
a load has to know of all storages and their sizes before memory is taken and reads are begun.
"""

from __future__ import annotations

import functools
import io
import pickle
import reprlib
import struct
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import torch


class PickleError(ValueError):
    """The bytes are not a pickle, or not one that torch.save writes."""


class Global(NamedTuple):
    """A name that the unpickler would import."""

    module: str
    name: str


class PickledCall:
    """A call that was not made; `function` is mostly a `Global`.

    `state` is what `__setstate__` would be given, or None. `items` are keys and values that would
    be set, `elements` what would be appended or added.
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
    """A storage, as a tensor's pickle refers to it: its record is ``data/<key>``.

    `kind` is such as "FloatStorage"; `location` is the device that it was saved from.
    """

    kind: str
    key: str
    location: str
    numel: int

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of its elements; None if its kind is not one of torch's."""
        return _DTYPES.get(self.kind)


def storage_of(pid: Any) -> StorageRef:
    """The storage that a persistent id names; PickleError if it names none."""
    if type(pid) is not tuple or len(pid) != 5 or pid[0] != "storage":
        raise PickleError(f"a persistent id that is not a storage: {shown(pid)}")
    _, kind, key, location, numel = pid
    is_one = type(kind) is Global and type(key) is str and type(location) is str
    if not is_one or not isinstance(numel, int) or numel < 0:
        raise PickleError(f"a malformed storage: {shown(pid)}")
    return _new_ref((kind.name, key, location, numel))


_new_ref = functools.partial(tuple.__new__, StorageRef)


class Scan(NamedTuple):
    """The contents of a pickle.

    Attributes:
        value: The object, out of the types above, dicts (as lists of pairs in `PickledCall` where a
            key cannot be one), lists, tuples, sets and plain values.
        globals: All names that would be imported.
        storages: All storages that are referred to, each once, by key, in order.
        calls: All calls, in the order in which they would be made; none of a plain pickle.
        nbytes: The length of the pickle.
        plain: Whether it is plain (`torch_unpickler`) and needs no other check.
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

# Names that every state dict refers to, and torch allows.
COMMON_GLOBALS = frozenset(
    {ORDERED_DICT, REBUILD, PARAMETER, *(Global("torch", kind) for kind in _DTYPES)}
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
    """A value for an error message, cut: a tuple of tuples could be as long as 2 to its depth."""
    return _brief.repr(value)[:80]


_brief = reprlib.Repr()
_brief.maxlevel = 2


class Keys:
    """The keys of a pickle; refuses those that Python cannot hash or compare in bounded time.

    A tuple of tuples keeps no hash: all of it is gone through each time, and if two of its elements
    are one object, twice at every level. A dict whose keys all have one hash compares each with all
    before it. An attacker can choose such numbers and tuples, but not such texts.
    """

    def __init__(self) -> None:
        self._seen: set[Any] = set()
        self._of_hash: Counter[int] = Counter()

    def check(self, keys: Iterable[Any]) -> int:
        """Check keys before a dict or a set hashes them; returns how many parts were looked at.

        Raises:
            PickleError: A key has too many parts, or too many keys have one hash.
            TypeError: A key has no hash.
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
    """A value with the hash of a call's result: the numbers of a `torch.Size` or a complex."""
    args = call.args
    if type(args) is not tuple:
        return call
    numbers = args[0] if len(args) == 1 and type(args[0]) in (list, tuple) else args
    if not all(type(number) in (int, float) for number in numbers):
        return call
    return complex(*numbers) if numbers is args and len(args) == 2 else tuple(numbers)


# For any pickle

# Errors of an unpickler if the stack, the memo or an object does not fit the pickle.
WRONG = (
    *(ValueError, TypeError, AttributeError, LookupError, EOFError, OverflowError, RecursionError),
    *(struct.error, pickle.UnpicklingError),
)


def scan(data: bytes) -> Scan:
    """Read any pickle; PickleError if it is damaged, or refers to anything but storages."""
    file = io.BytesIO(data)
    scanner = _Scanner(file)
    try:
        value = scanner.load()
    except PickleError:
        raise
    except WRONG as wrong:
        raise PickleError(f"damaged at byte {file.tell()}: {wrong!r}") from wrong
    return Scan(value, scanner.globals, scanner.storages, scanner.calls, len(data), False)


_Unpickler: Any = pickle._Unpickler


class _Call(PickledCall):
    """A call whose result takes what an unpickler sets in it or adds to it."""

    __slots__ = ()

    def __setitem__(self, key: object, value: object) -> None:
        self.items = self.items or []
        self.items.append((key, value))

    def append(self, element: object) -> None:
        self.elements = self.elements or []
        self.elements.append(element)

    add = append


class _Steps(dict[int, Any]):
    """The method of the unpickler for each opcode."""

    def __missing__(self, code: int) -> Any:
        raise LookupError(f"{code:#x} is not an opcode")


class _Scanner(_Unpickler):  # type: ignore[misc]
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, encoding="latin-1")
        # Without regard to frames, which takes twice as long.
        self.read, self.readline, self.readinto = file.read, file.readline, file.readinto
        self.stack: list[Any] = []
        self.append = self.stack.append
        self.metastack: list[list[Any]] = []
        self.globals: set[Global] = set()
        self.storages: dict[str, StorageRef] = {}
        self.calls: list[PickledCall] = []
        self._keys = Keys()

    def load(self) -> object:
        read, steps = self.read, self.dispatch
        while (opcode := read(1)) != pickle.STOP:
            steps[opcode[0]](self)
        return self.stack.pop()

    def load_frame(self) -> None:
        self.read(8)

    def find_class(self, module: str, name: str) -> Global:
        found = Global(module, name)
        self.globals.add(found)
        return found

    def get_extension(self, code: int) -> None:
        self.stack.append(self.find_class("copyreg", f"extension {code}"))

    def persistent_load(self, pid: Any) -> StorageRef:
        ref = storage_of(pid)
        self.storages.setdefault(ref.key, ref)
        return ref

    # Steps that would run something

    def _call(self, function: Any, args: Any) -> PickledCall:
        made = _Call(function, args)
        self.calls.append(made)
        return made

    def _instantiate(self, function: Any, args: list[Any]) -> None:
        self.stack.append(self._call(function, tuple(args)))

    def load_reduce(self) -> None:
        stack = self.stack
        args = stack.pop()
        # A dict by another name: what follows are its items.
        if not args and args == () and stack[-1] == ORDERED_DICT:
            stack[-1] = {}
        else:
            stack[-1] = self._call(stack[-1], args)

    def load_newobj_ex(self) -> None:
        options = self.stack.pop()
        args = self.stack.pop()
        self.stack[-1] = self._call(self.stack[-1], (args, options))

    def load_build(self) -> None:
        state = self.stack.pop()
        if isinstance(self.stack[-1], PickledCall):
            self.stack[-1].state = state

    # Steps that hash keys

    def load_setitem(self) -> None:
        value = self.stack.pop()
        key = self.stack.pop()
        self._set_items(self.stack[-1], [key, value])

    def load_setitems(self) -> None:
        flat = self.pop_mark()
        self._set_items(self.stack[-1], flat)

    def load_dict(self) -> None:
        flat = self.pop_mark()
        self.stack.append({})
        self._set_items(self.stack[-1], flat)

    def _set_items(self, target: Any, flat: list[Any]) -> None:
        keys = flat[::2]
        self._keys.check(keys)
        for key, value in zip(keys, flat[1::2], strict=True):
            target[key] = value

    def load_additems(self) -> None:
        elements = self.pop_mark()
        self._keys.check(elements)
        for element in elements:
            self.stack[-1].add(element)

    def load_frozenset(self) -> None:
        elements = self.pop_mark()
        self._keys.check(elements)
        self.stack.append(frozenset(elements))

    # Steps that take more memory than the pickle has bytes

    def load_bytearray8(self) -> None:
        (nbytes,) = struct.unpack("<Q", self.read(8))
        self.stack.append(bytearray(self.read(nbytes)))

    dispatch = _Steps(
        _Unpickler.dispatch
        | {
            pickle.FRAME[0]: load_frame,
            pickle.REDUCE[0]: load_reduce,
            pickle.NEWOBJ[0]: load_reduce,
            pickle.NEWOBJ_EX[0]: load_newobj_ex,
            pickle.BUILD[0]: load_build,
            pickle.SETITEM[0]: load_setitem,
            pickle.SETITEMS[0]: load_setitems,
            pickle.DICT[0]: load_dict,
            pickle.ADDITEMS[0]: load_additems,
            pickle.FROZENSET[0]: load_frozenset,
            pickle.BYTEARRAY8[0]: load_bytearray8,
        }
    )

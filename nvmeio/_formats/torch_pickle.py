"""What a torch pickle says, found without running any of it.

The pickle is read by a small machine that knows the opcodes and nothing else: globals are names,
calls are noted and not made. That tells which storages a checkpoint refers to, how large it says
they are, and what would be imported, before anything is allocated; and for `nvmeio inspect` the
names, shapes and dtypes of the tensors.

Memory and time are bounded by the pickle's length: no opcode makes more than it brings along.

Source: Lib/pickletools.py of CPython, which defines the opcodes of protocols 0 to 5.
"""

from __future__ import annotations

import reprlib
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch


class Global(NamedTuple):
    """A name that the unpickler would import."""

    module: str
    name: str


class Call:
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
        self.items: list[tuple[Any, Any]] = []
        self.elements: list[Any] = []

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

_ORDERED_DICT = Global("collections", "OrderedDict")

# What every state dict refers to, and torch allows.
COMMON_GLOBALS = frozenset(
    {
        _ORDERED_DICT,
        Global("torch._utils", "_rebuild_tensor_v2"),
        Global("torch._utils", "_rebuild_parameter"),
        *(Global("torch", kind) for kind in _DTYPES),
    }
)


# torch's own limit. A hostile pickle has thousands, whose product takes hours.
_MOST_DIMENSIONS = 64

# The parts that a key of a dict, or an element of a set, may have. Real ones have a few.
_MOST_KEY_PARTS = 1000


class Scan(NamedTuple):
    """What `scan` found.

    Attributes:
        value: The object, out of the types above, dicts (as lists of pairs in `Call` where a key
            cannot be one), lists, tuples, sets and plain values.
        globals: All names that would be imported.
        storages: All storages that are referred to, each once, by key, in order.
        calls: All calls, in the order in which they would be made.
        nbytes: The length of the pickle.
    """

    value: object
    globals: set[Global]
    storages: dict[str, StorageRef]
    calls: list[Call]
    nbytes: int


class PickleError(ValueError):
    """The bytes are no pickle, or not one that torch.save writes."""


def scan(data: bytes) -> Scan:
    """Read a pickle.

    Raises:
        PickleError: It is damaged, cut off, or refers to something that is no storage.

    Cost: 0.5 us an opcode; a tensor takes about 40.
    """
    machine = _Machine(data)
    try:
        value = machine.run()
    except PickleError:
        raise
    except (IndexError, KeyError, ValueError, TypeError, struct.error, OverflowError) as wrong:
        raise PickleError(f"damaged at byte {machine.at}: {wrong!r}") from wrong
    return Scan(value, machine.globals, machine.storages, machine.calls, len(data))


def shape_of(args: Sequence[Any]) -> tuple[int, ...]:
    """The shape that a call rebuilds a tensor with, from its arguments; () if it is none."""
    shape = args[2] if len(args) > 2 else ()
    if isinstance(shape, Call):  # torch.Size
        shape = shape.args[0] if isinstance(shape.args, tuple) and shape.args else ()
    sizes = shape[:_MOST_DIMENSIONS] if isinstance(shape, tuple) else ()
    return tuple(n for n in sizes if isinstance(n, int))


Step = Callable[["_Machine"], object]


class _Mark:
    pass


_MARK = _Mark()


class _Machine:
    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.globals: set[Global] = set()
        self.storages: dict[str, StorageRef] = {}
        self.calls: list[Call] = []

    def run(self) -> object:
        data, opcodes = self.data, _OPCODES
        while True:
            if self.at >= len(data):
                raise PickleError("cut off")
            code = data[self.at]
            self.at += 1
            if code == 0x2E:  # STOP
                return self.stack.pop()
            step = opcodes.get(code)
            if step is None:
                raise PickleError(f"unknown opcode {code:#x} at byte {self.at - 1}")
            step(self)

    # What opcodes bring along

    def take(self, nbytes: int) -> bytes:
        end = self.at + nbytes
        if nbytes < 0 or end > len(self.data):
            raise PickleError(f"cut off: {nbytes} bytes wanted at {self.at}")
        taken = self.data[self.at : end]
        self.at = end
        return taken

    def number(self, nbytes: int) -> int:
        return int.from_bytes(self.take(nbytes), "little")

    def line(self) -> bytes:
        end = self.data.index(b"\n", self.at)
        return self.take(end + 1 - self.at)[:-1]

    def sized(self, length_bytes: int) -> bytes:
        return self.take(self.number(length_bytes))

    # The stack

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def until_mark(self) -> list[Any]:
        stack = self.stack
        for index in range(len(stack) - 1, -1, -1):
            if stack[index] is _MARK:
                found = stack[index + 1 :]
                del stack[index:]
                return found
        raise PickleError("no mark")

    def name(self, module: Any, name: Any) -> None:
        found = Global(_text(module), _text(name))
        self.globals.add(found)
        self.push(found)

    def call(self, function: Any, args: Any) -> Call:
        made = Call(function, args)
        self.calls.append(made)
        return made

    def set_items(self, target: Any, flat: list[Any]) -> None:
        pairs = list(zip(flat[::2], flat[1::2], strict=True))
        check_keys(flat[::2])
        if isinstance(target, dict):
            target.update(pairs)
        elif isinstance(target, Call):
            target.items += pairs
        else:
            raise PickleError(f"items for a {type(target).__name__}")

    def add_elements(self, target: Any, elements: list[Any]) -> None:
        if isinstance(target, list):
            target += elements
        elif isinstance(target, set):
            check_keys(elements)
            target.update(elements)
        elif isinstance(target, Call):
            target.elements += elements
        else:
            raise PickleError(f"elements for a {type(target).__name__}")

    def persistent(self, told: Any) -> None:
        if not isinstance(told, tuple) or len(told) != 5 or _text(told[0]) != "storage":
            raise PickleError(f"a persistent id that is no storage: {shown(told)}")
        _, kind, key, location, numel = told
        key, location = _text(key), _text(location)
        if not isinstance(kind, Global) or not isinstance(numel, int) or numel < 0:
            raise PickleError(f"a storage that is none: {shown(told)}")
        ref = StorageRef(kind.name, key, location, numel)
        self.storages.setdefault(key, ref)
        self.push(ref)


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode("ascii")
    if not isinstance(value, str):
        raise PickleError(f"expected a text, not {shown(value)}")
    return value


def shown(value: object) -> str:
    """A value, for an error message; a tuple of tuples could be as long as 2 to its depth."""
    return _brief.repr(value)[:80]


_brief = reprlib.Repr()
_brief.maxlevel = 2


def check_keys(keys: Sequence[Any]) -> int:
    """Refuse what Python could not hash, or compare, in bounded time and stack.

    A tuple of tuples has no hash of its own: all of it is gone through, each time, and where two of
    its elements are one object, twice at every level.

    Returns:
        How many parts were looked at.

    Raises:
        PickleError: A key has too many.
    """
    parts = 0
    for key in keys:
        if not isinstance(key, (tuple, frozenset)):
            continue
        waiting, left = [key], _MOST_KEY_PARTS
        while waiting:
            value = waiting.pop()
            left -= len(value)
            if left < 0:
                raise PickleError(f"a key of more than {_MOST_KEY_PARTS} parts")
            waiting += [part for part in value if isinstance(part, (tuple, frozenset))]
        parts += _MOST_KEY_PARTS - left
    return parts


def _mark(m: _Machine) -> None:
    m.stack.append(_MARK)


def _put(m: _Machine, index: int) -> None:
    m.memo[index] = m.stack[-1]


def _binput(m: _Machine) -> None:
    m.memo[m.data[m.at]] = m.stack[-1]
    m.at += 1


def _binget(m: _Machine) -> None:
    m.stack.append(m.memo[m.data[m.at]])
    m.at += 1


def _binunicode(m: _Machine) -> None:
    m.stack.append(m.take(m.number(4)).decode("utf-8", "surrogatepass"))


def _tuple(count: int) -> Step:
    def step(m: _Machine) -> None:
        m.stack[-count:] = [tuple(m.stack[-count:])]

    return step


def _reduce(m: _Machine) -> None:
    args = m.stack.pop()
    # A dict by another name: what follows are its items.
    if m.stack[-1] == _ORDERED_DICT and args == ():
        m.stack[-1] = {}
    else:
        m.stack[-1] = m.call(m.stack[-1], args)


def _newobj_ex(m: _Machine) -> None:
    options = m.stack.pop()
    args = m.stack.pop()
    m.stack[-1] = m.call(m.stack[-1], (args, options))


def _build(m: _Machine) -> None:
    state = m.stack.pop()
    if isinstance(m.stack[-1], Call):
        m.stack[-1].state = state


def _setitem(m: _Machine) -> None:
    value = m.stack.pop()
    key = m.stack.pop()
    m.set_items(m.stack[-1], [key, value])


def _setitems(m: _Machine) -> None:
    flat = m.until_mark()
    m.set_items(m.stack[-1], flat)


def _append(m: _Machine) -> None:
    value = m.stack.pop()
    m.add_elements(m.stack[-1], [value])


def _appends(m: _Machine) -> None:
    elements = m.until_mark()
    m.add_elements(m.stack[-1], elements)


def _dict_of(flat: list[Any]) -> dict[Any, Any]:
    check_keys(flat[::2])
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _frozenset(m: _Machine) -> None:
    elements = m.until_mark()
    check_keys(elements)
    m.push(frozenset(elements))


def _stack_global(m: _Machine) -> None:
    name = m.stack.pop()
    m.name(m.stack.pop(), name)


def _inst(m: _Machine) -> None:
    module, name = m.line().decode(), m.line().decode()
    args = tuple(m.until_mark())
    m.name(module, name)
    m.stack[-1] = m.call(m.stack[-1], args)


def _obj(m: _Machine) -> None:
    function, *args = m.until_mark()
    m.push(m.call(function, tuple(args)))


def _int(m: _Machine) -> None:
    text = m.line()
    m.push({b"00": False, b"01": True}.get(text) if text in (b"00", b"01") else int(text))


def _signed(nbytes: int) -> Step:
    return lambda m: m.push(int.from_bytes(m.take(nbytes), "little", signed=True))


def _long(length_bytes: int) -> Step:
    return lambda m: m.push(int.from_bytes(m.sized(length_bytes), "little", signed=True))


def _constant(value: Any) -> Step:
    return lambda m: m.stack.append(value)


def _extension(nbytes: int) -> Step:
    return lambda m: m.name("copyreg", f"extension {m.number(nbytes)}")


def _nothing(m: _Machine) -> None:
    pass


def _steps() -> Iterator[tuple[bytes, Step]]:
    yield b"(", _mark
    yield b"0", lambda m: m.stack.pop()
    yield b"1", lambda m: m.until_mark()
    yield b"2", lambda m: m.push(m.stack[-1])
    yield b"N", _constant(None)
    yield b"\x88", _constant(True)
    yield b"\x89", _constant(False)
    yield b")", _constant(())
    # Numbers
    yield b"I", _int
    yield b"J", _signed(4)
    yield b"K", lambda m: m.push(m.number(1))
    yield b"M", lambda m: m.push(m.number(2))
    yield b"L", lambda m: m.push(int(m.line().rstrip(b"L")))
    yield b"\x8a", _long(1)
    yield b"\x8b", _long(4)
    yield b"F", lambda m: m.push(float(m.line()))
    yield b"G", lambda m: m.push(struct.unpack(">d", m.take(8))[0])
    # Text and bytes
    yield b"X", _binunicode
    yield b"\x8c", lambda m: m.push(m.sized(1).decode("utf-8", "surrogatepass"))
    yield b"\x8d", lambda m: m.push(m.sized(8).decode("utf-8", "surrogatepass"))
    yield b"V", lambda m: m.push(m.line().decode("raw-unicode-escape"))
    yield b"S", lambda m: m.push(m.line().strip(b"'\"").decode("latin-1"))
    yield b"T", lambda m: m.push(m.sized(4))
    yield b"U", lambda m: m.push(m.sized(1))
    yield b"B", lambda m: m.push(m.sized(4))
    yield b"C", lambda m: m.push(m.sized(1))
    yield b"\x8e", lambda m: m.push(m.sized(8))
    yield b"\x96", lambda m: m.push(m.sized(8))
    # Containers
    yield b"]", lambda m: m.push([])
    yield b"}", lambda m: m.push({})
    yield b"\x8f", lambda m: m.push(set())
    yield b"l", lambda m: m.push(m.until_mark())
    yield b"d", lambda m: m.push(_dict_of(m.until_mark()))
    yield b"t", lambda m: m.push(tuple(m.until_mark()))
    yield b"\x91", _frozenset
    yield b"\x85", _tuple(1)
    yield b"\x86", _tuple(2)
    yield b"\x87", _tuple(3)
    yield b"a", _append
    yield b"e", _appends
    yield b"\x90", _appends
    yield b"s", _setitem
    yield b"u", _setitems
    # The memo
    yield b"q", _binput
    yield b"h", _binget
    yield b"r", lambda m: _put(m, m.number(4))
    yield b"j", lambda m: m.push(m.memo[m.number(4)])
    yield b"p", lambda m: _put(m, int(m.line()))
    yield b"g", lambda m: m.push(m.memo[int(m.line())])
    yield b"\x94", lambda m: _put(m, len(m.memo))
    # What would run
    yield b"c", lambda m: m.name(m.line().decode(), m.line().decode())
    yield b"\x93", _stack_global
    yield b"R", _reduce
    yield b"\x81", _reduce
    yield b"\x92", _newobj_ex
    yield b"i", _inst
    yield b"o", _obj
    yield b"b", _build
    yield b"\x82", _extension(1)
    yield b"\x83", _extension(2)
    yield b"\x84", _extension(4)
    # Persistent ids
    yield b"Q", lambda m: m.persistent(m.stack.pop())
    # What frames it
    yield b"\x80", lambda m: m.take(1)
    yield b"\x95", lambda m: m.take(8)
    yield b"\x98", _nothing


_OPCODES = {code[0]: step for code, step in _steps()}

"""What a torch pickle says, found without running any of it.

A plain one (`plain_pickle`) is read by CPython's unpickler. Of any other a small machine does what
the opcodes say with the stack and the memo, and nothing else: globals are names, calls are noted
and not made. That tells which storages a checkpoint refers to, how large it says they are, and what
would be imported, before anything is allocated; and for `nvmeio inspect` the names, shapes and
dtypes of the tensors.

torch's ``weights_only`` makes the objects of what it allows while it reads. That is too late here:
a load has to know of all storages and their sizes before memory is taken and reads are begun.

Memory and time are bounded by the pickle's length: no opcode makes more than it brings along.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import struct
from collections.abc import Callable
from typing import Any

from nvmeio._formats import plain_pickle
from nvmeio._formats.pickle_values import (
    ORDERED_DICT,
    Global,
    Keys,
    PickledCall,
    PickleError,
    Scan,
    StorageRef,
    as_text,
    shown,
    storage_of,
)


def scan(data: bytes) -> Scan:
    """Read a pickle.

    Raises:
        PickleError: It is damaged, cut off, or refers to something that is no storage.

    Cost: 6 us a tensor; where the pickle is not plain, 12 us.
    """
    found = plain_pickle.scan(data)
    if found is not None:
        return found
    machine = _Machine(data)
    try:
        value = machine.run()
    except PickleError:
        raise
    except (IndexError, KeyError, ValueError, TypeError, *_WRONG) as wrong:
        raise PickleError(f"damaged at byte {machine.at}: {wrong!r}") from wrong
    return Scan(value, machine.globals, machine.storages, machine.calls, len(data), False)


_WRONG = (OverflowError, RecursionError, struct.error)

# What an opcode does, with what it brings along.
Step = Callable[["_Machine", Any], object]


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
        self.calls: list[PickledCall] = []
        self.keys = Keys()

    def run(self) -> object:
        """Do what all opcodes say; the object.

        What ends too early is told by the next opcode, which lies behind the end.
        """
        data, stack, memo, opcodes = self.data, self.stack, self.memo, _OPCODES
        file = io.BytesIO(data)
        at = 0
        while data[at] != _STOP:
            self.at = at
            opcode = opcodes[data[at]]
            if opcode is None:
                raise PickleError(self._unknown(data[at]))
            step, form, nbytes, reader = opcode
            at += 1
            if form is not None:
                (argument,) = form.unpack_from(data, at)
                at += nbytes
            elif reader is not None:
                file.seek(at)
                argument = reader(file)
                at = file.tell()
            else:
                argument = None
            if step is _push:  # these three are most, and need no call
                stack.append(argument)
            elif step is _put:
                memo[argument] = stack[-1]
            elif step is _get:
                stack.append(memo[argument])
            else:
                step(self, argument)
        return stack.pop()

    def _unknown(self, code: int) -> str:
        opcode = pickletools.code2op.get(chr(code))  # type: ignore[attr-defined]
        if opcode is None:
            return f"byte {code:#x} at {self.at} is no opcode"
        return f"opcode {opcode.name} at byte {self.at}, which torch does not write"

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
        found = Global(as_text(module), as_text(name))
        self.globals.add(found)
        self.push(found)

    def call(self, function: Any, args: Any) -> PickledCall:
        made = PickledCall(function, args)
        self.calls.append(made)
        return made

    def set_items(self, target: Any, flat: list[Any]) -> None:
        keys, values = flat[::2], flat[1::2]
        self.keys.check(keys)
        if isinstance(target, dict):
            target.update(zip(keys, values, strict=True))
        elif isinstance(target, PickledCall):
            target.items = target.items or []
            target.items += zip(keys, values, strict=True)
        else:
            raise PickleError(f"items for a {type(target).__name__}")

    def add_elements(self, target: Any, elements: list[Any]) -> None:
        if isinstance(target, list):
            target += elements
        elif isinstance(target, set):
            self.keys.check(elements)
            target.update(elements)
        elif isinstance(target, PickledCall):
            target.elements = target.elements or []
            target.elements += elements
        else:
            raise PickleError(f"elements for a {type(target).__name__}")

    def persistent(self, pid: Any) -> None:
        ref = storage_of(pid)
        self.storages.setdefault(ref.key, ref)
        self.push(ref)


def _put(m: _Machine, index: int) -> None:
    m.memo[index] = m.stack[-1]


def _get(m: _Machine, index: int) -> None:
    m.stack.append(m.memo[index])


def _push(m: _Machine, value: Any) -> None:
    m.stack.append(value)


def _nothing(m: _Machine, _: Any) -> None:
    pass


def _constant(value: Any) -> Step:
    return lambda m, _: m.stack.append(value)


def _tuple(count: int) -> Step:
    def step(m: _Machine, _: Any) -> None:
        if len(m.stack) < count:
            raise PickleError("a tuple of more than there is")
        m.stack[-count:] = [tuple(m.stack[-count:])]

    return step


def _pop_and_reduce(m: _Machine, _: Any) -> None:
    _reduce(m, m.stack.pop())


def _reduce(m: _Machine, args: Any) -> None:
    # A dict by another name: what follows are its items.
    if not args and args == () and m.stack[-1] == ORDERED_DICT:
        m.stack[-1] = {}
    else:
        m.stack[-1] = m.call(m.stack[-1], args)


def _newobj_ex(m: _Machine, _: Any) -> None:
    options = m.stack.pop()
    args = m.stack.pop()
    m.stack[-1] = m.call(m.stack[-1], (args, options))


def _build(m: _Machine, _: Any) -> None:
    state = m.stack.pop()
    if isinstance(m.stack[-1], PickledCall):
        m.stack[-1].state = state


def _setitem(m: _Machine, _: Any) -> None:
    value = m.stack.pop()
    key = m.stack.pop()
    m.set_items(m.stack[-1], [key, value])


def _setitems(m: _Machine, _: Any) -> None:
    flat = m.until_mark()
    m.set_items(m.stack[-1], flat)


def _append(m: _Machine, _: Any) -> None:
    value = m.stack.pop()
    m.add_elements(m.stack[-1], [value])


def _appends(m: _Machine, _: Any) -> None:
    elements = m.until_mark()
    m.add_elements(m.stack[-1], elements)


def _dict(m: _Machine, _: Any) -> None:
    flat = m.until_mark()
    m.push({})
    m.set_items(m.stack[-1], flat)


def _frozenset(m: _Machine, _: Any) -> None:
    elements = m.until_mark()
    m.keys.check(elements)
    m.push(frozenset(elements))


def _global(m: _Machine, both: str) -> None:
    module, space, name = both.partition(" ")
    if not space or " " in name:
        raise PickleError(f"a name that is none: {shown(both)}")
    m.name(module, name)


def _stack_global(m: _Machine, _: Any) -> None:
    name = m.stack.pop()
    m.name(m.stack.pop(), name)


def _inst(m: _Machine, both: str) -> None:
    args = tuple(m.until_mark())
    _global(m, both)
    m.stack[-1] = m.call(m.stack[-1], args)


def _obj(m: _Machine, _: Any) -> None:
    function, *args = m.until_mark()
    m.push(m.call(function, tuple(args)))


def _extension(m: _Machine, number: int) -> None:
    m.name("copyreg", f"extension {number}")


_STEPS: dict[str, Step] = {
    "MARK": _constant(_MARK),
    "POP": lambda m, _: m.stack.pop(),
    "POP_MARK": lambda m, _: m.until_mark(),
    "DUP": lambda m, _: m.push(m.stack[-1]),
    "NONE": _constant(None),
    "NEWTRUE": _constant(True),
    "NEWFALSE": _constant(False),
    # Numbers, text and bytes
    **dict.fromkeys(("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4"), _push),
    **dict.fromkeys(("FLOAT", "BINFLOAT"), _push),
    **dict.fromkeys(("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"), _push),
    **dict.fromkeys(("STRING", "BINSTRING", "SHORT_BINSTRING"), _push),
    **dict.fromkeys(("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"), _push),
    # Containers
    "EMPTY_TUPLE": _constant(()),
    "EMPTY_LIST": lambda m, _: m.push([]),
    "EMPTY_DICT": lambda m, _: m.push({}),
    "EMPTY_SET": lambda m, _: m.push(set()),
    "LIST": lambda m, _: m.push(m.until_mark()),
    "DICT": _dict,
    "TUPLE": lambda m, _: m.push(tuple(m.until_mark())),
    "TUPLE1": _tuple(1),
    "TUPLE2": _tuple(2),
    "TUPLE3": _tuple(3),
    "FROZENSET": _frozenset,
    "APPEND": _append,
    "APPENDS": _appends,
    "ADDITEMS": _appends,
    "SETITEM": _setitem,
    "SETITEMS": _setitems,
    # The memo
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), _put),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), _get),
    "MEMOIZE": lambda m, _: _put(m, len(m.memo)),
    # What would run
    "GLOBAL": _global,
    "STACK_GLOBAL": _stack_global,
    "REDUCE": _pop_and_reduce,
    "NEWOBJ": _pop_and_reduce,
    "NEWOBJ_EX": _newobj_ex,
    "INST": _inst,
    "OBJ": _obj,
    "BUILD": _build,
    **dict.fromkeys(("EXT1", "EXT2", "EXT4"), _extension),
    # Persistent ids
    "BINPERSID": lambda m, _: m.persistent(m.stack.pop()),
    # What frames it
    **dict.fromkeys(("PROTO", "FRAME", "READONLY_BUFFER"), _nothing),
}

_STOP = pickle.STOP[0]
_FORMS = {
    name: struct.Struct(form)
    for name, form in (
        *(("uint1", "B"), ("uint2", "<H"), ("int4", "<i"), ("uint4", "<I"), ("uint8", "<Q")),
        ("float8", ">d"),
    )
}

_Opcode = tuple[Step, "struct.Struct | None", int, "Callable[[io.BytesIO], Any] | None"]


def _opcode_of(code: int) -> _Opcode | None:
    """What a byte stands for: what is done, and how its argument is read."""
    opcode = pickletools.code2op.get(chr(code))  # type: ignore[attr-defined]
    if opcode is None or opcode.name not in _STEPS:
        return None
    form = None if opcode.arg is None else _FORMS.get(opcode.arg.name)
    reader = None if opcode.arg is None else opcode.arg.reader
    return _STEPS[opcode.name], form, 0 if form is None else form.size, reader


_OPCODES = [_opcode_of(code) for code in range(256)]

"""What a torch pickle says, found without running any of it.

A small machine does what the opcodes say with the stack and the memo, and nothing else: globals are
names, calls are noted and not made. It reads the opcodes that tensors are made of itself, and all
others of protocols 0 to 5 by CPython's `pickletools`. That tells which storages a checkpoint refers
to, how large it says they are, and what would be imported, before anything is allocated; and for
`nvmeio inspect` the names, shapes and dtypes of the tensors.

torch's ``weights_only`` makes the objects of what it allows while it reads. That is too late here:
a load has to know of all storages and their sizes before memory is taken and reads are begun.

Memory and time are bounded by the pickle's length: no opcode makes more than it brings along.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Callable
from typing import Any, NamedTuple

from nvmeio._formats.pickle_values import (
    COMMON_GLOBALS,
    ORDERED_DICT,
    PARAMETER,
    REBUILD,
    Global,
    PickledCall,
    PickleError,
    StorageRef,
    check_keys,
    shown,
)


class Scan(NamedTuple):
    """What `scan` found.

    Attributes:
        value: The object, out of the types of `pickle_values`, dicts (as lists of pairs in
            `PickledCall` where a key cannot be one), lists, tuples, sets and plain values.
        globals: All names that would be imported.
        storages: All storages that are referred to, each once, by key, in order.
        calls: All calls, in the order in which they would be made.
        nbytes: The length of the pickle.
        plain: Whether it is what torch.save makes of containers, numbers, texts and dense tensors,
            and does nothing else: see `torch_unpickling`.
    """

    value: object
    globals: set[Global]
    storages: dict[str, StorageRef]
    calls: list[PickledCall]
    nbytes: int
    plain: bool


def scan(data: bytes) -> Scan:
    """Read a pickle.

    Raises:
        PickleError: It is damaged, cut off, or refers to something that is no storage.

    Cost: 0.2 us an opcode; a tensor takes about 30 of them.
    """
    machine = _Machine(data)
    try:
        value = machine.run()
    except PickleError:
        raise
    except (IndexError, KeyError, ValueError, TypeError, OverflowError) as wrong:
        raise PickleError(f"damaged at byte {machine.at}: {wrong!r}") from wrong
    return Scan(
        value, machine.globals, machine.storages, machine.calls, len(data), machine.is_plain()
    )


# What an opcode does, with what it brings along.
Step = Callable[["_Machine", Any], object]


class _Mark:
    pass


_MARK = _Mark()


class _Machine:
    def __init__(self, data: bytes) -> None:
        self.data = data
        self.file = io.BytesIO(data)
        self.at = 0
        self.plain = True
        self.rebuilds = 0  # how often `REBUILD` was put on the stack
        self.uses = 0  # how often a storage was
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.globals: set[Global] = set()
        self.storages: dict[str, StorageRef] = {}
        self.calls: list[PickledCall] = []

    def run(self) -> object:
        """Do what all opcodes say; the object.

        Those of tensors are done here, without a call each: they are nearly all there are. What
        ends too early is told by the next opcode, which lies behind the end.
        """
        data, stack, memo, calls = self.data, self.stack, self.memo, self.calls
        push, pop = stack.append, stack.pop
        storage, rebuild, number = StorageRef, REBUILD, int.from_bytes
        most = len(data)
        at = 0
        while True:
            self.at = at
            opcode = data[at]
            at += 1
            if opcode == _BINPUT:
                memo[data[at]] = stack[-1]
                at += 1
            elif opcode == _LONG_BINPUT:
                index = number(data[at : at + 4], "little")
                memo[index] = stack[-1]
                if index > most:
                    self.plain = False
                at += 4
            elif opcode == _BINGET:
                value = memo[data[at]]
                at += 1
                if value is rebuild:
                    self.rebuilds += 1
                elif type(value) is storage:
                    self.plain = False
                push(value)
            elif opcode == _LONG_BINGET:
                value = memo[number(data[at : at + 4], "little")]
                at += 4
                if value is rebuild:
                    self.rebuilds += 1
                elif type(value) is storage:
                    self.plain = False
                push(value)
            elif opcode == _BININT1:
                push(data[at])
                at += 1
            elif opcode == _MARK_OPCODE:
                push(_MARK)
            elif opcode == _BINUNICODE:
                start = at + 4
                at = start + number(data[at:start], "little")
                push(str(data[start:at], "utf-8", "surrogatepass"))
            elif opcode == _BININT2:
                push(data[at] | data[at + 1] << 8)
                at += 2
            elif opcode == _BININT:
                push(number(data[at : at + 4], "little", signed=True))
                at += 4
            elif opcode == _TUPLE:
                push(tuple(self.until_mark()))
            elif opcode == _TUPLE1:
                push((pop(),))
            elif opcode == _TUPLE2:
                last = pop()
                push((pop(), last))
            elif opcode == _EMPTY_TUPLE:
                push(())
            elif opcode == _NEWFALSE:
                push(False)
            elif opcode == _BINPERSID:
                self.persistent(pop())
            elif opcode == _REDUCE_OPCODE:
                args = pop()
                if args:
                    call = stack[-1] = PickledCall(stack[-1], args)
                    calls.append(call)
                else:
                    _reduce(self, args)
            elif opcode == _STOP:
                return pop()
            else:
                at = self.other(at - 1)

    def other(self, at: int) -> int:
        """Do what any opcode says; the place behind it."""
        opcode = pickletools.code2op.get(chr(self.data[at]))  # type: ignore[attr-defined]
        if opcode is None:
            raise PickleError(f"byte {self.data[at]:#x} at {at} is no opcode")
        argument, end = None, at + 1
        if opcode.arg is not None:
            self.file.seek(end)
            argument = opcode.arg.reader(self.file)
            end = self.file.tell()
        step = _STEPS.get(opcode.name)
        if step is None:
            raise PickleError(f"opcode {opcode.name} at byte {at}, which torch does not write")
        if opcode.name not in _PLAIN:
            self.plain = False
        step(self, argument)
        return end

    def is_plain(self) -> bool:
        """See `Scan`; at the end."""
        if not (
            self.plain and self.data.startswith(_PROTOCOL_2) and self.globals <= COMMON_GLOBALS
        ):
            return False
        # Each storage is a tensor's, and so is each use of what makes tensors: none is a value.
        tensors = 0
        for call in self.calls:
            args = call.args
            if call.state is not None or call.items or call.elements or type(args) is not tuple:
                return False
            if call.function == REBUILD and len(args) in (6, 7) and type(args[0]) is StorageRef:
                tensors += 1
            elif call.function != PARAMETER or len(args) != 3 or type(args[0]) is not PickledCall:
                return False
        return self.rebuilds == tensors == self.uses

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
        if found == REBUILD:
            found = REBUILD
            self.rebuilds += 1
        self.globals.add(found)
        self.push(found)

    def call(self, function: Any, args: Any) -> PickledCall:
        made = PickledCall(function, args)
        self.calls.append(made)
        return made

    def set_items(self, target: Any, flat: list[Any]) -> None:
        keys, values = flat[::2], flat[1::2]
        check_keys(keys)
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
            check_keys(elements)
            target.update(elements)
        elif isinstance(target, PickledCall):
            target.elements = target.elements or []
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
        self.uses += 1
        self.push(ref)


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode("ascii")
    if not isinstance(value, str):
        raise PickleError(f"expected a text, not {shown(value)}")
    return value


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
        m.plain = False
    elif type(state) is not dict or type(m.stack[-1]) is not dict:
        m.plain = False


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


def _dict_of(flat: list[Any]) -> dict[Any, Any]:
    check_keys(flat[::2])
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _frozenset(m: _Machine, _: Any) -> None:
    elements = m.until_mark()
    check_keys(elements)
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


# Those that are not looked up.
_PROTOCOL_2 = pickle.PROTO + b"\x02"
_BINPUT, _LONG_BINPUT = pickle.BINPUT[0], pickle.LONG_BINPUT[0]
_BINGET, _LONG_BINGET = pickle.BINGET[0], pickle.LONG_BINGET[0]
_BININT, _BININT1, _BININT2 = pickle.BININT[0], pickle.BININT1[0], pickle.BININT2[0]
_MARK_OPCODE, _BINUNICODE, _NEWFALSE = pickle.MARK[0], pickle.BINUNICODE[0], pickle.NEWFALSE[0]
_TUPLE, _TUPLE1, _TUPLE2 = pickle.TUPLE[0], pickle.TUPLE1[0], pickle.TUPLE2[0]
_EMPTY_TUPLE, _BINPERSID = pickle.EMPTY_TUPLE[0], pickle.BINPERSID[0]
_REDUCE_OPCODE, _STOP = pickle.REDUCE[0], pickle.STOP[0]

# What a plain pickle has beside them (`Scan.plain`): nothing that torch's ``weights_only`` refuses.
_PLAIN = frozenset(
    {
        *("PROTO", "GLOBAL", "BUILD", "NONE", "NEWTRUE", "LONG1", "BINFLOAT", "TUPLE3"),
        *("EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT", "SETITEM", "SETITEMS"),
    }
)

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
    "DICT": lambda m, _: m.push(_dict_of(m.until_mark())),
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

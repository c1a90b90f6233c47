"""The calls that a pickle would make, told before any is made.

``weights_only=True`` lets a pickle call some thirty functions of Python and torch, with whatever
arguments: ``bytearray(2**38)`` takes 256 GiB for ten bytes of pickle, and a set of one tuple that
holds another twice, 45 levels deep, is hashed for weeks. No torch.save writes such calls. Here is
what it does write of each function that can do harm in this way; anything else is refused.

Source: `torch._weights_only_unpickler._get_allowed_globals`, and the `__reduce__` of what is named
there.
"""

from __future__ import annotations

import math
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable, Iterable
from typing import Any

from nvmeio._formats.torch_archives.pickle_values import (
    Global,
    Keys,
    PickledCall,
    PickleError,
    Scan,
    StorageRef,
    shape_of,
    shown,
)

# Characters, bytes and elements that calls may make beyond a multiple of the pickle's length. What
# is written in earnest has each of them in the pickle, once.
_FREE_PARTS = 1 << 20
_PARTS_A_BYTE = 4

# How many values are looked into for the tensors in one call's arguments, and how many calls may be
# wrapped around one. In earnest it is a few.
_MOST_ARGUMENTS = 1000
_MOST_WRAPPERS = 8

# Characters of a call that a message shows.
_MOST_SHOWN = 2

# `bytes` and `bytearray` are written as a text in Latin-1; the others make no more of a text.
_ENCODINGS = frozenset({"latin1", "latin-1", "ascii", "utf-8", "utf8"})

_WRAPPER = Global("torch._tensor", "_rebuild_from_type_v2")
_MAKE_STORAGES = frozenset({"UntypedStorage", "TypedStorage"})
_TENSORS = frozenset({"torch", "torch.cuda", "torch.sparse", "torch.cuda.sparse"})


def refused(scan: Scan) -> str | None:
    """The first call that makes far more than the pickle holds, or takes far too long; or None.

    It comes with what is wrong, such as "bytearray(274877906944): expected a text". Cost: about a
    microsecond a call.
    """
    judge = _Judge(_FREE_PARTS + _PARTS_A_BYTE * scan.nbytes)
    for call in scan.calls:
        try:
            judge.look_at(call)
        except _Absurd as absurd:
            return f"{_shown(call)}: {absurd}"
    return None


def _shown(call: PickledCall) -> str:
    name = shown(getattr(call.function, "name", call.function)).strip("'")
    if type(call.args) is not tuple:
        return f"{name}(*{shown(call.args)})"
    args = ", ".join(shown(arg) for arg in call.args[:_MOST_SHOWN])
    return f"{name}({args}{', ...' if len(call.args) > _MOST_SHOWN else ''})"


class _Absurd(Exception):
    """The fault of a call."""


class _Judge:
    """Looks at calls in the order in which they would be made."""

    def __init__(self, parts: int) -> None:
        self._left = parts
        self._keys = Keys()
        # The number of parts of each text, bytes object and container that a call makes. The calls
        # live as long as the scan, so no id is used twice.
        self._parts: dict[int, int] = {}

    def look_at(self, call: PickledCall) -> None:
        function, args = call.function, call.args
        for _ in range(_MOST_WRAPPERS):
            if not isinstance(function, Global):
                return  # torch calls nothing else
            function = _renamed(function)
            if function != _WRAPPER:
                break
            # It calls the first of a function, a type, its arguments and a state.
            if type(args) is not tuple or len(args) != 4:
                raise _Absurd("expected a function, a type, arguments and a state")
            function, _, args, _ = args
        else:
            raise _Absurd("too many calls in one another")
        check = _CHECKS.get(function) or _by_kind(function)
        if check is not None:
            # Nor a storage, nor a shape, whose elements would be the arguments.
            if type(args) is not tuple:
                raise _Absurd("expected a tuple of arguments")
            check(self, call, args)

    def make(self, parts: int) -> None:
        self._left -= parts
        if self._left < 0:
            raise _Absurd("all calls together make far more than the pickle holds")

    # The calls of each function

    def bytes_of_text(self, call: PickledCall, args: tuple[Any, ...]) -> None:
        """`_codecs.encode(text, "latin1")`."""
        if len(args) not in (1, 2) or not all(isinstance(arg, (str, bytes)) for arg in args):
            raise _Absurd("expected a text and an encoding")
        if len(args) == 2 and _name(args[1]) not in _ENCODINGS:
            raise _Absurd(f"expected the encoding latin1, not {shown(args[1])}")
        self._remember(call, len(args[0]))

    def bytearray(self, call: PickledCall, args: tuple[Any, ...]) -> None:
        """`bytearray(text, "latin-1")` or `bytearray(bytes)`."""
        if len(args) > 1:
            self.bytes_of_text(call, args)
        elif args:
            self._remember(call, self._length(args[0]))

    def elements(self, call: PickledCall, args: tuple[Any, ...]) -> None:
        """`set([...])`, `Counter({...})`: all elements are hashed."""
        self._remember(call, self._length(args[0]) if args else 0)
        if args and not isinstance(args[0], PickledCall):
            self._check_hashable(args[0])

    def pairs(self, call: PickledCall, args: tuple[Any, ...]) -> None:
        """`OrderedDict([[key, value], ...])`, of Python 2."""
        self._remember(call, self._length(args[0]) if args else 0)
        if args and isinstance(args[0], (list, tuple)):
            if not all(type(pair) in (list, tuple) and len(pair) == 2 for pair in args[0]):
                raise _Absurd("expected pairs")
            self._check_hashable([pair[0] for pair in args[0]])

    def numbers(self, call: PickledCall, args: tuple[Any, ...]) -> None:
        """`complex(1.0, 2.0)`, `torch.Size((3, 4))`."""
        given = args[0] if len(args) == 1 and type(args[0]) in (list, tuple) else args
        self._remember(call, len(given))
        if not all(isinstance(number, (int, float)) for number in given):
            raise _Absurd("expected numbers")

    def nothing(self, call: PickledCall, args: tuple[Any, ...]) -> None:
        """`torch.Tensor()`, which the state then fills."""
        if args:
            raise _Absurd("expected no arguments: it would allocate as much as they say")

    def never(self, call: PickledCall, args: tuple[Any, ...]) -> None:
        """A storage is a record of the archive; no call makes one."""
        raise _Absurd("a storage that the archive lacks")

    def of_tensors(self, call: PickledCall, args: tuple[Any, ...]) -> None:
        """Count what functions read or copy that go through all elements of their tensors.

        A tensor of one element may have any shape, if its strides are 0.
        """
        waiting: list[Any] = [args]
        for _ in range(_MOST_ARGUMENTS):
            if not waiting:
                return
            value = waiting.pop()
            if isinstance(value, PickledCall):
                waiting += [value.function, value.args, value.state]
            elif isinstance(value, Global):
                if value.name == "_rebuild_wrapper_subclass":
                    raise _Absurd("expected tensors with memory")
            elif isinstance(value, (dict, list, tuple)) and not isinstance(value, StorageRef):
                self.make(len(value))
                if isinstance(value, dict):
                    value = list(value.values())
                elif value and isinstance(value[0], StorageRef):
                    self.make(max(0, math.prod(shape_of(value)) - value[0].numel))
                waiting += [
                    part for part in value if isinstance(part, (PickledCall, dict, list, tuple))
                ]
        raise _Absurd(f"more than {_MOST_ARGUMENTS} arguments in one another")

    def _check_hashable(self, values: Iterable[Any]) -> None:
        try:
            for value in values:
                self.make(self._keys.check((value,)))
        except (PickleError, TypeError, OverflowError, RecursionError) as wrong:
            raise _Absurd(str(wrong)) from None

    def _length(self, value: Any) -> int:
        """How many parts a text, bytes or a container has."""
        if isinstance(value, PickledCall) and id(value) in self._parts:
            return self._parts[id(value)] + len(value.items) + len(value.elements)
        if type(value) not in (str, bytes, list, tuple, dict, set, frozenset):
            raise _Absurd("expected a text, bytes or a container")
        return len(value)

    def _remember(self, call: PickledCall, parts: int) -> None:
        self._parts[id(call)] = parts
        self.make(parts)


_Check = Callable[[_Judge, PickledCall, tuple[Any, ...]], None]

_CHECKS: dict[Global, _Check] = {
    Global("_codecs", "encode"): _Judge.bytes_of_text,
    Global("builtins", "bytearray"): _Judge.bytearray,
    Global("builtins", "set"): _Judge.elements,
    Global("collections", "Counter"): _Judge.elements,
    Global("collections", "OrderedDict"): _Judge.pairs,
    Global("builtins", "complex"): _Judge.numbers,
    Global("torch", "Size"): _Judge.numbers,
    **{
        Global("torch._utils", f"_rebuild_{kind}"): _Judge.of_tensors
        for kind in (
            "qtensor",  # which allocates its size before it takes the storage
            "sparse_tensor",
            "nested_tensor",
            "device_tensor_from_numpy",
            "device_tensor_from_cpu_tensor",
        )
    },
}


def _by_kind(function: Global) -> _Check | None:
    if function.name in _MAKE_STORAGES and function.module == "torch.storage":
        return _Judge.never
    if function.name.endswith("Tensor") and function.module in _TENSORS:
        return _Judge.nothing
    return None


def _renamed(function: Global) -> Global:
    """The name of today for a name of Python 2, as torch renames it."""
    if function in NAME_MAPPING:
        return Global(*NAME_MAPPING[function])
    return function._replace(module=IMPORT_MAPPING.get(function.module, function.module))


def _name(text: str | bytes) -> str:
    return (text.decode("latin-1") if isinstance(text, bytes) else text).lower().replace("_", "-")

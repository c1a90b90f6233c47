"""The contents of a torch pickle, read by CPython's own unpickler in C; plain objects are made.

That unpickler must not meet the content of a hostile pickle: a place in its memo that takes
gigabytes, a key that is hashed for weeks or deeper than the stack, a call of anything. So a pickle
is first held against a grammar (`is_plain`): it may have containers, numbers, texts, tuples that
nothing refers back to, and tensors, each written as torch writes it, of storages, functions and
classes in `COMMON_GLOBALS` alone. All of this is safe for the C unpickler. It reads without
anything that could run: names become stubs, storages notes (`scan`), or, once the storages' bytes
are there, the object (`unpickle`). Anything else goes the slow way: `pickle_values.scan`, and
torch's own ``weights_only`` unpickler, which is written in Python and takes 100 us a tensor.
"""

from __future__ import annotations

import functools
import io
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch

from nvmeio import _torch_private
from nvmeio._formats.torch_archives import pickle_values
from nvmeio._formats.torch_archives.pickle_values import (
    COMMON_GLOBALS,
    ORDERED_DICT,
    PARAMETER,
    REBUILD,
    Global,
    PickledCall,
    PickleError,
    Scan,
    StorageRef,
    storage_of,
)

Restore = Callable[[torch.UntypedStorage, str], torch.UntypedStorage]

# The grammar


def _text(longest: int, letters: bytes = b".") -> bytes:
    """BINUNICODE of up to so many bytes: one alternative for each length."""
    lengths = (re.escape(bytes([n])) + rb"\0\0\0%b{%d}" % (letters, n) for n in range(longest + 1))
    return rb"X(?:%b)" % b"|".join(lengths)


@functools.cache
def _tokens(memo_bits: int, kind: str) -> re.Pattern[bytes]:
    """A pattern of the parts of a plain pickle. Compiled once: 5 ms of a process's first load.

    `memo_bits`, 16 to 24, is how many bits a place in the memo may have. `kind` is "parts" for up
    to 64 parts of a plain pickle, such as a tensor, a text, the begin of a list; "parameters" for
    the same, parameters among them; "tuples" for a tuple of numbers, of which there may not be
    many.
    """
    put = rb"(?:q.|r..[\0-\x%02x]\0)?" % ((1 << memo_bits - 16) - 1)
    get = rb"(?:h.|j....)"
    whole = rb"(?:K.|M..|J....|\x8a(?:%b))" % b"|".join(
        rb"\x%02x.{%d}" % (n, n) for n in range(5, 10)
    )
    number = rb"(?:%b|G.{8}|[N\x88\x89])" % whole

    def tuples(part: bytes) -> bytes:
        few = rb"%b(?:\x85|%b(?:\x86|%b\x87))%b" % (part, part, part, put)
        return rb"(?:\)|%b|\(%b{4,64}t%b)" % (few, part, put)

    def named(name: bytes) -> bytes:
        return rb"(?:c%b\n%b|%b)" % (name, put, get)

    def text(longest: int, letters: bytes = b".") -> bytes:
        return rb"(?:%b%b|%b)" % (_text(longest, letters), put, get)

    if kind == "tuples":
        return re.compile(tuples(number), re.DOTALL)
    ordered_dict = named(rb"collections\nOrderedDict") + rb"\)R" + put
    flag = rb"X(?:\x04\0\0\0conj|\x03\0\0\0neg)%b[\x88\x89]" % put
    tensor = b"".join(
        (
            named(rb"torch\._utils\n_rebuild_tensor_v2") + rb"\(",
            rb"\((?:X\x07\0\0\0storage%b|%b)" % (put, get) + named(rb"torch\n\w{1,20}Storage"),
            text(8, rb"\d") + text(15) + whole + rb"t" + put + rb"Q",
            whole + tuples(whole) + tuples(whole) + rb"[\x88\x89]" + ordered_dict,
            rb"(?:\}%b(?:\((?:%b){0,8}u|%bs)?)?" % (put, flag, flag),  # whether it is conjugated
            rb"t" + put + rb"R" + put,
        )
    )
    parts = [tensor, ordered_dict]
    if kind == "parameters":
        parameter = named(rb"torch\._utils\n_rebuild_parameter") + tensor
        parts.append(parameter + rb"[\x88\x89]" + ordered_dict + rb"\x87" + put + rb"R" + put)
    begun = rb"\}%bb?|\]%b|[(ae]|[su]b?" % (put, put)
    single = rb"(?!%b)(?:%b|%b)" % (tuples(number), number, begun)
    parts = [_text(63) + put, *parts, single]
    return re.compile(rb"(?:%b){1,64}" % b"|".join(parts), re.DOTALL)


_PROTOCOL_2 = pickle.PROTO + b"\x02"
_TUPLES = pickle.TUPLE + pickle.TUPLE1 + pickle.TUPLE2 + pickle.TUPLE3
_PUT = re.compile(rb"q(.)|r(....)", re.DOTALL)
_GET = re.compile(rb"h(.)|j(....)", re.DOTALL)

# The memo's places of names, and of the arguments of tensors and storages. The patterns find too
# many, in texts: a false match at worst takes the slow way.
_HIDDEN = (
    re.compile(rb"\n(?=q(.)|r(....))", re.DOTALL),
    re.compile(rb"t(?=(?:q(.)|r(....))[QR])", re.DOTALL),
)

# Tuples beside those of tensors: no hash of one of them goes deeper than this, and if all of them
# have one hash, that is this many keys to compare.
_MOST_TUPLES = 1000

# A longer one is left to what lets other threads run meanwhile.
_MOST_BYTES = 64 << 20


def is_plain(data: bytes) -> bool:
    """Whether a pickle is of the grammar above; nothing of it is run.

    A value that is referred to is neither a function nor a tuple that may have others in it: so
    functions are called at most, and nothing is hashed that is longer than the pickle.
    """
    if not data.startswith(_PROTOCOL_2) or not data.endswith(pickle.STOP):
        return False
    if len(data) > _MOST_BYTES:
        return False
    memo_bits = min(max(len(data).bit_length(), 16), 24)
    kind = "parameters" if b"\n_rebuild_parameter\n" in data else "parts"
    match = _tokens(memo_bits, kind).match
    hidden: set[int] = set()
    values: set[int] = set()
    tuples, at, end = 0, len(_PROTOCOL_2), len(data) - 1
    while at < end:
        if tokens := match(data, at, end):
            at = tokens.end()
            continue
        if get := _GET.match(data, at, end):
            values.add(_number(get))
            at = get.end()
            continue
        if (few := _tokens(memo_bits, "tuples").match(data, at, end)) and tuples < _MOST_TUPLES:
            tuples += 1
            at = few.end()
            continue
        opcode = data[at]
        at += 1
        if opcode == pickle.BINUNICODE[0]:  # longer than `_tokens` knows
            at += 4 + int.from_bytes(data[at : at + 4], "little")
        elif opcode in _TUPLES and tuples < _MOST_TUPLES:
            tuples += 1
        else:
            return False
        if put := _PUT.match(data, at, end):
            if opcode in _TUPLES:
                hidden.add(_number(put))
            if _number(put) >> memo_bits:
                return False
            at = put.end()
    if at != end:
        return False
    if not values:  # as in nearly all: nothing can be hidden behind one
        return True
    hidden.update(_number(place) for each in _HIDDEN for place in each.finditer(data))
    return hidden.isdisjoint(values)


def _number(place: re.Match[bytes]) -> int:
    return int.from_bytes(place[place.lastindex or 0], "little")


# Its references


def scan(data: bytes) -> Scan:
    """Read a pickle, without running any of it; 4 us a tensor, 12 if the pickle is not plain.

    Raises PickleError if it is damaged, cut off, or refers to something that is not a storage.
    """
    return scan_plain(data) or pickle_values.scan(data)


def scan_plain(data: bytes) -> Scan | None:
    """The value of a plain pickle; None if it is not plain."""
    if not is_plain(data):
        return None
    scanner = _Scanner(data)
    try:
        value = scanner.load()
    except pickle_values.WRONG:
        return None
    return Scan(value, scanner.globals, scanner.storages, [], len(data), True)


def _in_memory(data: bytes) -> io.BufferedReader:
    """A file that the unpickler can peek in; it would ask any other for each opcode."""
    return io.BufferedReader(io.BytesIO(data), min(len(data) + 1, 1 << 17))


class _Scanner(pickle.Unpickler):
    def __init__(self, data: bytes) -> None:
        super().__init__(_in_memory(data))
        self.globals: set[Global] = set()
        self.storages: dict[str, StorageRef] = {}

    def find_class(self, module: str, name: str) -> Any:
        found = Global(module, name)
        if found not in COMMON_GLOBALS:
            raise PickleError(f"{module}.{name}")
        self.globals.add(found)
        return _STUBS.get(found, found)

    def persistent_load(self, pid: Any) -> StorageRef:
        ref = storage_of(pid)
        self.storages.setdefault(ref.key, ref)
        return ref


def _tensor(
    storage: StorageRef,
    offset: int,
    size: object,
    stride: object,
    requires_grad: bool,
    hooks: object,
    metadata: object = None,
) -> PickledCall:
    return PickledCall(REBUILD, (storage, offset, size))


def _parameter(tensor: PickledCall, requires_grad: bool, hooks: object) -> PickledCall:
    return PickledCall(PARAMETER, (tensor, requires_grad))


# The objects of the names. A copy of an empty one takes no arguments, whatever the pickle has.
_STUBS: dict[Global, Any] = {
    ORDERED_DICT: OrderedDict[Any, Any]().copy,
    REBUILD: _tensor,
    PARAMETER: _parameter,
}


# The object


class UnknownTorchError(Exception):
    """This torch is not known here: torch has to unpickle."""


def unpickle(data: bytes, storages: Mapping[str, torch.Tensor], restore: Restore) -> Any:
    """The object of a pickle that was found plain; 15 us a tensor.

    `storages` has the bytes of all storages that it refers to, by key, on whatever device.
    `restore` is what torch makes of a storage and the location that it was saved from.

    Raises:
        UnknownTorchError: torch has no table of what it allows, or not all of this in it.
        Exception: A tensor cannot be as it says; torch's own unpickler tells how.
    """
    return _Unpickler(data, storages, restore).load()


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, storages: Mapping[str, torch.Tensor], restore: Restore) -> None:
        super().__init__(_in_memory(data), encoding="utf-8")
        self._storages = storages
        self._restore = restore
        self._loaded: dict[str, _Loaded] = {}
        self._dtypes: dict[Any, torch.dtype] = {torch.UntypedStorage: torch.uint8}
        self._allowed = _allowed()

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == REBUILD:
            return _rebuilt
        try:
            return self._allowed[f"{module}.{name}"]
        except KeyError:
            raise UnknownTorchError(f"torch does not allow {module}.{name}") from None

    def persistent_load(self, pid: Any) -> Any:
        _, kind, key, location, numel = pid
        known = self._loaded.get(key)
        if known is not None:
            return known
        if kind not in self._dtypes:
            self._dtypes[kind] = kind.dtype
        dtype, data = self._dtypes[kind], self._storages[key]
        if data.nbytes != numel * dtype.itemsize:
            raise ValueError(f"storage {key} has {data.nbytes} bytes, not {numel} of {dtype}")
        loaded = (self._restore(data.untyped_storage(), location), dtype)
        if data.nbytes:  # torch makes one that is empty anew each time
            self._loaded[key] = loaded
        return loaded


_Loaded = tuple[torch.UntypedStorage, torch.dtype]


def _rebuilt(
    loaded: _Loaded,
    offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
    hooks: OrderedDict[Any, Any],
    metadata: dict[str, bool] | None = None,
) -> torch.Tensor:
    """Do as `torch._utils._rebuild_tensor_v2`, which looks for a fake mode three times."""
    storage, dtype = loaded
    tensor = torch.empty((0,), dtype=dtype, device=storage.device)
    tensor.set_(storage, offset, size, stride)
    if requires_grad:
        tensor.requires_grad = True
    if metadata:
        _torch_private.set_tensor_metadata(tensor, metadata)
    tensor._backward_hooks = hooks
    return tensor


def _allowed() -> Mapping[str, Any]:
    """The objects that torch's own unpickler takes for the names that it allows."""
    unpickler = _torch_private.found("weights_only_unpickler")
    ask = getattr(unpickler, "_get_allowed_globals", None)
    if ask is None or _torch_private.found("set_tensor_metadata") is None:
        raise UnknownTorchError("no table of allowed globals")
    found: Mapping[str, Any] = ask()
    return found

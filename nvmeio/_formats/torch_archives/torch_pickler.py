"""torch.save's pickling: the observer of it, and a shorter way for plain tensors.

An object is pickled once, in the thread of its user, whose modes its own code must see (`Pickled`).
Torch's bytes around a pickle are made after that, in any thread, from an object whose pickling runs
no user's code (`Replay`): only then are torch's settings changed, which would reach a torch.save of
the object's own `__reduce__` too (skorch and others do that, into a buffer that they
return: it would be a buffer of holes).

A plain tensor (dense, in CPU memory, without hooks or attributes) takes torch's `__reduce_ex__` and
its queries of the storage some 25 us. `_quick` gives the same answer in 4. This is checked: before
its first use, some tensors of each kind are pickled in both ways, and if a byte differs, torch's
own way is used from then on (`agrees`). All else, and all of it where modes of torch or somebody's
registrations could have a say, is pickled by torch.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import io
import pickle
import threading
from collections import OrderedDict
from collections.abc import Iterator
from types import FunctionType
from typing import Any, NamedTuple

import torch

from nvmeio import _torch_private

_STANDARD = pickle.Pickler  # a program may put another one there later, which it wants used

Storages = dict[str, torch.UntypedStorage]
"""Storages by the key of their record."""


class Seen(NamedTuple):
    """The storages that were pickled, without a copy, and the size that each had then, by key."""

    storages: Storages
    nbytes: dict[str, int]


# The alignment is global in torch before 2.10 or so, of the context since. Two saves at once must
# not restore each other's value; no foreign code runs while this is held.
_aligning = threading.RLock()


def save_settings() -> Any:
    """The keeper of torch's alignment of storages; None in a torch that has no choice (2.6)."""
    try:
        from torch.utils.serialization import config
    except ImportError:
        return None
    settings = getattr(config, "save", None)
    return settings if hasattr(settings, "storage_alignment") else None


@contextlib.contextmanager
def aligned_storages(nbytes: int) -> Iterator[None]:
    """Align torch.save's storages, if torch has that setting.

    Not for a main thread: an interrupt could leave it so.
    """
    settings = save_settings()
    if settings is None:
        yield
        return
    with _aligning:
        before = settings.storage_alignment
        settings.storage_alignment = nbytes
        try:
            yield
        finally:
            settings.storage_alignment = before


class Pickled(Exception):
    """Ends a torch.save once the pickle is in the pickler's file."""

    def __init__(self, data: bytes) -> None:
        super().__init__()
        self.data = data


class PickleModule:
    """The user's pickle module, with a Pickler that notes in `seen` which storage each record is.

    With `ends`, it raises `Pickled` once the object was pickled.
    """

    def __init__(self, module: Any, seen: Seen, ends: bool) -> None:
        self._module = module
        self._seen = seen
        if module.Pickler is not _STANDARD or not _KINDS:
            self._pickler = _watching(module.Pickler, ends)
        else:  # made once: it takes as long as pickling ten tensors
            self._pickler = _usual() if ends else _watching(_quick(), ends)

    @property
    def Pickler(self) -> Any:
        _deriving.seen = self._seen
        return self._pickler

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class Replay:
    """A pickle module that "pickles" an object's storages as the pickle that it was given."""

    __name__ = "replay"

    def __init__(self, data: bytes) -> None:
        class Pickler:
            def __init__(self, file: Any, protocol: int) -> None:
                self._file = file

            def dump(self, storages: Storages) -> None:
                for key, storage in storages.items():
                    told: Any = self.persistent_id(storage)  # type: ignore[attr-defined]
                    if told[2] != key:
                        raise RuntimeError(f"storage {key} is numbered {told[2]} now")
                self._file.write(data)

        self.Pickler = Pickler


class _NoHooks:
    """An OrderedDict with nothing in it, one for each tensor, as torch makes them."""

    __slots__ = ()


# The types that a state is made of. The pickler asks torch for each object whether it is a storage:
# 19 times for a tensor, which was a third of all planning.
_NO_STORAGES = frozenset(
    {
        *(dict, list, tuple, set, str, bytes, int, float, bool, type(None), OrderedDict),
        *(torch.Tensor, torch.nn.Parameter, torch.Size, FunctionType, type),
        *(type(torch.FloatStorage), _NoHooks),
    }
)


# The observer for the pickler that torch derives next in this thread, as it asks for the base.
_deriving = threading.local()


@functools.cache
def _usual() -> Any:
    return _watching(_quick(), True)


def _watching(base: Any, ends: bool) -> Any:
    no_storages = _NO_STORAGES

    class Pickler(base):  # type: ignore[misc]
        def __init_subclass__(cls, **options: Any) -> None:
            """Torch derives its own pickler from this, and answers `persistent_id` in that."""
            super().__init_subclass__(**options)
            answer = cls.persistent_id
            storages, sizes = _deriving.seen

            def persistent_id(self: Any, obj: Any) -> Any:
                if type(obj) in no_storages:
                    return None
                told = answer(self, obj)
                if told is not None and told[2] not in storages:
                    if type(obj) is Typed:
                        storage, nbytes = obj._untyped_storage, obj._storage_nbytes
                    else:
                        is_untyped = isinstance(obj, torch.UntypedStorage)
                        storage = obj if is_untyped else obj._untyped_storage
                        nbytes = storage.nbytes()
                    sizes[told[2]] = nbytes
                    storages[told[2]] = storage
                return told

            cls.persistent_id = persistent_id

        def __init__(self, file: Any, *arguments: Any, **options: Any) -> None:
            super().__init__(file, *arguments, **options)
            self._file = file

        def dump(self, obj: Any) -> None:
            super().dump(obj)
            if ends:
                # The class lives on in a cycle; what it answers by knows all storages.
                del type(self).persistent_id
                raise Pickled(self._file.getvalue())

    return Pickler


# The shorter way


def _kinds() -> dict[torch.dtype, str]:
    """The name that torch has for storages of each dtype that `_quick` answers for; {} of none."""
    try:
        names: dict[torch.dtype, str] = _torch_private.storage_names()
        newer = set(_torch_private.new_dtypes())
        quantized = {dtype for dtype in names if "int" in str(dtype) and str(dtype)[6] == "q"}
        return {dtype: names[dtype] for dtype in names if dtype not in newer | quantized}
    except Exception:  # private to torch, all of it
        return {}


_KINDS = _kinds()
_REDUCE = torch.Tensor.__reduce_ex__, torch.nn.Parameter.__reduce_ex__


class Typed(torch.storage.TypedStorage):
    """A tensor's storage, as torch's `persistent_id` asks for it; nobody else sees it."""

    _kind: str
    _storage_nbytes: int
    _numel: int

    def __new__(cls, *args: Any) -> Typed:
        """Skip the base class's work, which takes 3 us."""
        return object.__new__(cls)

    def __init__(self, storage: torch.UntypedStorage, dtype: torch.dtype, kind: str) -> None:
        self._untyped_storage = storage
        self.dtype = dtype
        self._kind = kind
        self._storage_nbytes = storage.nbytes()
        self._numel = self._storage_nbytes // dtype.itemsize

    def _pickle_storage_type(self) -> str:
        return self._kind

    def _size(self) -> int:
        return self._numel


@functools.cache
def _quick() -> Any:
    """A Pickler that answers for plain tensors itself."""
    tensor_type, parameter_type, strided = torch.Tensor, torch.nn.Parameter, torch.strided
    rebuild = _torch_private.rebuild_tensor
    rebuild_parameter = _torch_private.rebuild_parameter
    kinds, metadata = _KINDS, _torch_private.tensor_metadata
    no_hooks = (OrderedDict, ())

    class Quick(_STANDARD):
        quick = False

        def reducer_override(self, obj: Any) -> Any:
            kind = type(obj)
            if kind is _NoHooks:
                return no_hooks
            if kind is tensor_type:
                if not self.quick or obj._backward_hooks or obj.__dict__ or not obj.is_cpu:
                    return NotImplemented
                dtype = obj.dtype
                name = kinds.get(dtype)
                if name is None or obj.layout is not strided or obj.is_nested or metadata(obj):
                    return NotImplemented
                storage = obj.untyped_storage()
                if not storage.data_ptr() and storage.nbytes():
                    return NotImplemented
                return rebuild, (
                    Typed(storage, dtype, name),
                    obj.storage_offset(),
                    tuple(obj.shape),
                    obj.stride(),
                    obj.requires_grad,
                    _NoHooks(),
                )
            if kind is parameter_type and self.quick and not obj.__dict__:
                return rebuild_parameter, (obj.data, obj.requires_grad, _NoHooks())
            return NotImplemented

        def dump(self, obj: Any) -> None:
            self.quick = _nobody_has_a_say() and agrees()
            super().dump(obj)

    return Quick


def _nobody_has_a_say() -> bool:
    """Whether tensors are pickled as torch does by itself, in this thread and moment."""
    settings = _torch_private.found("serialization_settings")
    taggers = _torch_private.found("location_taggers")
    return (
        _torch_private.function_stack_depth() == 0
        and _torch_private.dispatch_stack_depth() == 0
        and (torch.Tensor.__reduce_ex__, torch.nn.Parameter.__reduce_ex__) == _REDUCE
        and copyreg.dispatch_table.keys().isdisjoint(_TENSORS)
        and taggers[0][1] is _torch_private.cpu_tag
        and not getattr(settings, "skip_data", False)
        and not getattr(settings, "materialize_fake_tensors", False)
    )


_TENSORS = (torch.Tensor, torch.nn.Parameter, OrderedDict)


def agrees() -> bool:
    """Whether this torch pickles plain tensors as `_quick` does: tried on some, once."""
    try:
        return found_to_agree()
    except Exception:  # of this moment, as a lack of memory is: the next save tries again
        return False


@functools.cache
def found_to_agree() -> bool:
    told: Any = PickleModule(pickle, Seen({}, {}), ends=False)
    told.Pickler.dump = _dump_quick
    return _pickle_of(pickle) == _pickle_of(told)


def _dump_quick(self: Any, obj: Any) -> None:
    self.quick = True
    _STANDARD.dump(self, obj)


def _pickle_of(module: Any) -> bytes:
    """The pickle that torch.save makes of some plain tensors."""
    buffer = io.BytesIO()
    torch.save(_some_tensors(), buffer, module)
    buffer.seek(0)
    record: bytes = _torch_private.FileReader(buffer).get_record("data.pkl")
    return record


def _some_tensors() -> object:
    made = [torch.zeros(2, 3, dtype=dtype, device="cpu") for dtype in _KINDS]
    first = made[0]
    weight = torch.nn.Parameter(torch.zeros(4, 5, device="cpu"))
    frozen = torch.nn.Parameter(torch.zeros(3, device="cpu"), requires_grad=False)
    graded = torch.zeros(1, device="cpu", requires_grad=True)
    views = [first[1:], first.t(), first[:, 1], first.view(-1)]
    others = [torch.zeros(0, device="cpu"), torch.zeros((), device="cpu"), graded, frozen, first]
    return OrderedDict(a=made, b=views, c=[weight, weight, weight.data], d=others, storage="cpu")

"""The frame of a module's call, and the tensors that autograd keeps of it.

Locals hold the claims of a call, so these end with the frame.

torch runs ``always_call`` hooks for `Exception` only, and an interrupt can separate a hook before
the call from one behind it. So it is the call that is wrapped: `Module._call_impl`, within which
all hooks run, the user's own included, which thus find the weights that the forward finds.

A wrapper holds what it holds like this, and in no other way::

    held = take()
    try:
        return call(*args, **kwargs)
    finally:
        del held

An exception enters the ``finally`` and deletes the local without a moment at which a signal could
be served, and the end of the object does the rest in C: a `Claim` tells its owner, an `Undone`
undoes. If an interrupt still comes in between (before Python 3.11), the frame's end does.

While the hooks of `saving` are in force, a tensor that autograd wants to keep is looked at: if it
lies over a unit's memory, its place there is kept instead, and backward has the unit brought back.
Everything else is kept as it would be without, by the hooks around these (of a checkpoint, say).
"""

from __future__ import annotations

import functools
import operator
import threading
import weakref
from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeVar

import torch
import torch.utils.checkpoint

from nvmeio import _torch_private

Taken = ParamSpec("Taken")
Value = TypeVar("Value")

_CALL = "_call_impl"
_TOP_SAVED_HOOKS: Any = _torch_private.found("top_saved_hooks")
_GRAPH_TASK: Any = _torch_private.found("graph_task")


def wrap(module: torch.nn.Module, around: Callable[..., Any]) -> None:
    """Have a module's call go through `around(call, *args, **kwargs)`."""
    call = getattr(module, _CALL)

    @functools.wraps(call)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(call, *args, **kwargs)

    setattr(module, _CALL, wrapped)


def taking(
    take: Callable[[], object],
    origin_of: Callable[[int, int, int], Origin | None],
    finished: Callable[[Any], Any] | None = None,
) -> Callable[..., Any]:
    """Make what calls functions with something taken, of which autograd keeps places.

    A function that such a call checkpoints (`torch.utils.checkpoint`, either kind) runs again in
    backward, outside of the call: then the same is taken once more. The result of `take` gives it
    back when it ends; `origin_of` is as for `saving`; `finished` changes a result before that. The
    result is called with whether autograd keeps what is saved meanwhile, a function and its
    arguments.
    """

    def again(saves: bool, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        running: Any = None
        try:
            running = _Running(again)
            running.taken = take()  # stored without a call: no other frame ever has it
            kept = saving(origin_of) if saves else None
            try:
                found = call(*args, **kwargs)
                return found if finished is None else finished(found)
            finally:
                del kept
        finally:
            del running

    return again


class _Running:
    """Lives in a local of a call that has taken something, for as long as that is taken.

    Two calls that have one `again` have taken the same.
    """

    __slots__ = ("__weakref__", "again", "taken")

    def __init__(self, again: Callable[..., Any]) -> None:
        try:
            self.taken: object = None
            self.again = again
            _follow_checkpoints()
            _here.running = [ref for ref in _running() if ref() is not None]
            _here.running.append(weakref.ref(self))
        finally:
            del self  # an interrupt's traceback that is kept must not keep it alive


_here = threading.local()


def _running() -> list[weakref.ref[_Running]]:
    found: list[weakref.ref[_Running]] = getattr(_here, "running", [])
    return found


def _takings() -> list[Callable[..., Any]]:
    """The `again` of each call that runs on this thread, the outermost first."""
    return [running.again for running in (ref() for ref in _running()) if running is not None]


def _region(saves: bool, function: Callable[..., Any]) -> Callable[..., Any]:
    """A checkpointed function, which runs with what is taken around it now, whenever it runs."""
    wanted = _takings()

    def region(*args: Any, **kwargs: Any) -> Any:
        taken = _takings()  # in forward all of them
        call = function
        for again in reversed(wanted):
            if again not in taken:
                call = functools.partial(again, saves, call)
        return call(*args, **kwargs)

    return region if wanted else function


# The function that `torch.utils.checkpoint.checkpoint` looks up and calls each time.
_WITHOUT_REENTRANT = "_checkpoint_without_reentrant_generator"


@functools.cache
def _follow_checkpoints() -> None:
    """Have torch's checkpoints run functions with what was taken around them.

    Two internals of torch are wrapped: modules have imported `checkpoint` itself long since.
    """
    module: Any = torch.utils.checkpoint
    generator = getattr(module, _WITHOUT_REENTRANT, None)
    if generator is None:
        raise RuntimeError(
            f"torch {torch.__version__} has no torch.utils.checkpoint.{_WITHOUT_REENTRANT}: "
            "checkpointed parts of a module's forward would run again without its parameters. Use "
            "a torch "
            "that this nvmeio was tested with, or a newer nvmeio"
        )
    apply = module.CheckpointFunction.apply.__func__

    @functools.wraps(generator)
    def following(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        # Its own hooks keep what is saved, and count that: none of ours may come between.
        return generator(_region(False, function), *args, **kwargs)

    @functools.wraps(apply)
    def applied(cls: Any, function: Callable[..., Any], *args: Any) -> Any:
        return apply(cls, _region(True, function), *args)

    setattr(module, _WITHOUT_REENTRANT, following)
    module.CheckpointFunction.apply = classmethod(applied)


class Undone(list[Any]):
    """Undoes something when it is dropped; made by the functions below."""


class _PopsHooks(weakref.ref):  # type: ignore[type-arg]
    undo = staticmethod(_torch_private.pop_saved_hooks)


class _EnablesGrad(weakref.ref):  # type: ignore[type-arg]
    undo = staticmethod(functools.partial(_torch_private.set_grad_enabled, True))


class _DisablesGrad(weakref.ref):  # type: ignore[type-arg]
    undo = staticmethod(functools.partial(_torch_private.set_grad_enabled, False))


_undo = operator.methodcaller("undo")


def saved_tensors_hooks(pack: Callable[[Any], Any], unpack: Callable[[Any], Any]) -> Undone:
    """`torch.autograd.graph.saved_tensors_hooks`, in force while this object lives."""
    push = _torch_private.push_saved_hooks
    return _done(functools.partial(push, pack, unpack), _PopsHooks)


def saved_tensors_hooks_around() -> Any:
    """The hooks in force, or None. torch calls the innermost only, so ours call these."""
    ask = _TOP_SAVED_HOOKS
    return None if ask is None else ask(True)


def without_grad() -> Undone | None:
    """`torch.no_grad` while this object lives; None if autograd is off already."""
    if not torch.is_grad_enabled():
        return None
    return _done(functools.partial(_torch_private.set_grad_enabled, False), _EnablesGrad)


def with_grad() -> Undone | None:
    """`torch.enable_grad` while this object lives; None if autograd is on already."""
    if torch.is_grad_enabled():
        return None
    return _done(functools.partial(_torch_private.set_grad_enabled, True), _DisablesGrad)


def quietly(call: Callable[Taken, Value]) -> Callable[Taken, Value]:
    """The same function, called without autograd."""

    @functools.wraps(call)
    def quiet(*args: Taken.args, **kwargs: Taken.kwargs) -> Value:
        without = without_grad()
        try:
            return call(*args, **kwargs)
        finally:
            del without

    return quiet


def _done(do: Callable[[], object], mark: Any) -> Undone:
    """Call `do`, and have `mark` undo it when the result is dropped.

    Both happen in one call of a C function, so no signal is handled in between. The undoing (weak
    reference, `methodcaller`, torch) runs no Python either.
    """
    made = Undone()
    steps = (do, functools.partial(mark, made, _undo))
    try:
        made.extend(map(_called, steps))  # calls both, and keeps the mark for as long as `made`
        return made
    finally:
        del made, steps  # or this frame, in a traceback, would keep it


_called: Any = functools.partial.__call__


# Tensors that autograd keeps over memory that comes and goes


class Origin(Protocol):
    """The owner of the memory that a saved tensor lies over."""

    def memory(self) -> torch.Tensor:
        """The memory, read again if need be; it stays the same while its storage lives."""


class Place:
    """The place of a tensor in its storage."""

    __slots__ = ("_dtype", "_offset", "_stride", "size")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._dtype = tensor.dtype
        self._offset = int(tensor.storage_offset())
        self.size = tuple(tensor.shape)
        self._stride = tuple(tensor.stride())

    def over(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The same tensor over a storage with the same bytes."""
        found = torch.empty(0, dtype=self._dtype, device=storage.device)
        return found.set_(storage, self._offset, self.size, self._stride)


class _Elsewhere:
    """A saved tensor over memory that is given up meanwhile."""

    __slots__ = ("_origin", "_place", "_shown")

    def __init__(self, origin: Origin, tensor: torch.Tensor) -> None:
        self._origin = origin
        self._place = Place(tensor)
        self._shown: torch.Tensor | None = None  # has the version of what was given out, alone

    def get(self) -> torch.Tensor:
        """The tensor; raises if an earlier backward changed what it got."""
        if self._shown is not None:
            check_unchanged(self._shown, 0, self._place.size)
        found = self._place.over(self._origin.memory().untyped_storage())
        if self._shown is None:
            self._shown = torch.empty(0, dtype=found.dtype, device=found.device)
        shown = self._shown.detach()
        shown.data = found
        return shown


class Kept:
    """A tensor, kept as autograd does without hooks.

    Without its history, which holds this object: a cycle through C++ is never freed. And torch
    looks for changes only if there are no hooks, so `get` does.
    """

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor if tensor.is_leaf else tensor.detach()
        self._version = tensor._version

    def get(self) -> torch.Tensor:
        """The tensor; raises if it was changed."""
        check_unchanged(self._tensor, self._version, tuple(self._tensor.shape))
        return self._tensor


class _Foreign:
    """A tensor that the hooks around ours keep."""

    __slots__ = ("_unpack", "_value")

    def __init__(self, hooks: Any, tensor: torch.Tensor) -> None:
        pack, self._unpack = hooks
        self._value = pack(tensor)

    def get(self) -> torch.Tensor:
        theirs: torch.Tensor = self._unpack(self._value)
        return theirs


def kept(tensor: torch.Tensor, around: Any) -> Kept | _Foreign:
    """Keep a tensor as it would be kept without our hooks, by the hooks around ours, if any."""
    return Kept(tensor) if around is None else _Foreign(around, tensor)


def check_unchanged(tensor: torch.Tensor, version: int, shape: tuple[int, ...]) -> None:
    """Raise if a tensor was changed in place since it was kept, as torch does without hooks.

    `tensor` may be one that shares its version counter; `shape` is the kept one's, for the message.
    """
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: [{str(tensor.dtype)[6:]} {list(shape)}] is at version {tensor._version}; "
            f"expected version {version} instead. Hint: enable anomaly detection to find the "
            "operation that failed to compute its gradient, with "
            "torch.autograd.set_detect_anomaly(True)."
        )


def saving(origin_of: Callable[[int, int, int], Origin | None]) -> Undone:
    """Have autograd keep places instead of memory, for as long as the result lives.

    `origin_of` is called for each tensor with the address of its storage, its byte offset there,
    and the bytes from its first element to its last; for None the tensor is kept as it is.
    """
    around = saved_tensors_hooks_around()

    def pack(tensor: torch.Tensor) -> Any:
        if has_memory(tensor):
            offset = int(tensor.storage_offset())
            address = tensor.untyped_storage().data_ptr()
            itemsize = tensor.dtype.itemsize
            origin = origin_of(address, offset * itemsize, _extent(tensor) * itemsize)
            if origin is not None:
                return _Elsewhere(origin, tensor)
        return kept(tensor, around)

    return saved_tensors_hooks(pack, unpack)


def _extent(tensor: torch.Tensor) -> int:
    """How many elements lie from its first to its last."""
    if not tensor.numel():
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((int(size) - 1) * int(stride) for size, stride in steps)


def unpack(saved: Any) -> torch.Tensor:
    """Give backward what was kept."""
    found: torch.Tensor = saved.get()
    return found


def version_of(tensor: torch.Tensor) -> int:
    """Changes in place as torch counts them; 0 where it does not."""
    return 0 if tensor.is_inference() else tensor._version


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether it is a plain tensor over memory with an address."""
    plain = type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    return plain and tensor.layout is torch.strided and not tensor.is_meta


def in_backward() -> bool:
    """Whether this thread is in the middle of a backward pass."""
    return _GRAPH_TASK is not None and bool(_GRAPH_TASK() != -1)

"""How a module's call is framed: what it holds is held by locals, and ends with the frame.

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
undoes. Where an interrupt comes in between all the same (before Python 3.11), the frame's end does.
"""

from __future__ import annotations

import functools
import operator
import threading
import weakref
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
import torch.utils.checkpoint

Taken = ParamSpec("Taken")
Value = TypeVar("Value")

_CALL = "_call_impl"


def wrap(module: torch.nn.Module, around: Callable[..., Any]) -> None:
    """Have a module's call go through `around(call, *args, **kwargs)`."""
    call = getattr(module, _CALL)

    @functools.wraps(call)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(call, *args, **kwargs)

    setattr(module, _CALL, wrapped)


class Running:
    """Lives in a local of a call that has taken something, for as long as that is taken.

    A function that the call checkpoints (`torch.utils.checkpoint`, either kind) runs again in
    backward, outside of the call: then `again` takes it once more.

    Args:
        taken: What ends with this object.
        again: Called with whether autograd keeps what is saved meanwhile, a function and its
            arguments. Two calls that have one `again` have taken the same.
    """

    __slots__ = ("__weakref__", "again", "taken")

    def __init__(self, taken: object, again: Callable[..., Any]) -> None:
        self.taken = taken
        self.again = again
        _follow_checkpoints()
        _here.running = [ref for ref in _running() if ref() is not None]
        _here.running.append(weakref.ref(self))


_here = threading.local()


def _running() -> list[weakref.ref[Running]]:
    found: list[weakref.ref[Running]] = getattr(_here, "running", [])
    return found


def _takings() -> list[Callable[..., Any]]:
    """What has been taken by calls that run on this thread, from the outermost on."""
    return [running.again for running in (ref() for ref in _running()) if running is not None]


def _region(saves: bool, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is checkpointed: what is taken around it now is taken whenever it runs."""
    wanted = _takings()

    def region(*args: Any, **kwargs: Any) -> Any:
        taken = _takings()  # in forward all of them
        call = function
        for again in reversed(wanted):
            if again not in taken:
                call = functools.partial(again, saves, call)
        return call(*args, **kwargs)

    return region if wanted else function


# What `torch.utils.checkpoint.checkpoint` calls, and looks up each time.
_WITHOUT_REENTRANT = "_checkpoint_without_reentrant_generator"


@functools.cache
def _follow_checkpoints() -> None:
    """From now on a function that is checkpointed keeps what was taken around it.

    The function itself is what modules have imported long since, so it stays as it is.
    """
    module: Any = torch.utils.checkpoint
    generator = getattr(module, _WITHOUT_REENTRANT, None)
    if generator is None:
        raise RuntimeError(
            f"torch {torch.__version__} has no torch.utils.checkpoint.{_WITHOUT_REENTRANT}: what a "
            "module checkpoints in its forward would run again without its parameters. Use a torch "
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
    """Something done whose end undoes it; made by the functions below."""


class _PopsHooks(weakref.ref):  # type: ignore[type-arg]
    undo = staticmethod(torch._C._autograd._pop_saved_tensors_default_hooks)


class _EnablesGrad(weakref.ref):  # type: ignore[type-arg]
    undo = staticmethod(functools.partial(torch._C._set_grad_enabled, True))


class _DisablesGrad(weakref.ref):  # type: ignore[type-arg]
    undo = staticmethod(functools.partial(torch._C._set_grad_enabled, False))


_undo = operator.methodcaller("undo")


def saved_tensors_hooks(pack: Callable[[Any], Any], unpack: Callable[[Any], Any]) -> Undone:
    """`torch.autograd.graph.saved_tensors_hooks`, in force while this object lives."""
    push = torch._C._autograd._push_saved_tensors_default_hooks
    return _done(functools.partial(push, pack, unpack), _PopsHooks)


def saved_tensors_hooks_around() -> Any:
    """The pair in force, or None: only the innermost is called, so that it calls those around."""
    ask: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return None if ask is None else ask(True)


def without_grad() -> Undone | None:
    """`torch.no_grad` while this object lives; None where that is so already."""
    if not torch.is_grad_enabled():
        return None
    return _done(functools.partial(torch._C._set_grad_enabled, False), _EnablesGrad)


def with_grad() -> Undone | None:
    """`torch.enable_grad` while this object lives; None where that is so already."""
    if torch.is_grad_enabled():
        return None
    return _done(functools.partial(torch._C._set_grad_enabled, True), _DisablesGrad)


def quietly(call: Callable[Taken, Value]) -> Callable[Taken, Value]:
    """The same, without autograd."""

    @functools.wraps(call)
    def quiet(*args: Taken.args, **kwargs: Taken.kwargs) -> Value:
        without = without_grad()
        try:
            return call(*args, **kwargs)
        finally:
            del without

    return quiet


def _done(do: Callable[[], object], mark: Any) -> Undone:
    """Do it, and have it undone when the result is gone.

    Both happen in one call of a C function, so that no signal is served in between; so does the
    undoing, whose chain of calls (weak reference, `methodcaller`, torch) has no Python in it.
    """
    made = Undone()
    try:
        made.extend(map(_called, (do, functools.partial(mark, made, _undo))))
        return made
    finally:
        del made


_called: Any = functools.partial.__call__

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
import weakref
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

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


_CHECKPOINT = "_gradient_checkpointing_func"


class Checkpoint:
    """A checkpointing function whose region goes through `around`, both times.

    Attributes:
        function: It, without that.
    """

    def __init__(self, function: Callable[..., Any], around: Callable[..., Any]) -> None:
        self.function = function
        self._around = around

    def __call__(self, region: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.function(functools.partial(self._around, region), *args, **kwargs)


class Checkpointing:
    """The modules within one that checkpoint their own forward, as transformers' layers do.

    What backward runs again is then the bare forward, which no wrapper of the call is around.

    Args:
        module: It, and those within it, are looked at.
        around: Called with the region that is checkpointed and its arguments.
    """

    def __init__(self, module: torch.nn.Module, around: Callable[..., Any]) -> None:
        # It is set when checkpointing is switched on, which is later, as a rule.
        self._found = [m for m in module.modules() if hasattr(m, "gradient_checkpointing")]
        self._around = around

    def prepare(self) -> None:
        """Before each call: have their regions go through `around`."""
        for module in self._found:
            function = getattr(module, _CHECKPOINT, None)
            if function is not None and not isinstance(function, Checkpoint):
                setattr(module, _CHECKPOINT, Checkpoint(function, self._around))


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

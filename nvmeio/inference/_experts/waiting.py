"""Computing with the experts that are there while others are still read.

A fused weight whose experts have not all arrived is shown as an `ArrivingWeight`. Kernels that take
one expert after the other get each as soon as it is there: a loop over ``weight[expert]`` in its
own order, and a grouped product with those that are there first, which changes no sum, since each
group has rows of its own in the result. Whatever else looks at the weight waits for all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from nvmeio._threads.owner import OwnerThread
from nvmeio._torch_private import DisableTorchFunctionSubclass, make_subclass
from nvmeio.inference._experts.arrivals import Arrival
from nvmeio.inference._experts.sets import STAGES
from nvmeio.inference._plan.units import Target
from nvmeio.inference._stream.stand_ins import Shown


class Arriving:
    """The experts of a call that have not arrived; the thread that computes waits for them."""

    def __init__(self, arrivals: dict[int, Arrival], owner: OwnerThread) -> None:
        self._arrivals = arrivals
        self._owner = owner
        self._late = list(arrivals.values())
        self.waited_s = 0.0

    def wait(self) -> None:
        """Block until all are there; raises what kept one away."""
        for expert in self._arrivals:
            self.wait_for(expert)

    def wait_for(self, expert: int) -> None:
        """Block until one is there: not at all, if it is not awaited."""
        arrival = self._arrivals.get(expert)
        if arrival is None or arrival.right:
            return
        began = time.perf_counter()
        place = self._late.index(arrival)
        # Those that convert begin in turn. The owner begins them: an interrupt of this thread could
        # lose a read that has begun, and that would write to pages which another expert has then.
        late = [each for each in self._late[place : place + STAGES] if not each.begun]
        if late:
            self._owner.call(_begin, late)
        arrival.wait()
        self.waited_s += time.perf_counter() - began

    def is_there(self, expert: int) -> bool:
        arrival = self._arrivals.get(expert)
        return arrival is None or arrival.right or arrival.done()


def _begin(arrivals: Sequence[Arrival]) -> None:
    for arrival in arrivals:
        arrival.begin()


class ArrivingWeight(Shown):
    """A fused weight of which some experts are on their way; `turned`: its matrices transposed."""

    arriving: Arriving

    @classmethod
    def over(cls, shown: torch.Tensor, arriving: Arriving) -> ArrivingWeight:
        """The same parameter, with experts that are waited for when they are looked at."""
        made: Any = make_subclass(cls, shown.data, shown.requires_grad)
        made.__dict__.update(shown.__dict__)
        made.arriving = arriving
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        with DisableTorchFunctionSubclass():
            if name in _LOOKS_AT_NONE:
                answer = func(*args, **kwargs)
                if not isinstance(answer, torch.Tensor):
                    return answer
                # A view, such as `weight.mT`: computing with it waits for nothing.
            special = _SPECIAL.get(name)
            if special is not None:
                found = special(*args, **kwargs)
                if found is not NotImplemented:
                    return found
            for weight in _arriving_in((args, kwargs)):
                weight.arriving.wait()
            return func(*args, **kwargs)


class _Turned(ArrivingWeight):
    """Such a weight with its matrices transposed, for a grouped product."""


# Attributes and questions about shape, which need no element. Properties are called `__get__`; one
# that gives a tensor waits anyway.
_LOOKS_AT_NONE = {
    *("__get__", "__len__", "size", "dim", "ndimension", "numel", "element_size", "stride"),
    *("storage_offset", "data_ptr", "is_contiguous", "is_floating_point", "is_complex"),
}


def _arriving_in(value: Any) -> list[ArrivingWeight]:
    if isinstance(value, ArrivingWeight):
        return [value]
    if isinstance(value, (list, tuple)):
        return [weight for part in value for weight in _arriving_in(part)]
    if isinstance(value, dict):
        return [weight for part in value.values() for weight in _arriving_in(part)]
    return []


def _getitem(weight: Any, index: Any) -> Any:
    """One expert."""
    if not isinstance(weight, ArrivingWeight) or type(weight) is _Turned:
        return NotImplemented
    if isinstance(index, torch.Tensor):
        if index.dim() or index.dtype is torch.bool:
            return NotImplemented
        expert = int(index)
    elif isinstance(index, int) and not isinstance(index, bool):
        expert = index
    else:
        return NotImplemented
    weight.arriving.wait_for(expert % len(weight))
    return weight.as_subclass(torch.Tensor)[index]


def _transpose(weight: Any, dim0: int, dim1: int) -> Any:
    plain = isinstance(weight, ArrivingWeight) and weight.dim() == 3
    if not plain or {dim0 % 3, dim1 % 3} != {1, 2}:
        return NotImplemented
    return _Turned.over(weight.as_subclass(torch.Tensor).transpose(dim0, dim1), weight.arriving)


def _grouped(input: Any, mat_b: Any, *, offs: Any = None, **rest: Any) -> Any:
    """A grouped product as torch makes it on a CPU, group by group: those that are there first."""
    plain = isinstance(mat_b, ArrivingWeight) and mat_b.dim() == 3 and type(input) is torch.Tensor
    if not plain or input.dim() != 2 or offs is None or any(v is not None for v in rest.values()):
        return NotImplemented
    if input.dtype is not mat_b.dtype or torch.is_autocast_enabled("cpu"):
        return NotImplemented
    weight, arriving = mat_b.as_subclass(torch.Tensor), mat_b.arriving
    out = input.new_zeros(len(input), weight.shape[-1])
    groups, start = [], 0
    for expert, end in enumerate(offs.tolist()):
        if end > start:
            groups.append((expert, start, end))
            start = end
    late = []
    for group in groups:
        if arriving.is_there(group[0]):
            _multiply(arriving, input, weight, out, *group)
        else:
            late.append(group)
    for group in late:
        _multiply(arriving, input, weight, out, *group)
    return out


def _multiply(
    arriving: Arriving,
    input: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    expert: int,
    start: int,
    end: int,
) -> None:
    arriving.wait_for(expert)
    torch.mm(input[start:end], weight[expert], out=out[start:end])


_SPECIAL: dict[str, Callable[..., Any]] = {
    "__getitem__": _getitem,
    "transpose": _transpose,
    **dict.fromkeys(("grouped_mm", "_grouped_mm"), _grouped),
}


def show_arriving(targets: Sequence[Target], shown: list[torch.Tensor], arriving: Arriving) -> bool:
    """Have modules show weights that are waited for, in the place of what they show.

    False if some cannot be (those that stay packed, and those of experts that are modules of their
    own): all experts are to be waited for then.
    """
    modules = {target.module for target in targets}
    if len(modules) > 1 or any(type(each) is not Shown for each in shown):
        return False
    for number, target in enumerate(targets):
        shown[number] = ArrivingWeight.over(shown[number], arriving)
        target.module._parameters[target.attribute] = shown[number]  # type: ignore[assignment]
    return True

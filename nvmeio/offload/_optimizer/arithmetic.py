"""The arithmetic of a step: torch's own optimizer, handed some pieces as if they were the model.

A trial step on small tensors shows which state an optimizer keeps.
"""

from __future__ import annotations

import functools
import inspect
import math
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from nvmeio._memory import devices
from nvmeio.errors import an
from nvmeio.offload._swap_files.subgroups import WEIGHTS, Kind, Piece
from nvmeio.offload._swap_files.tensors import laid, strides_of, view


@dataclass(eq=False)
class Work:
    """A piece on its turn.

    The optimizer steps on `weights`, whose `grad` is set; `slot` holds the piece's state, which
    must have the strides `alike`, None for whatever it has. `strides` are of state that this step
    makes.
    """

    piece: Piece
    group: int
    weights: torch.nn.Parameter
    slot: torch.Tensor
    alike: tuple[int, ...] | None = None
    strides: dict[str, tuple[int, ...]] = field(default_factory=dict)


class Stepper:
    """Steps pieces with an optimizer class.

    Raises TypeError if the class cannot be swapped, and what the class says to its arguments.
    """

    def __init__(
        self, optimizer_class: Any, arguments: dict[str, Any], device: torch.device
    ) -> None:
        check_class(optimizer_class)
        _check_steps_alone(optimizer_class, arguments)
        self._device = device
        self.optimizer_class = optimizer_class
        self._arguments = arguments
        # One parameter, so that the class checks its arguments and tells its defaults.
        self._engine = _made_small(optimizer_class, arguments)
        self.defaults: dict[str, Any] = dict(self._engine.defaults)
        self._probed: dict[Any, tuple[Any, ...]] = {}

    def kinds(
        self, group: dict[str, Any], number: int, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> tuple[Kind, ...]:
        """The state tensors of a parameter of group `number` that are worth swapping.

        `dtype` is the one that the step computes in. TypeError says why the optimizer cannot be
        probed.
        """
        self._check_fused(group, dtype)
        key = (number, dtype, None if self.splits(dtype) else shape)
        if key not in self._probed:
            self._probed[key] = self._probe(group, dtype, shape)
        return self._probed[key]

    def _probe(
        self, group: dict[str, Any], dtype: torch.dtype, shape: tuple[int, ...]
    ) -> tuple[Kind, ...]:
        splittable = self.splits(dtype)  # then the state has the parameter's shape, whatever it is
        asked = (3,) if splittable else shape
        failed: Exception | None = None
        # On the meta device a tensor of any size costs nothing; some optimizers look at values, and
        # others step on a device only (``capturable=True``).
        places = [torch.device(each) for each in (["cpu"] if splittable else ["meta", "cpu"])]
        for place in [*places, *([] if self._device.type == "cpu" else [self._device])]:
            try:
                parameter = torch.nn.Parameter(torch.zeros(asked, dtype=dtype, device=place))
                parameter.grad = torch.zeros_like(parameter)
                stepped = self._constructed([{**group, "params": [parameter]}])
                stepped.step()
            except Exception as error:
                failed = error
                continue
            kinds = []
            for name, value in stepped.state[parameter].items():
                if not isinstance(value, torch.Tensor) or value.dim() == 0:
                    continue  # a step counter: stays in memory
                same = tuple(value.shape) == asked
                if same or value.numel() >= 64:
                    kinds.append(Kind(name, value.dtype, None if same else tuple(value.shape)))
            return tuple(kinds)
        raise TypeError(
            f"{self.optimizer_class.__name__} could not be tried on a {dtype} parameter of shape "
            f"{shape}: {failed}"
        ) from failed

    def splits(self, dtype: torch.dtype) -> bool:
        """Whether a parameter may be stepped in parts with the same result."""
        name = self.optimizer_class.__name__
        own = getattr(torch.optim, name, None) is self.optimizer_class
        return own and name in _ELEMENTWISE and dtype in _SPLIT_DTYPES

    def leaves_zeros_alone(self, group: Mapping[str, Any], dtype: torch.dtype) -> bool:
        """Whether a step changes nothing but its count where all of a gradient is 0.

        Not a bit of weights and state: so nothing that decays (moments, averages, weights), and no
        `maximize`, where weights of -0 become +0.
        """
        if not self.splits(dtype) or dtype.is_complex or group["weight_decay"] or group["maximize"]:
            return False
        if not math.isfinite(group["lr"]):
            return False
        name = self.optimizer_class.__name__
        return (name == "SGD" and not group["momentum"]) or (name == "Adagrad" and group["eps"] > 0)

    def _check_fused(self, options: Mapping[str, Any], dtype: torch.dtype) -> None:
        """Refuse (ValueError) a fused step in which torch's kernel changes no weights."""
        if (
            options.get("fused")
            and self._device.type == "cpu"
            and issubclass(self.optimizer_class, torch.optim.SGD)
            and not _fused_sgd_steps(dtype)
        ):
            raise ValueError(
                f"fused=True of {self.optimizer_class.__name__} leaves {str(dtype)[6:]} weights on "
                f"the CPU as they are in torch {torch.__version__}, without a word: leave out "
                "fused, or step on master weights (master_dtype=torch.float32)"
            )

    def step(
        self, works: Sequence[Work], groups: Sequence[dict[str, Any]], small: Sequence[Any]
    ) -> dict[int, dict[str, Any]]:
        """Step pieces; their state is in their slots before and after.

        `small` is their state outside of the slots, by number, and not changed; returns that after
        the step.
        """
        found: dict[int, dict[str, Any]] = {}
        for number, dtype in {(work.group, work.weights.dtype) for work in works}:
            self._check_fused(groups[number], dtype)  # they may have other options by now
        begun = [work for work in works if work.piece.begun]
        if begun:
            self._engine.param_groups = _groups_of(begun, groups)
            self._engine.state = defaultdict(dict)
            try:
                for work in begun:
                    self._engine.state[work.weights] = _state(work, small[work.piece.number])
                self._engine.step()
                _collect(begun, self._engine.state, found)
            finally:  # it keeps no memory of a step, nor of one that failed
                self._engine.state = defaultdict(dict)
                self._engine.param_groups = []
        fresh = [work for work in works if not work.piece.begun]
        if fresh:
            # Some classes make the state when they are constructed, others in the first step.
            made = self._constructed(_groups_of(fresh, groups))
            made.step()
            _collect(fresh, made.state, found)
        return found

    def _constructed(self, groups: list[dict[str, Any]]) -> Any:
        return self.optimizer_class(groups, **self._arguments)


def _made_small(optimizer_class: Any, arguments: dict[str, Any]) -> Any:
    try:
        return optimizer_class([torch.nn.Parameter(torch.zeros(1))], **arguments)
    except Exception as refused:
        try:  # some take matrices only (Muon)
            return optimizer_class([torch.nn.Parameter(torch.zeros(1, 1))], **arguments)
        except Exception:
            raise refused from None


def _groups_of(works: Sequence[Work], groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    members: dict[int, list[torch.nn.Parameter]] = {}
    for work in works:
        members.setdefault(work.group, []).append(work.weights)
    return [
        {**{k: v for k, v in groups[number].items() if k != "param_names"}, "params": weights}
        for number, weights in members.items()
    ]


def placed(small: dict[str, Any], group: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """A piece's state outside of the slots, moved to where a step on a device wants it.

    As in torch's `load_state_dict`, step counters stay on the host, unless the class counts on the
    device.
    """
    counts_there = group.get("capturable") or group.get("fused")
    found = {}
    for name, value in small.items():
        if isinstance(value, torch.Tensor):
            on_host = device.type == "cpu" or (name == "step" and not counts_there)
            where = torch.device("cpu") if on_host else device
            if devices.device_of(value) != where:
                value = devices.moved(value, where)
        found[name] = value
    return found


def _state(work: Work, small: dict[str, Any]) -> dict[str, Any]:
    state = dict(small)
    for name in small:
        if isinstance(state[name], torch.Tensor):
            state[name] = state[name].clone()
    for name, span in work.piece.spans.items():
        if name != WEIGHTS:
            there = view(work.slot, span)
            of_each = work.alike is not None and there.shape == work.weights.shape
            state[name] = laid(there, work.alike or ()) if of_each else there
    return state


def _collect(works: Sequence[Work], state: Any, found: dict[int, dict[str, Any]]) -> None:
    """Bring the optimizer's new state into the slots; the rest stays outside of them."""
    for work in works:
        after, address = dict(state[work.weights]), work.slot.data_ptr()
        for name, span in work.piece.spans.items():
            if name == WEIGHTS:
                continue
            value = after.pop(name, None)
            if not work.piece.begun:
                work.strides[name] = () if value is None else strides_of(value)
                span = span._replace(strides=work.strides[name])
            if value is None:
                view(work.slot, span).zero_()
            elif value.data_ptr() != address + span.offset:
                view(work.slot, span).copy_(value)
        found[work.piece.number] = after


# These work element by element, so a step over parts of a parameter equals a step over the whole,
# bit for bit (in fp32 and fp64). A subclass may not.
_ELEMENTWISE = {"ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam"}
_ELEMENTWISE |= {"RMSprop", "Rprop", "SGD"}
_SPLIT_DTYPES = (torch.float32, torch.float64)


def check_class(optimizer_class: Any) -> None:
    """Raise TypeError unless it is an optimizer class without closure and sparse gradients."""
    if isinstance(optimizer_class, torch.optim.Optimizer):
        name = type(optimizer_class).__name__
        raise TypeError(
            f"this is {an(name)}, made already: pass the class, {name}, and its arguments by name; "
            "or swapped_like(optimizer, swap_dir), which takes over its groups and state"
        )
    if not (
        isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)
    ):
        raise TypeError(
            f"optimizer_class must be a torch.optim.Optimizer class, not {optimizer_class!r:.80}"
        )
    if issubclass(optimizer_class, (torch.optim.LBFGS, torch.optim.SparseAdam)):
        why = (
            "evaluates the model several times a step through a closure"
            if issubclass(optimizer_class, torch.optim.LBFGS)
            else "works on sparse gradients"
        )
        raise TypeError(f"{optimizer_class.__name__} {why}: its state cannot be swapped")
    step = inspect.signature(optimizer_class.step).parameters.get("closure")
    if step is not None and step.default is inspect.Parameter.empty:
        raise TypeError(f"{optimizer_class.__name__}.step needs a closure, which cannot be swapped")


def _check_steps_alone(optimizer_class: Any, arguments: dict[str, Any]) -> None:
    """Refuse (TypeError) a class that keeps count by itself, or steps parameters by each other's.

    Steps of some parameters at a time would then be others than one of all.
    """
    if getattr(torch.optim, optimizer_class.__name__, None) is optimizer_class:
        return

    def stepped(*numbers: int, seed: int = 0) -> tuple[list[torch.Tensor], bool]:
        torch.default_generator.manual_seed(seed)
        params = [torch.nn.Parameter(torch.full((8, 8), 1.0 + number)) for number in numbers]
        made, seen = optimizer_class(params, **arguments), []
        for _ in range(2):
            for number, param in zip(numbers, params, strict=True):
                param.grad = torch.linspace(-1, 1, 64).view(8, 8) * 10**number
            made.step()
            values = [*made.param_groups[0].items(), *vars(made).items()]
            seen.append([(name, _counted(value)) for name, value in values])
        return [param.detach() for param in params], seen[0] == seen[1]

    with torch.random.fork_rng(devices=[]):
        try:
            (both, counts_nothing), (again, _) = stepped(0, 1), stepped(0, 1, seed=1)
            alone = [*stepped(0)[0], *stepped(1)[0]]
        except Exception:  # not with such parameters: nothing is known
            return
    is_random = not all(map(torch.equal, both, again))
    if not counts_nothing or not (is_random or all(map(torch.equal, both, alone))):
        raise TypeError(
            f"{optimizer_class.__name__} changes its own options or draws from a generator of its "
            "own in a step, or steps a parameter otherwise if it has others: its state cannot be "
            "swapped"
        )


def _counted(value: Any) -> Any:
    """The part of an attribute that counts steps or draws random numbers; None if there is none."""
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, random.Random):
        return value.getstate()
    numpy_bits = getattr(value, "bit_generator", None) or getattr(value, "_bit_generator", None)
    if numpy_bits is not None:  # of a Generator, of a RandomState
        return repr(numpy_bits.state)
    return value if isinstance(value, (int, float, str)) else None


@functools.cache
def _fused_sgd_steps(dtype: torch.dtype) -> bool:
    """Whether every weight changes, also those that vector instructions step many of at once."""
    weights = torch.nn.Parameter(torch.ones(256, dtype=dtype))
    weights.grad = torch.ones_like(weights)
    try:
        torch.optim.SGD([weights], lr=0.5, fused=True).step()
    except RuntimeError:  # torch says so itself
        return True
    return bool((weights.detach() == 0.5).all())

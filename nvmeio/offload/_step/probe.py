"""What state an optimizer keeps: found by letting it step on something small."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

import torch

from nvmeio.offload._swap_files.subgroups import Kind

# These work element by element, so a step over parts of a parameter equals a step over the whole,
# bit for bit (in fp32 and fp64). A subclass may not.
_ELEMENTWISE = frozenset(
    {
        "ASGD",
        "Adadelta",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SGD",
    }
)
_SPLIT_DTYPES = (torch.float32, torch.float64)


def check_class(optimizer_class: Any) -> None:
    """Refuse what cannot be swapped.

    Raises:
        TypeError: It is no optimizer class, or one that needs a closure or sparse gradients.
    """
    if isinstance(optimizer_class, torch.optim.Optimizer):
        name = type(optimizer_class).__name__
        raise TypeError(
            f"this is a {name}, made already: pass the class, {name}, and its arguments by name; "
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


def check_fused(
    optimizer_class: Any, options: Mapping[str, Any], dtype: torch.dtype, device: torch.device
) -> None:
    """Refuse a fused step of which torch's kernel leaves the weights as they are.

    Raises:
        ValueError: It is one.
    """
    if (
        options.get("fused")
        and device.type == "cpu"
        and issubclass(optimizer_class, torch.optim.SGD)
        and not _fused_sgd_steps(dtype)
    ):
        raise ValueError(
            f"fused=True of {optimizer_class.__name__} leaves {str(dtype)[6:]} weights on the CPU "
            f"as they are in torch {torch.__version__}, without a word: leave out fused, or step "
            "on master weights (master_dtype=torch.float32)"
        )


@functools.cache
def _fused_sgd_steps(dtype: torch.dtype) -> bool:
    """Whether each weight changes, those too that vector instructions step many of at once."""
    weights = torch.nn.Parameter(torch.ones(256, dtype=dtype))
    weights.grad = torch.ones_like(weights)
    try:
        torch.optim.SGD([weights], lr=0.5, fused=True).step()
    except RuntimeError:  # torch says so itself
        return True
    return bool((weights.detach() == 0.5).all())


def splits(optimizer_class: type, dtype: torch.dtype) -> bool:
    """Whether a parameter may be stepped in parts with the same result."""
    own = getattr(torch.optim, optimizer_class.__name__, None) is optimizer_class
    return own and optimizer_class.__name__ in _ELEMENTWISE and dtype in _SPLIT_DTYPES


def kinds(
    optimizer_class: Any,
    options: dict[str, Any],
    dtype: torch.dtype,
    shape: tuple[int, ...],
    splittable: bool,
    device: torch.device,
) -> tuple[Kind, ...]:
    """The state tensors that a parameter will have and that are worth swapping.

    Args:
        optimizer_class: The class.
        options: Its arguments and the group's options.
        dtype: That the step computes in.
        shape: Of the parameter.
        splittable: The state has the parameter's shape, whatever that is.
        device: Where it steps: tried where others do not do (``capturable=True``).

    Raises:
        TypeError: The optimizer cannot be probed; says why.
    """
    asked = (3,) if splittable else shape
    failed: Exception | None = None
    # On the meta device a tensor of any size costs nothing; some optimizers look at values.
    names = ["cpu"] if splittable else ["meta", "cpu"]
    for where in [*map(torch.device, names), *([] if device.type == "cpu" else [device])]:
        try:
            state = _step_once(optimizer_class, options, dtype, asked, where)
        except Exception as error:
            failed = error
            continue
        found = []
        for name, value in state.items():
            if not isinstance(value, torch.Tensor) or value.dim() == 0:
                continue  # a step counter: stays in memory
            same = tuple(value.shape) == asked
            if same or value.numel() >= 64:
                found.append(Kind(name, value.dtype, None if same else tuple(value.shape)))
        return tuple(found)
    raise TypeError(
        f"{optimizer_class.__name__} could not be tried on a {dtype} parameter of shape {shape}: "
        f"{failed}"
    ) from failed


def _step_once(
    optimizer_class: Any,
    options: dict[str, Any],
    dtype: torch.dtype,
    shape: tuple[int, ...],
    device: torch.device,
) -> dict[str, Any]:
    parameter = torch.nn.Parameter(torch.zeros(shape, dtype=dtype, device=device))
    parameter.grad = torch.zeros_like(parameter)
    made = optimizer_class([parameter], **options)
    made.step()
    return dict(made.state[parameter])

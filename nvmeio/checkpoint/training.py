"""The parts of a training under names: their state in one dictionary, and back into all of them."""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from nvmeio.errors import an, nearest

logger = logging.getLogger("nvmeio")

RANDOM = "random_states"


class Training:
    """What `Checkpointer.resume` was given.

    Args:
        parts: Objects with `state_dict` and `load_state_dict`; None for those there are not.

    Raises:
        TypeError: One is no such object; says which.
    """

    def __init__(self, parts: Mapping[str, Any]) -> None:
        self.parts = {name: part for name, part in parts.items() if part is not None}
        if RANDOM in self.parts:
            raise TypeError(f"{RANDOM} cannot be the name of a part: random states go under it")
        for name, part in self.parts.items():
            if not all(callable(getattr(part, v, None)) for v in ("state_dict", "load_state_dict")):
                raise TypeError(
                    f"{name} is {an(type(part).__name__)}, which has no state_dict() and "
                    "load_state_dict(): give an object that has both (of data loaders torchdata's "
                    "StatefulDataLoader), or leave it out, and bring it back by the step"
                )

    def state(self) -> dict[str, Any]:
        """The states of all parts, and of the random generators of this process."""
        return {**{n: part.state_dict() for n, part in self.parts.items()}, RANDOM: _random()}

    def load(self, state: Any, where: str, strict: bool) -> None:
        """Bring the parts back to a state.

        Args:
            state: That of a checkpoint.
            where: Which, for messages.
            strict: Refuse one that has other parts.

        Raises:
            ValueError: It has others, or a part does not take its state. Names them.
        """
        if not isinstance(state, Mapping) or RANDOM not in state:
            raise ValueError(
                f"{where} was not made from training_state(): restore() gives what was saved"
            )
        missing = [name for name in self.parts if name not in state]
        extra = [name for name in state if name not in self.parts and name != RANDOM]
        if strict and (missing or extra):
            told = [f"holds no {name!r}{nearest(name, extra)}" for name in missing]
            told += [f"holds {name!r}, which was not given to resume" for name in extra]
            raise ValueError(
                f"{where} {'; '.join(told)}: give the parts that were saved, or strict=False, "
                "which brings back those that both have"
            )
        for name, part in self.parts.items():
            if name in missing:
                logger.warning("%s holds no %r: it begins anew", where, name)
                continue
            try:
                part.load_state_dict(state[name])
            except Exception as failed:
                raise ValueError(
                    f"{where}: {name} does not take its state, perhaps because it is made "
                    f"otherwise than when it was saved: {failed}"
                ) from failed
        _restore_random(state[RANDOM], where)


def _random() -> dict[str, Any]:
    """The states of torch's, Python's and numpy's generators; of CUDA's if it is in use."""
    version, numbers, gauss = random.getstate()
    found: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": (version, torch.tensor(numbers), gauss),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        found["numpy"] = (kind, torch.tensor(keys.tolist()), *rest)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found["cuda"] = torch.cuda.get_rng_state_all()
    return found


def _restore_random(states: Mapping[str, Any], where: str) -> None:
    version, numbers, gauss = states["python"]
    setting: dict[str, Callable[[], object]] = {
        "python": lambda: random.setstate((version, tuple(numbers.tolist()), gauss)),
        "torch": lambda: torch.set_rng_state(states["torch"].cpu()),
    }
    if "numpy" in states:
        import numpy

        kind, keys, *rest = states["numpy"]
        setting["numpy"] = lambda: numpy.random.set_state(
            (kind, numpy.asarray(keys.tolist(), dtype="uint32"), *rest)
        )
    if "cuda" in states:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count == len(states["cuda"]):
            setting["cuda"] = lambda: torch.cuda.set_rng_state_all(
                [each.cpu() for each in states["cuda"]]
            )
        else:
            logger.warning(
                "%s has the random states of %d CUDA devices, and there are %d: they begin anew",
                where,
                len(states["cuda"]),
                count,
            )
    for restore in setting.values():
        restore()

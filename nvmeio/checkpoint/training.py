"""The parts of a training under names: their state in one dictionary, and back into all of them."""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from nvmeio.errors import IntegrityError, an, nearest

logger = logging.getLogger("nvmeio")

RANDOM = "random_states"


class Training:
    """The parts that `Checkpointer.resume` was given.

    Args:
        parts: Objects with `state_dict` and `load_state_dict`; None for those there are not.

    Raises:
        TypeError: One is not such an object; says which.
    """

    def __init__(self, parts: Mapping[str, Any]) -> None:
        self.parts = {name: part for name, part in parts.items() if part is not None}
        if RANDOM in self.parts:
            raise TypeError(f"{RANDOM} cannot be the name of a part: random states go under it")
        for name, part in self.parts.items():
            if not all(callable(getattr(part, v, None)) for v in ("state_dict", "load_state_dict")):
                raise TypeError(
                    f"{name} is {an(type(part).__name__)}, which has no state_dict() and "
                    "load_state_dict(): give an object that has both (for data loaders, "
                    "torchdata's StatefulDataLoader), or leave it out, and derive its state from "
                    "the step"
                )

    def state(self) -> dict[str, Any]:
        """The states of all parts, and of the random generators of this process."""
        return {**{n: part.state_dict() for n, part in self.parts.items()}, RANDOM: _random()}

    def load(self, state: Any, where: str, strict: bool) -> None:
        """Bring the parts back to a state.

        Args:
            state: The state of a checkpoint.
            where: The checkpoint's name, for messages.
            strict: Refuse one that has other parts.

        Raises:
            ValueError: It has others, or a part does not take its state. Names them.
        """
        if not isinstance(state, Mapping) or RANDOM not in state:
            raise ValueError(
                f"{where} was not made from training_state(): restore() returns the saved state"
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
                logger.warning("%s holds no %r: it was not restored", where, name)
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
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": (version, torch.tensor(numbers), gauss),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state = numpy.random.get_state(legacy=False)
        if state["bit_generator"] == "MT19937":
            keys, position = torch.tensor(state["state"]["key"].tolist()), state["state"]["pos"]
            states["numpy"] = ("MT19937", keys, position, state["has_gauss"], state["gauss"])
        else:  # numpy.random.set_bit_generator was called
            states["numpy"] = _without_arrays(state)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def _without_arrays(value: Any) -> Any:
    """A generator's state as what ``weights_only=True`` loads: arrays become lists."""
    if isinstance(value, dict):
        return {str(name): _without_arrays(part) for name, part in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


def _restore_random(states: Any, where: str) -> None:
    try:
        restores = _restores_of(states, where)
        for restore in restores:
            restore()
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, RuntimeError) as wrong:
        raise IntegrityError(
            f"{where}: its random states are damaged, or of another version: "
            f"{type(wrong).__name__}: {wrong}. Go back to another step, or restore() it and load "
            "the parts yourself",
            expected="what training_state() gives",
            found=f"{type(wrong).__name__}: {wrong}",
        ) from wrong


def _restores_of(states: Mapping[str, Any], where: str) -> list[Callable[[], object]]:
    """Functions that restore each generator; nothing has changed before the first is called."""
    version, numbers, gauss = states["python"]
    python, of_torch = (version, tuple(numbers.tolist()), gauss), states["torch"].cpu()
    restores: list[Callable[[], object]] = [
        lambda: random.setstate(python),
        lambda: torch.set_rng_state(of_torch),
    ]
    if "numpy" in states:
        restores.append(_restore_of_numpy(states["numpy"], where))
    if "cuda" in states:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count == len(states["cuda"]):
            devices = [state.cpu() for state in states["cuda"]]
            restores.append(lambda: torch.cuda.set_rng_state_all(devices))
        else:
            logger.warning(
                "%s has the random states of %d CUDA devices, but there are %d: their random "
                "states were not restored",
                where,
                len(states["cuda"]),
                count,
            )
    return restores


def _restore_of_numpy(state: Any, where: str) -> Callable[[], object]:
    import numpy

    kind = state["bit_generator"] if isinstance(state, dict) else state[0]
    now = numpy.random.get_state(legacy=False)["bit_generator"]
    if kind != now:
        logger.warning(
            "%s has the state of numpy's %s, and numpy.random uses %s: its state was not restored. "
            "Call "
            "numpy.random.set_bit_generator(numpy.random.%s()) before resume",
            where,
            kind,
            now,
            kind,
        )
        return lambda: None
    if isinstance(state, dict):
        return lambda: numpy.random.set_state(state)
    _, keys, *rest = state
    numbers = numpy.asarray(keys.tolist(), dtype="uint32")
    return lambda: numpy.random.set_state((kind, numbers, *rest))

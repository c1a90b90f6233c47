"""The settings that are tried: a grid, the default always among them."""

from __future__ import annotations

import itertools
import json
import os
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nvmeio._storage.untrusted import SETTINGS_BYTES, read_small
from nvmeio.cli._terminal import binary_size, counted, parse_size
from nvmeio.engines.base import Options
from nvmeio.handle import MOST

DEFAULT = Options()
Grid = dict[str, list[Any]]

# ds_nvme_tune's names for the same parameters; sequential_requests is the opposite.
_ALIASES = {"io_parallel": "intra_op_parallelism", "num_threads": "intra_op_parallelism"}


def default_grid() -> Grid:
    """360 settings, with up to 4 lanes; 480, with up to 8, on machines with 8 cores and more."""
    cores = len(os.sched_getaffinity(0))
    return {
        "block_size": [256 << 10, 512 << 10, 1 << 20, 2 << 20, 4 << 20, 8 << 20],
        "queue_depth": [8, 16, 32, 64, 128],
        "single_submit": [False, True],
        "overlap_events": [True, False],
        "intra_op_parallelism": [n for n in (1, 2, 4, 8) if n <= max(4, cores)],
    }


def load_grid(path: Path) -> Grid:
    """A grid from a file of ds_nvme_tune's --sweep_config, or in today's names.

    Parameters that it does not name keep their default.

    Raises:
        ValueError: It is not such a file; says what is wrong with it.
    """
    try:
        whole = json.loads(read_small(path, SETTINGS_BYTES))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(whole, dict):
        raise ValueError(f"{path} must hold one object of lists, such as {_EXAMPLE}")
    grid: Grid = {name: [value] for name, value in DEFAULT._asdict().items()}
    for key, values in whole.items():
        name = _ALIASES.get(key, key)
        opposite = name == "sequential_requests"
        name = "overlap_events" if opposite else name
        if name not in grid:
            raise ValueError(f"{path}: {key!r} is not a parameter; take one of {', '.join(grid)}")
        if not isinstance(values, list) or not values:
            raise ValueError(f"{path}: {key} must be a list with something in it, not {values!r}")
        parsed = [_value(path, key, name, value) for value in values]
        grid[name] = list(
            dict.fromkeys(not v for v in parsed) if opposite else dict.fromkeys(parsed)
        )
    return grid


_EXAMPLE = '{"block_size": ["1M", "8M"], "queue_depth": [32, 128]}'


def _value(path: Path, key: str, name: str, value: Any) -> Any:
    if isinstance(getattr(DEFAULT, name), bool):
        if isinstance(value, bool):
            return value
        raise ValueError(f"{path}: {key} holds {value!r}, which is neither true nor false")
    if isinstance(value, str):
        try:
            value = parse_size(value)
        except ValueError as error:
            raise ValueError(f"{path}: {key}: {error}") from error
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST[name]:
        raise ValueError(f"{path}: {key} holds {value!r}, not a number from 1 to {MOST[name]}")
    if name == "block_size" and value % 4096:
        raise ValueError(f"{path}: {key} holds {value}, which is not a multiple of 4096")
    return value


def settings(grid: Grid, seed: int = 0) -> list[Options]:
    """All settings of a grid, in an order of which every beginning is a fair sample.

    First the default, then those that differ from it in one parameter, then all others shuffled: a
    search that has time for a part only looks at the most telling part.
    """
    every = [Options(*values) for values in itertools.product(*(grid[f] for f in Options._fields))]
    random.Random(seed).shuffle(every)
    every.sort(key=lambda setting: min(distance(setting), 2))
    return [DEFAULT, *(setting for setting in every if setting != DEFAULT)]


def distance(setting: Options) -> int:
    """In how many parameters a setting differs from the default."""
    return sum(a != b for a, b in zip(setting, DEFAULT, strict=True))


def in_words(setting: Options) -> str:
    """A setting for people."""
    words = [
        binary_size(setting.block_size),
        f"depth {setting.queue_depth}",
        counted(setting.intra_op_parallelism, "lane"),
    ]
    words += ["single submit"] if setting.single_submit else []
    words += [] if setting.overlap_events else ["no overlap"]
    return ", ".join(words)


def levels(grid: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    """The values of each parameter with the default's, in order: the axes of charts."""
    return {name: sorted({*of, getattr(DEFAULT, name)}) for name, of in grid.items()}


def value_in_words(name: str, value: Any) -> str:
    """A parameter's value for people."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return binary_size(value) if name == "block_size" else str(value)

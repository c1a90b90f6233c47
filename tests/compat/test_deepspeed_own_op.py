"""The table of docs/deepspeed.md: every difference from DeepSpeed's own op, asked of both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from _deepspeed_support import (
    COMPILE_LIMIT_S,
    TIME_LIMIT_S,
    Run,
    needs_deepspeed,
    needs_its_own_op,
)

ABORT = {"dies": "SIGABRT"}
ERROR, SHORT = {"raises": "TransferError"}, {"raises": "ShortTransferError"}

# Case of _deepspeed_facts.py: what DeepSpeed 0.19.8 does, what nvmeio does.
DIFFERENT: dict[str, tuple[Any, Any]] = {
    "wait_with_nothing_pending": (ABORT, 0),
    "missing_file": (-1, ERROR),
    "missing_directory": (-1, ERROR),
    "buffer_larger_than_the_file": (ABORT, SHORT),
    "read_of_a_part_of_the_file": (ABORT, [0, True]),
    "size_no_multiple_of_the_parallelism": (-1, 1),
    "write_of_a_size_no_multiple_of_512": ([1, False], [1, True]),
    "read_from_an_unaligned_offset": ([1, False], [1, True]),
    "read_into_page_locked_memory_at_an_odd_address": ([1, False], [1, True]),
    "write_of_ordinary_memory": ([0, False], [0, True]),
    "write_of_a_matrix_in_ordinary_memory": ({"raises": "RuntimeError"}, [1, True]),
    "file_size_limit": (1, ERROR),
    "read_into_a_parameter": (ABORT, [1, True]),
    "handle_dropped_with_a_transfer_pending": (ABORT, "dropped"),
    "locked_memory_limit": (ABORT, {"raises": "OSError"}),
    "memcpy_of_a_matrix": ([0, 20], [0, 600]),
    "switches_as_strings": ({"raises": "TypeError"}, False),
}
THE_SAME: dict[str, Any] = {
    "settings": [[1 << 20, 128, False, False], [1, 512], [1 << 16, 16, True, True], [2, 1024]],
    "returned": [1, 1, 0, 0, 2, 0, 0, 3, 0, 0, 0, 1, 0, 0],
    "descriptor": [0, 0, 2, 8192, True],
    "string_as_a_file_name_is_needed": {"raises": "TypeError"},
}
COMPARED = ("pinned", "public_methods")


def facts(directory: Path, on_nvmeio: bool, limit_s: float) -> dict[str, Any]:
    result = directory / "facts.json"
    Run("facts", result, directory, on_nvmeio=on_nvmeio).finish(limit_s)
    found: dict[str, Any] = json.loads(result.read_text())
    return found


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return facts(tmp_path_factory.mktemp("ours"), True, TIME_LIMIT_S)


@pytest.fixture(scope="module")
def its_own(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return facts(tmp_path_factory.mktemp("own"), False, COMPILE_LIMIT_S)


@needs_deepspeed
def test_nvmeio(ours: dict[str, Any], direct_path: Path) -> None:
    expected = {**THE_SAME, **{name: nvmeio for name, (_, nvmeio) in DIFFERENT.items()}}
    assert {name: ours[name] for name in expected} == expected


@needs_its_own_op
@pytest.mark.timeout(2 * COMPILE_LIMIT_S)
def test_deepspeeds_own_op(its_own: dict[str, Any], direct_path: Path) -> None:
    expected = {**THE_SAME, **{name: own for name, (own, _) in DIFFERENT.items()}}
    assert {name: its_own[name] for name in expected} == expected


@needs_its_own_op
@pytest.mark.timeout(2 * COMPILE_LIMIT_S)
@pytest.mark.parametrize("case", COMPARED)
def test_both_do_the_same(its_own: dict[str, Any], ours: dict[str, Any], case: str) -> None:
    assert ours[case] == its_own[case]


@needs_its_own_op
@pytest.mark.timeout(2 * COMPILE_LIMIT_S)
def test_every_case_is_accounted_for(its_own: dict[str, Any], ours: dict[str, Any]) -> None:
    assert set(ours) == set(its_own) == {*DIFFERENT, *THE_SAME, *COMPARED}

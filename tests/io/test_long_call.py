"""What is told of a long call: how far it is, a line when it is complete, a range in a profile."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.profiler import profile

from nvmeio._io.long_call import LongCall, completed, profiled

Told = list[tuple[str, int, int]]


def test_progress_is_told_of_what_is_expected_and_moved() -> None:
    told: Told = []
    call = LongCall("load", "/there/model.pt", lambda *event: told.append(event))
    call.expect(100)
    call.moved(60)
    assert call.finished is not None
    call.finished(SimpleNamespace(nbytes=40))  # type: ignore[arg-type]
    assert told == [("load model.pt", done, 100) for done in (0, 60, 100)]


def test_what_was_in_vain_is_not_counted() -> None:
    told: Told = []
    call = LongCall("save", "x", lambda *event: told.append(event))
    for _ in range(2):
        call.again()
        call.expect(10)
        call.moved(4)
    assert told == 2 * [("save x", 0, 10), ("save x", 4, 10)]


def test_nothing_is_called_for_an_operation_where_nobody_asks() -> None:
    assert LongCall("load", "x").finished is None


def test_progress_that_is_not_callable_is_refused() -> None:
    with pytest.raises(TypeError, match="rich_bar"):
        LongCall("load", "x", True)  # type: ignore[arg-type]


def test_one_line_tells_of_what_is_complete(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "nvmeio"):
        completed("loaded", Path("/there/model.pt"), 3_000_000_000, 1.5)
    [record] = caplog.records
    said = "loaded /there/model.pt: 3000000000 bytes in 1.500 s, 2.00 GB/s"
    assert (record.levelno, record.getMessage()) == (logging.INFO, said)
    facts: Any = vars(record)["nvmeio"]
    assert facts == {"done": "loaded", "nbytes": 3_000_000_000, "seconds": 1.5}


def test_what_fails_is_not_logged_as_complete(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.INFO, "nvmeio"),
        pytest.raises(KeyError),
        LongCall("load", "x") as call,
    ):
        call.expect(10)
        raise KeyError
    assert caplog.records == []


def test_a_range_is_in_the_profile_of_the_thread_that_calls() -> None:
    with profile() as found, LongCall("load", "x"), profiled("wait", "layer.3"):
        math.sqrt(2)
    names = [event.name for event in found.events()]
    assert names.count("nvmeio::load") == 1
    assert names.count("nvmeio::wait layer.3") == 1


def test_without_a_profile_there_is_no_range() -> None:
    assert profiled("wait", "a") is profiled("wait", "b")

"""Completion queues of the engines in Python, and requests that move from one to another."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from interrupting import everywhere

from nvmeio.engines._queued import EventfdQueue
from nvmeio.engines.base import CompletionQueue, Opcode, Options, Transfer
from nvmeio.engines.threads import ThreadsEngine


@pytest.fixture
def engine() -> Iterator[ThreadsEngine]:
    made = ThreadsEngine()
    made.start(Options())
    yield made
    made.stop()
    made.join()


@pytest.fixture
def queues(engine: ThreadsEngine) -> Iterator[list[CompletionQueue]]:
    made = [engine.open_completion_queue() for _ in range(2)]
    yield made
    for each in made:
        each.close()


@pytest.fixture(params=["one", "batch"])
def done(
    request: pytest.FixtureRequest,
    engine: ThreadsEngine,
    queues: list[CompletionQueue],
    tmp_path: Path,
) -> Iterator[Any]:
    """Makes a request that is done and was not reaped; its token is 7."""
    with open(tmp_path / "file", "wb") as file:
        sync = Transfer(Opcode.FSYNC, -1, file.fileno(), 0, 0, 0, 0, 0, 1, 1, False, False)

        def make() -> Any:
            made: Any
            if request.param == "one":
                made = engine.prepare(queues[0], 7, sync)
            else:
                made = engine.prepare_batch(queues[0], 7, [sync, sync])
            made.start()
            assert made.wait(60)
            return made

        yield make


def test_completion_follows_a_move_to_another_queue(
    done: Any, queues: list[CompletionQueue]
) -> None:
    first, second = queues
    moving = done()
    assert first.peek() == [7]
    moving.move(second)
    assert (first.peek(), second.peek()) == ([], [7])
    moving.move(second)
    assert second.reap() == [7]
    moving.move(first)  # it was reaped: nobody hears of it once more
    assert (first.peek(), second.peek()) == ([], [])


def test_a_move_that_is_interrupted_anywhere_can_be_made_again(
    done: Any, queues: list[CompletionQueue]
) -> None:
    """Reported at the new queue in the end; the old one may tell of it as well."""
    first, second = queues
    moving = [done()]
    places = 0
    for where in everywhere(lambda: moving[0].move(second)):
        moving[0].move(second)
        assert second.peek() == [7], where
        second.acknowledge([7])
        first.acknowledge([7])
        assert (first.peek(), second.peek()) == ([], []), where
        moving[0] = done()
        places += 1
    assert places > 3


def test_an_acknowledgement_that_is_interrupted_anywhere_can_be_made_again(
    done: Any, queues: list[CompletionQueue]
) -> None:
    done()
    for where in everywhere(lambda: queues[0].acknowledge([7])):
        queues[0].acknowledge([7])
        assert queues[0].peek() == [], where
        done()


def test_an_interrupted_close_closes_nothing_of_others() -> None:
    """The number of a closed descriptor was kept, and closed again when another file had it."""
    queues = [EventfdQueue(threading.Lock())]
    tried = 0
    for where in everywhere(lambda: queues[0].close()):
        others = [os.eventfd(0) for _ in range(2)]  # one has its number, if that is free
        queues[:] = [EventfdQueue(threading.Lock())]
        for other in others:
            assert os.readlink(f"/proc/self/fd/{other}").endswith("[eventfd]"), where
            os.close(other)
        tried += 1
    assert tried >= 2

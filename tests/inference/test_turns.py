"""Whose turn it is: who waits for it is told of its end, whatever that is."""

from __future__ import annotations

import pytest

from nvmeio._threads.owner import OwnerThread
from nvmeio.errors import ClosedError
from nvmeio.inference._stream.turns import Turns


def test_closing_while_the_next_one_is_on_its_way_refuses_all_who_wait() -> None:
    """Its lock was open already: "release unlocked lock", and who waited behind it did for ever."""
    owner = OwnerThread("nvmeio-test-turns")
    turns = Turns(owner)
    try:
        owner.call(turns.take, "first", None)
        second = owner.call(turns.take, "second", None)
        third = owner.call(turns.take, "third", None)
        owner.call(turns.end, "first")
        owner.call(turns.close)
        for caller, waiting in (("second", second), ("third", third)):
            assert waiting is not None
            assert waiting.gate.acquire(timeout=60)
            with pytest.raises(ClosedError, match="closed"):
                owner.call(turns.take, caller, waiting)
    finally:
        owner.close()

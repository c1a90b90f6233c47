"""What comes next, and what may go: round and round, or there and back."""

from __future__ import annotations

from itertools import islice

from nvmeio._residency.order import Cyclic, ThereAndBack


def test_round_guesses_the_order_given_and_comes_round() -> None:
    order = Cyclic("abcd")
    assert list(order.upcoming()) == []
    order.note("c")
    assert list(order.upcoming()) == ["d", "a", "b"]


def test_round_learns_what_followed() -> None:
    order = Cyclic("abcd")
    for unit in "acb":
        order.note(unit)
    order.note("a")
    assert list(order.upcoming()) == ["c", "b"]


def test_round_forgets_where_a_pass_ended() -> None:
    order = Cyclic("abc")
    order.note("a")
    order.forget()
    order.note("c")
    order.note("a")
    assert list(order.upcoming()) == ["b", "c"]  # and not "c", as if that had followed


def test_there_and_back_turns() -> None:
    order: ThereAndBack[str] = ThereAndBack(lambda unit: True)
    for unit in "abcd":
        order.note(unit)
    assert list(order.upcoming()) == []
    order.note("d", backward=True)
    assert list(islice(order.upcoming(), 2)) == ["c", "b"]
    order.note("b", backward=True)
    assert list(order.may_go("abcd", "a")) == ["d", "c"]
    assert list(order.may_go("abcd", None)) == ["d", "c", "a", "b"]


def test_a_unit_of_several_places_tells_nothing() -> None:
    order: ThereAndBack[str] = ThereAndBack(lambda unit: unit != "tied")
    for unit in ("tied", "a", "b", "c"):
        order.note(unit)
    order.note("a")
    order.note("tied")
    assert list(order.upcoming()) == ["b", "c"]

"""What comes next, and what may go: round and round, or there and back."""

from __future__ import annotations

from itertools import islice

from nvmeio._residency.order import Cyclic, Remembered, ThereAndBack


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


def remembered(units: str = "abcd") -> Remembered[str]:
    order: Remembered[str] = Remembered(units, lambda unit: unit != "stays")
    order.recording = True
    return order


def test_forward_as_given_then_back_then_round_is_the_guess() -> None:
    order = remembered()
    for unit in "abc":
        order.note(unit)
    assert list(order.upcoming()) == ["c", "d", "b", "a"]
    order.note("d")
    order.note("d", backward=True)
    assert list(order.upcoming()) == ["d", "c", "b", "a"]
    for unit in "cba":
        order.note(unit, backward=True)
    assert list(order.upcoming()) == ["a", "b", "c", "d"]


def test_a_region_that_is_computed_again_within_backward_is_learned() -> None:
    order = remembered()
    for _ in range(2):
        for unit in "abcd":
            order.note(unit)
        for unit in "cddcabba":
            order.note(unit, backward=True)
    for unit in "abcd":
        order.note(unit)
    order.note("c", backward=True)
    assert list(order.upcoming())[:2] == ["c", "d"]
    order.note("d", backward=True)
    assert list(order.upcoming()) == ["d", "c", "a", "b"]


def test_evaluation_does_not_change_the_order_of_training() -> None:
    order = remembered()
    for unit in "abcd":
        order.note(unit)
    for unit in "dcba":
        order.note(unit, backward=True)
    order.recording = False
    for unit in "badcba":
        order.note(unit)
    order.recording = True
    for unit in "abcd":
        order.note(unit)
    assert list(order.upcoming())[:2] == ["d", "c"]


def test_what_is_needed_last_goes_first() -> None:
    order = remembered()
    for unit in "abc":
        order.note(unit)
    assert list(order.may_go("abcd", None)) == ["a", "b", "d", "c"]
    assert list(order.may_go("abc", "d")) == ["a", "b"]
    assert list(order.may_go("bcd", "a")) == []
    assert list(order.may_go(["stays", "a"], None)) == ["a"]


def test_nothing_follows_from_a_pass_that_was_given_up() -> None:
    order = remembered()
    order.note("a")
    order.note("c")
    order.forget()
    assert list(order.upcoming()) == []
    order.note("a")
    assert list(order.upcoming())[:2] == ["a", "c"]

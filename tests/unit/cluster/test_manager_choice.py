"""In which order an agent asks managers, and how long it waits."""

from __future__ import annotations

from fireflyer.base.units import MS, SECOND
from fireflyer.cluster.core.manager_choice import MAX_MANAGERS, ManagerChoice


def test_the_one_that_answers_comes_first_then_those_that_were_named() -> None:
    choice = ManagerChoice()
    assert choice.addresses(["b", "c"], ["a", "b"]) == ["b", "c", "a"]
    choice.answers("a")
    assert choice.addresses(["b", "c"], ["a", "b"]) == ["a", "b", "c"]


def test_the_one_that_was_lost_comes_last_until_another_answers() -> None:
    choice = ManagerChoice()
    choice.answers("a")
    choice.lost("a")
    assert choice.addresses(["a", "b"], ["a"]) == ["b", "a"]
    choice.answers("b")
    assert choice.addresses(["a", "b"], ["a"]) == ["b", "a"]
    choice.lost("b")
    assert choice.addresses(["a", "b"], ["a"]) == ["a", "b"]


def test_of_too_many_managers_the_lost_one_is_still_asked() -> None:
    choice = ManagerChoice()
    choice.lost("m0")
    found = choice.addresses([f"m{number}" for number in range(100)], [])
    assert len(found) == MAX_MANAGERS
    assert found[-1] == "m0"


def test_pauses_double_up_to_a_limit_and_begin_anew_when_somebody_answers() -> None:
    choice = ManagerChoice()
    assert [choice.pause_ns(heard=False) // MS for _ in range(6)] == [400, 800, 1600, 3200, 5000, 5000]
    choice.answers("a")
    assert choice.pause_ns(heard=False) == 400 * MS
    assert choice.pause_ns(heard=True) == 200 * MS
    assert choice.pause_ns(heard=False) < SECOND

"""A machine in the calling thread: events in order, never entered twice, and an error leaves it usable."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from fireflyer.runtime.driver import InlineDriver


class Echo:
    """Answers an event n with the effects n and n + 100."""

    def __init__(self) -> None:
        self.inside = False
        self.handled: list[tuple[int, int]] = []

    def handle(self, now_ns: int, event: int) -> Sequence[int]:
        assert not self.inside
        self.inside = True
        self.handled.append((now_ns, event))
        self.inside = False
        return event, event + 100


def test_effects_of_an_event_are_performed_before_what_they_feed_is_handled() -> None:
    machine, performed = Echo(), list[int]()

    def perform(effect: int) -> None:
        performed.append(effect)
        if effect in (1, 2):
            driver.feed(effect + 1)
            assert len(machine.handled) == effect, "the machine is not entered while its effects are performed"

    driver = InlineDriver(machine, perform, now_ns=lambda: 7)
    driver.feed(1)
    assert performed == [1, 101, 2, 102, 3, 103]
    assert machine.handled == [(7, 1), (7, 2), (7, 3)]


def test_a_time_that_the_caller_knows_is_not_asked_for_again() -> None:
    machine = Echo()
    InlineDriver(machine, lambda effect: None, now_ns=lambda: 1 // 0).feed(5, 9)
    assert machine.handled == [(9, 5)]


def test_an_error_reaches_the_caller_and_the_next_event_is_handled() -> None:
    machine, performed = Echo(), list[int]()

    def perform(effect: int) -> None:
        if effect == 1:
            driver.feed(4)
            raise OSError("disk")
        performed.append(effect)

    driver = InlineDriver(machine, perform)
    with pytest.raises(OSError, match="disk"):
        driver.feed(1)
    driver.feed(5)
    assert performed == [4, 104, 5, 105]

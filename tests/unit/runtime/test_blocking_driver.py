"""A machine whose effects block: one after the other, each answered before the next."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from fireflyer.runtime.driver import BlockingDriver


class Countdown:
    """Answers n with the effects n - 1 and -n, until n is 0; negative numbers end there."""

    def __init__(self) -> None:
        self.handled: list[tuple[int, int]] = []

    def handle(self, now_ns: int, event: int) -> Sequence[int]:
        self.handled.append((now_ns, event))
        return (event - 1, -event) if event > 0 else ()


def test_effects_are_performed_in_order_and_each_is_answered_before_the_next() -> None:
    machine, performed = Countdown(), list[int]()

    def perform(effect: int) -> int:
        performed.append(effect)
        return effect

    driver = BlockingDriver(machine, perform, now_ns=lambda: 7)
    driver.post(2)
    assert performed == []
    assert driver.step()
    assert performed == [1]
    driver.run()
    assert performed == [1, -2, 0, -1]
    assert machine.handled == [(7, event) for event in (2, 1, -2, 0, -1)]
    assert not driver.step()


def test_an_error_of_an_effect_reaches_the_caller() -> None:
    driver = BlockingDriver(Countdown(), lambda effect: effect // 0)
    driver.post(1)
    with pytest.raises(ZeroDivisionError):
        driver.run()

"""The checker of histories accepts what one object can do, and nothing else."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from fireflyer.base.errors import InvariantViolation
from fireflyer.sim.linearizability import HistoryOperation, linearize


def write(value: str, invoked: int, returned: int | None) -> HistoryOperation[str]:
    return HistoryOperation(f"write {value}", invoked, returned, lambda _: value)


def maybe(value: str, invoked: int, returned: int) -> HistoryOperation[str]:
    """A write that may have been, but not later."""
    return replace(write(value, invoked, returned), maybe=True)


def read(value: str, invoked: int, returned: int) -> HistoryOperation[str]:
    return HistoryOperation(
        f"read {value}", invoked, returned, lambda state: state if state == value else None, observes=True
    )


def swap(old: str, new: str, invoked: int, returned: int | None) -> HistoryOperation[str]:
    """Writes `new` if it finds `old`, which it did."""
    return HistoryOperation(f"{old}->{new}", invoked, returned, lambda state: new if state == old else None)


LEGAL = {
    "nothing": [],
    "one after the other": [write("a", 0, 1), read("a", 2, 3), write("b", 4, 5), read("b", 6, 7)],
    "a read beside a write sees either": [write("a", 0, 10), read("", 1, 2), read("a", 3, 4)],
    "two writes beside each other in either order": [write("a", 0, 9), write("b", 1, 8), read("a", 10, 11)],
    "of two readers the later may not be older, and is not": [write("a", 0, 9), read("", 1, 4), read("a", 2, 5)],
    "an update that was never answered took place late": [write("a", 0, None), read("", 5, 6), read("a", 7, 8)],
    "or not at all": [write("a", 0, None), read("", 5, 6), write("b", 7, 8), read("b", 9, 10)],
    "or only after everything": [write("a", 0, None), write("b", 1, 2), read("b", 3, 4), read("a", 5, 6)],
    "what may have been was": [maybe("a", 0, 5), read("a", 1, 2), read("a", 6, 7)],
    "what may have been was not": [maybe("a", 0, 5), read("", 1, 2), read("", 6, 7)],
    "returned at the instant of the invocation": [write("a", 0, 5), read("", 5, 6)],
    "three swaps beside each other": [
        swap("b", "c", 0, 9),
        swap("a", "b", 0, 9),
        swap("", "a", 0, 9),
        read("c", 10, 11),
    ],
}
ILLEGAL = {
    "a read of what nobody wrote": [read("x", 0, 1)],
    "an acknowledged write is lost": [write("a", 0, 1), read("", 2, 3)],
    "a read goes back in time": [write("a", 0, 9), read("a", 1, 2), read("", 3, 4)],
    "two readers disagree about the order": [
        write("a", 0, 1), write("b", 2, 9), write("c", 2, 9),
        read("b", 10, 11), read("c", 12, 13),
    ],
    "a write takes place twice": [write("a", 0, 1), write("b", 2, 3), read("b", 4, 5), read("a", 6, 7)],
    "an unanswered write takes place twice": [
        write("a", 0, None), read("a", 1, 2), write("b", 3, 4), read("b", 5, 6), read("a", 7, 8),
    ],
    "an unanswered write takes place before it was asked for": [read("a", 0, 1), write("a", 2, None)],
    "what may have been was too late": [maybe("a", 0, 5), read("", 6, 7), read("a", 8, 9)],
    "both swaps win": [swap("", "a", 0, 9), swap("", "b", 0, 9)],
}  # fmt: skip


@pytest.mark.parametrize("name", LEGAL)
def test_a_history_that_can_be_explained_is_accepted(name: str) -> None:
    order = linearize(LEGAL[name], "")
    state = ""
    for one in order:
        after = one.apply(state)
        assert after is not None
        state = after
    assert {one.label for one in LEGAL[name] if one.needed} <= {one.label for one in order}


@pytest.mark.parametrize("name", ILLEGAL)
def test_a_history_that_cannot_is_refused(name: str) -> None:
    with pytest.raises(InvariantViolation, match=r"not linearizable: after .* the state is"):
        linearize(ILLEGAL[name], "")


def by_force(history: list[HistoryOperation[str]]) -> bool:
    """All orders of all subsets that hold what returned."""
    sure = [one for one in history if one.needed]
    unsure = [one for one in history if not one.needed]
    for count in range(len(unsure) + 1):
        for extra in itertools.combinations(unsure, count):
            for order in itertools.permutations(sure + list(extra)):
                if _explains(order):
                    return True
    return False


def _explains(order: tuple[HistoryOperation[str], ...]) -> bool:
    state = ""
    for index, one in enumerate(order):
        if any(late.returned_ns is not None and late.returned_ns < one.invoked_ns for late in order[index + 1 :]):
            return False
        after = one.apply(state)
        if after is None:
            return False
        state = after
    return True


def test_it_agrees_with_trying_all_orders() -> None:
    rng = random.Random(7)
    verdicts = {True: 0, False: 0}
    for _ in range(400):
        history: list[HistoryOperation[str]] = []
        for number in range(rng.randrange(1, 6)):
            start = rng.randrange(12)
            end = start + rng.randrange(1, 8)
            if rng.random() < 0.5:
                history.append(read(rng.choice(["", "0", "1", "2"]), start, end))
            else:
                written = write(str(number % 3), start, None if rng.random() < 0.2 else end)
                history.append(replace(written, maybe=rng.random() < 0.2))
        try:
            linearize(history, "")
            found = True
        except InvariantViolation:
            found = False
        assert found == by_force(history), [(one.label, one.invoked_ns, one.returned_ns) for one in history]
        verdicts[found] += 1
    assert min(verdicts.values()) > 50

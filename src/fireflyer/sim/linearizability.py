"""Whether a history could have come from one object that does one operation at a time.

An operation was invoked, and returned, or nobody knows whether it took place (`returned_ns` None: it may take effect at
any time after its invocation, or never; with `maybe`: before it returned, or never). The history is linearizable if all
that returned, and any of the others, can be put into an order that respects time (who returned before another was
invoked comes before it) and in which each gives the result that was seen.

The search is that of Wing and Gong ("Testing and Verifying Concurrent Objects", 1993), with Lowe's table of what was
tried ("Testing for linearizability", 2017): a set of operations done and the state that they left are not looked at
twice. An operation that only observes is taken as soon as it fits: whatever can follow, can follow it too.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from fireflyer.base.errors import InvariantViolation, UsageError

__all__ = ["MAX_TRIED", "HistoryOperation", "linearize"]

MAX_TRIED = 1_000_000
"""Sets of operations and states; a history that needs more is not decided."""

S = TypeVar("S", bound=Hashable)


@dataclass(frozen=True, slots=True)
class HistoryOperation(Generic[S]):
    """`apply(state)`: the state after it, or None where its result could not have been seen in `state`. A state is
    never None. `observes`: it leaves the state as it is."""

    label: str
    invoked_ns: int
    returned_ns: int | None
    apply: Callable[[S], S | None]
    observes: bool = False
    maybe: bool = False

    @property
    def needed(self) -> bool:
        """It has taken place."""
        return self.returned_ns is not None and not self.maybe


def linearize(operations: Sequence[HistoryOperation[S]], initial: S) -> list[HistoryOperation[S]]:
    """An order that explains the history. Raises `InvariantViolation`, with the point where the longest attempt got
    stuck, if there is none, and `UsageError` after `MAX_TRIED` attempts."""
    ordered = sorted(operations, key=lambda one: (one.invoked_ns, -1 if one.returned_ns is None else one.returned_ns))
    search = _Search(ordered)
    tried: set[tuple[int, S]] = set()
    stack: list[tuple[int, S, tuple[int, ...]]] = [(0, initial, ())]
    longest: tuple[tuple[int, ...], S] = ((), initial)
    while stack:
        done, state, path = stack.pop()
        done, path = search.observe(done, state, path)
        if not search.needed & ~done:
            return [ordered[index] for index in path]
        if len(path) > len(longest[0]):
            longest = (path, state)
        if (done, state) in tried:
            continue
        tried.add((done, state))
        if len(tried) > MAX_TRIED:
            raise UsageError(f"not decided after {MAX_TRIED} states; give shorter histories")
        for index in reversed(search.candidates(done)):
            after = ordered[index].apply(state)
            if after is not None:
                stack.append((done | 1 << index, after, (*path, index)))
    path, state = longest
    stuck = [ordered[index].label for index in range(len(ordered)) if not sum(1 << one for one in path) >> index & 1]
    raise InvariantViolation(
        f"not linearizable: after {[ordered[index].label for index in path]} the state is {state!r}, "
        f"and none of {stuck[:8]} fits"
    )


class _Search(Generic[S]):
    def __init__(self, ordered: list[HistoryOperation[S]]) -> None:
        self._ordered = ordered
        self.needed = sum(1 << index for index, one in enumerate(ordered) if one.needed)
        self._too_late = {
            index: sum(1 << at for at, other in enumerate(ordered) if other.invoked_ns > one.returned_ns)
            for index, one in enumerate(ordered)
            if one.maybe and one.returned_ns is not None
        }
        """Of what may be left out, those that began after it: done, they leave no place for it."""

    def candidates(self, done: int) -> list[int]:
        """Operations that can be next: invoked before any other that is still to come has returned."""
        found: list[int] = []
        earliest_ns: int | None = None
        for index, one in enumerate(self._ordered):
            if earliest_ns is not None and one.invoked_ns > earliest_ns:
                break
            if not done >> index & 1 and not done & self._too_late.get(index, 0):
                found.append(index)
                if one.needed and one.returned_ns is not None:
                    earliest_ns = one.returned_ns if earliest_ns is None else min(earliest_ns, one.returned_ns)
        return found

    def observe(self, done: int, state: S, path: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        """Takes what only observes, and fits, until nothing more does."""
        moved = True
        while moved:
            moved = False
            for index in self.candidates(done):
                one = self._ordered[index]
                if one.observes and one.returned_ns is not None and one.apply(state) is not None:
                    done, path, moved = done | 1 << index, (*path, index), True
        return done, path

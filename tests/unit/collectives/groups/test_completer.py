"""The threads that complete futures: callbacks in order, callbacks that wait, and the end of a group."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.support.patience import allowed_s
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from fireflyer.collectives.torch.completer import (
    MAX_LEVELS,
    Completer,
    level_of_new_works,
    starts_collectives_inside,
)

LIMIT_S = 20.0


class FakeWork:
    """Ends when it is told to."""

    def __init__(self, *, ordered: bool = True) -> None:
        self.ordered = ordered
        self.level = level_of_new_works()
        self.ended = threading.Event()
        self.given_up = False

    def finished(self) -> bool:
        return self.ended.is_set()

    def settle(self, limit_ns: int | None) -> bool:
        return self.ended.wait(None if limit_ns is None else limit_ns / 1e9)

    def give_up(self) -> None:
        self.given_up = not self.finished()


class Future:
    """Asks for `work` to be completed and then calls `then`; may be waited for."""

    def __init__(self, completer: Completer, work: FakeWork, then: Callable[[], object] = lambda: None) -> None:
        self._done = threading.Event()
        self._then = then
        completer.add(work, self._end)

    def _end(self) -> None:
        self._then()
        self._done.set()

    def wait(self) -> bool:
        return self._done.wait(allowed_s(LIMIT_S))


@pytest.fixture
def completer() -> Iterator[Completer]:
    made = Completer("test")
    yield made
    made.stop()


def test_callbacks_run_in_the_order_of_the_requests_and_one_at_a_time(completer: Completer) -> None:
    works = [FakeWork() for _ in range(20)]
    ran: list[int] = []
    futures = [Future(completer, work, lambda n=n: ran.append(n)) for n, work in enumerate(works)]  # type: ignore[misc]
    for work in works:
        work.ended.set()
    assert all(future.wait() for future in futures)
    assert ran == list(range(20))


def test_a_message_that_does_not_come_holds_up_no_other(completer: Completer) -> None:
    never, other = FakeWork(ordered=False), FakeWork(ordered=False)
    Future(completer, never)
    future = Future(completer, other)
    other.ended.set()
    assert future.wait()


def nested(completer: Completer, depth: int) -> bool:
    work = FakeWork()
    future = Future(completer, work, lambda: depth == 0 or nested(completer, depth - 1))
    work.ended.set()
    return future.wait()


def test_callbacks_may_wait_for_works_that_they_start_whatever_their_depth(completer: Completer) -> None:
    assert nested(completer, MAX_LEVELS + 3)


def test_a_callback_that_waits_for_its_own_work_keeps_its_turn(completer: Completer) -> None:
    """No other callback of the level runs meanwhile, so the collectives that callbacks start are in one order."""
    steps: list[tuple[int, str]] = []

    def follow(number: int) -> None:
        steps.append((number, "begins"))
        for _ in range(3):
            nested(completer, 0)
        steps.append((number, "ends"))

    works = [FakeWork() for _ in range(5)]
    futures = [Future(completer, work, lambda n=n: follow(n)) for n, work in enumerate(works)]  # type: ignore[misc]
    for work in works:
        work.ended.set()
    assert all(future.wait() for future in futures)
    assert steps == [(number, what) for number in range(5) for what in ("begins", "ends")]


def test_a_callback_may_wait_for_the_future_of_a_later_work(completer: Completer) -> None:
    first, second = FakeWork(), FakeWork()
    later: list[Future] = []
    both = threading.Event()
    waiting = Future(completer, first, lambda: both.wait(allowed_s(LIMIT_S)) and later[0].wait())
    later.append(Future(completer, second))
    both.set()
    first.ended.set()
    second.ended.set()
    assert waiting.wait()


def test_a_callback_that_raises_holds_up_no_other(completer: Completer) -> None:
    first, second = FakeWork(), FakeWork()

    def fail() -> None:
        raise ValueError("of a callback")

    Future(completer, first, fail)
    future = Future(completer, second)
    first.ended.set()
    second.ended.set()
    assert future.wait()


def test_at_the_end_nobody_waits_for_ever() -> None:
    completer = Completer("ends")
    work = FakeWork()
    future = Future(completer, work)
    completer.stop(complete=True)
    assert work.given_up
    assert future.wait()
    assert not any("ends" in thread.name for thread in threading.enumerate())


def hook_with_a_callback(dist: Any, tensor: object) -> object:
    def later(future: Any) -> object:
        return [dist.all_reduce(tensor) for _ in range(future.value())]

    return dist.all_reduce(tensor, async_op=True).get_future().then(later)


def hook_without(dist: Any, tensor: object) -> object:
    return dist.all_reduce(tensor, async_op=True).get_future().then(lambda future: future.value()[0])


def test_futures_of_functions_whose_callbacks_start_collectives_are_inline_unless_it_is_said_otherwise() -> None:
    by_code, never, always = (Completer("test", inline=inline) for inline in (None, False, True))
    assert by_code.runs_inline(hook_with_a_callback.__code__)
    assert not by_code.runs_inline(hook_without.__code__)
    assert not never.runs_inline(hook_with_a_callback.__code__)
    assert always.runs_inline(hook_without.__code__)


def test_the_hooks_of_torch_are_told_apart() -> None:
    powers = (powerSGD_hook.powerSGD_hook, powerSGD_hook.batched_powerSGD_hook)
    plain = (default_hooks._allreduce_fut, default_hooks.allreduce_hook, default_hooks.fp16_compress_hook)
    assert all(starts_collectives_inside(hook.__code__) for hook in powers)
    assert not any(starts_collectives_inside(hook.__code__) for hook in plain)

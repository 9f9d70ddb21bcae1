"""Ranks of a pipeline as threads of one process, whose messages go through mailboxes.

A send is done when its receive is posted (`blocking`), or at once. A rank that raises leaves the group: whoever waits
for it gets `PeerFailed`, as of the real communicator.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

from fireflyer.base.errors import Aborted, FireflyerError, PeerFailed, Timeout, UsageError

__all__ = ["MailboxCommunicator", "MailboxWorld", "run_pipeline"]

T = TypeVar("T")
TIMEOUT_S = 60.0


class MailboxWork:
    def __init__(self, array: Any) -> None:
        self.array = array
        self.error: FireflyerError | None = None
        self.ended = threading.Event()

    def wait(self, timeout_ns: int | None = None) -> None:
        if not self.ended.wait(TIMEOUT_S if timeout_ns is None else timeout_ns / 1e9):
            raise Timeout("a message did not come")
        if self.error is not None:
            raise self.error

    def done(self) -> bool:
        return self.ended.is_set()


class MailboxWorld:
    def __init__(self, size: int, *, blocking: bool = True) -> None:
        self.size = size
        self.blocking = blocking
        self._lock = threading.Lock()
        self._sends: dict[tuple[int, int, int], deque[tuple[MailboxWork, Any]]] = defaultdict(deque)
        self._receives: dict[tuple[int, int, int], deque[MailboxWork]] = defaultdict(deque)
        self._failure: FireflyerError | None = None

    def send(self, source: int, to: int, tag: int, array: Any) -> MailboxWork:
        work = MailboxWork(array)
        with self._lock:
            if self._failed(work):
                return work
            values = None if self.blocking else torch.as_tensor(array).clone()
            self._sends[source, to, tag].append((work, values))
            if not self.blocking:
                work.ended.set()
            self._meet((source, to, tag))
        return work

    def receive(self, source: int, to: int, tag: int, array: Any) -> MailboxWork:
        work = MailboxWork(array)
        with self._lock:
            if not self._failed(work):
                self._receives[source, to, tag].append(work)
                self._meet((source, to, tag))
        return work

    def fail(self, error: FireflyerError) -> None:
        with self._lock:
            if self._failure is None:
                self._failure = error
            pending = [work for works in self._receives.values() for work in works]
            pending += [work for works in self._sends.values() for work, _ in works]
            for work in pending:
                self._failed(work)

    def left(self) -> int:
        """Messages that nobody has received, and receives that nobody has sent to."""
        return sum(map(len, self._sends.values())) + sum(map(len, self._receives.values()))

    def _failed(self, work: MailboxWork) -> bool:
        if self._failure is not None and not work.ended.is_set():
            work.error = self._failure
            work.ended.set()
        return self._failure is not None

    def _meet(self, key: tuple[int, int, int]) -> None:
        sends, receives = self._sends[key], self._receives[key]
        while sends and receives:
            (sent, values), received = sends.popleft(), receives.popleft()
            source = torch.as_tensor(sent.array if values is None else values).reshape(-1)
            target = torch.as_tensor(received.array).view(-1)
            if source.dtype != target.dtype or source.numel() != target.numel():
                received.error = UsageError(f"{key}: {source.numel()} elements sent, {target.numel()} expected")
            else:
                target.copy_(source)
            received.ended.set()
            sent.ended.set()


class MailboxCommunicator:
    def __init__(self, world: MailboxWorld, rank: int) -> None:
        self.rank = rank
        self.world_size = world.size
        self.messages = 0
        self._world = world

    def send(self, array: Any, *, to: int, tag: int = 0, async_op: bool = False) -> MailboxWork:
        assert to != self.rank
        self.messages += 1
        work = self._world.send(self.rank, to, tag, array)
        if not async_op:
            work.wait()
        return work

    def recv(self, array: Any, *, source: int | None, tag: int = 0, async_op: bool = False) -> MailboxWork:
        assert source is not None
        work = self._world.receive(source, self.rank, tag, array)
        if not async_op:
            work.wait()
        return work

    def abort(self, reason: str) -> None:
        self._world.fail(Aborted(reason))


class _Rank(threading.Thread, Generic[T]):
    def __init__(self, world: MailboxWorld, rank: int, body: Callable[[MailboxCommunicator], T]) -> None:
        super().__init__(name=f"rank-{rank}", daemon=True)
        self.outcome: T | None = None
        self.error: BaseException | None = None
        self._comm = MailboxCommunicator(world, rank)
        self._world = world
        self._body = body

    def run(self) -> None:
        torch.set_num_threads(1)  # what they compute is small
        try:
            self.outcome = self._body(self._comm)
        except BaseException as error:
            self.error = error
            rank = self._comm.rank
            self._world.fail(PeerFailed(f"rank {rank} is gone", rank=rank))


def run_pipeline(
    size: int, body: Callable[[MailboxCommunicator], T], *, blocking: bool = True
) -> list[T | BaseException]:
    """`body(comm)` on each of `size` ranks; what it returned or raised, by rank. Nothing is left in mailboxes."""
    world = MailboxWorld(size, blocking=blocking)
    ranks = [_Rank(world, rank, body) for rank in range(size)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(4 * TIMEOUT_S)
        assert not rank.is_alive(), f"{rank.name} hangs"
    outcomes: list[T | BaseException] = [
        rank.outcome if rank.error is None else rank.error  # type: ignore[misc]
        for rank in ranks
    ]
    assert any(isinstance(one, BaseException) for one in outcomes) or world.left() == 0
    return outcomes

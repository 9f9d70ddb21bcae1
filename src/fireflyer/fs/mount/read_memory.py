"""Memory for what programs read, divided so that a chain that does not answer leaves some to the others.

A read has memory until its answer is copied; one that waits for a chain that is away has it until the client's
deadline. So a chain may get more only while it has less than a third of what is left then: one chain gets at most a
quarter of all, and each that joins it leaves three quarters of what it finds (dynamic thresholds of a shared buffer:
Choudhury and Hahne, IEEE/ACM Transactions on Networking 6 (2), 1998). A read of several chains counts as a whole for
each of them, since nobody knows for which it will wait.

Whoever gets none waits, in a queue for each set of chains; the queues take turns. Two things end that:

    its chains have all answered since it began to wait, and that is long ago    they are busy, not away: it needs no
        share of theirs any more, or reads of several busy chains would wait for ever
    one of them has answered nothing for as long as a client tries    it fails, as if it had been sent
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from fireflyer.base.errors import Timeout
from fireflyer.base.units import SECOND

__all__ = ["ReadMemory"]

_M = TypeVar("_M")
_BUSY_NS: Final = SECOND
"""Longer than a chain that answers keeps anybody waiting, unless others take its share again and again."""
_AWAY_S: Final = 30.0
_OF_LEFT: Final = 3
_SPARED: Final = 8
"""Of so many parts one is not for those that need no share."""


@dataclass(slots=True, eq=False)
class _Waiting(Generic[_M]):
    chains: tuple[int, ...]
    size: int
    since_ns: int
    memory: asyncio.Future[_M] = field(repr=False)


class ReadMemory(Generic[_M]):
    """Of one mount, in its loop."""

    def __init__(
        self, take: Callable[[int], _M | None], cost: Callable[[int], int], limit_bytes: int,
        *, now_ns: Callable[[], int], answered_ns: Callable[[int], int],
    ) -> None:  # fmt: skip
        """`take`: memory of that size; None while there is none, and then somebody calls `retry`. `cost`: what it takes
        of `limit_bytes`. `answered_ns`: when the chain has last answered a read, by the clock of `now_ns`."""
        self._take, self._cost, self._limit_bytes = take, cost, limit_bytes
        self._now_ns, self._answered_ns = now_ns, answered_ns
        self._lent_bytes = 0
        self._of_chain: dict[int, int] = {}
        """Bytes that reads of it have."""
        self._waiting: dict[tuple[int, ...], collections.deque[_Waiting[_M]]] = {}

    async def take(self, chains: tuple[int, ...], size: int) -> _M:
        """Until `give_back`. Raises `Timeout`."""
        if chains not in self._waiting and (memory := self._try(chains, size)) is not None:
            return memory
        given: asyncio.Future[_M] = asyncio.get_running_loop().create_future()
        waiting = _Waiting(chains, size, self._now_ns(), given)
        self._waiting.setdefault(chains, collections.deque()).append(waiting)
        try:
            while not given.done():
                await asyncio.wait([given], timeout=_AWAY_S)
                if not given.done() and not self._answers(waiting):
                    raise Timeout("the chain does not answer, and reads of it use all memory that they may")
        except BaseException:
            self._leave(waiting)
            raise
        return given.result()

    def give_back(self, chains: tuple[int, ...], size: int) -> None:
        self._count(chains, -self._cost(size))
        self.retry()

    def retry(self) -> None:
        """Gives to those who wait what there is."""
        served = True
        while served:
            served = False
            for chains, queue in list(self._waiting.items()):
                first = queue[0]
                memory = self._try(chains, first.size, first)
                if memory is not None:
                    served = True
                    queue.popleft()
                    first.memory.set_result(memory)
                    del self._waiting[chains]
                    if queue:
                        self._waiting[chains] = queue  # behind the others

    def _try(self, chains: tuple[int, ...], size: int, waiting: _Waiting[_M] | None = None) -> _M | None:
        cost = self._cost(size)
        left = self._limit_bytes - self._lent_bytes - cost
        if left < 0 and self._lent_bytes:
            return None
        have = max((self._of_chain.get(chain, 0) for chain in chains), default=0)
        if have and (have + cost) * _OF_LEFT > left and not (waiting is not None and self._is_kept_off(waiting, left)):
            return None
        memory = self._take(size)
        if memory is not None:
            self._count(chains, cost)
        return memory

    def _is_kept_off(self, waiting: _Waiting[_M], left: int) -> bool:
        """By others who take what it waits for."""
        is_old = self._now_ns() - waiting.since_ns > _BUSY_NS
        return is_old and left >= self._limit_bytes // _SPARED and self._answers(waiting)

    def _answers(self, waiting: _Waiting[_M]) -> bool:
        return all(self._answered_ns(chain) > waiting.since_ns for chain in waiting.chains)

    def _count(self, chains: tuple[int, ...], cost: int) -> None:
        self._lent_bytes += cost
        for chain in chains:
            have = self._of_chain.pop(chain, 0) + cost
            if have:
                self._of_chain[chain] = have

    def _leave(self, waiting: _Waiting[_M]) -> None:
        if waiting.memory.done():
            self.give_back(waiting.chains, waiting.size)
            return
        queue = self._waiting[waiting.chains]
        queue.remove(waiting)
        if not queue:
            del self._waiting[waiting.chains]

"""Runs a service of which one process leads, on a key-value engine: its machine, its lease, its transactions.

    every L/8 ────> tick ──┐                             ┌──> Transact ──> the engine ──> one outcome ──┐
    post ─────────> event ─┼──> machine.handle, effects ─┼──> the others: `perform`                     │
    cancelled ────> leave ─┘          ^                  └                                              │
                                      └─────────────────────────────────────────────────────────────────┘

The machine holds a `kvstore.core.lease.LeaseMachine` under the key `lease_key`; each process of the service has one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Final, Generic, Protocol, TypeVar

from fireflyer.base.errors import PermanentError, TransientError
from fireflyer.base.units import SECOND
from fireflyer.kvstore.api import Engine, Transaction
from fireflyer.kvstore.core.fenced import (
    Committed,
    Failed,
    Outcome,
    OutcomeUnknown,
    PreconditionFailed,
    Transact,
    carry_out,
)
from fireflyer.kvstore.errors import CommitUnknown
from fireflyer.runtime.clock import BootClock
from fireflyer.runtime.driver import Driver

__all__ = ["FencedDriver", "FencedMachine", "transact_on"]

_log = logging.getLogger(__name__)
TICKS_PER_LEASE: Final = 8
TRANSACTION_LEASES: Final = 2
"""How long a transaction may take, in leases: a renewal that takes longer helps nobody, and its outcome is unknown."""
LEAVE_NS: Final = 3 * SECOND
"""For the last transaction, and for giving the lease up."""

_E = TypeVar("_E")
_F = TypeVar("_F")
_EventIn = TypeVar("_EventIn", contravariant=True)
_EffectOut = TypeVar("_EffectOut", covariant=True)


async def transact_on(engine: Engine, order: Transact, *, lease_key: bytes, timeout_ns: int) -> Outcome:
    """One outcome, whatever the store does. A commit of which nobody knows is not repeated here: the machine does it,
    with the conditions that make it safe. Raises `DataCorruption`, `UsageError` (over a limit of the store) and
    `InvariantViolation`, upon which the process must end."""

    async def body(rows: Transaction) -> Committed | PreconditionFailed:
        rows.frees_space()  # few rows, and without the leader nobody can clear anything
        return await carry_out(order, rows, lease_key)

    try:
        return await engine.transact(body, timeout_ns=timeout_ns)
    except CommitUnknown as error:
        return OutcomeUnknown(order.number, error.message)
    except (TransientError, PermanentError) as error:
        return Failed(order.number, error.message)


class FencedMachine(Protocol[_EventIn, _EffectOut]):
    """Its events include every `Outcome`, its effects `Transact`, for each of which it gets one outcome."""

    def handle(self, now_ns: int, event: _EventIn) -> Sequence[_EffectOut]: ...

    @property
    def left(self) -> bool:
        """After `leave`: nothing is under way, and the lease is given up or cannot be."""


class FencedDriver(Generic[_E, _F]):
    """Lives in the loop in which it is made, and is called there only. `post` and `spawn` are those of `Driver`."""

    def __init__(
        self,
        machine: FencedMachine[_E | Outcome, _F | Transact],
        perform: Callable[[_F], None],
        *,
        engine: Engine,
        lease_key: bytes,
        lease_ns: int,
        tick: Callable[[], _E],
        leave: _E,
        on_transaction: Callable[[Outcome, int], None] = lambda _outcome, _took_ns: None,
    ) -> None:
        """`perform`: of the effects that are not transactions. `on_transaction`: with the nanoseconds that it took.
        `tick` makes what the machine is told an eighth
        of the lease after the last time; `leave`: what it is told when the process is to end."""
        self._machine = machine
        self._perform = perform
        self._engine = engine
        self._lease_key = lease_key
        self._lease_ns = lease_ns
        self._tick, self._leave = tick, leave
        self._driver: Driver[_E | Outcome, _F | Transact] = Driver(self, self._on_effect, clock=BootClock())
        self._on_transaction = on_transaction
        self._left = asyncio.Event()
        self._leaving = False

    @property
    def leaving(self) -> bool:
        """The lease is being given up: whoever asks must ask another process."""
        return self._leaving

    def post(self, event: _E) -> None:
        self._driver.post(event)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return self._driver.spawn(work)

    def handle(self, now_ns: int, event: _E | Outcome) -> Sequence[_F | Transact]:
        effects = self._machine.handle(now_ns, event)
        if self._machine.left:
            self._left.set()
        return effects

    async def run(self, before_end: Callable[[], Awaitable[None]] | None = None) -> None:
        """Until it is cancelled; then `before_end`, while the machine still answers, and the lease is given up. Raises
        what the machine or the store cannot live with."""
        ticking = asyncio.get_running_loop().create_task(self._keep_ticking())
        running = asyncio.get_running_loop().create_task(self._driver.run())
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            if not running.done():
                if before_end is not None:
                    await before_end()
                await self._give_up()
            raise
        finally:
            ticking.cancel()
            running.cancel()
            await asyncio.wait([ticking, running])

    async def _keep_ticking(self) -> None:
        while True:
            self._driver.post(self._tick())
            await asyncio.sleep(self._lease_ns / SECOND / TICKS_PER_LEASE)

    async def _give_up(self) -> None:
        """The clean end: whoever waits is told, the lease is given up. Not being able to costs the others a lease."""
        self._leaving = True
        self._driver.post(self._leave)
        try:
            async with asyncio.timeout(LEAVE_NS / SECOND):
                await self._left.wait()
        except TimeoutError:
            _log.warning("the lease could not be released in time; another manager takes over when it expires")
        self._driver.stop()

    def _on_effect(self, effect: _F | Transact) -> None:
        if isinstance(effect, Transact):
            self._driver.spawn(self._transact(effect))
        else:
            self._perform(effect)

    async def _transact(self, order: Transact) -> None:
        timeout_ns = TRANSACTION_LEASES * self._lease_ns
        began_ns = time.monotonic_ns()
        outcome = await transact_on(self._engine, order, lease_key=self._lease_key, timeout_ns=timeout_ns)
        self._on_transaction(outcome, time.monotonic_ns() - began_ns)
        self._driver.post(outcome)

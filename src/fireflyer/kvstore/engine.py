"""What all engines share: attempts, retries, deadlines. An engine says how an attempt begins (`_begin`)."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Self, TypeVar

from fireflyer.base.errors import FireflyerError, UsageError
from fireflyer.base.units import format_duration
from fireflyer.kvstore.api import DEFAULT_TIMEOUT_NS, Engine, Reader, Transaction
from fireflyer.kvstore.core.keys import ATTEMPT_LIMIT_NS
from fireflyer.kvstore.core.timing import MAX_CONFLICTS, DeadlinePassed, Timing, backoff_ns
from fireflyer.kvstore.errors import CommitUnknown, Conflict, Disconnected, TransactionTimeout
from fireflyer.kvstore.transaction import Attempt, Source

__all__ = ["AttemptingEngine", "transact_once"]

T = TypeVar("T")


class AttemptingEngine(Engine, abc.ABC):
    def __init__(self, waits: Timing) -> None:
        self._waits = waits
        self._closed = False

    @abc.abstractmethod
    async def _begin(self, *, read_only: bool) -> Source: ...

    async def transact(
        self,
        body: Callable[[Transaction], Awaitable[T]],
        *,
        timeout_ns: int = DEFAULT_TIMEOUT_NS,
        idempotent: bool = False,
    ) -> T:
        return await self._attempts(body, timeout_ns, idempotent=idempotent, read_only=False)

    async def read(self, body: Callable[[Reader], Awaitable[T]], *, timeout_ns: int = DEFAULT_TIMEOUT_NS) -> T:
        return await self._attempts(body, timeout_ns, idempotent=True, read_only=True)

    @contextlib.asynccontextmanager
    async def transaction(self, *, timeout_ns: int = ATTEMPT_LIMIT_NS) -> AsyncIterator[Transaction]:
        deadline_ns = self._waits.now_ns() + _checked_timeout(timeout_ns)
        async with self._attempt(deadline_ns, read_only=False) as attempt:
            yield attempt
            await attempt.commit()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _attempts(
        self, body: Callable[[Attempt], Awaitable[T]], timeout_ns: int, *, idempotent: bool, read_only: bool
    ) -> T:
        deadline_ns = self._waits.now_ns() + _checked_timeout(timeout_ns)
        attempts = conflicts = 0
        doubt = False
        failure: FireflyerError | None = None
        while True:
            attempts += 1
            try:
                async with self._attempt(deadline_ns, read_only=read_only) as attempt:
                    result = await body(attempt)
                    await attempt.commit()
                return result
            except (Conflict, Disconnected) as error:
                failure = error
                conflicts += isinstance(error, Conflict)
            except CommitUnknown as error:
                if not idempotent:
                    raise
                failure, doubt = error, True
            except TransactionTimeout as error:
                if failure is None:
                    raise
                raise _given_up(failure, attempts, doubt=doubt) from error
            delay_ns = backoff_ns(attempts, self._waits.below)
            # A server that is not there may need all of the time to come back.
            if conflicts == MAX_CONFLICTS or self._waits.now_ns() + delay_ns >= deadline_ns:
                raise _given_up(failure, attempts, doubt=doubt) from failure
            await self._waits.sleep(delay_ns)

    @contextlib.asynccontextmanager
    async def _attempt(self, deadline_ns: int, *, read_only: bool) -> AsyncIterator[Attempt]:
        if self._closed:
            raise UsageError("this key-value store is closed")
        began_ns = self._waits.now_ns()
        deadline_ns = min(deadline_ns, began_ns + ATTEMPT_LIMIT_NS)
        attempt: Attempt | None = None
        try:
            async with self._waits.limit(deadline_ns):
                source = await self._begin(read_only=read_only)
                attempt = Attempt(source, self._waits.now_ns, deadline_ns, read_only=read_only)
                try:
                    yield attempt
                except BaseException as error:
                    await attempt.end(error)
                    raise
                await attempt.end(None)
        except DeadlinePassed as error:
            if attempt is not None and attempt.committed:
                return  # it passed while what it had used was given back
            took = format_duration(self._waits.now_ns() - began_ns)
            if attempt is not None and attempt.commit_sent:
                raise CommitUnknown(
                    f"the deadline passed during the commit, after {took}: the transaction may or may not be committed"
                ) from error
            raise TransactionTimeout(f"the transaction did not finish within {took}; it was not committed") from error


def _checked_timeout(timeout_ns: int) -> int:
    if timeout_ns <= 0:
        raise UsageError(f"timeout of {timeout_ns} ns; it must be positive")
    return timeout_ns


def _given_up(error: FireflyerError, attempts: int, *, doubt: bool) -> FireflyerError:
    text = f"given up after {attempts} attempt{'s' if attempts > 1 else ''}: {error.message}"
    if doubt:
        return CommitUnknown(f"{text}; one of the attempts may be committed")
    return type(error)(text)


async def transact_once(
    engine: Engine,
    body: Callable[[Transaction], Awaitable[bytes]],
    *,
    marker: bytes,
    timeout_ns: int = DEFAULT_TIMEOUT_NS,
) -> bytes:
    """Commits `body` exactly once for this `marker`, however often this is called and from whichever process, and
    returns what it returned when it committed: at most `MAX_VALUE_BYTES`, kept under the key `marker` by the same
    transaction.

    Raises `CommitUnknown` if it ran out of time in doubt: call it again with the same marker. Who chose the marker
    clears it when the request can come no more."""

    async def once(tx: Transaction) -> bytes:
        kept = await tx.get(marker)
        if kept is None:
            kept = await body(tx)
            tx.set(marker, kept)
        return kept

    return await engine.transact(once, timeout_ns=timeout_ns, idempotent=True)

"""Asks the primary among the managers, whoever it is now."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, Self

import msgspec

from fireflyer.base.errors import (
    FireflyerError,
    InvariantViolation,
    Timeout,
    TransientError,
    UsageError,
    error_from_wire,
)
from fireflyer.base.units import MS, SECOND, format_duration
from fireflyer.fs.control.connections import ConnectionPool
from fireflyer.fs.schema.manager import Answer, GetStatus, ManagerError, NotPrimary, Request, Status
from fireflyer.runtime.pauses import spread
from fireflyer.runtime.rpc import Credential

__all__ = ["ManagerClient"]

PAUSE_NS: Final = 20 * MS
MAX_PAUSE_NS: Final = SECOND
ATTEMPT_NS: Final = 3 * SECOND
"""For one manager to answer, before another one is asked."""


class ManagerClient:
    """Requests to the manager may be repeated, so whatever is transient is tried again, there or elsewhere."""

    def __init__(self, managers: Sequence[str], credential: Credential) -> None:
        """`managers`: addresses; one that answers is enough."""
        if not managers:
            raise UsageError("no manager address is given; give at least one HOST:PORT")
        self._managers = list(managers)
        self._current = self._managers[0]
        self._turn = 0
        self._followed = False
        """The current one was named by another, not reached in turn."""
        self._lines = ConnectionPool(credential)

    async def ask(self, request: Request, *, timeout_ns: int = 10 * SECOND) -> Answer:
        """Answer of the primary: never `NotPrimary` or `ManagerError`. Raises the error of a refusal, `Timeout`
        when none
        answered as primary in time, `PermissionDenied` for a credential that they do not know."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + timeout_ns / SECOND
        pause_ns = PAUSE_NS
        reason = "none was reached"
        while (left_ns := int((until_s - loop.time()) * SECOND)) > 0:
            asked = self._current
            try:
                answer = await self._lines.call(asked, request, min(left_ns, ATTEMPT_NS))
            except TransientError as error:
                reason = str(error)
                self._follow(asked, "")
            else:
                if isinstance(answer, NotPrimary):
                    reason = f"{asked} is not the primary" + (f"; it names {answer.address}" if answer.address else "")
                    self._follow(asked, answer.address)
                elif isinstance(answer, ManagerError):
                    refused = error_from_wire(answer.code, answer.message)
                    if not isinstance(refused, TransientError):
                        raise refused
                    reason = str(refused)
                else:
                    self._followed = False
                    return answer
            pause_ns = min(2 * pause_ns, MAX_PAUSE_NS)
            await asyncio.sleep(min(spread(pause_ns / SECOND), max(0.0, until_s - loop.time())))
        raise Timeout(
            f"no manager answered as primary within {format_duration(timeout_ns)}: {reason} (asked: "
            f"{', '.join(self._managers)}); check the addresses, and that the managers run"
        )

    async def status(self, *, timeout_ns: int = 10 * SECOND) -> Status:
        """All pages, as one: what changes meanwhile may be seen in one part and not in another. Raises as `ask`, of
        which each has this timeout."""
        first = page = await self._page(0, timeout_ns)
        targets = list(first.targets)
        while page.more_after:
            page = await self._page(page.more_after, timeout_ns)
            targets += page.targets
        return msgspec.structs.replace(first, targets=tuple(targets), more_after=0)

    async def _page(self, after: int, timeout_ns: int) -> Status:
        answer = await self.ask(GetStatus(after), timeout_ns=timeout_ns)
        if not isinstance(answer, Status) or 0 < answer.more_after <= after:
            raise InvariantViolation(
                f"the manager answered with {type(answer).__name__}; install the same release of Fire-Flyer here and "
                "on the managers"
            )
        return answer

    def _follow(self, asked: str, named: str) -> None:
        """To the one that was named, if it is one of ours; else to the next in turn. Of two names in a row the second
        is not followed: managers that are cut off from the store could send us to and fro for ever."""
        if asked != self._current:
            return  # another request has gone on already
        if named in self._managers and named != asked and not self._followed:
            self._current, self._followed = named, True
            return
        for _ in self._managers:
            self._turn = (self._turn + 1) % len(self._managers)
            if self._managers[self._turn] != asked:
                break
        self._current, self._followed = self._managers[self._turn], False

    async def close(self) -> None:
        await self._lines.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await self.close()
        except FireflyerError:
            pass

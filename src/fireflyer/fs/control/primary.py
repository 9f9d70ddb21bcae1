"""Asks the primary among the managers, whoever it is now."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Final, Self

from fireflyer.base.errors import FireflyerError, Timeout, TransientError, UsageError, error_from_wire
from fireflyer.base.units import MS, SECOND, format_duration
from fireflyer.fs.control.lines import Lines
from fireflyer.fs.schema.manager import Answer, NotPrimary, Refusal, Request
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
            raise UsageError("no manager is named; give the address of one at least")
        self._managers = list(managers)
        self._current = self._managers[0]
        self._lines = Lines(credential)

    async def ask(self, request: Request, *, timeout_ns: int = 10 * SECOND) -> Answer:
        """What the primary answers: never `NotPrimary` or `Refusal`. Raises the error of a refusal, `Timeout` when none
        answered as primary in time, `PermissionDenied` for a credential that they do not know."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + timeout_ns / SECOND
        pause_ns = PAUSE_NS
        reason = "none was asked"
        while (left_ns := int((until_s - loop.time()) * SECOND)) > 0:
            asked = self._current
            try:
                answer = await self._lines.call(asked, request, min(left_ns, ATTEMPT_NS))
                if isinstance(answer, Refusal):
                    raise error_from_wire(answer.code, answer.message)
                if not isinstance(answer, NotPrimary):
                    return answer
                reason = f"{asked} is not the primary" + (f", {answer.address} was" if answer.address else "")
                self._follow(asked, answer.address)
            except TransientError as error:
                reason = str(error)
                self._follow(asked, "")
            pause_ns = min(2 * pause_ns, MAX_PAUSE_NS)
            await asyncio.sleep(min(random.uniform(0.5, 1) * pause_ns / SECOND, max(0.0, until_s - loop.time())))
        raise Timeout(f"no manager answered as primary within {format_duration(timeout_ns)}: {reason}")

    def _follow(self, asked: str, named: str) -> None:
        """To the one that was named, if it is one of ours; else to the next."""
        if named in self._managers and named != asked:
            self._current = named
        else:
            place = self._managers.index(asked) + 1 if asked in self._managers else 0
            self._current = self._managers[place % len(self._managers)]

    async def close(self) -> None:
        await self._lines.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await self.close()
        except FireflyerError:
            pass

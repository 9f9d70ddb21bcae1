"""The audit of what changes the store beside the leader's machine: users, roles, tokens and machines.

Any manager answers these requests, so each entry has a row of its own in the key-value store, below `PMau`: it is
written before the change, as `begun`, and again after it, as `done` or `refused`. The leader copies entries into the
table `audit`, each under its key, and removes those that have not changed meanwhile. So there is no change without an
entry, and an entry that stays `begun` is one of a manager that was killed in between.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import AsyncIterator
from typing import Final

import msgspec

from fireflyer.base.errors import Busy, PermanentError, TransientError, UsageError
from fireflyer.cluster.core.platform.store.history import CommandDone
from fireflyer.cluster.core.platform.store.rows import PREFIX, encode_row
from fireflyer.kvstore import Engine, Transaction, prefix_range

__all__ = ["AUDIT_PREFIX", "MAX_ENTRIES", "AuditLog"]

AUDIT_PREFIX: Final = PREFIX + b"au"
MAX_ENTRIES: Final = 1000
"""That wait to be copied; over it users cannot be changed."""
_MAX_TEXT: Final = 400


class AuditLog:
    """`engine` None: nothing is kept (there is no history)."""

    def __init__(self, engine: Engine | None) -> None:
        self._engine = engine

    @contextlib.asynccontextmanager
    async def entry(
        self, user: str, command: str, target: str, text: str = "", *, address: str = ""
    ) -> AsyncIterator[None]:
        """Around the change. Raises `Busy` where too many entries wait, and then nothing may be changed."""
        if self._engine is None:
            yield
            return
        now_ns = time.time_ns()
        key = AUDIT_PREFIX + now_ns.to_bytes(8, "big") + secrets.token_bytes(8)
        row = CommandDone(now_ns, user, command, target[:_MAX_TEXT], text[:_MAX_TEXT], address, "begun")
        await self._put(key, row, new=True)
        try:
            yield
        except (PermanentError, UsageError, TransientError) as error:
            words = f"{row.text}: {error}" if row.text else str(error)
            refused = msgspec.structs.replace(row, outcome="refused", text=words[:_MAX_TEXT])
            with contextlib.suppress(TransientError):
                await self._put(key, refused)
            raise
        with contextlib.suppress(TransientError):  # it was done, and stays `begun`
            await self._put(key, msgspec.structs.replace(row, outcome="done"))

    async def _put(self, key: bytes, row: CommandDone, *, new: bool = False) -> None:
        if self._engine is None:
            return

        async def body(rows: Transaction) -> None:
            if new:
                begin, end = prefix_range(AUDIT_PREFIX)
                page = await rows.get_range(begin, end, limit=MAX_ENTRIES)
                if page.more or len(page.items) == MAX_ENTRIES:
                    raise Busy("the history is away and its audit is full; change users when the database is back")
            rows.set(key, encode_row(row))

        await self._engine.transact(body, idempotent=True)

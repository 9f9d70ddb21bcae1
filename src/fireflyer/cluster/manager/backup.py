"""The rows of the platform in a file, and back into an empty store.

A backup is one consistent read of machines and platform rows, while managers run where the store can be opened by
several processes. Tasks and runs of the time after it are not in it, so what is restored differs in its numbers:

cluster          another one, as part of the tokens of new runs: no agent takes one for a run that it had
lease            a term above every one that an agent can have heard; agents follow no older leader
next task        far above: numbers of tasks that are lost are not given again
machines         a version far above: a manager that was left running reads them again, tokens of joining machines too
starts after     runs that the store does not know are told to stop at once, and end by their leases where their agents
                 hear nothing. Before all have certainly ended nothing starts, so no task runs twice at a time

Runs that the store knows and that live keep their tokens, and go on.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import IO, Final

import msgspec

from fireflyer.accounts.rows import PREFIX as USERS_PREFIX
from fireflyer.base.errors import DataCorruption, UsageError
from fireflyer.base.units import SECOND
from fireflyer.cluster.core.platform.messages import LEASE_KEY
from fireflyer.cluster.core.platform.store.rows import PREFIX, STATE_KEY, ClusterRow
from fireflyer.cluster.manager.machines import PREFIX as MACHINES_PREFIX
from fireflyer.cluster.manager.machines import of_another_store
from fireflyer.kvstore import Engine, Reader, Transaction, key_after, prefix_range
from fireflyer.kvstore.core.fenced import LeaseRow
from fireflyer.kvstore.core.rows import decode_row, encode_row
from fireflyer.kvstore.dump import PAGE_ROWS, DumpFormat, DumpWriter, Row, load_rows, read_dump

__all__ = ["back_up", "restore"]

FORMAT: Final = DumpFormat(b"fireflyer platform 1\n", "backup of the platform")
TASKS_SINCE: Final = 1_000_000
"""More than are submitted between a backup and its restore; machines change less often."""
FOR_EVER_NS: Final = 1 << 62
_PREFIXES: Final = (USERS_PREFIX, MACHINES_PREFIX, PREFIX)


async def back_up(engine: Engine, file: IO[bytes]) -> int:
    """Rows written to `file`, which is empty. Raises `UsageError` where there is no platform in the store, and what
    the store raises: `TransactionTimeout` where one read cannot hold all rows."""

    async def body(rows: Reader) -> int:
        file.seek(0)  # it may run again
        file.truncate()
        dump = DumpWriter(file, FORMAT)
        if await rows.get(STATE_KEY) is None:
            raise UsageError("the store holds no platform; give the configuration of a manager that has run")
        for prefix in _PREFIXES:
            begin, end = prefix_range(prefix)
            more = True
            while more:
                page = await rows.get_range(begin, end, limit=PAGE_ROWS)
                dump.add(page.items)
                more = page.more
                begin = key_after(page.items[-1][0]) if more else begin
        return dump.finish()

    return await engine.read(body)


async def restore(engine: Engine, file: IO[bytes], *, now_ns: int, hold_ns: int) -> int:
    """Rows written. `now_ns`: since 1970. `hold_ns`: after which no process of a run lives whose node heard of no
    manager. `file` is read twice. Raises `UsageError` where the store has rows of a platform, `DataCorruption` for
    what is no whole backup: then nothing was written."""
    for prefix in _PREFIXES:
        begin, end = prefix_range(prefix)
        found = await engine.read(lambda rows, begin=begin, end=end: rows.get_range(begin, end, limit=1))  # type: ignore[misc]
        if found.items:
            raise UsageError("the store holds a platform or its users already; restore into an empty store")
    cluster = secrets.token_hex(16)
    missing = {STATE_KEY, LEASE_KEY}
    for key, _ in _renewed(read_dump(file, FORMAT), cluster, now_ns, hold_ns):
        missing.discard(key)
    if missing:
        raise DataCorruption("the backup has no row of the cluster or of its lease; use another one")
    file.seek(0)
    blocked = encode_row(LeaseRow("restore", "", 0, 0, FOR_EVER_NS))
    await engine.transact(lambda rows: _set(rows, LEASE_KEY, blocked), idempotent=True)
    return await load_rows(engine, _lease_last(_renewed(read_dump(file, FORMAT), cluster, now_ns, hold_ns)))


async def _set(rows: Transaction, key: bytes, value: bytes) -> None:
    rows.set(key, value)


def _renewed(rows: Iterator[Row], cluster: str, now_ns: int, hold_ns: int) -> Iterator[Row]:
    """Raises `DataCorruption`."""
    for key, value in rows:
        if not key.startswith(_PREFIXES):
            raise DataCorruption(f"the backup has row {key.hex()}, which is not the platform's; use another one")
        if key == STATE_KEY:
            state = decode_row(key, value, ClusterRow)
            changed = msgspec.structs.replace(
                state,
                cluster=cluster,
                next_task=state.next_task + TASKS_SINCE,
                starts_after_ns=max(now_ns, state.time_ns) + hold_ns,
            )
            yield key, encode_row(changed)
        elif key == LEASE_KEY:
            lease = decode_row(key, value, LeaseRow)
            # Terms grow by one with each change of leaders, which are fewer than one a second.
            term = max(lease.term, now_ns // SECOND)
            yield key, encode_row(LeaseRow("restored", "", term, 0, 0))
        else:
            yield key, of_another_store(key, value, TASKS_SINCE)


def _lease_last(rows: Iterator[Row]) -> Iterator[Row]:
    """Until then no manager can lead: what was restored in part is no platform."""
    lease: Row | None = None
    for row in rows:
        if row[0] == LEASE_KEY:
            lease = row
        else:
            yield row
    if lease is not None:
        yield lease

"""A restored store gives no number twice, and starts nothing before runs that it does not know have ended."""

from __future__ import annotations

import asyncio
import io

import pytest
from tests.support.platform.desk import CLUSTER, WALL_NS, Desk, spec

from fireflyer.base.errors import DataCorruption, UsageError
from fireflyer.base.units import SECOND
from fireflyer.cluster.core.platform.messages import LEASE_KEY
from fireflyer.cluster.core.platform.store.rows import STATE_KEY, ClusterRow, decode_row
from fireflyer.cluster.manager.backup import FOR_EVER_NS, back_up, restore
from fireflyer.cluster.schema.tasks import TaskState
from fireflyer.kvstore import MemoryEngine, Transaction
from fireflyer.kvstore.core.fenced import LeaseRow

Rows = dict[bytes, bytes]
HOLD_NS = 60 * SECOND
LATER_NS = WALL_NS + 60 * SECOND
"""When the backup is restored."""


async def engine_of(rows: Rows) -> MemoryEngine:
    engine = MemoryEngine()

    async def body(transaction: Transaction) -> None:
        for key, value in rows.items():
            transaction.set(key, value)

    await engine.transact(body)
    return engine


async def rows_of(engine: MemoryEngine) -> Rows:
    page = await engine.read(lambda rows: rows.get_range(b"", None))
    assert not page.more
    return dict(page.items)


def backup_of(rows: Rows) -> bytes:
    async def story() -> bytes:
        file = io.BytesIO()
        await back_up(await engine_of(rows), file)
        return file.getvalue()

    return asyncio.run(story())


def restored(backup: bytes, *, into: Rows | None = None) -> Rows:
    async def story() -> Rows:
        engine = await engine_of(into or {})
        await restore(engine, io.BytesIO(backup), now_ns=LATER_NS, hold_ns=HOLD_NS)
        return await rows_of(engine)

    return asyncio.run(story())


def state_of(rows: Rows) -> ClusterRow:
    return decode_row(STATE_KEY, rows[STATE_KEY], ClusterRow)


def test_all_rows_come_back_but_cluster_lease_and_numbers() -> None:
    desk = Desk("n1", "n2")
    task = desk.task(spec())
    strange = {b"FS": b"of the file system", b"PKma-n1": b"a machine"}
    before = {**desk.rows, **strange}
    after = restored(backup_of(before))
    changed = {key for key in before if after.get(key) != before[key]}
    assert changed == {STATE_KEY, LEASE_KEY, b"FS"}
    assert state_of(after).cluster != CLUSTER, "tokens of new runs differ from all that were given"
    assert state_of(after).next_task > task + 100_000
    old, new = (decode_row(LEASE_KEY, rows[LEASE_KEY], LeaseRow) for rows in (before, after))
    assert new.term > old.term + 1_000_000, "agents follow no older leader"


def test_nothing_starts_before_runs_of_the_time_after_the_backup_have_ended() -> None:
    desk = Desk("n1", "n2")
    known = desk.task(spec())
    desk.runs_on(known, *desk.nodes_of(known))
    (lead,) = desk.nodes_of(known)
    token = desk.machine.runs(known, desk.now_ns)[0].token
    rows = restored(backup_of(desk.rows))

    new = Desk(rows=rows, holder="m1")
    new.statuses[lead] = desk.statuses[lead]
    for name in ("n1", "n2"):
        new.say(name)
    assert new.state(known) is TaskState.RUNNING
    assert new.machine.runs(known, new.now_ns)[0].token == token, "what it knows goes on"
    task = new.task(spec("later"))
    assert new.state(task) is TaskState.QUEUED
    assert "restored from a backup" in new.machine.why(task, new.now_ns).text
    new.pass_time(state_of(rows).starts_after_ns - new.machine.time_ns(new.now_ns))
    for name in ("n1", "n2"):
        new.say(name)
    new.pass_time(SECOND)
    assert new.state(task) is TaskState.SCHEDULED
    assert new.machine.runs(task, new.now_ns)[0].token != token


def test_only_an_empty_store_is_restored_into_and_only_a_whole_backup() -> None:
    backup = backup_of(Desk("n1").rows)
    with pytest.raises(UsageError, match="holds a platform or its users already"):
        restored(backup, into={b"PKma-x": b"a machine"})
    assert restored(backup, into={b"FS": b"of the file system"})
    for damaged in (backup[:-3], backup[:200] + b"\0" + backup[201:], b"other" + backup, b""):
        with pytest.raises(DataCorruption):
            restored(damaged)
    with pytest.raises(UsageError, match="holds no platform"):
        backup_of({})


def test_no_manager_leads_on_a_store_that_was_restored_in_part() -> None:
    rows = Desk("n1").rows
    backup = backup_of({**rows, **{b"PMzz" + bytes([number >> 8, number & 255]): b"x" for number in range(2500)}})

    class Stopped(MemoryEngine):
        commits = 0

        async def transact(self, body: object, **options: object) -> object:  # type: ignore[override]
            self.commits += 1
            if self.commits == 3:
                raise asyncio.CancelledError
            return await super().transact(body, **options)  # type: ignore[arg-type]

    async def story() -> Rows:
        engine = Stopped()
        with pytest.raises(asyncio.CancelledError):
            await restore(engine, io.BytesIO(backup), now_ns=LATER_NS, hold_ns=HOLD_NS)
        return await rows_of(engine)

    left = asyncio.run(story())
    assert STATE_KEY in left
    assert decode_row(LEASE_KEY, left[LEASE_KEY], LeaseRow).lease_ns == FOR_EVER_NS

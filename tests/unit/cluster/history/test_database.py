"""The tables in SQLite and in PostgreSQL: migrations, copies, queries; a database that ends and comes back."""

from __future__ import annotations

import asyncio
import functools
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, inspect, select, text
from tests.support.kvstore.postgres import PostgresServer
from tests.support.patience import allowed_s
from tests.support.platform.desk import Desk
from tests.support.platform.tables import MemoryTables
from tests.unit.cluster.history.test_tables import CLUSTER, lived, outbox

from fireflyer.base.errors import Busy, NotFound, PermanentError, UsageError
from fireflyer.base.units import SECOND
from fireflyer.cluster.core.health.findings import Finding
from fireflyer.cluster.core.platform.history_pages import RunEntry
from fireflyer.cluster.core.platform.reports import Span
from fireflyer.cluster.core.platform.store.history import ClusterTotals, CommandDone, NodeChange
from fireflyer.cluster.core.platform.store.rows import OUTBOX_PREFIX
from fireflyer.cluster.history import database as database_module
from fireflyer.cluster.history import pages, queries
from fireflyer.cluster.history.audit import AUDIT_PREFIX, AuditLog
from fireflyer.cluster.history.copier import Copier, Outbox
from fireflyer.cluster.history.database import Database, check_url
from fireflyer.cluster.history.schema import AUDIT, METADATA, NODE_STATES, RUN_PARTS, RUNS, TASKS, VERSION_TABLE
from fireflyer.cluster.history.upgrade import HEAD, found_revision, migrate, upgrade
from fireflyer.cluster.history.writing import copy_rows
from fireflyer.kvstore import Engine, prefix_range
from fireflyer.kvstore import open as open_store


def rows_of(connection: Connection, table: Any) -> list[dict[str, Any]]:
    return [dict(row) for row in connection.execute(select(table)).mappings()]


def test_the_tables_have_what_was_folded_also_when_it_is_copied_again(url: str) -> None:
    desk = lived(7)
    rows, expected = outbox(desk), MemoryTables()
    expected.copy(CLUSTER, rows)

    async def whole() -> None:
        database = Database(url)
        assert list(await asyncio.gather(database.prepare(), database.prepare())) == [HEAD, HEAD], "two at once"
        for begin, end in ((0, 30), (10, 40), (0, len(rows)), (5, 25)):
            piece = rows[begin:end]
            await database.call(functools.partial(copy_rows, cluster=CLUSTER, rows=piece), writes=True)
        tables = (TASKS, RUNS, RUN_PARTS, NODE_STATES, AUDIT)
        found = await database.call(lambda connection: [rows_of(connection, table) for table in tables])
        tasks, runs, parts, states, audit = found
        assert {row["id"]: row for row in tasks} == expected.tasks
        assert {(row["task"], row["number"]): row for row in runs} == expected.runs
        assert {(row["task"], row["run"], row["part"]): row["ns"] for row in parts} == expected.parts
        assert {(row["cluster"], row["change"]): row for row in states} == expected.node_states
        assert {row["entry"]: row for row in audit} == expected.audit
        await ask(database, desk)
        await database.close()

    asyncio.run(whole())


def test_tables_are_brought_to_this_release_beyond_the_time_of_a_question(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An index of all runs takes longer than an answer may; cut off, it would be begun again for ever."""
    said: list[str] = []

    def slow(connection: Connection) -> str:
        if connection.dialect.name == "postgresql":
            said.append(str(connection.execute(text("SHOW statement_timeout")).scalar()))
        return upgrade(connection)

    async def whole() -> None:
        database = Database(url)
        assert await database.prepare() == HEAD
        with pytest.raises(Busy, match="does not answer"):
            await database.call(lambda connection: connection.execute(select(RUNS)).all())
        await database.close()

    monkeypatch.setattr(database_module, "upgrade", slow)
    monkeypatch.setattr(database_module, "CALL_S", 0.0)
    asyncio.run(whole())
    assert said == ([] if url.startswith("sqlite") else ["15min"])


def test_pages_go_through_all_changes_once_and_tell_what_came_later(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = outbox(lived(7))
    half = len(rows) // 2

    async def whole() -> None:
        database = Database(url)
        await database.prepare()
        await database.call(functools.partial(copy_rows, cluster=CLUSTER, rows=rows[:half]), writes=True)
        first = await all_runs(database, 1, since=0)
        await database.call(functools.partial(copy_rows, cluster=CLUSTER, rows=rows[half:]), writes=True)
        later = await all_runs(database, 3, since=first[-1].change + 1)
        runs = await all_runs(database, 1000, since=0)
        assert {(run.task, run.number): run for run in (*first, *later)} == {
            (run.task, run.number): run for run in runs
        }
        assert len(runs) == len({(run.task, run.number) for run in runs}), "each once, as it was last"
        assert (await all_runs(database, 9, since=runs[1].change))[0] == runs[1], "from this change on"
        ended = [run for run in runs if run.ended_ns is not None]
        assert ended
        assert all(run.wish for run in ended)
        monkeypatch.setattr(pages, "MAX_PAGE_NODES", 0)
        page = await database.call(lambda c: pages.run_page(c, current=CLUSTER, cluster="", since=0, limit=1000))
        assert (page.entries, page.more, page.clusters) == (tuple(runs[:1]), True, (CLUSTER,)), "few names at a time"
        page = await database.call(lambda c: pages.run_page(c, current=CLUSTER, cluster="c2", since=0, limit=1000))
        assert (page.entries, page.more) == ((), False)
        states = await database.call(lambda c: pages.node_page(c, current=CLUSTER, cluster="", since=0, limit=1000))
        one = await database.call(
            lambda c: pages.node_page(c, current=CLUSTER, cluster="", since=states.entries[-1].change, limit=1)
        )
        assert (one.entries, one.more) == (states.entries[-1:], False)
        await database.close()

    asyncio.run(whole())


class NamesRead:
    """A connection that notes of which runs the names of nodes were read."""

    def __init__(self, connection: Any) -> None:
        self.connection, self.changes = connection, list[int]()

    def execute(self, query: Any) -> Any:
        result = self.connection.execute(query)
        if "node_names" not in result.keys():  # noqa: SIM118 - it is no mapping
            return result
        rows = result.all()
        self.changes += [row.change for row in rows]
        return rows


def test_names_of_nodes_are_read_of_the_runs_of_the_page_only(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = outbox(lived(7))
    monkeypatch.setattr(pages, "MAX_PAGE_NODES", 0)

    def read(connection: Any) -> tuple[list[int], list[int]]:
        names: Any = NamesRead(connection)
        page = pages.run_page(names, current=CLUSTER, cluster="", since=0, limit=1000)
        return names.changes, [run.change for run in page.entries]

    async def whole() -> None:
        database = Database(url)
        await database.prepare()
        await database.call(functools.partial(copy_rows, cluster=CLUSTER, rows=rows), writes=True)
        changes, of_page = await database.call(read)
        assert changes == of_page
        assert len(of_page) == 1
        await database.close()

    asyncio.run(whole())


async def all_runs(database: Database, limit: int, *, since: int) -> list[RunEntry]:
    found: list[RunEntry] = []
    while True:
        page = await database.call(
            lambda c, s=since: pages.run_page(c, current=CLUSTER, cluster=CLUSTER, since=s, limit=limit)  # type: ignore[misc]
        )
        found += page.entries
        if not page.more:
            return found
        since = page.entries[-1].change + 1


def test_a_fault_that_is_no_finding_of_this_release_is_left_out(url: str) -> None:
    async def whole() -> None:
        database = Database(url)
        await database.prepare()
        rows = [
            (0, NodeChange(5, "n0", "drained", "why", Finding(check="gpu_xid", severity="high", seen_ns=1), 3)),
            (1, NodeChange(6, "n0", "returned")),
        ]
        await database.call(functools.partial(copy_rows, cluster=CLUSTER, rows=rows), writes=True)
        ask = functools.partial(pages.node_page, current=CLUSTER, cluster="", since=0, limit=9)
        first, second = (await database.call(lambda c: ask(c))).entries
        assert (first.fault, first.ticket) == (rows[0][1].fault, 3)
        assert (second.fault, second.ticket) == (None, 0)
        await database.call(
            lambda c: c.execute(text("UPDATE node_states SET fault = '{}' WHERE change = 0")), writes=True
        )
        first, second = (await database.call(lambda c: ask(c))).entries
        assert (first.fault, first.ticket) == (None, 3)
        await database.close()

    asyncio.run(whole())


async def ask(database: Database, desk: Desk) -> None:
    """The queries against what the manager says."""
    now_ns = desk.machine.time_ns(desk.now_ns)
    ids = [task for task in range(1, 4) if desk.machine.task(task, desk.now_ns).ended_ns is not None]
    nothing: dict[str, Any] = {"user": "", "outcome": "", "name": "", "since_ns": None, "until_ns": None}
    paged: list[int] = []
    after = ""
    while True:
        page = await database.call(lambda c, a=after: queries.past_tasks(c, **nothing, after=a, limit=1))  # type: ignore[misc]
        paged += [task.id for task in page.tasks]
        after = page.next
        if not after:
            break
    assert sorted(paged) == ids
    for task in ids:
        answer = await database.call(lambda c, t=task: queries.past_task(c, t))  # type: ignore[misc]
        view = desk.machine.task(task, desk.now_ns)
        assert (answer.task.account, answer.task.ettr) == (view.account, view.ettr)
        assert sum(parts.total_ns for parts in answer.parts.values()) == view.account.total_ns
    with pytest.raises(NotFound):
        await database.call(lambda c: queries.past_task(c, 99))
    report = await database.call(lambda c: queries.usage_report(c, CLUSTER, 0, now_ns + 1, "user", now_ns))
    node_s = sum(
        len(run.nodes) * ((run.over_ns or now_ns) - run.scheduled_ns) / SECOND
        for task in range(1, 4)
        for run in desk.machine.runs(task, desk.now_ns)
    )
    assert sum(line.node_seconds for line in report.lines) == pytest.approx(node_s)
    assert sum(line.tasks for line in report.lines) == len(ids)
    totals = desk.machine.totals(desk.now_ns)
    used = await database.call(
        lambda c: queries.utilisation_report(c, Span.of(now_ns - 200 * SECOND, now_ns, 20), totals)
    )
    assert sum(step.allocated for step in used.steps) == pytest.approx(totals.allocated_ns / SECOND, rel=0.05)


def differences(connection: Connection) -> list[Any]:
    """Between the tables and what the code describes."""
    context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE})
    return list(compare_metadata(context, METADATA))


def reflected(connection: Connection) -> dict[str, Any]:
    """All tables, the one of the revision too, as the database has them."""
    found = inspect(connection)
    return {
        name: (
            [(one["name"], str(one["type"]), one["nullable"], one["default"]) for one in found.get_columns(name)],
            found.get_pk_constraint(name)["constrained_columns"],
            sorted((str(one["name"]), one["column_names"], one["unique"]) for one in found.get_indexes(name)),
        )
        for name in found.get_table_names()
    }


def test_new_tables_are_those_that_the_migrations_make(url: str) -> None:
    def remove(connection: Connection) -> None:
        METADATA.drop_all(connection)
        connection.execute(text(f"DROP TABLE {VERSION_TABLE}"))

    async def whole() -> None:
        database = Database(url)
        assert await database.prepare() == HEAD
        new = await database.call(reflected)
        await database.call(migrate, writes=True)  # which has nothing to do
        assert await database.call(differences) == []
        await database.call(remove, writes=True)
        await database.call(migrate, writes=True)
        assert await database.call(found_revision) == HEAD
        assert await database.call(differences) == []
        assert await database.call(reflected) == new
        assert new.keys() == {*METADATA.tables, VERSION_TABLE}
        await database.close()

    asyncio.run(whole())


def test_an_older_manager_leaves_newer_tables_as_they_are(tmp_path: Path) -> None:
    async def whole() -> None:
        database = Database(f"sqlite:///{tmp_path / 'h'}")
        await database.prepare()
        with sqlite3.connect(tmp_path / "h") as newer:
            newer.execute(f"UPDATE {VERSION_TABLE} SET version_num = '9999'")
            newer.execute("ALTER TABLE tasks ADD COLUMN later TEXT")
        newer.close()
        assert await database.call(upgrade, writes=True) == "9999"
        await database.call(lambda c: copy_rows(c, CLUSTER, outbox(lived(1))), writes=True)

    asyncio.run(whole())
    assert (tmp_path / "h").stat().st_mode & 0o077 == 0, "for the manager's account alone"


class Leader:
    """Of a store whose outbox a test has filled."""

    def __init__(self, last: int) -> None:
        self.first, self.last = 0, last

    def outbox(self) -> Outbox:
        return Outbox(CLUSTER, self.first, self.last)

    def copied(self, until: int) -> None:
        self.first = until


@pytest.mark.processes
def test_a_database_that_is_killed_and_comes_back_misses_nothing(postgres_server: PostgresServer) -> None:
    desk = lived(3)
    url = postgres_server.url().replace("&table=", "&schema=k_")

    async def whole() -> None:
        database = Database(url)
        async with await open_store("memory:") as engine:
            leader = Leader(len(outbox(desk)))
            async with engine.transaction() as rows:
                for key, value in desk.rows.items():
                    if key.startswith(OUTBOX_PREFIX):
                        rows.set(key, value)
            copier = Copier(leader, engine, database)
            postgres_server.crash()
            with pytest.raises(Busy) as refused:
                await copier.step()
            assert "fireflyer@" not in refused.value.message
            assert leader.first == 0, "nothing is said to be copied"
            postgres_server.start()
            assert not await copier.step()
            postgres_server.crash()
            postgres_server.start()
            assert await database.call(lambda c: len(rows_of(c, TASKS))) == 3
            assert leader.first == leader.last
        await database.close()

    asyncio.run(whole())


async def entries(engine: Engine) -> list[tuple[bytes, bytes]]:
    begin, end = prefix_range(AUDIT_PREFIX)
    return list((await engine.read(lambda rows: rows.get_range(begin, end))).items)


def test_what_is_refused_and_what_was_begun_is_in_the_audit_too(tmp_path: Path) -> None:
    async def whole() -> None:
        database = Database(f"sqlite:///{tmp_path / 'h'}")
        async with await open_store("memory:") as engine:
            audit, leader = AuditLog(engine), Leader(0)
            copier = Copier(leader, engine, database)
            async with audit.entry("ann", "GrantRole", "bob", "platform:admin", address="10.0.0.7"):
                await copier.step()
                assert not await entries(engine), "copied while it is begun"
            with pytest.raises(PermanentError):
                async with audit.entry("ann", "RemoveUser", "bob"):
                    raise PermanentError("the store says no")
            await copier.step()
            assert not await entries(engine)
            nothing: dict[str, Any] = {"user": "", "command": "", "target": "", "since_ns": None, "until_ns": None}
            page = await database.call(lambda c: queries.audit_page(c, **nothing, after="", limit=10))
            assert [(entry.command, entry.outcome) for entry in page.entries] == [
                ("RemoveUser", "refused"), ("GrantRole", "done"),
            ]  # fmt: skip
            assert page.entries[1].address == "10.0.0.7"
        await database.close()

    asyncio.run(whole())


@pytest.mark.parametrize(
    "url", ["sqlite:///relative", "sqlite://host/x", "mysql://u:secret@h/d", "postgresql://u:secret@h/d?schema=A;B", ""]
)
def test_a_url_that_is_none_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(UsageError) as refused:
        check_url(url)
    assert "secret" not in refused.value.message


def test_a_nul_of_a_program_is_stored_as_a_sign(url: str) -> None:
    async def whole() -> None:
        database = Database(url)
        await database.prepare()
        row = CommandDone(1, "ann", "StopTask", "1", "a\0b")
        await database.call(lambda c: copy_rows(c, CLUSTER, [(1, row), (2, ClusterTotals(1, 2, 2, 1, 0))]), writes=True)
        assert [one["text"] for one in await database.call(lambda c: rows_of(c, AUDIT))] == ["a\ufffdb"]
        await database.close()

    asyncio.run(whole())


def test_questions_without_an_end_are_given_up_and_hold_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any user may ask for all that the tables have."""
    endless = text("WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n")

    async def whole() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
        database = Database(f"sqlite:///{tmp_path / 'history.sqlite'}")
        await database.prepare()
        monkeypatch.setattr(database_module, "CALL_S", 0.3)
        asked = [asyncio.ensure_future(database.call(lambda c: c.execute(endless).scalar())) for _ in range(6)]
        await asyncio.sleep(0)
        assert await asyncio.to_thread(lambda: 6) == 6
        for one in await asyncio.gather(*asked, return_exceptions=True):
            assert isinstance(one, Busy)
        monkeypatch.setattr(database_module, "CALL_S", allowed_s(30))
        assert await database.call(lambda c: rows_of(c, AUDIT)) == []
        await database.close()

    asyncio.run(whole())

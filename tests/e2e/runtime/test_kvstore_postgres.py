"""The engine on a real PostgreSQL server: several processes, broken connections, a server that goes and comes back."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import asyncpg
import pytest
from tests.support.kvstore.engines import Opened, put, values
from tests.support.kvstore.postgres import PostgresServer, postgres_programs, running_postgres
from tests.support.loops import on_loop
from tests.support.patience import allowed_s

from fireflyer import kvstore
from fireflyer.base.errors import NotFound, UsageError
from fireflyer.base.units import SECOND
from fireflyer.kvstore import CommitUnknown, Disconnected, KeyRange, Transaction, transact_once
from fireflyer.kvstore.postgres import PostgresEngine, _Statements, coarse_locks

pytestmark = pytest.mark.processes


@contextmanager
def _counting(url: str, processes: int, count: int) -> Iterator[list[subprocess.Popen[str]]]:
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.support.kvstore.load", url, f"p{number}", "2", str(count)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(processes)
    ]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


_OURS = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'fireflyer'"


@asynccontextmanager
async def _administrator(server: PostgresServer) -> AsyncIterator[Any]:
    """Comes when nobody else is connected any more: the server serves other tests, too, and who has left a connection
    is listed until its process has ended."""
    connection = await asyncpg.connect(host=server.directory, user="fireflyer", database="postgres")
    try:
        await _until_none(connection, _OURS)
        yield connection
    finally:
        await connection.close()


async def _until_none(admin: Any, query: str) -> None:
    """Until it finds nothing, or 0."""
    async with asyncio.timeout(30):
        while await admin.fetchval(query):
            await admin.execute("SELECT pg_sleep(0.01)")


async def _check_counted(url: str, acknowledged: list[str]) -> None:
    async with await kvstore.open(url) as kv:
        found = await values(kv)
    assert found[b"total"] == b"%d" % len(acknowledged)
    assert {key for key in found if key.startswith(b"left/")} == {b"left/" + each.encode() for each in acknowledged}
    numbers = [int(value) for key, value in found.items() if key.startswith(b"left/")]
    assert sorted(numbers) == list(range(1, len(acknowledged) + 1))


def test_several_processes_count_together(postgres_server: PostgresServer) -> None:
    url = postgres_server.url()
    with _counting(url, processes=3, count=12) as processes:
        outputs = [process.communicate(timeout=allowed_s(60))[0] for process in processes]
        assert [process.returncode for process in processes] == [0, 0, 0]
    acknowledged = [line for output in outputs for line in output.split()]
    assert len(acknowledged) == 36
    on_loop(_check_counted)(url, acknowledged)


def _crash_under_load(rounds: int) -> None:
    programs = postgres_programs()
    if programs is None:
        pytest.skip("no PostgreSQL on this machine; install the package postgresql")
    with running_postgres(programs, durable=True) as server:
        url = server.url()
        with _counting(url, processes=2, count=15 * rounds) as processes:
            outputs_open = [process.stdout for process in processes if process.stdout is not None]
            lines = [output.readline().strip() for output in outputs_open]  # all have opened the store
            for number in range(rounds):
                lines += [outputs_open[0].readline().strip() for _ in range(5)]
                if number % 2:
                    server.stop()
                else:
                    server.crash()
                server.start()
            # Not `communicate`, which would leave out what has been read ahead.
            acknowledged = lines + [line for output in outputs_open for line in output.read().split()]
            assert [process.wait(allowed_s(100)) for process in processes] == [0, 0]
        assert len(acknowledged) == 30 * rounds
        on_loop(_check_counted)(url, acknowledged)


@pytest.mark.slow
def test_a_server_that_crashes_and_restarts_under_load_loses_nothing_and_each_request_counts_once() -> None:
    _crash_under_load(6)


@on_loop
async def test_what_cannot_be_opened_is_said_in_one_line(postgres_server: PostgresServer) -> None:
    with pytest.raises(Disconnected, match="check that the server runs"):
        await kvstore.open("postgresql:///postgres?host=/nowhere&user=fireflyer")
    url = postgres_server.url()
    with pytest.raises(NotFound, match="createdb"):
        await kvstore.open(url.replace("///postgres", "///missing"))
    for table in ("x;drop", "x" * 60, ""):
        with pytest.raises(UsageError, match="table"):
            await kvstore.open(postgres_server.url(table=table or "''"))
    with pytest.raises(UsageError, match="URL is not valid"):
        await kvstore.open("postgresql://host:many/x")
    async with _administrator(postgres_server) as admin:
        for number, columns in enumerate(("key text, value bytea", "id int", "key bytea, value text")):
            await admin.execute(f"CREATE TABLE other_{number} ({columns})")
            with pytest.raises(UsageError, match="is not of Fire-Flyer"):
                await kvstore.open(postgres_server.url(table=f"other_{number}"))


@on_loop
async def test_the_table_is_made_once_however_many_come_first(postgres_server: PostgresServer) -> None:
    url = postgres_server.url()
    engines = await asyncio.gather(*(kvstore.open(url) for _ in range(8)))
    for number, kv in enumerate(engines):
        await put(kv, **{f"k{number}": b"v"})
    assert len(await values(engines[0])) == 8
    await asyncio.gather(*(kv.close() for kv in engines))


@on_loop
async def test_a_table_that_is_only_to_be_read_is_not_made(postgres_server: PostgresServer) -> None:
    url = postgres_server.url()
    for _ in range(2):
        with pytest.raises(NotFound, match=r"no table \w+; name that of the store: .*\?table=NAME"):
            await kvstore.open(url, make=False)
    async with await kvstore.open(url) as kv:
        await put(kv, a=b"1")
    async with await kvstore.open(url, make=False) as kv:
        assert await values(kv) == {b"a": b"1"}


@on_loop
async def test_connections_are_bounded_and_the_rest_waits(postgres_server: PostgresServer) -> None:
    url, _, table = postgres_server.url().partition("&table=")
    async with (
        _administrator(postgres_server) as admin,
        await PostgresEngine.connect(url, table=table, max_connections=2) as kv,
    ):
        await asyncio.gather(*(put(kv, **{f"k{number}": b"v"}) for number in range(40)))
        assert len(await values(kv)) == 40
        assert await admin.fetchval(_OURS) <= 2


_TERMINATE = (
    "SELECT count(pg_terminate_backend(pid, 20000)) FROM pg_stat_activity "
    "WHERE pid <> pg_backend_pid() AND application_name = 'fireflyer'"
)
"""Waits until they are gone: those who were told of it may come again before."""


@on_loop
async def test_a_connection_that_breaks_before_the_commit_is_replaced(postgres_server: PostgresServer) -> None:
    async with _administrator(postgres_server) as admin, await kvstore.open(postgres_server.url()) as kv:
        await put(kv, a=b"1")
        runs = 0

        async def body(tx: Transaction) -> None:
            nonlocal runs
            runs += 1
            number = int(await tx.get(b"a") or b"")
            if runs <= 2:
                assert await admin.fetchval(_TERMINATE) == 1
            tx.set(b"a", b"%d" % (number + 1))

        await kv.transact(body)
        assert runs == 3
        assert await values(kv) == {b"a": b"2"}

        side = Opened(kv)
        tx = await side.begin()
        await tx.get(b"a")
        await admin.fetchval(_TERMINATE)
        with pytest.raises(Disconnected):
            await tx.get(b"b")
        with pytest.raises(Disconnected):
            await side.commit()


async def _slow_commits(admin: Any, table: str) -> None:
    """Makes COMMIT wait until `_let_commit`, if the transaction wrote the key `slow`."""
    await admin.execute(f"""
        SELECT pg_advisory_lock(1);
        CREATE FUNCTION wait_{table}() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN PERFORM pg_advisory_xact_lock(1); RETURN NULL; END $$;
        CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON {table} DEFERRABLE INITIALLY DEFERRED
        FOR EACH ROW WHEN (new.key = 'slow') EXECUTE FUNCTION wait_{table}();
    """)


async def _let_commit(admin: Any) -> None:
    assert await admin.fetchval("SELECT pg_advisory_unlock(1)")


_COMMITTING = "SELECT pid FROM pg_stat_activity WHERE query = 'COMMIT' AND state = 'active' AND wait_event = 'advisory'"
_BEHIND = "SELECT 1 FROM pg_stat_activity WHERE query <> 'COMMIT' AND wait_event_type = 'Lock'"
"""Somebody waits for a row that another transaction has written."""


async def _committing(admin: Any) -> int:
    async with asyncio.timeout(30):
        while (pid := await admin.fetchval(_COMMITTING)) is None:
            await admin.execute("SELECT pg_sleep(0.01)")
    return int(pid)


@on_loop
async def test_a_deadline_during_commit_leaves_doubt_and_it_does_happen(postgres_server: PostgresServer) -> None:
    url = postgres_server.url()
    async with _administrator(postgres_server) as admin, await kvstore.open(url) as kv:
        await _slow_commits(admin, url.partition("table=")[2])
        with pytest.raises(CommitUnknown, match="may or may not be committed"):
            await kv.transact(lambda tx: _set(tx, b"slow"), timeout_ns=SECOND)
        assert await values(kv) == {}  # not yet
        setting = asyncio.create_task(_set_by_itself(kv))  # waits for the row, so for the straggler
        async with asyncio.timeout(30):
            while not await admin.fetchval(_BEHIND):
                await admin.execute("SELECT pg_sleep(0.01)")
        await _let_commit(admin)
        await setting
        assert await values(kv) == {b"slow": b"2"}


async def _set(tx: Transaction, key: bytes) -> None:
    tx.set(key, b"1")


async def _set_by_itself(kv: kvstore.Engine) -> None:
    async def body(tx: Transaction) -> None:
        tx.set(b"slow", b"2" if await tx.get(b"slow") else b"first, so the straggler was overtaken")

    await kv.transact(body, timeout_ns=20 * SECOND)


@on_loop
async def test_a_server_process_killed_during_commit_leaves_doubt_that_a_marker_resolves(
    postgres_server: PostgresServer,
) -> None:
    url = postgres_server.url()
    async with _administrator(postgres_server) as admin, await kvstore.open(url) as kv:
        await _slow_commits(admin, url.partition("table=")[2])

        async def body(tx: Transaction) -> bytes:
            number = b"%d" % (int(await tx.get(b"counter") or b"0") + 1)
            tx.set(b"counter", number)
            if not runs:
                tx.set(b"slow", b"1")
            runs.append(number)
            return number

        async def kill() -> None:
            await admin.fetchval("SELECT pg_terminate_backend($1)", await _committing(admin))

        runs: list[bytes] = []
        with pytest.raises(CommitUnknown, match="broke during the commit"):
            await asyncio.gather(kv.transact(body), kill())
        assert len(runs) == 1
        runs.clear()
        number, _ = await asyncio.gather(transact_once(kv, body, marker=b"marker"), kill())
        assert number == b"1"
        assert len(runs) == 2
        assert await values(kv) == {b"counter": b"1", b"marker": b"1"}


@on_loop
async def test_every_statement_is_planned_over_the_index(postgres_server: PostgresServer) -> None:
    """A sequential scan would take a predicate lock on the whole table, and all would conflict with all."""
    url, _, table = postgres_server.url().partition("&table=")
    async with await PostgresEngine.connect(url, table=table) as kv:
        await put(kv, **{f"k{number}": b"v" for number in range(10)})
        statements = _Statements(table)
        some, bounded, open_ended = [[b"k1", b"k3"]], KeyRange(b"k1", b"k3"), KeyRange(b"k1", None)
        queries: list[tuple[str, list[Any]]] = [
            (statements.get, [b"k1"]),
            (statements.touch, some),
            (statements.clear, some),
        ]
        for wanted in (bounded, open_ended):
            queries += [statements.bounded("SELECT count(*)", wanted), statements.bounded("DELETE", wanted)]
            for reverse in (False, True):
                query, bounds = statements.scan(wanted, reverse=reverse)
                queries.append((query, [*bounds, 10]))
        async with kv._pool.acquire() as connection:
            for query, arguments in queries:
                plan = "\n".join(row[0] for row in await connection.fetch(f"EXPLAIN {query}", *arguments))
                assert "Index Cond" in plan, plan
                assert "Seq Scan" not in plan, plan
                assert "Bitmap" not in plan, plan
                assert "Sort" not in plan, plan


@on_loop
async def test_limits_of_predicate_locks_that_are_too_low_are_said_once(
    postgres_server: PostgresServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with await kvstore.open(postgres_server.url()) as engine:
        await put(engine, a=b"1")
    (record,) = [one for one in caplog.records if one.name == "fireflyer.kvstore.postgres"]
    assert record.levelname == "WARNING"
    assert "max_pred_locks_per_transaction = 4096" in record.getMessage()
    assert "\n" not in record.getMessage()


@pytest.mark.parametrize(
    ("settings", "fine"),
    [
        ((64, -2, 2), False),
        ((4096, -2, 64), True),
        ((4096, -2, 2), False),
        ((64, 2000, 64), True),
        ((512, -1, 64), False),
    ],
)
def test_what_the_settings_come_to(settings: tuple[int, int, int], fine: bool) -> None:
    assert (coarse_locks(*settings) == "") is fine

"""The engine on PostgreSQL, for several processes on several machines: one table of keys and values.

An attempt takes a connection of the pool and reads in a SERIALIZABLE transaction; its snapshot is taken by its first
read. Its writes are sent at the end, then COMMIT. The server refuses one of those whose reads and writes cross (40001),
or that wait for each other (40P01): `Conflict`. bytea is ordered bytewise whatever the locale.

A connection is used again only after COMMIT or ROLLBACK was answered. Whatever ends an attempt otherwise (a broken
connection, a deadline, a cancelled task) closes it, and the server rolls back.

The server takes its predicate locks on what a plan reads. A sequential scan would lock the table, so our sessions
plan without it; the table keeps room in its pages, so that replacing a value need not touch the index. Of more than
a few rows it makes one lock of the page, then of the table: with its defaults from 32 on, and then everybody conflicts
with everybody. That is said when we connect.

What an error means for a transaction is told by its SQLSTATE (the server's documentation, appendix "PostgreSQL Error
Codes"); what the driver raises by itself is a lost connection. The same loss means `Disconnected` before COMMIT was
sent and `CommitUnknown` after.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeVar

import asyncpg

from fireflyer.base.errors import (
    Busy,
    DataCorruption,
    FireflyerError,
    NoSpace,
    NotFound,
    PermanentError,
    PermissionDenied,
    UsageError,
)
from fireflyer.base.units import MS, SECOND
from fireflyer.kvstore.core.conflicts import Conflicts
from fireflyer.kvstore.core.keys import ATTEMPT_LIMIT_NS, MAX_PAGE_BYTES, Item, KeyRange, Page
from fireflyer.kvstore.core.overlay import Mutations
from fireflyer.kvstore.core.timing import Timing
from fireflyer.kvstore.engine import AttemptingEngine
from fireflyer.kvstore.errors import CommitUnknown, Conflict, Disconnected, TransactionTimeout
from fireflyer.kvstore.timing import LoopTiming
from fireflyer.kvstore.transaction import Source

__all__ = ["DEFAULT_TABLE", "MAX_CONNECTIONS", "PostgresEngine", "coarse_locks"]

_log = logging.getLogger(__name__)
T = TypeVar("T")

DEFAULT_TABLE: Final = "fireflyer_kv"
MAX_CONNECTIONS: Final = 16
"""Of one engine; attempts beyond them wait for one."""
CONNECT_TIMEOUT_NS: Final = 5 * SECOND
OPEN_TIMEOUT_NS: Final = 20 * SECOND
ROLLBACK_TIMEOUT_NS: Final = SECOND
IDLE_CONNECTION_NS: Final = 300 * SECOND
LOCKS_OF_TABLE: Final = 512
"""Predicate locks of one transaction at least, before the server takes the whole table: one that carries out 256
requests for files at once takes several hundred."""
LOCKS_OF_PAGE: Final = 16
_TABLE_NAME: Final = re.compile(r"[a-z_][a-z0-9_]{0,48}")
_SCHEMA_LOCK: Final = 0x6666_6B76
"""Of pg_advisory_xact_lock: who creates the table."""
_SESSION: Final = {
    "application_name": "fireflyer",
    "statement_timeout": str(ATTEMPT_LIMIT_NS // MS),
    "idle_in_transaction_session_timeout": str(2 * ATTEMPT_LIMIT_NS // MS),
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
    "jit": "off",
}

_CONFLICTS: Final = ("40001", "40P01", "55P03")
"""Serialization failure, deadlock, lock not available: the server has rolled back."""
_LOST: Final = ("08", "57P", "25P03", "40003", "53300", "25006")
"""Connection exceptions; shutdown, crash, starting up; idle for too long; completion unknown; too many
connections; a standby that only reads."""
_CLASSES: Final[tuple[tuple[str, type[FireflyerError], str], ...]] = (
    ("57014", TransactionTimeout, "the server cancelled a statement that took too long; nothing was committed"),
    ("53100", NoSpace, "the server's disk is full; free some space"),
    ("53", Busy, "the server is short of a resource"),
    ("28", PermissionDenied, "the server refused the user; check name, password and pg_hba.conf"),
    ("42501", PermissionDenied, "the user lacks a privilege; grant it"),
    ("3D000", NotFound, "no such database; create it with `createdb`"),
    ("XX001", DataCorruption, "the server found damaged data"),
    ("XX002", DataCorruption, "the server found a damaged index"),
)


class _Statements:
    """SQL for one table; its name has been checked."""

    def __init__(self, table: str) -> None:
        self.create = (
            f"CREATE TABLE IF NOT EXISTS {table} (key bytea PRIMARY KEY, value bytea NOT NULL) WITH (fillfactor = 80)"
        )
        self.check = f"SELECT key, value FROM {table} LIMIT 0"
        self.get = f"SELECT value FROM {table} WHERE key = $1"
        self.get_many = f"SELECT key, value FROM {table} WHERE key = ANY($1::bytea[])"
        self.touch = f"SELECT count(*) FROM {table} WHERE key = ANY($1::bytea[])"
        self.write = (
            f"INSERT INTO {table} (key, value) SELECT * FROM unnest($1::bytea[], $2::bytea[]) "
            "ON CONFLICT (key) DO UPDATE SET value = excluded.value"
        )
        self.clear = f"DELETE FROM {table} WHERE key = ANY($1::bytea[])"
        self._table = table

    def bounded(self, verb: str, wanted: KeyRange) -> tuple[str, list[bytes]]:
        """`verb ... WHERE` the key is in the range. Two shapes, so that each has an index condition as its plan."""
        if wanted.end is None:
            return f"{verb} FROM {self._table} WHERE key >= $1", [wanted.begin]
        return f"{verb} FROM {self._table} WHERE key >= $1 AND key < $2", [wanted.begin, wanted.end]

    def scan(self, wanted: KeyRange, *, reverse: bool) -> tuple[str, list[bytes]]:
        """The bytes before a row decide whether it is sent: lengths are known without reading values."""
        order = "DESC" if reverse else "ASC"
        running = f"sum(octet_length(value)) OVER (ORDER BY key {order} ROWS UNBOUNDED PRECEDING)"
        inner, bounds = self.bounded(f"SELECT key, value, {running} - octet_length(value) AS before", wanted)
        number = len(bounds) + 1
        page = f"{inner} ORDER BY key {order} LIMIT ${number}"
        return f"SELECT key, value FROM ({page}) AS page WHERE before < {MAX_PAGE_BYTES} ORDER BY key {order}", bounds


class PostgresEngine(AttemptingEngine):
    """Made by `PostgresEngine.connect`."""

    def __init__(self, pool: Any, statements: _Statements, waits: Timing) -> None:
        super().__init__(waits)
        self._pool = pool
        self._statements = statements

    @classmethod
    async def connect(
        cls,
        url: str,
        *,
        table: str = DEFAULT_TABLE,
        max_connections: int = MAX_CONNECTIONS,
        waits: Timing | None = None,
        make_table: bool = True,
    ) -> PostgresEngine:
        """`url` as libpq understands it, also with several hosts. `make_table`: where it is missing. Raises
        `Disconnected`, `PermissionDenied`, `NotFound` (no such database, or table), `UsageError`."""
        if _TABLE_NAME.fullmatch(table) is None:
            raise UsageError(f"table {table!r}: use lower case letters, digits and _, at most 49")
        if max_connections < 1:
            raise UsageError(f"max_connections {max_connections}: at least 1")
        statements = _Statements(table)
        pool = asyncpg.create_pool(
            url,
            min_size=0,
            max_size=max_connections,
            max_inactive_connection_lifetime=IDLE_CONNECTION_NS / SECOND,
            timeout=CONNECT_TIMEOUT_NS / SECOND,
            reset=_left_clean,
            server_settings=_SESSION,
        )
        engine = cls(pool, statements, waits or LoopTiming())
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_NS / SECOND):
                await pool
                await engine._prepare(table, make=make_table)
        except BaseException as error:
            pool.terminate()
            if isinstance(error, ValueError) and not isinstance(error, FireflyerError):
                raise UsageError(
                    f"PostgreSQL URL is not valid: {error}; write it like postgresql://user@host/database"
                ) from error
            if isinstance(error, Exception):
                raise _translate(error, "connect") from error
            raise
        return engine

    async def _prepare(self, table: str, *, make: bool) -> None:
        async with self._pool.acquire() as connection, connection.transaction():
            if await connection.fetchval("SELECT to_regclass($1)::text", table) is None:
                if not make:
                    raise NotFound(
                        f"the database has no table {table}; name that of the store: "
                        "postgresql://user@host/database?table=NAME"
                    )
                await connection.execute(f"SELECT pg_advisory_xact_lock({_SCHEMA_LOCK})")
                await connection.execute(self._statements.create)
            try:
                statement = await connection.prepare(self._statements.check)
            except asyncpg.UndefinedColumnError:
                types = []
            else:
                types = [attribute.type.name for attribute in statement.get_attributes()]
            if types != ["bytea", "bytea"]:
                raise UsageError(
                    f"PostgreSQL table {table} exists and is not of Fire-Flyer: it needs the columns key bytea, value "
                    "bytea"
                )

            names = [f"max_pred_locks_per_{of}" for of in ("transaction", "relation", "page")]
            settings = await connection.fetchrow(
                "SELECT current_setting($1, true), current_setting($2, true), current_setting($3, true)", *names
            )
        if None not in tuple(settings) and (text := coarse_locks(*map(int, settings))):
            _log.warning("%s", text)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            async with asyncio.timeout(ATTEMPT_LIMIT_NS / SECOND):
                await self._pool.close()
        except Exception:  # the server is gone, or an attempt hangs
            self._pool.terminate()

    async def _begin(self, *, read_only: bool) -> Source:
        try:
            connection = await self._pool.acquire()
        except Exception as error:
            raise _translate(error, "connect") from error
        return _PostgresSource(self._pool, connection, self._statements, read_only=read_only)


def coarse_locks(per_transaction: int, per_relation: int, per_page: int) -> str:
    """What to set where the server takes locks of pages and tables too soon, by its settings `max_pred_locks_per_*`;
    empty where they do."""
    of_table = per_relation if per_relation >= 0 else per_transaction // -per_relation - 1
    if of_table >= LOCKS_OF_TABLE and per_page >= LOCKS_OF_PAGE:
        return ""
    return (
        f"PostgreSQL takes a lock of the whole table for more than {of_table} predicate locks, and of a page for more "
        f"than {per_page}, so transactions conflict that have nothing to do with each other; set in postgresql.conf "
        "max_pred_locks_per_transaction = 4096, max_pred_locks_per_relation = -2, max_pred_locks_per_page = 64 and "
        "restart it"
    )


async def _left_clean(_connection: object) -> None:
    """Instead of the pool's own reset, a round trip: attempts leave no state in their sessions."""


class _PostgresSource(Source):
    def __init__(self, pool: Any, connection: Any, statements: _Statements, *, read_only: bool) -> None:
        self._pool = pool
        self._connection = connection
        self._statements = statements
        self._mode = "READ ONLY" if read_only else "READ WRITE"
        self._one_at_a_time = asyncio.Lock()
        self._open = False
        self._sent = False

    @property
    def commit_sent(self) -> bool:
        return self._sent

    async def get(self, key: bytes) -> bytes | None:
        value: bytes | None = await self._do("read", lambda: self._connection.fetchval(self._statements.get, key))
        return value

    async def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        asked = list(dict.fromkeys(keys))
        rows = await self._do("read", lambda: self._connection.fetch(self._statements.get_many, asked))
        found: dict[bytes, bytes] = {row[0]: row[1] for row in rows}
        return [found.get(key) for key in keys]

    async def scan(self, wanted: KeyRange, limit: int, *, reverse: bool) -> Page:
        query, bounds = self._statements.scan(wanted, reverse=reverse)
        rows = await self._do("read", lambda: self._connection.fetch(query, *bounds, limit + 1))
        items: list[Item] = [(row[0], row[1]) for row in rows[:limit]]
        cut = sum(len(value) for _, value in items) >= MAX_PAGE_BYTES
        return Page(items, len(rows) > limit or cut)

    async def conflict_with(self, conflicts: Conflicts) -> None:
        if conflicts.points:
            points = list(conflicts.points)
            await self._do("read", lambda: self._connection.fetchval(self._statements.touch, points))
        for wanted in conflicts.ranges:
            query, bounds = self._statements.bounded("SELECT count(*)", wanted)
            await self._do("read", self._call(self._connection.fetchval, query, bounds))

    async def commit(self, reads: Conflicts, mutations: Mutations) -> None:  # noqa: ARG002
        for cleared in mutations.cleared:
            query, bounds = self._statements.bounded("DELETE", cleared)
            await self._do("write", self._call(self._connection.execute, query, bounds))
        written = [(key, value) for key, value in mutations.writes if value is not None]
        if written:
            keys, values = [key for key, _ in written], [value for _, value in written]
            await self._do("write", self._call(self._connection.execute, self._statements.write, [keys, values]))
        if gone := [key for key, value in mutations.writes if value is None]:
            await self._do("write", self._call(self._connection.execute, self._statements.clear, [gone]))
        if not self._open:
            return  # neither read nor wrote
        self._sent = not mutations.empty
        answer = await self._do("commit", lambda: self._connection.execute("COMMIT"))
        self._open = False
        self._sent = False
        if answer != "COMMIT":
            raise Conflict(f"PostgreSQL, commit: the server answered {answer}; run it again", retry_ns=0)

    async def end(self, error: BaseException | None) -> None:
        # What became of the transaction is known by now: if the connection broke since, that is the pool's affair.
        with contextlib.suppress(asyncpg.InterfaceError, asyncpg.PostgresError, OSError):
            if self._open and (self._sent or not isinstance(error, Exception) or not await self._rolled_back()):
                self._connection.terminate()
        with contextlib.suppress(asyncpg.InterfaceError, asyncpg.PostgresError, OSError):
            await self._pool.release(self._connection)

    async def _rolled_back(self) -> bool:
        try:
            async with asyncio.timeout(ROLLBACK_TIMEOUT_NS / SECOND):
                await self._connection.execute("ROLLBACK")
        except Exception:  # it is of no use any more, whatever it was
            return False
        return True

    def _call(
        self, method: Callable[..., Awaitable[T]], query: str, arguments: list[Any]
    ) -> Callable[[], Awaitable[T]]:
        return lambda: method(query, *arguments)

    async def _do(self, what: str, call: Callable[[], Awaitable[T]]) -> T:
        async with self._one_at_a_time:
            try:
                if not self._open:
                    self._open = True
                    await self._connection.execute(f"BEGIN ISOLATION LEVEL SERIALIZABLE {self._mode}")
                return await call()
            except FireflyerError:
                raise
            except Exception as error:
                translated = _translate(error, what, committing=self._sent)
                self._sent = isinstance(translated, CommitUnknown)
                raise translated from error


def _translate(error: Exception, what: str, *, committing: bool = False) -> FireflyerError:
    """The error to raise instead; `what` says what was attempted. `committing`: COMMIT had been sent."""
    if isinstance(error, FireflyerError):
        return error
    text = f"PostgreSQL, {what}"
    said = " ".join(str(error).split()) or type(error).__name__
    state = getattr(error, "sqlstate", None)
    lost = isinstance(error, asyncpg.InterfaceError | asyncpg.InternalClientError | OSError | EOFError)
    if state in _CONFLICTS:
        return Conflict(f"{text}: transaction not committed ({said}); run it again", retry_ns=0)
    if lost or (state or "").startswith(_LOST) or (committing and state == "57014"):
        if committing:
            return CommitUnknown(
                f"{text}: the connection broke during the commit ({said}); the transaction may or may not be committed"
            )
        return Disconnected(f"{text}: {said}; check that the server runs and accepts writes")
    for prefix, cls, advice in _CLASSES:
        if (state or "").startswith(prefix):
            return cls(f"{text}: {advice} ({said})")
    return PermanentError(f"{text}: {said}")

"""The database of the history: `sqlite:////absolute/path`, or a PostgreSQL URL as that of the key-value store.

Work is a function of a SQLAlchemy connection in a transaction. On SQLite it runs in a thread; on PostgreSQL, whose
driver is asyncpg as for the key-value store, SQLAlchemy switches between it and the loop. What changes the tables holds
one lock of all of them, so two managers never do it at a time: one that no longer leads may still copy.

In PostgreSQL the tables are in a schema of their own, `fireflyer`, or that of `?schema=NAME`.
"""

from __future__ import annotations

import asyncio
import os
import re
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit, urlunsplit

from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.pool import NullPool

from fireflyer.base.errors import Busy, FireflyerError, UsageError
from fireflyer.cluster.history.upgrade import upgrade

__all__ = ["DEFAULT_SCHEMA", "Database", "check_url"]

T = TypeVar("T")
DEFAULT_SCHEMA: Final = "fireflyer"
CALL_S: Final = 60.0
PREPARE_S: Final = 900.0
"""Of what brings the tables to this release: an index of tens of millions of runs takes minutes, and one that is cut
off is begun again."""
CONNECT_S: Final = 5.0
_READERS: Final = 4
_STEPS_PER_LOOK: Final = 100_000
"""Of SQLite's virtual machine: some milliseconds."""
_FORMS: Final = "sqlite:////absolute/path, postgresql://user@host/database or none"
_SCHEMA: Final = re.compile(r"[a-z_][a-z0-9_]{0,62}")
_LOCK: Final = 0x6666_6869
"""Of pg_advisory_xact_lock, with the hash of the schema: who changes the tables."""
_WRITES: Final = "fireflyer_writes"


def check_url(url: str) -> None:
    """Raises `UsageError`; the message has no password in it."""
    parts = urlsplit(url)
    if parts.scheme == "sqlite":
        if parts.netloc or not parts.path.startswith("//"):
            raise UsageError(f"history {url!r}: the path of an SQLite database is absolute; write {_FORMS}")
    elif parts.scheme not in ("postgresql", "postgres"):
        raise UsageError(f"history names a database that is not supported; write {_FORMS}")
    elif _SCHEMA.fullmatch(_schema_of(url)) is None:
        raise UsageError(f"history: schema {_schema_of(url)!r}: use lower case letters, digits and _, at most 63")


def _schema_of(url: str) -> str:
    return dict(parse_qsl(urlsplit(url).query)).get("schema", DEFAULT_SCHEMA)


class Database:
    """Nothing is opened before `prepare` or `call`. Raises `UsageError`."""

    def __init__(self, url: str) -> None:
        check_url(url)
        self._url = url
        self._on: _Sqlite | _Postgres = _Sqlite(url) if urlsplit(url).scheme == "sqlite" else _Postgres(url)

    @property
    def name(self) -> str:
        """For people; without a password."""
        return self._on.name

    async def prepare(self) -> str:
        """Makes the tables, or brings them to this release; the revision that they have then. Raises as `call`."""
        revision: str = await self._within(self._on.prepare(), PREPARE_S)
        return revision

    async def call(self, work: Callable[[Connection], T], *, writes: bool = False) -> T:
        """What `work` returned, committed. Raises `Busy` where the database does not answer or refuses."""
        result: T = await self._within(self._on.call(work, writes=writes))
        return result

    async def _within(self, work: Any, limit_s: float | None = None) -> Any:
        try:
            async with asyncio.timeout(CALL_S if limit_s is None else limit_s):
                return await work
        except FireflyerError:
            raise
        except TimeoutError:
            raise Busy(f"the history's database ({self.name}) does not answer; try again later") from None
        except (SQLAlchemyError, OSError) as error:
            raise Busy(f"the history's database ({self.name}) cannot be used: {_words(error)}") from error
        except Exception as error:
            if type(error).__module__.partition(".")[0] != "asyncpg":
                raise
            raise Busy(f"the history's database ({self.name}) cannot be used: {_words(error)}") from error

    async def close(self) -> None:
        await self._on.close()


def _words(error: Exception) -> str:
    """One line, without the statement and its values."""
    first: BaseException = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    lines = str(first).strip().splitlines()
    return (lines[0] if lines else type(first).__name__)[:200]


class _Sqlite:
    def __init__(self, url: str) -> None:
        self._path = unquote(urlsplit(url).path)[1:]
        self.name = self._path
        self._engine: Engine = create_engine("sqlite://", creator=self._connect, poolclass=NullPool)
        event.listen(self._engine, "begin", _begin_sqlite)
        # Of its own: questions of users hold neither the copier nor the threads of the manager's other work.
        self._threads = {True: ThreadPoolExecutor(1, "history copier"), False: ThreadPoolExecutor(_READERS, "history")}

    def _connect(self) -> sqlite3.Connection:
        os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        connection = sqlite3.connect(self._path, timeout=CONNECT_S, isolation_level=None, check_same_thread=False)
        # FULL: the outbox is cleared after a commit, so no power cut may undo it.
        for setting in ("journal_mode=WAL", "synchronous=FULL", "trusted_schema=OFF"):
            connection.execute(f"PRAGMA {setting}").close()
        return connection

    async def prepare(self) -> str:
        return await self.call(upgrade, writes=True)

    async def call(self, work: Callable[[Connection], T], *, writes: bool) -> T:
        until_s = time.monotonic() + CALL_S
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads[writes], self._run, work, writes, until_s)

    def _run(self, work: Callable[[Connection], T], writes: bool, until_s: float) -> T:
        with self._engine.connect().execution_options(**{_WRITES: writes}) as connection, connection.begin():
            if not writes:  # nobody waits for the answer then
                driver: Any = connection.connection.driver_connection
                driver.set_progress_handler(lambda: time.monotonic() > until_s, _STEPS_PER_LOOK)
            return work(connection)

    async def close(self) -> None:
        for threads in self._threads.values():
            threads.shutdown(wait=False)
        self._engine.dispose()


def _begin_sqlite(connection: Connection) -> None:
    writes = connection.get_execution_options().get(_WRITES, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


class _Postgres:
    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._schema = _schema_of(url)
        options = [(name, value) for name, value in parse_qsl(parts.query) if name not in ("schema", "table")]
        self._url = urlunsplit(parts._replace(query=urlencode(options)))
        self.name = f"PostgreSQL, schema {self._schema}"
        self._engine: Any = None

    def _opened(self) -> Any:
        if self._engine is None:
            from sqlalchemy.ext.asyncio import create_async_engine

            self._engine = create_async_engine(
                "postgresql+asyncpg://", async_creator=self._connect, pool_size=2, max_overflow=2, pool_pre_ping=True
            )
        return self._engine

    async def _connect(self) -> Any:
        import asyncpg

        settings = {"application_name": "fireflyer history", "search_path": self._schema, "jit": "off"}
        settings["synchronous_commit"] = "on"  # the outbox is cleared after a commit, so no crash may undo it
        settings["statement_timeout"] = str(int(CALL_S * 1000))
        return await asyncpg.connect(self._url, timeout=CONNECT_S, server_settings=settings)

    async def prepare(self) -> str:
        def make(connection: Connection) -> str:
            connection.execute(text(f"SET LOCAL statement_timeout = {int(PREPARE_S * 1000)}"))
            connection.execute(text(f"CREATE SCHEMA IF NOT EXISTS {self._schema}"))
            return upgrade(connection)

        return await self.call(make, writes=True)

    async def call(self, work: Callable[[Connection], T], *, writes: bool) -> T:
        def locked(connection: Connection) -> T:
            if writes:
                connection.execute(text(f"SELECT pg_advisory_xact_lock({_LOCK}, hashtext('{self._schema}'))"))
            else:  # all statements of a report see the same rows, as on SQLite
                connection.execute(text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"))
            return work(connection)

        async with self._opened().begin() as connection:
            result: T = await connection.run_sync(locked)
            return result

    async def close(self) -> None:
        if self._engine is not None:
            async with asyncio.timeout(CONNECT_S):
                await self._engine.dispose()

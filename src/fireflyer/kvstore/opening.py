"""Opens a key-value store by its URL."""

from __future__ import annotations

from typing import Final
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from fireflyer.base.errors import PermanentError, UsageError
from fireflyer.kvstore.api import Engine
from fireflyer.kvstore.core.timing import Timing
from fireflyer.kvstore.memory import MemoryEngine

__all__ = ["open"]

_FORMS: Final = "memory:, embedded:/absolute/path or postgresql://user@host/database"


async def open(url: str, *, waits: Timing | None = None) -> Engine:  # noqa: A001
    """The engine that `url` names, in the running loop:

        memory:                                       empty, gone with the process
        embedded:/absolute/path                       a directory, made if its parent exists; one process at a time
        postgresql://user@host/database?table=NAME    `table` is optional, all else is libpq's

    Close it, or use it in `async with`. Raises `UsageError` for another URL, and what the engine raises."""
    scheme, colon, rest = url.partition(":")
    if scheme == "memory" and colon and not rest:
        return MemoryEngine(waits=waits)
    if scheme == "embedded" and rest.startswith("/"):
        from fireflyer.kvstore.embedded import EmbeddedEngine

        return EmbeddedEngine(rest, waits=waits)
    if scheme in ("postgresql", "postgres") and rest.startswith("//"):
        return await _open_postgres(url, waits)
    raise UsageError(f"key-value store {_without_password(url)!r} is not valid; write {_FORMS}")


async def _open_postgres(url: str, waits: Timing | None) -> Engine:
    try:
        from fireflyer.kvstore.postgres import DEFAULT_TABLE, PostgresEngine
    except ModuleNotFoundError as error:
        if error.name != "asyncpg":
            raise
        raise PermanentError("the driver for PostgreSQL is missing; run: pip install 'fireflyer[postgres]'") from error
    parts = urlsplit(url)
    options = parse_qsl(parts.query, keep_blank_values=True)
    table = dict(options).get("table", DEFAULT_TABLE)
    query = urlencode([(name, value) for name, value in options if name != "table"])
    return await PostgresEngine.connect(urlunsplit(parts._replace(query=query)), table=table, waits=waits)


def _without_password(url: str) -> str:
    head, at, tail = url.rpartition("@")
    name, _, _ = head.rpartition(":") if head.count(":") > 1 else (head, "", "")
    return f"{name}{at}{tail}"

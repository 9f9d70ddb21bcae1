"""Opens a key-value store by its URL."""

from __future__ import annotations

import os
from typing import Final
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from fireflyer.base.errors import NotFound, PermanentError, UsageError
from fireflyer.kvstore.api import Engine
from fireflyer.kvstore.core.timing import Timing
from fireflyer.kvstore.memory import MemoryEngine

__all__ = ["open"]

_FORMS: Final = "memory:, embedded:/absolute/path or postgresql://user@host/database"


async def open(url: str, *, waits: Timing | None = None, make: bool = True) -> Engine:  # noqa: A001
    """The engine that `url` names, in the running loop:

        memory:                                       empty, gone with the process
        embedded:/absolute/path                       a directory, made if its parent exists; one process at a time
        postgresql://user@host/database?table=NAME    `table` is optional, all else is libpq's

    Close it, or use it in `async with`. `make`: a store that is not there. Raises `UsageError` for another URL,
    `NotFound` where there is none and none is to be made, and what the engine raises."""
    scheme, colon, rest = url.partition(":")
    if scheme == "memory" and colon and not rest:
        return MemoryEngine(waits=waits)
    if scheme == "embedded" and rest.startswith("/"):
        return _open_embedded(rest, waits, make=make)
    if scheme in ("postgresql", "postgres") and rest.startswith("//"):
        return await _open_postgres(url, waits, make=make)
    raise UsageError(f"key-value store {_without_password(url)!r} is not valid; write {_FORMS}")


def _open_embedded(path: str, waits: Timing | None, *, make: bool) -> Engine:
    from fireflyer.kvstore.embedded import EmbeddedEngine

    if not make and not os.path.isdir(path):
        raise NotFound(f"there is no key-value store {path}; give the directory of one")
    return EmbeddedEngine(path, waits=waits)


async def _open_postgres(url: str, waits: Timing | None, *, make: bool) -> Engine:
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
    server = urlunsplit(parts._replace(query=query))
    return await PostgresEngine.connect(server, table=table, waits=waits, make_table=make)


def _without_password(url: str) -> str:
    head, at, tail = url.rpartition("@")
    name, _, _ = head.rpartition(":") if head.count(":") > 1 else (head, "", "")
    return f"{name}{at}{tail}"

"""The store of the meta service while the service is down: checked, mended, written to a file, and read from one.

A dump (`kvstore.dump`) has every row of the store, the manager's too: chains are where the chunks of files are found.

Chunks are not in it, and remember numbers that were given out after it was written: an inode number given again would
show another file's bytes, a session's would have its updates taken for old ones. A store that is loaded therefore goes
on with numbers that nobody can have got. Nor does it say who may serve: its chains wait until it is known who served
last (`core.manager.restored`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import IO, Final

import msgspec

from fireflyer.base.errors import Busy, UsageError
from fireflyer.fs.core.manager.restored import restored
from fireflyer.fs.core.meta.context import SYSTEM, ClusterDefaults, Context
from fireflyer.fs.core.meta.fsck.repair import repair
from fireflyer.fs.core.meta.fsck.rows import Checker, Problem
from fireflyer.fs.core.meta.open_rows import LEASE_KEY as COLLECTOR_KEY
from fireflyer.fs.core.rows import CHAINS, LEASE_KEY, STATE_KEY, StateRow
from fireflyer.fs.service.meta.inode_ids import KEY as IDS_KEY
from fireflyer.fs.service.meta.inode_ids import Ids, skipped
from fireflyer.fs.service.meta.registry import MAX_SERVICES
from fireflyer.fs.service.meta.registry import PREFIX as SERVICES
from fireflyer.kvstore import Engine, Page, Reader, Transaction, prefix_range
from fireflyer.kvstore.core.rows import decode_row, encode_row
from fireflyer.kvstore.dump import PAGE_ROWS, DumpFormat, DumpWriter, Progress, Row, load_rows, read_dump, silent

__all__ = ["check_store", "dump_store", "load_store", "repair_store", "rows_to_load"]

FORMAT: Final = DumpFormat(b"fireflyer metadata 1\n", "metadata dump")
REPAIRED_AT_ONCE: Final = 500
"""Problems in one transaction."""
NUMBERS_PER_S: Final = 1 << 20
"""Since 1970, more than any cluster gives out: numbers from that time on are new, however often a dump is loaded."""
MAX_CHAIN_VERSION: Final = (1 << 32) - 1
"""Versions of chains are seconds then: more than any chain changes, as long as 32 bits count these."""


async def check_store(engine: Engine, progress: Progress = silent) -> list[Problem]:
    """Raises `Busy` where managers run on it."""
    checker, rows = Checker(), 0
    async for page in _pages(engine):
        for key, value in page:
            checker.row(key, value)
        rows += len(page)
        progress(rows)
    return checker.problems()


async def repair_store(engine: Engine, problems: Sequence[Problem], now_ns: int) -> int:
    """How many of them were mended. Check again: what hung on them is found then."""
    ids = Ids(engine)
    repaired = 0
    for first in range(0, len(problems), REPAIRED_AT_ONCE):
        await ids.prepare(1)

        async def body(rows: Transaction, first: int = first) -> int:
            context = Context(rows=rows, requester=SYSTEM, now_ns=now_ns, new_id=ids.take, cluster=ClusterDefaults())
            return await repair(problems[first : first + REPAIRED_AT_ONCE], context)

        repaired += await engine.transact(body)
    return repaired


async def dump_store(engine: Engine, file: IO[bytes], progress: Progress = silent) -> int:
    """Rows written. Raises `Busy` where managers run on it."""
    dump = DumpWriter(file, FORMAT)
    async for page in _pages(engine):
        dump.add(page)
        progress(dump.rows)
    return dump.finish()


async def load_store(engine: Engine, file: IO[bytes], now_ns: int, progress: Progress = silent) -> int:
    """Into an empty store; rows written. `file` is read twice. `now_ns`: since 1970. Raises `UsageError` where the
    store is not empty, `DataCorruption` for what is no whole dump: then nothing is in the store."""
    if (await engine.read(lambda rows: rows.get_range(b"", None, limit=1))).items:
        raise UsageError("the store is not empty; move it away first, or give an empty one with --store")
    first = now_ns // 1_000_000_000 * NUMBERS_PER_S
    for _ in rows_to_load(read_dump(file, FORMAT), first):
        """The whole file, before the first row of it counts."""
    file.seek(0)
    return await load_rows(engine, rows_to_load(read_dump(file, FORMAT), first), progress)


def rows_to_load(rows: Iterable[Row], first: int) -> Iterator[Row]:
    """What is written of these rows of a dump: new inodes, sessions and versions have numbers from `first` on, that is
    `NUMBERS_PER_S` times the seconds since 1970, and no chain serves yet."""
    ids: bytes | None = None
    for key, value in rows:
        if key == IDS_KEY:
            ids = value
        elif key == STATE_KEY:
            state = decode_row(key, value, StateRow)
            numbers = {"version": max(state.version, first), "next_client": max(state.next_client, first)}
            yield key, encode_row(msgspec.structs.replace(state, **numbers))
        elif key.startswith(CHAINS.prefix):
            _, chain = CHAINS.decode(key, value)
            version = max(chain.version + 1, min(first // NUMBERS_PER_S, MAX_CHAIN_VERSION))
            yield key, encode_row(restored(chain, version))
        else:
            yield key, value
    yield IDS_KEY, skipped(ids, first)


async def _pages(engine: Engine) -> AsyncIterator[Sequence[Row]]:
    """All rows. A lease that is renewed meanwhile is a manager's that lives, or a meta service's."""
    lease = await engine.read(_leases)
    begin = b""
    while True:
        page = await engine.read(lambda rows, begin=begin: _page(rows, begin))  # type: ignore[misc]
        yield page.items
        if not page.more:
            break
        begin = page.items[-1][0] + b"\0"
    if await engine.read(_leases) != lease:
        raise Busy("managers or meta services are using this store; stop them first")


async def _leases(rows: Reader) -> Sequence[Row]:
    """Rows that whoever runs changes every second or two: the manager's, of each meta service, of who collects."""
    services = await rows.get_range(*prefix_range(SERVICES), limit=MAX_SERVICES)
    others = [(key, await rows.get(key) or b"") for key in (LEASE_KEY, COLLECTOR_KEY)]
    return [*others, *services.items]


async def _page(rows: Reader, begin: bytes) -> Page:
    return await rows.get_range(begin, None, limit=PAGE_ROWS)

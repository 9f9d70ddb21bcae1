"""What docs/how-to/key-value-store.md says of stores holds: its URLs open, and its settings are those that PostgreSQL
needs."""

from __future__ import annotations

import asyncio
import re
import subprocess
from pathlib import Path
from typing import Final
from urllib.parse import quote

import pytest
from tests.support.kvstore.postgres import PostgresServer, postgres_programs

from fireflyer import kvstore
from fireflyer.kvstore.postgres import coarse_locks

TEXT: Final = (Path(__file__).parents[3] / "docs/how-to/key-value-store.md").read_text()


async def put(rows: kvstore.Transaction) -> None:
    rows.set(b"key", b"value")


def test_the_stores_of_one_process_open_by_the_urls_of_the_table(tmp_path: Path) -> None:
    embedded, postgres, memory = re.findall(r"^\| `(\w+:.*?)` \|", TEXT, re.MULTILINE)
    assert postgres.startswith("postgresql://")

    async def main() -> None:
        for url in (embedded.replace("/var/lib/fireflyer", str(tmp_path)), memory):
            async with await kvstore.open(url) as engine:
                await engine.transact(lambda rows: put(rows))
                assert await engine.read(lambda rows: rows.get(b"key")) == b"value"

    asyncio.run(main())
    modes = {file.stat().st_mode & 0o777 for file in (tmp_path / "state").iterdir()}
    assert modes == {0o600}, "as the page says"


def test_the_store_of_several_managers_opens_by_the_url_of_the_table(postgres_server: PostgresServer) -> None:
    """The first host is away, as one of two is after a failure; the role has a database of its name."""
    programs = postgres_programs()
    assert programs is not None
    (url,) = re.findall(r"^\| `(postgresql:.*?)` \|", TEXT, re.MULTILINE)
    directory = postgres_server.directory
    as_role = ["-h", directory, "-U", "fireflyer"]
    subprocess.run([f"{programs}/createdb", *as_role, "-O", "fireflyer", "fireflyer"], check=True)
    hosts = ",".join(quote(place, safe="") for place in (f"{directory}/away", directory))

    async def main() -> None:
        async with await kvstore.open(url.replace("db1,db2", hosts)) as engine:
            await engine.transact(lambda rows: put(rows))
        async with await kvstore.open(url.replace("db1,db2", hosts)) as engine:
            assert await engine.read(lambda rows: rows.get(b"key")) == b"value"

    try:
        asyncio.run(main())
    finally:
        subprocess.run([f"{programs}/dropdb", *as_role, "--force", "fireflyer"], check=True)


def test_the_settings_of_the_page_are_enough() -> None:
    given = [re.search(rf"{name} = (-?\d+)", TEXT) for name in ("transaction", "relation", "page")]
    numbers = [int(found[1]) for found in given if found is not None]
    assert len(numbers) == 3
    assert coarse_locks(*numbers) == ""


@pytest.mark.skipif(postgres_programs() is None, reason="no PostgreSQL")
def test_a_role_and_a_database_are_made_by_programs_that_come_with_postgresql() -> None:
    (line,) = re.findall(r"^ +(createuser .*)$", TEXT, re.MULTILINE)
    programs = postgres_programs()
    assert programs is not None
    assert all(Path(programs, word).exists() for word in ("createuser", "createdb") if word in line)

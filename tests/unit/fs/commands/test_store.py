"""`ff fs admin fsck`, `dump`, `load` on a store whose cluster is down."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support.fs.clusters.names import Names, at, violations

from fireflyer import kvstore
from fireflyer.base.errors import Busy
from fireflyer.base.units import SECOND
from fireflyer.cli import main
from fireflyer.fs.core.manager.restored import restored
from fireflyer.fs.core.meta.open_rows import LEASE_KEY as COLLECTOR_KEY
from fireflyer.fs.core.meta.tables import entry_key, inode_key
from fireflyer.fs.core.rows import CHAINS, LEASE_KEY, STATE_KEY, StateRow
from fireflyer.fs.schema.inodes import ROOT, Kind
from fireflyer.fs.schema.meta import Link, MakeDirectory, MakeNode, SetQuota, SetXattr, Symlink
from fireflyer.fs.schema.routing import Chain, Member, TargetState
from fireflyer.fs.service.meta.inode_ids import KEY as IDS_KEY
from fireflyer.fs.service.meta.inode_ids import skipped
from fireflyer.fs.service.meta.offline_store import check_store, load_store
from fireflyer.fs.service.meta.registry import PREFIX as SERVICES
from fireflyer.kvstore import Engine, MemoryEngine, Transaction
from fireflyer.kvstore.core.rows import decode_row, encode_row
from fireflyer.runtime import run

Rows = list[tuple[bytes, bytes]]


def made() -> Rows:
    with Names() as names:
        names.do(
            MakeDirectory(at("d")), SetQuota(at("d"), 1000), MakeDirectory(at("d/e")), MakeNode(at("d/f"), Kind.FILE)
        )
        names.do(Link(at("d/f"), at("d/e/g")), Symlink(at("l"), b"d/f"), SetXattr(at("d/f"), b"user.x", b"1"))
        names.check()
        return [*names.rows(), (IDS_KEY, skipped(None, 1000))]


def on_store(directory: Path, work: Callable[[Engine], Awaitable[Rows]]) -> Rows:
    async def whole() -> Rows:
        async with await kvstore.open(url(directory)) as engine:
            return await work(engine)

    return run(whole())


def loaded(directory: Path, file: Path, now_ns: int) -> int:
    async def whole() -> int:
        async with await kvstore.open(url(directory)) as engine:
            with file.open("rb") as source:
                return await load_store(engine, source, now_ns)

    return run(whole())


def first_id(rows: dict[bytes, bytes]) -> int:
    """Of the next inode."""
    return int.from_bytes(rows[IDS_KEY][1:], "big")


def url(directory: Path) -> str:
    return f"embedded:{directory}"


def put(directory: Path, rows: Rows, *cleared: bytes) -> None:
    async def work(engine: Engine) -> Rows:
        async def body(transaction: Transaction) -> Rows:
            for key, value in rows:
                transaction.set(key, value)
            for key in cleared:
                transaction.clear(key)
            return []

        return await engine.transact(body)

    on_store(directory, work)


def rows_of(directory: Path) -> Rows:
    async def work(engine: Engine) -> Rows:
        return (await engine.read(lambda rows: rows.get_range(b"", None))).items

    return on_store(directory, work)


def test_a_store_that_is_right_is_said_to_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(tmp_path / "s", made())
    assert main(["fs", "admin", "fsck", "--store", url(tmp_path / "s")]) == 0
    assert capsys.readouterr().out == "no problems found\n"


def test_what_is_lost_is_found_and_mended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = dict(made())
    directory = next(key for key in rows if key.endswith(b"d") and key[:2] == b"FE")
    put(tmp_path / "s", list(rows.items()), directory)
    command = ["fs", "admin", "fsck", "--store", url(tmp_path / "s")]
    assert main(command) == 1
    shown = capsys.readouterr().out
    assert "orphan: inode 2 counts 1 links" in shown
    assert shown.endswith("\n")
    assert rows_of(tmp_path / "s") == sorted((key, value) for key, value in rows.items() if key != directory)
    assert main([*command, "--repair", "--yes"]) == 0
    assert capsys.readouterr().out.endswith(", 0 left\n")
    mended = [row for row in rows_of(tmp_path / "s") if row[0][:2] != b"FX"]
    assert violations(mended) == []
    assert entry_key(ROOT, b"lost+found") in dict(mended)
    assert main(command) == 0


def test_rows_that_cannot_be_read_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = inode_key(2)
    put(tmp_path / "s", [*made(), (key, b"\x01junk")])
    assert main(["fs", "admin", "fsck", "--store", url(tmp_path / "s"), "--repair", "--yes"]) == 1
    shown = capsys.readouterr()
    assert f"unreadable row: row {key.hex()}" in shown.out
    assert "restore the store from a dump" in shown.err
    assert (key, b"\x01junk") in rows_of(tmp_path / "s")
    put(tmp_path / "empty", [])
    assert main(["fs", "admin", "fsck", "--store", url(tmp_path / "empty")]) == 1
    assert "there is no root directory" in capsys.readouterr().out


def test_a_dump_is_loaded_into_an_empty_store_and_nowhere_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, file = made(), tmp_path / "dump"
    put(tmp_path / "s", rows)
    assert main(["fs", "admin", "dump", "--store", url(tmp_path / "s"), str(file)]) == 0
    assert main(["fs", "admin", "dump", "--store", url(tmp_path / "s"), str(file)]) == 2
    assert main(["fs", "admin", "load", "--store", url(tmp_path / "new"), str(file)]) == 0
    back = rows_of(tmp_path / "new")
    assert dict(back) == dict(rows) | {IDS_KEY: dict(back)[IDS_KEY]}
    assert main(["fs", "admin", "load", "--store", url(tmp_path / "new"), str(file)]) == 2
    assert "the store is not empty" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dump", "new", "s"]


def test_what_was_given_out_after_a_dump_is_not_given_again(tmp_path: Path) -> None:
    """Chunks remember the numbers of inodes and sessions, and versions of chains."""
    state = StateRow(version=7, failure_timeout_ns=SECOND, term=1, number=1, next_client=3)
    chain = Chain(5, 9, (Member(11, 1, TargetState.SERVING),))
    file = tmp_path / "dump"
    put(tmp_path / "s", [*made(), (STATE_KEY, encode_row(state)), (CHAINS.key(5), encode_row(chain))])
    assert main(["fs", "admin", "dump", "--store", url(tmp_path / "s"), str(file)]) == 0
    starts = []
    for second in (1_000, 1_001):
        store = tmp_path / str(second)
        assert loaded(store, file, second * SECOND) == len(rows_of(store))
        rows = dict(rows_of(store))
        now = decode_row(STATE_KEY, rows[STATE_KEY], StateRow)
        assert CHAINS.decode(CHAINS.key(5), rows[CHAINS.key(5)])[1] == restored(chain, second), "and nobody serves yet"
        starts.append((first_id(rows), now.next_client, now.version))
    assert all(after - before == 1 << 20 for before, after in zip(*starts, strict=True))
    assert min(starts[0]) == 1_000 << 20
    put(
        tmp_path / "far",
        [
            *made(),
            (IDS_KEY, skipped(None, 5_000 << 20)),
            (STATE_KEY, encode_row(msgspec.structs.replace(state, next_client=6_000 << 20))),
        ],
    )
    file.unlink()
    assert main(["fs", "admin", "dump", "--store", url(tmp_path / "far"), str(file)]) == 0
    loaded(tmp_path / "clock set back", file, 1_000 * SECOND)
    rows = dict(rows_of(tmp_path / "clock set back"))
    assert decode_row(STATE_KEY, rows[STATE_KEY], StateRow).next_client == 6_000 << 20
    assert first_id(rows) == 5_000 << 20


def test_a_dump_that_is_not_whole_loads_nothing(tmp_path: Path) -> None:
    put(tmp_path / "s", made())
    file = tmp_path / "dump"
    assert main(["fs", "admin", "dump", "--store", url(tmp_path / "s"), str(file)]) == 0
    whole = file.read_bytes()
    for damaged in (
        whole[:-1],
        whole + b"x",
        whole[:100] + bytes([whole[100] ^ 1]) + whole[101:],
        whole[3:],
        b"",
        whole[: len(whole) // 2],
    ):
        file.write_bytes(damaged)
        assert main(["fs", "admin", "load", "--store", url(tmp_path / "new"), str(file)]) == 1
    assert rows_of(tmp_path / "new") == []


@pytest.mark.parametrize("key", [LEASE_KEY, COLLECTOR_KEY, SERVICES + b"one"])
def test_a_store_on_which_somebody_runs_is_not_looked_at(key: bytes) -> None:
    """With PostgreSQL nothing else would tell."""
    with Names() as names:
        engine = MemoryEngine(names.store)
        renewed: list[bytes] = []

        async def renew(rows: Transaction) -> None:
            renewed.append(b"%d" % len(renewed))
            rows.set(key, renewed[-1])

        class Renewing(MemoryEngine):
            """A manager, or a meta service, renews its row after each read."""

            async def read(self, body: Any, **options: Any) -> Any:
                result = await super().read(body, **options)
                await engine.transact(renew)
                return result

        with pytest.raises(Busy, match="are using this store"):
            run(check_store(Renewing(names.store)))

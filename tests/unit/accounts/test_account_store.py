"""Users in the key-value store: what the conformance suite cannot see: rows, hostile ones, and calls repeated."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from random import Random

import msgspec
import pytest
from tests.support.accounts.histories import engine_of, problems_in
from tests.support.kvstore.engines import at_once

from fireflyer.accounts import AccountStore, rows, store
from fireflyer.base.errors import DataCorruption, Exists, NotFound
from fireflyer.identity.handshake import token_id_of
from fireflyer.kvstore import CommitFault, KeyRange, MemoryEngine, Transaction
from fireflyer.kvstore.core.rows import encode_row

NOW = 1_700_000_000


class Store(AccountStore):
    def __init__(self) -> None:
        self.faults: list[CommitFault] = []
        self.engine: MemoryEngine = engine_of(Random(0), self._fault)
        super().__init__(self.engine)

    def _fault(self) -> CommitFault:
        return self.faults.pop(0) if self.faults else CommitFault.NONE


def put(engine: MemoryEngine, key: bytes, value: bytes | None) -> None:
    async def body(tx: Transaction) -> None:
        if value is None:
            tx.clear(key)
        else:
            tx.set(key, value)

    at_once(lambda: engine.transact(body))


@pytest.fixture
def kept() -> Store:
    one = Store()
    at_once(lambda: one.create_user("ada", NOW))
    return one


def test_nothing_of_a_token_but_its_hash_is_in_the_store(kept: Store) -> None:
    token = at_once(lambda: kept.issue("ada", NOW))
    scanned = kept.engine.store.scan(kept.engine.store.version, KeyRange(b"", None))
    secret = token.split(".")[2].encode()
    assert not any(secret in key + value for key, value in scanned.items)
    assert {key[:4] for key, _ in scanned.items} == {b"FNst", b"FNus", b"FNid", b"FNto", b"FNtu"}


def test_a_user_leaves_no_row_but_the_next_uid(kept: Store) -> None:
    at_once(lambda: kept.issue("ada", NOW))
    at_once(lambda: kept.issue("ada", NOW, lifetime_s=9, scope="run"))
    at_once(lambda: kept.remove_user("ada"))
    scanned = kept.engine.store.scan(kept.engine.store.version, KeyRange(b"", None))
    assert [key for key, _ in scanned.items] == [rows.STATE_KEY]


def test_expired_tokens_of_runs_do_not_add_up(kept: Store) -> None:
    for number in range(200):
        at_once(partial(kept.issue, "ada", NOW + number, lifetime_s=3, scope="run"))
    assert len(at_once(lambda: kept.tokens("ada"))) <= 3 + store.MAX_EXPIRED_PER_ISSUE
    assert problems_in(kept.engine.store) == []


@pytest.mark.parametrize("fault", [CommitFault.UNKNOWN_DONE, CommitFault.UNKNOWN_LOST, CommitFault.CONFLICT])
def test_a_change_of_which_nobody_knows_is_made_once(kept: Store, fault: CommitFault) -> None:
    def doubted(work: Callable[[], Awaitable[object]]) -> object:
        kept.faults = [fault]
        found = at_once(work)
        assert not kept.faults
        return found

    doubted(lambda: kept.create_user("alan", NOW))
    doubted(lambda: kept.grant_role("alan", "fs:admin"))
    token = str(doubted(lambda: kept.issue("alan", NOW)))
    assert at_once(lambda: kept.verify(token, NOW)).roles == ("fs:admin",)
    assert len(at_once(lambda: kept.tokens("alan"))) == 1
    doubted(lambda: kept.revoke(token_id_of(token)))
    doubted(lambda: kept.remove_user("alan"))
    assert problems_in(kept.engine.store) == []
    with pytest.raises(Exists):
        at_once(lambda: kept.create_user("ada", NOW))
    with pytest.raises(NotFound):
        at_once(lambda: kept.remove_user("alan"))


def test_who_got_the_name_of_a_removed_user_meanwhile_stays(kept: Store) -> None:
    """The removal was committed, its answer was lost, and before it is tried again there is another ada."""
    other = AccountStore(MemoryEngine(kept.engine.store, waits=engine_of(Random(1))._waits))

    kept.faults = [CommitFault.UNKNOWN_DONE]
    original, attempts = store._user, []

    async def user(reader: Transaction, name: str) -> rows.UserRow | None:
        attempts.append(name)
        if len(attempts) == 2:
            with pytest.MonkeyPatch.context() as inner:
                inner.setattr(store, "_user", original)
                await other.create_user("ada", NOW + 1)
        return await original(reader, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "_user", user)
        at_once(lambda: kept.remove_user("ada"))
    found = at_once(lambda: kept.user("ada"))
    assert found is not None
    assert found.created_s == NOW + 1
    assert len(attempts) >= 2


def row_of_ada(kept: Store) -> rows.UserRow:
    found = kept.engine.store.get(kept.engine.store.version, rows.user_key("ada"))
    assert found is not None
    return msgspec.msgpack.decode(found[1:], type=rows.UserRow)


HOSTILE = [b"", b"\x01", b"\x02\x80", b"\x01\xc1", b"\x01" + b"\x91" * 5000, b"\x01\x80"]


@pytest.mark.parametrize("value", HOSTILE, ids=[value[:4].hex() or "empty" for value in HOSTILE])
def test_rows_that_nobody_here_wrote_are_told_and_let_nobody_in(kept: Store, value: bytes) -> None:
    token = at_once(lambda: kept.issue("ada", NOW))
    good = at_once(lambda: kept.create_user("alan", NOW))
    for key in (rows.user_key("ada"), rows.token_key(token_id_of(token)), rows.STATE_KEY):
        before = kept.engine.store.get(kept.engine.store.version, key)
        put(kept.engine, key, value)
        with pytest.raises(DataCorruption, match="restore the store"):
            at_once(lambda: kept.create_user("eve", NOW) if key == rows.STATE_KEY else kept.verify(token, NOW))  # noqa: B023
        put(kept.engine, key, before)
    user = at_once(lambda: kept.user("alan"))
    assert user is not None
    assert user.account == good


def test_a_row_under_the_key_of_another_is_told(kept: Store) -> None:
    token = at_once(lambda: kept.issue("ada", NOW))
    row = row_of_ada(kept)
    put(kept.engine, rows.user_key("eve"), encode_row(msgspec.structs.replace(row, roles=("fs:admin",))))
    with pytest.raises(DataCorruption, match="it is the row of 'ada'"):
        at_once(lambda: kept.user("eve"))
    value = kept.engine.store.get(kept.engine.store.version, rows.token_key(token_id_of(token)))
    put(kept.engine, rows.token_key("0" * 16), value)
    with pytest.raises(DataCorruption, match="it is the row of"):
        at_once(lambda: kept.find("0" * 16, NOW))


@pytest.mark.parametrize(
    "changes",
    [
        {"uid": -1},
        {"uid": 1 << 32},
        {"groups": tuple(range(65))},
        {"roles": ("x" * 66,)},
        {"roles": tuple(f"fs:r{number}" for number in range(33))},
        {"tokens": -1},
        {"name": "a" * 65},
    ],
    ids=str,
)
def test_a_row_beyond_the_limits_is_told(kept: Store, changes: dict[str, object]) -> None:
    put(kept.engine, rows.user_key("ada"), encode_row(msgspec.structs.replace(row_of_ada(kept), **changes)))
    with pytest.raises(DataCorruption, match="restore the store"):
        at_once(lambda: kept.user("ada"))


def test_a_token_that_is_listed_and_not_there_is_told(kept: Store) -> None:
    token = at_once(lambda: kept.issue("ada", NOW))
    put(kept.engine, rows.token_key(token_id_of(token)), None)
    with pytest.raises(DataCorruption, match="there is no such token"):
        at_once(lambda: kept.tokens("ada"))


def test_a_uid_row_of_no_uid_is_told(kept: Store) -> None:
    put(kept.engine, rows.UIDS + b"\0\0\x27\x12\0", b"\x01\x80")
    with pytest.raises(DataCorruption, match="none of a uid"):
        at_once(lambda: kept.create_user("alan", NOW))

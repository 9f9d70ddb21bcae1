"""What every rendezvous store must do, on the one in the process and on the one behind a launcher's RPC server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import uvloop

from fireflyer.base.errors import Timeout, UsageError
from fireflyer.base.units import MS, SECOND
from fireflyer.identity.secrets import new_secret
from fireflyer.runtime.rpc import Accepts, Address, RpcServer
from fireflyer.runtime.store import LocalStore, Store, StoreClient, StoreService
from fireflyer.runtime.store_core import MAX_KEY_BYTES, MAX_VALUE_BYTES

SECRET = new_secret()


@pytest.fixture(scope="module")
def served() -> Iterator[Address]:
    loop = uvloop.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start() -> tuple[RpcServer, Address]:
        server = RpcServer(Accepts(SECRET))
        StoreService(server)
        return server, await server.start("127.0.0.1", 0)

    server, address = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    yield address
    asyncio.run_coroutine_threadsafe(server.close(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture(params=["local", "served"])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    if request.param == "local":
        yield LocalStore()
        return
    client = StoreClient(request.getfixturevalue("served"), SECRET)
    client.delete_prefix("")
    yield client
    client.close()


def test_a_value_that_was_set_is_read_back(store: Store) -> None:
    store.set("a", b"1")
    store.set("a", b"\x00\xff")
    assert store.get("a", SECOND) == b"\x00\xff"
    assert store.try_get("a") == b"\x00\xff"
    assert store.try_get("b") is None


def test_get_waits_until_another_thread_sets(store: Store) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.get, "late", 20 * SECOND)
        store.add("other", 1)
        assert not waiting.done()
        store.set("late", b"here")
        assert waiting.result(20) == b"here"


def test_a_wait_that_is_in_vain_names_the_key(store: Store) -> None:
    with pytest.raises(Timeout, match="'never' was not set within 20 ms"):
        store.get("never", 20 * MS)


def test_wait_is_over_when_the_last_key_arrives_and_names_those_that_do_not(store: Store) -> None:
    keys = [f"rank/{rank}" for rank in range(5)]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.wait, keys, 20 * SECOND)
        for key in keys[:-1]:
            store.set(key, b"")
        with pytest.raises(Timeout, match=r"'rank/4' was"):
            store.wait(keys, 20 * MS)
        assert not waiting.done()
        store.set(keys[-1], b"")
        waiting.result(20)
    with pytest.raises(Timeout, match=r"'x0', 'x1', 'x2' and 7 more"):
        store.wait([f"x{n}" for n in range(10)], 20 * MS)
    store.wait([], MS)


def test_add_counts_every_call_once(store: Store) -> None:
    with ThreadPoolExecutor(8) as pool:
        seen = list(pool.map(lambda _: store.add("n", 1), range(100)))
    assert sorted(seen) == list(range(1, 101))
    assert store.get("n", SECOND) == b"100"
    assert store.add("n", -150) == -50
    store.set("word", b"abc")
    with pytest.raises(UsageError, match="not hold a number"):
        store.add("word", 1)
    with pytest.raises(UsageError, match="64 bits"):
        store.add("n", (1 << 63) - 1 + 60)


def test_of_many_that_set_a_missing_key_one_wins_and_all_learn_its_value(store: Store) -> None:
    with ThreadPoolExecutor(9) as pool:
        waiting = pool.submit(store.get, "seat", 20 * SECOND)
        held = list(pool.map(lambda number: store.set_if_missing("seat", b"%d" % number), range(8)))
        assert waiting.result(20) == held[0]
    assert len(set(held)) == 1
    assert held[int(held[0])] == b"%d" % int(held[0])
    assert store.set_if_missing("seat", b"late") == store.get("seat", SECOND) == held[0]
    store.set("seat", b"")
    assert store.set_if_missing("seat", b"not missing") == b""
    with pytest.raises(UsageError, match="at most 4194304"):
        store.set_if_missing("k", bytes(MAX_VALUE_BYTES + 1))


def test_keys_are_listed_and_deleted_by_prefix(store: Store) -> None:
    for key in ("b/2", "b/1", "c"):
        store.set(key, b"v")
    assert store.keys("b/") == ["b/1", "b/2"]
    assert store.delete_prefix("b/") == 2
    assert store.keys("") == ["c"]
    assert store.try_get("b/1") is None


def test_limits_are_clear_errors_and_the_largest_value_passes(store: Store) -> None:
    store.set("k" * MAX_KEY_BYTES, bytes(MAX_VALUE_BYTES))
    assert len(store.get("k" * MAX_KEY_BYTES, SECOND)) == MAX_VALUE_BYTES
    with pytest.raises(UsageError, match="1 to 512 bytes"):
        store.set("k" * (MAX_KEY_BYTES + 1), b"")
    with pytest.raises(UsageError, match="1 to 512 bytes"):
        store.get("", SECOND)
    with pytest.raises(UsageError, match="at most 4194304"):
        store.set("k", bytes(MAX_VALUE_BYTES + 1))
    with pytest.raises(UsageError, match="timeout_ns 0"):
        store.get("k", 0)


def test_many_threads_meet_at_one_key(store: Store) -> None:
    with ThreadPoolExecutor(16) as pool:
        waiting = [pool.submit(store.get, "go", 20 * SECOND) for _ in range(16)]
        store.set("go", b"!")
        assert [future.result(20) for future in waiting] == [b"!"] * 16


def test_values_of_many_keys_come_in_their_order_once_all_exist(store: Store) -> None:
    keys = [f"list/{rank}" for rank in range(5)]
    for rank, key in enumerate(keys[:-1]):
        store.set(key, b"%d" % rank)
    with pytest.raises(Timeout, match="'list/4' was not set within 20 ms"):
        store.get_all(keys, 20 * MS)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.get_all, keys[::-1], 20 * SECOND)
        store.set(keys[-1], b"4")
        assert waiting.result(20) == [b"4", b"3", b"2", b"1", b"0"]
    assert store.get_all([], SECOND) == []


def test_values_that_are_too_large_for_one_answer_come_in_several(store: Store) -> None:
    keys = [f"large/{number}" for number in range(5)]
    for number, key in enumerate(keys):
        store.set(key, bytes([number]) * MAX_VALUE_BYTES)
    assert [value[0] for value in store.get_all(keys, SECOND)] == [0, 1, 2, 3, 4]

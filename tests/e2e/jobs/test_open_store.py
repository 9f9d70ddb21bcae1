"""A rank finds its store by its environment, or is told in one line how to start."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.support.loops import on_loop
from tests.support.network.known_users import known

from fireflyer.base.errors import Busy, NotFound, PermissionDenied, Unreachable, UsageError
from fireflyer.base.launch import RankEnvironment
from fireflyer.base.units import SECOND
from fireflyer.identity.handshake import UserKey, token_key
from fireflyer.identity.secrets import new_secret, save_secret
from fireflyer.runtime.environment import read_environment
from fireflyer.runtime.rpc import Accepts, Caller, NodeCredential, RpcClient, RpcServer, UserCredential
from fireflyer.runtime.rpc.messages import Method
from fireflyer.runtime.store import LocalStore, Store, StoreService, _Wait, open_store
from fireflyer.runtime.store_core import StoreTable


def test_a_process_alone_has_a_store_of_its_own() -> None:
    assert isinstance(open_store(RankEnvironment()), LocalStore)


def test_plain_torchrun_is_told_how_to_start() -> None:
    with pytest.raises(UsageError, match=r"rank 1 of 4 was not started by `ff run`.*ff run --nodes"):
        open_store(RankEnvironment(rank=1, world_size=4))


def test_an_incomplete_environment_is_told_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="FF_SECRET_FILE"):
        open_store(RankEnvironment(control="127.0.0.1:1"))
    with pytest.raises(NotFound):
        open_store(RankEnvironment(control="127.0.0.1:1", secret_file=str(tmp_path / "none")))


def test_the_environment_is_read_where_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in RankEnvironment(rank=3, world_size=4, local_rank=1, local_world_size=2).to_mapping().items():
        monkeypatch.setenv(name, value)
    assert read_environment().rank == 3
    monkeypatch.setenv("RANK", "many")
    with pytest.raises(UsageError, match="RANK='many'"):
        read_environment()


@on_loop
async def test_ranks_of_a_launcher_meet(tmp_path: Path) -> None:
    secret = new_secret()
    secret_file = str(tmp_path / "secret")
    save_secret(secret, secret_file)
    server = RpcServer(Accepts(secret))
    service = StoreService(server)
    control = str(await server.start("127.0.0.1", 0))

    def rank(number: int) -> list[bytes]:
        env = RankEnvironment(rank=number, world_size=4, control=control, secret_file=secret_file)
        store = open_store(env)
        store.set(f"address/{number}", b"at %d" % number)
        met = [store.get(f"address/{other}", 20 * SECOND) for other in range(4)]
        store.close()
        return met

    with ThreadPoolExecutor(4) as pool:
        loop = asyncio.get_running_loop()
        met = await asyncio.gather(*(loop.run_in_executor(pool, rank, number) for number in range(4)))
    assert met == [[b"at 0", b"at 1", b"at 2", b"at 3"]] * 4
    assert service.delete_prefix("address/") == 4
    await server.close()


@on_loop
async def test_a_waiting_rank_learns_that_the_launcher_died(tmp_path: Path) -> None:
    secret = new_secret()
    secret_file = str(tmp_path / "secret")
    save_secret(secret, secret_file)
    server = RpcServer(Accepts(secret))
    StoreService(server)
    control = str(await server.start("127.0.0.1", 0))
    env = RankEnvironment(control=control, secret_file=secret_file)

    def open_and_set() -> Store:
        store = open_store(env)
        store.set("here", b"")
        return store

    store = await asyncio.to_thread(open_and_set)
    waiting = asyncio.create_task(asyncio.to_thread(store.get, "never", 60 * SECOND))
    await server.close()
    with pytest.raises(Unreachable, match=control):
        await waiting
    await asyncio.to_thread(store.close)


@on_loop
async def test_users_have_no_access_to_the_store() -> None:
    token = "fft1.0123.words"
    secret = new_secret()
    server = RpcServer(Accepts(secret, known({"0123": UserKey("ada", token_key(token))})))
    StoreService(server)
    address = await server.start("127.0.0.1", 0)
    client = await RpcClient.connect(address, UserCredential(token), SECOND)
    method = Method("store.keys", dict[str, str], dict[str, list[str]])
    with pytest.raises(PermissionDenied, match="only holders of the node secret"):
        await client.call(method, {"prefix": ""}, SECOND)
    await client.close()
    node = await RpcClient.connect(address, NodeCredential(secret, "n"), SECOND)
    assert await node.call(method, {"prefix": ""}, SECOND) == {"names": []}
    await node.close()
    await server.close()


@on_loop
async def test_a_key_may_arrive_in_the_very_moment_in_which_its_waiter_gives_up() -> None:
    server = RpcServer(Accepts(new_secret()))
    service = StoreService(server)
    waiting = asyncio.create_task(service._wait(_Wait(["k"], SECOND), Caller("node", "n", "", 1)))
    await asyncio.sleep(0)
    waiting.cancel()
    service.set("k", b"")
    with pytest.raises(asyncio.CancelledError):
        await waiting


def test_the_table_is_bounded_in_bytes_and_waiters() -> None:
    table = StoreTable(max_total_bytes=1200, max_waiters=2)
    table.set("a", bytes(500))
    with pytest.raises(Busy, match="store is full"):
        table.set("b", bytes(500))
    table.set("a", bytes(800))
    assert table.delete_prefix("a") == 1
    table.set("b", bytes(800))
    assert not table.wait(1, ["x", "b", "x"])
    assert not table.wait(2, ["x", "y"])
    with pytest.raises(Busy, match="2 callers wait"):
        table.wait(3, ["x"])
    assert table.set("x", b"") == [1]
    table.forget(2)
    table.forget(2)
    assert table.set("y", b"") == []
    assert table.wait(3, ["x", "y"])


def test_a_key_deleted_while_others_are_awaited_still_counts_as_met() -> None:
    table = StoreTable()
    assert not table.wait(1, ["a", "b"])
    assert table.set("a", b"") == []
    table.delete_prefix("a")
    assert table.set("b", b"") == [1]

"""Meta services as processes, killed under clients that send again: nothing is done twice, nothing is lost."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import msgspec
import pytest
from tests.support.fs.clusters.local_cluster import LocalCluster
from tests.support.fs.clusters.managers import ManagerProcess, Site
from tests.support.fs.meta_sim.clients import RawClient
from tests.support.kvstore.postgres import PostgresServer

from fireflyer.accounts.managing import UsersClient
from fireflyer.base.errors import PermissionDenied, Unreachable
from fireflyer.base.toml_text import to_toml
from fireflyer.fs.client.connecting import connect_async
from fireflyer.fs.control import ManagerClient
from fireflyer.fs.schema.inodes import ROOT, DirectoryDetails
from fireflyer.fs.schema.manager import GetMetaServices, MetaServices
from fireflyer.fs.schema.meta import (
    Done,
    Found,
    ListDirectory,
    Listing,
    MakeDirectory,
    PathRef,
    RemoveDirectory,
    Rename,
    SetAttributes,
    Stat,
    Symlink,
)
from fireflyer.fs.service.meta.config import MetaConfig, MetaSettings

pytestmark = [pytest.mark.processes]
WORKERS = 8
ROUNDS = 16
WAIT_S = 150.0


def at(path: str) -> PathRef:
    return PathRef(ROOT, path.encode())


class Load:
    """Clients who make, rename and remove in one directory; what must be there in the end is `kept`."""

    def __init__(self) -> None:
        self.done = 0
        self.kept: dict[bytes, None] = {}
        self.progress = asyncio.Event()

    async def work(self, client: RawClient, worker: int) -> None:
        for number in range(ROUNDS):
            name = f"c{client.client}w{worker}n{number}"
            made = await client.ask(
                MakeDirectory(at(f"d/{name}")) if number % 2 else Symlink(at(f"d/{name}"), b"somewhere")
            )
            assert isinstance(made, Found), made
            assert await client.ask(Rename(at(f"d/{name}"), at(f"d/{name}-moved"))) == Done()
            if number % 4 == 1:
                assert await client.ask(RemoveDirectory(at(f"d/{name}-moved"))) == Done()
            else:
                self.kept[f"{name}-moved".encode()] = None
            self.done += 1
            self.progress.set()

    async def reached(self, rounds: int) -> None:
        while self.done < rounds:
            self.progress.clear()
            await self.progress.wait()


async def under_load(clients: Sequence[RawClient], faults: Sequence[Callable[[], Awaitable[object]]]) -> Load:
    """Each fault at its share of the work."""
    load = Load()
    assert isinstance(await clients[0].ask(MakeDirectory(at("d"))), Found)
    total = len(clients) * WORKERS * ROUNDS
    async with asyncio.TaskGroup() as group:
        for client in clients:
            for worker in range(WORKERS):
                group.create_task(load.work(client, worker))
        for at_fault, fault in enumerate(faults, 1):
            await load.reached(total * at_fault // (len(faults) + 1))
            await fault()
    return load


async def check(client: RawClient, load: Load) -> None:
    directory = await client.ask(Stat(at("d")))
    assert isinstance(directory, Found)
    found: list[bytes] = []
    more = True
    while more:
        page = await client.ask(ListDirectory(directory.inode.id, found[-1] if found else b"", 100))
        assert isinstance(page, Listing)
        found += [entry.name for entry in page.entries]
        more = page.more
    assert found == sorted(load.kept)
    assert isinstance(directory.inode.body, DirectoryDetails)
    assert directory.inode.body.entries == len(found)


@pytest.mark.slow
def test_the_only_service_is_killed_with_requests_in_flight_and_comes_back(tmp_path: Path) -> None:
    site = Site(tmp_path, f"embedded:{tmp_path / 'store'}")

    async def story() -> None:
        with ManagerProcess(site.manager("m1", lease_ms=2000, serve_files=True)) as manager:

            async def kill() -> None:
                manager.kill()  # in the loop, so that requests are in flight
                await asyncio.to_thread(manager.start)

            async with (
                RawClient([manager.address], [manager.address], site.service) as one,
                RawClient([manager.address], [manager.address], site.service) as other,
            ):
                load = await under_load([one, other], [kill, kill])
                assert one.again + other.again > 0
                await check(one, load)

    asyncio.run(story())


@pytest.mark.slow
def test_of_two_services_over_postgresql_one_is_killed_and_clients_go_on_with_the_other(
    tmp_path: Path, postgres_server: PostgresServer
) -> None:
    site = Site(tmp_path, postgres_server.url())

    async def story() -> None:
        with contextlib.ExitStack() as stack:
            manager = stack.enter_context(ManagerProcess(site.manager("m1", lease_ms=2000)))
            services = [
                stack.enter_context(ManagerProcess(_config(site, name, manager.address), "meta"))
                for name in ("one", "two")
            ]
            addresses = [one.address for one in services]

            async def kill() -> None:
                services[0].kill()

            async with ManagerClient([manager.address], site.service) as asking:
                await served_by(asking, addresses)
                async with (
                    RawClient([manager.address], addresses, site.service) as one,
                    RawClient([manager.address], addresses, site.service) as other,
                ):
                    load = await under_load([one, other], [kill])
                    assert one.again + other.again > 0
                    await check(other, load)
                await served_by(asking, addresses[1:])

    asyncio.run(story())


async def served_by(asking: ManagerClient, addresses: Sequence[str]) -> None:
    """Waits until the manager says so."""
    for _ in range(600):
        if await asking.ask(GetMetaServices()) == MetaServices(tuple(sorted(addresses))):
            return
        await asyncio.sleep(0.1)
    raise AssertionError(await asking.ask(GetMetaServices()))


def _config(site: Site, name: str, manager: str) -> str:
    config = MetaConfig(
        name=name,
        cluster="test",
        store=site.store,
        listen="127.0.0.1:0",
        managers=(manager,),
        secret_file=site.secret_file,
        files=MetaSettings(trusted_root=True),
    )
    path = site.directory / f"{name}.toml"
    path.write_text(to_toml(msgspec.to_builtins(config)))
    return str(path)


@pytest.mark.slow
def test_users_are_who_their_tokens_say_until_they_are_removed(tmp_path: Path) -> None:
    site = Site(tmp_path, f"embedded:{tmp_path / 'store'}")

    async def story() -> None:
        with ManagerProcess(site.manager("m1", lease_ms=2000, serve_files=True)) as manager:
            where = [manager.address], [manager.address]
            users = [await site.user(manager, name) for name in ("admin", "ada")]
            async with (
                UsersClient([manager.address], site.service) as accounts,
                RawClient(*where, users[0]) as admin,
                RawClient(*where, users[1]) as ada,
            ):
                assert isinstance(await admin.ask(SetAttributes(PathRef(ROOT), mode=0o777)), Found)
                made = await ada.ask(MakeDirectory(at("d")))
                assert isinstance(made, Found)
                found = await accounts.user("ada")
                assert found is not None
                assert (made.inode.uid, made.inode.gid) == (found.account.uid, found.account.gid)
                await accounts.remove_user("ada")
                with pytest.raises((Unreachable, PermissionDenied)):
                    await _asked_for_ever(ada)

    asyncio.run(story())


async def _asked_for_ever(client: RawClient) -> None:
    """Until it is refused, within 10 s: open connections of a user who is removed are ended then."""
    while True:
        await client.ask(Stat(at("d")))
        await asyncio.sleep(0.1)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_files_outlive_who_serves_them_and_leave_nothing_behind(tmp_path: Path) -> None:
    """The manager's process, which is the meta service, is killed under clients that write."""
    local = LocalCluster(tmp_path)
    try:
        local.ff("up", "-d")
        asyncio.run(_write_and_remove(local))
        local.wait(lambda status: status["files"]["inodes"] == 1 and status["files"]["unlinked"] == 0, WAIT_S)
        local.wait(lambda status: status["summary"]["used_bytes"] == 0, WAIT_S)
        assert "Files: 1 inode, 0 open for writing, 1 meta service." in local.ff("status")
    finally:
        local.close()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_files_outlive_one_of_two_services_over_postgresql(tmp_path: Path, postgres_server: PostgresServer) -> None:
    """What was written and acknowledged through either is there with all its bytes."""
    local = LocalCluster(tmp_path)
    try:
        local.ff("up", "-d", "--managers", "2", "--store", postgres_server.url())
        asyncio.run(_write_and_remove(local))
        local.wait(lambda _: "0 open for writing, 2 meta services." in local.ff("status"), WAIT_S)
    finally:
        local.close()


async def _write_and_remove(local: LocalCluster) -> None:
    files = await connect_async(f"ff://{local.directory}")
    kept: dict[str, bytes] = {}
    done = 0
    progress = asyncio.Event()

    async def work(worker: int) -> None:
        nonlocal done
        for number in range(12):
            path, data = f"/d/w{worker}n{number}", os.urandom(50_000 * (number % 3) + 7)
            file = await files.open(path, "xb")
            await file.pwrite(data, 0)
            await file.close()
            await files.rename(path, f"{path}-moved")
            if number % 3 == 0:
                await files.unlink(f"{path}-moved")
            else:
                kept[f"{path}-moved"] = data
            done += 1
            progress.set()

    async def kill(name: str, when: int) -> None:
        while done < when:
            progress.clear()
            await progress.wait()
        await asyncio.to_thread(lambda: os.kill(local.process(name), signal.SIGKILL))

    try:
        await files.mkdir("/d")
        async with asyncio.TaskGroup() as group:
            for worker in range(4):
                group.create_task(work(worker))
            group.create_task(kill("manager-1", 12))
        assert sorted(f"/d/{name}" for name in await files.listdir("/d")) == sorted(kept)
        for path, data in kept.items():
            file = await files.open(path, "rb")
            assert await file.pread(0, len(data) + 1) == data
            await file.close()
        await files.rmtree("/d")
    finally:
        await files.close()

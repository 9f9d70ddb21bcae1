"""Manager processes: over one store they take each other's place, over an embedded one they find what they had."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from tests.support.fs.clusters.managers import FakeNode, ManagerProcess, Site, seconds_since
from tests.support.kvstore.postgres import PostgresServer
from tests.support.patience import allowed_s

from fireflyer.base.errors import PermissionDenied
from fireflyer.base.toml_text import to_toml
from fireflyer.base.units import SECOND
from fireflyer.fs.client import connect
from fireflyer.fs.control import ConnectionPool, ManagerClient
from fireflyer.fs.core.capability import Rights, derive_key, verify
from fireflyer.fs.schema.ids import ChunkId
from fireflyer.fs.schema.manager import (
    AddChains,
    AddNode,
    AddTargets,
    Done,
    GetStatus,
    NewChain,
    Register,
    Request,
    RotateKeys,
    Status,
)
from fireflyer.fs.schema.sessions import (
    CapabilityAnswer,
    EndSession,
    GetCapability,
    GetSessions,
    KeepSession,
    OpenSession,
    Session,
    SessionKept,
    SessionOver,
)
from fireflyer.fs.service.storage.config import StorageConfig, StorageTarget
from fireflyer.identity import UserCredential

pytestmark = [pytest.mark.processes]
SETTING_UP: tuple[Request, ...] = (
    AddNode(1),
    AddNode(2),
    AddTargets(1, (11,)),
    AddTargets(2, (21,)),
)
CHAIN = AddChains((NewChain(1, (11, 21)),))


async def asked(client: ManagerClient, *requests: Request) -> None:
    for request in requests:
        assert isinstance(await client.ask(request), Done)


async def status_of(client: ManagerClient) -> Status:
    status = await client.ask(GetStatus())
    assert isinstance(status, Status)
    return status


@pytest.mark.slow
def test_a_manager_that_was_killed_finds_again_what_it_had_acknowledged(tmp_path: Path) -> None:
    site = Site(tmp_path, f"embedded:{tmp_path / 'store'}")

    async def story() -> None:
        with ManagerProcess(site.manager("m1")) as manager:
            for number in range(1, 6):
                async with ManagerClient([manager.address], site.service) as client:
                    await asked(client, AddNode(number))
                    session = await client.ask(OpenSession(f"nonce {number}"))
                    assert session == Session(number, 60_000_000_000)
                manager.kill()
                manager.start()
                async with ManagerClient([manager.address], site.service) as client:
                    status = await status_of(client)
                    assert [node.id for node in status.nodes] == list(range(1, number + 1))
                    assert status.sessions == number
                    assert isinstance(await client.ask(KeepSession(number)), SessionKept)

    asyncio.run(story())


@pytest.mark.slow
def test_when_the_primary_is_killed_another_manager_goes_on_and_no_role_changes(
    tmp_path: Path, postgres_server: PostgresServer
) -> None:
    site = Site(tmp_path, postgres_server.url())

    async def story() -> None:
        with contextlib.ExitStack() as stack:
            managers = [
                stack.enter_context(ManagerProcess(site.manager(f"m{number}", lease_ms=2000))) for number in range(3)
            ]
            addresses = [one.address for one in managers]
            async with ManagerClient(addresses, site.service) as client:
                await asked(client, *SETTING_UP)
                nodes = [FakeNode(1, (11,), addresses, site), FakeNode(2, (21,), addresses, site)]
                await nodes[0].wait(lambda: all(one.membership.incarnation for one in nodes))
                await asked(client, CHAIN)
                await nodes[0].wait(lambda: nodes[0].serves(11))
                for _ in range(2):
                    before = await status_of(client)
                    primary = [one for one in managers if await answers(one, site)][0]  # noqa: RUF015
                    await asyncio.to_thread(primary.kill)
                    began_ns = time.monotonic_ns()
                    after = await status_of(client)
                    assert seconds_since(began_ns) < allowed_s(30)
                    assert after.term == before.term + 1
                    assert after.chains == before.chains
                    asks = len(nodes[0].told)
                    await nodes[0].wait(lambda asks=asks: len(nodes[0].told) > asks + 3)  # type: ignore[misc]
                    assert nodes[0].serves(11)
                    await asyncio.to_thread(primary.start)
                for one in nodes:
                    await one.close()

    asyncio.run(story())


async def answers(manager: ManagerProcess, site: Site) -> bool:
    """Whether it is the primary. The others say at once that they are not."""
    lines = ConnectionPool(site.service)
    try:
        return isinstance(await lines.call(manager.address, GetStatus(), 30 * SECOND), Status)
    finally:
        await lines.close()


@pytest.mark.slow
def test_a_manager_that_ends_in_order_leaves_the_lease_to_the_next_at_once(
    tmp_path: Path, postgres_server: PostgresServer
) -> None:
    """Otherwise the next one would wait 20 s for it, and it looks every 5 s."""
    site = Site(tmp_path, postgres_server.url())

    async def story() -> None:
        with ManagerProcess(site.manager("m1", lease_ms=20_000)) as first:
            async with ManagerClient([first.address], site.service) as client:
                await asked(client, AddNode(1))
            with ManagerProcess(site.manager("m2", lease_ms=20_000)) as second:
                assert first.end() == 0
                async with ManagerClient([second.address], site.service) as client:
                    began_ns = time.monotonic_ns()
                    status = await client.ask(GetStatus(), timeout_ns=30_000_000_000)
                    assert isinstance(status, Status)
                    assert status.term == 2
                    assert seconds_since(began_ns) < 18

    asyncio.run(story())


def test_who_may_ask_for_what(tmp_path: Path) -> None:
    site = Site(tmp_path, f"embedded:{tmp_path / 'store'}")

    async def story() -> None:
        with ManagerProcess(site.manager("m1")) as manager:
            addresses = [manager.address]
            ann, bob, admin = [await site.user(manager, name) for name in ("ann", "bob", "admin")]
            async with (
                ManagerClient(addresses, ann) as anns,
                ManagerClient(addresses, bob) as bobs,
                ManagerClient(addresses, admin) as admins,
            ):
                for request in (AddNode(1), GetSessions(), GetCapability(1, 0, 9, 1)):
                    with pytest.raises(PermissionDenied, match="only administrators may do this"):
                        await anns.ask(request)
                for client in (anns, admins):
                    with pytest.raises(
                        PermissionDenied, match="only storage processes, authenticated with the node secret, may send"
                    ):
                        await client.ask(Register(1, "n", 0, "a:1", "m", "b"))
                assert await anns.ask(OpenSession("n")) == Session(1, 60_000_000_000)
                assert await bobs.ask(OpenSession("n")) == Session(2, 60_000_000_000)
                assert await anns.ask(OpenSession("n")) == Session(1, 60_000_000_000)
                assert await bobs.ask(KeepSession(1)) == SessionOver(1)
                with pytest.raises(PermissionDenied, match="belongs to another user"):
                    await bobs.ask(EndSession(1))
                await asked(admins, AddNode(1), EndSession(1))
                assert await anns.ask(KeepSession(1)) == SessionOver(1)
                mine = await admins.ask(OpenSession("n"))
                assert mine == Session(3, 60_000_000_000)
                minted = await admins.ask(GetCapability(3, 5, 9, 1))
                assert isinstance(minted, CapabilityAnswer)
                key = derive_key(site.secret.reveal(), 1)
                found = verify(minted.capability, {1: key}, "admin", time.time())
                assert found.client == 3
                assert found.allows(7, Rights.READ, time.time())
                assert await admins.ask(GetCapability(2, 5, 9, 1)) == SessionOver(2)
                with pytest.raises(PermissionDenied, match="only administrators may do this"):
                    await anns.ask(RotateKeys())
                await asked(admins, RotateKeys(revoke=True))
                minted = await admins.ask(GetCapability(3, 5, 9, 1))
                assert isinstance(minted, CapabilityAnswer)
                key = derive_key(site.secret.reveal(), 2)
                assert verify(minted.capability, {2: key}, "admin", time.time()).key_id == 2

    asyncio.run(story())


def run_manager(config: str, verb: str = "manager") -> tuple[int, str]:
    command = [sys.executable, "-P", "-m", "fireflyer", "fs", verb, config]
    done = subprocess.run(command, capture_output=True, text=True, timeout=allowed_s(60), check=False)
    return done.returncode, done.stderr.splitlines()[-1]


def test_a_manager_that_cannot_begin_says_why_in_one_line(tmp_path: Path) -> None:
    site = Site(tmp_path, f"embedded:{tmp_path / 'store'}")
    with ManagerProcess(site.manager("m1")) as manager:
        code, line = run_manager(site.manager("m2"))
        assert code == 1
        assert line.startswith("error: ")
        assert "store" in line
        site.store = f"embedded:{tmp_path / 'other'}"
        code, line = run_manager(site.manager("m3", listen=manager.address))
        assert code != 0
        assert line.startswith(f"error: listen on {manager.address}")
        manager.end()
        site.store = f"embedded:{tmp_path / 'store'}"
        code, line = run_manager(site.manager("m4", cluster="another"))
        assert (code, line.partition(";")[0]) == (
            2,
            "error: the store holds cluster 'test', and the configuration of this manager names cluster 'another'",
        )
    wrong = tmp_path / "wrong.toml"
    wrong.write_text("name = 3")
    code, line = run_manager(str(wrong))
    assert code == 2
    assert line.startswith(f"error: configuration {str(wrong)!r}, line 1: ")


@pytest.mark.slow
def test_a_cluster_of_several_machines_is_made_by_hand(tmp_path: Path) -> None:
    site = Site(tmp_path, f"embedded:{tmp_path / 'store'}")
    with contextlib.ExitStack() as stack:
        manager = stack.enter_context(ManagerProcess(site.manager("m1")))
        service = ("--manager", manager.address, "--secret-file", site.secret_file)
        admin("user", "add", "admin", *service)
        token = admin("user", "token", "admin", "--expires", "2d", *service)
        token_file = tmp_path / "token"
        token_file.write_text(token)
        token_file.chmod(0o600)
        where = ("--manager", manager.address, "--token-file", str(token_file))
        for node in (1, 2):
            targets = [100 * node + 1, 100 * node + 2]
            added = admin("register-node", *where, "--node", str(node), *(f"--target={one}" for one in targets))
            assert (
                added
                == f"node {node} is added; its storage process can register now.\n2 targets added to node {node}.\n"
            )
            config = StorageConfig(
                cluster="test",
                node=node,
                managers=(manager.address,),
                targets=tuple(StorageTarget(one, str(tmp_path / f"t{one}")) for one in targets),
                secret_file=site.secret_file,
                root_disk=True,
            )
            path = tmp_path / f"storage{node}.toml"
            path.write_text(to_toml(msgspec.to_builtins(config)))
            code, line = run_manager(str(path), "storage")
            assert code == 1
            assert (
                line == f"error: none of the 2 targets of node {node} can be opened; the reasons are in the log above"
            )
            stack.enter_context(ManagerProcess(str(path), "storage", "--make-targets"))
        assert admin("add-chains", *where) == "2 chains added.\nchain table 1 added.\n"
        assert "is in chain" in admin("retire-node", "2", *where, code=2)
        assert "there is no node 77; `ff fs status` lists the nodes" in admin("retire-node", "77", *where, code=1)

        async def story() -> None:
            async with await connect([manager.address], UserCredential(token.strip())) as chunks:
                await chunks.acquire(1, 1, 3)
                await chunks.write(1, ChunkId(1, 0), b"hand-made")
                assert await chunks.read(1, ChunkId(1, 0)) == b"hand-made"

        asyncio.run(story())


def admin(*arguments: str, code: int = 0) -> str:
    command = [sys.executable, "-P", "-m", "fireflyer", "fs", "admin", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=allowed_s(60), check=False)
    assert done.returncode == code, (done.stdout, done.stderr)
    return done.stderr if code else done.stdout

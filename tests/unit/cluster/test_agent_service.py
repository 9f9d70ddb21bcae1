"""The resident agent over real connections: who is let in, and what it keeps when it is killed."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import pytest
from tests.support.network.free_ports import free_port

from fireflyer.base.errors import Busy, FireflyerError, NotFound, PermissionDenied, UsageError
from fireflyer.base.units import SECOND
from fireflyer.cluster.agent.accounts import Accounts
from fireflyer.cluster.agent.guards import Guards
from fireflyer.cluster.agent.join import Issuer, join, revoke
from fireflyer.cluster.agent.records import AgentDirectory, Membership
from fireflyer.cluster.agent.service import serve_agent
from fireflyer.cluster.core.agent import End, GuardState, Order
from fireflyer.cluster.schema.agent import ASK_AGENT, LIST_GUARDS, START_GUARD, WAIT_GUARD, GuardName, GuardOrder
from fireflyer.cluster.schema.hosts import HostQuestion, NodeOrders
from fireflyer.cluster.schema.wire import Done, SupervisorConfig
from fireflyer.identity import new_secret
from fireflyer.identity.handshake import Accepts, UserCredential
from fireflyer.identity.machines import MachineStore
from fireflyer.runtime import run
from fireflyer.runtime.rpc import RpcClient, RpcServer

CALL_NS: Final = 60 * SECOND
TOKEN: Final = "00000001.0.1"


def member(tmp_path: Path, credential: str = "fft1.id.secret") -> AgentDirectory:
    directory = AgentDirectory(str(tmp_path / "agent"))
    directory.join(Membership(machine="a", issuer="head:1", credential=credential, port=free_port()))
    return directory


@asynccontextmanager
async def serving(directory: AgentDirectory) -> AsyncIterator[str]:
    ready: asyncio.Queue[str] = asyncio.Queue()
    task = asyncio.create_task(serve_agent(directory, on_ready=ready.put_nowait))
    try:
        first = asyncio.create_task(ready.get())
        await asyncio.wait({task, first}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            first.cancel()
            task.result()
        yield f"127.0.0.1:{first.result().rpartition(':')[2]}"
    finally:
        task.cancel()
        await asyncio.wait([task])


async def with_client(address: str, credential: str, use: Callable[[RpcClient], Awaitable[None]]) -> None:
    client = await RpcClient.connect(address, UserCredential(credential), CALL_NS)
    try:
        await use(client)
    finally:
        await client.close()


def order(token: str = TOKEN, *, lease_ns: int = 10 * SECOND) -> GuardOrder:
    config = SupervisorConfig(
        launcher="127.0.0.1:1", secret_file="/none", node=0, incarnation=1, heartbeat_ns=SECOND, logs_dir="",
        lease_ns=lease_ns,
    )  # fmt: skip
    orders = NodeOrders(
        config=config, secret=b"", directory="/none", workdir="/", token=token, first_lease_ns=10 * SECOND
    )
    return GuardOrder(job="job", token=token, orders=orders)


def test_strangers_and_those_with_another_credential_are_not_let_in(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(member(tmp_path)) as address:
            for credential in ("fft1.id.other", "fft1.other.secret"):
                with pytest.raises(PermissionDenied, match="does not accept this token"):
                    await RpcClient.connect(address, UserCredential(credential), CALL_NS)
            host, _, port = address.rpartition(":")
            for said in (b"", b"\xff" * 5000, b"\x04\x00" + b"\x91" * 1024, b"GET / HTTP/1.1\r\n\r\n"):
                with socket.create_connection((host, int(port))) as stranger:
                    stranger.sendall(said)
            await with_client(address, "fft1.id.secret", listed)

    async def listed(client: RpcClient) -> None:
        assert (await client.call(LIST_GUARDS, Done(), CALL_NS)).guards == ()

    run(main())


def test_a_credential_that_is_revoked_ends_open_connections_too_and_the_next_agent_does_not_serve(
    tmp_path: Path,
) -> None:
    directory = member(tmp_path)

    async def use(client: RpcClient) -> None:
        await client.call(LIST_GUARDS, Done(), CALL_NS)
        assert directory.leave()
        with pytest.raises(PermissionDenied, match="revoked"):
            await client.call(LIST_GUARDS, Done(), CALL_NS)
        with pytest.raises(PermissionDenied, match="does not accept this token"):
            await RpcClient.connect(client.address, UserCredential("fft1.id.secret"), CALL_NS)

    async def main() -> None:
        async with serving(directory) as address:
            await with_client(address, "fft1.id.secret", use)
        with pytest.raises(UsageError, match="has not joined"):
            await serve_agent(directory, on_ready=lambda _: None)

    run(main())


def test_orders_that_no_lease_ends_or_that_are_of_another_token_are_refused(tmp_path: Path) -> None:
    async def use(client: RpcClient) -> None:
        with pytest.raises(UsageError, match="needs a lease"):
            await client.call(START_GUARD, order(lease_ns=0), CALL_NS)
        with pytest.raises(UsageError, match="is not that of node 0"):
            await client.call(START_GUARD, order("00000001.1.1"), CALL_NS)
        with pytest.raises(UsageError, match="bad request"):
            await client.call(START_GUARD, order("../../etc.0.1"), CALL_NS)
        with pytest.raises(NotFound, match="no guard"):
            await client.call(WAIT_GUARD, GuardName(TOKEN), CALL_NS)

    async def main() -> None:
        async with serving(member(tmp_path)) as address:
            await with_client(address, "fft1.id.secret", use)

    run(main())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's agent refuses work")
def test_an_agent_of_root_refuses_work_in_one_line(tmp_path: Path) -> None:
    async def use(client: RpcClient) -> None:
        question = HostQuestion(workdir="/", script="x", kind="script", run_dir="/", mark="none")
        for asked in (client.call(ASK_AGENT, question, CALL_NS), client.call(START_GUARD, order(), CALL_NS)):
            with pytest.raises(PermissionDenied, match="takes work only from a platform, for a mapped user"):
                await asked

    async def main() -> None:
        async with serving(member(tmp_path)) as address:
            await with_client(address, "fft1.id.secret", use)

    run(main())


def test_one_agent_serves_a_directory(tmp_path: Path) -> None:
    directory = member(tmp_path)

    async def main() -> None:
        async with serving(directory):
            with pytest.raises(Busy, match="another agent runs"):
                await serve_agent(directory, on_ready=lambda _: None)

    run(main())


def test_a_machine_joins_once_with_a_token_and_its_revocation_reaches_its_agent(tmp_path: Path) -> None:
    store = MachineStore(str(tmp_path / "machines"))
    directory = AgentDirectory(str(tmp_path / "agent"))
    joined: list[str] = []

    async def main() -> None:
        issuer = Issuer(store, ["a"], on_joined=lambda machine: joined.append(machine.name))
        address = await issuer.listen(0)
        (token,) = issuer.issue(600).values()
        waiting = asyncio.create_task(issuer.wait(1 << 40))
        target = f"127.0.0.1:{address.port}"
        membership = await join(directory, token, issuer=target, port=free_port(), address="")
        assert membership.credential == store.machines()["a"].credential
        assert await waiting == []
        assert joined == ["a"]
        async with serving(directory):
            assert await revoke(store, "a") == ""
            assert directory.membership() is None
        assert store.machines() == {}

    run(main())


@pytest.mark.parametrize("service", ["nothing", "storage", "http"])
def test_a_machine_that_asks_another_service_is_told_where_agents_join(tmp_path: Path, service: str) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async def main() -> None:
        port = free_port()
        storage = RpcServer(Accepts(new_secret()), identity="storage")
        web = None
        if service == "storage":
            await storage.start("127.0.0.1", port)
        elif service == "http":
            web = await asyncio.start_server(answer, "127.0.0.1", port)
        directory = AgentDirectory(str(tmp_path / "agent"))
        with pytest.raises(FireflyerError) as caught:
            await join(directory, "fft1.0011223344556677.x", issuer=f"127.0.0.1:{port}", port=1, address="")
        await storage.close()
        if web is not None:
            web.close()
        said = caught.value.message
        assert said.startswith(f"no manager or `ff agent token` waits for agents at 127.0.0.1:{port}: ")
        assert "listen_agents" in said
        assert "use the node secret" not in said
        assert "make another one" not in said

    run(main())


def test_a_guard_whose_starter_fails_ends_and_says_why(tmp_path: Path) -> None:
    directory = member(tmp_path)

    async def main() -> None:
        changed = asyncio.Event()
        guards = Guards(directory, lambda _: changed.set(), Accounts(12345))
        orders = NodeOrders(
            config=order().orders.config, secret=b"", directory="", workdir=str(tmp_path / "none"), token=TOKEN,
            first_lease_ns=SECOND,
        )  # fmt: skip
        assert guards.start(Order(token=TOKEN, job="job", node=0, incarnation=1), orders) is None
        while (guard := guards.get(TOKEN)) is None or guard.state is not GuardState.ENDED:
            changed.clear()
            await changed.wait()
        guards.close()
        assert guard.end is not None
        assert guard.end.clean
        assert "working directory" in guard.end.reason
        (found,) = directory.found()  # by the next agent
        assert found.end == guard.end

    run(main())


def test_what_an_agent_finds_of_earlier_ones(tmp_path: Path) -> None:
    directory = member(tmp_path)
    guards = tmp_path / "agent" / "guards"
    for name in ("00000001.0.1", "00000002.0.1", "00000003.0.1", "not a guard"):
        (guards / name).mkdir()
    directory.record("00000001.0.1").write_order(Order(token="00000001.0.1", job="j", node=0, incarnation=1))
    directory.record("00000001.0.1").write_end(End(clean=True, reason="done"))
    (guards / "00000002.0.1" / "order.json").write_bytes(b"[" * 2000)
    (guards / "00000002.0.1" / "order.json").chmod(0o600)
    assert [one.order.token for one in directory.found()] == ["00000001.0.1"]
    assert sorted(path.name for path in guards.iterdir()) == ["00000001.0.1", "00000002.0.1", "not a guard"]


def test_no_token_is_valid_where_one_of_several_names_is_bad(tmp_path: Path) -> None:
    store = MachineStore(str(tmp_path / "machines"))

    async def main() -> None:
        issuer = Issuer(store, ["a", "b c"], on_joined=lambda _: None)
        with pytest.raises(UsageError, match="machine name 'b c'"):
            issuer.issue(600)
        assert await issuer.wait(0) == ["a", "b c"]

    run(main())
    assert b"sha256" not in (tmp_path / "machines" / "join-tokens.json").read_bytes()


def test_systemd_is_told_when_the_agent_serves_and_ranks_do_not_get_its_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = member(tmp_path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        monkeypatch.chdir(tmp_path)  # names of such sockets are short
        systemd.bind("notify")
        systemd.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", "notify")

        async def main() -> None:
            async with serving(directory):
                assert systemd.recv(100) == b"READY=1"
                assert "NOTIFY_SOCKET" not in os.environ

        run(main())

"""The way to the managers: who is asked, and what becomes of answers that do not come."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from fireflyer.base.errors import NotFound, PermissionDenied, Timeout, UsageError
from fireflyer.base.units import MS, SECOND
from fireflyer.fs.control import ASK, ConnectionPool, ControlClient, ManagerClient
from fireflyer.fs.control.client import MAX_ASKED
from fireflyer.fs.control.connections import MAX_LINES
from fireflyer.fs.core.chain.node_membership import ManagerReply, SendToManager
from fireflyer.fs.schema.manager import Answer, Done, GetStatus, ManagerError, NotPrimary, Request, Status, TargetStatus
from fireflyer.identity import NodeCredential, Secret, new_secret
from fireflyer.runtime.rpc import Accepts, Caller, RpcServer

SECRET = new_secret()
ME = NodeCredential(SECRET, "test")


class Speaker:
    """Answers what it is told to, and counts; `None`: never."""

    def __init__(self, answer: Answer | None) -> None:
        self.answer = answer
        self.address = ""
        self.asked = 0
        self.heard = asyncio.Event()

    async def ask(self, _: Request, __: Caller) -> Answer:
        self.asked += 1
        self.heard.set()
        if self.answer is None:
            await asyncio.Event().wait()
        assert self.answer is not None
        return self.answer


@contextlib.asynccontextmanager
async def speaking(*answers: Answer | None, secret: Secret = SECRET) -> AsyncIterator[list[Speaker]]:
    async with contextlib.AsyncExitStack() as stack:
        speakers = []
        for answer in answers:
            speaker, server = Speaker(answer), RpcServer(Accepts(secret))
            server.register(ASK, speaker.ask)
            speaker.address = str(await server.start("127.0.0.1", 0))
            stack.push_async_callback(server.close)
            speakers.append(speaker)
        yield speakers


def test_the_primary_is_followed_wherever_it_is_said_to_be() -> None:
    async def story() -> None:
        async with speaking(NotPrimary(""), Done("first"), NotPrimary("")) as managers:
            managers[2].answer = NotPrimary(managers[1].address)
            addresses = [managers[2].address, managers[0].address, managers[1].address]
            async with ManagerClient(addresses, ME) as client:
                assert await client.ask(GetStatus()) == Done("first")
                assert [one.asked for one in managers] == [0, 1, 1]
                managers[1].answer = NotPrimary("stranger:1")
                managers[0].answer = Done("second")
                assert await client.ask(GetStatus()) == Done("second")

    asyncio.run(story())


def test_a_manager_that_is_gone_or_silent_is_passed_over() -> None:
    async def story() -> None:
        async with speaking(Done("here")) as managers:
            async with ManagerClient(["127.0.0.1:1", managers[0].address], ME) as client:
                assert await client.ask(GetStatus()) == Done("here")
            with pytest.raises(Timeout, match="no manager answered as primary within 300 ms: "):
                async with ManagerClient(["127.0.0.1:1"], ME) as client:
                    await client.ask(GetStatus(), timeout_ns=300 * MS)

    asyncio.run(story())


def test_refusals_come_out_as_errors_and_only_transient_ones_are_repeated() -> None:
    async def story() -> None:
        async with speaking(ManagerError("busy", "later")) as (manager,):
            async with ManagerClient([manager.address], ME) as client:
                asking = asyncio.create_task(client.ask(GetStatus()))
                await manager.heard.wait()
                manager.answer = ManagerError("not_found", "no such thing")
                with pytest.raises(NotFound, match="no such thing"):
                    await asking
            with pytest.raises(PermissionDenied):
                async with ManagerClient([manager.address], NodeCredential(new_secret(), "stranger")) as client:
                    await client.ask(GetStatus())
        with pytest.raises(UsageError, match="no manager address is given"):
            ManagerClient([], ME)

    asyncio.run(story())


async def a_page(request: Request, _: Caller) -> Answer:
    assert isinstance(request, GetStatus)
    after = request.after
    targets = tuple(TargetStatus(one, 1, None, False, None) for one in (after + 1, after + 2))
    return Status(7, 1, (), targets, (), "c", 3, (1,), after + 2 if after < 4 else 0)


def test_a_status_of_many_pages_is_one() -> None:
    async def story() -> None:
        server = RpcServer(Accepts(SECRET))
        server.register(ASK, a_page)
        async with ManagerClient([str(await server.start("127.0.0.1", 0))], ME) as client:
            status = await client.status()
        await server.close()
        assert [one.id for one in status.targets] == [1, 2, 3, 4, 5, 6]
        assert (status.version, status.cluster, status.more_after) == (7, "c", 0)

    asyncio.run(story())


def test_a_machine_gets_the_answers_that_come_and_nothing_for_those_that_do_not() -> None:
    async def story() -> None:
        told: list[ManagerReply] = []
        came = asyncio.Event()

        def on_reply(one: ManagerReply) -> None:
            told.append(one)
            came.set()

        async with speaking(Done("x"), None) as (manager, silent):
            control = ControlClient(ME, on_reply)
            control.ask(SendToManager(1, "127.0.0.1:1", GetStatus()))
            control.ask(SendToManager(2, silent.address, GetStatus()))
            control.ask(SendToManager(3, manager.address, GetStatus()))
            await came.wait()
            assert told == [ManagerReply(3, Done("x"))]
            for number in range(4, 4 + 2 * MAX_ASKED):
                control.ask(SendToManager(number, silent.address, GetStatus()))
            async with asyncio.timeout(10):
                await control.close()
            assert told == [ManagerReply(3, Done("x"))]

    asyncio.run(story())


def test_there_is_one_connection_per_manager_and_a_bound_for_managers() -> None:
    async def story() -> None:
        async with speaking(Done("x")) as (manager,):
            lines = ConnectionPool(ME)
            answers = [lines.call(manager.address, GetStatus(), SECOND) for _ in range(20)]
            assert await asyncio.gather(*answers) == [Done("x")] * 20
            for number in range(MAX_LINES - 1):
                with contextlib.suppress(UsageError):
                    await lines.call(f"no address {number}", GetStatus(), SECOND)
            with pytest.raises(UsageError, match=f"more than {MAX_LINES} manager addresses"):
                await lines.call("127.0.0.1:2", GetStatus(), SECOND)
            await lines.close()
            with pytest.raises(UsageError, match="are closed"):
                await lines.call(manager.address, GetStatus(), SECOND)

    asyncio.run(story())

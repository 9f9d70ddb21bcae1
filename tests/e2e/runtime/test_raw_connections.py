"""Connections are authenticated on both ends and handed on as descriptors; strangers get one message and no more."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest
from tests.support.loops import on_loop
from tests.support.network.known_users import known

from fireflyer.base.errors import Busy, PermissionDenied, Timeout, Unreachable
from fireflyer.base.units import MS
from fireflyer.identity.acceptor import HandshakeLimits
from fireflyer.identity.conversation import ClientConversation
from fireflyer.identity.handshake import (
    NONCE_BYTES,
    Accepts,
    FindUser,
    NodeCredential,
    UserCredential,
    UserKey,
    token_id_of,
    token_key,
)
from fireflyer.identity.secrets import Secret
from fireflyer.runtime.address import Address
from fireflyer.runtime.raw_connections import RawConnection, RawListener, connect_raw

SECRET, TOKEN = Secret(b"s" * 32), "fft1.abc.secret"
NODE = NodeCredential(SECRET, "node 1")


class _Taken:
    """A listener and what it has handed on."""

    def __init__(self, limits: HandshakeLimits, find_user: FindUser) -> None:
        accepts = Accepts(SECRET, find_user)
        self.connections: asyncio.Queue[RawConnection] = asyncio.Queue()
        self.listener = RawListener(
            accepts,
            identity="node 2",
            purpose="fs data",
            on_connection=self.connections.put_nowait,
            limits=limits,
        )
        self.address = Address("127.0.0.1", 1)


@contextlib.asynccontextmanager
async def listening(limits: HandshakeLimits | None = None, find_user: FindUser | None = None) -> AsyncIterator[_Taken]:
    ann = known({token_id_of(TOKEN): UserKey("ann", token_key(TOKEN))})
    taken = _Taken(limits or HandshakeLimits(), find_user or ann)
    taken.address = await taken.listener.start("127.0.0.1", 0)
    yield taken
    await taken.listener.close()
    while not taken.connections.empty():
        taken.connections.get_nowait().socket.close()


async def said_to(address: Address, data: bytes) -> bytes:
    """What a stranger hears who sends this."""
    reader, writer = await asyncio.open_connection(*address)
    writer.write(data)
    writer.write_eof()
    heard = await reader.read()
    writer.close()
    await writer.wait_closed()
    return heard


@on_loop
async def test_both_ends_know_each_other_and_no_byte_is_lost() -> None:
    async with listening() as taken:
        ours = await connect_raw(taken.address, NODE, purpose="fs data")
        with ours.socket:
            await asyncio.get_running_loop().sock_sendall(ours.socket, b"first bytes")
            theirs = await taken.connections.get()
            with theirs.socket:
                assert (ours.session.peer, theirs.session.peer, theirs.session.role) == ("node 2", "node 1", "node")
                assert not theirs.socket.getblocking()
                assert await asyncio.get_running_loop().sock_recv(theirs.socket, 100) == b"first bytes"


@on_loop
async def test_a_user_is_known_by_name_and_a_wrong_token_is_refused() -> None:
    async with listening() as taken:
        (await connect_raw(taken.address, UserCredential(TOKEN), purpose="fs data")).socket.close()
        theirs = await taken.connections.get()
        theirs.socket.close()
        assert (theirs.session.role, theirs.session.peer) == ("user", "ann")
        with pytest.raises(PermissionDenied, match="does not accept this token"):
            await connect_raw(taken.address, UserCredential("fft1.abc.wrong"), purpose="fs data")
        assert taken.connections.empty()


@on_loop
async def test_while_it_is_found_out_whose_token_it_is_others_are_served_and_who_leaves_is_forgotten() -> None:
    came, go = asyncio.Event(), asyncio.Event()

    async def find(_: str) -> UserKey | None:
        came.set()
        await go.wait()
        return UserKey("ann", token_key(TOKEN))

    async with listening(find_user=find) as taken:
        waiting = asyncio.create_task(connect_raw(taken.address, UserCredential(TOKEN), purpose="fs data"))
        await came.wait()
        left = socket.create_connection(taken.address)
        client = ClientConversation(UserCredential(TOKEN), purpose="fs data", nonce=bytes(NONCE_BYTES))
        came.clear()
        left.sendall(client.hello())
        await came.wait()
        left.close()
        (await connect_raw(taken.address, NODE, purpose="fs data")).socket.close()
        node = await taken.connections.get()
        node.socket.close()
        assert node.session.peer == "node 1"
        go.set()
        (await waiting).socket.close()
        user = await taken.connections.get()
        user.socket.close()
        assert user.session.peer == "ann"
        while taken.listener._sockets.next_deadline_ns is not None:  # noqa: ASYNC110, until who left is forgotten
            await asyncio.sleep(0.01)
        assert taken.connections.empty()


@on_loop
async def test_where_nobody_can_say_whose_token_it_is_the_client_is_told_to_try_again() -> None:
    async def away(_: str) -> UserKey | None:
        raise Unreachable("no manager at 10.0.0.1:7000")

    async with listening(find_user=away) as taken:
        with pytest.raises(Busy, match="cannot be looked up at the moment; try again later"):
            await connect_raw(taken.address, UserCredential(TOKEN), purpose="fs data")
        assert taken.listener.refused == 1


@on_loop
async def test_another_secret_or_purpose_is_refused_with_the_reason() -> None:
    async with listening() as taken:
        with pytest.raises(PermissionDenied, match="another node secret"):
            await connect_raw(taken.address, NodeCredential(Secret(b"x" * 32), "node 1"), purpose="fs data")
        with pytest.raises(PermissionDenied, match="this port serves 'fs data'"):
            await connect_raw(taken.address, NODE, purpose="rpc")
        assert taken.connections.empty()


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\r\n\r\n", b"\0\x05hello", bytes(100_000), b"\x01\x00" + b"\xff" * 256]
)
def test_a_stranger_gets_one_message_and_the_end(data: bytes) -> None:
    @on_loop
    async def talk() -> None:
        async with listening() as taken:
            heard = await said_to(taken.address, data)
            assert int.from_bytes(heard[:2], "big") == len(heard) - 2 < 512
            assert b"refused" in heard
            assert taken.connections.empty()
            (await connect_raw(taken.address, NODE, purpose="fs data")).socket.close()

    talk()


@on_loop
async def test_who_says_nothing_is_told_so_when_the_time_is_over() -> None:
    async with listening(HandshakeLimits(handshake_ns=50 * MS)) as taken:
        reader, writer = await asyncio.open_connection(*taken.address)
        assert b"did not authenticate" in await reader.read()
        writer.close()
        await writer.wait_closed()


@on_loop
async def test_silent_strangers_do_not_keep_others_out() -> None:
    async with listening(HandshakeLimits(total=20, per_source=10)) as taken:
        strangers = [await asyncio.open_connection(*taken.address) for _ in range(15)]
        (await connect_raw(taken.address, NODE, purpose="fs data")).socket.close()
        for _, writer in strangers:
            writer.close()


@on_loop
async def test_a_server_that_is_no_such_server_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = Address(*silent.getsockname())
        with pytest.raises(Timeout, match=str(address)):
            await connect_raw(address, NODE, purpose="fs data", timeout_ns=50 * MS)
    with pytest.raises(Unreachable, match=str(address)):
        await connect_raw(address, NODE, purpose="fs data")

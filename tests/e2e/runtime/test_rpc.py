"""RPC over real sockets: answers, errors, deadlines, cancellation, and what happens when an end goes away."""

from __future__ import annotations

import asyncio
import socket
import struct

import msgspec
import pytest
from tests.support.loops import on_loop
from tests.support.network.known_users import known
from tests.support.network.rpc_service import ADD, ECHO, FAIL, HANG, SLOW, WHO, Add, Blob, Name, Number, serving

from fireflyer.base.errors import (
    Aborted,
    Busy,
    DataCorruption,
    InvariantViolation,
    NotFound,
    PermissionDenied,
    Timeout,
    Unreachable,
    UsageError,
)
from fireflyer.base.units import MIB, MS, SECOND
from fireflyer.identity.handshake import BEARER_MARK, UserKey, token_key
from fireflyer.identity.secrets import new_secret
from fireflyer.runtime import token_watch
from fireflyer.runtime.framing import TAG_BYTES
from fireflyer.runtime.raw_connections import RawConnection, RawListener
from fireflyer.runtime.rpc import (
    Accepts,
    Address,
    Method,
    NodeCredential,
    RpcClient,
    RpcServer,
    ServerLimits,
    UserCredential,
)
from fireflyer.runtime.rpc import client as client_module
from fireflyer.runtime.rpc.messages import MAX_ERROR_CHARS, Call, encode
from fireflyer.runtime.rpc.stream import PURPOSE, MessageStream


@on_loop
async def test_a_call_is_answered_and_both_ends_know_who_the_other_is() -> None:
    async with serving() as service:
        client = await service.client("rank 7")
        assert client.server_identity == "hub"
        assert await client.call(ADD, Add(2, 3), SECOND) == Number(5)
        assert await client.call(WHO, Name(""), SECOND) == Name("node rank 7 1")
        await client.close()


@on_loop
async def test_errors_come_out_as_the_class_that_went_in(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as service:
        client = await service.client()
        with pytest.raises(NotFound, match="no not_found here"):
            await client.call(FAIL, Name("not_found"), SECOND)
        with pytest.raises(DataCorruption):
            await client.call(FAIL, Name("data_corruption"), SECOND)
        with pytest.raises(InvariantViolation, match="unexpected TimeoutError"):
            await client.call(FAIL, Name("timeout"), SECOND)
        with pytest.raises(InvariantViolation, match="unexpected ValueError"):
            await client.call(FAIL, Name("bug"), SECOND)
        assert "handler failed method=test.fail" in caplog.text
        with pytest.raises(NotFound) as caught:
            await client.call(FAIL, Name("long"), SECOND)
        assert str(caught.value) == "x" * MAX_ERROR_CHARS
        assert await client.call(ADD, Add(1, 1), SECOND) == Number(2)
        await client.close()


@on_loop
async def test_unknown_methods_and_wrong_types_are_the_callers_fault() -> None:
    async with serving() as service:
        client = await service.client()
        with pytest.raises(UsageError, match=r"no RPC method 'test.gone'.*same release"):
            await client.call(Method("test.gone", Name, Name), Name(""), SECOND)
        with pytest.raises(UsageError, match=r"test.add: bad request"):
            await client.call(Method("test.add", Name, Number), Name(""), SECOND)
        with pytest.raises(DataCorruption, match=r"test.add at .*: bad response"):
            await client.call(Method("test.add", Add, Name), Add(1, 1), SECOND)
        with pytest.raises(UsageError, match="timeout_ns 0"):
            await client.call(ADD, Add(1, 1), 0)
        await client.close()


@on_loop
async def test_many_calls_in_flight_are_each_given_their_own_answer() -> None:
    async with serving() as service:
        client = await service.client()
        slow = [asyncio.create_task(client.call(HANG, Name("x" * n), 20 * SECOND)) for n in range(1, 100)]
        await service.until_hanging(99)
        fast = await asyncio.gather(*(client.call(ADD, Add(n, n), 20 * SECOND) for n in range(500)))
        assert [number.value for number in fast] == [2 * n for n in range(500)]
        service.release.set()
        assert [number.value for number in await asyncio.gather(*slow)] == list(range(1, 100))
        await client.close()


@on_loop
async def test_a_deadline_ends_the_call_on_both_sides() -> None:
    async with serving() as service:
        client = await service.client()
        with pytest.raises(
            Timeout, match=rf"test.hang at {service.address} did not answer within 50 ms|did not finish within"
        ):
            await client.call(HANG, Name("late"), 50 * MS)
        await service.until_ended(1)
        assert await client.call(ADD, Add(1, 1), SECOND) == Number(2)
        await client.close()


@on_loop
async def test_the_server_keeps_the_deadline_even_if_the_client_says_nothing_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving() as service:
        client = await service.client()
        monkeypatch.setattr(client, "_give_up", lambda call_id: None)
        with pytest.raises(Timeout):
            await client.call(HANG, Name("late"), 50 * MS)
        await service.until_ended(1)
        await client.close()


@on_loop
async def test_the_client_keeps_the_deadline_even_if_the_server_says_nothing() -> None:
    secret = new_secret()
    taken: asyncio.Queue[RawConnection] = asyncio.Queue()
    mute = RawListener(Accepts(secret), identity="mute", purpose=PURPOSE, on_connection=taken.put_nowait)
    client = await RpcClient.connect(await mute.start("127.0.0.1", 0), NodeCredential(secret, "x"), 10 * SECOND)
    with pytest.raises(Timeout, match=rf"test.add at {client.address} did not answer within 50 ms"):
        await client.call(ADD, Add(1, 1), 50 * MS)
    await client.close()
    (await taken.get()).socket.close()
    await mute.close()


@on_loop
async def test_cancelling_a_call_cancels_its_handler() -> None:
    async with serving() as service:
        client = await service.client()
        call = asyncio.create_task(client.call(HANG, Name("given up"), 60 * SECOND))
        await service.until_hanging(1)
        call.cancel()
        await service.until_ended(1)
        with pytest.raises(asyncio.CancelledError):
            await call
        await client.close()


@on_loop
async def test_a_client_that_goes_away_ends_its_handlers_and_is_reported() -> None:
    async with serving() as service:
        client, other = await service.client("leaver"), await service.client("stayer")
        call = asyncio.create_task(client.call(HANG, Name("a"), 60 * SECOND))
        await service.until_hanging(1)
        await client.close()
        with pytest.raises(Aborted, match="closed"):
            await call
        await service.until_ended(1)
        assert await other.call(ADD, Add(1, 1), SECOND) == Number(2)
        assert await service.left.get() == "leaver"
        await other.close()


@on_loop
async def test_server_death_in_mid_call_names_the_server() -> None:
    async with serving() as service:
        client = await service.client()
        calls = [asyncio.create_task(client.call(HANG, Name(str(n)), 60 * SECOND)) for n in range(5)]
        await service.until_hanging(5)
    for call in calls:
        with pytest.raises(Unreachable, match=f"{service.address} closed the connection.*may or may not have executed"):
            await call
    assert isinstance(await client.wait_lost(), Unreachable)
    with pytest.raises(Unreachable, match=str(service.address)):
        await client.call(ADD, Add(1, 1), SECOND)
    with pytest.raises(Unreachable, match=f"connect to {service.address}: connection refused"):
        await service.client()
    await client.close()


@on_loop
async def test_messages_over_the_limit_are_refused_and_the_connection_goes_on() -> None:
    async with serving(ServerLimits(frame_bytes=1000)) as service:
        credential = NodeCredential(service.secret, "small")
        client = await RpcClient.connect(service.address, credential, SECOND, max_frame_bytes=1000)
        with pytest.raises(UsageError, match=r"test.echo: a message of \d+ bytes is longer than the limit of 1000"):
            await client.call(ECHO, Blob(bytes(1000)), SECOND)
        with pytest.raises(UsageError, match=r"response of test.echo: a message of"):
            await client.call(ECHO, Blob(b"", reply_bytes=1000), SECOND)
        assert await client.call(ECHO, Blob(bytes(900)), SECOND) == Blob(bytes(900))
        await client.close()


@on_loop
async def test_a_frame_over_the_servers_limit_ends_that_connection_only(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(ServerLimits(frame_bytes=1000)) as service:
        client, other = await service.client(), await service.client()
        with pytest.raises(Unreachable):
            await client.call(ECHO, Blob(bytes(2000)), 10 * SECOND)
        assert "the limit is 1000" in caplog.text
        assert await other.call(ADD, Add(1, 1), SECOND) == Number(2)
        await client.close()
        await other.close()


@on_loop
async def test_large_messages_pass_whole() -> None:
    async with serving() as service:
        client = await service.client()
        data = bytes(range(256)) * (4 << 12)
        replies = await asyncio.gather(*(client.call(ECHO, Blob(data), 30 * SECOND) for _ in range(4)))
        assert all(reply.data == data for reply in replies)
        await client.close()


@on_loop
async def test_calls_over_the_bound_are_told_that_the_server_is_busy() -> None:
    async with serving(ServerLimits(calls_per_connection=3, request_bytes_per_connection=5000)) as service:
        client = await service.client()
        calls = [asyncio.create_task(client.call(HANG, Name(str(n)), 60 * SECOND)) for n in range(3)]
        await service.until_hanging(3)
        with pytest.raises(Busy, match="3 calls are in flight"):
            await client.call(ADD, Add(1, 1), SECOND)
        calls.pop().cancel()
        await service.until_hanging(2)
        with pytest.raises(Busy, match="bytes of requests"):
            await client.call(ECHO, Blob(bytes(5000)), SECOND)
        assert await client.call(ADD, Add(1, 1), SECOND) == Number(2)
        service.release.set()
        await asyncio.gather(*calls)
        assert len((await client.call(ECHO, Blob(bytes(6000)), SECOND)).data) == 6000
        await client.close()


@on_loop
async def test_the_hundred_and_first_connection_is_turned_away_until_one_closes() -> None:
    async with serving(ServerLimits(connections=100)) as service:
        clients = [await service.client(f"rank {n}") for n in range(100)]
        with pytest.raises(Busy, match=r"refused by the server: the server has its 100 connections already"):
            await RpcClient.connect(service.address, NodeCredential(service.secret, "one too many"), 300 * MS)
        await clients.pop().close()
        assert await service.left.get() == "rank 99"
        clients.append(await service.client("welcome"))
        sums = await asyncio.gather(*(client.call(ADD, Add(n, 1), 20 * SECOND) for n, client in enumerate(clients)))
        assert [number.value for number in sums] == list(range(1, 101))
        await asyncio.gather(*(client.close() for client in clients))


@on_loop
async def test_one_peer_has_its_part_of_the_connections_and_no_more() -> None:
    async with serving(ServerLimits(connections=10, connections_per_peer=2)) as service:
        clients = [await service.client("greedy") for _ in range(2)]
        with pytest.raises(Busy, match="node greedy has its 2 connections already; close some of them"):
            await RpcClient.connect(service.address, NodeCredential(service.secret, "greedy"), 300 * MS)
        clients.append(await service.client("another"))
        await clients.pop(0).close()
        assert await service.left.get() == "greedy"
        clients.append(await service.client("greedy"))
        assert await clients[-1].call(ADD, Add(1, 1), SECOND) == Number(2)
        told = {series.name: series.values for series in service.metrics()}
        assert told["fireflyer_rpc_connections"] == [({"role": "node"}, 3), ({"role": "user"}, 0)]
        refused = {labels["bound"]: count for labels, count in told["fireflyer_rpc_refused_total"]}
        assert refused["connections_of_peer"] >= 1
        await asyncio.gather(*(client.close() for client in clients))


@on_loop
async def test_who_asks_and_does_not_read_is_cut_off_before_the_answers_fill_the_memory(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Ten requests of some bytes ask for 40 MiB; the kernel's buffers take a few of them."""
    async with serving(ServerLimits(bytes_per_peer=8 * MIB)) as service:
        greedy, other = await service.client("greedy"), await service.client("other")
        greedy._stream._reader._limit = 1  # type: ignore[attr-defined]
        greedy._stream._reader._transport.pause_reading()  # type: ignore[attr-defined]
        for number in range(10):
            call = Call(1000 + number, ECHO.name, 60 * SECOND, msgspec.Raw(encode(Blob(b"", 4 * MIB))))
            greedy._stream.send_soon(encode(call))
        assert await service.left.get() == "greedy"
        assert "connection closed, it does not read its answers" in caplog.text
        assert len((await other.call(ECHO, Blob(b"", 4 * MIB), 10 * SECOND)).data) == 4 * MIB
        await greedy.close()
        await other.close()


@on_loop
async def test_who_reads_nothing_for_long_is_cut_off() -> None:
    async with serving(ServerLimits(unread_ns=200 * MS)) as service:
        client = await service.client("asleep")
        client._stream._reader._transport.pause_reading()  # type: ignore[attr-defined]
        for number in range(4):
            call = Call(1000 + number, ECHO.name, 60 * SECOND, msgspec.Raw(encode(Blob(b"", 8 * MIB))))
            client._stream.send_soon(encode(call))
        assert await service.left.get() == "asleep"
        await client.close()


@on_loop
async def test_half_a_frame_does_not_stay_for_ever(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with serving(ServerLimits(frame_ns=200 * MS)) as service:
        client = await service.client("slow")
        client._stream._writer.write((MIB).to_bytes(4, "big") + bytes(1000))
        assert await service.left.get() == "slow"
        assert f"{MIB + TAG_BYTES} bytes of a message were announced and did not come within" in caplog.text
        await client.close()


@on_loop
async def test_a_peer_that_announces_more_than_it_may_make_wait_is_closed(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(ServerLimits(bytes_per_peer=3 * MIB)) as service:
        first, second, other = [await service.client(name) for name in ("greedy", "greedy", "other")]
        first._stream._writer.write((2 * MIB).to_bytes(4, "big") + bytes(1000))
        await other.call(ADD, Add(1, 1), SECOND)
        second._stream._writer.write((2 * MIB).to_bytes(4, "big") + bytes(1000))
        assert await service.left.get() == "greedy"
        assert "node greedy makes 2097168 bytes wait already, of 3145728, and 2097168 more come" in caplog.text
        assert await other.call(ADD, Add(1, 1), SECOND) == Number(2)
        await asyncio.gather(*(client.close() for client in (first, second, other)))


@on_loop
async def test_strangers_are_refused_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as service:
        with pytest.raises(PermissionDenied, match=f"connect to {service.address}: the server has another node secret"):
            await RpcClient.connect(service.address, NodeCredential(new_secret(), "x"), SECOND)
        with pytest.raises(PermissionDenied, match="no tokens; check the address"):
            await RpcClient.connect(service.address, UserCredential("fft1.00.x"), SECOND)
        client = await service.client()
        await client.close()
    assert caplog.text.count("connection refused peer=127.0.0.1 purpose=rpc") == 2


@on_loop
async def test_users_are_let_in_by_their_token() -> None:
    token = "fft1.0123.words"
    users = {"0123": UserKey("ada", token_key(token))}
    async with serving(accepts=Accepts(None, known(users))) as service:
        client = await RpcClient.connect(str(service.address), UserCredential(token), SECOND)
        assert await client.call(WHO, Name(""), SECOND) == Name("user ada 1")
        await client.close()
        with pytest.raises(PermissionDenied, match="does not accept this token"):
            await RpcClient.connect(service.address, UserCredential("fft1.0123.other"), SECOND)


@on_loop
async def test_a_revoked_token_ends_its_open_connections_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_watch, "RECHECK_S", 0.05)
    tokens = {name: f"{BEARER_MARK}.{name}.secret" for name in ("first", "second")}
    users = {name: UserKey("alice", token_key(token)) for name, token in tokens.items()}
    async with serving(accepts=Accepts(None, known(users)), recheck_tokens=True) as service:
        first, second = [
            await RpcClient.connect(service.address, UserCredential(token), SECOND) for token in tokens.values()
        ]
        del users["first"]
        assert isinstance(await first.wait_lost(), Unreachable)
        assert await second.call(ADD, Add(1, 1), SECOND) == Number(2)
        with pytest.raises(PermissionDenied):
            await RpcClient.connect(service.address, UserCredential(tokens["first"]), SECOND)
        await first.close()
        await second.close()


@on_loop
async def test_who_was_told_that_the_server_is_full_is_not_asked_whether_it_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The time may be over in the middle of another try, as where this process got no processor in the pause."""
    tries = 0

    async def full_and_then_silent(*_: object) -> MessageStream:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise Busy("the server is full")
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(client_module, "_open", full_and_then_silent)
    with pytest.raises(Busy, match=r"connect to 127.0.0.1:1: the server is full"):
        await RpcClient.connect("127.0.0.1:1", NodeCredential(new_secret(), "x"), 300 * MS)
    assert tries == 2


@on_loop
async def test_a_silent_connection_is_closed_and_holds_nobody_up(caplog: pytest.LogCaptureFixture) -> None:
    # The peer must have introduced itself within the same time, however busy the machine is.
    async with serving(ServerLimits(handshake_ns=SECOND, handshakes=2)) as service:
        reader, writer = await asyncio.open_connection(*service.address)
        client = await service.client()
        assert await client.call(ADD, Add(1, 1), SECOND) == Number(2)
        assert b"did not authenticate within 1.0 s" in await reader.read()
        assert "did not authenticate within 1.0 s" in caplog.text
        writer.close()
        await writer.wait_closed()
        await client.close()


@on_loop
async def test_silent_strangers_cannot_keep_others_out() -> None:
    async with serving(ServerLimits(handshake_ns=600 * SECOND, handshakes=4)) as service:
        strangers = [await asyncio.open_connection(*service.address) for _ in range(20)]
        client = await service.client()
        assert await client.call(ADD, Add(1, 1), SECOND) == Number(2)
        gone = [await reader.read() for reader, _ in strangers[:16]]
        assert gone == [b""] * 16, "the oldest made room"
        await client.close()
        for _, writer in strangers:
            writer.close()


@on_loop
async def test_a_server_that_never_answers_the_handshake_is_a_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = Address(*listener.getsockname())
        with pytest.raises(Timeout, match=f"connect to {address}: no connection within 50 ms"):
            await RpcClient.connect(address, NodeCredential(new_secret(), "x"), 50 * MS)


@on_loop
async def test_whoever_comes_to_a_full_server_waits_for_a_place() -> None:
    async with serving(ServerLimits(connections=1)) as service:
        first = await service.client("first")
        second = asyncio.create_task(service.client("second"))
        with pytest.raises(Busy):
            await RpcClient.connect(service.address, NodeCredential(service.secret, "hasty"), 200 * MS)
        await first.close()
        client = await second
        assert await client.call(WHO, Name(""), SECOND) == Name("node second 2")
        await client.close()


@on_loop
async def test_a_server_that_ends_during_the_handshake_has_refused_nobody() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        address = Address(*listener.getsockname())
        connecting = asyncio.create_task(
            RpcClient.connect(address, NodeCredential(new_secret(), "x"), 10 * SECOND), name="connecting"
        )
        end, _ = await asyncio.get_running_loop().sock_accept(listener)
        with end:
            end.shutdown(socket.SHUT_WR)
            with pytest.raises(Unreachable, match=f"connect to {address}: the server closed the connection"):
                await connecting


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n", b"\0" * 64, struct.pack(">H", 5) + b"\xc1" * 5])
@on_loop
async def test_garbage_ends_its_own_connection_only(garbage: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as service:
        client = await service.client()
        reader, writer = await asyncio.open_connection(*service.address)
        writer.write(garbage)
        await reader.read()
        writer.close()
        assert "does not speak this protocol" in caplog.text
        assert await client.call(ADD, Add(1, 1), SECOND) == Number(2)
        await client.close()


@on_loop
async def test_a_malformed_message_from_a_right_client_ends_its_connection_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving() as service:
        client, other = await service.client(), await service.client()
        client._stream.send_soon(b"\xc1 is no msgpack")
        assert isinstance(await client.wait_lost(), Unreachable)
        assert "malformed RPC message" in caplog.text
        assert await other.call(ADD, Add(1, 1), SECOND) == Number(2)
        await client.close()
        await other.close()


@on_loop
async def test_a_notification_is_handled_and_not_answered(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as service:
        client = await service.client()
        await client.notify(HANG, Name("told"))
        await service.until_hanging(1)
        await client.notify(FAIL, Name("not_found"))
        assert await client.call(ADD, Add(1, 1), SECOND) == Number(2)
        service.release.set()
        await service.until_ended(1)
        assert "notification failed method=test.fail" in caplog.text
        await client.close()


@on_loop
async def test_what_was_notified_before_leaving_is_handled() -> None:
    async with serving() as service:
        client = await service.client()
        for number in range(20):
            await client.notify(SLOW, Name(str(number)))
        await client.close()
        await service.until_ended(20)
        assert service.ended == [str(number) for number in range(20)]


@on_loop
async def test_what_was_answered_counts_no_more() -> None:
    async with serving(ServerLimits(calls_per_connection=2, request_bytes_per_connection=5000)) as service:
        client = await service.client()
        hanging = asyncio.create_task(client.call(HANG, Name("a"), 60 * SECOND))
        for _ in range(20):
            assert len((await client.call(ECHO, Blob(bytes(4000)), SECOND)).data) == 4000
        service.release.set()
        await hanging
        await client.close()


@on_loop
async def test_a_taken_port_is_named() -> None:
    async with serving() as service:
        second = RpcServer(Accepts(service.secret))
        with pytest.raises(UsageError, match=rf"listen on 127.0.0.1:{service.address.port}: the address is in use"):
            await second.start("127.0.0.1", service.address.port)
        with pytest.raises(UsageError, match="port 70000"):
            await second.start("127.0.0.1", 70000)
        await second.close()


@on_loop
async def test_one_method_has_one_handler() -> None:
    async with serving() as service:
        server = RpcServer(Accepts(service.secret))
        service.register(server)
        with pytest.raises(UsageError, match=r"'test.add' is registered already"):
            service.register(server)

"""What storage processes let users and strangers do, with a manager and real connections."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from tests.support.fs.clusters.data_connection import FOUND, MESSAGE, READS, DataConnection, frame
from tests.support.fs.clusters.storage_cluster import (
    FIRST,
    PATIENT_MS,
    Store,
    in_cluster,
    user_of,
    users_of,
)
from tests.support.patience import allowed_s

from fireflyer.base.errors import PermissionDenied
from fireflyer.base.units import MIB
from fireflyer.fs.core.capability import Capability, Rights, derive_key, sign
from fireflyer.fs.schema import data
from fireflyer.fs.schema.chunks import (
    Change,
    Missing,
    Operation,
    Query,
    QueryKind,
    RefusalReason,
    Refused,
    StaleChainVersion,
    Update,
)
from fireflyer.fs.schema.ids import ChunkId
from fireflyer.fs.schema.manager import RotateKeys
from fireflyer.fs.schema.routing import TargetState

pytestmark = [pytest.mark.processes]


def test_a_user_may_do_what_his_capabilities_say(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        await store.write(FIRST, 0, b"shared")
        version, member = store.chain.version, store.serving()[0]
        address = next(one.address for one in store.routing.nodes if one.id == member.node)
        credentials = [await user_of(store, name) for name in ("ann", "bob")]
        ann, bob = [await DataConnection.connect(address, one) for one in credentials]
        update = Update(1, version, store.client, 3, 1, ChunkId(1, 3), Change(Operation.TRUNCATE, 0, 5))
        stat = Query(1, version, QueryKind.STAT, FIRST)

        async def may(one: DataConnection) -> list[bool]:
            """Read, stat, write."""
            read = await one.read(1, version, 1, 0, 0, 10)
            said = [await one.ask(stat), await one.ask(update)]
            refused = [isinstance(reply, Refused) and reply.refusal is RefusalReason.DENIED for reply in said]
            assert read.status in (1, 6), read
            return [read.status == 1, *(not one for one in refused)]

        assert await may(ann) == [False, False, False]
        key = derive_key(store.credential.secret.reveal(), 1)
        expires_s = int(time.time()) + 60
        to_read = sign(Capability(1, "ann", store.client, 1, 1, Rights.READ, expires_s), key)
        to_write = sign(Capability(1, "ann", store.client, 1, 5, Rights.WRITE, expires_s), key)
        assert isinstance(await ann.ask(data.Present(to_read)), data.Granted)
        assert await may(ann) == [True, True, False]
        assert isinstance(await ann.ask(data.Present(to_write)), data.Granted)
        assert await may(ann) == [True, True, True]
        for token in (to_read, to_write, b"", to_read[:-1], bytes(len(to_read))):
            refused = await bob.ask(data.Present(token))
            assert isinstance(refused, Refused)
            assert refused.refusal is RefusalReason.DENIED
        assert await may(bob) == [False, False, False]
        other = Update(1, version, store.client + 1, 3, 1, ChunkId(1, 3), Change(Operation.TRUNCATE, 0, 5))
        reply = await ann.ask(other)
        assert isinstance(reply, Refused)
        assert reply.refusal is RefusalReason.DENIED
        await ann.close()
        await bob.close()

    in_cluster(work, tmp_path, failure_timeout_ms=PATIENT_MS, nodes=2, replicas=2)


def test_a_key_that_is_revoked_takes_what_it_allowed_with_it(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        await store.write(FIRST, 0, b"for a while")
        version, address, secret = store.chain.version, store.routing.nodes[0].address, store.credential.secret.reveal()
        ann = await user_of(store, "ann")

        def signed(key: int) -> data.Present:
            expires_s = int(time.time()) + 600
            one = Capability(key, "ann", store.client, 1, 1, Rights.READ, expires_s)
            return data.Present(sign(one, derive_key(secret, key)))

        connection = await DataConnection.connect(address, ann)
        assert isinstance(await connection.ask(signed(1)), data.Granted)
        assert (await connection.read(1, version, 1, 0, 0, 100)).data == b"for a while"
        await store.manager.ask(RotateKeys(revoke=True))
        async with asyncio.timeout(10):
            await connection.closed()
        again = await DataConnection.connect(address, ann)
        assert isinstance(await again.ask(signed(1)), Refused)
        assert isinstance(await again.ask(signed(2)), data.Granted)
        assert (await again.read(1, version, 1, 0, 0, 100)).data == b"for a while"
        await store.manager.ask(RotateKeys())
        await store.until(lambda: granted(again, signed(3)))
        assert isinstance(await again.ask(signed(2)), data.Granted), "nobody notices a key that is only changed"
        for one in (connection, again):
            await one.close()

    in_cluster(work, tmp_path, failure_timeout_ms=PATIENT_MS, nodes=1, replicas=1)


@pytest.mark.slow
def test_a_token_that_is_revoked_ends_its_connections_to_storage_processes(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        await store.write(FIRST, 0, b"for a while")
        version, address, secret = store.chain.version, store.routing.nodes[0].address, store.credential.secret.reveal()
        users = [await user_of(store, name) for name in ("ann", "bob")]
        ann, bob = [await DataConnection.connect(address, user) for user in users]
        for connection, name in ((ann, "ann"), (bob, "bob")):
            one = Capability(1, name, store.client, 1, 1, Rights.READ, int(time.time()) + 600)
            present = data.Present(sign(one, derive_key(secret, 1)))
            assert isinstance(await connection.ask(present), data.Granted)
            assert (await connection.read(1, version, 1, 0, 0, 100)).data == b"for a while"
        accounts = users_of(store)
        await accounts.revoke((await accounts.tokens("ann"))[0].id)
        await asyncio.wait_for(ann.closed(), allowed_s(10))
        assert (await bob.read(1, version, 1, 0, 0, 100)).data == b"for a while"
        with pytest.raises(PermissionDenied):
            await DataConnection.connect(address, users[0])
        await accounts.expire((await accounts.tokens("bob"))[0].id, 1)
        await asyncio.wait_for(bob.closed(), allowed_s(11))
        await accounts.close()
        await ann.close()
        await bob.close()

    in_cluster(work, tmp_path, failure_timeout_ms=PATIENT_MS, nodes=1, replicas=1)


async def granted(connection: DataConnection, present: data.Present) -> bool:
    return isinstance(await connection.ask(present), data.Granted)


@pytest.mark.slow
def test_a_capability_ends_when_it_expires(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        await store.write(FIRST, 0, b"for a moment")
        version = store.chain.version
        connection = await DataConnection.connect(store.routing.nodes[0].address, await user_of(store, "ann"))
        expires_s = int(time.time()) + 3
        key = derive_key(store.credential.secret.reveal(), 1)
        token = sign(Capability(1, "ann", store.client, 1, 1, Rights.READ | Rights.WRITE, expires_s), key)
        granted = await connection.ask(data.Present(token))
        assert isinstance(granted, data.Granted)
        assert 0 < granted.left_ns < 3 * 10**9
        assert (await connection.read(1, version, 1, 0, 0, 100)).data == b"for a moment"
        while (await connection.read(1, version, 1, 0, 0, 100)).status == FOUND:
            assert time.time() < expires_s + 1
            await asyncio.sleep(0.05)
        await asyncio.sleep(max(0.0, expires_s - time.time()))
        for ask in (
            Query(1, version, QueryKind.STAT, FIRST),
            Update(1, version, store.client, 3, 1, FIRST, Change(Operation.TRUNCATE, 0, 5)),
            data.Present(token),
        ):
            refused = await connection.ask(ask)
            assert isinstance(refused, Refused)
            assert refused.refusal is RefusalReason.DENIED
        await connection.close()

    in_cluster(work, tmp_path, failure_timeout_ms=PATIENT_MS, nodes=1, replicas=1)


NONSENSE = {
    "other protocol": b"GET / HTTP/1.1\r\n\r\n" * 10,
    "checksum": frame(MESSAGE, data.encode(data.PeerEnvelope(1, 2, StaleChainVersion(1, 1))))[:-1] + b"\0",
    "kind": frame(77, b"x"),
    "body": frame(MESSAGE, b"\x91" * 1000),
    "for peers alone": frame(MESSAGE, data.encode(data.PeerEnvelope(1, 2, StaleChainVersion(1, 1)))),
    "for clients alone": frame(MESSAGE, data.encode(data.DataReply(1, Missing()))),
    "too long": frame(MESSAGE, b"", payload_bytes=65 * MIB),
    "half a read": frame(READS, bytes(39)),
}


def test_nonsense_ends_its_connection_and_no_other(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        await store.write(FIRST, 0, b"unharmed")
        member = store.serving()[0]
        address = next(one.address for one in store.routing.nodes if one.id == member.node)
        ann, eve = [await user_of(store, name) for name in ("ann", "eve")]
        good = await DataConnection.connect(address, ann)
        for what, sent in NONSENSE.items():
            bad = await DataConnection.connect(address, eve)
            bad.send(sent)
            try:
                await asyncio.wait_for(bad.closed(), 30)
            except TimeoutError:
                pytest.fail(f"{what} is taken")
            await bad.close()
        denied = await good.ask(Query(1, store.chain.version, QueryKind.STAT, FIRST))
        assert isinstance(denied, Refused)
        await good.close()
        await store.write(FIRST, 0, b"UN")
        await store.check()
        assert [one.state for one in store.chain.members] == [TargetState.SERVING]

    in_cluster(work, tmp_path, failure_timeout_ms=PATIENT_MS, nodes=1, replicas=1)

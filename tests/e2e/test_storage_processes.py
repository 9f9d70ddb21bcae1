"""Storage processes, a manager and a client, all real: updates through a chain, and what goes wrong with machines."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support.data_connection import FOUND, MESSAGE, MISSING, READS, STALE, DataConnection, frame
from tests.support.loops import on_loop
from tests.support.patience import allowed_s
from tests.support.storage_cluster import FAILURE_TIMEOUT_MS, PATIENT_MS, Node, Store, cluster

from fireflyer.base.errors import FireflyerError, Unreachable, UsageError
from fireflyer.base.units import KIB, MIB
from fireflyer.fs.core.capability import Capability, Rights, derive_key, sign
from fireflyer.fs.schema import data
from fireflyer.fs.schema.chunks import (
    Behind,
    Change,
    Done,
    Found,
    Look,
    LookKind,
    Missing,
    Operation,
    Refusal,
    Refused,
    Update,
)
from fireflyer.fs.schema.ids import ChunkId
from fireflyer.fs.schema.manager import AddChains, NewChain, RotateKeys
from fireflyer.fs.schema.routing import TargetState
from fireflyer.fs.service.storage_config import StorageTarget
from fireflyer.fs.service.storage_targets import LOOK_S
from fireflyer.fs.service.target_directory import make_target
from fireflyer.identity.handshake import UserCredential
from fireflyer.identity.tokens import TokenStore
from fireflyer.native import crc32c
from fireflyer.runtime.address import Address

pytestmark = [pytest.mark.serial, pytest.mark.patient]
FIRST, SECOND, THIRD = ChunkId(1, 0), ChunkId(1, 1), ChunkId(2, 7)


def in_cluster(
    work: Callable[[Store], Coroutine[Any, Any, None]], directory: Path, *, limit_s: float = 60, **options: Any
) -> None:
    async def run() -> None:
        async with cluster(directory, **({"nodes": 3, "replicas": 3} | options)) as store:
            await work(store)

    on_loop(run, limit_s=limit_s)()


def test_updates_pass_through_the_chain_and_are_read_at_every_replica(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        await store.write(FIRST, 0, b"a" * 100_000)
        await store.write(FIRST, 50_000, b"b" * 100_000)
        await store.write(SECOND, 3, b"holes before")
        await store.remove(SECOND)
        await store.write(THIRD, 0, os.urandom(5 * MIB))
        await store.check(absent=(SECOND,))
        for member in store.serving():
            node = await store.connection(member.node)
            version = store.chain.version
            stat = await node.ask(Look(1, version, LookKind.STAT, FIRST))
            last = await node.ask(Look(1, version, LookKind.LAST, ChunkId(2, 1 << 20)))
            listed = await node.ask(Look(1, version, LookKind.LIST, ChunkId(1, 0), length=10))
            assert isinstance(stat, Found)
            assert stat.entries[0].held is not None
            assert (stat.entries[0].held.length, stat.entries[0].held.crc) == (150_000, crc32c(store.known[FIRST]))
            assert isinstance(last, Found)
            assert last.entries[0].chunk == THIRD
            assert listed == stat
            assert await node.ask(Look(1, version, LookKind.STAT, SECOND)) == Missing()
        assert not any("has no answer" in node.log() for node in store.nodes.values())

    in_cluster(work, tmp_path, failure_timeout_ms=PATIENT_MS)


@pytest.mark.slow
def test_a_retry_is_answered_and_not_done_again(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        await store.write(SECOND, 0, b"routing is known")
        node = await store.connection(store.serving()[0].node)
        version = store.chain.version
        updates = [
            Update(1, version, store.client, 9, 1, FIRST, Change(Operation.WRITE, 0, 3, crc32c(b"one"))),
            Update(1, version, store.client, 8, 1, FIRST, Change(Operation.WRITE, 3, 3, crc32c(b"two"))),
        ]
        first = await node.ask(updates[0], b"one")
        await node.ask(updates[1], b"two")
        again = await node.ask(updates[0], b"one")
        assert isinstance(first, Done)
        assert isinstance(again, Done)
        assert again.id == first.id
        assert await store.read(FIRST, store.serving()[-1].node) == b"onetwo"

    in_cluster(work, tmp_path, failure_timeout_ms=PATIENT_MS, nodes=2, replicas=2)


async def write_all_the_time(store: Store, stop: asyncio.Event) -> int:
    """Returns how many updates were done."""
    count = 0
    while not stop.is_set():
        chunk = ChunkId(3, count % 7)
        await store.write(chunk, (count * 1009) % 60_000, os.urandom(20_000))
        count += 1
    return count


@pytest.mark.parametrize("which", [0, *(pytest.param(one, marks=pytest.mark.slow) for one in (1, 2))])
def test_a_killed_process_is_replaced_in_its_chain_and_synced_while_writes_go_on(tmp_path: Path, which: int) -> None:
    async def work(store: Store) -> None:
        for index in range(20):
            await store.write(ChunkId(9, index), 0, os.urandom(30_000))
        stop = asyncio.Event()
        writing = asyncio.get_running_loop().create_task(write_all_the_time(store, stop))
        victim = store.nodes[store.serving()[which].node]
        await victim.stop()
        await store.until_serving(2, limit_s=FAILURE_TIMEOUT_MS / 1000 * 4 + 20)
        await store.write(ChunkId(9, 5), 0, b"changed while it was away")
        await store.remove(ChunkId(9, 6))
        await victim.start()
        await store.until_serving(3)
        stop.set()
        assert await writing > 0
        await store.check(absent=(ChunkId(9, 6),))

    in_cluster(work, tmp_path)


@pytest.mark.slow
def test_who_is_asked_to_end_is_replaced_at_once_and_comes_back(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        await store.write(FIRST, 0, b"x" * 1000)
        victim = store.nodes[store.serving()[0].node]
        begun_s = time.monotonic()
        assert await victim.stop(signal.SIGTERM) == 0, victim.log()
        await store.until_serving(1)
        assert time.monotonic() - begun_s < allowed_s(FAILURE_TIMEOUT_MS / 1000 + 3)
        await store.write(FIRST, 500, b"y" * 1000)
        await victim.start()
        await store.until_serving(2)
        await store.check()

    in_cluster(work, tmp_path, nodes=2, replicas=2)


@pytest.mark.slow
def test_when_all_are_killed_nothing_that_was_acknowledged_is_lost(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        for index in range(10):
            await store.write(ChunkId(4, index), 0, os.urandom(10_000))
        for node in store.nodes.values():
            node.kill()
        for node in store.nodes.values():
            await node.ended()
        for node in store.nodes.values():
            await node.start()
        await store.until_serving(3)
        await store.check()

    in_cluster(work, tmp_path)


@pytest.mark.slow
def test_a_directory_that_is_removed_takes_its_target_out_of_the_chain(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        await store.write(FIRST, 0, b"x" * 1000)
        victim = store.nodes[store.serving()[-1].node]
        shutil.rmtree(victim.target_directory)
        await store.until_serving(2)
        await store.write(FIRST, 0, b"y" * 1000)
        await store.check()
        await victim.stop()
        await store.check()

    in_cluster(work, tmp_path)


@pytest.mark.slow
def test_a_full_disk_refuses_writes_and_goes_on_with_reads_and_removals(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        async def fill() -> None:
            for index in range(200):
                await store.write(ChunkId(5, index), 0, os.urandom(MIB))

        with pytest.raises(UsageError, match="no_space"):
            await fill()
        filled = list(store.known)
        assert len(filled) > 8
        await store.check()
        for chunk in filled:
            await store.remove(chunk)
        await store.write(FIRST, 0, b"there is space again")
        await store.check(absent=(ChunkId(5, 0),))
        assert len(store.serving()) == 2

    in_cluster(work, tmp_path, failure_timeout_ms=PATIENT_MS, nodes=2, replicas=2, capacity_bytes=64 * MIB)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 150 MiB where node 2 has its disk."""
    path = tmp_path / "disk2.0"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=150m", "tmpfs", str(path)], capture_output=True)
    if mounted.returncode:
        pytest.skip("this user may not mount file systems")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


@pytest.mark.slow
def test_a_disk_that_is_really_full_refuses_and_goes_on(tmp_path: Path, small_disk: Path) -> None:
    async def work(store: Store) -> None:
        async def fill() -> None:
            for index in range(200):
                await store.write(ChunkId(5, index), 0, os.urandom(MIB))

        with pytest.raises(UsageError, match="no_space"):
            await fill()
        assert len(store.known) > 40
        assert len(store.serving()) == 2
        await store.check()
        assert os.statvfs(small_disk).f_bavail * 4096 < 70 * MIB
        for chunk in list(store.known):
            await store.remove(chunk)
        await store.write(FIRST, 0, b"removed chunks leave space")
        await store.check()
        victim = store.nodes[2]
        await victim.stop()
        await store.until_serving(1)
        await victim.start()
        await store.until_serving(2)
        await store.check()

    in_cluster(work, tmp_path, nodes=2, replicas=2)


@pytest.mark.slow
def test_a_journal_that_is_damaged_is_put_aside_and_the_target_synced(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        for index in range(50):
            await store.write(ChunkId(5, index), 0, os.urandom(1000))
        victim = store.nodes[store.serving()[0].node]
        await victim.stop()
        (journal,) = victim.target_directory.glob("chunks/journal*")
        with journal.open("r+b") as file:
            file.seek(3 * 4096 + 100)
            file.write(b"\0\1\2\3" * 5)
        await store.until_serving(1)
        await victim.start()
        await store.until_serving(2)
        await store.check()
        assert (victim.target_directory / "chunks.damaged").is_dir()
        assert "begins anew" in victim.log()

    in_cluster(work, tmp_path, nodes=2, replicas=2)


@pytest.mark.slow
def test_a_second_process_for_the_same_directories_is_refused(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        await store.write(FIRST, 0, b"one at a time")
        config = msgspec.structs.replace(store.nodes[1].config, node=2)
        twin = Node(config, tmp_path / "twin.json")
        with pytest.raises(AssertionError, match="another process has"):
            await twin.start()
        assert await twin.ended() != 0
        await store.check()

    in_cluster(work, tmp_path, failure_timeout_ms=PATIENT_MS, nodes=1, replicas=1)


@pytest.mark.slow
@pytest.mark.parametrize("more", [True, False])
def test_a_second_process_of_a_node_is_refused_whatever_directories_it_has(tmp_path: Path, more: bool) -> None:
    """If it registered, the first one would be taken for dead while it serves."""

    async def work(store: Store) -> None:
        config = store.nodes[1].config
        another = str(tmp_path / "another disk")
        make_target(another, config.cluster, 901)
        targets = (*(config.targets if more else ()), StorageTarget(901, another))
        twin = Node(msgspec.structs.replace(config, targets=targets), tmp_path / "twin.json")
        try:
            with pytest.raises(AssertionError, match="another process on this machine is node 1"):
                await twin.start()
        finally:
            with contextlib.suppress(ProcessLookupError):
                twin.kill()
        assert await twin.ended() != 0
        await store.write(FIRST, 0, b"nothing has changed")
        assert store.chain.version == 1

    in_cluster(work, tmp_path, failure_timeout_ms=PATIENT_MS, nodes=1, replicas=1)


@pytest.mark.slow
def test_a_process_without_descriptors_keeps_its_targets(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        await store.write(FIRST, 0, b"before the crowd")
        node = store.nodes[1]
        node.kill(signal.SIGTERM)
        await node.ended()
        await node.start(NOFILE=90)
        await store.until_serving(1)
        address = Address.parse(store.routing.nodes[0].address)
        crowd = [socket.create_connection(address) for _ in range(150)]
        await store.until(lambda: _says(node, "too many open files"))
        await asyncio.sleep(2 * LOOK_S)  # so that its directory was looked at meanwhile
        for one in crowd:
            one.close()
        assert "given up" not in node.log()
        await store.write(SECOND, 0, b"after it")
        await store.check()

    in_cluster(work, tmp_path, nodes=1, replicas=1)


async def _says(node: Node, text: str) -> bool:
    return text in node.log()


@pytest.mark.slow
def test_a_limit_of_the_system_is_a_full_disk(tmp_path: Path) -> None:
    """Files of one replica may not grow any more: what is refused is refused everywhere, and nothing is lost."""

    async def work(store: Store) -> None:
        await store.write(FIRST, 0, b"x" * 1000)
        victim = store.nodes[store.serving()[-1].node]
        victim.kill(signal.SIGTERM)
        await victim.ended()
        await victim.start(FSIZE=80 * MIB)
        await store.until_serving(2)

        async def fill() -> None:
            for index in range(200):
                await store.write(ChunkId(5, index), 0, os.urandom(MIB))
                if len(store.serving()) < 2:
                    raise UsageError("it has left the chain")

        with pytest.raises(UsageError):
            await fill()
        await store.check()
        assert len(store.known) > 8

    in_cluster(work, tmp_path, nodes=2, replicas=2)


@pytest.mark.slow
@pytest.mark.parametrize("which", [0, 1])
def test_a_process_that_stood_still_shows_nothing_old(tmp_path: Path, which: int) -> None:
    async def work(store: Store) -> None:
        await store.write(FIRST, 0, b"old")
        member = store.serving()[which]
        version = store.chain.version
        frozen = store.nodes[member.node]
        connection = await store.connection(member.node)
        frozen.kill(signal.SIGSTOP)
        await store.until_serving(1)
        await store.write(FIRST, 0, b"new")
        frozen.kill(signal.SIGCONT)
        for _ in range(200):
            with contextlib.suppress(Unreachable):
                answer = await connection.read(1, version, 1, 0, 0, 3)
                assert answer.status == STALE, answer
        await store.until_serving(2)
        await store.check()

    in_cluster(work, tmp_path, nodes=2, replicas=2)


@pytest.mark.slow
def test_targets_of_one_process_have_chains_of_their_own(tmp_path: Path) -> None:
    """Three nodes with two targets each; chains go round, so each node forwards to each other. One disk goes."""

    async def work(store: Store) -> None:
        chains = [NewChain(2, (2, 3, 1)), NewChain(3, (103, 101, 102))]
        await store.manager.ask(AddChains((chains[1],)))
        with pytest.raises(UsageError):
            await store.manager.ask(AddChains((chains[0],)))
        store.chain_id = 3
        await store.until_serving(3)
        await store.write(FIRST, 0, os.urandom(200_000))
        shutil.rmtree(store.nodes[2].config.targets[1].directory)
        await store.until_serving(2)
        await store.write(FIRST, 100, b"y" * 1000)
        await store.check()
        store.chain_id = 1
        await store.look()
        assert len(store.serving()) == 3
        assert await store.read(FIRST, 1) is None
        known, store.known = store.known, {}
        await store.write(SECOND, 0, b"of chain 1")
        await store.check()
        store.chain_id, store.known = 3, known
        await store.nodes[1].stop()
        await store.until_serving(1)
        await store.nodes[1].start()
        await store.until_serving(2)
        await store.check()

    in_cluster(work, tmp_path, targets=2)


def flip(directory: Path, content: bytes) -> int:
    """Turns a bit over in every copy of these bytes below the directory; returns how many there were."""
    found = 0
    for path in sorted(directory.rglob("*")):
        if path.is_file() and path.stat().st_size:
            held = path.read_bytes()
            at = held.find(content)
            while at >= 0:
                found += 1
                with path.open("r+b") as file:
                    file.seek(at + 100)
                    file.write(bytes([held[at + 100] ^ 4]))
                at = held.find(content, at + 1)
    return found


@pytest.mark.parametrize("finder", [pytest.param("scrub", marks=pytest.mark.slow), "doubt"])
def test_flipped_bits_are_found_and_mended_from_another_replica(tmp_path: Path, finder: str) -> None:
    async def work(store: Store) -> None:
        content = os.urandom(64 * KIB)
        await store.write(FIRST, 0, content)
        await store.write(SECOND, 0, os.urandom(64 * KIB))
        member = store.serving()[1]
        version = store.chain.version
        assert flip(store.nodes[member.node].target_directory, content) == 1
        if finder == "doubt":
            node = await store.connection(member.node)
            node.send(frame(MESSAGE, data.encode(data.Ask(1, data.Doubt(1, FIRST)))))

        async def mended() -> bool:
            await store.look()
            return store.chain.version >= version + 3 and len(store.serving()) == 2

        await store.until(mended)
        await store.check()
        assert "is damaged" in store.nodes[member.node].log()

    rate = 64 * MIB if finder == "scrub" else 0
    in_cluster(
        work, tmp_path, failure_timeout_ms=PATIENT_MS, nodes=2, replicas=2, scrub_bytes_per_s=rate, scrub_rest_s=1
    )


def user_of(store: Store, tokens: TokenStore, name: str) -> UserCredential:
    tokens.create_user(name, int(time.time()))
    return UserCredential(tokens.issue(name, int(time.time())))


def test_a_user_may_do_what_his_capabilities_say(tmp_path: Path) -> None:
    tokens = TokenStore(str(tmp_path / "tokens"))

    async def work(store: Store) -> None:
        await store.write(FIRST, 0, b"shared")
        version, member = store.chain.version, store.serving()[0]
        address = next(one.address for one in store.routing.nodes if one.id == member.node)
        credentials = [user_of(store, tokens, name) for name in ("ann", "bob")]
        ann, bob = [await DataConnection.connect(address, one) for one in credentials]
        update = Update(1, version, store.client, 3, 1, ChunkId(1, 3), Change(Operation.TRUNCATE, 0, 5))
        stat = Look(1, version, LookKind.STAT, FIRST)

        async def may(one: DataConnection) -> list[bool]:
            """Read, stat, write."""
            read = await one.read(1, version, 1, 0, 0, 10)
            said = [await one.ask(stat), await one.ask(update)]
            refused = [isinstance(reply, Refused) and reply.refusal is Refusal.DENIED for reply in said]
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
            assert refused.refusal is Refusal.DENIED
        assert await may(bob) == [False, False, False]
        other = Update(1, version, store.client + 1, 3, 1, ChunkId(1, 3), Change(Operation.TRUNCATE, 0, 5))
        reply = await ann.ask(other)
        assert isinstance(reply, Refused)
        assert reply.refusal is Refusal.DENIED
        await ann.close()
        await bob.close()

    in_cluster(work, tmp_path, failure_timeout_ms=PATIENT_MS, nodes=2, replicas=2, tokens_file=str(tmp_path / "tokens"))


def test_a_key_that_is_revoked_takes_what_it_allowed_with_it(tmp_path: Path) -> None:
    tokens = TokenStore(str(tmp_path / "tokens"))

    async def work(store: Store) -> None:
        await store.write(FIRST, 0, b"for a while")
        version, address, secret = store.chain.version, store.routing.nodes[0].address, store.credential.secret.reveal()
        ann = user_of(store, tokens, "ann")

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

    in_cluster(work, tmp_path, failure_timeout_ms=PATIENT_MS, nodes=1, replicas=1, tokens_file=str(tmp_path / "tokens"))


async def granted(connection: DataConnection, present: data.Present) -> bool:
    return isinstance(await connection.ask(present), data.Granted)


@pytest.mark.slow
def test_a_capability_ends_when_it_expires(tmp_path: Path) -> None:
    tokens = TokenStore(str(tmp_path / "tokens"))

    async def work(store: Store) -> None:
        await store.write(FIRST, 0, b"for a moment")
        version = store.chain.version
        connection = await DataConnection.connect(store.routing.nodes[0].address, user_of(store, tokens, "ann"))
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
            Look(1, version, LookKind.STAT, FIRST),
            Update(1, version, store.client, 3, 1, FIRST, Change(Operation.TRUNCATE, 0, 5)),
            data.Present(token),
        ):
            refused = await connection.ask(ask)
            assert isinstance(refused, Refused)
            assert refused.refusal is Refusal.DENIED
        await connection.close()

    in_cluster(work, tmp_path, failure_timeout_ms=PATIENT_MS, nodes=1, replicas=1, tokens_file=str(tmp_path / "tokens"))


NONSENSE = {
    "other protocol": b"GET / HTTP/1.1\r\n\r\n" * 10,
    "checksum": frame(MESSAGE, data.encode(data.Between(1, 2, Behind(1, 1))))[:-1] + b"\0",
    "kind": frame(77, b"x"),
    "body": frame(MESSAGE, b"\x91" * 1000),
    "for peers alone": frame(MESSAGE, data.encode(data.Between(1, 2, Behind(1, 1)))),
    "for clients alone": frame(MESSAGE, data.encode(data.Told(1, Missing()))),
    "too long": frame(MESSAGE, b"", payload_bytes=65 * MIB),
    "half a read": frame(READS, bytes(39)),
}


def test_nonsense_ends_its_connection_and_no_other(tmp_path: Path) -> None:
    tokens = TokenStore(str(tmp_path / "tokens"))

    async def work(store: Store) -> None:
        await store.write(FIRST, 0, b"unharmed")
        member = store.serving()[0]
        address = next(one.address for one in store.routing.nodes if one.id == member.node)
        ann, eve = [user_of(store, tokens, name) for name in ("ann", "eve")]
        good = await DataConnection.connect(address, ann)
        for what, sent in NONSENSE.items():
            bad = await DataConnection.connect(address, eve)
            bad.send(sent)
            try:
                await asyncio.wait_for(bad.closed(), 30)
            except TimeoutError:
                pytest.fail(f"{what} is taken")
            await bad.close()
        denied = await good.ask(Look(1, store.chain.version, LookKind.STAT, FIRST))
        assert isinstance(denied, Refused)
        await good.close()
        await store.write(FIRST, 0, b"UN")
        await store.check()
        assert [one.state for one in store.chain.members] == [TargetState.SERVING]

    in_cluster(work, tmp_path, failure_timeout_ms=PATIENT_MS, nodes=1, replicas=1, tokens_file=str(tmp_path / "tokens"))


async def write_and_read(store: Store, number: int, stop: asyncio.Event) -> int:
    """A client that checks each of its writes at some replica. Returns how many reads said something."""
    chance, seen = random.Random(number), 0
    while not stop.is_set():
        chunk = ChunkId(50 + number, chance.randrange(6))
        if chance.random() < 0.1 and chunk in store.known:
            await store.remove(chunk)
        else:
            await store.write(chunk, chance.choice([0, 0, 100, 70_000]), os.urandom(chance.choice([10, 4096, 300_000])))
        with contextlib.suppress(FireflyerError, TimeoutError):
            await store.look()
            connection = await store.connection(chance.choice(store.serving()).node)
            answer = await connection.read(1, store.chain.version, chunk.file, chunk.index, 0, MIB, timeout_s=2)
            if answer.status in (FOUND, MISSING):
                found = answer.data if answer.status == FOUND else None
                assert found == store.known.get(chunk), f"{chunk} was read as {len(found or b'')} bytes"
                seen += 1
    return seen


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(2))
def test_whatever_happens_to_processes_every_client_reads_what_it_wrote(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)

    async def strike(store: Store) -> None:
        victims = chance.sample(list(store.nodes.values()), chance.choice([1, 1, 1, 2, 3]))
        how = chance.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP])
        for victim in victims:
            victim.kill(how)
        away_s = chance.random() * 3
        if how == signal.SIGSTOP:
            await asyncio.sleep(away_s)
            for victim in victims:
                victim.kill(signal.SIGCONT)
            return
        for victim in victims:
            assert await victim.ended() == (0 if how == signal.SIGTERM else -how), victim.log()
        await asyncio.sleep(away_s)
        for victim in victims:
            await victim.start()

    async def work(store: Store) -> None:
        stop = asyncio.Event()
        clients = [asyncio.get_running_loop().create_task(write_and_read(store, one, stop)) for one in range(4)]
        for _ in range(8):
            await strike(store)
            await store.until_serving(3)
        stop.set()
        assert min(await asyncio.gather(*clients)) > 0
        await store.check()

    in_cluster(work, tmp_path, limit_s=240)
